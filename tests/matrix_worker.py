"""
What each process does for matrix.py: train a cell, resume it, gather and export what came of it.

`torchrun --nproc_per_node 2 tests/matrix_worker.py FOLDER CELL...` with cells such as `fsdp2-lora-ema`, or
`fsdp2-lora-ema-dora` with a variant; each process writes what it saw to `FOLDER/CELL/result-RANK.pt`.
"""

import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers.training_args  # noqa: E402
from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from trl.distributed import DistributedBackend  # noqa: E402
from trl.generation.vllm_generation import VLLMGeneration  # noqa: E402

from sdpo_trl.report import TokenHeatmapCallback  # noqa: E402
from sdpo_trl.shards import rest, whole  # noqa: E402
from sdpo_trl.store import WeightStore  # noqa: E402
from sdpo_trl.weight_sync import send_merged  # noqa: E402

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
# What else must not depend on how the model is shared. `model_*` is for the model, `lora_*` for the adapter, `fsdp2_*`
# and `zero3_*` for one way of sharing.
VARIANTS = {
    "silent": {"silent": True},
    "heatmap": {"heatmap": True},
    "sampled": {"samples": True},
    "asks": {"samples": True, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    "path": {"path": True},
    "blend": {"distillation_weight": 0.5, "beta": 0.1, "num_iterations": 2, "max_steps": 4},
    "reference": {"distillation_impl": "reference"},
    "evaluates": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    "checkpointing": {"gradient_checkpointing": True},
    "offload": {"teacher_offload": True},
    "bf16": {"bf16": True},
    "parked": {"zero3_offload_param": {"device": "cpu"}},
    "wrapped": {"fsdp2_activation_checkpointing": True},
    "parts": {"fsdp2_state_dict_type": "SHARDED_STATE_DICT"},
    "efficient": {"fsdp2_cpu_ram_efficient_loading": True, "path": True},
    "tied": {"model_tie_word_embeddings": True},
    "dora": {"lora_use_dora": True},
    "rslora": {"lora_use_rslora": True},
    "bias": {"lora_bias": "all", "model_attention_bias": True, "model_mlp_bias": True},
    "head": {"lora_modules_to_save": ["lm_head"]},
    "norm": {"lora_modules_to_save": ["norm"]},
    "embeddings": {"lora_modules_to_save": ["embed_tokens"]},
    "tokens": {"lora_trainable_token_indices": [7, 8, 9]},
    "tiedtokens": {"lora_trainable_token_indices": {"embed_tokens": [7, 8, 9]}, "model_tie_word_embeddings": True},
    "dropout": {"lora_lora_dropout": 0.3},
    "adapter": {"trained": True},
}
CUDA = os.environ.get("MATRIX_CUDA") == "1"  # one process per GPU instead of two on the CPU
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
TYPES = {
    "ddp": DistributedType.MULTI_GPU if CUDA else DistributedType.MULTI_CPU,
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
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # DeepSpeed's bfloat16


def backend_options(backend, extra):
    """How the processes share the model; with options of the backend's own."""
    if backend == "ddp":
        return {"use_cpu": not CUDA}
    if backend == "fsdp2":
        wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        return {"use_cpu": not CUDA, "fsdp": True, "fsdp_config": {"version": 2, **wrap, **extra}}
    # Small enough that some parameters persist and others do not.
    small = {"stage3_param_persistence_threshold": 100, "stage3_gather_16bit_weights_on_model_save": True}
    return {
        "use_cpu": False,
        "deepspeed": {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": int(backend[-1]), **(small if backend == "zero3" else {}), **extra},
        },
    }


def told(quiet):
    """Success and feedback depend on the answer alone; in the second step these processes have neither."""

    def reward(completions, log_extra, trainer_state, **kwargs):
        step = trainer_state.global_step
        silent = RANK in quiet and step == 1
        texts = [None if silent or text.startswith("x") else f"no {step}: {text}{text}" for text in completions]
        log_extra("feedback", texts)
        return [1.0 if text == "abc" and not silent else 0.0 for text in completions]

    return reward


def taken(options, prefix):
    """The options of that prefix, which are removed."""
    return {name.removeprefix(prefix): options.pop(name) for name in list(options) if name.startswith(prefix)}


def saved(model, folder):
    """A folder with the model, for a trainer that is given a path."""
    if RANK == 0:
        model.save_pretrained(folder)
        tiny.build_tokenizer().save_pretrained(folder)
    dist.barrier()
    return str(folder)


def student_of(variant):
    """The model that a variant starts from, and the configuration of the adapter that it gets, if it does."""
    options = dict(VARIANTS.get(variant, {}))
    if "trained" in options:
        return tiny.trained_adapter(), None
    return tiny.build_model(**taken(options, "model_")), tiny.lora(**taken(options, "lora_"))


def build(folder, backend, student, kind, variant=None):
    """A trainer for three steps of two micro-batches."""
    options = {**KINDS[kind], **VARIANTS.get(variant, {})}
    model, adapter = student_of(variant)
    extra = [taken(options, f"{prefix}_") for prefix in ("model", "lora", *BACKENDS)][2:]
    options.pop("trained", None)
    quiet = (0, 1) if options.pop("silent", False) else (0,)
    teacher = tiny.build_model(seed=7)
    if options.pop("path", False):
        model, teacher = saved(model, folder / "student"), saved(teacher, folder / "teacher")
    if student == "lora":
        options["trainer_peft_config"] = adapter
    if kind == "external":
        options["trainer_teacher_model"] = teacher
    if "eval_strategy" in options:
        options["trainer_eval_dataset"] = tiny.prompts(2)
    if options.pop("heatmap", False):
        options["trainer_callbacks"] = [TokenHeatmapCallback(every=1, rollouts=2, folder=folder / "pages")]
    if not options.pop("samples", False):
        options["trainer_rollout_func"] = tiny.scripted(ANSWERS[RANK * 4 :] + ANSWERS[: RANK * 4])
    shared = backend_options(backend, dict(zip(BACKENDS, extra, strict=True))[backend])
    options = {**shared, "max_steps": 3, **options}
    trainer = tiny.trainer(
        folder, told(quiet), model, tiny.prompts(8), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, max_grad_norm=1e6, save_strategy="steps", save_steps=2, **options,
    )  # fmt: skip
    assert trainer.accelerator.num_processes == dist.get_world_size() == PROCESSES, trainer.accelerator.state
    assert trainer.accelerator.distributed_type is TYPES[backend], trainer.accelerator.distributed_type
    return trainer


def is_as_asked(trainer, backend):
    """Whether the parameters lie as the backend says, because set-ups on CPUs degrade silently."""
    parameters = list(trainer.model.parameters())
    if backend == "fsdp2":
        units = sum(isinstance(module, FSDPModule) for module in trainer._teacher._model.modules())
        assert units > 2, "a layer at a time, the teacher too"
        return trainer.accelerator.is_fsdp2 and all(p.placements[0].is_shard() for p in parameters)
    stage = trainer.accelerator.state.deepspeed_plugin.zero_stage if backend.startswith("zero") else 0
    partitioned = all(hasattr(p, "ds_tensor") for p in parameters)
    plain = not any(isinstance(p, DTensor) for p in parameters)
    return plain and stage == (int(backend[-1]) if backend.startswith("zero") else 0) and partitioned == (stage == 3)


def gathered(trainer):
    """The student's trained tensors and the teacher's, whole."""

    def copies(store):
        return {name: value.to("cpu", copy=True) for name, value in store.whole()}

    stores = {key: copies(store) for key, store in trainer._stores.items()}
    as_asked = is_as_asked(trainer, trainer.backend)
    own = {key: sum(value.nbytes for value in store._values.values()) for key, store in trainer._stores.items()}
    return {"student": copies(WeightStore(trainer.model)), "stores": stores, "bytes": own, "as_asked": as_asked}


def sent(trainer):
    """What vLLM would be sent, and whether every parameter, frozen ones too, is bit for bit what it was before."""

    def everything():
        rest(trainer.model)
        return {name: whole(p, p.dtype).to("cpu", copy=True) for name, p in trainer.model.named_parameters()}

    sender = object.__new__(VLLMGeneration)  # without a server
    sender.model, sender.accelerator = trainer.model, trainer.accelerator
    sender._dist = DistributedBackend(trainer.accelerator)
    send_merged(sender)
    before = everything()
    tensors = {name: value.detach().to("cpu", copy=True) for name, value in sender._iter_named_params()}
    after = everything()
    return {"tensors": tensors, "untouched": all(torch.equal(after[name], value) for name, value in before.items())}


def page_sums(path):
    """The sums of the numbers on a heat map, which must not depend on who holds the weights."""
    data = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"))[1]
    rows = [row for rollout in json.loads(data)["rollouts"] for row in rollout if row[1] == "scored"]
    sums = {f"page_{i}": sum(row[i] for row in rows) for i in range(2, 8)}
    return {"page_tokens": len(rows), **sums, "page_top": sum(row[8][0][1] + row[9][0][1] for row in rows)}


def train(folder, cell, resume=None):
    trainer = build(folder, *cell)
    trainer.backend = cell[0]
    trainer.train(resume_from_checkpoint=resume)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    if cell[-1] == "asks" and resume is None:
        asked = [row for row in trainer.state.log_history if "eval_sdpo/teacher_success_share" in row]
        assert len(asked) >= 3, "the teacher's own answers"
    result = {"logs": [{name: row[name] for name in WATCHED if name in row} for row in logs], **gathered(trainer)}
    if cell[3:] == ["heatmap"] and RANK == 0:  # the main process alone looks
        result["logs"][-1] |= page_sums(folder / "pages" / "step_000003.html")
    return trainer, result


def run_cell(folder, cell):
    """Three steps; the export of that run and what vLLM would be sent; the last step again from a checkpoint."""
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    trainer, straight = train(folder / "straight", cell.split("-"))
    trainer.save_model(str(folder / "export"))
    straight["sent"] = sent(trainer)
    _, resumed = train(folder / "resumed", cell.split("-"), resume=str(folder / "straight" / "checkpoint-2"))
    return {"straight": straight, "resumed": resumed}


def main(folder, cells):
    if any(cell.startswith("zero") for cell in cells):
        import deepspeed

        deepspeed.init_distributed("nccl" if CUDA else "gloo")
    if not CUDA:
        shard_on_the_cpu()
    for cell in cells:
        result = run_cell(folder / cell, cell)
        torch.save(result, folder / cell / f"result-{RANK}.pt")
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
