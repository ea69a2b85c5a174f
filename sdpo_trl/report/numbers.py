"""The numbers in a run's logs: which of them can be drawn, and which evaluation set they are of.

Knows: the names under which TRL and Transformers log. Deliberately does not know: files, charts.
"""

import math
import re
from typing import Any

Logs = list[tuple[int, dict[str, float]]]

# Beyond it, an axis cannot be divided.
_LARGEST = 1e100
_MOST_NAMES = 8


def is_drawn(value: float) -> bool:
    """Whether it has a place in a curve: neither NaN nor infinite, nor near it."""
    return abs(value) <= _LARGEST


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """What can be drawn; a number that is not finite was written as text."""
    known = {}
    for name, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number or value in ("nan", "inf", "-inf"):
            try:
                known[name] = float(value)
            except OverflowError:  # a number of hundreds of digits
                known[name] = math.inf
    return known


def by_set(logs: Logs) -> tuple[Logs, tuple[str, ...]]:
    """
    Logs in which each of several evaluation sets has names of its own, and what those begin with.

    TRL calls the numbers of all sets the same (`eval_reward`), Transformers its own ones `eval_NAME_loss`.
    """
    told, found = [], {}
    for step, values in logs:
        prefix = next((n.removesuffix("_runtime") for n in values if re.fullmatch("eval_.+_runtime", n)), None)
        if prefix is None:
            if any(name.startswith("eval_") for name in values):
                found["eval"] = None
        else:
            found[prefix] = None
            values = {
                f"{prefix}_{name.removeprefix('eval_')}"
                if name.startswith("eval_") and not name.startswith(f"{prefix}_") else name: value
                for name, value in values.items()
            }  # fmt: skip
        told.append((step, values))
    return told, tuple(found) or ("eval",)


def gaps(logs: Logs) -> list[str]:
    """A sentence about the numbers that have no place in a curve, which often tell why a run failed; or nothing."""
    first: dict[str, int] = {}
    for step, values in logs:
        for name in (name for name, value in values.items() if not is_drawn(value)):
            first.setdefault(name, step)
    if not first:
        return []
    names = [f"{name} (first at step {step})" for name, step in list(first.items())[:_MOST_NAMES]]
    more = f" and {len(first) - _MOST_NAMES} more" if len(first) > _MOST_NAMES else ""
    return [f"Not finite at some steps, and left out of the curves there: {', '.join(names)}{more}."]
