"""What a programmer would want to read about a program that failed.

Knows: verdicts and how long a text may be. Deliberately does not know: hidden tests; of those a [`Verdict`] carries
nothing but the kind of the first failure, one of seven words.
"""

import json
from typing import Any

from ..reprompt import well_formed
from .code_tests import Kind, Outcome, Verdict

NO_CODE = (
    "Your answer holds no code. Write the whole program in one fenced block, opened by a line ```python and closed by "
    "a line ```; the last block counts."
)
_SAYS: dict[Kind, str] = {
    "wrong": "wrong answer",
    "error": "it ended with an error",
    "time": "time limit exceeded",
    "memory": "memory limit exceeded",
    "output": "it wrote too much output",
    "files": "it made too many files",
    "no result": "it ended before the function returned",
}


_ESCAPES = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """`text` as any tokenizer and file takes it: control characters and lone surrogates become escapes."""
    return well_formed(text).replace("\r\n", "\n").translate(_ESCAPES)


def cut(text: str, characters: int, tail_share: float = 0.3) -> str:
    """
    `text` in at most about `characters`, cut in its middle, with how much is missing.

    Args:
        tail_share (`float`): Part of the kept text that comes from the end, where a traceback says what happened.
    """
    if len(text) <= characters:
        return text
    mark = f"\n... ({len(text) - characters} characters left out) ...\n"
    kept = max(0, characters - len(mark))
    tail = int(kept * tail_share)
    return text[: kept - tail] + mark + (text[len(text) - tail :] if tail else "")


def shown(value: Any, is_call: bool) -> str:
    """A test's input or output as text: JSON for calls, the text itself for scripts."""
    if not is_call:
        return printable(str(value).rstrip("\n"))
    try:
        return printable(json.dumps(value, ensure_ascii=False))
    except RecursionError:  # it was read on a stack with more room
        return "(a value nested too deeply to be shown)"


def _sections(parts: list[tuple[str, str, float]], budget: int) -> str:
    """Titled texts within a common budget: what a short one leaves over goes to the others."""
    left = budget - sum(len(title) + 3 for title, _, _ in parts)
    rooms: dict[int, int] = {}
    for done, index in enumerate(sorted(range(len(parts)), key=lambda i: len(parts[i][1]))):
        rooms[index] = max(20, left // (len(parts) - done))
        left -= min(len(parts[index][1]), rooms[index])
    return "\n".join(f"{title}:\n{cut(text, rooms[i], tail)}" for i, (title, text, tail) in enumerate(parts))


def _first_difference(expected: str, got: str) -> str:
    for number, (a, b) in enumerate(zip(expected.splitlines(), got.splitlines(), strict=False), start=1):
        if a.split() != b.split():
            return f" The first difference is in line {number}: expected {cut(a, 80)!r}, got {cut(b, 80)!r}."
    return f" It printed {len(got.splitlines())} lines instead of {len(expected.splitlines())}."


def failure_text(outcome: Outcome, heading: str, is_call: bool, budget: int, show_expected: bool = True) -> str:
    """The feedback on one failed public test: its input, and what was expected and got, or the traceback."""
    parts = [("Arguments" if is_call else "Input", shown(outcome.test.input, is_call), 0.3)]
    errors = printable(outcome.run.stderr).strip()
    if outcome.kind == "wrong":
        got = shown(outcome.got if is_call else outcome.run.stdout, is_call)
        expected = shown(outcome.test.output, is_call)
        if show_expected:
            parts.append(("Expected", expected, 0.3))
            if not is_call and "\n" in expected + got:
                heading += _first_difference(expected, got)
        parts.append(("Got", got or "(nothing)", 0.3))
    elif errors:
        parts.append(("Standard error", errors, 0.7))
    elif outcome.kind == "error":
        parts.append(("Exit status", str(outcome.run.exit_code), 0.3))
    return cut(heading + "\n" + _sections(parts, max(80, budget - len(heading) - 1)), budget)


def feedback_text(
    verdict: Verdict, is_call: bool, *, budget: int = 1500, show_expected: bool = True, limits: str = ""
) -> str | None:
    """
    What to tell about a verdict; `None` if all tests passed.

    The first failing public test speaks. Where all of those passed, one sentence says that a hidden test failed and in
    which of seven ways, without its place, input, output or error text: a program could print its input as an error.

    Args:
        is_call (`bool`): The tests call a function.
        budget (`int`): Characters of the whole text.
        show_expected (`bool`): Whether a public test's right output is in the text.
        limits (`str`): The limits in words, said where one was met.
    """
    failure = verdict.public_failure
    if failure is not None:
        met = f" ({limits})" if limits and failure.kind in ("time", "memory", "output", "files") else ""
        place = f"{verdict.public_index + 1} of {verdict.public_total}"
        heading = f"Your program failed public test {place}: {_SAYS[failure.kind]}{met}."
        return failure_text(failure, heading, is_call, budget, show_expected)
    if verdict.hidden_failure is None:
        return None
    before = f"Your program passed all {verdict.public_total} public tests, but " if verdict.public_total else ""
    sentence = f"a hidden test failed: {_SAYS[verdict.hidden_failure]}."
    return cut(before + sentence if before else sentence.capitalize(), budget)
