"""A session without a model, for tests of what a person sees and what their keys do."""

from collections.abc import Sequence
from typing import Any

from sdpo_trl.online.records import (
    Attempt,
    AttemptChange,
    Call,
    Observation,
    Progress,
    Reply,
    SessionError,
    TokenChange,
)


def reply(text: str = "", *calls: Call, error: str | None = None) -> Reply:
    message = {"role": "assistant", "content": text, "tool_calls": [call.function for call in calls]}
    return Reply(text, message, calls, error, (1,), (0,), (-0.5,), False, 0)


class FakeSession:
    """Says what it was given, in order, and keeps what was asked of it in `log`."""

    teacher = "ema"
    context = (12, 100)

    def __init__(self, replies: Sequence[Any], tools: Sequence[Any] = ()) -> None:
        self._replies = list(replies)
        self.tools = {tool.__name__: tool for tool in tools}
        self.log: list[Any] = []
        self.messages: list[dict[str, Any]] = []
        self.pending: Reply | None = None
        self.attempts: tuple[Attempt, ...] = ()
        self._last: tuple[Attempt, ...] = ()
        self.metrics: list[dict[str, float]] = []
        self.updates = 0

    def say(self, text: str) -> None:
        self.log.append(("say", text))
        self.messages.append({"role": "user", "content": text})

    def respond(self, on_text: Any = None) -> Reply:
        self.log.append("respond")
        answer = self._replies.pop(0)
        if callable(answer):
            answer = answer(on_text)
        for piece in answer.text:
            on_text(piece)
        self.pending = answer
        return answer

    def retry(self, on_text: Any = None) -> Reply:
        self.log.append("retry")
        return self.respond(on_text)

    def _run(self, calls: Sequence[Call]) -> list[Observation]:
        seen = []
        for call in calls:
            try:
                seen.append(Observation(call, str(self.tools[call.name](**call.arguments)), True))
            except Exception as error:
                seen.append(Observation(call, f"Error: {error}", False))
        self.messages += [{"role": "assistant", "content": ""}, *(one.message for one in seen)]
        return seen

    def approve(self) -> list[Observation]:
        self.log.append("approve")
        if self.pending is None:
            raise SessionError("Nothing is pending.")
        calls, self.pending = self.pending.calls, None
        return self._run(calls)

    def approve_edited(self, answer: Any) -> list[Observation]:
        self.log.append(("edited", answer))
        self.attempts = (Attempt(self.pending, solution=str(answer)),)
        self.pending = None
        return [] if isinstance(answer, str) else self._run(answer if isinstance(answer, list) else [answer])

    def deny(self, feedback: str | None = None, **more: Any) -> Attempt:
        self.log.append(("deny", feedback, more) if more else ("deny", feedback))
        if self.pending is None:
            raise SessionError("Nothing to deny.")
        told = {name: value if isinstance(value, str) else repr(value) for name, value in more.items()}
        self.attempts = (*self.attempts, Attempt(self.pending, feedback, **told))
        self.pending = None
        return self.attempts[-1]

    def learn(self, on_progress: Any = None) -> dict[str, float]:
        self.log.append("learn")
        if not self.attempts:
            raise SessionError("Nothing was denied.")
        on_progress(Progress("teacher", 2))
        self.updates += 1
        self._last = self.attempts
        self.metrics.append({"loss": 0.5, "seconds": 0.1, "grad_norm": 2.0})
        return self.metrics[-1]

    def changes(self) -> list[AttemptChange]:
        token = TokenChange("\x1b[31mwrite[red]", -0.1, -3.0, -2.5, 0.7, "edit\u202e")
        return [AttemptChange(attempt, (token,) * 3) for attempt in self._last]

    def undo(self) -> None:
        self.log.append("undo")
        if not self.updates:
            raise SessionError("There is no update to take back.")
        self.updates -= 1

    def clear(self) -> None:
        self.log.append("clear")
        self.messages, self.pending = [], None

    def drop(self, turn: int) -> None:
        self.log.append(("drop", turn))

    def save(self, folder: Any) -> None:
        self.log.append(("save", str(folder)))

    def score(self, answer: Any, messages: Any = None) -> float:
        self.log.append(("score", answer))
        return -0.6931471805599453
