"""Judging one program by tests, outside the sandbox.

Knows: tests, runs, comparison. Deliberately does not know: completions, rewards, texts. A program is sent inputs and
nothing else; what comes back is compared here with answers that never left this process.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .answers import same_output, same_value
from .program import Program, Run

Kind = Literal["wrong", "error", "time", "memory", "output", "files", "no result"]

# What LiveCodeBench puts before each program; starter code uses it without importing it.
_GRANTED = (
    "bisect", "collections", "copy", "datetime", "functools", "heapq", "io", "itertools", "json", "math", "operator",
    "random", "re", "statistics", "string", "sys",
)  # fmt: skip
_FROM = {
    "typing": "Any Callable Deque Dict Iterable Iterator List Optional Sequence Set Tuple Union",
    "collections": "Counter OrderedDict defaultdict deque",
    "functools": "cache cmp_to_key lru_cache reduce",
    "itertools": "accumulate chain combinations count groupby permutations product",
    "heapq": "heapify heappop heappush heapreplace nlargest nsmallest",
    "bisect": "bisect_left bisect_right insort",
    "math": "ceil comb factorial floor gcd inf isqrt lcm log log2 perm pi prod sqrt",
}
_SOURCE = {name: module for module, names in _FROM.items() for name in names.split()}


@dataclass(frozen=True)
class CodeTest:
    """
    One test.

    Args:
        input (`str` or `list`): Standard input of a script; arguments of a call.
        output (`Any`): Standard output of a script; return value of a call, as plain data.
        wrapped (`bool`): `output` is a list of one, and its element is right as well (APPS, TACO, PrimeIntellect).
    """

    input: Any
    output: Any
    wrapped: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.input, (str, list)):
            raise TypeError(
                f"A test's `input` must be text (standard input) or a list of arguments, got {self.input!r:.80}."
            )

    def to_dict(self) -> dict[str, Any]:
        row = {"input": self.input, "output": self.output}
        return {**row, "wrapped": True} if self.wrapped else row


def read_tests(tests: str | Sequence[Any] | None) -> list[CodeTest]:
    """
    Tests from a dataset column: a JSON text (one type for all rows, as Arrow wants it) or a list, of
    `{"input", "output"}` objects.

    Raises:
        `ValueError`: the text is no JSON, or an entry has no input or output.
    """
    if tests is None or tests == "":
        return []
    try:
        rows = json.loads(tests) if isinstance(tests, str) else tests
        return [
            row
            if isinstance(row, CodeTest)
            else CodeTest(row["input"], row["output"], bool(row.get("wrapped", False)))
            for row in rows
        ]
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            'Tests must be a list of {"input": ..., "output": ...}, or such a list as JSON text; got '
            f"{str(tests)[:120]!r} ({type(error).__name__}: {error})."
        ) from error


def write_tests(tests: Sequence[CodeTest]) -> str:
    """The JSON text that [`read_tests`] reads."""
    return json.dumps([test.to_dict() for test in tests])


def prelude_for(code: str) -> str:
    """The imports among those that LiveCodeBench grants whose names occur in `code`: the others cost start-up time."""
    words = set(re.findall(r"[A-Za-z_][A-Za-z_0-9]*", code))
    lines = [f"import {module}" for module in _GRANTED if module in words]
    lines += [f"from {module} import {name}" for name, module in _SOURCE.items() if name in words]
    return "\n".join(lines) + "\n" if lines else ""


@dataclass(frozen=True)
class Outcome:
    """
    How one test ended.

    Args:
        test ([`CodeTest`]): The test.
        run ([`Run`]): The run.
        kind (`str`, *optional*): What failed; `None`: it passed.
        got (`Any`): The returned value of a call.
    """

    test: CodeTest
    run: Run
    kind: Kind | None
    got: Any = None


def run_test(
    code: str, test: CodeTest, function: str | None, run: Callable[[Program], Run], tolerance: float
) -> Outcome:
    """
    Run `code` on one test's input and compare.

    A program that exits early, prints "passed" or writes to the result channel has written a wrong output, whatever it
    exits with; to be judged right it must produce the answer, which is to solve the test.
    """
    if function is None:
        if not isinstance(test.input, str) or not isinstance(test.output, str):
            raise TypeError(f"A test without a function reads and prints text, got {test.to_dict()!r:.120}.")
        ended = run(Program(code, stdin=test.input, prelude=prelude_for(code)))
        if ended.status != "ok":
            return Outcome(test, ended, _kind(ended))
        return Outcome(test, ended, None if same_output(test.output, ended.stdout, tolerance) else "wrong")
    if not isinstance(test.input, list):
        raise TypeError(f"A test of the function {function!r} needs a list of arguments, got {test.input!r:.120}.")
    ended = run(Program(code, function=function, arguments=test.input, prelude=prelude_for(code)))
    if ended.status != "ok":
        return Outcome(test, ended, _kind(ended))
    try:
        document = json.loads(ended.stdout)
        got = document["result"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return Outcome(test, ended, "no result")  # it ended before it returned, or wrote to the channel
    right = same_value(test.output, got, tolerance)
    if test.wrapped and not right and isinstance(test.output, list) and len(test.output) == 1:
        right = same_value(test.output[0], got, tolerance)
    return Outcome(test, ended, None if right else "wrong", got)


def _kind(run: Run) -> Kind:
    if run.status == "stopped":
        raise RuntimeError("The run was stopped from outside; there is no verdict.")
    return "error" if run.status == "ok" else run.status


@dataclass(frozen=True)
class Verdict:
    """
    What a program's tests showed.

    Args:
        passed, total (`int`): Tests passed, and all tests, run or not.
        public_total (`int`): Public tests among them.
        public_failure ([`Outcome`], *optional*): The first public test that failed, and `public_index` its place.
        hidden_failure (`str`, *optional*): The kind of the first hidden failure, and nothing else of it.
        ran (`int`): Runs that were needed.
    """

    passed: int
    total: int
    public_total: int
    public_failure: Outcome | None = None
    public_index: int = 0
    hidden_failure: Kind | None = None
    ran: int = 0


def judge(
    code: str,
    public: Sequence[CodeTest],
    hidden: Sequence[CodeTest],
    function: str | None,
    run: Callable[[Program], Run],
    *,
    stop_early: bool,
    tolerance: float = 1e-6,
    give_up_after: int = 2,
) -> Verdict:
    """
    Run the tests, public ones first.

    Args:
        stop_early (`bool`): Stop at the first failure: enough for pass or fail.
        give_up_after (`int`): Runs that met the time limit after which the remaining tests count as failed, so that an
            endless loop does not cost the limit times the number of tests.
    """
    passed = ran = slow = 0
    failure: Outcome | None = None
    index, kind = 0, None
    for place, test in enumerate([*public, *hidden]):
        outcome = run_test(code, test, function, run, tolerance)
        ran += 1
        slow += outcome.kind == "time"
        if outcome.kind is None:
            passed += 1
        elif place < len(public) and failure is None:
            failure, index = outcome, place
        elif place >= len(public) and kind is None:
            kind = outcome.kind
        if (outcome.kind is not None and stop_early) or slow >= give_up_after:
            break
    return Verdict(passed, len(public) + len(hidden), len(public), failure, index, kind, ran)
