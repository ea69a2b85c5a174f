"""Where the time of a step goes: one clock that is told which part begins.

Knows: time, an accelerator's events. Deliberately does not know: trainers, logs. Nothing is synchronised and nothing
is sent to another process: each process has a clock of its own, and the main one's is logged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter
from typing import Protocol

import torch

PARTS = ("generation", "reward", "teacher", "student", "backward", "optimizer", "teacher_update", "other")
# Whose events can be asked how far apart they are; elsewhere the host's clock is read.
_TIMED_EVENTS = ("cuda", "xpu")


class Mark(Protocol):
    """A moment."""

    def seconds_to(self, later: "Mark") -> float:
        """Between two moments that have passed."""

    def passed(self, wait: bool) -> bool:
        """Whether it has come; with `wait`, once it has."""


class HostMark:
    """A moment on the host's clock."""

    def __init__(self) -> None:
        self._time = perf_counter()

    def seconds_to(self, later: "HostMark") -> float:
        """See [`Mark`]."""
        return later._time - self._time

    def passed(self, wait: bool) -> bool:
        """See [`Mark`]."""
        return True


class DeviceMark:
    """
    A moment in the accelerator's queue: when it has done what it was given before.

    The host only leaves the mark and goes on, so a part is charged what it gave the accelerator to do (and what the
    accelerator waited for meanwhile), not what the host happened to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device=device, enable_timing=True)
        self._event.record()

    def seconds_to(self, later: "DeviceMark") -> float:
        """See [`Mark`]."""
        return self._event.elapsed_time(later._event) / 1000.0

    def passed(self, wait: bool) -> bool:
        """See [`Mark`]."""
        if wait:
            self._event.synchronize()
        return self._event.query()


class StepClock:
    """
    Splits the time of steps into `PARTS`. A part within another one is taken out of it, so that they add up.

    Args:
        device (`torch.device`): Where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type in _TIMED_EVENTS else None
        self._open: list[str] = []  # the innermost part last; empty between steps
        self._marks: list[tuple[str, Mark]] = []  # of this step: what begins, and when
        self._waiting: list[list[tuple[str, Mark]]] = []  # finished steps that the accelerator may still work on
        self._ended: Mark | None = None
        self._sums: dict[str, float] = {}
        self._steps = 0

    def _mark(self) -> Mark:
        return HostMark() if self._device is None else DeviceMark(self._device)

    def forget(self) -> None:
        """A new run begins."""
        self._open, self._marks, self._waiting, self._ended = [], [], [], None
        self._sums, self._steps = {}, 0

    def start(self) -> None:
        """A step begins; what passed since the last one is `outside` of both."""
        now = self._mark()
        self._marks = [] if self._ended is None else [("outside", self._ended)]
        self._open = []
        self._begin("other", now)

    def _begin(self, name: str, mark: Mark | None = None) -> None:
        self._open.append(name)
        self._marks.append((name, mark or self._mark()))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within, time belongs to this part; between steps (in an evaluation) to none."""
        if not self._open:
            yield
            return
        depth = len(self._open)
        self._begin(name)
        try:
            yield
        finally:
            if self._open:
                del self._open[depth:]
                self._marks.append((self._open[-1], self._mark()))

    def change(self, name: str) -> None:
        """From here on, the innermost part is another one."""
        if self._open:
            self._open.pop()
            self._begin(name)

    def stop(self) -> None:
        """The step ends."""
        if not self._open:
            return
        self._ended = self._mark()
        self._waiting.append([*self._marks, ("", self._ended)])
        self._open, self._marks = [], []
        self._settle(wait=False)

    def _settle(self, wait: bool) -> None:
        """Add up the steps whose last moment has passed."""
        while self._waiting and self._waiting[0][-1][1].passed(wait):
            marks = self._waiting.pop(0)
            for (name, begins), (_, ends) in pairwise(marks):
                self._sums[name] = self._sums.get(name, 0.0) + begins.seconds_to(ends)
            self._steps += 1

    def flush(self) -> dict[str, float]:
        """
        Mean seconds per step since the last call, by part, and of the whole `step`; nothing without a finished step.

        `outside` is the time before the steps: data, logs, evaluations, checkpoints. An accelerator is waited for,
        which costs nothing where the loss has just been read.
        """
        self._settle(wait=True)
        if not self._steps:
            return {}
        means = {name: self._sums.get(name, 0.0) / self._steps for name in (*PARTS, "outside")}
        self._sums, self._steps = {}, 0
        return {"step": sum(means[name] for name in PARTS), **means}
