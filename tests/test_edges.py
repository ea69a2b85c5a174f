"""What reviewers broke once: each a case that the other tests did not cover."""

import os

import pytest
import tiny
import torch
from peft import PrefixTuningConfig
from transformers import BambaConfig, FalconH1Config, GPT2Config, JambaConfig

from sdpo_trl.divergence import DivergenceSpec
from sdpo_trl.heads import MixedHead, TokenHead
from sdpo_trl.prefixes import shares_prefixes
from sdpo_trl.scores import ScoreRequest, score_tokens

SIZES = {
    "vocab_size": 104, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"teacher_model_kind": "live", "steps_per_generation": 3, "gradient_accumulation_steps": 4},
        {"teacher_update_rate": 1.0, "steps_per_generation": 3, "gradient_accumulation_steps": 4},
        {"teacher_model_kind": "live", "steps_per_generation": 2},
        {"teacher_model_kind": "snapshot", "teacher_sync_steps": 1, "num_iterations": 2},
        {"teacher_model_kind": "snapshot", "teacher_sync_steps": 2, "steps_per_generation": 2},
        {"teacher_update_rate": 1.0},
    ],
    ids=str,
)
def test_the_teacher_is_always_that_of_now(tmp_path, options):
    """What was scored with the batch equals a fresh pass when it is used, also where a step falls within a batch."""
    trainer = tiny.trainer(
        tmp_path, tiny.telling(), per_device_train_batch_size=4, learning_rate=1e-2, max_steps=6, **options
    )
    runner, checked = trainer._teacher_pass, []
    original = runner.head

    def compare(inputs, active):
        used = original(inputs, active)
        fresh = original({key: x for key, x in inputs.items() if key != "teacher_hidden"}, active)
        torch.testing.assert_close(used.logits(104), fresh.logits(104), rtol=1e-4, atol=1e-4)
        checked.append("teacher_hidden" in inputs)
        return used

    runner.head = compare
    trainer.train()
    assert len(checked) >= 6


def test_the_teacher_is_that_of_now_after_a_resume_within_a_batch(tmp_path):
    options = {
        "teacher_model_kind": "snapshot", "teacher_sync_steps": 2, "steps_per_generation": 2, "learning_rate": 1e-2,
        "per_device_train_batch_size": 4, "data": tiny.prompts(16), "max_steps": 5,
    }  # fmt: skip
    tiny.trainer(tmp_path, tiny.telling(), save_strategy="steps", save_steps=1, **options).train()
    trainer = tiny.trainer(tmp_path, tiny.telling(), **options)
    original, seen = trainer._teacher_pass.head, []

    def compare(inputs, active):
        used = original(inputs, active)
        fresh = original({key: x for key, x in inputs.items() if key != "teacher_hidden"}, active)
        torch.testing.assert_close(used.logits(104), fresh.logits(104), rtol=1e-4, atol=1e-4)
        seen.append(inputs)
        return used

    trainer._teacher_pass.head = compare
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert seen


@pytest.mark.parametrize(
    "config",
    [
        FalconH1Config(**SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8,
                       mamba_chunk_size=8, lm_head_multiplier=0.5),
        BambaConfig(**SIZES, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8,
                    attn_layer_indices=[1]),
        JambaConfig(**SIZES, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                    num_experts=2, num_experts_per_tok=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_models_with_recurrent_states_train(tmp_path, config):
    model = tiny.from_config(config)
    assert not shares_prefixes(model)
    trainer = tiny.trainer(tmp_path, tiny.telling(), model=model, max_steps=1)
    trainer.train()
    assert tiny.training_logs(trainer)[0]["loss"] > 0


def test_frequencies_that_follow_the_length_share_no_prefix():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not shares_prefixes(tiny.build_model(rope_parameters=rope))
    assert shares_prefixes(tiny.build_model(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))


def test_prefix_tuning_trains(tmp_path):
    peft = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    trainer = tiny.trainer(tmp_path, tiny.telling(), max_steps=2, trainer_peft_config=peft)
    trainer.train()
    assert all(row["grad_norm"] > 0 for row in tiny.training_logs(trainer))


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_a_real_vocabulary_and_a_near_teacher_stay_above_zero(alpha, implementation):
    vocab, hidden = 151936, torch.randn(8, 16)
    weight = torch.randn(vocab, 16)
    for noise in (1e-4, 1e-3):
        teacher = TokenHead(hidden + noise * torch.randn(8, 16), weight)
        request = ScoreRequest(torch.randint(vocab, (8,)), DivergenceSpec("full_logits", alpha), torch.ones(8))
        with torch.no_grad():
            value = score_tokens(TokenHead(hidden, weight), teacher, request, implementation).divergence
        assert value.min() >= -1e-6


def test_a_mixture_of_excluded_items_stays_excluded():
    bias = torch.tensor([0.0, -torch.inf, 0.0])
    head = TokenHead(torch.randn(2, 4), torch.randn(3, 4), bias)
    for mix in (0.0, 0.3, 1.0):
        assert torch.equal(MixedHead(head, head, mix).logits(3).isneginf(), bias.isneginf().expand(2, 3))


def test_saving_to_the_same_folder_by_another_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = tiny.trainer("out", tiny.never)
    trainer.save_model(os.path.abspath("out"))
    (tmp_path / "out" / "README.md").write_text("mine")
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
    assert "SDPO" in (tmp_path / "elsewhere" / "README.md").read_text()


def test_padding_to_a_multiple_holds_in_every_pass(tmp_path):
    trainer = tiny.trainer(tmp_path, tiny.telling(), pad_to_multiple_of=16, max_steps=1)
    widths = []
    trainer.model.model.register_forward_hook(
        lambda module, args, kwargs, out: widths.append((kwargs["input_ids"].size(1), torch.is_grad_enabled())),
        with_kwargs=True,
    )
    (batch, *_) = tiny.micro_batches(trainer)
    assert batch["teacher_prompt_ids"].size(1) % 16 == 0
    trainer.train()
    assert [width for width, grad in widths if grad and width % 16] == []


def test_feedback_is_cut_to_what_the_models_positions_leave(tmp_path):
    config = GPT2Config(
        vocab_size=104, n_embd=32, n_layer=2, n_head=4, n_positions=180, bos_token_id=1, eos_token_id=1
    )
    model = tiny.from_config(config)
    trainer = tiny.trainer(tmp_path, tiny.telling("no " * 100), model=model, max_steps=1)
    (batch, *_) = tiny.micro_batches(trainer)
    assert batch["teacher_prompt_mask"].sum(1).max() <= 180 - trainer.max_completion_length
    trainer.train()
    assert tiny.training_logs(trainer)[0]["sdpo/shortened_share"] == 1.0


def test_external_teachers_that_cannot_work_are_refused(tmp_path):
    peft = tiny.build_model()
    with pytest.raises(ValueError, match="merge_and_unload"):
        from peft import get_peft_model

        tiny.trainer(tmp_path, tiny.never, trainer_teacher_model=get_peft_model(peft, tiny.lora()))
    student = get_peft_model(tiny.build_model(), tiny.lora())
    with pytest.raises(ValueError, match="shares parameters"):
        tiny.trainer(tmp_path, tiny.never, model=student, trainer_teacher_model=student.get_base_model())
    assert any(parameter.requires_grad for parameter in student.parameters())


def test_padded_items_that_the_teacher_lacks_are_not_scored(tmp_path):
    student = tiny.build_model(vocab_size=160)
    trainer = tiny.trainer(
        tmp_path, tiny.telling(), model=student, trainer_teacher_model=tiny.build_model(1), max_steps=3
    )
    batches = tiny.micro_batches(trainer)
    assert any((batch["completion_ids"] >= 104).any() for batch in batches)
    trainer.train()
    assert all(0 < row["loss"] < float("inf") for row in tiny.training_logs(trainer))


def test_log_extra_of_something_else_names_its_source(tmp_path):
    def reward(completions, log_extra, **columns):
        log_extra("feedback", None)
        return [0.0] * len(completions)

    with pytest.raises(TypeError, match=r"log_extra.*NoneType"):
        tiny.trainer(tmp_path, reward).train()
