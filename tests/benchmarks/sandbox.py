"""Programs per second in the sandbox, and CPU time of each, against plain subprocesses.

python tests/benchmarks/sandbox.py [--programs N] [--workers N] [--out FOLDER]
"""

import argparse
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import measure  # noqa: E402

from sdpo_trl.environments.code_data import own_problem_rows  # noqa: E402
from sdpo_trl.environments.pool import SandboxPool  # noqa: E402
from sdpo_trl.environments.sandbox import Program, Sandbox  # noqa: E402


def scripts(count: int) -> list[tuple[str, str]]:
    """Reference solutions of the shipped problems, each with the input of a test."""
    rows = [row for row in own_problem_rows() if row["function"] is None]
    pairs = [(row["solution"], test["input"]) for row in rows for test in row["public_tests"]]
    return [pairs[i % len(pairs)] for i in range(count)]


def plain(python: str, pairs: list[tuple[str, str]], workers: int) -> None:
    """What a reward function would do that trusts the programs."""

    def run(pair: tuple[str, str]) -> None:
        line = [python, "-c", pair[0]]
        subprocess.run(line, input=pair[1], capture_output=True, text=True, timeout=20, check=True)

    with ThreadPoolExecutor(workers) as executor:
        list(executor.map(run, pairs))


def pooled(sandbox: Sandbox, pairs: list[tuple[str, str]], workers: int) -> None:
    ended = SandboxPool(sandbox, workers).run([Program(code, stdin) for code, stdin in pairs])
    assert all(end.status == "ok" for end in ended)


def cpu_seconds(call: Callable[[], None]) -> float:
    """User and system time of all processes that `call` starts: unlike the rate, no matter how busy the machine is."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=120)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    pairs, safe = scripts(options.programs), Sandbox()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the point of this contender is that it is unsafe
        unsafe = Sandbox(unsafe=True)
    contenders = {}
    for workers in sorted({1, options.workers}):
        contenders[f"plain subprocess, {workers} at once"] = lambda w=workers: plain(safe.python, pairs, w)
        contenders[f"`unsafe=True`, {workers} at once"] = lambda w=workers: pooled(unsafe, pairs, w)
        contenders[f"sandbox, {workers} at once"] = lambda w=workers: pooled(safe, pairs, w)
    times = measure.interleave(contenders, 3)
    rows = []
    for name, seconds in times.items():
        reference = times[f"plain subprocess, {name.split(', ')[1]}"]
        rate = options.programs / seconds
        cost = 1000 * cpu_seconds(contenders[name]) / options.programs
        rows.append(
            {"programs": name, "per second": rate, "relative to plain": reference / seconds, "CPU ms each": cost}
        )
    measure.publish("sandbox", rows, options.out)


if __name__ == "__main__":
    main()
