"""The formulas behind docs/scaling.md against the bytes of real stores; the sharded ones are in test_matrix.py."""

from pathlib import Path

import pytest
import tiny
import torch
from benchmarks import scaling
from peft import get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parent.parent


def counted(model):
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    everything = sum(p.numel() for p in model.parameters())
    return scaling.Sizes(everything, sum(sizes), max(sizes), model.get_output_embeddings().weight.numel())


def tiny_sizes(lora):
    return counted(get_peft_model(tiny.build_model(), tiny.lora()) if lora else tiny.build_model())


class NewMemory(TorchDispatchMode):
    """The largest tensor made within that is not among the known ones."""

    def __init__(self, known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in [result] if isinstance(result, torch.Tensor) else []:
            if tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.nbytes)
        return result


KINDS = {
    "live": {},
    "base": {},
    "ema": {},
    "snapshot": {"teacher_sync_steps": 1},
    "trust_region": {},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_teacher_keeps_and_needs_for_a_pass_and_a_move(tmp_path, kind, lora, dtype):
    model = tiny.build_model().to(dtype)
    model = get_peft_model(model, tiny.lora()) if lora else model  # PEFT makes the adapter float32
    trainer = tiny.trainer(tmp_path, model=model, teacher_model_kind=kind, **KINDS[kind])
    sizes = counted(trainer.model)
    width = next(p for p in trainer.model.parameters() if p.requires_grad).element_size()
    each = scaling.Bytes(frozen=dtype.itemsize, weight=width)
    assert width == (4 if lora else dtype.itemsize)
    values = [value for store in trainer._stores.values() for value in store._values.values()]
    assert sum(value.nbytes for value in values) == scaling.kept(kind, sizes, each, "ddp", 8)
    parameters = list(trainer.model.parameters())
    known = {tensor.untyped_storage().data_ptr() for tensor in [*parameters, *values]}
    with trainer._teacher.speaks():
        added = sum(p.nbytes for p in parameters if p.untyped_storage().data_ptr() not in known)
    assert added == scaling.during_pass(kind, sizes, each, "ddp", 8)
    with NewMemory([*parameters, *values]) as memory:
        trainer._teacher.step_finished(1, batch_finished=True)
    assert memory.largest == scaling.during_move(kind, sizes, each, "ddp", 8)


@pytest.mark.parametrize("lora", [False, True])
def test_what_the_student_takes(tmp_path, lora):
    """Weights, gradients and Adam after one step, on one process."""
    model = get_peft_model(tiny.build_model(), tiny.lora()) if lora else tiny.build_model()
    trainer = tiny.trainer(tmp_path, tiny.telling(), model=model, max_steps=1)
    trainer.train()
    tiny.gradient(trainer, tiny.micro_batches(trainer)[0])
    moments = [v for state in trainer.optimizer.state.values() for v in state.values() if v.dim()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    measured = sum(tensor.nbytes for tensor in [*model.parameters(), *gradients, *moments])
    each = scaling.Bytes(frozen=4, weight=4, gradient=4, optimizer=8)
    assert measured == scaling.student(counted(model), each, "ddp", 1)


def test_what_is_shared_is_divided_by_the_processes():
    sizes = scaling.Sizes(parameters=1000, trained=800, largest=100, head=50)
    for kind in scaling.KINDS:
        whole = [f(kind, sizes, scaling.FULL, "ddp", n) for f in (scaling.kept, scaling.during_move) for n in (1, 8)]
        assert whole[0] == whole[1] and whole[2] == whole[3]
        assert scaling.kept(kind, sizes, scaling.FULL, "zero2", 8) == whole[0]
        assert scaling.kept(kind, sizes, scaling.FULL, "zero3", 8) == whole[0] / 8
        assert scaling.during_move(kind, sizes, scaling.FULL, "zero3", 8) == whole[2] / 8
    assert scaling.student(sizes, scaling.FULL, "zero3", 8) == (200 * 2 + 800 * 16) / 8
    assert scaling.student(sizes, scaling.FULL, "zero2", 8) == 1000 * 2 + 800 * 14 / 8


def test_adapters_are_counted_as_peft_makes_them():
    config = tiny.build_model().config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape = {name: getattr(config, name) for name in (*names, "vocab_size")}
    model = get_peft_model(tiny.build_model(), tiny.lora(r=scaling.RANK, target_modules="all-linear"))
    assert scaling.sizes_of(shape, lora=True) == counted(model)
    assert scaling.sizes_of(shape, lora=False) == counted(tiny.build_model())


def test_the_document_shows_what_the_formulas_give():
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert scaling.memory_table() in text and scaling.time_table() in text
