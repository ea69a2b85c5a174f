"""The reward for programs: run them by tests, say what failed.

Knows: completions, dataset columns, TRL's reward-function protocol. Deliberately does not know: trainers, tokenizers.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..reprompt import Prompt
from .answers import answer_text, extract_code
from .code_feedback import NO_CODE, feedback_text
from .code_tests import CodeTest, Verdict, judge, read_tests
from .pool import SandboxPool
from .program import Program, Run
from .sandbox import Sandbox


class CodeReward:
    """
    A reward function for [`SDPOTrainer`] and `GRPOTrainer`: tests passed by the program in the last fenced block.

    The dataset's columns (see [`code_data.code_row`]):

    - `public_tests`: tests whose failure the feedback shows, as JSON text (or a list) of `{"input", "output"}`;
    - `hidden_tests` (optional): tests that count and of which no input, output or message ever leaves the grader;
    - `function` (optional): name of the function that the tests call; null or empty: tests are standard input/output.

    Feedback goes to `log_extra("feedback", ...)`: for failures the first failing public test with its input, what was
    expected and got, or the traceback, or the limit that was met; `None` for a program that passed.

    Args:
        sandbox ([`Sandbox`], *optional*): Where programs run; by default a new one, which needs bubblewrap.
        score (`str`): `"pass"`: 1.0 if all tests pass, else 0.0. `"share"`: the share of tests passed.
        workers (`int`, *optional*): Programs at once; by default the processors of this process.
        tolerance (`float`): Relative or absolute error allowed in floats.
        feedback_characters (`int`): Budget of a feedback text.
        show_expected (`bool`): Whether the feedback holds the right output of the failing public test.
        progress (`bool`): Show a bar.

    Example:
    ```python
    trainer = SDPOTrainer(model=..., reward_funcs=CodeReward(), train_dataset=own_problems())
    ```
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        score: Literal["pass", "share"] = "pass",
        workers: int | None = None,
        tolerance: float = 1e-6,
        feedback_characters: int = 1500,
        show_expected: bool = True,
        progress: bool = False,
    ) -> None:
        if score not in ("pass", "share"):
            raise ValueError(f"`score` must be 'pass' or 'share', got {score!r}.")
        if feedback_characters < 200:
            raise ValueError(f"`feedback_characters` must be at least 200, got {feedback_characters}.")
        self.__name__ = "code_reward"  # TRL logs a reward function under this name
        self.pool = SandboxPool(sandbox if sandbox is not None else Sandbox(), workers, progress)
        self.score = score
        self.tolerance = tolerance
        self.feedback_characters = feedback_characters
        self.show_expected = show_expected

    def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Prompt],
        public_tests: Sequence[Any],
        hidden_tests: Sequence[Any] | None = None,
        function: Sequence[str | None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """One reward per completion; the arguments are those with which TRL calls a reward function."""
        count = len(completions)
        names = function if function is not None else [None] * count
        codes = [extract_code(answer_text(completion)) for completion in completions]
        hidden = hidden_tests if hidden_tests is not None else [None] * count
        verdicts = self.judge(codes, public_tests, hidden, names)
        if log_extra is not None:
            log_extra("feedback", self.feedback(verdicts, names))
        if log_metric is not None:
            failures = [v.public_failure.kind if v and v.public_failure else v and v.hidden_failure for v in verdicts]
            log_metric("code/has_code", sum(code is not None for code in codes) / count)
            log_metric("code/timed_out", sum(kind == "time" for kind in failures) / count)
            log_metric("code/tests_passed", sum(_share(verdict) for verdict in verdicts) / count)
        if self.score == "share":
            return [_share(verdict) for verdict in verdicts]
        return [float(verdict is not None and verdict.passed == verdict.total) for verdict in verdicts]

    def judge(
        self,
        codes: Sequence[str | None],
        public_tests: Sequence[Any],
        hidden_tests: Sequence[Any],
        functions: Sequence[str | None],
    ) -> list[Verdict | None]:
        """
        One verdict per program, `None` where there is none. A program that occurs twice with the same tests runs once.

        Raises:
            `ValueError`: a row has no tests, or they are malformed.
        """
        rows = list(zip(codes, public_tests, hidden_tests, functions, strict=True))
        texts = {key for row in rows for key in row[1:3] if isinstance(key, str)}  # megabytes, alike within a group
        read = {key: read_tests(key) for key in texts}
        jobs: dict[Any, tuple[str, list[CodeTest], list[CodeTest], str | None]] = {}
        keys: list[Any] = []
        for number, (code, public, hidden, function) in enumerate(rows):
            tests = [read[column] if isinstance(column, str) else read_tests(column) for column in (public, hidden)]
            if not tests[0] and not tests[1]:
                raise ValueError(f"Row {number} has no tests in `public_tests` or `hidden_tests`. Drop such rows.")
            same = isinstance(public, str) and (hidden is None or isinstance(hidden, str))
            keys.append((code, public, hidden, function) if same else number)
            if code is not None:
                jobs[keys[-1]] = (code, tests[0], tests[1], function or None)

        def work(
            job: tuple[str, list[CodeTest], list[CodeTest], str | None], run: Callable[[Program], Run]
        ) -> Verdict:
            return judge(*job, run, stop_early=self.score == "pass", tolerance=self.tolerance)

        done = dict(zip(jobs, self.pool.map(work, list(jobs.values())), strict=True))
        return [done.get(key) for key in keys]

    def feedback(self, verdicts: Sequence[Verdict | None], functions: Sequence[str | None]) -> list[str | None]:
        """One text per verdict; `None` for those that passed, and a word on the format where there is no verdict."""
        limits = self.pool.sandbox.limits
        words = f"limits: {limits.cpu_seconds:g} s, {limits.memory_bytes >> 20} MiB"
        return [
            NO_CODE
            if verdict is None
            else feedback_text(
                verdict,
                bool(function),
                budget=self.feedback_characters,
                show_expected=self.show_expected,
                limits=words,
            )
            for verdict, function in zip(verdicts, functions, strict=True)
        ]


def _share(verdict: Verdict | None) -> float:
    return 0.0 if verdict is None else verdict.passed / verdict.total
