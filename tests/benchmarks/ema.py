"""
What an EMA teacher costs a process in memory: its values, a move, a teacher's pass; whole and sharded over two.

`python tests/benchmarks/ema.py`: a random bfloat16 model of 101 million parameters, one process and two (FSDP2, gloo).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from measure import peak_of, publish
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from sdpo_trl.store import WeightStore

MIB = 1 << 20
SIZES = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32000}


def measure() -> dict[str, object]:
    """Peaks of this process, in MiB, beside what it holds."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=12)).bfloat16()
    if dist.get_world_size() > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    store = WeightStore(model, high_precision=True)
    parts = [p.to_local() if dist.get_world_size() > 1 else p for p in model.parameters()]
    student = sum(p.nbytes for p in parts)
    ids = torch.arange(16)[None]

    def score() -> None:
        with torch.no_grad(), store.applied():
            model(input_ids=ids)

    store.move(0.05)  # what is allocated once is not counted
    return {
        "processes": dist.get_world_size(),
        "student": student / MIB,
        "largest tensor": max(p.nbytes for p in parts) / MIB,
        "EMA values (float32)": sum(value.nbytes for value in store._values.values()) / MIB,
        "a move adds": peak_of(lambda: store.move(0.05)) / MIB,
        "a teacher's pass adds": peak_of(score) / MIB,
    }


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        row = measure()
        if dist.get_rank() == 0:
            torch.save(row, sys.argv[1])
        dist.destroy_process_group()
        return
    rows = []
    # glibc otherwise keeps freed tensors in its heap: the peak would be that of the heap and not of the tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    for processes in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "row.pt")
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
            subprocess.run([*torchrun, str(processes), __file__, path], check=True, env=environment)
            rows.append(torch.load(path))
    publish("ema", rows, Path("runs/benchmarks"))


if __name__ == "__main__":
    main()
