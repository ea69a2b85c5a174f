"""The agents' desk: what both examples know of questions, conversations and measuring.

A question such as `rome in F times 2` needs the temperature in Rome, then `convert`, then `calculate`, and its answer
is what the last one replied.
"""

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_tools import (
    BY_NAME,
    CELSIUS,
    OPERATIONS,
    UNITS,
    Call,
    compute,
    look_up,
    number_of,
    to_unit,
)

CLEAR_REFS = Path("/proc/self/clear_refs")

# Options of both examples' trainers.
DEFAULTS = {
    "per_device_train_batch_size": 32, "per_device_eval_batch_size": 128, "num_generations_eval": 1,
    "max_tool_calling_iterations": 5, "max_completion_length": 110,  # the longest right answer has 60, with replies
    "gradient_checkpointing": False, "use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none",
    "logging_steps": 1, "disable_tqdm": True,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A question and the calls that answer it, one tuple per turn; the answer is what the last call replied."""

    question: str
    kind: str
    turns: tuple[tuple[Call, ...], ...]
    answer: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "answer", self.turns[-1][-1].run())


def chain(city: str, unit: str, operation: str = "", look_up: Callable[[str], Call] = look_up) -> Task:
    """A city's temperature in a unit, and, with an `operation` such as `*2`, what it makes of the number."""
    found = look_up(city)
    converted = to_unit(found.run(), unit)
    words = [city, "in", unit]
    turns = [(found,), (converted,)]
    if operation:
        words += [OPERATIONS[operation[0]], operation[1:]]
        turns.append((compute(number_of(converted.run()) + operation),))
    return Task(" ".join(words), "three steps" if operation else "two steps", tuple(turns))


def is_right(completion: Sequence[dict[str, Any]], answer: str) -> bool:
    """Whether a rollout ends in the answer; a unit may be left out or stand behind a space, the number not."""
    last = completion[-1] if completion else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return False
    text = (last.get("content") or "").strip().replace(" ", "")
    return text in (answer, number_of(answer))


def right_answer(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """The reward: 1 if the rollout ends in the answer."""
    return [float(is_right(*row)) for row in zip(completions, answer, strict=True)]


# Conversations


@dataclass
class Conversation:
    """Messages, and which of the assistant's turns are slips, which nothing is learned from."""

    messages: list[dict[str, Any]]
    slips: set[int] = field(default_factory=set)
    turns: int = 0

    def say(
        self,
        calls: Sequence[Call] = (),
        text: str = "",
        slip: bool = False,
        tools: Mapping[str, Callable[..., str]] = BY_NAME,
    ) -> str:
        """One turn of the assistant and the replies to it; returns the last reply."""
        calls_said = {"tool_calls": [call.message for call in calls]} if calls else {}
        self.messages.append({"role": "assistant", "content": text, **calls_said})
        self.slips |= {self.turns} if slip else set()
        self.turns += 1
        replies = [call.run(tools) for call in calls]
        self.messages += [
            {"role": "tool", "name": call.name, "content": reply} for call, reply in zip(calls, replies, strict=True)
        ]
        return replies[-1] if replies else text


def wrong_call(rng: random.Random, seen: str, look_up: Callable[[str], Call] = look_up) -> Call:
    """A call that somebody might make by mistake, on the quantity `seen` last."""
    quantity = seen if re.fullmatch(r"\d+[A-Za-z]+", seen) else f"{rng.randint(1, 40)}C"
    return rng.choice(
        [
            look_up(rng.choice(list(CELSIUS))),
            look_up(rng.choice(list(UNITS))),
            to_unit(quantity, rng.choice([*UNITS, *CELSIUS])),
            to_unit(number_of(quantity), rng.choice(list(UNITS))),
            compute(f"{number_of(quantity)}{rng.choice(list(OPERATIONS))}{rng.randint(1, 9)}"),
            compute(quantity),
        ]
    )


# Measuring


def summary(metrics: dict[str, float], rewards: Sequence[float]) -> dict[str, float | None]:
    """What all rewards and `SDPOTrainer.evaluate()` say about rollouts with tools; no `good_calls` without a call."""
    calls, failures = metrics["eval_sdpo/tool_calls"], metrics["eval_sdpo/tool_failures"]
    return {
        "accuracy": round(sum(rewards) / len(rewards), 4),
        "good_calls": round((calls - failures) / calls, 4) if calls else None,
        "truncated": round(metrics["eval_sdpo/truncated_share"], 4),
        "turns": round(metrics["eval_sdpo/turns"], 2),
        "tokens": round(metrics["eval_sdpo/assistant_tokens"], 2),
    }


class Phase:
    """The seconds of a part of the program, and its peak of resident memory in MiB where Linux counts it anew."""

    seconds = 0.0
    peak_mib: int | None = None

    def __enter__(self) -> "Phase":
        self._start = time.perf_counter()
        if CLEAR_REFS.exists():
            CLEAR_REFS.write_text("5")
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = round(time.perf_counter() - self._start, 1)
        if CLEAR_REFS.exists():
            self.peak_mib = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024


COLUMNS = {
    "accuracy": "final answers right", "good_calls": "tool calls that succeeded", "truncated": "truncated",
    "known": "known words", "told": "when told", "tokens_trained": "tokens trained", "seconds": "s", "peak_mib": "MiB",
}  # fmt: skip


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) and value <= 1 else f"{value:,.0f}"


def markdown(table: dict[str, dict[str, Any]]) -> str:
    """One row per model; a column where any model has a value for it."""
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in table.values())]
    lines = ["| | " + " | ".join(COLUMNS[name] for name in names) + " |", "| --- " * (len(names) + 1) + "|"]
    for title, row in table.items():
        cells = [_cell(row.get(name)) for name in names]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
