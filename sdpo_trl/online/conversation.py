"""The talking half of a session: turns, answers, approval and denial.

Knows: events, calls, sampling. Deliberately does not know: updates, folders.
"""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..batches import position_limit
from ..reprompt import Hint, reprompt_text, well_formed
from ..tool_calls import INVALID_CALL
from .calls import Dialect, ToolSet, calls_of
from .context import check_room
from .generation import sample
from .journal import Journal
from .records import Attempt, Call, Message, Observation, Reply, SessionError
from .state import INTERRUPTED, Event, SessionState, unit_of
from .trainer import OnlineTrainer

Answer = str | Call | Sequence[Call]


class Conversation:
    """
    The part of [`OnlineSession`] that talks; its docstring says what the methods are for.

    Subclasses set `trainer`, `_dialect`, `_tools`, `_state`, `_journal` and `version`.
    """

    trainer: OnlineTrainer
    _dialect: Dialect
    _tools: ToolSet
    _state: SessionState
    _journal: Journal | None

    @property
    def version(self) -> int:
        """Of the weights."""
        raise NotImplementedError

    # What there is

    @property
    def messages(self) -> list[Message]:
        """A copy of the conversation."""
        return copy.deepcopy(self._state.messages)

    @property
    def tools(self) -> dict[str, Callable[..., Any]]:
        """The tools by name."""
        return dict(self._tools.functions)

    @property
    def pending(self) -> Reply | None:
        """The answer that waits to be approved or denied."""
        return self._state.pending

    @property
    def candidates(self) -> list[Reply]:
        """The answers that wait to be ranked."""
        return list(self._state.candidates)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The denied answers of the open episode: what [`OnlineSession.learn`] learns from."""
        return () if self._state.episode is None else tuple(self._state.episode.attempts)

    @property
    def context(self) -> tuple[int, int | None]:
        """Tokens of the conversation's prompt, and how many it may have (`None`: the model sets no limit)."""
        limit = position_limit(self.trainer.model.config)
        used = len(self._prompt_ids(self._state.messages)) if self._state.messages else 0
        return used, None if limit is None else limit - self._reserved

    # Turns

    def say(self, text: str) -> None:
        """Add a user turn."""
        self._require_nothing_pending("say something")
        self._record({"event": "said", "message": {"role": "user", "content": _text("text", text)}})

    def respond(self, on_text: Callable[[str], None] | None = None) -> Reply:
        """
        Let the model answer; the answer waits in `pending`.

        Args:
            on_text (`Callable`, *optional*): Gets pieces of the text as they are sampled.

        Raises:
            [`SessionError`]: an answer is pending, or there is nothing to answer.
            [`ContextTooLong`]: names the turn to drop.
        """
        self._require_nothing_pending("answer again")
        reply = self._sampled(1, on_text)[0]
        self._record({"event": "replied", "reply": reply.record()})
        return reply

    def retry(self, on_text: Callable[[str], None] | None = None) -> Reply:
        """Answer the prompt whose answer was denied again, with the weights of now."""
        episode = self._state.episode
        if episode is None or episode.prompt != self._state.messages:
            raise SessionError("There is nothing to try again: deny an answer first.")
        return self.respond(on_text)

    def approve(self) -> list[Observation]:
        """
        The pending answer joins the conversation, its tools run, and what they reply joins it too.

        Returns:
            `list[Observation]`: one per call, empty for plain text.
        """
        reply = self._require_pending()
        self._record(
            {"event": "approved", "reply": reply.record(), "message": reply.message, "calls": _plain(reply.calls)}
        )
        if reply.error is not None and not reply.calls:
            unread = Observation(Call(INVALID_CALL, {}), f"Error: {reply.error}", ok=False)
            self._record({"event": "observed", **_plain([unread])[0]})
            return [unread]
        observations = self._run(reply.calls)
        if reply.error is None and all(observation.ok for observation in observations):
            self._record({"event": "shown", "solution": reply.text})
        return observations

    def approve_edited(self, answer: Answer) -> list[Observation]:
        """
        Correct the pending answer: the corrected one joins the conversation and runs, and is the demonstration for the
        pending one, which is denied. [`OnlineSession.learn`] then learns it.

        Args:
            answer (`str`, [`Call`] or `Sequence[Call]`): The text or the calls that should have been.

        Raises:
            `ValueError`: there is no such tool, or nothing is said.
            `TypeError`: it is neither text nor calls with JSON values.
        """
        reply, before = self._require_pending(), self._state.messages
        calls = calls_of(answer)
        fault = self._tools.fault(calls)
        if fault is not None:
            raise ValueError(fault)
        message = self._dialect.message(answer)
        attempt = Attempt(reply, None, self._dialect.text(before, message), reply.error)
        if not calls and not message["content"].strip():
            raise ValueError("Nothing is said in the place of the pending answer: give a text or a call.")
        self._record({"event": "denied", "approved": False, "attempt": attempt.record()})
        self._record({"event": "approved", "reply": None, "message": message, "calls": _plain(calls)})
        return self._run(calls)

    def deny(
        self, feedback: str | None = None, solution: Answer | None = None, environment_feedback: str | None = None
    ) -> Attempt:
        """
        Deny the pending answer; or, where none is pending, the last approved one, which leaves the conversation
        together with what its tools replied (what they did is not undone).

        What was wrong with the answer by itself, and the output of its failed tools, is added to the correction.

        Args:
            feedback (`str`, *optional*): What was wrong.
            solution (`str`, [`Call`] or `Sequence[Call]`, *optional*): A better answer to the same prompt.
            environment_feedback (`str`, *optional*): What else the surroundings said.

        Raises:
            [`SessionError`]: there is nothing to deny.
            `ValueError`: nothing is said about it.
            `TypeError`: what is said is no text.
        """
        feedback = _text("feedback", feedback, optional=True)
        reply, told = self._state.pending, [_text("environment_feedback", environment_feedback, optional=True)]
        approved = self._state.approved
        if reply is None and approved is not None:
            reply = approved.reply
            if reply is None:
                raise SessionError("The last answer is the one that you wrote yourself; it is not the model's.")
            told += [f"[{o.call.name} replied] {o.text}" for o in approved.observations if not o.ok]
        if reply is None:
            raise SessionError("There is nothing to deny: let the model answer first (`respond`).")
        if reply is self._state.pending:
            told.append(reply.error)
        prompt = self._state.messages if reply is self._state.pending else self._state.messages[: approved.start]
        if solution is not None:
            calls = calls_of(solution)
            message = self._dialect.message(solution)
            solution = self._dialect.text(prompt, message) if calls else message["content"]
        attempt = Attempt(reply, feedback, solution, "\n\n".join(part for part in told if part) or None)
        _require_told(attempt)
        self._record({"event": "denied", "approved": reply is not self._state.pending, "attempt": attempt.record()})
        return attempt

    # Candidates

    def sample_candidates(self, count: int) -> list[Reply]:
        """Draw several answers to the same prompt, to be ranked; none of them is pending."""
        self._require_nothing_pending("draw candidates")
        if count < 1:
            raise ValueError(f"Draw at least one candidate, not {count}.")
        replies = self._sampled(count)
        self._record({"event": "offered", "replies": [reply.record() for reply in replies]})
        return replies

    def rank(
        self, right: Sequence[int], wrong: Sequence[int], feedback: "str | Mapping[int, str] | None" = None
    ) -> Reply | None:
        """
        Say which candidates are right and which are wrong, by their index; others count as neither.

        The wrong ones are denied, with the first right one as their demonstration, which becomes the pending answer.

        Args:
            right (`Sequence[int]`): The best first.
            wrong (`Sequence[int]`): In any order.
            feedback (`str` or `Mapping[int, str]`, *optional*): What was wrong, with all of them or with each.

        Returns:
            [`Reply`], *optional*: the pending answer, `None` if none was right.
        """
        candidates = self._state.candidates
        if not candidates:
            raise SessionError("There are no candidates: draw some first (`sample_candidates`).")
        right, wrong = _places(right), _places(wrong)
        named = [*right, *wrong]
        if len(set(named)) < len(named) or not all(0 <= index < len(candidates) for index in named):
            raise ValueError(f"Name each of the candidates 0 to {len(candidates) - 1} once at most, got {named}.")
        if isinstance(feedback, Mapping):
            feedback = dict(zip(_places(feedback), feedback.values(), strict=True))
            if not feedback.keys() <= set(wrong):
                others = sorted(feedback.keys() - set(wrong))
                raise ValueError(f"`feedback` names candidates that are not among the wrong ones: {others}.")
        solution = candidates[right[0]].text if right else None
        attempts = []
        for index in wrong:
            text = feedback.get(index) if isinstance(feedback, dict) else feedback
            text = _text("feedback", text, optional=True)
            attempts.append(Attempt(candidates[index], text, solution, candidates[index].error))
            _require_told(attempts[-1])
        denied = [attempt.record() for attempt in attempts]
        self._record({"event": "chosen", "index": right[0] if right else None, "denied": denied})
        return self._state.pending

    # The conversation as a whole

    def drop(self, turn: int) -> None:
        """Take a turn out of the conversation, a call together with what its tools replied. Nothing may be pending."""
        self._require_nothing_pending("drop a turn")
        unit_of(self._state.messages, turn)
        self._record({"event": "dropped", "turn": turn})

    def clear(self) -> None:
        """Begin the conversation anew; what was learned stays."""
        self._record({"event": "cleared"})

    # Inside

    @property
    def _reserved(self) -> int:
        """Tokens that a prompt leaves free: for the answer, and for the turn that the teacher reads before it."""
        args = self.trainer.args
        frame = reprompt_text("", Hint("-", "-"), args.templates)
        turn = [{"role": "user", "content": frame}]
        return args.max_completion_length + len(self.trainer.prompt_ids(turn, []))

    def _prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise SessionError("There is nothing to answer: say something first (`say`).")
        return self.trainer.prompt_ids(self._dialect.view(messages), self._dialect.schemas)

    def _sampled(self, count: int, on_text: Callable[[str], None] | None = None) -> list[Reply]:
        messages = self._state.messages
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise SessionError("There is nothing to answer: say something first (`say`).")
        ids = self._prompt_ids(messages)
        limit = position_limit(self.trainer.model.config)

        def tokens(text: str) -> int:
            return len(self.trainer._tokenizer(text, add_special_tokens=False)["input_ids"])

        check_room(messages, len(ids), limit, self._reserved, tokens)
        return [self._reply(ids, *answer) for answer in sample(self.trainer, ids, count, on_text)]

    def _reply(self, prompt_ids: list[int], ids: list[int], logprobs: list[float]) -> Reply:
        text, message, calls, error = self._dialect.read(ids, prompt_ids)
        truncated = ids[-1] not in self.trainer.eos_token_ids
        if truncated and error is None:
            limit = self.trainer.args.max_completion_length
            error = f"The answer was cut off after {limit} tokens."
        return Reply(
            text, message, calls, error, tuple(ids), tuple(prompt_ids), tuple(logprobs), truncated, self.version
        )

    def _run(self, calls: Sequence[Call]) -> list[Observation]:
        observations = []
        try:
            for call in calls:
                observations.append(self._tools.run(call))
                self._record({"event": "observed", **_plain(observations[-1:])[0]})
        except BaseException:  # say, a keyboard interrupt: no call may stand there without a reply
            self._settle(INTERRUPTED)
            raise
        return observations

    def _settle(self, text: str) -> None:
        """Give the calls that have no reply one that says so."""
        for call in list(self._state.running):
            self._record({"event": "observed", "call": vars(call), "text": text, "ok": False})

    def _record(self, event: Event) -> None:
        """The one way in which the state changes: on the disk first, then here."""
        if self._journal is not None:
            self._journal.write(event)
        self._state.apply(copy.deepcopy(event))

    def _require_pending(self) -> Reply:
        if self._state.pending is None:
            raise SessionError("No answer is pending: let the model answer first (`respond`).")
        return self._state.pending

    def _require_nothing_pending(self, wish: str) -> None:
        if self._state.pending is not None:
            raise SessionError(f"An answer is pending: approve or deny it before you {wish}.")


def _plain(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Calls or observations as JSON keeps them."""
    return [
        {**vars(record), "call": vars(record.call)} if isinstance(record, Observation) else dict(vars(record))
        for record in records
    ]


def _text(name: str, value: Any, optional: bool = False) -> Any:
    """A text as it can be kept and read by a tokenizer."""
    if not isinstance(value, str) and not (optional and value is None):
        raise TypeError(f"`{name}` is text, got {type(value).__name__}.")
    return well_formed(value)


def _places(values: Any) -> list[int]:
    """Whole numbers, also those of an array."""
    try:
        return [operator.index(value) for value in values]
    except TypeError as error:
        raise TypeError(f"Name each candidate by its place, a whole number from 0, got {values!r}.") from error


def _require_told(attempt: Attempt) -> None:
    if attempt.told is None and not (attempt.solution and attempt.solution.strip()):
        raise ValueError(
            "Nothing is said about the denied answer, so nothing could be learned from it: give `feedback`, a "
            "`solution`, or `environment_feedback`."
        )
