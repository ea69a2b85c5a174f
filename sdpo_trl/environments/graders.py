"""Answers that are read rather than run: multiple choice and tool use (mathematics: math_grader.py).

Knows: the format that each task asks for, how to compare, what to say about a failure. Deliberately does not know:
trainers, models. Each grader is a reward function with feedback: what is wrong with the format, else that the answer
is wrong; the right answer is in the text only with `show_answer`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..reprompt import Prompt
from .answers import answer_text, without_thinking
from .code_feedback import cut, printable

QUOTED = 200  # characters of the answer that a feedback text repeats


@dataclass(frozen=True)
class Grade:
    """
    One answer judged.

    Args:
        right (`bool`): It is right.
        well_formed (`bool`): It has the format, so that it could be read.
        feedback (`str`, *optional*): What is wrong.
    """

    right: bool
    well_formed: bool
    feedback: str | None = None


class Grader:
    """What the graders share: TRL's reward-function protocol around `grade(text, answer)`."""

    name: str

    def __init__(self, show_answer: bool = False) -> None:
        self.show_answer = show_answer
        self.__name__ = f"{self.name}_reward"  # TRL logs a reward function under this name

    def grade(self, text: str, answer: str) -> Grade:
        raise NotImplementedError

    def __call__(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Prompt],
        answer: Sequence[str],
        log_extra: Callable[[str, list[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """1.0 for each right answer, else 0.0; `answer` is the dataset's column of right answers."""
        texts = [without_thinking(answer_text(completion)) for completion in completions]
        grades = [self.grade(text, right) for text, right in zip(texts, answer, strict=True)]
        if log_extra is not None:
            log_extra("feedback", [grade.feedback for grade in grades])
        if log_metric is not None:
            log_metric(f"{self.name}/well_formed", sum(grade.well_formed for grade in grades) / len(grades))
        return [float(grade.right) for grade in grades]

    def failed(self, well_formed: bool, problem: str, answer: str) -> Grade:
        """A wrong answer; the right one goes into the text with `show_answer` alone."""
        shown = f" The right answer is {answer}." if self.show_answer else ""
        return Grade(False, well_formed, printable(problem + shown))


class ChoiceReward(Grader):
    """
    Multiple choice: one letter, alone, in one `<answer>` tag (paper, section 3: SciKnowEval).

    Args:
        letters (`Sequence[str]`): The possible answers.
        show_answer (`bool`): Put the right letter into the feedback. Off, the feedback tells what was wrong, and the
            teacher learns the letter only from a sibling that was right.
    """

    name = "choice"

    def __init__(self, letters: Sequence[str] = "ABCD", show_answer: bool = False) -> None:
        super().__init__(show_answer)
        if len(letters) < 2:
            raise ValueError(f"`letters` must be at least two, got {letters!r}.")
        self.letters = tuple(letters)
        self._ask = (
            f"Write the letter of your choice, {', '.join(self.letters[:-1])} or {self.letters[-1]}, once and alone "
            "between <answer> and </answer>."
        )

    def _read(self, text: str) -> tuple[str | None, str]:
        """The letter, or what is wrong with the format."""
        if "<answer>" not in text:
            return None, "There is no <answer> tag."
        if text.count("<answer>") > 1 or text.count("</answer>") > 1:
            return None, "There is more than one <answer> tag."
        content, end, _ = text.partition("<answer>")[2].partition("</answer>")
        if not end:
            return None, "The <answer> tag is not closed by </answer> after it."
        letter = content.strip()
        if letter in self.letters:
            return letter, ""
        if len(letter) > 1:
            return None, "The <answer> tag holds more than a letter."
        return None, f"The <answer> tag holds {'another character' if letter else 'nothing'}."

    def grade(self, text: str, answer: str) -> Grade:
        """
        Judge one answer.

        Raises:
            `ValueError`: the dataset's answer is none of the letters.
        """
        if answer not in self.letters:
            raise ValueError(f"The dataset's answer must be one of {', '.join(self.letters)}, got {answer!r}.")
        letter, problem = self._read(text)
        if letter is None:
            return self.failed(False, f"{problem} {self._ask}", answer)
        return Grade(True, True) if letter == answer else self.failed(True, f"Your answer {letter} is wrong.", answer)


_ACTION = re.compile(r"^[ \t]*Action:[ \t]*(.*)$", re.MULTILINE)
_ACTION_INPUT = re.compile(r"^[ \t]*Action Input:[ \t]*", re.MULTILINE)
_TOOL_FORMAT = (
    "Write for each step a line `Action: NAME` with the name of a tool and after it a line `Action Input: {...}` with "
    "a JSON object."
)


class ToolUseReward(Grader):
    """
    Tool use in the format `Action: NAME` / `Action Input: {JSON}` (paper, section 3: ToolAlpaca).

    Right if the actions are the expected ones, each as often, in any order, and so are all their inputs taken together
    (a parameter and its value count as often as they occur, where the paper's code merges them into one object, so
    that of repeated parameters only the last counts).

    The column `answer` holds a JSON list of `{"Action": name, "Action_Input": JSON text or object}`.

    Args:
        show_answer (`bool`): Put the right actions into the feedback. Off, it tells which of the actions and
            parameters that were given are wrong, and whether some are missing.
    """

    name = "tool_use"

    def _read(self, text: str) -> tuple[list[tuple[str, dict[str, Any]]], str]:
        """The actions with their inputs, or what is wrong with the format."""
        actions: list[tuple[str, dict[str, Any]]] = []
        starts = list(_ACTION.finditer(text))
        if not starts:
            return [], "There is no line `Action: NAME`."
        for start, following in zip(starts, [*starts[1:], None], strict=True):
            name = start.group(1).strip()
            part = text[start.end() : following.start() if following else len(text)]
            label = _ACTION_INPUT.search(part)
            if not name:
                return [], "A line `Action:` names no tool."
            if label is None:
                return [], f"There is no line `Action Input: ...` after `Action: {name[:80]}`."
            try:
                value, _ = json.JSONDecoder().raw_decode(part[label.end() :].lstrip())
                if isinstance(value, dict):
                    _inputs([(name, value)])  # what can just be read may be nested too deeply to be written again
            except (ValueError, RecursionError) as error:
                reason = f"{type(error).__name__}: {error}"
                if type(error) is ValueError:  # Python's own limit, of which it gives advice to a programmer
                    reason = "a number has too many digits"
                return [], f"The input of the action {name[:80]} is not valid JSON ({reason})."
            if not isinstance(value, dict):
                return [], f"The input of the action {name[:80]} must be a JSON object."
            actions.append((name, value))
        return actions, ""

    def _expected(self, answer: str) -> list[tuple[str, dict[str, Any]]]:
        try:
            rows = json.loads(answer)
            if not isinstance(rows, list) or not rows:
                raise TypeError("it holds no list of actions")
            steps = [(step["Action"], step["Action_Input"]) for step in rows]
            actions = [(name, json.loads(value) if isinstance(value, str) else value) for name, value in steps]
            if not all(isinstance(value, dict) for _, value in actions):
                raise TypeError("an action's input is no object")
            return actions
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                'The dataset\'s answer must be a JSON list of {"Action": ..., "Action_Input": ...}, got '
                f"{answer!r:.120} ({type(error).__name__}: {error})."
            ) from error

    def grade(self, text: str, answer: str) -> Grade:
        """
        Judge one answer.

        Raises:
            `ValueError`: the dataset's answer has another form.
        """
        expected = self._expected(answer)
        actions, problem = self._read(text)
        if problem:
            return self.failed(False, f"{problem} {_TOOL_FORMAT}", answer)
        problems = []
        given, wanted = Counter(name for name, _ in actions), Counter(name for name, _ in expected)
        if given - wanted:
            wrong = ", ".join(sorted((given - wanted).elements()))
            problems.append(f"Not called for: {cut(wrong, QUOTED)}.")
        if wanted - given:
            problems.append("An action is missing.")
        had, needed = _inputs(actions), _inputs(expected)
        if had - needed:
            wrong = "; ".join(f"{key} = {value}" for key, value in sorted((had - needed).elements()))
            problems.append(f"Wrong inputs: {cut(wrong, QUOTED)}.")
        if sum((needed - had).values()) > sum((had - needed).values()):
            problems.append("An input is missing.")
        return self.failed(True, " ".join(problems), answer) if problems else Grade(True, True)


def _inputs(actions: Sequence[tuple[str, dict[str, Any]]]) -> Counter[tuple[str, str]]:
    def plain(value: Any) -> Any:
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return Counter((key, json.dumps(plain(v), sort_keys=True)) for _, values in actions for key, v in values.items())
