"""The kernel's toy experiment does what it prints."""

import os
import subprocess
import sys

import pytest
import torch
import toy_programs
from conftest import ROOT


@pytest.fixture(scope="module")
def shown():
    return toy_programs.main()


def test_routing_is_that_of_the_six_attempts(shown):
    """Two successes use their own solution, two failures another's, one reads only its tests, one has nothing."""
    assert shown["solutions"] == [0, 0, 3, 3, -1, -1]
    assert shown["available"] == [True] * 5 + [False]


def test_training_moves_the_rows_that_read_something(shown):
    assert shown["losses"][0] > 0.5
    assert shown["losses"][-1] < 0.01 * shown["losses"][0]
    assert all(late <= early for early, late in zip(shown["losses"], shown["losses"][1:], strict=False))
    for row in range(5):
        assert shown["solved_after"][row] > shown["solved_before"][row] + 0.05
    # The teacher's belief, in closed form: p' is proportional to p e^BELIEF where the reader agrees.
    agreeing = torch.tensor([program == "x+1" for program in toy_programs.PROGRAMS])
    tilted = shown["before"][1] * torch.where(agreeing, torch.tensor(toy_programs.BELIEF).exp(), torch.tensor(1.0))
    torch.testing.assert_close(shown["after"][1], tilted / tilted.sum(), rtol=0, atol=0.02)


def test_the_last_row_is_bit_identical(shown):
    assert shown["untouched"]
    assert torch.equal(shown["before"][-1], shown["after"][-1])
    assert shown["solved_after"][-1] == shown["solved_before"][-1]
    assert not torch.equal(shown["before"][-2], shown["after"][-2])


def test_the_feedback_reader_is_right_without_a_solution(shown):
    """Row 4 reads `f(3)=6, not 9` alone; two programs pass that test, and one of them is the square."""
    gained = shown["after"][4] - shown["before"][4]
    likelier = [program for program, gain in zip(toy_programs.PROGRAMS, gained.tolist(), strict=True) if gain > 0]
    assert likelier == ["x*3", "x*x"]


@pytest.mark.parametrize(
    ("program", "x", "value"), [("x+1", 3, 4), ("x-3", 1, -2), ("x*2", 5, 10), ("x*x", 7, 49), ("x-x", 9, 0)]
)
def test_programs_run(program, x, value):
    assert toy_programs.run(program, x) == value


@pytest.mark.parametrize("text", ["y+1", "x+y", "x+", "x+10", "", "__i"])
def test_other_texts_are_no_programs(text):
    with pytest.raises(ValueError):
        toy_programs.run(text, 1)


def test_unknown_operations_are_refused():
    with pytest.raises(KeyError):
        toy_programs.run("x/1", 1)


def test_the_launch_line():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/toy_programs.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-800:]
    assert "bit-identical: True" in done.stdout and "nothing: not trained" in done.stdout
