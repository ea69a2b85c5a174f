"""The agents' desk: questions that need one to three calls of the tools, who answers them how, and what is measured.

A question such as `rome in F times 2` needs `weather`, then `convert`, then `calculate`, and its answer is what the
last one replied; the others need one call or two, in one turn or in several.
"""

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_tools import (
    CELSIUS,
    OPERATIONS,
    SCALES,
    UNITS,
    Call,
    compute,
    look_up,
    number_of,
    to_unit,
)

SYSTEM = (
    "Use the tools for every value; never guess one. A question names a city (its temperature is asked for), perhaps "
    "a unit to convert it to, and perhaps something to calculate with the number; or it is a sum. Answer with what "
    "the last tool replied and nothing else."
)
MAX_COMPLETION_LENGTH = 110  # the longest right answer has 60 tokens, replies included
MAX_TOOL_CALLING_ITERATIONS = 5
CLEAR_REFS = Path("/proc/self/clear_refs")

# Options of both examples' trainers.
DEFAULTS = {
    "per_device_train_batch_size": 32, "per_device_eval_batch_size": 128, "num_generations_eval": 1,
    "max_completion_length": MAX_COMPLETION_LENGTH, "max_tool_calling_iterations": MAX_TOOL_CALLING_ITERATIONS,
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


def chain(city: str, unit: str, operation: str = "", question: str | None = None) -> Task:
    """A city's temperature in a unit, and, with an `operation` such as `*2`, what it makes of the number."""
    found = look_up(city)
    converted = to_unit(found.run(), unit)
    words = [city, "in", unit]
    turns = [(found,), (converted,)]
    if operation:
        words += [OPERATIONS[operation[0]], operation[1:]]
        turns.append((compute(number_of(converted.run()) + operation),))
    return Task(question or " ".join(words), "three steps" if operation else "two steps", tuple(turns))


def _both(one: str, other: str) -> Task:
    calls = look_up(one), look_up(other)
    total = compute("+".join(number_of(call.run()) for call in calls))
    return Task(f"{one} plus {other}", "two calls at once", (calls, (total,)))


def all_tasks() -> list[Task]:
    """Every question of the four kinds."""
    cities = list(CELSIUS)
    tasks = [Task(city, "one step", ((look_up(city),),)) for city in cities]
    tasks += [chain(city, unit) for city in cities for unit in SCALES]
    operations = [*(f"+{n}" for n in range(1, 10)), *(f"-{n}" for n in range(1, 5)), "*2", "*3"]
    tasks += [chain(city, unit, operation) for city in cities for unit in SCALES for operation in operations]
    tasks += [_both(one, other) for one in cities for other in cities if one != other]
    for a in range(11, 20):
        for b in range(2, 10):
            tasks.append(Task(f"{a} times {b}", "one step", ((compute(f"{a}*{b}"),),)))
    tasks += [
        Task(f"{n}h in {unit}", "one step", ((to_unit(f"{n}h", unit),),))
        for n in range(1, 10)
        for unit in ("min", "s")
    ]
    return tasks


KINDS = ("one step", "two steps", "three steps", "two calls at once")


def split(tasks: Sequence[Task], held_out: int, rng: random.Random) -> tuple[list[Task], list[Task]]:
    """
    `(rest, held out)`: as many of each kind, `held_out` in all.

    Raises:
        `ValueError`: If `held_out` is no multiple of four, or too many.
    """
    if held_out < 1 or held_out % len(KINDS):
        raise ValueError(
            f"Each of the {len(KINDS)} kinds of questions gives as many: `--held_out`, `--prompts` and `--validation` "
            f"must be multiples of {len(KINDS)} above 0, not {held_out}."
        )
    chosen: list[Task] = []
    for kind in KINDS:
        left, wanted = [task for task in tasks if task.kind == kind], held_out // len(KINDS)
        if wanted > len(left):
            raise ValueError(
                f"{held_out} questions would take {wanted} of the kind '{kind}', and {len(left)} are left of it. Ask "
                "for fewer (`--held_out`, `--prompts`, `--validation`)."
            )
        chosen += rng.sample(left, wanted)
    questions = {task.question for task in chosen}
    return [task for task in tasks if task.question not in questions], chosen


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

    def say(self, calls: Sequence[Call] = (), text: str = "", slip: bool = False) -> str:
        """One turn of the assistant and the replies to it; returns the last reply."""
        calls_said = {"tool_calls": [call.message for call in calls]} if calls else {}
        self.messages.append({"role": "assistant", "content": text, **calls_said})
        self.slips |= {self.turns} if slip else set()
        self.turns += 1
        replies = [call.run() for call in calls]
        self.messages += [
            {"role": "tool", "name": call.name, "content": reply} for call, reply in zip(calls, replies, strict=True)
        ]
        return replies[-1] if replies else text


def wrong_call(rng: random.Random, seen: str) -> Call:
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


def solved(task: Task, rng: random.Random, slip_rate: float = 0.0) -> Conversation:
    """A question answered; with a `slip_rate`, wrong calls on the way, each of which is got over."""
    conversation = Conversation([{"role": "user", "content": task.question}])
    seen = ""
    for calls in task.turns:
        while rng.random() < slip_rate:
            conversation.say([wrong_call(rng, seen)], slip=True)
        seen = conversation.say(calls)
    conversation.say(text=task.answer)
    return conversation


def careless(task: Task, rng: random.Random) -> Conversation:
    """A question answered by somebody who leaves out the later steps, or takes any unit, about as often as not."""
    conversation = Conversation([{"role": "user", "content": task.question}])
    seen = ""
    for turn, calls in enumerate(task.turns):
        if turn and rng.random() < 0.5:
            break
        if turn and calls[0].name == "convert" and rng.random() < 0.5:
            calls = (to_unit(seen, rng.choice(SCALES)),)
        elif calls[0].name == "calculate" and task.kind == "three steps":
            calls = (compute(number_of(seen) + re.search(r"[-+*]\d$", dict(calls[0].arguments)["expression"])[0]),)
        seen = conversation.say(calls)
    conversation.say(text=seen)
    return conversation


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
