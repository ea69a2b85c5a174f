"""
What student and teacher take on each GPU, and how long a step's parts take at best: formulas, not measurements.

`python tests/benchmarks/scaling.py` prints the tables of docs/scaling.md; test_scaling.py checks the formulas against
the bytes of real stores, whole and sharded, and the document against what is printed here.
"""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

GB = 1e9
SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
RANK = 16
SHARDED = {"ddp": (), "zero2": ("gradients", "optimizer"), "zero3": ("weights", "gradients", "optimizer", "teacher")}
KINDS = ("live", "base", "ema", "snapshot", "trust_region", "external")


@dataclass(frozen=True)
class Sizes:
    """Of a model: all parameters, those that train, the largest trained tensor, the output matrix."""

    parameters: int
    trained: int
    largest: int
    head: int


@dataclass(frozen=True)
class Bytes:
    """Per parameter. The defaults are ZeRO's with bfloat16: a float32 copy and Adam's two moments beside it."""

    frozen: int = 2
    weight: int = 2
    gradient: int = 2
    optimizer: int = 12


FULL = Bytes()
LORA = Bytes(weight=4, gradient=4, optimizer=8)  # PEFT keeps an adapter in float32


def student(sizes: Sizes, each: Bytes, backend: str, gpus: int) -> float:
    """Weights, gradients and optimizer on one GPU; activations and what is gathered for a layer come on top."""
    share = {part: gpus if part in SHARDED[backend] else 1 for part in ("weights", "gradients", "optimizer")}
    frozen = (sizes.parameters - sizes.trained) * each.frozen
    return (
        (frozen + sizes.trained * each.weight) / share["weights"]
        + sizes.trained * each.gradient / share["gradients"]
        + sizes.trained * each.optimizer / share["optimizer"]
    )


def kept(kind: str, sizes: Sizes, each: Bytes, backend: str, gpus: int, external: int = 0) -> float:
    """A teacher's own values on one GPU (with `teacher_offload=True` in its host's memory) at all times."""
    whole = {
        "live": 0,
        "base": sizes.trained * each.weight,
        "ema": sizes.trained * 4,
        "snapshot": sizes.trained * each.weight,
        "trust_region": sizes.trained * each.weight,
        "external": external * 2,
    }[kind]
    return whole / (gpus if "teacher" in SHARDED[backend] else 1)


def during_pass(kind: str, sizes: Sizes, each: Bytes, backend: str, gpus: int, offload: bool = False) -> float:
    """
    What a teacher's pass adds on one GPU while it runs, beside activations.

    Whole weights change places with the student's, and are copied only into another precision or memory. Of sharded
    ones the student's part is put aside, and the output matrix is gathered once more where the divergence reads it.
    """
    sharded = "teacher" in SHARDED[backend]
    head = sizes.head * each.frozen if sharded else 0
    if kind in ("live", "external"):
        return head
    if sharded:
        return sizes.trained * each.weight / gpus + head
    copies = offload or (kind == "ema" and each.weight != 4)
    return sizes.trained * each.weight if copies else 0


def during_move(kind: str, sizes: Sizes, each: Bytes, backend: str, gpus: int) -> float:
    """What a move of the teacher adds for a moment: one tensor in the precision of the values."""
    width = {"ema": 4, "snapshot": each.weight}.get(kind, 0)
    in_place = width == each.weight
    return 0 if in_place else sizes.largest * width / (gpus if "teacher" in SHARDED[backend] else 1)


def sizes_of(shape: dict[str, int], lora: bool) -> Sizes:
    """Of a Llama of that shape (vocabulary 128,256 and 8 key heads, if not said), counted on the meta device."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{"num_key_value_heads": 8, "vocab_size": 128256, **shape}))
    parameters = sum(p.numel() for p in model.parameters())
    head = model.lm_head.weight.numel()
    if not lora:
        return Sizes(parameters, parameters, max(p.numel() for p in model.parameters()), head)
    layers = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    pairs = [RANK * side for m in layers for side in (m.in_features, m.out_features)]
    return Sizes(parameters + sum(pairs), sum(pairs), max(pairs), head)


def number(value: float) -> str:
    return "0" if value == 0 else f"{value / GB:.0f}" if value >= 10 * GB else f"{value / GB:.2g}"


def memory_table() -> str:
    header = ["student", "base, snapshot, trust region", "EMA", "EMA's pass", "external (same size)"]
    rows = [["GB per GPU, on 8 / 64", *header]]
    for name, shape in SHAPES.items():
        for way, each in (("full", FULL), ("LoRA", LORA)):
            sizes = sizes_of(shape, way == "LoRA")
            base = sizes_of(shape, False).parameters
            for backend, shown in (("ddp", "DDP"), ("zero2", "ZeRO-2"), ("zero3", "ZeRO-3, FSDP2")):

                def both(function, *before, backend=backend, sizes=sizes, each=each, **options):
                    values = [number(function(*before, sizes, each, backend, n, **options)) for n in (8, 64)]
                    return values[0] if values[0] == values[1] else " / ".join(values)

                rows.append([
                    f"{name}, {way}, {shown}", both(student), both(kept, "base"), both(kept, "ema"),
                    both(during_pass, "ema"), both(kept, "external", external=base),
                ])  # fmt: skip
    return table(rows)


# A step of 256 rollouts: prompts of 256 tokens, the teacher's of 1,024, answers of 1,024; H100s (989 TFLOP/s in
# bfloat16, of which 40 % are used, and 3.35 TB/s), one vLLM engine per so many GPUs.
ROLLOUTS, PROMPT, HINTED, ANSWER = 256, 256, 1024, 1024
FLOPS, BANDWIDTH, USED = 989e12, 3.35e12, 0.4
ENGINE = {"8B": 1, "70B": 8}


def seconds(name: str, gpus: int) -> dict[str, float]:
    """The parts of one step on all GPUs. Generation is bound by memory, the rest by arithmetic."""
    parameters = sizes_of(SHAPES[name], False).parameters
    shape = SHAPES[name]
    tensor_parallel = ENGINE[name]
    sequences = ROLLOUTS / (gpus / tensor_parallel)
    head_size = shape["hidden_size"] // shape["num_attention_heads"]
    cache = 2 * shape["num_hidden_layers"] * 8 * head_size * 2  # keys and values of one token, bfloat16
    read = parameters * 2 + sequences * (PROMPT + ANSWER / 2) * cache
    arithmetic = 2 * parameters * ROLLOUTS / gpus / (FLOPS * USED)
    return {
        "generation": ANSWER * read / tensor_parallel / BANDWIDTH,
        "student, forward and backward": 3 * arithmetic * (PROMPT + ANSWER),
        "recomputed (gradient checkpointing)": arithmetic * (PROMPT + ANSWER),
        "teacher": arithmetic * (HINTED + ANSWER),
        "teacher, trust region": 2 * arithmetic * (HINTED + ANSWER),
    }


def time_table() -> str:
    columns = [(name, gpus) for name in SHAPES for gpus in (8, 64)]
    parts = [seconds(*column) for column in columns]
    rows = [["seconds of a step, at best", *(f"{name}, {gpus} GPUs" for name, gpus in columns)]]
    return table(rows + [[key, *(f"{values[key]:.2g}" for values in parts)] for key in parts[0]])


def table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join(["---"] * len(rows[0])) + " |", *lines[1:]])


if __name__ == "__main__":
    print(f"{memory_table()}\n\n{time_table()}")
