"""Odd tools, odd texts, odd orders, full disks: what a session makes of what nobody meant to give it."""

import asyncio

import pytest
import talk

from sdpo_trl.online import Call
from sdpo_trl.online.calls import ToolSet

CALL = '<tool_call>{"name": "tool", "arguments": {}}</tool_call>$'


def begun(tmp_path, monkeypatch, *answers: str, **given):
    session = talk.session(tmp_path, **given)
    left = talk.answering(monkeypatch, *answers)
    session.say("write hello")
    return session, left


# Tools


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


class Shapeless:
    def __str__(self):
        raise RuntimeError("it has no text")


def _endless():
    made = []
    made.append(made)
    return made


def _raising(error):
    def tool() -> str:
        """Raise."""
        raise error

    return tool


def _giving(value):
    def tool() -> str:
        """Give."""
        return value

    tool.__name__ = "tool"
    return tool


@pytest.mark.parametrize(
    ("tool", "ok", "said"),
    [
        (_raising(ValueError()), False, "Error: ValueError"),
        (_raising(Silent()), False, "Error: Silent"),
        (_raising(SystemExit(3)), False, "Error: the tool ended with status 3"),
        (_giving({(1, 2): 3}), True, "{(1, 2): 3}"),
        (_giving(_endless()), True, "[[...]]"),
        (_giving(Shapeless()), False, "Error: what the tool gave has no text: it has no text"),
        (_giving("a\udc80b"), True, "a\\udc80b"),
        (_giving(None), True, "null"),
    ],
)
def test_whatever_a_tool_gives_or_raises_is_a_reply(tool, ok, said):
    reply = ToolSet([tool]).run(Call("tool", {}))
    assert (reply.ok, reply.text) == (ok, said)


def test_an_async_tool_runs_where_a_loop_runs_already():
    async def tool() -> str:
        """Wait."""
        await asyncio.sleep(0)
        return "waited"

    async def notebook():
        return ToolSet([tool]).run(Call("tool", {}))

    assert asyncio.run(notebook()).text == ToolSet([tool]).run(Call("tool", {})).text == "waited"


def test_a_tool_s_reply_that_is_no_text_ends_no_session(tmp_path, monkeypatch):
    session, _ = begun(tmp_path, monkeypatch, CALL, "so$", session_tools=[_giving("a\udc80b")])
    session.respond()
    session.approve()
    assert session.respond().text == "so"
