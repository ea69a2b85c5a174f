"""The controls inside the trainer: which rows go where, what is descended, what is kept, what is evaluated."""

import math

import pytest
import tiny
import torch

from sdpo_trl.metrics import TOKEN_METRICS

ANSWERS = ["ok$", "no$", "okk$", "bad$", "ab$", "c$", "dd$", "xx$"]
EVERYTHING = {
    "distillation_weight": 0.7, "distillation_routing": "failed", "distillation_weight_schedule": "cosine",
    "distillation_weight_warmup_steps": 1, "distillation_log_ratio_clip_running": 2.0, "distillation_is_clip_low": 0.1,
    "token_weighting": "teacher_entropy", "prompt_weighting": "difficulty", "teacher_proximal_share": 0.9,
    "teacher_model_kind": "snapshot", "teacher_sync_steps": 1, "teacher_snapshot_gate": True, "success_buffer_size": 2,
    "demonstration_choice": "random",
}  # fmt: skip


def graded(completions, log_extra, **kwargs):
    log_extra("feedback", [f"you wrote {text}" for text in completions])
    return [1.0 if "ok" in text else 0.0 for text in completions]


def make(folder, answers=ANSWERS, reward=graded, **options):
    rollout = {"trainer_rollout_func": tiny.scripted(answers)} if answers else {}
    trainer = tiny.trainer(folder, reward, **{"max_completion_length": 8, **rollout, **options})
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def batch(trainer):
    return tiny.micro_batches(trainer)[0]


def texts(trainer, inputs, name):
    return [
        trainer._tokenizer.decode(ids[mask.bool()], skip_special_tokens=True)
        for ids, mask in zip(inputs[f"{name}_ids"], inputs[f"{name}_mask"], strict=True)
    ]


def distilled(trainer, inputs):
    pairs = zip(texts(trainer, inputs, "completion"), inputs["feedback_available"].tolist(), strict=True)
    return sorted(text for text, available in pairs if available)


def test_which_rollouts_each_route_distils(tmp_path):
    first_group, second_group = ["bad", "no", "ok", "okk"], ["ab", "c", "dd", "xx"]
    for options, expected in (
        ({}, first_group + second_group),
        ({"distillation_routing": "failed"}, ["bad", "no", *second_group]),
        ({"distillation_routing": "positive_advantage"}, ["ok", "okk"]),
        ({"prompt_weighting": "difficulty"}, first_group),
        ({"prompt_weighting": "difficulty", "distillation_routing": "failed"}, ["bad", "no"]),
    ):
        trainer = make(tmp_path, **options)
        assert distilled(trainer, batch(trainer)) == sorted(expected)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_failures_are_distilled_and_the_rest_is_left_to_the_policy_term(tmp_path, loss_type):
    options = {"loss_type": loss_type, "max_completion_length": 8}
    routed = make(tmp_path, distillation_routing="failed", distillation_weight=0.4, **options)
    pure = make(tmp_path, distillation_routing="failed", **options)
    inputs = batch(routed)
    total, total_grad = tiny.gradient(routed, inputs)
    part, part_grad = tiny.gradient(pure, inputs)
    kept = inputs["in_policy_term"]
    assert sorted(text for text, own in zip(texts(routed, inputs, "completion"), kept, strict=True) if own) == [
        "ok", "okk",
    ]  # fmt: skip
    grpo = make(tmp_path, distillation_weight=0.0, **options)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    rows = {name: inputs[name][kept] for name in names}
    rows["num_items_in_batch"] = rows["completion_mask"].sum()
    policy, policy_grad = tiny.gradient(grpo, rows)
    assert total == pytest.approx(0.6 * policy + 0.4 * part, rel=1e-5, abs=1e-7)
    tiny.assert_near(total_grad, {n: 0.6 * policy_grad[n] + 0.4 * part_grad[n] for n in part_grad}, rtol=1e-5)


def test_the_weight_follows_its_schedule_and_a_resume(tmp_path):
    options = {"distillation_weight": 0.8, "distillation_weight_schedule": "linear", "max_steps": 4,
               "data": tiny.prompts(8)}  # fmt: skip
    whole = make(tmp_path / "a", save_strategy="steps", save_steps=2, **options)
    whole.train()
    weights = [row["sdpo/distillation_weight"] for row in tiny.training_logs(whole)]
    assert weights == pytest.approx([0.8, 0.6, 0.4, 0.2])
    resumed = make(tmp_path / "b", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    tiny.assert_equal(tiny.trained(resumed.model), tiny.trained(whole.model))
    inputs = batch(whole)
    whole.state.max_steps, losses = 4, []
    for step in range(5):
        whole.state.global_step = step
        losses.append(whole._compute_loss(whole.model, inputs).item())
    policy, pure = losses[4], (losses[0] - 0.2 * losses[4]) / 0.8
    assert losses == pytest.approx([w * pure + (1 - w) * policy for w in (0.8, 0.6, 0.4, 0.2, 0.0)], rel=1e-4)


def test_prompt_weights_multiply_the_rows_loss(tmp_path):
    trainer = make(tmp_path, reward=lambda completions, **kwargs: [1.0 if "o" in t else 0.0 for t in completions],
                   answers=["ok$", "a$", "b$", "c$", "oo$", "o$", "d$", "e$"], prompt_weighting="difficulty",
                   dont_reprompt_on_self_success=False)  # fmt: skip
    inputs = batch(trainer)
    rare, common = math.sqrt(3) / 4, 0.5
    expected = sorted([2 * rare / (rare + common)] * 4 + [2 * common / (rare + common)] * 4)
    assert sorted(inputs["prompt_weight"].tolist()) == pytest.approx(expected)
    _, weighted = tiny.gradient(trainer, inputs)
    by_row = []
    for row in range(8):
        alone = {**inputs, "prompt_weight": torch.zeros(8).index_fill(0, torch.tensor([row]), 1.0)}
        by_row.append(tiny.gradient(trainer, alone)[1])
    summed = {name: sum(inputs["prompt_weight"][i] * by_row[i][name] for i in range(8)) for name in weighted}
    tiny.assert_near(weighted, summed)


@pytest.mark.parametrize("mode", [{"distillation_mode": "sampled_token", "distillation_alpha": 1.0}, {}])
def test_the_gain_brings_small_corrections_to_their_target(tmp_path, mode):
    plain, scaled, bounded = (
        make(tmp_path, **mode, **options)
        for options in ({}, {"distillation_gain_target": 3.0}, {"distillation_gain_target": 1e6})
    )
    inputs = batch(plain)
    loss, grad = tiny.gradient(plain, inputs)
    sums = dict(zip((*TOKEN_METRICS, "count"), plain._sums._tokens["train"].tolist(), strict=True))
    mean = sums["gap_size"] / sums["count"]
    assert 0 < mean < 3.0
    gain = min(3.0 / mean, 10.0)
    for trainer, factor in ((scaled, gain), (bounded, 10.0)):
        value, other = tiny.gradient(trainer, inputs)
        assert value == pytest.approx(factor * loss, rel=1e-5)
        tiny.assert_near(other, {name: factor * g for name, g in grad.items()})
        assert trainer._metrics["train"]["sdpo/gain"] == pytest.approx([factor])


def test_advantages_keep_their_sign_and_take_their_size_from_the_teacher(tmp_path):
    options = {"distillation_signal": "advantage_magnitude", "teacher_model_kind": "live"}
    trainer = make(tmp_path, **options, advantage_magnitude_clip=0.3, distillation_weight=0.5)
    inputs = batch(trainer)
    value, grad = tiny.gradient(trainer, inputs)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].size(1)
    told = torch.cat([inputs["teacher_prompt_ids"], inputs["completion_ids"]], dim=1)
    told_mask = torch.cat([inputs["teacher_prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad():
        own, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length)
        teacher, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, told, told_mask, length)
    advantages = inputs["advantages"][:, None]
    factor = 0.5 + 0.5 * (advantages.sign() * (teacher - own)).exp().clamp(0.7, 1.3)
    factor[~inputs["feedback_available"]] = 1.0
    grpo = make(tmp_path, distillation_weight=0.0)
    expected, expected_grad = tiny.gradient(grpo, {**inputs, "advantages": advantages * factor})
    assert value == pytest.approx(expected, rel=1e-4, abs=1e-6)
    tiny.assert_near(grad, expected_grad)
    assert grad and any(g.abs().max() > 0 for g in grad.values())


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo", "luspo", "grpo"])
def test_every_loss_type_takes_advantages_per_token(tmp_path, loss_type):
    options = {"loss_type": loss_type, "max_completion_length": 8}
    trainer = make(tmp_path, distillation_signal="advantage_magnitude", **options)
    inputs = batch(trainer)
    scaled, scale = [], trainer._scaled_advantages
    trainer._scaled_advantages = lambda *args: (scaled.append(scale(*args)), scaled[-1])[1]
    value, grad = tiny.gradient(trainer, inputs)
    grpo = make(tmp_path, distillation_weight=0.0, **options)
    expected, expected_grad = tiny.gradient(grpo, {**inputs, "advantages": scaled[0]})
    assert value == pytest.approx(expected, rel=1e-4, abs=1e-6)
    tiny.assert_near(grad, expected_grad)
    plain, _ = tiny.gradient(grpo, inputs)
    assert plain != pytest.approx(expected, rel=1e-3)


def test_the_running_clip_follows_the_gap(tmp_path):
    trainer = make(tmp_path, distillation_log_ratio_clip_running=0.5, max_steps=3, learning_rate=1e-2)
    specs, compute = [], trainer._compute_loss

    def watched(model, inputs):
        specs.append(trainer._divergence_now().log_ratio_clip)
        return compute(model, inputs)

    trainer._compute_loss = watched
    trainer.train()
    sizes = [row["sdpo/gap_size"] for row in tiny.training_logs(trainer)]
    assert specs[0] is None  # nothing is known before the first step ends
    assert specs[1:] == pytest.approx([0.5 * sizes[0], 0.5 * (0.95 * sizes[0] + 0.05 * sizes[1])], rel=1e-4)
    shares = [row["sdpo/log_ratio_clipped_share"] for row in tiny.training_logs(trainer)]
    assert shares[0] == 0.0 and all(0 < share < 1 for share in shares[1:])
    both = make(tmp_path, distillation_log_ratio_clip_running=0.5, distillation_log_ratio_clip=1e-3)
    both._gap_size.value = 1.0
    assert both._divergence_now().log_ratio_clip == 1e-3


def test_a_success_is_remembered_where_the_group_has_none(tmp_path):
    solved = iter([True, True, False, False])

    def reward(completions, **kwargs):
        passed = next(solved)
        return [1.0 if passed and text == "ok" else 0.0 for text in completions]

    trainer = make(tmp_path, reward=reward, success_buffer_size=1, num_generations=8, max_steps=4,
                   data=tiny.prompts(2), log_completions=False)  # fmt: skip
    hints, compute = [], trainer._compute_loss

    def watched(model, inputs):
        hints.append(texts(trainer, inputs, "teacher_prompt") if inputs["feedback_available"].any() else [])
        return compute(model, inputs)

    trainer._compute_loss = watched
    trainer.train()
    assert all("Correct solution:\n\nok\n" in hint for hint in hints[2] + hints[3]) and len(hints[3]) == 8
    shares = [row["sdpo/remembered_share"] for row in tiny.training_logs(trainer)]
    assert shares == [0.0, 0.0, 1.0, 1.0]


def test_a_run_with_everything_on_resumes_bit_for_bit(tmp_path):
    options = {**EVERYTHING, "max_steps": 4, "learning_rate": 1e-2, "data": tiny.prompts(8), "answers": None,
               "reward": tiny.telling(reward=tiny.even_length)}  # fmt: skip
    whole = make(tmp_path / "a", save_strategy="steps", save_steps=2, **options)
    whole.train()
    resumed = make(tmp_path / "b", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    tiny.assert_equal(tiny.trained(resumed.model), tiny.trained(whole.model))
    tiny.assert_equal(resumed._stores["teacher"]._values, whole._stores["teacher"]._values)
    for name, part in whole._remembers.items():
        # What was scored since the last batch is a log, and logs start anew.
        assert name == "health" or resumed._remembers[name].state() == part.state(), name
    assert whole._buffer.state()["answers"] and whole._gap_size.value


def test_a_checkpoint_of_before_starts_the_memory_anew(tmp_path, caplog):
    make(tmp_path / "a", save_strategy="steps", save_steps=1, max_steps=1).train()
    resumed = make(tmp_path / "b", success_buffer_size=2, max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert "knows no success_buffer, so it starts anew" in caplog.text and resumed.state.global_step == 2


# The teacher's own answers


def told(text):
    """Passes what is long, and tells everybody about it."""
    return tiny.telling(text, lambda completions, **kwargs: [1.0 if len(t) > 3 else 0.0 for t in completions])


@pytest.mark.parametrize("kind", ["live", "base", "ema", "trust_region"])
def test_the_evaluation_lets_the_teacher_answer_with_its_weights_and_its_prompt(tmp_path, monkeypatch, kind):
    trainer = make(
        tmp_path, answers=None, reward=told("longer"), teacher_model_kind=kind,
        environment_feedback_only_without_solution=False,
    )  # fmt: skip
    start = tiny.trained(trainer.model)
    tiny.shift(trainer.model)
    seen = []
    generate = type(trainer).__mro__[3]._generate_single_turn  # TRL's

    def watched(self, prompt_ids, *args):
        answers = generate(self, prompt_ids, *args)
        seen.append((self._tokenizer.batch_decode(prompt_ids), tiny.trained(self.model), answers[0]))
        return answers

    monkeypatch.setattr(type(trainer).__mro__[3], "_generate_single_turn", watched)
    metrics = trainer.evaluate(tiny.prompts(2))
    assert len(seen) == 2
    (prompts, student, _), (hints, weights, answers) = seen
    assert all("longer" in hint and hint.startswith(prompt) for prompt, hint in zip(prompts, hints, strict=True))
    tiny.assert_equal(weights, student if kind == "live" else start)
    tiny.assert_equal(tiny.trained(trainer.model), student)
    passed = [len(trainer._tokenizer.decode(ids, skip_special_tokens=True)) > 3 for ids in answers]
    assert metrics["eval_sdpo/teacher_success_share"] == pytest.approx(sum(passed) / len(passed))


def test_evaluating_the_teacher_leaves_training_and_the_other_metrics_alone(tmp_path):
    runs = []
    for asked in (True, False):
        trainer = make(
            tmp_path, answers=None, reward=told("longer"), evaluate_teacher=asked, eval_strategy="steps", eval_steps=1,
            trainer_eval_dataset=tiny.prompts(3), max_steps=3, learning_rate=1e-2, log_completions=True,
        )  # fmt: skip
        trainer.train()
        logs = [
            {k: v for k, v in row.items() if k != "eval_sdpo/teacher_success_share" and "runtime" not in k
             and "per_second" not in k and "step_time" not in k and "/time/" not in k}
            for row in trainer.state.log_history
        ]  # fmt: skip
        runs.append((tiny.trained(trainer.model), logs))
        asked_for = [row for row in trainer.state.log_history if "eval_sdpo/teacher_success_share" in row]
        assert len(asked_for) == (3 if asked else 0)
    tiny.assert_equal(runs[0][0], runs[1][0])
    for first, second in zip(runs[0][1], runs[1][1], strict=True):
        assert first == pytest.approx(second, nan_ok=True)


def test_there_is_nothing_to_report_where_no_prompt_has_feedback(tmp_path):
    trainer = make(tmp_path, answers=None, reward=tiny.never)
    assert "eval_sdpo/teacher_success_share" not in trainer.evaluate(tiny.prompts(2))


# One answer per prompt, stale


def test_single_stale_rollouts_are_kept_within_both_bounds(tmp_path):
    trainer = make(
        tmp_path, answers=None, reward=tiny.telling(), num_generations=1, num_iterations=4, max_steps=4,
        data=tiny.prompts(8), learning_rate=5e-2, distillation_is_clip=1.2, distillation_is_clip_low=0.8,
        distillation_log_ratio_clip_running=3.0,
    )  # fmt: skip
    trainer.train()
    logs = tiny.training_logs(trainer)
    assert logs[0]["sdpo/ratio_clipped_share"] == 0.0 and logs[-1]["sdpo/ratio_clipped_share"] > 0.0
    assert all(row["sdpo/distilled_share"] == 1.0 for row in logs)


def test_a_stale_token_counts_at_least_the_lower_bound(tmp_path):
    options = {"distillation_is_clip": None, "num_iterations": 2}
    inputs = batch(make(tmp_path, **options))
    stale = {**inputs, "old_per_token_logps": inputs["old_per_token_logps"] + 2.0}  # each ratio is exp(-2)
    low, floored = (make(tmp_path, distillation_is_clip_low=bound, **options) for bound in (None, 0.5))
    (loss, grad), (kept, kept_grad) = (tiny.gradient(trainer, stale) for trainer in (low, floored))
    assert kept == pytest.approx(0.5 * math.exp(2) * loss, rel=1e-4)
    tiny.assert_near(kept_grad, {name: 0.5 * math.exp(2) * g for name, g in grad.items()})


def test_a_hopelessly_stale_token_outside_the_policy_term_breaks_nothing(tmp_path):
    for options in (
        {"distillation_routing": "failed", "distillation_weight": 0.5},
        {"distillation_weight_schedule": "linear"},  # the policy term has weight 0 at the first step
    ):
        trainer = make(tmp_path, num_iterations=2, **options)
        inputs = batch(trainer)
        trainer.state.max_steps = 4
        old = inputs["old_per_token_logps"].clone()
        outside = ~inputs["in_policy_term"] if "in_policy_term" in inputs else torch.ones(8, dtype=torch.bool)
        old[outside] = -120.0
        value, grad = tiny.gradient(trainer, {**inputs, "old_per_token_logps": old})
        assert math.isfinite(value) and all(g.isfinite().all() for g in grad.values())


def test_equal_rewards_are_no_positive_advantage(tmp_path):
    trainer = make(
        tmp_path, reward=lambda completions, **kwargs: [0.3] * len(completions), num_generations=8,
        distillation_routing="positive_advantage", success_reward_threshold=0.0,
    )  # fmt: skip
    inputs = batch(trainer)
    assert inputs["advantages"].max() > 0  # the rounding of their mean
    assert not inputs["feedback_available"].any()


def test_what_difficulty_leaves_out_goes_to_the_policy_term(tmp_path):
    def partial(completions, log_extra, **kwargs):
        log_extra("feedback", ["no"] * len(completions))
        return [0.1 * len(text) for text in completions]

    trainer = make(tmp_path, reward=partial, distillation_routing="failed", prompt_weighting="difficulty",
                   distillation_weight=0.5)  # fmt: skip
    inputs = batch(trainer)
    assert not inputs["feedback_available"].any() and inputs["in_policy_term"].all()
    _, grad = tiny.gradient(trainer, inputs)
    assert any(g.abs().max() > 0 for g in grad.values())


def test_a_masked_answer_does_not_weaken_the_policy_term(tmp_path):
    """TRL divides by all rows; the term is over its own rows that have tokens."""
    options = {"distillation_routing": "failed", "distillation_weight": 0.5, "loss_type": "grpo",
               "mask_truncated_completions": True, "reward": graded}  # fmt: skip
    answers = ["ok$", "no$", "okk$", "badbadbad", "ab$", "c$", "dd$", "xxxxxxxxx"]
    trainer = make(tmp_path, answers=answers, **options)
    inputs = batch(trainer)
    assert int(inputs["policy_rows"]) == 2 and int(inputs["all_rows"]) == 8


@pytest.mark.parametrize("name", ["teacher_entropy", "position", "gap_gate"])
def test_token_weights_do_not_depend_on_how_the_batch_is_split(tmp_path, name):
    grads = []
    for size, accumulation in ((8, 1), (4, 2), (2, 4)):
        seen = tiny.FirstGradient()
        trainer = make(
            tmp_path, token_weighting=name, token_weighting_beta=2.0, per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation, generation_batch_size=8, max_steps=1, max_grad_norm=0.0,
            trainer_callbacks=[seen], data=tiny.prompts(2), shuffle_dataset=False,
            answers=[ANSWERS[i] for i in range(8)],
        )  # fmt: skip
        trainer.train()
        grads.append(seen.value)
    tiny.assert_near(grads[1], grads[0], rtol=1e-4)
    tiny.assert_near(grads[2], grads[0], rtol=1e-4)


@pytest.mark.parametrize("kind", ["ema", "trust_region"])
def test_weights_by_the_teachers_entropy_have_mean_one(tmp_path, kind):
    """With the rows where the teacher rests; in the loop where it does not."""
    trainer = make(tmp_path, token_weighting="teacher_entropy", token_weighting_beta=1.5, teacher_model_kind=kind)
    inputs = batch(trainer)
    active = tiny.scored(inputs)
    head = tiny.teacher_head(trainer, inputs)
    log_probs = head.logits(head.vocab_size).double().log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    expected = torch.exp(-1.5 * entropy)
    expected /= expected.mean()
    assert ("token_weight" in inputs) == (kind == "ema")
    if kind == "ema":
        torch.testing.assert_close(inputs["token_weight"][active].double(), expected, rtol=1e-4, atol=1e-5)
        assert not inputs["token_weight"][~active].any()
        trainer._teacher.version += 1  # the teacher has moved: the loop weighs by what it scores
    loss, _ = tiny.gradient(trainer, inputs)
    plain = make(tmp_path, teacher_model_kind=kind)
    weighted = {
        **inputs,
        "importance_sampling_ratio": torch.zeros(active.shape).masked_scatter(active, expected.float()),
    }
    weighted.pop("token_weight", None)
    assert loss == pytest.approx(tiny.gradient(plain, weighted)[0], rel=1e-4)


# The buffer's questions


def test_an_evaluation_neither_feeds_the_buffer_nor_needs_its_column(tmp_path):
    trainer = make(tmp_path, reward=tiny.always, success_buffer_size=2, success_buffer_key="id",
                   data=tiny.prompts(4, id=["a", "b", "c", "d"]), max_steps=1)  # fmt: skip
    trainer.evaluate(tiny.prompts(2))
    trainer.evaluate(tiny.prompts(2, id=["a", "b"]))
    assert trainer._buffer.state()["answers"] == {}
    trainer.train()
    assert trainer._buffer.state()["answers"]


def test_a_question_without_a_name_of_its_own_is_refused(tmp_path):
    class Room:
        def reset(self, **kwargs):
            return "You see a door."

        def open(self) -> str:
            """Opens the door."""
            return "open"

    with pytest.raises(ValueError, match=r"`success_buffer_key='id'` is not a column of the training set.*prompt"):
        make(tmp_path, success_buffer_size=2, success_buffer_key="id")
    with pytest.raises(ValueError, match="lacks its environment's observation"):
        make(tmp_path, answers=None, success_buffer_size=2, trainer_environment_factory=Room,
             data=tiny.prompts(chat=True), trainer_processing_class=tiny.tool_tokenizer())  # fmt: skip
    with pytest.raises(ValueError, match="lacks its images"):
        make(tmp_path, success_buffer_size=2, data=tiny.prompts(4, image=["a", "b", "c", "d"]))


def test_gates_that_compare_answers_are_open_where_there_is_one(tmp_path):
    for options in ({"distillation_routing": "positive_advantage"}, {"prompt_weighting": "difficulty"}):
        trainer = make(tmp_path, answers=None, reward=tiny.telling(), num_generations_eval=1, **options)
        assert trainer.evaluate(tiny.prompts(2))["eval_sdpo/distilled_share"] == 1.0


def test_a_reward_that_draws_numbers_does_not_disturb_training(tmp_path):
    import random

    import numpy

    def drawing(completions, log_extra, **kwargs):
        log_extra("feedback", ["longer"] * len(completions))
        return [random.random() + numpy.random.rand() for _ in completions]

    runs = []
    for asked in (True, False):
        random.seed(0)
        trainer = make(tmp_path, answers=None, reward=drawing, evaluate_teacher=asked, eval_strategy="steps",
                       eval_steps=1, trainer_eval_dataset=tiny.prompts(2), max_steps=2,
                       distillation_weight=0.5)  # fmt: skip
        trainer.train()
        runs.append(tiny.trained(trainer.model))
    tiny.assert_equal(*runs)
