"""
Every way of sharing a model x full and LoRA x every teacher, on two CPU processes, as a table.

`python tests/matrix.py [--only REGEX] [--folder FOLDER] [--cuda]` prints it, and a second table of variants (adapters,
tied embeddings, paths, policy terms, ...); pytest runs the same cells (test_matrix.py). A cell passes if its processes
finish three steps (two micro-batches each, answers of unequal length, one process without any feedback in the second)
with

- `layout`: the parameters sharded as asked for;
- `logs`: losses, gradient norms, divergences and distances of the teacher that are DDP's;
- `equal`: student and teacher bit-equal on both processes, and DDP's up to rounding;
- `moves`: a student that moved, and a teacher that moved exactly if it should;
- `resumes`: the same student and teacher, bit for bit, from a checkpoint of the second step;
- `stores`: a last checkpoint from which a single process takes the teacher as gathered;
- `exports`: a folder that a single process loads, which holds the student as gathered, and nothing else;
- `sends`: for vLLM, the student as gathered, merged, under the base model's names, without touching a parameter.
"""

import argparse
import copy
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
from matrix_worker import BACKENDS, KINDS, STUDENTS, student_of
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from sdpo_trl.store import WeightStore

WORKER = Path(__file__).with_name("matrix_worker.py")
CELLS = [f"{backend}-{student}-{kind}" for backend in BACKENDS for student in STUDENTS for kind in KINDS]
VARIED = [
    "full-ema-silent", "full-ema-sampled", "full-base-path", "full-external-path", "full-ema-blend",
    "full-trust_region-reference", "full-ema-evaluates", "full-ema-checkpointing", "full-ema-offload",
    "full-ema-heatmap", "lora-trust_region-heatmap",
    "full-ema-bf16", "full-base-tied", "full-ema-asks", "lora-base-asks",
    "lora-ema-sampled", "lora-ema-blend", "lora-ema-checkpointing", "lora-ema-dora", "lora-ema-rslora",
    "lora-ema-bias", "lora-ema-head", "lora-ema-norm", "lora-ema-embeddings", "lora-ema-tokens", "lora-ema-tiedtokens",
    "lora-ema-dropout",
    "lora-base-adapter", "lora-ema-silent",
]  # fmt: skip
CELLS += [f"{backend}-{rest}" for backend in BACKENDS for rest in VARIED]
OWN = ["full-ema-wrapped", "full-base-parts", "full-ema-efficient", "lora-external-efficient"]
CELLS += [f"fsdp2-{rest}" for rest in OWN]
OWN += ["full-ema-parked", "lora-trust_region-parked"]  # FSDP2 parks parameters in host memory only with a GPU
CELLS += [f"zero3-{rest}" for rest in OWN[-2:]]
# Under ZeRO-3, PEFT 0.21 gathers these tokens' weights on a CUDA device, whatever the machine has.
# Those of a tied head are refused where parameters are shared.
LEFT_OUT = ("zero3-lora-ema-tokens", "zero3-lora-ema-tiedtokens", "fsdp2-lora-ema-tiedtokens")
CELLS = [cell for cell in CELLS if cell not in LEFT_OUT]
SKIPPED = "skipped: deepspeed is not installed"


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def run(folder: Path, cells: list[str], timeout: float = 600, gpus: int = 0) -> dict[str, str]:
    """
    Run cells on two processes (or one per GPU), and DDP's where they are compared with it.

    Returns what went wrong with the processes that stopped early, by cell.
    """
    wanted = [*dict.fromkeys([*(_ddp(cell) for cell in cells), *cells])]
    broken: dict[str, str] = {}
    for deepspeed in (False, True):
        rest = [cell for cell in wanted if cell.startswith("zero") == deepspeed]
        while rest and (has_deepspeed() or not deepspeed):
            output = _start(folder, rest, deepspeed, timeout, gpus)
            done = [cell for cell in rest if len(list((folder / cell).glob("result-*.pt"))) == (gpus or 2)]
            rest = rest[len(done) :]
            if rest:  # the next one broke, those after it have not been tried
                broken[rest.pop(0)] = output
    return broken


def _ddp(cell: str) -> str:
    return "-".join(["ddp", *cell.split("-")[1:]])


def _start(folder: Path, cells: list[str], deepspeed: bool, timeout: float, gpus: int) -> str:
    processes = ["--nproc_per_node", str(gpus or 2)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *processes, "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if gpus:
        environment |= {"MATRIX_CUDA": "1"}
    else:
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
    _, student, kind, *variant = cell.split("-")
    start, adapter = student_of(*variant or [None])
    if adapter is not None and student == "lora":
        start = get_peft_model(start, adapter)
    rtol = 0.3 if "bf16" in variant else 1e-3  # DeepSpeed keeps the parameters themselves in bfloat16
    first, *others = (torch.load(path, weights_only=False) for path in sorted((folder / cell).glob("result-*.pt")))
    ddp = torch.load(folder / _ddp(cell) / "result-0.pt", weights_only=False)
    straight, resumed, truth = first["straight"], first["resumed"], ddp["straight"]
    sent = straight["sent"]
    checks = {
        "layout": all(result[run]["as_asked"] for result in (first, *others) for run in result),
        "logs": len(straight["logs"]) >= 3 and _near_logs(straight["logs"], truth["logs"], rtol),
        "equal": all(_same(straight, other["straight"]) for other in others) and _near(straight, truth, rtol),
        "moves": _moves(straight, start, kind),
        "resumes": _same(straight, resumed) and _near_logs(straight["logs"], resumed["logs"], 1e-6),
        "stores": _stores(
            folder / cell / "straight" / f"checkpoint-{len(straight['logs'])}", start, straight["stores"]
        ),
        "exports": _exports(folder / cell / "export", student, variant, straight["student"]),
        "sends": sent["untouched"] and _sends(sent["tensors"], start, straight["student"], max(rtol / 30, 1e-5)),
    }
    return [name for name, passed in checks.items() if not passed]


def _near_logs(actual: list[dict], expected: list[dict], rtol: float) -> bool:
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


def _near(actual: dict, expected: dict, rtol: float) -> bool:
    a, b = _tensors(actual), _tensors(expected)
    return a.keys() == b.keys() and all(
        torch.allclose(a[name].float(), b[name].float(), rtol=rtol, atol=rtol / 10) for name in b
    )


def _moves(result: dict, start: torch.nn.Module, kind: str) -> bool:
    before = tiny.trained(start)

    def moved(tensors: dict[str, torch.Tensor]) -> bool:
        # Half of an adapter is zero at the start, the other half random.
        known = {name: value for name, value in before.items() if "lora_A" not in name}
        return any(not torch.equal(tensors[name], value) for name, value in known.items())

    return moved(result["student"]) and all(
        moved(store) == (kind in ("ema", "snapshot") and key == "teacher") for key, store in result["stores"].items()
    )


def _stores(checkpoint: Path, start: torch.nn.Module, stores: dict[str, dict[str, torch.Tensor]]) -> bool:
    for key, tensors in stores.items():
        store = WeightStore(start)
        store.load(checkpoint / f"sdpo_{key}.safetensors")
        tiny.assert_equal(dict(store.whole()), tensors)
    return len(list(checkpoint.glob("sdpo_*.safetensors"))) == len(stores)


def _exports(folder: Path, student: str, variant: list[str], trained: dict[str, torch.Tensor]) -> bool:
    names = {path.name for path in folder.iterdir()}
    if student == "lora":
        weights = "adapter_model.safetensors"
        base = student_of(*[name for name in variant if name != "adapter"] or [None])[0]
        model = PeftModel.from_pretrained(base, folder, is_trainable=True)
    else:
        weights = "model.safetensors"
        model = AutoModelForCausalLM.from_pretrained(folder)
    loaded = tiny.trained(model)
    tensors = {name for name in names if name.endswith((".safetensors", ".bin", ".pt"))}
    same = loaded.keys() == trained.keys() and all(torch.equal(loaded[name], trained[name]) for name in trained)
    return tensors == {weights, "training_args.bin"} and same


def _sends(sent: dict, start: torch.nn.Module, student: dict[str, torch.Tensor], rtol: float) -> bool:
    model = copy.deepcopy(start)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in student:
                p.copy_(student[name])
    plain = dict((model.merge_and_unload() if isinstance(model, PeftModel) else model).named_parameters())
    return sent.keys() == plain.keys() and all(
        torch.allclose(sent[name].float(), value.float(), rtol=rtol, atol=rtol) for name, value in plain.items()
    )


def tables(results: dict[str, str]) -> str:
    """A row per backend and student with a column per teacher; then a row per variant with a column per backend."""
    matrix = [["", *KINDS]]
    for backend in BACKENDS:
        for student in STUDENTS:
            cells = [results.get(f"{backend}-{student}-{kind}", "-") for kind in KINDS]
            matrix.append([f"{backend} {student}", *cells])
    variants = [["", *BACKENDS]]
    variants += [[rest, *(results.get(f"{backend}-{rest}", "-") for backend in BACKENDS)] for rest in VARIED + OWN]
    return f"{_aligned(matrix)}\n\n{_aligned(variants)}"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description="The matrix of backends, students and teachers on two processes.")
    parser.add_argument("--only", default="", help="a regular expression over cells, such as 'zero3-.*-ema'")
    parser.add_argument("--folder", type=Path, help="where to keep what the processes wrote")
    parser.add_argument("--cuda", action="store_true", help="one process per GPU instead of two on the CPU")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    cells = [cell for cell in CELLS if re.search(args.only, cell)]
    broken = run(folder, cells, timeout=3600, gpus=torch.cuda.device_count() if args.cuda else 0)
    results = {}
    for cell in cells:
        if cell.startswith("zero") and not has_deepspeed():
            results[cell] = "skipped"
        elif cell in broken or _ddp(cell) in broken:
            results[cell] = "broke"
            print(f"{cell}:\n{broken.get(cell, 'DDP broke')[-4000:]}\n")
        else:
            results[cell] = ", ".join(failures(folder, cell)) or "ok"
    print(tables(results))
    if "skipped" in results.values():
        print(SKIPPED)
    sys.exit(any(result not in ("ok", "skipped") for result in results.values()))


if __name__ == "__main__":
    main()
