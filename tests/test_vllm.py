"""vLLM in server mode against a server in this process: what it is sent, and what its answers become."""

import contextlib

import fake_vllm
import pytest
import tiny
import torch
from peft import PrefixTuningConfig, get_peft_model

SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://server:1"}


def content(model):
    """Every tensor of a model, frozen ones too, as a copy."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def merged(model):
    """The slow truth: what PEFT itself makes of a copy, by name."""
    import copy

    plain = copy.deepcopy(model).merge_and_unload()
    return dict(plain.named_parameters())


ADAPTERS = {
    "lora": {},
    "rslora": {"use_rslora": True, "target_modules": "all-linear"},
    "dora": {"use_dora": True},
    "bias": {"bias": "all"},
    "own bias": {"lora_bias": True, "model": {"attention_bias": True}},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "modules to save": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [3, 5]},
    "tied tokens": {"trainable_token_indices": {"embed_tokens": [3, 5]}, "model": {"tie_word_embeddings": True}},
    "bfloat16": {"dtype": torch.bfloat16},
}


def adapted(adapter, seed=3):
    """A model whose adapter, of this kind, changes its outputs, and its base."""
    options = dict(ADAPTERS[adapter])
    base = tiny.build_model(**options.pop("model", {})).to(options.pop("dtype", torch.float32))
    model = get_peft_model(base, tiny.lora(**options))
    tiny.shift(model, 0.3, seed)
    return model


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_current_adapter_is_sent_merged_under_base_names(tmp_path, monkeypatch, adapter):
    options = ADAPTERS[adapter]
    plain = tiny.build_model(**options.get("model", {})).to(options.get("dtype", torch.float32))
    server = fake_vllm.FakeServer(plain).install(monkeypatch)
    trainer = tiny.trainer(tmp_path, model=adapted(adapter), **SERVER, bf16=False)
    for seed in (3, 4):
        before = content(trainer.model)
        trainer.vllm_generation.sync_weights()
        tiny.assert_equal(content(trainer.model), before)  # bit for bit, the frozen base too
        tiny.assert_near(server.sent[-1], merged(trainer.model), 1e-2 if "dtype" in options else 1e-6)
        tiny.shift(trainer.model, 0.1, seed)
    assert any(not torch.equal(first, server.sent[1][name]) for name, first in server.sent[0].items())
    assert server.resets == 2


def test_full_fine_tuning_sends_the_student_and_not_its_teacher(tmp_path, monkeypatch):
    server = fake_vllm.FakeServer(tiny.build_model()).install(monkeypatch)
    trainer = tiny.trainer(tmp_path, **SERVER, teacher_model_kind="ema", max_steps=2)
    trainer.train()
    assert len(server.sent) == 2  # once per step
    tiny.assert_equal(server.sent[0], dict(tiny.build_model().named_parameters()))
    trainer.vllm_generation.sync_weights()
    tiny.assert_equal(server.sent[-1], dict(trainer.model.named_parameters()))


def test_other_adapters_are_neither_merged_nor_sent(tmp_path, monkeypatch):
    model = get_peft_model(tiny.build_model(), tiny.lora(modules_to_save=["lm_head"]), adapter_name="first")
    model.add_adapter("default", tiny.lora(r=2, modules_to_save=["lm_head"]))
    model.set_adapter("first")
    for name, p in model.named_parameters():
        p.data += 0.1 * torch.randn_like(p) if "lora_" in name or "modules_to_save" in name else 0.0
    server = fake_vllm.FakeServer(tiny.build_model()).install(monkeypatch)
    trainer = tiny.trainer(tmp_path, model=model, **SERVER)
    before = content(model)
    trainer.vllm_generation.sync_weights()
    tiny.assert_equal(content(model), before)
    tiny.assert_near(server.sent[0], merged(model), 1e-6)
    assert torch.equal(server.sent[0]["lm_head.weight"], model.base_model.model.lm_head.modules_to_save.first.weight)


def test_a_failure_while_sending_leaves_the_student_as_it_was(tmp_path, monkeypatch):
    fake_vllm.FakeServer(tiny.build_model()).install(monkeypatch)
    trainer = tiny.trainer(tmp_path, model=adapted("dora"), **SERVER)
    before = content(trainer.model)
    sending = trainer.vllm_generation._iter_named_params()
    for _ in range(5):
        next(sending)
    with contextlib.suppress(ConnectionError):
        sending.throw(ConnectionError())
    tiny.assert_equal(content(trainer.model), before)
    assert trainer.vllm_generation.model is trainer.model
    next(p for n, p in trainer.model.named_parameters() if "v_proj.lora_A" in n).data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaNs detected"):
        list(trainer.vllm_generation._iter_named_params())
    assert not any(getattr(module, "merged", False) for module in trainer.model.modules())


def test_what_cannot_be_merged_is_refused(tmp_path, monkeypatch):
    fake_vllm.FakeServer(tiny.build_model()).install(monkeypatch)
    prefix = get_peft_model(tiny.build_model(), PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"PREFIX_TUNING has none to merge\. Use LoRA"):
        tiny.trainer(tmp_path, model=prefix, **SERVER)
    base = tiny.build_model(tie_word_embeddings=True)
    tied = get_peft_model(base, tiny.lora(target_modules=["embed_tokens", "v_proj"]))
    with pytest.raises(ValueError, match=r"embed_tokens.*tied embeddings.*tie_word_embeddings=False"):
        tiny.trainer(tmp_path, model=tied, **SERVER)


@pytest.mark.parametrize("peft", [False, True])
def test_rollouts_come_from_what_was_sent(tmp_path, monkeypatch, peft):
    """The reported log-probabilities are the student's of each step, so the correction is 1 at every one of them."""
    server = fake_vllm.FakeServer(tiny.build_model()).install(monkeypatch)
    model = adapted("lora") if peft else tiny.build_model()
    trainer = tiny.trainer(tmp_path, tiny.telling(), model=model, **SERVER, max_steps=3, learning_rate=0.05)
    trainer.train()
    for row in tiny.training_logs(trainer):
        for which in ("min", "mean", "max"):
            assert row[f"sampling/importance_sampling_ratio/{which}"] == pytest.approx(1.0, abs=1e-4)
    assert len(server.sent) == 3
    assert len({p.sum().item() for p in (sent["model.layers.0.self_attn.v_proj.weight"] for sent in server.sent)}) == 3


def losses(tmp_path, monkeypatch, noise, weight, **options):
    """Loss and gradient of one batch whose answers were sampled with log-probabilities that are off by `noise`."""
    fake_vllm.FakeServer(tiny.build_model(), noise).install(monkeypatch)
    torch.manual_seed(3)
    trainer = tiny.trainer(
        tmp_path, tiny.telling(reward=tiny.even_length), **SERVER, distillation_weight=weight, max_completion_length=8,
        teacher_model_kind="base", **options,
    )  # fmt: skip
    inputs = tiny.micro_batches(trainer)[0]
    return trainer, inputs, *tiny.gradient(trainer, inputs)


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_samplers_correction_multiplies_each_token(tmp_path, monkeypatch, weight, mode):
    """TRL's ratio is in the policy term and in the divergence, per token or per answer, cut or masked as TRL does."""
    options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.2}
    noise = -0.3  # the sampler says less than the student: a ratio of 1.35 at every other token
    trainer, inputs, loss, gradient = losses(tmp_path, monkeypatch, noise, weight, **options)
    ratio = inputs["importance_sampling_ratio"]
    mask = inputs["completion_mask"].bool()
    odd = torch.arange(mask.size(1)) % 2 == 0
    if mode == "token_truncate":
        expected = torch.where(odd, 1.2, 1.0).expand_as(mask)
        assert torch.allclose(ratio[mask], expected[mask], atol=1e-4)
    elif mode == "token_mask":
        expected = torch.where(odd, 0.0, 1.0).expand_as(mask)
        assert torch.allclose(ratio[mask], expected[mask], atol=1e-4)
    else:
        assert ratio.shape == (len(mask), 1) and ratio.max() <= 1.2 + 1e-6
        assert (ratio == 0).any() == (mode == "sequence_mask")
    *_, plain, _ = losses(tmp_path, monkeypatch, 0.0, weight, **options)
    assert loss != pytest.approx(plain, rel=1e-3)
    truth, slope = corrected(trainer, inputs, weight)
    assert loss == pytest.approx(truth, rel=1e-4)
    tiny.assert_near(gradient, slope, 1e-4)


def corrected(trainer, inputs, weight):
    """From full logits: `(1 - w)` TRL's term plus `w` the divergence, each token times its ratio."""
    from sdpo_trl.divergence import divergence

    trainer.model.zero_grad(set_to_none=True)
    mask = inputs["completion_mask"].bool()

    def log_probs(prompt, prompt_mask):
        ids = torch.cat([prompt, inputs["completion_ids"]], dim=1)
        whole = torch.cat([prompt_mask, inputs["completion_mask"]], dim=1)
        positions = (whole.cumsum(-1) - 1).clamp(min=0)
        logits = trainer.model(input_ids=ids, attention_mask=whole, position_ids=positions).logits
        return logits[:, -mask.size(1) - 1 : -1].log_softmax(-1)

    student = log_probs(inputs["prompt_ids"], inputs["prompt_mask"])
    with torch.no_grad():
        teacher = log_probs(inputs["teacher_prompt_ids"], inputs["teacher_prompt_mask"])
    picked = student.gather(-1, inputs["completion_ids"][..., None]).squeeze(-1)
    ratio = inputs["importance_sampling_ratio"].expand_as(picked)
    distilled = (divergence(student, teacher, 0.5) * ratio)[mask].sum() / mask.sum()
    policy = -(picked - picked.detach()).exp() * inputs["advantages"][:, None] * ratio
    loss = weight * distilled + (1 - weight) * policy[mask].sum() / mask.sum()
    loss.backward()
    return loss.item(), {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}


def test_without_the_correction_nothing_is_multiplied(tmp_path, monkeypatch):
    _, inputs, loss, _ = losses(tmp_path, monkeypatch, -0.3, 1.0, vllm_importance_sampling_correction=False)
    assert "importance_sampling_ratio" not in inputs
    _, _, plain, _ = losses(tmp_path, monkeypatch, 0.0, 1.0)
    assert loss == pytest.approx(plain, rel=1e-4)
