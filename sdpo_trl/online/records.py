"""What an online session speaks in: replies, calls, observations, denied attempts, what an update changed.

Knows: plain values, each of which survives a journal line. Deliberately does not know: models, trainers, terminals.
Standard library only.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

Message = dict[str, Any]


class SessionError(RuntimeError):
    """Something was asked for that makes no sense now: approving where nothing is pending, undoing where nothing was
    learned, ... The text says what to do first."""


class ContextTooLong(ValueError):
    """
    The conversation leaves no room for an answer within the model's positions.

    Args:
        message (`str`): Names the turn to drop.
        turn (`int`, *optional*): Its index in `session.messages`, for `session.drop(turn)`; `None` where dropping
            turns does not help (the tools' descriptions alone are too long).
        tokens (`int`): Tokens of the prompt.
        limit (`int`): Tokens that the prompt may have.
    """

    def __init__(self, message: str, turn: int | None, tokens: int, limit: int) -> None:
        super().__init__(message)
        self.turn = turn
        self.tokens = tokens
        self.limit = limit


@dataclass(frozen=True)
class Call:
    """
    A tool call.

    Args:
        name (`str`): The tool's.
        arguments (`dict`): By name, JSON values.
    """

    name: str
    arguments: dict[str, Any]

    @property
    def function(self) -> dict[str, Any]:
        """As chat templates want it in a message's `tool_calls`."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Reply:
    """
    What the model answered.

    Args:
        text (`str`): As it was written, special tokens left out; with a call, the call's text too.
        message (`dict`): The assistant's turn, as it would join the conversation.
        calls (`tuple[Call, ...]`): The tool calls in it, in order; empty for plain text, and where `error` says why
            they could not be read.
        error (`str`, *optional*): What is wrong with the answer by itself: a call that cannot be read, a tool that
            does not exist. Denying such a reply adds this text to the correction.
        ids (`tuple[int, ...]`): The sampled tokens, end token included where it was sampled.
        prompt_ids (`tuple[int, ...]`): What the model read.
        logprobs (`tuple[float, ...]`): Of each sampled token at the sampling temperature, by the weights that sampled.
        truncated (`bool`): Whether it was cut at `max_completion_length`.
        version (`int`): Which weights sampled it; counts updates, and never comes back to an earlier value.
    """

    text: str
    message: Message
    calls: tuple[Call, ...]
    error: str | None
    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    truncated: bool
    version: int

    @property
    def call(self) -> Call | None:
        """The first tool call, `None` where there is none."""
        return self.calls[0] if self.calls else None

    def record(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Reply":
        """The inverse of [`Reply.record`]."""
        lists = {name: tuple(record[name]) for name in ("ids", "prompt_ids", "logprobs")}
        return cls(**{**record, **lists, "calls": tuple(Call(**call) for call in record["calls"])})


@dataclass(frozen=True)
class Observation:
    """
    What a tool replied.

    Args:
        call ([`Call`]): What was run.
        text (`str`): What the model reads.
        ok (`bool`): Whether the tool did its work (it did not raise).
    """

    call: Call
    text: str
    ok: bool

    @property
    def message(self) -> Message:
        """The turn that joined the conversation."""
        return {"role": "tool", "name": self.call.name, "content": self.text}


@dataclass(frozen=True)
class Attempt:
    """
    A denied answer and what its teacher is told.

    Args:
        reply ([`Reply`]): The answer.
        feedback (`str`, *optional*): The person's correction.
        solution (`str`, *optional*): A better answer to the same prompt.
        environment_feedback (`str`, *optional*): What tools said about it.
    """

    reply: Reply
    feedback: str | None = None
    solution: str | None = None
    environment_feedback: str | None = None

    @property
    def told(self) -> str | None:
        """The feedback of all sources, one per paragraph."""
        parts = [part for part in (self.feedback, self.environment_feedback) if part and part.strip()]
        return "\n\n".join(parts) or None

    def shown(self, solution: str) -> "Attempt":
        """The same attempt with a demonstration, if it had none."""
        return self if self.solution and self.solution.strip() else replace(self, solution=solution)

    def record(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return {**asdict(self), "reply": self.reply.record()}

    @classmethod
    def of(cls, record: dict[str, Any]) -> "Attempt":
        """The inverse of [`Attempt.record`]."""
        return cls(**{**record, "reply": Reply.of(record["reply"])})


@dataclass(frozen=True)
class Progress:
    """
    Where an update stands.

    Args:
        stage (`str`): `"journal"`, `"teacher"`, `"student"`, `"step"` or `"done"`: what has just been finished.
        done (`int`): Stages that are finished, 1 to `total`.
        total (`int`): All stages.
    """

    stage: str
    done: int
    total: int = 5


@dataclass(frozen=True)
class TokenChange:
    """
    One token of a denied answer, and what the last update did to it.

    Args:
        text (`str`): The token, decoded by itself (special tokens too).
        before (`float`): Its log-probability by the model before the update, at the sampling temperature.
        teacher (`float`): By the teacher, who read the correction. Well below `before`: the correction speaks against
            this token.
        after (`float`): By the model as it is now.
        divergence (`float`): Of the two next-token distributions here before the update, in nats (what was descended).
        wanted (`str`): The token that the teacher thought likeliest here.
    """

    text: str
    before: float
    teacher: float
    after: float
    divergence: float
    wanted: str


@dataclass(frozen=True)
class AttemptChange:
    """
    What the last update changed along one denied answer.

    Args:
        attempt ([`Attempt`]): The answer and its correction.
        tokens (`tuple[TokenChange, ...]`): Those that were distilled, in order.
    """

    attempt: Attempt
    tokens: tuple[TokenChange, ...]
