"""On-policy distillation from another model: its context, its temperature, no rewards."""

import copy
import logging
import math
import os

import pytest
import tiny
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import GPT2Config, PreTrainedModel

from sdpo_trl.divergence import DivergenceSpec
from sdpo_trl.heads import MixedHead, TokenHead
from sdpo_trl.scores import ScoreRequest, score_tokens
from sdpo_trl.temperature import score_at_temperature

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def make(folder, reward=None, teacher: "PreTrainedModel | PeftModel | None" = None, **options):
    options = {"teacher_context": "none", "distillation_alpha": 0.0, **options}
    teacher = tiny.build_model(seed=7) if teacher is None else teacher
    return tiny.trainer(folder, reward, trainer_teacher_model=teacher, **options)


# The context


def own_ids(batch: list, trainer) -> dict:
    """Ids that no tokenizer makes of these prompts."""
    first = [[20 + i % 3, 30, 40] for i in range(len(batch))]
    return {"prompt_ids": first, "completion_ids": [[50, 51 + i, 1] for i in range(len(batch))], "logprobs": None}


@pytest.mark.parametrize("rollout_func", [None, own_ids])
@pytest.mark.parametrize("chat", [False, True])
def test_the_teacher_reads_the_students_own_context(tmp_path, rollout_func, chat):
    data = tiny.prompts(chat=chat, privileged_context=["secret"] * 4, demonstration=["secret"] * 4)
    trainer = make(tmp_path, tiny.telling("secret", tiny.even_length), data=data, trainer_rollout_func=rollout_func)
    for inputs in tiny.micro_batches(trainer):
        assert inputs["feedback_available"].all()
        for name in ("ids", "mask"):
            assert torch.equal(inputs[f"teacher_prompt_{name}"], inputs[f"prompt_{name}"])


def test_the_loss_is_the_plain_divergence_of_the_two_models(tmp_path):
    """The forward divergence of both models' logits on the same ids, averaged over all sampled tokens."""
    teacher = tiny.build_model(seed=7)
    trainer = make(tmp_path, teacher=copy.deepcopy(teacher), temperature=0.8)
    (inputs,) = tiny.micro_batches(trainer)
    loss, _ = tiny.gradient(trainer, inputs)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    length = inputs["completion_ids"].size(1)

    def log_probs(model):
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        return torch.log_softmax(logits[:, -length - 1 : -1].double() / 0.8, -1)

    student, expected = log_probs(trainer.model), log_probs(teacher)
    per_token = (expected.exp() * (expected - student)).sum(-1)
    used = inputs["completion_mask"].bool()
    assert loss == pytest.approx(per_token[used].mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "alpha"), [("full_logits", 0.0), ("full_logits", 0.5), ("full_logits", 1.0), ("topk_logits", 0.0)]
)
def test_the_student_comes_nearer(tmp_path, mode, alpha):
    options = {"distillation_topk": 8} if mode == "topk_logits" else {}
    trainer = make(
        tmp_path, distillation_alpha=alpha, distillation_mode=mode, learning_rate=2e-2, max_steps=25,
        lr_scheduler_type="constant", max_completion_length=12, seed=1, **options,
    )  # fmt: skip
    trainer.train()
    gaps = [row["sdpo/gap_size"] for row in tiny.training_logs(trainer)]
    assert sum(gaps[-5:]) < 0.8 * sum(gaps[:5])


def other_architecture() -> PreTrainedModel:
    """Learned positions, another width, a padded head."""
    config = GPT2Config(
        vocab_size=128, n_embd=24, n_layer=3, n_head=2, n_positions=256, bos_token_id=1, eos_token_id=1,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return tiny.from_config(config, seed=3)


def test_a_teacher_of_another_size_and_architecture(tmp_path):
    trainer = make(tmp_path, teacher=other_architecture(), max_steps=3)
    trainer.train()
    assert all(math.isfinite(row["loss"]) and row["loss"] > 0 for row in tiny.training_logs(trainer))


@pytest.mark.parametrize("context", ["none", "feedback"])
def test_a_teacher_that_cannot_read_so_much(tmp_path, context):
    """Learned positions end; 256 of them."""
    options = {"teacher_context": context, "teacher": other_architecture()}
    data = tiny.prompts(2).to_list()
    data[1]["prompt"] = "y" * 252
    options |= {"data": Dataset.from_list(data), "shuffle_dataset": False}
    message = {
        "none": r"Row 4 has a prompt of 252 and an answer of 6 tokens, more than the teacher's 256 positions",
        "feedback": r"teacher's prompt of row 4 leaves no room for its feedback",
    }[context]
    with pytest.raises(ValueError, match=message):
        tiny.micro_batches(make(tmp_path, tiny.telling(), **options))


@pytest.mark.parametrize("alone", [False, True])
def test_a_different_mapping_is_refused_by_its_first_token(tmp_path, alone):
    tiny.build_model(seed=7).save_pretrained(tmp_path / "teacher")
    tokenizer = tiny.build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "teacher")
    path = tmp_path / "teacher" / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    swapped = text.replace('"A": ', '"Z?": ').replace('"B": ', '"A": ').replace('"Z?": ', '"B": ')
    assert swapped != text
    path.write_text(swapped, encoding="utf-8")
    if alone:  # as some tools leave it
        (tmp_path / "teacher" / "tokenizer_config.json").unlink()
    ids = tokenizer.get_vocab()
    with pytest.raises(ValueError, match=f"maps 'A' to {ids['B']}, the student's to {ids['A']}"):
        make(tmp_path / "run", teacher=str(tmp_path / "teacher"))


# No reward


def test_no_reward_function_is_needed(tmp_path, caplog):
    trainer = make(tmp_path, max_steps=3, log_completions=True)
    assert trainer.reward_funcs == trainer.reward_func_names == trainer.reward_processing_classes == []
    assert trainer.reward_weights.numel() == 0
    with caplog.at_level(logging.WARNING):
        trainer.train()
        evaluated = trainer.evaluate(tiny.prompts())
    assert "returned None" not in caplog.text
    rows = tiny.training_logs(trainer)
    assert len(rows) == 3 and all(row["loss"] > 0 and row["sdpo/distilled_share"] == 1.0 for row in rows)
    for row in (*rows, evaluated):
        assert not [name for name in row if "reward" in name or "success" in name]
        assert all(math.isfinite(value) for value in row.values())


def test_feedback_alone_needs_none_either(tmp_path):
    """The model teaches itself, by what a judge or a column says."""
    trainer = tiny.trainer(
        tmp_path, None, use_successful_as_teacher=False, max_steps=2,
        trainer_feedback_func=lambda prompts, completions, rewards, **columns: [
            "wrong" if math.isnan(reward) else "graded" for reward in rewards
        ],
    )  # fmt: skip
    trainer.train()
    evaluated = trainer.evaluate(tiny.prompts())
    for row in (*tiny.training_logs(trainer), evaluated):
        assert not [name for name in row if "reward" in name or "success" in name]
    assert [row["sdpo/feedback_share"] for row in tiny.training_logs(trainer)] == [1.0, 1.0]
    with pytest.raises(ValueError, match="`teacher_snapshot_gate=True` reads rewards"):
        tiny.trainer(
            tmp_path, None, use_successful_as_teacher=False, teacher_snapshot_gate=True, teacher_sync_steps=1,
            teacher_model_kind="snapshot",
        )  # fmt: skip


def test_rewards_are_used_where_they_are_given(tmp_path):
    trainer = make(tmp_path, tiny.even_length, max_steps=1)
    trainer.train()
    (row,) = tiny.training_logs(trainer)
    assert row["reward"] == row["sdpo/success_share"] == row["rewards/even_length/mean"]


class Judge:
    """An environment that brings its reward."""

    def reset(self, **kwargs):
        return None

    def get_reward(self):
        return 1.0


def test_an_environments_reward_is_enough_for_a_policy_term(tmp_path):
    trainer = make(
        tmp_path, data=tiny.prompts(chat=True), trainer_environment_factory=Judge, distillation_weight=0.5,
        trainer_processing_class=tiny.tool_tokenizer(), max_steps=1,
    )  # fmt: skip
    assert trainer.reward_func_names == ["Judge"] and trainer.reward_weights.tolist() == [1.0]
    trainer.train()
    (row,) = tiny.training_logs(trainer)
    assert row["sdpo/success_share"] == row["reward"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distillation_weight": 0.5}, "`distillation_weight=0.5` reads rewards"),
        ({"distillation_routing": "failed"}, "`distillation_routing='failed'` reads rewards"),
        ({"prompt_weighting": "difficulty"}, "`prompt_weighting='difficulty'` reads rewards"),
        ({"success_reward_func": "judge"}, "`success_reward_func='judge'` reads rewards"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "reads rewards"),
        ({"reward_weights": [1.0]}, "`reward_weights` has no effect without `reward_funcs`"),
    ],
)
def test_what_reads_rewards_needs_them(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **options)
    with pytest.raises(ValueError, match="No reward source provided"):
        tiny.trainer(tmp_path, None)


# The temperature


def heads(mixed=False, count=7):
    generator = torch.Generator().manual_seed(3)

    def head(grad=False):
        tensors = [torch.randn(*shape, generator=generator).double() for shape in ((count, 5), (11, 5))]
        return TokenHead(*(x.requires_grad_(grad) for x in tensors), temperature=0.7)

    teacher = MixedHead(head(), head(), 0.3) if mixed else head()
    return head(True), teacher, torch.randint(0, 11, (count,), generator=generator)


@pytest.mark.parametrize("implementation", ["fused", "reference"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("stale", [False, True])
def test_both_logits_are_divided_and_the_loss_is_multiplied(implementation, mixed, stale):
    student, teacher, ids = heads(mixed)
    old = torch.full((7,), -2.0, dtype=torch.float64) if stale else None
    request = ScoreRequest(
        ids, DivergenceSpec("full_logits", 0.0, None, True), torch.ones(7).double() / 7, old, ratio_clip=1.5,
        policy_gradient=True,
    )  # fmt: skip
    distilled, own = score_at_temperature(student, teacher, request, 3.0, implementation)
    sampling = torch.log_softmax(student.hidden @ student.weight.T / 0.7, -1)
    picked = sampling.gather(-1, ids[:, None]).squeeze(-1)
    assert torch.allclose(own.log_prob, picked)
    ratio = (picked.detach() + 2.0).exp().clamp(max=1.5) if stale else torch.ones(7)
    assert torch.equal(distilled.clipped, (ratio == 1.5) & stale)

    warm = torch.log_softmax(student.hidden @ student.weight.T / 3.0, -1)
    logits = teacher.logits(11) * 0.7 / 3.0
    told = torch.log_softmax(logits, -1).detach()
    per_token = (told.exp() * (told - warm)).sum(-1)
    expected = 9.0 * (ratio * per_token).mean()
    assert torch.allclose(distilled.divergence, per_token.detach())
    assert distilled.loss.item() == pytest.approx(expected.item(), rel=1e-9)
    weights = torch.linspace(-1, 1, 7, dtype=torch.float64)
    actual = torch.autograd.grad(distilled.loss + own.loss + (own.log_prob * weights).sum(), student.hidden)[0]
    truth = torch.autograd.grad(expected + (picked * weights).sum(), student.hidden)[0]
    assert torch.allclose(actual, truth)


def test_the_sampling_temperature_by_name_is_the_default_times_its_square():
    student, teacher, ids = heads()
    request = ScoreRequest(ids, DivergenceSpec("full_logits", 0.5, None, True), torch.ones(7).double())
    plain = score_tokens(student, teacher, request)
    distilled, own = score_at_temperature(student, teacher, request, 0.7)
    assert distilled.loss.item() == pytest.approx(0.49 * plain.loss.item(), rel=1e-12)
    assert torch.equal(distilled.divergence, plain.divergence) and torch.equal(own.entropy, plain.entropy)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_the_policy_term_keeps_the_sampling_temperature(tmp_path, weight):
    """Far above one, both distributions are uniform: what is left of the loss is GRPO's."""

    def one(temperature, weight=weight):
        trainer = tiny.trainer(
            tmp_path, tiny.telling(reward=tiny.even_length), distillation_weight=weight, temperature=0.9,
            distillation_temperature=temperature, distillation_signal="loss", beta=0.0,
        )  # fmt: skip
        (inputs,) = tiny.micro_batches(trainer)
        return tiny.gradient(trainer, inputs)

    _, hot = one(1e6)
    _, warm = one(2.0)
    assert any(not torch.equal(hot[name], warm[name]) for name in hot)
    _, default = one(None)
    _, same = one(0.9)
    scale = max(value.abs().max().item() for value in default.values())
    if weight == 1.0:
        for name, value in default.items():
            assert torch.allclose(same[name], 0.81 * value, atol=1e-5 * scale)
