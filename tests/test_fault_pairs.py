"""Faults of one process of two: both meet them alike, and neither waits for ever."""

import os
import subprocess
import sys
from pathlib import Path

import matrix
import pytest
import torch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
WORKER = Path(__file__).with_name("fault_pair_worker.py")


def run(folder, fault, *backends):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    on_cpu = {"DS_ACCELERATOR": "cpu"} if backends[0].startswith("zero") else {"ACCELERATE_USE_CPU": "1"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **on_cpu}
    command = [*torchrun, str(WORKER), str(folder), fault, *backends]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero2", "zero3"])
def test_a_broken_gradient_of_one_process_is_met_by_both(tmp_path, backend):
    if backend.startswith("zero") and not matrix.has_deepspeed():
        pytest.skip(matrix.SKIPPED)
    code, output = run(tmp_path, "gradient", backend)
    assert code == 0, output
    results = [torch.load(tmp_path / backend / f"gradient-{rank}.pt") for rank in range(2)]
    assert results[0] == results[1]
    assert results[0]["finite"] and results[0]["as_asked"] and results[0]["again"] == (5, True)
    assert results[0]["error"] is None and results[0]["chosen"] == "checkpoint-3"
    assert output.count("the gradient of step 2 is not finite") == 2


def test_a_dead_reward_function_of_one_process_ends_both(tmp_path):
    code, output = run(tmp_path, "reward", "ddp")
    assert code == 1
    assert "The reward function `reward` failed with OSError: the grader is gone" in output and "- task" in output
    assert f"last complete checkpoint is {tmp_path / 'ddp' / 'checkpoint-1'}" in output
