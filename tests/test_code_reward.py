"""Grading programs, and what is said about them."""

import shutil

import pytest
import tiny
from datasets import Dataset

from sdpo_trl.environments.answers import answer_text, extract_code, same_output, same_value
from sdpo_trl.environments.code_feedback import NO_CODE, cut, feedback_text, printable
from sdpo_trl.environments.code_reward import CodeReward
from sdpo_trl.environments.code_tests import CodeTest, Verdict, prelude_for, read_tests, write_tests
from sdpo_trl.environments.sandbox import Limits, Sandbox

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is missing: apt-get install bubblewrap"
)


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(Limits(cpu_seconds=0.5, wall_seconds=4, memory_bytes=256 << 20))


def fenced(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\n"


class Log:
    """What a reward function logs, as TRL collects it."""

    def __init__(self):
        self.extra, self.metrics = {}, {}

    def log_extra(self, name, values):
        self.extra.setdefault(name, []).extend(values)

    def log_metric(self, name, value):
        self.metrics[name] = value


def grade(sandbox, codes, public, hidden=(), function=None, **options):
    log = Log()
    reward = CodeReward(sandbox, workers=2, **options)
    count = len(codes)
    rewards = reward(
        prompts=["p"] * count,
        completions=[fenced(code) for code in codes],
        public_tests=[write_tests(public)] * count,
        hidden_tests=[write_tests(hidden)] * count,
        function=[function] * count,
        log_extra=log.log_extra,
        log_metric=log.log_metric,
        trainer_state=None,
    )
    return rewards, log.extra["feedback"], log.metrics


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("no code at all", None),
        ("x = 1", None),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("first\n```python\nx = 1\n```\nthen\n```py\nx = 2\n```\nend", "x = 2\n"),
        ("```python\nx = 1\n```\nand\n```python\nx = 3", "x = 3\n"),  # cut off: the last block is the answer
        ("<think>\n```python\nbad\n```\n</think>\n```python\ngood\n```", "good\n"),
        ("thinking ```python\nbad\n```</think>only words", None),  # the template opened the thinking
        ("<think>never closed\n```python\nx\n```", None),
        ("```python\nprint('''\n```\n''')\n", "print('''\n"),  # a fence in a string closes, as in Markdown
        ("````python\nprint('''\n```\n''')\n````", "print('''\n```\n''')\n"),
        ("  ```python\n  x = 1\n  ```", "x = 1\n"),
        ("1. So:\n   ```python\n   if x:\n       y\n\n z\n   ```", "if x:\n    y\n\nz\n"),
        ("```python\n  x = 1\n```", "  x = 1\n"),
        ("inline ```x``` only", None),
        ("```python\n\n```", None),
        ('```python title="a.py"\nx = 1\r\n```\r\n', "x = 1\r\n"),
    ],
)
def test_code_is_the_last_fenced_block(text, code):
    assert extract_code(text) == code


def test_an_answer_is_text_or_messages():
    messages = [
        {"role": "assistant", "content": "first"},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "last"}]},
    ]
    assert answer_text(messages) == "last"
    assert answer_text("plain") == "plain"
    assert answer_text([{"role": "tool", "content": "x"}]) == ""


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("1 2\n", "1  2", True),
        ("1\n2\n", "1\n2", True),
        ("1\n2\n", "1 2", False),
        ("a\n\n", "a\n", True),
        ("a\n", "\n \na\n", True),
        ("a\n\nb", "a\nb", False),
        ("0.5", "0.50000000001", True),
        ("0.5", "0.5001", False),
        ("1000000.0", "1000000.9", True),  # relative
        ("5", "5.0", True),
        ("5", "5.0000001", False),  # integers are exact
        ("123456789012345678901234567890", "123456789012345678901234567891", False),
        ("1e-9", "0", True),
        ("inf", "inf", True),
        ("nan", "1", False),
        ("1000.0", "1_000.0", False),  # Python reads it, no benchmark means it
        ("Yes", "YES", False),
        ("", "", True),
        ("", "x", False),
        ("0x10", "16", False),
        ("1.0", "1" * 100_000, False),
        ("1e999999999", "1e99999999", False),
        ("1.5e9999", "2.5e9998", False),
    ],
)
def test_outputs_are_compared_as_benchmarks_do(expected, got, same):
    assert same_output(expected, got) is same


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ([1, 2], [1, 2], True),
        ([1, 2], [2, 1], False),
        (1.0, 1.0000000001, True),
        (1.5, 10**400, False),
        (2, 2.0, True),
        (2, 2.1, False),
        (2, float("inf"), False),
        (2, float("nan"), False),
        (float("inf"), 1e308, False),
        (1, True, False),
        (False, 0, False),
        (True, True, True),
        (None, None, True),
        (None, 0, False),
        ({"a": [1.0]}, {"a": [1.0 + 1e-9]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ("1", 1, False),
        ([], {}, False),
    ],
)
def test_values_are_compared_as_plain_data(expected, got, same):
    assert same_value(expected, got) is same


DOUBLE = [CodeTest("1\n", "2\n"), CodeTest("5\n", "10\n")]
DOUBLE_HIDDEN = [CodeTest("777\n", "1554\n"), CodeTest("-3\n", "-6\n")]
RIGHT = "print(2 * int(input()))"


@needs_bwrap
def test_pass_or_fail_and_the_share_of_tests(sandbox):
    codes = [RIGHT, "print(2)", "n = int(input())\nprint(2 * n if n < 500 else 0)", "raise ValueError('no')"]
    rewards, feedback, metrics = grade(sandbox, codes, DOUBLE, DOUBLE_HIDDEN)
    assert rewards == [1.0, 0.0, 0.0, 0.0]
    assert feedback[0] is None and all(feedback[1:])
    assert metrics["code/has_code"] == 1.0 and metrics["code/timed_out"] == 0.0
    rewards, _, metrics = grade(sandbox, codes, DOUBLE, DOUBLE_HIDDEN, score="share")
    assert rewards == [1.0, 0.25, 0.75, 0.0]
    assert metrics["code/tests_passed"] == pytest.approx(0.5)


@needs_bwrap
def test_the_feedback_is_the_first_failing_public_test(sandbox):
    _, (text,), _ = grade(sandbox, ["print(2)"], DOUBLE, DOUBLE_HIDDEN)
    assert text == "Your program failed public test 2 of 2: wrong answer.\nInput:\n5\nExpected:\n10\nGot:\n2"
    _, (text,), _ = grade(sandbox, ["print(2)"], DOUBLE, show_expected=False)
    assert "10" not in text and "Got:\n2" in text
    _, (text,), _ = grade(sandbox, ["pass"], DOUBLE)
    assert "Got:\n(nothing)" in text
    _, (text,), _ = grade(sandbox, ["def f():\n    return 1 / 0\nf()"], DOUBLE)
    assert text.startswith(
        "Your program failed public test 1 of 2: it ended with an error.\nInput:\n1\nStandard error:"
    )
    assert "line 2, in f" in text and text.endswith("ZeroDivisionError: division by zero")
    _, (text,), _ = grade(sandbox, ["import os; os._exit(7)"], DOUBLE)
    assert text.endswith("Exit status:\n7")
    _, (text,), _ = grade(sandbox, ["x = = 1"], DOUBLE)
    assert "SyntaxError" in text and "x = = 1" in text
    _, texts, metrics = grade(sandbox, ["while True: pass", "x = [0] * 10**10"], DOUBLE)
    assert texts[0].startswith("Your program failed public test 1 of 2: time limit exceeded (limits: 0.5 s, 256 MiB).")
    assert "memory limit exceeded" in texts[1]
    assert metrics["code/timed_out"] == 0.5


@needs_bwrap
def test_many_lines_say_where_they_differ(sandbox):
    public = [CodeTest("", "\n".join(map(str, range(1000))))]
    code = "for i in range(1000): print(i if i != 700 else 'x')"
    _, (text,), _ = grade(sandbox, [code], public, feedback_characters=400)
    assert "The first difference is in line 701: expected '700', got 'x'." in text
    assert len(text) <= 400
    _, (text,), _ = grade(sandbox, ["for i in range(10): print(i)"], public)
    assert "It printed 10 lines instead of 1000." in text


@needs_bwrap
def test_hidden_tests_never_leak(sandbox):
    """Not even through a program that prints or raises its input: of hidden failures one of seven words is told."""
    secret_in, secret_out = "731846", "1463692"
    hidden = [CodeTest(secret_in, secret_out)]
    head = "n = input()\nif len(n) < 3:\n    print(2 * int(n))\n    raise SystemExit\n"
    codes = [
        head + "print(n)",
        head + "raise ValueError(n)",
        head + "raise type('E' + n, (Exception,), {})(n)",
        head + "import sys; sys.exit('input ' + n)",
        head + "import sys; print(n * 10**6, file=sys.stderr)",
        head + "print(n)\nwhile True: pass",
        head + "x = [n] * 10**10",
    ]
    for score in ("pass", "share"):
        _, texts, _ = grade(sandbox, codes, DOUBLE, hidden, score=score)
        assert [text.split(": ")[1] for text in texts] == [
            "wrong answer.", "it ended with an error.", "it ended with an error.", "it ended with an error.",
            "it wrote too much output.", "time limit exceeded.", "memory limit exceeded.",
        ]  # fmt: skip
        for text in texts:
            assert text.startswith("Your program passed all 2 public tests, but a hidden test failed")
            assert secret_in not in text and secret_out not in text
    _, (text,), _ = grade(sandbox, ["print(input())"], [], hidden)
    assert text == "A hidden test failed: wrong answer."


@needs_bwrap
def test_functions_and_solution_classes(sandbox):
    public, hidden = [CodeTest([[1, 2, 3], 2], [2, 4, 6])], [CodeTest([[], 5], [])]
    codes = [
        "def scale(numbers, k): return [k * n for n in numbers]",
        "class Solution:\n def scale(self, numbers: List[int], k: int) -> List[int]: return [k * n for n in numbers]",
        "def scale(numbers, k): return tuple(k * n for n in numbers)",
        "def scale(numbers, k):\n    print('debugging')\n    return numbers",
        "def scale(numbers, k): return {k * n for n in numbers}",
        "def other(): pass",
        "def scale(numbers): return 1",
    ]
    rewards, texts, _ = grade(sandbox, codes, public, hidden, "scale")
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert texts[3] == (
        "Your program failed public test 1 of 1: wrong answer.\n"
        "Arguments:\n[[1, 2, 3], 2]\nExpected:\n[2, 4, 6]\nGot:\n[1, 2, 3]"
    )
    assert "returned a set, which is no plain data" in texts[4]
    assert "There is no function named 'scale'" in texts[5]
    assert "positional argument" in texts[6] and "child" not in texts[6]


@needs_bwrap
def test_a_result_of_any_depth_is_wrong_and_shown_as_far_as_it_can_be(sandbox):
    """The program decides how deep it is, and the trainer's own stack how deep it may be to be written again."""

    def called_from(frames, code):
        return called_from(frames - 1, code) if frames else grade(sandbox, [code], [CodeTest([1], 1)], function="f")

    for depth in (930, 980):
        code = f"def f(x):\n    for _ in range({depth}):\n        x = [x]\n    return x"
        (reward,), (feedback,), _ = called_from(70, code)
        assert reward == 0.0 and "wrong answer" in feedback and "nested too deeply to be shown" in feedback


def test_a_wrapped_output_is_right_either_way(sandbox):
    test = [CodeTest([2], [4], wrapped=True)]
    codes = ["def f(x): return x * x", "def f(x): return [x * x]", "def f(x): return [[x * x]]"]
    assert grade(sandbox, codes, test, (), "f")[0] == [1.0, 1.0, 0.0]
    assert grade(sandbox, codes[:2], [CodeTest([2], [4])], (), "f")[0] == [0.0, 1.0]


@needs_bwrap
def test_an_endless_loop_costs_two_limits_at_most(sandbox):
    public = [CodeTest(str(i), "x") for i in range(10)]
    rewards, texts, _ = grade(sandbox, ["while True: pass"], public, score="share")
    assert rewards == [0.0] and "public test 1 of 10: time limit" in texts[0]


@needs_bwrap
def test_answers_without_code_are_told_how_to_write_it(sandbox):
    log = Log()
    reward = CodeReward(sandbox)
    completions = [[{"role": "assistant", "content": "It is 42."}], [{"role": "assistant", "content": fenced(RIGHT)}]]
    tests = [write_tests(DOUBLE)] * 2
    rewards = reward(prompts=["p"] * 2, completions=completions, public_tests=tests, log_extra=log.log_extra)
    assert rewards == [0.0, 1.0] and log.extra["feedback"] == [NO_CODE, None]
    assert reward(prompts=["p"], completions=["no"], public_tests=[DOUBLE], other=["column"]) == [0.0]
    assert reward.__name__ == "code_reward"


@needs_bwrap
def test_equal_programs_run_once(sandbox):
    reward = CodeReward(sandbox, workers=2)
    ran = []
    former = reward.pool.map
    reward.pool.map = lambda task, items: ran.append(len(items)) or former(task, items)
    tests = [write_tests(DOUBLE)] * 5
    completions = [fenced(RIGHT)] * 3 + [fenced("print(0)"), "none"]
    assert reward(["p"] * 5, completions, tests) == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert ran == [2]


@needs_bwrap
def test_the_tests_of_a_group_are_read_once(sandbox, monkeypatch):
    """A row's tests may have hundreds of megabytes."""
    read = []
    counted = "sdpo_trl.environments.code_reward.read_tests"
    monkeypatch.setattr(counted, lambda text: (read.append(text), read_tests(text))[1])
    assert grade(sandbox, ["x", "y", "z"], [CodeTest("", "1")], [CodeTest("", "2")])[0] == [0.0] * 3
    assert len(read) == 2


@needs_bwrap
def test_rows_without_tests_and_odd_options_are_refused(sandbox):
    with pytest.raises(ValueError, match="Row 0 has no tests"):
        CodeReward(sandbox)(["p"], [fenced(RIGHT)], ["[]"])
    with pytest.raises(ValueError, match="`score`"):
        CodeReward(sandbox, score="half")
    with pytest.raises(ValueError, match="feedback_characters"):
        CodeReward(sandbox, feedback_characters=10)
    with pytest.raises(TypeError, match="list of arguments"):
        CodeReward(sandbox)(["p"], [fenced(RIGHT)], [[CodeTest("1", "2")]], function=["f"])


@pytest.mark.parametrize("tests", ["{}x", '[{"input": "1"}]', "[1]", '["x"]'])
def test_malformed_tests_are_refused(tests):
    with pytest.raises(ValueError, match="Tests must be a list"):
        read_tests(tests)


def test_tests_survive_the_column():
    tests = [CodeTest([1, {"a": [None, True]}], {"b": 1.5}), CodeTest(["x"], ["y"], wrapped=True)]
    assert read_tests(write_tests(tests)) == tests
    assert read_tests(None) == read_tests("") == []


def test_the_prelude_holds_what_the_code_names():
    assert prelude_for("x = 1") == ""
    lines = prelude_for("def f(x: List[int]): return heapq.heappop(x), deque(), math.sqrt(2)").splitlines()
    assert set(lines) == {
        "import heapq", "import math", "from typing import List", "from heapq import heappop",
        "from collections import deque", "from math import sqrt",
    }  # fmt: skip


@pytest.mark.parametrize("budget", [200, 300, 1000])
def test_feedback_keeps_to_its_budget(sandbox, budget):
    public = [CodeTest("in " * 5000, "out " * 5000)]
    for code in ("print('got ' * 5000)", "raise ValueError('message ' * 5000)", "def f(): f()\nf()"):
        _, (text,), _ = grade(sandbox, [code], public, feedback_characters=budget)
        assert len(text) <= budget
        assert "public test 1 of 1" in text and "Input:\nin" in text
    assert "depth exceeded" in text  # the end of a traceback is kept


def test_cutting_keeps_both_ends():
    text = "".join(chr(97 + i % 26) for i in range(1000))
    short = cut(text, 200)
    assert len(short) <= 203 and short.startswith(text[:50]) and short.endswith(text[-30:])
    assert "800 characters left out" in short and cut("abc", 3) == "abc"


def test_printable_leaves_text_alone_and_escapes_the_rest():
    assert printable("é λ 語 \n\t {x} \\frac") == "é λ 語 \n\t {x} \\frac"
    assert printable("a\x00\x1b[31m\ud800\x7f") == "a\\x00\\x1b[31m\\ud800\\x7f"


def test_no_failure_no_text():
    assert feedback_text(Verdict(3, 3, 2), False) is None


@needs_bwrap
def test_feedback_reaches_the_teachers_prompt(sandbox, tmp_path):
    """The whole way: TRL calls the reward, `log_extra` carries the texts, the failing rows' teachers read them."""
    rows = {"prompt": ["task"] * 4, "public_tests": [write_tests(DOUBLE)] * 4, "function": [""] * 4}
    answers = ["```\nprint(2)\n```$", "no code$", "```\nprint(9)\n```$", "```\nx\n```$"]
    trainer = tiny.trainer(
        tmp_path,
        reward=CodeReward(sandbox, workers=2),
        data=Dataset.from_dict(rows),
        trainer_rollout_func=tiny.scripted(answers),
        max_completion_length=32,
    )
    (inputs,) = tiny.micro_batches(trainer)
    prompts = trainer.processing_class.batch_decode(inputs["teacher_prompt_ids"])
    answered = trainer.processing_class.batch_decode(inputs["completion_ids"])
    assert inputs["feedback_available"].all() and len(prompts) == 8
    for prompt, answer in zip(prompts, answered, strict=True):
        expected = {"2": "public test 2 of 2: wrong", "9": "Got:\n9", "x": "NameError", "n": "holds no code"}
        key = "n" if "no code" in answer else answer.replace("print(", "")[4]
        assert expected[key] in prompt
