"""`select_feedback` against a slow loop, and the checks on what a feedback source may give."""

import random
import time

import pytest
import torch

from sdpo_trl import select_feedback
from sdpo_trl.feedback import check_texts, join_texts

HUGE = [-(2**63), 2**63 - 1, -(2**62), 0, -1, 1, 2**40, -(2**40) + 1]


def slow_selection(questions, success, rich, exclude_self):
    """The rule as it reads in the contract: attempt by attempt, candidate by candidate."""
    indices, available = [], []
    for row, question in enumerate(questions):
        candidates = [i for i, other in enumerate(questions) if other == question and success[i]]
        if success[row]:
            candidates = [i for i in candidates if i != row] if exclude_self else [row]
        indices.append(candidates[0] if candidates else -1)
        available.append(bool(candidates) or rich[row])
    return indices, available


def select(questions, success, rich, **options):
    return select_feedback(torch.tensor(questions), torch.tensor(success), torch.tensor(rich), **options)


@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("pass_rate", [0.0, 0.1, 0.5, 1.0])
def test_equals_the_slow_loop(exclude_self, pass_rate):
    generator = random.Random(17)
    for size in [1, 1, 2, 2, 3, 5, 8, 13, 40, 97] * 3:
        pool = generator.sample(HUGE, generator.randint(1, len(HUGE))) + [generator.getrandbits(63) for _ in range(2)]
        questions = [generator.choice(pool) for _ in range(size)]
        success = [generator.random() < pass_rate for _ in range(size)]
        rich = [generator.random() < 0.4 for _ in range(size)]
        indices, available = select(questions, success, rich, exclude_self=exclude_self)
        assert (indices.tolist(), available.tolist()) == slow_selection(questions, success, rich, exclude_self)


@pytest.mark.parametrize(
    ("questions", "success", "rich", "exclude_self", "indices", "available"),
    [
        ([7, 8, 7], [False, True, True], [False] * 3, False, [2, 1, 2], [True] * 3),
        ([5], [False], [True], False, [-1], [True]),
        ([5], [False], [False], False, [-1], [False]),
        ([5], [True], [False], False, [0], [True]),
        ([5], [True], [False], True, [-1], [False]),
        ([5], [True], [True], True, [-1], [True]),
        ([3, 3, 3, 3], [True, False, True, True], [False] * 4, True, [2, 0, 0, 0], [True] * 4),
        ([3, 3, 3, 3], [True, False, True, True], [False] * 4, False, [0, 0, 2, 3], [True] * 4),
        ([1, 2, 1, 2], [True, False, False, False], [False, False, False, True], False, [0, -1, 0, -1], [1, 0, 1, 1]),
    ],
)
def test_worked_examples(questions, success, rich, exclude_self, indices, available):
    found, usable = select(questions, success, rich, exclude_self=exclude_self)
    assert found.tolist() == indices
    assert usable.tolist() == [bool(x) for x in available]


def test_result_has_no_gradient_and_leaves_the_arguments_alone():
    questions, success, rich = torch.tensor([4, -4, 4]), torch.tensor([False, False, True]), torch.tensor([True] * 3)
    copies = questions.clone(), success.clone(), rich.clone()
    indices, available = select_feedback(questions, success, rich)
    assert (indices.dtype, available.dtype) == (torch.int64, torch.bool)
    assert indices.shape == available.shape == (3,)
    assert indices.device == available.device == questions.device
    assert not indices.requires_grad and not available.requires_grad
    indices.fill_(9)
    available.fill_(False)
    for now, before in zip((questions, success, rich), copies, strict=True):
        assert torch.equal(now, before)


def test_views_that_are_not_contiguous():
    questions = torch.tensor([7, 0, 8, 0, 7, 0])[::2]
    success = torch.tensor([[False, True], [True, False], [True, False]])[:, 0]
    indices, _ = select_feedback(questions, success, torch.zeros(6, dtype=torch.bool)[::2])
    assert indices.tolist() == [2, 1, 2]


def test_many_attempts_are_fast_and_right():
    size = 300_000
    questions = torch.randint(-(2**40), 2**40, (size // 8,)).repeat_interleave(8)[torch.randperm(size)]
    success, rich = torch.rand(size) < 0.1, torch.rand(size) < 0.5
    start = time.perf_counter()
    indices, available = select_feedback(questions, success, rich, exclude_self=True)
    assert time.perf_counter() - start < 5.0  # about 0.1 s; a loop over the attempts takes minutes
    # One pass over the rows is enough to check them all: the two smallest successes of each question.
    smallest: dict[int, list[int]] = {}
    for row, (question, passed) in enumerate(zip(questions.tolist(), success.tolist(), strict=True)):
        if passed and len(smallest.setdefault(question, [])) < 2:
            smallest[question].append(row)
    expected = [
        next((i for i in smallest.get(question, []) if i != row), -1)
        for row, question in enumerate(questions.tolist())
    ]
    assert indices.tolist() == expected
    assert torch.equal(available, (indices >= 0) | rich)


@pytest.mark.parametrize("name", ["question_ids", "success", "rich_feedback"])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda x: x.tolist(), TypeError),
        (lambda x: x.numpy(), TypeError),
        (lambda x: x.to(torch.int32), TypeError),
        (lambda x: x.to(torch.uint8), TypeError),
        (lambda x: x.float(), TypeError),
        (lambda x: x[None], ValueError),
        (lambda x: x[0], ValueError),
        (lambda x: x[:0], ValueError),
    ],
)
def test_bad_arguments_are_named(name, change, error):
    arguments = {
        "question_ids": torch.tensor([1, 2]),
        "success": torch.tensor([True, False]),
        "rich_feedback": torch.tensor([True, False]),
    }
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=f"`{name}`"):
        select_feedback(**arguments)


@pytest.mark.parametrize("name", ["success", "rich_feedback"])
def test_lengths_and_devices_must_agree(name):
    flags = {"success": torch.tensor([True, False]), "rich_feedback": torch.tensor([True, False])}
    with pytest.raises(ValueError, match=rf"`{name}`.*3.*2"):
        select_feedback(torch.tensor([1, 2]), **{**flags, name: torch.tensor([True] * 3)})
    with pytest.raises(ValueError, match=rf"`{name}`.*meta.*cpu"):
        select_feedback(torch.tensor([1, 2]), **{**flags, name: torch.ones(2, dtype=torch.bool, device="meta")})


def test_errors_say_what_was_given():
    with pytest.raises(TypeError, match=r"`question_ids`.*torch\.int32"):
        select_feedback(torch.tensor([1], dtype=torch.int32), torch.tensor([True]), torch.tensor([True]))
    with pytest.raises(ValueError, match=r"`question_ids`.*\(0,\)"):
        empty = torch.tensor([], dtype=torch.bool)
        select_feedback(torch.tensor([], dtype=torch.int64), empty, empty)
    with pytest.raises(TypeError, match=r"`exclude_self`.*int"):
        select([1], [True], [True], exclude_self=1)
    with pytest.raises(TypeError, match="positional"):
        select_feedback(torch.tensor([1]), torch.tensor([True]), torch.tensor([True]), True)


def test_check_texts_keeps_texts_and_drops_blank_ones():
    given = ["wrong {x}\n", None, "", "  \n\t", " a "]
    assert check_texts(given, 5, "a source") == ["wrong {x}\n", None, None, None, " a "]
    assert given == ["wrong {x}\n", None, "", "  \n\t", " a "]
    assert check_texts(("a", None), 2, "a source") == ["a", None]
    assert check_texts([], 0, "a source") == []


@pytest.mark.parametrize(
    ("texts", "error", "parts"),
    [
        (["a"], ValueError, ["my source", "1", "2"]),
        (["a", "b", "c"], ValueError, ["my source", "3", "2"]),
        (["a", 3], TypeError, ["my source", "int", "rollout 1"]),
        ([float("nan"), "b"], TypeError, ["my source", "float", "rollout 0"]),
        ([None, b"b"], TypeError, ["my source", "bytes", "rollout 1"]),
        ([None, ["b"]], TypeError, ["my source", "list", "rollout 1"]),
        ("ab", TypeError, ["my source", "str"]),
        (None, TypeError, ["my source", "NoneType"]),
        ({"a", "b"}, TypeError, ["my source", "set"]),
        ({0: "a", 1: "b"}, TypeError, ["my source", "dict"]),
        ((text for text in "ab"), TypeError, ["my source", "generator"]),
    ],
)
def test_check_texts_names_source_and_row(texts, error, parts):
    with pytest.raises(error) as caught:
        check_texts(texts, 2, "my source")
    for part in parts:
        assert part in str(caught.value)


def test_join_texts():
    first, second, third = ["a", None, "c", None], [None, "b", "d", None], ["x", None, "e", None]
    assert join_texts([first, second, third], 4) == ["a\n\nx", "b", "c\n\nd\n\ne", None]
    assert join_texts([third, first], 4)[0] == "x\n\na"
    assert join_texts([], 2) == [None, None]
    assert first == ["a", None, "c", None]
