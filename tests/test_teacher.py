"""Whose weights the teacher has, that the student's come back, and how the teacher moves."""

import copy
import logging
import os
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import TrainerCallback

from sdpo_trl.divergence import safe_log_softmax
from sdpo_trl.store import WeightStore

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

ANSWERS = ["ab$", "abc$", "x", "hello$", "abcde$", "a$", "xyz", "qrs$"]
KINDS = {
    "live": {},
    "base": {},
    "ema": {},
    "snapshot": {"teacher_sync_steps": 2},
    "trust_region": {"teacher_mix": 0.3},
}
STUDENTS = {
    "full": lambda: {"model": tiny.build_model()},
    "lora": lambda: {"model": tiny.build_model(), "trainer_peft_config": tiny.lora()},
    "adapter": lambda: {"model": tiny.trained_adapter()},
}


def kind_options(kind, student="full"):
    if kind != "external":
        return {"teacher_model_kind": kind, **KINDS[kind]}
    if student == "adapter":
        return {"trainer_teacher_model": tiny.trained_adapter().merge_and_unload()}
    return {"trainer_teacher_model": tiny.build_model()}


def make(folder, kind="ema", student="full", **options):
    options = {**kind_options(kind, student), **STUDENTS[student](), **options}
    return tiny.trainer(folder, tiny.telling(), **{"trainer_rollout_func": tiny.scripted(ANSWERS), **options})


every_kind = pytest.mark.parametrize("kind", [*KINDS, "external"])
every_student = pytest.mark.parametrize("student", STUDENTS)


# Step 0


@every_kind
@every_student
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_teacher_equals_the_student_at_the_start(tmp_path, monkeypatch, kind, student, temperature):
    monkeypatch.setattr("sdpo_trl.teacher_prompts.teacher_prompt", lambda prompt, *_: prompt)
    for mode, alpha, topk in (
        ("full_logits", 0.0, None),
        ("full_logits", 0.5, None),
        ("full_logits", 1.0, None),
        ("topk_logits", 0.5, 5),
        ("sampled_token", 1.0, None),
    ):
        trainer = make(
            tmp_path, kind, student, temperature=temperature, distillation_mode=mode, distillation_alpha=alpha,
            distillation_topk=topk,
        )  # fmt: skip
        inputs = tiny.micro_batches(trainer)[0]
        loss, grads = tiny.gradient(trainer, inputs)
        count = inputs["completion_mask"].sum()
        sums = trainer._sums._tokens["train"]
        assert sums[-1] == count
        # Rounding alone: prefixes may be shared, an adapter merged, equal logits mixed.
        assert abs(sums[1]) <= 2e-5 * count  # log p_T - log p_S
        assert abs(loss) <= (1e-4 if mode == "sampled_token" else 1e-7)
        assert max(grad.abs().max() for grad in grads.values()) <= 1e-4


# The student's state


def state_of(model):
    adapters = list(model.active_adapters) if hasattr(model, "peft_config") else []
    return {
        "parameters": {
            name: (id(p), p.data_ptr(), p.requires_grad, p._version) for name, p in model.named_parameters()
        },
        "modes": {name: module.training for name, module in model.named_modules()},
        "adapters": adapters,
        "gradients": torch.is_grad_enabled(),
    }


@every_kind
@every_student
def test_the_student_is_itself_again_after_each_pass(tmp_path, kind, student):
    trainer = make(tmp_path, kind, student, beta=0.1)
    inputs = tiny.micro_batches(trainer)[0]
    tiny.shift(trainer.model)
    trainer.model.get_submodule("lm_head").eval()  # one module in another mode than the rest
    values, before = tiny.trained(trainer.model), state_of(trainer.model)
    tiny.teacher_head(trainer, inputs)
    trainer._initial_log_probs(inputs)
    assert state_of(trainer.model) == before
    tiny.assert_equal(tiny.trained(trainer.model), values)


@every_kind
@every_student
@pytest.mark.parametrize("anchor", [False, True])
def test_the_student_is_itself_again_after_an_exception(tmp_path, kind, student, anchor):
    trainer = make(tmp_path, kind, student, beta=0.1)
    inputs = tiny.micro_batches(trainer)[0]
    tiny.shift(trainer.model)
    values, before = tiny.trained(trainer.model), state_of(trainer.model)

    def fail(module, args, output):
        raise RuntimeError("in the middle")

    broken = trainer._teacher._model if kind == "external" and not anchor else trainer.model
    base = broken.get_base_model() if hasattr(broken, "peft_config") else broken
    handle = base.base_model.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        if anchor:
            trainer._initial_log_probs(inputs)
        else:
            tiny.teacher_head(trainer, inputs)
    handle.remove()
    assert state_of(trainer.model) == before
    tiny.assert_equal(tiny.trained(trainer.model), values)
    assert trainer._tap._consumer is None and trainer._teacher_pass._tap._consumer is None
    assert tiny.gradient(trainer, inputs)[0] > 0


@every_student
@pytest.mark.parametrize("kind", ["ema", "trust_region", "external"])
def test_gradients_under_checkpointing(tmp_path, kind, student):
    grads = []
    for checkpointing in (None, False, True):
        seen = tiny.FirstGradient()
        trainer = make(
            tmp_path, kind, student, max_steps=1, max_grad_norm=0.0, trainer_callbacks=[seen],
            gradient_checkpointing=checkpointing is not None,
            gradient_checkpointing_kwargs=None if checkpointing is None else {"use_reentrant": checkpointing},
        )  # fmt: skip
        trainer.train()
        grads.append(seen.value)
        for name, parameter in trainer.model.named_parameters():
            assert parameter.requires_grad == (name in seen.value), name
        for store in trainer._stores.values():
            assert not any(value.requires_grad for value in store._values.values())
        if kind == "external":
            assert all(p.grad is None and not p.requires_grad for p in trainer._teacher._model.parameters())
    silent = [name for name, grad in grads[0].items() if not grad.any()]
    assert all("lora_A" in name for name in silent)  # B is zero at the start of a new adapter
    assert len(silent) < len(grads[0])
    tiny.assert_near(grads[1], grads[0], rtol=1e-5)
    tiny.assert_near(grads[2], grads[0], rtol=1e-5)


# Moving


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
@every_student
def test_an_ema_moves_by_its_rate(tmp_path, rate, student):
    trainer = make(tmp_path, "ema", student, teacher_update_rate=rate, max_steps=1)
    before = tiny.trained(trainer.model)
    trainer.train()
    now = tiny.trained(trainer.model)
    assert any(not torch.equal(now[name], before[name]) for name in now)
    stored = trainer._stores["teacher"]._values
    if rate == 0.0:
        tiny.assert_equal(stored, before)
    elif rate == 1.0:
        tiny.assert_equal(stored, now)
    else:
        expected = {name: 0.9 * before[name].double() + 0.1 * now[name].double() for name in now}
        tiny.assert_near(stored, expected, rtol=1e-7)


def test_an_average_of_half_precision_weights_does_not_stall():
    model = nn.Linear(3, 3).bfloat16()
    nn.init.ones_(model.weight)
    store = WeightStore(model, high_precision=True)
    model.weight.data += 2**-7  # one step of bfloat16
    for _ in range(200):
        store.move(0.05)
    values = store._values["weight"]
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, model.weight.detach().float(), atol=1e-5, rtol=0)
    double = WeightStore(nn.Linear(2, 2).double(), high_precision=True)
    assert double._values["weight"].dtype == torch.float64


def test_a_bfloat16_student_trains_against_a_float32_average(tmp_path):
    trainer = make(tmp_path, model=tiny.build_model().bfloat16(), max_steps=3, teacher_update_rate=0.01)
    before = trainer._stores["teacher"]._values["lm_head.weight"].clone()
    trainer.train()
    after = trainer._stores["teacher"]._values["lm_head.weight"]
    assert after.dtype == torch.float32 and trainer.model.lm_head.weight.dtype == torch.bfloat16
    assert (after != before).float().mean() > 0.5
    assert all(row["loss"] >= 0 for row in tiny.training_logs(trainer))


class Moves(TrainerCallback):
    """The optimizer steps after which the teacher's values had changed."""

    def __init__(self):
        self.steps = []

    def watch(self, store):
        self.store, self.last = store, copy.deepcopy(store._values)

    def on_step_end(self, args, state, control, **kwargs):
        if any(not torch.equal(self.last[name], value) for name, value in self.store._values.items()):
            self.steps.append(state.global_step)
        self.last = copy.deepcopy(self.store._values)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, [1, 2, 3, 4, 5, 6]),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2}, [2, 4, 6]),
        ({"num_iterations": 3}, [3, 6]),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2, "teacher_sync_steps": 3}, [3, 6]),
        ({"num_iterations": 3, "teacher_sync_steps": 1}, [1, 2, 3, 4, 5, 6]),
        ({"teacher_model_kind": "snapshot", "teacher_sync_steps": 4}, [4]),
        ({"teacher_model_kind": "base"}, []),
        ({"teacher_model_kind": "trust_region"}, []),
    ],
)
def test_when_the_teacher_moves(tmp_path, options, expected):
    moves = Moves()
    trainer = tiny.trainer(tmp_path, tiny.telling(), max_steps=6, **options)
    trainer.add_callback(moves)  # after the trainer's own
    moves.watch(next(iter(trainer._stores.values())))
    trainer.train()
    assert moves.steps == expected


def test_a_snapshot_is_the_student_at_its_last_renewal(tmp_path):
    trainer = make(tmp_path, "snapshot", max_steps=2)
    trainer.train()
    tiny.assert_equal(trainer._stores["teacher"]._values, tiny.trained(trainer.model))


# What an adapter may hold


@pytest.mark.parametrize(
    "options",
    [
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens", "norm"]},
        {"use_dora": True},
        {"use_rslora": True},
        {"lora_dropout": 0.5},
    ],
    ids=str,
)
def test_the_teachers_pass_equals_a_model_with_its_values(tmp_path, options):
    def student():
        base = tiny.build_model(attention_bias=True, mlp_bias=True)
        return get_peft_model(base, tiny.lora(**options))

    trainer = make(tmp_path, "ema", model=student(), teacher_update_rate=0.3, max_steps=2, learning_rate=1e-2)
    trainer.train()
    store = trainer._stores["teacher"]
    assert store._values.keys() == tiny.trained(trainer.model).keys()
    still = [
        name for name, p in trainer.model.named_parameters() if p.requires_grad and torch.equal(p, store._values[name])
    ]
    assert not still, "every trained tensor has left its teacher behind"

    inputs = tiny.micro_batches(trainer)[0]
    active = tiny.scored(inputs)
    heads = [tiny.teacher_head(trainer, inputs) for _ in range(2)]
    assert torch.equal(heads[0].hidden, heads[1].hidden)  # no dropout
    alone = student().eval()
    alone.load_state_dict({**trainer.model.state_dict(), **store._values})
    log_probs = []
    for row, mask in enumerate(inputs["teacher_prompt_mask"].bool()):
        prompt = inputs["teacher_prompt_ids"][row][mask]
        answer = inputs["completion_ids"][row][active[row]]
        with torch.no_grad():
            logits = alone(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        log_probs.append(logits.log_softmax(-1))
    expected = torch.cat(log_probs)
    torch.testing.assert_close(safe_log_softmax(heads[0].logits(104)), expected, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        own = trainer.model.eval()(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
    assert (own.log_softmax(-1) - log_probs[-1]).abs().max() > 1e-3  # the student is elsewhere


def test_tied_embeddings(tmp_path):
    trainer = make(tmp_path, "base", model=tiny.build_model(tie_word_embeddings=True), max_steps=3)
    initial = tiny.build_model(tie_word_embeddings=True)
    trainer.train()
    inputs = tiny.micro_batches(trainer)[0]
    head = tiny.teacher_head(trainer, inputs)
    assert torch.equal(head.weight, initial.lm_head.weight)
    assert not torch.equal(head.weight, trainer.model.lm_head.weight)


def test_integer_and_frozen_tensors_are_left_alone(tmp_path):
    model = tiny.build_model()
    model.register_buffer("steps", torch.arange(3))
    model.model.embed_tokens.weight.requires_grad_(False)
    trainer = make(tmp_path, "ema", model=model, max_steps=1)
    assert "model.embed_tokens.weight" not in trainer._stores["teacher"]._values
    trainer.train()
    assert model.steps.tolist() == [0, 1, 2]


# Checkpoints


def resumed(folder, **options):
    """Four steps at once, and two, another trainer, and two more: both trainers."""
    options = {
        "data": tiny.prompts(8),
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-2,
        **options,
    }
    kind, student = options.pop("kind"), options.pop("student")
    options["trainer_rollout_func"] = None
    straight = make(folder / "a", kind, student, **options)
    straight.train()
    second = make(folder / "b", kind, student, **options)
    if student == "full":
        tiny.shift(second.model)  # the checkpoint counts, not what the trainer was handed
        for store in second._stores.values():
            store.move(1.0)
    second.train(resume_from_checkpoint=str(folder / "a" / "checkpoint-2"))
    return straight, second


@pytest.mark.parametrize("kind", ["base", "ema", "snapshot", "trust_region"])
@pytest.mark.parametrize(("student", "beta"), [("full", 0.0), ("lora", 0.0), ("lora", 0.1), ("adapter", 0.1)])
def test_two_and_two_steps_equal_four(tmp_path, kind, student, beta):
    extra = {"teacher_sync_steps": 3} if kind == "snapshot" else {}
    straight, second = resumed(tmp_path, kind=kind, student=student, beta=beta, **extra)
    assert second.state.global_step == 4
    tiny.assert_equal(tiny.trained(second.model), tiny.trained(straight.model))
    assert straight._stores.keys() == second._stores.keys()
    assert ("initial_policy" in straight._stores) == (beta > 0 or kind in ("base", "trust_region"))
    for name, store in straight._stores.items():
        tiny.assert_equal(second._stores[name]._values, store._values)
    logs, other = tiny.training_logs(straight), tiny.training_logs(second)
    assert [row["loss"] for row in other] == [row["loss"] for row in logs]
    assert other[-1]["sdpo/teacher_distance"] == logs[-1]["sdpo/teacher_distance"] > 0


def test_a_second_load_is_harmless(tmp_path):
    trainer = make(tmp_path, "ema", max_steps=2, save_strategy="steps", save_steps=1, trainer_rollout_func=None)
    trainer.train()
    final = copy.deepcopy(trainer._stores["teacher"]._values)
    checkpoint = str(tmp_path / "checkpoint-2")
    for _ in range(2):
        trainer._stores["teacher"].move(1.0)
        trainer._load_optimizer_and_scheduler(checkpoint)
        tiny.assert_equal(trainer._stores["teacher"]._values, final)
    assert not list(Path(checkpoint).glob("*.partial"))


def test_resuming_without_the_teachers_file_is_refused(tmp_path):
    make(tmp_path, "ema", max_steps=2, save_strategy="steps", save_steps=1, beta=0.1).train()
    checkpoint = tmp_path / "checkpoint-1"
    names = {path.name for path in checkpoint.glob("sdpo_*")}
    assert names == {"sdpo_teacher.safetensors", "sdpo_initial_policy.safetensors", "sdpo_state.json"}
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy" / "sdpo_teacher.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"sdpo_teacher\.safetensors.*Resume with the settings"):
        make(tmp_path / "new", "ema", beta=0.1).train(resume_from_checkpoint=str(tmp_path / "copy"))
    # Kinds that need no file resume from any checkpoint.
    make(tmp_path / "live", "live").train(resume_from_checkpoint=str(tmp_path / "copy"))


def test_resuming_with_other_tensors_is_refused(tmp_path):
    make(tmp_path, "ema", max_steps=1, save_strategy="steps", save_steps=1).train()
    path = tmp_path / "checkpoint-1" / "sdpo_teacher.safetensors"
    values = load_file(path)
    del values["lm_head.weight"]
    save_file(values, path)
    with pytest.raises(ValueError, match=r"other tensors.*lm_head\.weight"):
        make(tmp_path / "new", "ema").train(resume_from_checkpoint=str(path.parent))


# External teachers


def test_an_external_teacher_never_moves(tmp_path):
    teacher = tiny.build_model(seed=7)
    trainer = make(tmp_path, "external", trainer_teacher_model=teacher, max_steps=2)
    before = {name: p.detach().clone() for name, p in teacher.named_parameters()}
    trainer.train()
    tiny.assert_equal(dict(teacher.named_parameters()), before)
    assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
    assert not trainer._stores
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not optimized & {id(p) for p in teacher.parameters()}
    assert all(row["sdpo/divergence"] > 0 for row in tiny.training_logs(trainer))


@pytest.mark.parametrize("larger", ["teacher", "student"])
def test_a_padded_vocabulary_changes_nothing(tmp_path, monkeypatch, larger):
    monkeypatch.setattr("sdpo_trl.teacher_prompts.teacher_prompt", lambda prompt, *_: prompt)

    def padded():
        model, wide = tiny.build_model(), tiny.build_model(vocab_size=128)
        state = wide.state_dict()
        for name, value in model.state_dict().items():
            state[name][: value.size(0)] = value
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            state[name][104:] = 0.5
        wide.load_state_dict(state)
        return wide

    models = [tiny.build_model(), padded()]
    student, teacher = models if larger == "teacher" else models[::-1]
    trainer = make(tmp_path, "external", model=student, trainer_teacher_model=teacher)
    loss, _ = tiny.gradient(trainer, tiny.micro_batches(trainer)[0])
    assert abs(loss) < 1e-6


def save_teacher(folder, swap=None, vocab_size=104):
    tiny.build_model(vocab_size=vocab_size).save_pretrained(folder)
    tokenizer = tiny.build_tokenizer()
    if swap:
        text = tokenizer.backend_tokenizer.to_str()
        ids = [tokenizer.get_vocab()[token] for token in swap]
        for token, old, new in zip(swap, ids, ids[::-1], strict=True):
            text = text.replace(f'"{token}":{old}', f'"{token}":{new}')
        tokenizer._tokenizer = Tokenizer.from_str(text)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_another_token_mapping_is_refused_by_its_first_token(tmp_path):
    folder = save_teacher(tmp_path / "teacher", swap=("c", "q"))
    with pytest.raises(ValueError, match=r"'c' to \d+, the student's to \d+"):
        make(tmp_path, trainer_teacher_model=folder)
    model = tiny.AutoModelForCausalLM.from_pretrained(folder)  # an object that knows its folder
    with pytest.raises(ValueError, match=r"'c' to \d+, the student's to \d+"):
        make(tmp_path, trainer_teacher_model=model)


def test_a_folder_with_the_same_mapping_is_accepted(tmp_path, caplog):
    folder = save_teacher(tmp_path / "teacher", vocab_size=128)
    with caplog.at_level(logging.WARNING, "sdpo_trl"):
        make(tmp_path, trainer_teacher_model=folder, max_steps=1).train()
    assert "tokenizer" not in caplog.text


def test_a_teacher_without_a_tokenizer_is_named_in_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "sdpo_trl"):
        make(tmp_path, "external")
    assert "no tokenizer beside it" in caplog.text


def test_a_head_that_is_too_small_is_refused(tmp_path):
    with pytest.raises(ValueError, match="head has 90 items"):
        make(tmp_path, trainer_teacher_model=tiny.build_model(vocab_size=90))


def test_the_student_as_its_own_external_teacher_is_refused(tmp_path):
    model = tiny.build_model()
    with pytest.raises(ValueError, match="student itself"):
        make(tmp_path, model=model, trainer_teacher_model=model)
