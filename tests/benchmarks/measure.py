"""Interleaved times and peak memory of separate processes, as medians and ratios."""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

THREADS = int(os.environ.get("BENCHMARK_THREADS", "2"))


def prepare() -> None:
    """The same threads everywhere; denormals cost nothing either way here."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)


def interleave(
    contenders: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds per call, the median of `rounds`, each contender once per round and once before to warm up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds + 1):
        for name, call in contenders.items():
            start = clock()
            call()
            if index:
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_of(call: Callable[[], Any]) -> int:
    """Bytes that `call` adds to the peak resident memory of this process; for a fresh process only."""
    # Lower the high-water mark to what is resident now, where the kernel allows it.
    Path("/proc/self/clear_refs").write_text("5")
    before = int(_status("VmRSS"))
    call()
    return int(_status("VmHWM")) - before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_in_process(script: str, *arguments: str) -> int:
    """Run `script --peak arguments` in a process of its own; it prints the bytes."""
    # glibc otherwise keeps freed tensors in its heap, more or less of them by chance of the order: the peak would be
    # that of the heap and not of the tensors.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    run = subprocess.run(
        [sys.executable, script, "--peak", *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if run.returncode:
        raise RuntimeError(f"{script} --peak {' '.join(arguments)} failed:\n{run.stderr[-2000:]}")
    return int(run.stdout.strip().splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table; floats with three digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def publish(name: str, rows: list[dict[str, Any]], folder: Path) -> None:
    """Write `name`.json and `name`.md to `folder`, and print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(rows, indent=1))
    text = table(rows)
    (folder / f"{name}.md").write_text(text + "\n")
    print(f"\n{name}\n{text}", flush=True)
