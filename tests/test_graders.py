"""Multiple choice, tool use and mathematics: what is right, what is said, and what is kept out of the text."""

import builtins
import json
import threading
import time
from pathlib import Path

import pytest

from sdpo_trl.environments.graders import ChoiceReward, ToolUseReward
from sdpo_trl.environments.math_grader import MathReward, boxed

ROWS = Path("/work/shared/data")
needs_rows = pytest.mark.skipif(not ROWS.is_dir(), reason=f"the task rows are not in {ROWS}")


def grade(reward, texts, answers):
    logged, metrics = {}, {}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    rewards = reward(
        prompts=["p"] * len(texts),
        completions=completions,
        answer=answers,
        log_extra=logged.__setitem__,
        log_metric=metrics.__setitem__,
        other=[1] * len(texts),
    )
    assert rewards == reward(["p"] * len(texts), texts, answers)  # plain texts, and nothing to log to
    return rewards, logged["feedback"], next(iter(metrics.values()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<answer>B</answer>", None),
        ("<reasoning>A or B</reasoning>\n<answer>\nB\n</answer>\n", None),
        ("<think><answer>A</answer></think><answer>B</answer>", None),
        ("<answer>A</answer>", "Your answer A is wrong."),
        ("B", "There is no <answer> tag."),
        ("<think>never closed <answer>B</answer>", "There is no <answer> tag."),
        ("<answer>A</answer><answer>B</answer>", "more than one <answer> tag"),
        ("</answer><answer>B", "not closed by </answer>"),
        ("<answer>B: 56 pC</answer>", "more than a letter"),
        ("<answer></answer>", "holds nothing"),
        ("<answer>E</answer>", "another character"),
        ("<answer>b</answer>", "another character"),
        ("<answer>\ud800</answer>", "another character"),
    ],
)
def test_choices(text, said):
    (reward,), (feedback,), _ = grade(ChoiceReward(), [text], ["B"])
    assert reward == float(said is None)
    assert feedback is None if said is None else said in feedback
    (_,), (shown,), _ = grade(ChoiceReward(show_answer=True), [text], ["B"])
    assert shown is None if said is None else shown.endswith("The right answer is B.")


def test_the_right_letter_cannot_be_told_from_the_feedback():
    """Whatever the right letter, the text is the same."""
    wrong = ["<answer>A</answer>", "B", "<answer>A B</answer>"]
    texts = {tuple(grade(ChoiceReward(), wrong, [letter] * 3)[1]) for letter in "BCD"}
    assert len(texts) == 1


def test_choices_of_other_letters_and_wrong_rows():
    reward = ChoiceReward(letters=("yes", "no"))
    assert grade(reward, ["<answer>no</answer>", "<answer>maybe</answer>"], ["no", "no"])[0] == [1.0, 0.0]
    assert grade(ChoiceReward(), ["<answer>A</answer>", "A"], ["A", "A"])[2] == 0.5
    with pytest.raises(ValueError, match="must be one of A, B, C, D, got 'E'"):
        ChoiceReward().grade("<answer>A</answer>", "E")
    assert reward.__name__ == "choice_reward"


@needs_rows
def test_real_choice_rows():
    rows = [json.loads(line) for line in (ROWS / "sciknoweval_mcq.jsonl").read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    right = [f"<reasoning>\nso\n</reasoning>\n<answer>\n{answer}\n</answer>" for answer in answers]
    assert grade(ChoiceReward(), right, answers) == ([1.0] * 120, [None] * 120, 1.0)
    turned = ["ABCD"[("ABCD".index(answer) + 1) % 4] for answer in answers]
    rewards, feedback, _ = grade(ChoiceReward(), [f"<answer>{letter}</answer>" for letter in turned], answers)
    assert rewards == [0.0] * 120 and feedback == [f"Your answer {letter} is wrong." for letter in turned]


def steps(*actions):
    return "\n".join(f"Thought: so\nAction: {name}\nAction Input: {json.dumps(value)}" for name, value in actions)


def expected(*actions):
    return json.dumps([{"Action": name, "Action_Input": json.dumps(value)} for name, value in actions])


FACTS = ("getFacts", {"category": "habitat", "limit": 3})
IMAGE = ("getImage", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (steps(FACTS, IMAGE), None),
        (steps(IMAGE, FACTS), None),
        ('Action: getFacts\nAction Input: {\n "limit": 3.0,\n "category": "habitat"}\n' + steps(IMAGE), None),
        (steps(FACTS), "An action is missing."),
        (steps(FACTS, IMAGE, IMAGE), "Not called for: getImage."),
        (steps(("getFacts", {"category": "habitat", "limit": 4}), IMAGE), "Wrong inputs: limit = 4."),
        (steps(("getFacts", {"category": "habitat"}), IMAGE), "An input is missing."),
        (steps(("getFacts", {**FACTS[1], "x": "y"}), IMAGE), 'Wrong inputs: x = "y".'),
        (steps(("other", FACTS[1]), IMAGE), "Not called for: other. An action is missing."),
        ("I would look it up.", "There is no line `Action: NAME`."),
        ("Action: getFacts", "There is no line `Action Input: ...` after `Action: getFacts`."),
        ("Action:\nAction Input: {}", "names no tool"),
        ("Action: getFacts\nAction Input: {category: habitat}", "not valid JSON"),
        ("Action: getFacts\nAction Input: [1]", "must be a JSON object"),
        ("Action: getFacts\nAction Input: " + "[" * 100_000, "not valid JSON"),
        ('Action: getFacts\nAction Input: {"x": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)  # fmt: skip
def test_tool_use(text, said):
    answer = expected(FACTS, IMAGE)
    (reward,), (feedback,), _ = grade(ToolUseReward(), [text], [answer])
    assert reward == float(said is None)
    if said is None:
        assert feedback is None
        return
    assert said in feedback and "3" not in feedback.replace("JSON", "")  # what is missing or right is not named
    (_,), (shown,), _ = grade(ToolUseReward(show_answer=True), [text], [answer])
    assert shown.endswith(f"The right answer is {answer}.")


def test_inputs_of_any_depth_and_names_of_any_length_are_judged():
    for depth in range(500, 1000):
        text = 'Action: a\nAction Input: {"x": ' + "[" * depth + "]" * depth + "}"
        assert not ToolUseReward().grade(text, expected(FACTS)).right
    for text in (steps(("b" * 100_000, {})), steps(*[("b", {})] * 5000), steps(("b", {"k" * 100_000: 1}))):
        assert len(ToolUseReward().grade(text, expected(FACTS)).feedback) < 600


def test_repeated_parameters_all_count():
    """Merged into one object, the first of two searches would be free."""
    two = [("search", {"size": "small"}), ("search", {"size": "large"})]
    half = [("search", {"size": "any"}), ("search", {"size": "large"})]
    answers = [expected(*two)] * 3
    assert grade(ToolUseReward(), [steps(*two), steps(*two[::-1]), steps(*half)], answers)[0] == [1.0, 1.0, 0.0]


@needs_rows
def test_real_tool_rows():
    rows = [json.loads(line) for line in (ROWS / "tooluse.jsonl").read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    right, changed = [], []
    for answer in answers:
        actions = [(step["Action"], json.loads(step["Action_Input"])) for step in json.loads(answer)]
        right.append(steps(*actions))
        changed.append(steps(*[(name, {**value, "extra": "0"}) for name, value in actions]))
    assert grade(ToolUseReward(), right, answers) == ([1.0] * 24, [None] * 24, 1.0)
    rewards, feedback, well_formed = grade(ToolUseReward(), changed, answers)
    assert rewards == [0.0] * 24 and well_formed == 1.0
    assert all(text.startswith("Wrong inputs: extra = ") for text in feedback)
    for text, answer in zip(feedback, answers, strict=True):
        assert not any(step["Action"] in text for step in json.loads(answer))


@pytest.mark.parametrize(
    "answer",
    [
        "no json", "{}", "[]", '[{"Action": "x"}]', '[{"Action": "x", "Action_Input": "{"}]', "[1]",
        '[{"Action": "x", "Action_Input": "[1]"}]', '[{"Action": "x", "Action_Input": null}]',
    ],
)  # fmt: skip
def test_tool_rows_without_actions_are_refused(answer):
    with pytest.raises(ValueError, match="must be a JSON list"):
        ToolUseReward().grade(steps(FACTS), answer)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{2}", "2"),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{never closed", "1"),
        (r"\boxed{ }", None),
        ("2", None),
        (r"\boxed 2", None),
        (r"\boxed{\boxed{1} + 1", "1"),
        (r"\boxed{f(x) = \left\{1\right.}", r"f(x) = \left\{1\right."),
        (r"a\\\boxed{\{1\}} and \boxed{", r"\{1\}"),
        (r"} \\boxed{3}", "3"),
        ("\\", None),
    ],
)
def test_boxes(text, content):
    assert boxed(text) == content


def test_many_boxes_are_read_once():
    """Read again for each of them, this takes hours."""
    start = time.monotonic()
    assert boxed("\\boxed{" * 140_000) is None
    assert boxed("\\boxed{" * 140_000 + "}") is None
    assert boxed("\\boxed{a" * 100_000 + "}" * 1000) == "a"
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("text", "answer", "said"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", None),
        (r"\boxed{0.5}", r"$\frac{1}{2}$", None),
        (r"\boxed{x^2 + 2x + 1}", r"\boxed{(x+1)^2}", None),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", None),
        (r"\boxed{3}", "0.5", "Your answer 3 is wrong."),
        (r"<think>\boxed{0.5}</think> \boxed{4}", "0.5", "Your answer 4 is wrong."),
        ("0.5", "0.5", "There is no \\boxed{...}."),
        (r"\boxed{}", "0.5", "There is no \\boxed{...}."),
    ],
)
def test_mathematics(text, answer, said):
    pytest.importorskip("math_verify", reason="math-verify is missing: pip install 'sdpo-trl[math]'")
    (reward,), (feedback,), _ = grade(MathReward(), [text], [answer])
    assert reward == float(said is None)
    assert feedback is None if said is None else said in feedback
    if said is not None:
        assert answer not in feedback
        (_,), (shown,), _ = grade(MathReward(show_answer=True), [text], [answer])
        assert shown.endswith(f"The right answer is {answer}.")


def test_the_right_answer_may_be_a_number():
    pytest.importorskip("math_verify", reason="math-verify is missing: pip install 'sdpo-trl[math]'")
    reward = MathReward(show_answer=True)
    assert grade(reward, [r"\boxed{42}", r"\boxed{-\frac{1}{2}}", r"\boxed{41}"], [42, -0.5, 42])[0] == [1.0, 1.0, 0.0]
    assert reward.grade(r"\boxed{41}", 42).feedback.endswith("The right answer is 42.")
    for odd in (None, True, ["1"]):
        with pytest.raises(ValueError, match="must be a text or a number"):
            reward.grade(r"\boxed{1}", odd)


def test_an_answer_that_cannot_be_computed_meets_the_time_limit():
    pytest.importorskip("math_verify", reason="math-verify is missing: pip install 'sdpo-trl[math]'")
    reward, start = MathReward(timeout_seconds=1), time.monotonic()
    assert not reward.grade(r"\boxed{9^{9^{9^9}}}", "1").right
    assert time.monotonic() - start < 6


def test_mathematics_outside_the_main_thread_and_bad_rows_are_refused():
    pytest.importorskip("math_verify", reason="math-verify is missing: pip install 'sdpo-trl[math]'")
    reward, caught = MathReward(), []

    def work():
        try:
            reward.grade(r"\boxed{1}", "1")
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]
    with pytest.raises(ValueError, match="cannot read the dataset's answer"):
        reward.grade(r"\boxed{1}", "")
    with pytest.raises(ValueError, match="timeout_seconds"):
        MathReward(timeout_seconds=0)


def test_without_math_verify_the_error_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "math_verify":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'sdpo-trl\[math\]'"):
        MathReward()


def test_the_package_imports_what_is_asked_for_alone():
    """A grader needs no sandbox and no client library, and the core imports none of this."""
    import subprocess
    import sys

    from conftest import ROOT

    code = (
        "import sys, sdpo_trl\n"
        "assert not [name for name in sys.modules if 'environments' in name]\n"
        "from sdpo_trl.environments import ChoiceReward\n"
        "heavy = {'openai', 'math_verify', 'datasets', 'trl', 'transformers', 'sdpo_trl.environments.sandbox'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "import sdpo_trl.environments as e\n"
        "assert all(getattr(e, name) for name in e.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
