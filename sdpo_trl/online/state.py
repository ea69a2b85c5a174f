"""Where a conversation stands, as a function of the events that made it.

A session changes its state by events alone, and writes each one to its journal first: the state that is read back from
a journal is the one that was lost, by construction. Knows: records. Deliberately does not know: models, files.
Standard library only.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .records import Attempt, Call, Message, Observation, Reply

Event = dict[str, Any]

_UNKNOWN = "Whether it did its work is not known: look before you go on."
CUT_OFF = f"Error: the session ended while this tool ran. {_UNKNOWN}"
INTERRUPTED = f"Error: this call was interrupted. {_UNKNOWN}"


@dataclass
class Episode:
    """The denied answers to one prompt."""

    prompt: list[Message]
    attempts: list[Attempt] = field(default_factory=list)


@dataclass
class Approved:
    """The last turn that joined the conversation: where it begins, and what its tools replied; `None`: a person's."""

    start: int
    reply: Reply | None
    observations: list[Observation] = field(default_factory=list)


@dataclass
class SessionState:
    """
    Args:
        messages (`list[dict]`): The conversation.
        start (`list[dict]`): What it began with.
        pending ([`Reply`], *optional*): Waits to be approved or denied.
        candidates (`list[Reply]`): Were drawn to be ranked.
        episode ([`Episode`], *optional*): The last prompt of which an answer was denied.
        approved ([`Approved`], *optional*): The last approved turn, while nothing followed it.
        running (`list[Call]`): Approved calls without an observation yet.
    """

    messages: list[Message] = field(default_factory=list)
    start: list[Message] = field(default_factory=list)
    pending: Reply | None = None
    candidates: list[Reply] = field(default_factory=list)
    episode: Episode | None = None
    approved: Approved | None = None
    running: list[Call] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        """Take one event in; those of updates change nothing here."""
        change = getattr(self, f"_{event['event']}", None)
        if change is not None:
            change(event)

    # One method per event, named after it

    def _opened(self, event: Event) -> None:
        vars(self).update(vars(SessionState.of(event["state"])))

    def _cleared(self, event: Event) -> None:
        self.messages = copy.deepcopy(self.start)
        self.pending = self.episode = self.approved = None
        self.candidates, self.running = [], []

    def _said(self, event: Event) -> None:
        self.messages.append(event["message"])
        self.approved, self.candidates = None, []

    def _replied(self, event: Event) -> None:
        self.pending = Reply.of(event["reply"])
        self.candidates = []

    def _offered(self, event: Event) -> None:
        self.candidates = [Reply.of(reply) for reply in event["replies"]]
        self.pending = None

    def _chosen(self, event: Event) -> None:
        for attempt in event.get("denied", []):
            self._denied({"approved": False, "attempt": attempt})
        self.pending = None if event["index"] is None else self.candidates[event["index"]]
        self.candidates = []

    def _approved(self, event: Event) -> None:
        self.approved = Approved(len(self.messages), event["reply"] and Reply.of(event["reply"]))
        self.messages.append(event["message"])
        self.running = [Call(**call) for call in event["calls"]]
        self.pending, self.candidates = None, []

    def _observed(self, event: Event) -> None:
        observation = Observation(Call(**event["call"]), event["text"], event["ok"])
        self.approved.observations.append(observation)
        self.messages.append(observation.message)
        self.running = self.running[1:]

    def _shown(self, event: Event) -> None:
        """An approved answer is a demonstration for those denied before it."""
        prompt = self.messages[: self.approved.start]
        if self.episode is not None and self.episode.prompt == prompt:
            self.episode.attempts = [attempt.shown(event["solution"]) for attempt in self.episode.attempts]

    def _denied(self, event: Event) -> None:
        if event["approved"]:
            del self.messages[self.approved.start :]
            self.approved, self.running, self.candidates = None, [], []
        if self.episode is None or self.episode.prompt != self.messages:
            self.episode = Episode(copy.deepcopy(self.messages))
        self.episode.attempts.append(Attempt.of(event["attempt"]))
        self.pending = None

    def _dropped(self, event: Event) -> None:
        first, last = unit_of(self.messages, event["turn"])
        del self.messages[first:last]
        self.approved = None
        self.pending, self.candidates = None, []

    def record(self) -> dict[str, Any]:
        """As JSON keeps it."""
        approved = self.approved
        return {
            "messages": self.messages,
            "start": self.start,
            "pending": self.pending and self.pending.record(),
            "candidates": [reply.record() for reply in self.candidates],
            "episode": self.episode
            and {"prompt": self.episode.prompt, "attempts": [a.record() for a in self.episode.attempts]},
            "approved": approved
            and {
                "start": approved.start,
                "reply": approved.reply and approved.reply.record(),
                "observations": [vars(o) | {"call": vars(o.call)} for o in approved.observations],
            },
            "running": [vars(call) for call in self.running],
        }

    @classmethod
    def of(cls, record: dict[str, Any]) -> "SessionState":
        """The inverse of [`SessionState.record`]."""
        episode, approved = record["episode"], record["approved"]
        return cls(
            record["messages"],
            record["start"],
            record["pending"] and Reply.of(record["pending"]),
            [Reply.of(reply) for reply in record["candidates"]],
            episode and Episode(episode["prompt"], [Attempt.of(attempt) for attempt in episode["attempts"]]),
            approved
            and Approved(
                approved["start"],
                approved["reply"] and Reply.of(approved["reply"]),
                [Observation(**{**o, "call": Call(**o["call"])}) for o in approved["observations"]],
            ),
            [Call(**call) for call in record["running"]],
        )


def unit_of(messages: Sequence[Message], turn: int) -> tuple[int, int]:
    """
    The turns that can only go together, as a range: a tool's reply with the call it answers.

    Raises:
        `IndexError`: there is no such turn.
    """
    if not 0 <= turn < len(messages):
        raise IndexError(f"There is no turn {turn}: the conversation has {len(messages)}, counted from 0.")
    first = turn
    while first > 0 and messages[first]["role"] == "tool":
        first -= 1
    last = first + 1
    while last < len(messages) and messages[last]["role"] == "tool":
        last += 1
    return first, last
