"""What a run remembers beside weights: a running mean, the gate of the snapshot, successful answers of past steps.

Each is the same on every process, and plain data in a checkpoint (`state()` gives it, `restore()` takes it). Knows:
numbers and texts. Deliberately does not know: models, trainers.
"""

import json
import math
import random
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from .reprompt import Prompt


class RunState(Protocol):
    """Something that a checkpoint keeps."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class RunningMean:
    """
    Exponential mean over optimizer steps; `value` is `None` before the first one ends.

    Args:
        decay (`float`): Share of the past at each step, in `[0, 1)`.
    """

    def __init__(self, decay: float = 0.95) -> None:
        self.value: float | None = None
        self._decay = decay
        self._total = 0.0
        self._count = 0.0

    def add(self, total: float, count: float) -> None:
        """Note a sum and a count of one micro-batch; `value` stays until the step ends, so its parts are alike."""
        self._total += total
        self._count += count

    def step_finished(self) -> None:
        """Called after each optimizer step."""
        if self._count > 0 and math.isfinite(self._total):  # one broken step must not end the mean
            mean = self._total / self._count
            self.value = mean if self.value is None else self._decay * self.value + (1 - self._decay) * mean
        self._total = self._count = 0.0

    def state(self) -> dict[str, Any]:
        return {"value": self.value}

    def restore(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class SnapshotGate:
    """
    Opens only if success has risen since the last renewal and the share of truncated answers has not (CGTR).

    Both are means over the rollout batches since the last time the gate was asked. The first renewal is compared with
    the run's first batch. Taken by the letter: where all answers pass, nothing rises any more, and where none was cut,
    one that is cut keeps the gate shut.
    """

    def __init__(self) -> None:
        self._reference: tuple[float, float] | None = None
        self._sums = (0.0, 0.0)
        self._count = 0

    def observe(self, success: float, truncated: float) -> None:
        """Note one training batch: the shares of its rollouts that passed and that were cut, in `[0, 1]`."""
        self._sums = (self._sums[0] + success, self._sums[1] + truncated)
        self._count += 1
        self._reference = self._reference or (success, truncated)

    def opens(self) -> bool:
        """Whether a due renewal may happen; what was seen since is then what the next one is compared with."""
        if not self._count:
            return False
        success, truncated = (total / self._count for total in self._sums)
        self._sums, self._count = (0.0, 0.0), 0
        if success <= self._reference[0] or truncated > self._reference[1]:
            return False
        self._reference = (success, truncated)
        return True

    def state(self) -> dict[str, Any]:
        return {"reference": self._reference, "sums": self._sums, "count": self._count}

    def restore(self, state: dict[str, Any]) -> None:
        self._reference = None if state["reference"] is None else tuple(state["reference"])
        self._sums, self._count = tuple(state["sums"]), state["count"]


def question_key(row: dict[str, Any], prompt: Prompt, column: str | None, option: str = "success_buffer_key") -> str:
    """
    What names a question across steps: a dataset column, which is given by `option`, or the prompt itself.

    Raises:
        `ValueError`: the row lacks the column, or the prompt holds something that has no text (an image).
    """
    if column is not None:
        if row.get(column) is None:
            raise ValueError(f"`{option}={column!r}`: a row has no such value. Its columns: {sorted(row)}.")
        return str(row[column])
    try:
        return json.dumps(prompt, sort_keys=True)
    except TypeError as error:
        raise ValueError(
            f"A prompt cannot serve as a key ({error}). Name its question by a dataset column: `{option}='id'`."
        ) from error


class SuccessBuffer:
    """
    The latest successful answers per question (DRIFT, arXiv 2606.30345).

    Args:
        size (`int`): Answers kept per question.
        questions (`int`): Questions kept; the one that was answered longest ago leaves first.
        max_age (`int`, *optional*): Optimizer steps after which an answer is no longer offered.
        choice (`str`): `"first"` (the latest), `"shortest"` or `"random"`.
        seed (`int`): Of `"random"`.
    """

    def __init__(
        self,
        size: int,
        questions: int,
        max_age: int | None,
        choice: Literal["first", "shortest", "random"],
        seed: int,
    ) -> None:
        self._size = size
        self._questions = questions
        self._max_age = max_age
        self._choice = choice
        self._seed = seed
        self._answers: dict[str, list[tuple[int, str]]] = {}  # (step, text), the latest last

    def add(self, keys: Sequence[str], texts: Sequence[str | None], step: int) -> None:
        """Keep the answers of one batch, of all processes; `None` where a row has none to show."""
        for key, text in zip(keys, texts, strict=True):
            if text is None:
                continue
            kept = [entry for entry in self._answers.pop(key, []) if entry[1] != text]
            self._answers[key] = [*kept, (step, text)][-self._size :]  # the question moves to the end
        while len(self._answers) > self._questions:
            del self._answers[next(iter(self._answers))]

    def offer(self, key: str | None, step: int) -> str | None:
        """An answer to the question that is not too old, or `None`; also for a question without a name."""
        fresh = [
            text for at, text in self._answers.get(key, []) if self._max_age is None or step - at <= self._max_age
        ]
        if not fresh:
            return None
        if self._choice == "shortest":
            return min(fresh, key=len)
        if self._choice == "random":
            return random.Random(f"{self._seed} {step} {key}").choice(fresh)
        return fresh[-1]

    def state(self) -> dict[str, Any]:
        return {"answers": self._answers}

    def restore(self, state: dict[str, Any]) -> None:
        self._answers = {
            key: [(step, text) for step, text in entries][-self._size :] for key, entries in state["answers"].items()
        }
