"""Scoring for the live teacher on vLLM's server: the same loss as by a pass of one's own, and what is asked."""

import copy

import fake_vllm
import pytest
import tiny
import torch

from sdpo_trl import SDPOConfig
from sdpo_trl.divergence import DivergenceSpec
from sdpo_trl.heads import TokenHead
from sdpo_trl.report import TokenHeatmapCallback
from sdpo_trl.scores import ScoreRequest, score_tokens
from sdpo_trl.served_head import ServedHead

URL = "http://server:1"
SERVER = {
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_server_base_url": URL,
    "teacher_model_kind": "live",
    "vllm_importance_sampling_correction": False,  # scripted answers come without log-probabilities
}
SAMPLED = {"distillation_mode": "sampled_token", "distillation_alpha": 1.0}
TOPK = {"distillation_mode": "topk_logits", "distillation_topk": 7}
ANSWERS = ["ab$", "abcd$", "x", "hello$", "a$", "odd$", "xy", "no$"]


def told(completions, log_extra, **kwargs):
    """Feedback for all answers but those that begin with an x, which fail."""
    log_extra("feedback", [None if text.startswith("x") else f"wrong: {text}" for text in completions])
    return [0.0] * len(completions)


def served(folder, monkeypatch, here=False, server=None, **options):
    """A trainer, its server, and whether the teacher is scored here instead."""
    (server or fake_vllm.FakeServer(tiny.build_model())).install(monkeypatch)
    options = {"trainer_rollout_func": tiny.scripted(ANSWERS), **SERVER, "use_teacher_server": not here, **options}
    return tiny.trainer(folder, told, **options)


BLEND = {"distillation_weight": 0.5, "distillation_is_clip": 1.1}
EXACT = {
    "sampled": SAMPLED,
    "sampled, blended": {**SAMPLED, **BLEND},
    "sampled, bounded": {**SAMPLED, "distillation_log_ratio_clip": 0.3},
    "sampled, reference": {**SAMPLED, "distillation_impl": "reference"},
    "all items": {**TOPK, "distillation_topk": 104},
    "more than all": {**TOPK, "distillation_topk": 200, "distillation_alpha": 0.0},
    "stale": {**SAMPLED, "num_iterations": 2, "max_steps": 4},
    "accumulated": {**SAMPLED, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize(("case", "peft"), [*((case, False) for case in EXACT), ("sampled", True), ("stale", True)])
def test_the_same_training_as_by_a_pass_here(tmp_path, monkeypatch, case, peft):
    runs = []
    for here in (True, False):
        seen = tiny.FirstGradient()
        server = fake_vllm.FakeServer(tiny.build_model())
        model = tiny.trained_adapter() if peft else tiny.build_model()
        options = {"max_steps": 2, "max_grad_norm": 0.0, **EXACT[case], "trainer_callbacks": [seen]}
        trainer = served(tmp_path, monkeypatch, here, server, model=model, **options)
        trainer.train()
        asked = sum("prompt_logprobs" in body for _, body in server.requests)
        runs.append((tiny.training_logs(trainer), seen.value, tiny.trained(trainer.model), asked))
    (logs, gradient, weights, none), (served_logs, served_gradient, served_weights, asked) = runs
    assert none == 0 and asked == len(logs) * (2 if case == "accumulated" else 1)
    for row, other in zip(logs, served_logs, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5, abs=1e-5)
        assert row.keys() - other.keys() == {"sdpo/teacher_entropy"}
        for name in ("divergence", "teacher_student_gap", "ratio_clipped_share"):
            assert other[f"sdpo/{name}"] == pytest.approx(row[f"sdpo/{name}"], rel=1e-4, abs=1e-5), name
    tiny.assert_near(served_gradient, gradient, 1e-4)
    tiny.assert_near(served_weights, weights, 1e-3)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_top_k_is_over_the_teachers_own_items(tmp_path, monkeypatch, tail, alpha, impl):
    """Against the formula written out, from full logits of a model with the same weights."""
    options = {**TOPK, "distillation_add_tail": tail, "distillation_alpha": alpha, "distillation_impl": impl}
    trainer = served(tmp_path, monkeypatch, **options)
    inputs = tiny.micro_batches(trainer)[0]
    loss, gradient = tiny.gradient(trainer, inputs)
    trainer.model.zero_grad(set_to_none=True)
    mask = tiny.scored(inputs)

    def log_probs(prompt, prompt_mask):
        ids = torch.cat([prompt, inputs["completion_ids"]], dim=1)
        whole = torch.cat([prompt_mask, inputs["completion_mask"]], dim=1)
        positions = (whole.cumsum(-1) - 1).clamp(min=0)
        logits = trainer.model(input_ids=ids, attention_mask=whole, position_ids=positions).logits
        return logits[:, -mask.size(1) - 1 : -1].log_softmax(-1)[mask]

    student = log_probs(inputs["prompt_ids"], inputs["prompt_mask"])
    teacher = log_probs(inputs["teacher_prompt_ids"], inputs["teacher_prompt_mask"]).detach()
    support = teacher.topk(7).indices
    parts = []
    for values in (student, teacher):
        kept = values.gather(-1, support)
        rest = torch.log1p(-kept.double().exp().sum(-1, keepdim=True)).to(kept.dtype)
        parts.append(torch.cat([kept, rest], dim=-1) if tail else kept.log_softmax(-1))
    p, q = (part.exp() for part in parts)
    m = (1 - alpha) * p + alpha * q
    if alpha == 0.0:
        value = (q * (parts[1] - parts[0])).sum(-1)
    elif alpha == 1.0:
        value = (p * (parts[0] - parts[1])).sum(-1)
    else:
        value = (1 - alpha) * (p * (parts[0] - m.log())).sum(-1) + alpha * (q * (parts[1] - m.log())).sum(-1)
    value.mean().backward()
    assert loss == pytest.approx(value.mean().item(), rel=1e-5, abs=1e-5)
    truth = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    tiny.assert_near(gradient, truth, 1e-4)


def test_what_is_asked(tmp_path, monkeypatch):
    server = fake_vllm.FakeServer(tiny.build_model())
    trainer = served(tmp_path, monkeypatch, server=server, **TOPK)
    inputs = tiny.micro_batches(trainer)[0]
    assert not any("prompt_logprobs" in body for _, body in server.requests)
    tiny.gradient(trainer, inputs)
    ((route, body),) = server.requests
    assert route == "/v1/completions"
    assert (body["prompt_logprobs"], body["max_tokens"], body["temperature"]) == (7, 1, 1.0)
    active = tiny.scored(inputs).any(dim=1)
    expected = [
        inputs["teacher_prompt_ids"][i][inputs["teacher_prompt_mask"][i].bool()].tolist()
        + inputs["completion_ids"][i][inputs["completion_mask"][i].bool()].tolist()
        for i in active.nonzero().squeeze(1).tolist()
    ]
    assert sorted(body["prompt"]) == sorted(expected)
    assert 0 < len(expected) < len(active)  # those without feedback are not sent


def test_a_server_that_lags_behind_is_sent_the_weights_first(tmp_path, monkeypatch):
    """Two steps on one rollout batch: the second is scored with the weights after the first."""
    server = fake_vllm.FakeServer(tiny.build_model())
    trainer = served(tmp_path, monkeypatch, server=server, **SAMPLED, num_iterations=2, max_steps=4)
    trainer.train()
    assert len(server.sent) == 4
    first, second = server.sent[:2]
    assert not all(torch.equal(value, second[name]) for name, value in first.items())


def test_nothing_is_asked_where_nothing_is_distilled(tmp_path, monkeypatch):
    server = fake_vllm.FakeServer(tiny.build_model())
    server.install(monkeypatch)
    trainer = tiny.trainer(
        tmp_path, tiny.never, trainer_rollout_func=tiny.scripted(ANSWERS), **SERVER, **SAMPLED, use_teacher_server=True
    )
    trainer.train()
    assert server.requests == [] and [row["loss"] for row in tiny.training_logs(trainer)] == [0.0, 0.0]


def look() -> str:
    """Look around."""
    return "there is a long hall"


def test_hints_between_turns_are_read_by_the_server_too(tmp_path, monkeypatch):
    def told(prompts, completions, rewards, **columns):
        return [[(0, "begin"), (1, "look twice")] if len(turns) > 2 else "no" for turns in completions]

    losses = []
    for here in (True, False):
        fake_vllm.FakeServer(tiny.build_model()).install(monkeypatch)
        trainer = tiny.trainer(
            tmp_path, tiny.never, data=tiny.prompts(chat=True), trainer_tools=[look], max_completion_length=100,
            trainer_processing_class=tiny.tool_tokenizer(), trainer_feedback_func=told, **SERVER, **SAMPLED,
            use_teacher_server=not here,
        )  # fmt: skip
        tiny.acting(trainer, [['<tool_call>{"name": "look", "arguments": {}}</tool_call>$', "no$"], ["no$"]])
        inputs = tiny.micro_batches(trainer)[0]
        assert "teacher_positions" in inputs
        losses.append(tiny.gradient(trainer, inputs))
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-5)
    tiny.assert_near(losses[1][1], losses[0][1], 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**SAMPLED, "use_vllm": False}, "needs `use_vllm=True` and `vllm_mode='server'`"),
        ({**SAMPLED, "vllm_mode": "colocate"}, "needs `use_vllm=True` and `vllm_mode='server'`"),
        ({**SAMPLED, "teacher_model_kind": "ema"}, "needs `teacher_model_kind='live'`: the server holds"),
        ({}, "`distillation_mode` 'topk_logits' or 'sampled_token'"),
        ({"distillation_signal": "advantage_magnitude"}, "needs `distillation_signal='loss'`"),
        ({**SAMPLED, "temperature": 0.7}, "needs `temperature=1.0`: vLLM gives"),
        ({**SAMPLED, "distillation_temperature": 2.0}, "needs `distillation_temperature=None`"),
        ({**SAMPLED, "token_weighting": "teacher_entropy"}, "another `token_weighting`"),
        ({**SAMPLED, "distillation_weight": 0.0}, "a `distillation_weight` above 0"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        SDPOConfig(str(tmp_path), use_cpu=True, bf16=False, use_teacher_server=True, **{**SERVER, **options})


def test_what_else_cannot_work_is_refused_with_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"`teacher_model` brings others\. Drop one"):
        served(tmp_path, monkeypatch, **SAMPLED, trainer_teacher_model=tiny.build_model(seed=7))
    for config, message in (
        ({"logprobs_mode": "raw_logits"}, "gives logits .*--logprobs-mode processed_logprobs"),
        ({"max_logprobs": 5}, r"at most 5 log-probabilities.*--max-logprobs 7"),
    ):
        with pytest.raises(ValueError, match=message):
            served(tmp_path, monkeypatch, server=fake_vllm.FakeServer(tiny.build_model(), **config), **TOPK)
    looked = served(tmp_path, monkeypatch, **SAMPLED, trainer_callbacks=[TokenHeatmapCallback()])
    with pytest.raises(ValueError, match="`TokenHeatmapCallback` shows the teacher's whole distribution"):
        looked.train()


def test_a_server_that_leaves_a_token_out_is_an_error(tmp_path, monkeypatch):
    server = fake_vllm.FakeServer(tiny.build_model())
    whole = server.scored

    def forgetful(ids, count):
        answer = copy.deepcopy(whole(ids, count))
        answer["prompt_logprobs"][-1].pop(str(ids[-1]))
        return answer

    server.scored = forgetful
    trainer = served(tmp_path, monkeypatch, server=server, **SAMPLED)
    with pytest.raises(ValueError, match="no log-probability for a token of an answer"):
        tiny.gradient(trainer, tiny.micro_batches(trainer)[0])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_peaked_teacher_whose_rest_is_lost_in_rounding_stays_finite(alpha):
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8) * 30, torch.randn(20, 8)
    student = TokenHead((hidden + 0.1).requires_grad_(), weight)
    teacher = TokenHead(hidden, weight).logits(20).log_softmax(-1)
    ids = torch.randint(20, (6,))
    top = teacher.topk(4)
    head = ServedHead(ids, teacher.gather(-1, ids[:, None])[:, 0], top.indices, top.values, 20)
    request = ScoreRequest(ids, DivergenceSpec("topk_logits", alpha, 4), torch.ones(6))
    for implementation in ("fused", "reference"):
        scores = score_tokens(student, head, request, implementation)
        (gradient,) = torch.autograd.grad(scores.loss, student.hidden)
        assert torch.isfinite(gradient).all() and -1e-5 < scores.loss.item() < 1e3
