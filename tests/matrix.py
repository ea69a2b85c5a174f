"""
Every way of sharing a model x full and LoRA x every teacher, on two CPU processes, as a table.

`python tests/matrix.py [--only REGEX] [--folder FOLDER]` prints it; pytest runs the same cells (test_matrix.py). A
cell passes if its two processes finish three steps (two micro-batches each, answers of unequal length, one process
without any feedback in the second) with

- `layout`: the parameters sharded as asked for;
- `logs`: losses, gradient norms, divergences and distances of the teacher that are DDP's;
- `equal`: student and teacher bit-equal on both processes, and DDP's up to rounding;
- `moves`: a student that moved, and a teacher that moved exactly if it should;
- `resumes`: the same student and teacher, bit for bit, from a checkpoint of the second step;
- `exports`: a folder that a single process loads, which holds the student as gathered, and nothing else.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny
import torch
from matrix_worker import BACKENDS, KINDS, STUDENTS
from peft import PeftModel
from transformers import AutoModelForCausalLM

WORKER = Path(__file__).with_name("matrix_worker.py")
CELLS = [f"{backend}-{student}-{kind}" for backend in BACKENDS for student in STUDENTS for kind in KINDS]
SKIPPED = "skipped: deepspeed is not installed"


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def run(folder: Path, cells: list[str], timeout: float = 600) -> dict[str, str]:
    """
    Run cells on two processes, and DDP's where they are compared with it.

    Returns what went wrong with the processes that stopped early, by cell.
    """
    wanted = [f"ddp-{student}-{kind}" for _, student, kind in (cell.split("-") for cell in cells)]
    wanted = [*dict.fromkeys([*wanted, *cells])]
    broken: dict[str, str] = {}
    for deepspeed in (False, True):
        rest = [cell for cell in wanted if cell.startswith("zero") == deepspeed]
        while rest and (has_deepspeed() or not deepspeed):
            output = _start(folder, rest, deepspeed, timeout)
            done = [cell for cell in rest if all((folder / cell / f"result-{i}.pt").is_file() for i in range(2))]
            rest = rest[len(done) :]
            if rest:  # the next one broke, those after it have not been tried
                broken[rest.pop(0)] = output
    return broken


def _start(folder: Path, cells: list[str], deepspeed: bool, timeout: float) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment |= {"DS_ACCELERATOR": "cpu"} if deepspeed else {"ACCELERATE_USE_CPU": "1"}
    path = folder / "output"
    with path.open("w") as output:
        process = subprocess.Popen(
            [*torchrun, str(WORKER), str(folder), *cells], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun takes its processes with it
            process.wait(timeout=30)
            output.write("\nhung\n")
    return path.read_text()


def failures(folder: Path, cell: str) -> list[str]:
    """Which of the checks (see the module's docstring) a cell that finished does not pass."""
    _, student, kind = cell.split("-")
    first, second = (torch.load(folder / cell / f"result-{i}.pt", weights_only=False) for i in range(2))
    ddp = torch.load(folder / f"ddp-{student}-{kind}" / "result-0.pt", weights_only=False)
    straight, resumed, truth = first["straight"], first["resumed"], ddp["straight"]
    checks = {
        "layout": all(result[run]["as_asked"] for result in (first, second) for run in result),
        "logs": len(straight["logs"]) == 3 and _near_logs(straight["logs"], truth["logs"]),
        "equal": _same(first["straight"], second["straight"]) and _near(straight, truth),
        "moves": _moves(straight, student, kind),
        "resumes": _same(straight, resumed) and _near_logs(straight["logs"][2:], resumed["logs"][-1:], 1e-6),
        "exports": _exports(folder / cell / "export", student, straight["student"]),
    }
    return [name for name, passed in checks.items() if not passed]


def _near_logs(actual: list[dict], expected: list[dict], rtol: float = 1e-3) -> bool:
    return len(actual) == len(expected) and all(
        a.keys() == b.keys() and all(abs(a[name] - b[name]) <= rtol * abs(b[name]) + 1e-6 for name in b)
        for a, b in zip(actual, expected, strict=True)
    )


def _tensors(result: dict) -> dict[str, torch.Tensor]:
    groups = {"student": result["student"], **result["stores"]}
    return {f"{key}/{name}": value for key, group in groups.items() for name, value in group.items()}


def _same(actual: dict, expected: dict) -> bool:
    a, b = _tensors(actual), _tensors(expected)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def _near(actual: dict, expected: dict) -> bool:
    a, b = _tensors(actual), _tensors(expected)
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=1e-3, atol=1e-4) for name in b)


def _moves(result: dict, student: str, kind: str) -> bool:
    start = tiny.trained(tiny.build_model())

    def moved(tensors: dict[str, torch.Tensor]) -> bool:
        if student == "lora":  # half of an adapter is zero at the start
            return any(value.any() for name, value in tensors.items() if "lora_B" in name)
        return any(not torch.equal(value, start[name]) for name, value in tensors.items())

    return moved(result["student"]) and all(
        moved(store) == (kind in ("ema", "snapshot")) for store in result["stores"].values()
    )


def _exports(folder: Path, student: str, trained: dict[str, torch.Tensor]) -> bool:
    names = {path.name for path in folder.iterdir()}
    if student == "lora":
        weights = "adapter_model.safetensors"
        model = PeftModel.from_pretrained(tiny.build_model(), folder, is_trainable=True)
    else:
        weights = "model.safetensors"
        model = AutoModelForCausalLM.from_pretrained(folder)
    loaded = tiny.trained(model)
    tensors = {name for name in names if name.endswith((".safetensors", ".bin", ".pt"))}
    same = loaded.keys() == trained.keys() and all(torch.equal(loaded[name], trained[name]) for name in trained)
    return tensors == {weights, "training_args.bin"} and same


def table(results: dict[str, str]) -> str:
    """One row per backend and student, one column per teacher."""
    rows = [["", *KINDS]]
    for backend in BACKENDS:
        for student in STUDENTS:
            rows.append([f"{backend} {student}", *(results.get(f"{backend}-{student}-{kind}", "-") for kind in KINDS)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description="The matrix of backends, students and teachers on two processes.")
    parser.add_argument("--only", default="", help="a regular expression over cells, such as 'zero3-.*-ema'")
    parser.add_argument("--folder", type=Path, help="where to keep what the processes wrote")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    cells = [cell for cell in CELLS if re.search(args.only, cell)]
    broken = run(folder, cells, timeout=3600)
    results = {}
    for cell in cells:
        if cell.startswith("zero") and not has_deepspeed():
            results[cell] = "skipped"
        elif cell in broken:
            results[cell] = "broke"
            print(f"{cell}:\n{broken[cell][-4000:]}\n")
        else:
            results[cell] = ", ".join(failures(folder, cell)) or "ok"
    print(table(results))
    if "skipped" in results.values():
        print(SKIPPED)
    sys.exit(any(result not in ("ok", "skipped") for result in results.values()))


if __name__ == "__main__":
    main()
