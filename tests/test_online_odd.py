"""Odd tools, odd texts, odd orders, full disks: what a session makes of what nobody meant to give it."""

import asyncio
import errno
import os

import numpy as np
import pytest
import talk
import tiny

from sdpo_trl.online import Call, OnlineSession, SessionError, read_journal
from sdpo_trl.online.calls import TextDialect, ToolSet

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
        (_giving({"ort": "Köln"}), True, '{"ort": "Köln"}'),
        (_raising(asyncio.CancelledError()), False, "Error: CancelledError"),
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


# Texts


@pytest.mark.parametrize(
    ("give", "error", "message"),
    [
        (lambda session: session.deny(5), TypeError, "`feedback` is text, got int"),
        (lambda session: session.deny(environment_feedback=b"x"), TypeError, "`environment_feedback` is text"),
        (lambda session: session.deny(solution={"name": "count"}), TypeError, "an answer is text, a `Call`"),
        (lambda session: session.deny(solution="  "), ValueError, "Nothing is said"),
        (lambda session: session.deny(solution=[]), ValueError, "Nothing is said"),
        (lambda session: session.approve_edited(None), TypeError, "an answer is text, a `Call`"),
        (lambda session: session.approve_edited([]), ValueError, "Nothing is said"),
        (lambda session: session.approve_edited(" \n"), ValueError, "Nothing is said"),
        (
            lambda session: session.approve_edited(Call("write_file", {"path": "a", "text": b"x"})),
            TypeError,
            "`write_file` are no JSON",
        ),
        (lambda session: session.approve_edited(Call("count", ["x"])), TypeError, "`count` are no JSON object"),
    ],
)
def test_what_is_no_text_and_no_call_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, give, error, message
):
    session, _ = begun(tmp_path, monkeypatch, "bad$", session_journal=tmp_path / "journal.jsonl")
    reply = session.respond()
    before = (tmp_path / "journal.jsonl").read_bytes()
    with pytest.raises(error, match=message):
        give(session)
    assert session.pending == reply and not session.attempts
    assert (tmp_path / "journal.jsonl").read_bytes() == before
    session.deny("no")
    with pytest.raises(TypeError, match="`text` is text"):
        session.say(None)


def test_halves_of_characters_are_written_out(tmp_path, monkeypatch):
    session, _ = begun(tmp_path, monkeypatch, "bad$", "bad$", "good$")
    session.say("a\ud83d")
    session.respond()
    session.deny("no \ud83d", environment_feedback="\ud83d")
    assert session.learn()["sdpo/distilled_share"] == 1.0
    session.retry()
    session.approve_edited(Call("write_file", {"path": "a", "text": "\ud83d"}))
    assert session.learn()["sdpo/distilled_share"] == 1.0
    assert session.respond().text == "good" and "\\ud83d" in str(session.messages)


@pytest.mark.parametrize("depth", [100, 200_000])
def test_a_call_nested_without_end_is_an_answer_that_cannot_be_read(depth):
    tokenizer = tiny.tool_tokenizer()
    dialect = TextDialect(tokenizer, ToolSet([_giving("x")]), [tokenizer.eos_token_id], {})
    text = '<tool_call>{"name": "tool", "arguments": {"x": ' + "[" * depth + "]" * depth + "}}</tool_call>"
    monkeyed = type("Given", (), {"decode": lambda self, ids, **options: text})()
    dialect._tokenizer = monkeyed
    _, _, calls, error = dialect.read([1], [])
    assert calls == () and "could not be read" in error


# Candidates


@pytest.mark.parametrize("journal", [False, True])
def test_places_may_come_from_an_array(tmp_path, monkeypatch, journal):
    given = {"session_journal": tmp_path / "journal.jsonl"} if journal else {}
    session, _ = begun(tmp_path, monkeypatch, "a$", "b$", **given)
    replies = session.sample_candidates(2)
    worst, best = np.argsort([0.9, 0.1])[::-1][:1], np.argsort([0.9, 0.1])[:1]
    for wrong in ([0.5], "0", [None]):
        with pytest.raises(TypeError, match="whole number"):
            session.rank(wrong, [1])
    with pytest.raises(ValueError, match=r"feedback.* \[7\]"):
        session.rank([0], [1], {7: "no"})
    assert session.rank(best, worst, {worst[0]: "no"}) == replies[1] and len(session.attempts) == 1
    assert session.attempts[0].told == "no"
    session.close()
    if journal:
        again = talk.session(tmp_path, **given)
        assert again.pending == replies[1] and again.attempts == session.attempts


def test_a_ranking_is_one_line_of_the_journal(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    session, _ = begun(tmp_path, monkeypatch, "a$", "b$", "c$", session_journal=path)
    session.sample_candidates(3)
    before = len(read_journal(path))
    session.rank([2], [0, 1])
    assert len(read_journal(path)) == before + 1  # killed anywhere, it is there whole or not at all


def test_candidates_do_not_outlive_their_prompt(tmp_path, monkeypatch):
    session, _ = begun(tmp_path, monkeypatch, "ok$", "a$", "b$", "a$", "b$")
    session.respond()
    session.approve()
    session.say("and now?")
    session.sample_candidates(2)
    session.say("another question")
    with pytest.raises(SessionError, match="no candidates"):
        session.rank([0], [1])
    session.sample_candidates(2)
    session.drop(len(session.messages) - 1)
    with pytest.raises(SessionError, match="no candidates"):
        session.rank([0], [1])


def test_an_empty_conversation_has_no_tokens_and_nothing_to_score(tmp_path):
    session = talk.session(tmp_path, session_messages=[])
    assert session.context[0] == 0
    for wish in (session.next_token, lambda: session.score("x"), lambda: session.next_tokens("x")):
        with pytest.raises(SessionError, match="nothing to answer"):
            wish()


# Disks


def test_what_could_not_be_written_is_not_written_later(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    session, _ = begun(tmp_path, monkeypatch, "bad$", session_journal=path)
    before, real = path.read_bytes(), os.fsync

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        session.say("lost")
    assert path.read_bytes() == before and session.messages[-1]["content"] == "write hello"
    monkeypatch.setattr(os, "fsync", real)
    session.say("kept")
    session.close()
    again = talk.session(tmp_path, session_journal=path)
    assert again.messages == session.messages


@pytest.mark.parametrize("event", ["update", "finished"])
def test_a_full_disk_takes_an_update_back(tmp_path, monkeypatch, event):
    path = tmp_path / "journal.jsonl"
    session, _ = begun(tmp_path, monkeypatch, "bad$", session_journal=path)
    session.respond()
    session.deny("no")
    session.learn()
    weights, real, failing = tiny.trained(session.trainer.model), session._journal.write, [event, "aborted"]

    def full(given):
        if given["event"] in failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(given)

    monkeypatch.setattr(session._journal, "write", full)
    with pytest.raises(OSError, match="No space"):
        session.learn()
    tiny.assert_equal(tiny.trained(session.trainer.model), weights)
    assert session.updates == len(session.metrics) == 1 and session.can_undo
    failing.clear()
    session.learn()
    session.close()
    again = talk.session(tmp_path, session_journal=path)
    assert again.updates == 2
    tiny.assert_equal(tiny.trained(again.trainer.model), tiny.trained(session.trainer.model))


def test_a_journal_that_lost_lines_is_told(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    session, _ = begun(tmp_path, monkeypatch, CALL, session_journal=path, session_tools=[_giving("x")])
    session.respond()
    session.approve()
    session.close()
    lines = path.read_bytes().splitlines(keepends=True)
    for left, said in ((lines[1:], "first lines"), (lines[:3] + lines[4:], r"line 4 \(observed\) does not follow")):
        path.write_bytes(b"".join(left))
        with pytest.raises(ValueError, match=said):
            talk.session(tmp_path, session_journal=path, session_tools=[_giving("x")])


def test_a_journal_of_other_tokens_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    session, _ = begun(tmp_path, monkeypatch, session_journal=path)
    session.close()
    other = tiny.tool_tokenizer()
    other.add_tokens(["another"])
    with pytest.raises(ValueError, match="other tokens"):
        talk.session(tmp_path, session_journal=path, session_tokenizer=other)


def test_a_copy_that_a_person_made_beside_the_session_stays(tmp_path):
    session = talk.session(tmp_path)
    session.save(tmp_path / "saved")
    for name in ("saved.old", "saved.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    session.save(tmp_path / "saved")
    session.save(tmp_path / "saved")
    assert (tmp_path / "saved.old" / "mine").is_file() and (tmp_path / "saved.bak" / "mine").is_file()


def test_a_link_to_the_folder_stays_a_link(tmp_path):
    session = talk.session(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "saved").symlink_to(tmp_path / "disk")
    for _ in range(2):
        session.save(tmp_path / "saved")
    assert (tmp_path / "saved").is_symlink() and (tmp_path / "disk" / "session.json").is_file()
    with pytest.raises(FileExistsError, match="is a file"):
        session.save(tmp_path / "disk" / "session.json")


def test_a_closed_session_says_so(tmp_path):
    session = talk.session(tmp_path, session_journal=tmp_path / "journal.jsonl")
    session.close()
    with pytest.raises(SessionError, match="was closed"):
        session.say("x")


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b"\xff\xfe\x00", b"{}", b'{"event": "said"}'])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path, content):
    path = tmp_path / "mine"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="mine"):
        talk.session(tmp_path, session_journal=path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b'{"ev', b'{"event": "opened", "for', b"\0" * 40])
def test_a_journal_that_was_cut_off_in_its_first_line_begins_anew(tmp_path, content):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    talk.session(tmp_path, session_journal=path).close()
    assert [event["event"] for event in read_journal(path)] == ["opened"]


@pytest.mark.parametrize("messages", ["hi", [{"content": "x"}], ["hi"], [{"role": "user"}]])
def test_messages_are_turns(tmp_path, messages):
    with pytest.raises(TypeError, match="`messages` is a list of turns"):
        talk.session(tmp_path, session_messages=messages)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[:-2], "cut off: session.json"),
        (lambda text: "[]", "lacks 'state', 'updates', 'metrics', 'version'"),
        (lambda text: text.replace('"version"', '"revision"'), "lacks 'version'"),
        (lambda text: text.replace('"messages"', '"turns"'), "KeyError: 'messages'"),
    ],
)
def test_a_session_that_was_edited_by_hand_says_where(tmp_path, edit, message):
    session = talk.session(tmp_path)
    session.save(tmp_path / "saved")
    session.close()
    path = tmp_path / "saved" / "session.json"
    path.write_text(edit(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as raised:
        OnlineSession.load(
            tmp_path / "saved", tiny.build_model(max_position_embeddings=4096), args=talk.options(tmp_path)
        )
    assert "session.json" in str(raised.value)
