"""Each launch line of the README on the CPU of one machine: the file as it is, fewer processes, no bfloat16."""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

ROOT = Path(__file__).parent.parent
LINES = re.findall(r"accelerate launch --config_file accelerate_configs/(\S+)\.yaml", (ROOT / "README.md").read_text())
# What a file makes of two processes without a GPU: the distributed type, ZeRO's stage.
EXPECTED = {
    "cpu": ("NO", None),
    "single_gpu": ("NO", None),
    "ddp": ("MULTI_CPU", None),
    "fsdp2": ("FSDP", None),
    "zero2": ("DEEPSPEED", 2),
    "zero3": ("DEEPSPEED", 3),
    "multi_node": ("FSDP", None),
}


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start(folder, name, *options):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [str(ROOT / "accelerate_configs" / f"{name}.yaml"), "--mixed_precision", "no"]
    command += ["--num_cpu_threads_per_process", "1", *options, str(ROOT / "tests" / "launch_worker.py"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"DS_ACCELERATOR": "cpu"} if "zero" in name else {})
    output = (folder / f"output{len(list(folder.glob('output*')))}").open("w")
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)


def launched(folder, name):
    """What each process saw; the multi-node line is started as two machines with one process each."""
    folder.mkdir()
    one = name in ("cpu", "single_gpu")
    options = ["--cpu"] if one else ["--num_processes", "2", "--main_process_port", str(free_port())]
    if name == "multi_node":
        options += ["--main_process_ip", "127.0.0.1"]
        machines = [start(folder, name, *options, "--machine_rank", str(rank)) for rank in range(2)]
    else:
        machines = [start(folder, name, *options)]
    codes = [machine.wait(timeout=400) for machine in machines]
    outputs = "\n".join(path.read_text()[-3000:] for path in folder.glob("output*"))
    assert codes == [0] * len(machines), outputs
    assert (folder / "model" / "model.safetensors").is_file()
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen-*.json"))]


def test_each_line_of_the_readme_is_tried():
    assert set(LINES) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_launch_line(tmp_path, name):
    if "zero" in name and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    seen = launched(tmp_path / name, name)
    kind, stage = EXPECTED[name]
    assert len(seen) == (1 if kind == "NO" else 2)
    for process in seen:
        assert (process["type"], process["stage"], process["processes"]) == (kind, stage, len(seen))
        assert process["fsdp"] == (kind == "FSDP") and len(process["losses"]) == 2
        assert all(0 < loss < 1 for loss in process["losses"])
        assert process["losses"] == seen[0]["losses"]
