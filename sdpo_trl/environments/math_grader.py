"""Mathematics, graded by math-verify.

Knows: boxes, time limits, what to say about a failure. Deliberately does not know: how two expressions are compared.
"""

import re
import threading
from functools import cached_property
from typing import Any

from .code_feedback import cut
from .graders import QUOTED, Grade, Grader

_BRACES = re.compile(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", re.DOTALL)


class MathReward(Grader):
    r"""
    Mathematics: the last `\boxed{...}` against the right answer, by `math-verify` (an extra: `sdpo-trl[math]`).

    The column `answer` holds the right answer as a number or as LaTeX, with or without dollar signs or a box.

    Args:
        show_answer (`bool`): Put the right answer into the feedback.
        timeout_seconds (`int`): For reading and for comparing one answer each. An answer such as `9^{9^{9^9}}` meets
            it and is wrong. It uses an alarm, so rewards must be computed in the main thread, as TRL does.

    Raises:
        `ImportError`: math-verify is missing.
    """

    name = "math"
    limits_itself = True  # `reward_timeout` would call it in a thread

    def __init__(self, show_answer: bool = False, timeout_seconds: int = 5) -> None:
        super().__init__(show_answer)
        if timeout_seconds < 1:
            raise ValueError(f"`timeout_seconds` must be at least 1, got {timeout_seconds}.")
        self.timeout_seconds = timeout_seconds
        self._known: dict[str, list[Any]] = {}
        _ = self._library

    @cached_property
    def _library(self) -> Any:
        try:
            import math_verify
        except ImportError as error:
            raise ImportError(
                "MathReward compares answers with math-verify, which is not installed: `pip install 'sdpo-trl[math]'`."
            ) from error
        return math_verify

    def _parse(self, latex: str) -> list[Any]:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("MathReward limits its time with an alarm, which works in the main thread alone.")
        return self._library.parse(f"\\boxed{{{latex}}}", parsing_timeout=self.timeout_seconds)

    def _right(self, answer: str) -> list[Any]:
        if not isinstance(answer, str):
            raise ValueError(f"The dataset's answer must be a text or a number, got {answer!r:.120}.")
        if answer not in self._known:
            self._known[answer] = self._parse(boxed(answer) or answer.strip().strip("$"))
            if not self._known[answer]:
                raise ValueError(f"math-verify cannot read the dataset's answer {answer!r:.120}. Drop such rows.")
        return self._known[answer]

    def grade(self, text: str, answer: "str | float") -> Grade:
        """
        Judge one answer.

        Raises:
            `ValueError`: the dataset's answer cannot be read.
        """
        if isinstance(answer, (int, float)) and not isinstance(answer, bool):
            answer = str(answer)
        right, content = self._right(answer), boxed(text)
        if content is None:
            return self.failed(False, r"There is no \boxed{...}. Write your final answer in one.", answer)
        read = self._parse(content)
        if not read:
            problem = rf"\boxed{{{cut(content, QUOTED)}}} cannot be read as mathematics."
            return self.failed(False, problem, answer)
        # The right answer comes first: the comparison is not symmetric.
        if self._library.verify(right, read, timeout_seconds=self.timeout_seconds):
            return Grade(True, True)
        return self.failed(True, f"Your answer {cut(content, QUOTED)} is wrong.", answer)


def boxed(text: str) -> str | None:
    r"""
    What the last closed `\boxed{...}` holds, braces in it balanced (`\{` and `\}` are none); `None` if there is none
    or it is empty.
    """
    opened: list[int] = []  # of braces, where what they hold begins; those of boxes as they are, the others negative
    last = (-1, -1)
    for found in _BRACES.finditer(text):
        if found[0] in ("{", "\\boxed{"):
            opened.append(found.end() if len(found[0]) > 1 else -1)
        elif found[0] == "}" and opened:
            last = max(last, (opened.pop(), found.start()))
    return text[last[0] : last[1]].strip() or None if last[0] >= 0 else None
