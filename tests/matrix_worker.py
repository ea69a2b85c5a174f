"""
What two processes do for matrix.py: train a cell, resume it, gather and export what came of it.

`torchrun --nproc_per_node 2 tests/matrix_worker.py FOLDER CELL...` with cells such as `fsdp2-lora-ema`; each process
writes what it saw to `FOLDER/CELL/result-RANK.pt`.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from sdpo_trl.teacher import WeightStore  # noqa: E402

BACKENDS = ("ddp", "zero2", "zero3", "fsdp2")
STUDENTS = ("full", "lora")
KINDS = {
    "live": {"teacher_model_kind": "live"},
    "base": {"teacher_model_kind": "base"},
    "ema": {"teacher_update_rate": 0.3},
    "snapshot": {"teacher_model_kind": "snapshot", "teacher_sync_steps": 2},
    "trust_region": {"teacher_model_kind": "trust_region", "teacher_mix": 0.3},
    "external": {},
}
TYPES = {
    "ddp": DistributedType.MULTI_CPU,
    "zero2": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
    "fsdp2": DistributedType.FSDP,
}
# Two groups of four, one for each process; lengths differ in every micro-batch.
ANSWERS = ["ab$", "abc$", "x", "hello$", "abcde$", "a$", "xyz", "qrs$"]
RANK = int(os.environ.get("RANK", "0"))
WATCHED = ("loss", "grad_norm", "sdpo/divergence", "sdpo/teacher_student_gap", "sdpo/teacher_distance")


def shard_on_the_cpu():
    """Accelerate 1.15 runs DDP for FSDP on CPUs, and DeepSpeed there as one process; here it is told that it may."""
    set_up, prepare = AcceleratorState.__init__, PartialState._prepare_backend

    def prepared(self, cpu=False, *args, **kwargs):
        return prepare(self, True, *args, **kwargs)

    def patched(self, *args, **kwargs):
        set_up(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = plugin

    AcceleratorState.__init__, PartialState._prepare_backend = patched, prepared


def backend_options(backend):
    """How the processes share the model."""
    if backend == "ddp":
        return {"use_cpu": True}
    if backend == "fsdp2":
        wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        return {"use_cpu": True, "fsdp": True, "fsdp_config": {"version": 2, **wrap}}
    # Small enough that some parameters persist and others do not.
    small = {"stage3_param_persistence_threshold": 100, "stage3_gather_16bit_weights_on_model_save": True}
    return {
        "use_cpu": False,
        "deepspeed": {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": int(backend[-1]), **(small if backend == "zero3" else {})},
        },
    }


def told(completions, log_extra, trainer_state, **kwargs):
    """Success and feedback depend on the answer alone; in the second step the first process has neither."""
    silent = RANK == 0 and trainer_state.global_step == 1
    step = trainer_state.global_step
    texts = [None if silent or text.startswith("x") else f"no {step}: {text}{text}" for text in completions]
    log_extra("feedback", texts)
    return [1.0 if text == "abc" and not silent else 0.0 for text in completions]


def build(folder, backend, student, kind, **options):
    """A trainer for three steps of two micro-batches on two processes."""
    options = {**KINDS[kind], **options}
    if student == "lora":
        options["trainer_peft_config"] = tiny.lora()
    if kind == "external":
        options["trainer_teacher_model"] = tiny.build_model(seed=7)
    if not options.pop("samples", False):
        options["trainer_rollout_func"] = tiny.scripted(ANSWERS[RANK * 4 :] + ANSWERS[: RANK * 4])
    trainer = tiny.trainer(
        folder, told, data=tiny.prompts(8), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_steps=3, learning_rate=1e-2, max_grad_norm=1e6, save_strategy="steps", save_steps=2,
        **backend_options(backend), **options,
    )  # fmt: skip
    assert (trainer.accelerator.num_processes, dist.get_world_size()) == (2, 2), trainer.accelerator.state
    assert trainer.accelerator.distributed_type is TYPES[backend], trainer.accelerator.distributed_type
    return trainer


def is_as_asked(trainer, backend):
    """Whether the parameters lie as the backend says, because set-ups on CPUs degrade silently."""
    parameters = list(trainer.model.parameters())
    if backend == "fsdp2":
        return trainer.accelerator.is_fsdp2 and all(p.placements[0].is_shard() for p in parameters)
    stage = trainer.accelerator.state.deepspeed_plugin.zero_stage if backend.startswith("zero") else 0
    partitioned = all(hasattr(p, "ds_tensor") for p in parameters)
    plain = not any(isinstance(p, DTensor) for p in parameters)
    return plain and stage == (int(backend[-1]) if backend.startswith("zero") else 0) and partitioned == (stage == 3)


def gathered(trainer):
    """The student's trained tensors and the teacher's, whole."""
    student = {name: value.clone() for name, value in WeightStore(trainer.model).whole()}
    stores = {key: {name: v.clone() for name, v in store.whole()} for key, store in trainer._stores.items()}
    return {"student": student, "stores": stores, "as_asked": is_as_asked(trainer, trainer.backend)}


def train(folder, backend, student, kind, resume=None, **options):
    trainer = build(folder, backend, student, kind, **options)
    trainer.backend = backend
    trainer.train(resume_from_checkpoint=resume)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    result = {"logs": [{name: row[name] for name in WATCHED if name in row} for row in logs], **gathered(trainer)}
    return trainer, result


def run_cell(folder, cell):
    """Three steps; the last one again from a checkpoint; the export of the first run."""
    backend, student, kind = cell.split("-")
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    trainer, straight = train(folder / "straight", backend, student, kind)
    trainer.save_model(str(folder / "export"))
    _, resumed = train(folder / "resumed", backend, student, kind, resume=str(folder / "straight" / "checkpoint-2"))
    return {"straight": straight, "resumed": resumed}


def main(folder, cells):
    if any(cell.startswith("zero") for cell in cells):
        import deepspeed

        deepspeed.init_distributed("gloo")
    shard_on_the_cpu()
    for cell in cells:
        result = run_cell(folder / cell, cell)
        torch.save(result, folder / cell / f"result-{RANK}.pt")
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
