"""Reading an answer and comparing outputs, as the benchmarks do.

Knows: text and plain data. Deliberately does not know: programs, sandboxes, models. All of it runs on what a program
that nobody has read printed: no pattern here backtracks and nothing recurses deeper than the expected answer.
"""

import math
import re
from decimal import Decimal
from typing import Any

from ..reprompt import Prompt, message_text, strip_thinking

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_LONGEST_NUMBER = 400  # characters; longer ones are compared as text


def answer_text(completion: Prompt) -> str:
    """The text that a model wrote: of a list of messages, the assistant's last turn."""
    if isinstance(completion, str):
        return completion
    turns = [message for message in completion if message["role"] == "assistant"]
    return message_text(turns[-1].get("content")) if turns else ""


def without_thinking(text: str) -> str:
    """What follows the thinking; nothing if the thinking never closed."""
    return strip_thinking(text) or ""


def extract_code(text: str) -> str | None:
    """
    The last fenced block of an answer, `None` if there is none; a block that never closes ends with the text.

    Thinking does not count. A fence is a line that starts with three backticks or more; the closing one has at least
    as many and nothing behind. What a fence is indented by, as in a list, its lines are too, and lose it.
    """
    block: list[str] = []
    found: list[str] | None = None
    fence = indent = 0  # backticks of the open fence (0: none is open), and the white space before it
    answer = without_thinking(text)
    place = text.rfind(answer)
    before = text[text.rfind("\n", 0, place) + 1 : place] if place > 0 else ""  # of the first line, which was stripped
    for line in f"{before if before.isspace() else ''}{answer}".split("\n"):
        bare = line.strip()
        ticks = len(bare) - len(bare.lstrip("`"))
        if fence and ticks >= fence and ticks == len(bare):
            found, fence = block, 0
        elif not fence and ticks >= 3 and "`" not in bare[ticks:]:
            block, fence, indent = [], ticks, len(line) - len(line.lstrip())
        elif fence:
            block.append(line[min(indent, len(line) - len(line.lstrip())) :])
    if fence:
        found = block
    return None if found is None or not "".join(found).strip() else "\n".join(found) + "\n"


def same_number(expected: str, got: str, tolerance: float) -> bool:
    """Whether two tokens are the same number: exactly for integers, within a relative or absolute error for others."""
    if max(len(expected), len(got)) > _LONGEST_NUMBER or not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(got)):
        return False
    if Decimal(expected) == Decimal(got):
        return True
    if _INTEGER.fullmatch(expected):
        return False
    a, b = float(expected), float(got)  # two numbers beyond the largest float are no closer for that
    return math.isfinite(a) and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def same_output(expected: str, got: str, tolerance: float = 1e-6) -> bool:
    """
    Whether a program printed what it should: line by line, token by token, white space aside.

    Blank lines at the beginning and at the end do not count; between others they do. Numbers with a point or an
    exponent may be off by `tolerance`, relative or absolute; integers may be written as `7.0`, and nothing else.
    """
    wanted, had = ([line.split() for line in text.strip().splitlines()] for text in (expected, got))
    if len(wanted) != len(had):
        return False
    return all(
        len(a) == len(b) and all(x == y or same_number(x, y, tolerance) for x, y in zip(a, b, strict=True))
        for a, b in zip(wanted, had, strict=True)
    )


def same_value(expected: Any, got: Any, tolerance: float = 1e-6) -> bool:
    """
    Whether a function returned what it should. Both are plain data out of a JSON document, so neither can define what
    equal means. Floats may be off by `tolerance`; `True` and 1 differ.
    """
    if isinstance(expected, bool) or isinstance(got, bool):
        return expected is got
    if isinstance(expected, float) and isinstance(got, (int, float)):
        try:
            return math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:  # an integer beyond the largest float
            return False
    if isinstance(expected, int) and isinstance(got, float):
        return got.is_integer() and expected == int(got)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, list):
        return len(expected) == len(got) and all(
            same_value(a, b, tolerance) for a, b in zip(expected, got, strict=True)
        )
    if isinstance(expected, dict):
        return expected.keys() == got.keys() and all(
            same_value(expected[key], got[key], tolerance) for key in expected
        )
    return expected == got
