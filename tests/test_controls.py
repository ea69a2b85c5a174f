"""Each control alone, in float64, against numbers worked out by hand; and the pairs that contradict."""

import json
import math

import pytest
import tiny
import torch

from sdpo_trl.divergence import (
    DivergenceSpec,
    bounded_teacher,
    confidence_weight,
    importance_ratio,
    token_divergence,
    weight_scale,
)
from sdpo_trl.health import BatchHealth, HealthMonitor
from sdpo_trl.loss import (
    WeightPlan,
    difficulty_weights,
    magnitude_factor,
    policy_factor,
    position_weights,
)
from sdpo_trl.metrics import TOKEN_METRICS, token_sums
from sdpo_trl.rollouts import _select_in_order, demonstration_order, differing_groups
from sdpo_trl.run_state import RunningMean, SnapshotGate, SuccessBuffer, question_key
from sdpo_trl.scores import TokenScores

STUDENT = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
TEACHER = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
LOG_RATIOS = [math.log(7), 0.0, -math.log(7)]  # log p_S - log p_T
IDS = torch.tensor([0])


def gradient(spec, student=STUDENT, teacher=TEACHER, ids=IDS):
    """Value and gradient with respect to the student's logits."""
    logits = student.log().clone()[None].requires_grad_()
    value = token_divergence(logits.log_softmax(-1), teacher.log()[None], ids, spec)
    (grad,) = torch.autograd.grad(value.sum(), logits)
    return value.item(), grad[0].tolist()


# Bounds of the log-ratio


def test_the_clip_bounds_each_items_log_ratio_and_nothing_else():
    spec = DivergenceSpec("full_logits", 1.0, log_ratio_clip=1.5)
    value, grad = gradient(spec)
    clipped = [1.5, 0.0, -1.5]
    mean = 0.7 * 1.5 + 0.1 * -1.5
    assert grad == pytest.approx([p * (r - mean) for p, r in zip([0.7, 0.2, 0.1], clipped, strict=True)], rel=1e-12)
    held = [p * math.exp(-r) for p, r in zip([0.7, 0.2, 0.1], clipped, strict=True)]  # the teacher's measure
    expected = sum(p * r - p + q for p, r, q in zip([0.7, 0.2, 0.1], clipped, held, strict=True))
    assert value == pytest.approx(expected, rel=1e-12) and value > 0
    # A wide clip is none.
    wide, none = (gradient(DivergenceSpec("full_logits", 1.0, log_ratio_clip=clip)) for clip in (2.0, None))
    assert wide[0] == pytest.approx(none[0]) and wide[1] == pytest.approx(none[1])


def test_the_clip_in_forward_and_mixed_divergences():
    held = [0.7 * math.exp(-1.5), 0.2, 0.1 * math.exp(1.5)]
    _, grad = gradient(DivergenceSpec("full_logits", 0.0, log_ratio_clip=1.5))
    assert grad == pytest.approx([p * sum(held) - q for p, q in zip(STUDENT.tolist(), held, strict=True)], rel=1e-12)
    _, grad = gradient(DivergenceSpec("full_logits", 0.25, log_ratio_clip=1.5))
    ratios = [math.log(p / (0.75 * p + 0.25 * q)) for p, q in zip(STUDENT.tolist(), held, strict=True)]
    mean = sum(p * r for p, r in zip(STUDENT.tolist(), ratios, strict=True))
    expected = [0.75 * p * (r - mean) for p, r in zip(STUDENT.tolist(), ratios, strict=True)]
    assert grad == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_a_clipped_divergence_is_never_negative_and_pulls_the_same_way(alpha):
    generator = torch.Generator().manual_seed(0)
    for clip in (0.01, 0.5, 3.0):
        student, teacher = (torch.randn(50, 9, generator=generator, dtype=torch.float64).log_softmax(-1) * 1.0
                            for _ in range(2))  # fmt: skip
        spec = DivergenceSpec("full_logits", alpha, log_ratio_clip=clip)
        values = token_divergence(student, teacher, torch.zeros(50, dtype=torch.long), spec)
        assert (values > 0).all()
        same = token_divergence(student, student, torch.zeros(50, dtype=torch.long), spec)
        assert same.abs().max() < 1e-12
    # One step raises what the teacher prefers, also where one item is far off (a clip of summands would invert that).
    peaked = torch.tensor([0.9, 0.1], dtype=torch.float64), torch.tensor([0.9999, 0.0001], dtype=torch.float64)
    _, grad = gradient(DivergenceSpec("full_logits", alpha, log_ratio_clip=0.5), *peaked)
    assert grad[0] < 0 < grad[1]


def test_the_clip_of_the_sampled_token():
    value, grad = gradient(DivergenceSpec("sampled_token", 1.0, log_ratio_clip=1.5))
    assert value == pytest.approx(1.5 * math.log(0.7))
    assert grad == pytest.approx([1.5 * 0.3, 1.5 * -0.2, 1.5 * -0.1])


def test_the_clip_over_the_support_and_its_tail():
    spec = DivergenceSpec("topk_logits", 1.0, topk=1, log_ratio_clip=1.0)  # support {0}, tail {1, 2}
    _, grad = gradient(spec)
    ratios = [1.0, max(math.log(0.3 / 0.9), -1.0)]
    mean = 0.7 * ratios[0] + 0.3 * ratios[1]
    tail = 0.3 * (ratios[1] - mean)
    expected = [0.7 * (ratios[0] - mean), tail * 0.2 / 0.3, tail * 0.1 / 0.3]
    assert grad == pytest.approx(expected, rel=1e-9)


def test_a_proximal_teacher_is_a_mixture_with_a_bounded_log_ratio():
    spec = DivergenceSpec("full_logits", 1.0, teacher_share=0.8)
    mixed = [0.8 * q + 0.2 * p for p, q in zip(STUDENT.tolist(), TEACHER.tolist(), strict=True)]
    held = bounded_teacher(STUDENT.log(), TEACHER.log(), spec)
    assert held.exp().tolist() == pytest.approx(mixed) and held.exp().sum().item() == pytest.approx(1.0)
    impossible = torch.tensor([-1e30, 0.0], dtype=torch.float64)
    own = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    assert (bounded_teacher(own, impossible, spec) - own).min().item() == pytest.approx(math.log(0.2))
    value, grad = gradient(spec)
    ratios = [math.log(p / q) for p, q in zip(STUDENT.tolist(), mixed, strict=True)]
    assert value == pytest.approx(sum(p * r for p, r in zip(STUDENT.tolist(), ratios, strict=True)))
    assert grad == pytest.approx([p * (r - value) for p, r in zip(STUDENT.tolist(), ratios, strict=True)])


def test_the_student_gets_no_gradient_through_its_part_of_the_teacher():
    spec = DivergenceSpec("full_logits", 1.0, teacher_share=0.3, log_ratio_clip=0.1)
    own = STUDENT.log().requires_grad_()
    assert not bounded_teacher(own, TEACHER.log(), spec).requires_grad


def test_the_ratio_is_kept_between_two_bounds():
    now = torch.tensor([0.0, 1.0, -1.0, -3.0], dtype=torch.float64)
    ratio, cut = importance_ratio(now, torch.zeros(4, dtype=torch.float64), 2.0, 0.2)
    assert ratio.tolist() == pytest.approx([1.0, 2.0, math.exp(-1), 0.2])
    assert cut.tolist() == [False, True, False, True]


def test_the_clipped_share_counts_what_the_bound_cuts_on_both_sides():
    gaps = torch.tensor([0.5, 1.5, -1.5, -9.9], dtype=torch.float64)
    own = torch.full((4,), -12.0, dtype=torch.float64)
    nothing = torch.zeros(4, dtype=torch.float64)
    scores = TokenScores(nothing.sum(), own, nothing, nothing, own + gaps, nothing, nothing.bool(), nothing + 1)

    def share(**options):
        sums = token_sums(scores, DivergenceSpec("sampled_token", 1.0, **options)).tolist()
        return dict(zip(TOKEN_METRICS, sums, strict=False))["log_ratio_clipped_share"] / 4

    assert share() == 0.0 and share(log_ratio_clip=1.0) == 0.75 and share(log_ratio_clip=20.0) == 0.0
    # Half a proximal teacher is never more than log 2 below the student, so only what lies above is cut.
    assert share(log_ratio_clip=0.7, teacher_share=0.5) == 0.25


# Weights


def test_weights_by_confidence():
    gap, entropy = torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor([0.5, 1.5], dtype=torch.float64)
    weights = confidence_weight("teacher_entropy", 2.0, gap, entropy)
    assert weights.tolist() == pytest.approx([math.exp(-1), math.exp(-3)])
    assert (weights * weight_scale("teacher_entropy", weights)).mean().item() == pytest.approx(1.0)
    gates = confidence_weight("gap_gate", 0.5, gap, entropy)
    assert gates.tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-1))])
    assert weight_scale("gap_gate", gates) == 1.0
    assert weight_scale("teacher_entropy", weights[:0]) == 1.0


def test_weights_by_position():
    active = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]], dtype=torch.bool)
    weights = position_weights(active, 3.0)
    raw = [math.exp(-3.0 * i / 3) for i in range(3)]
    first = [3 * w / sum(raw) for w in raw]
    assert weights[0].tolist() == pytest.approx([first[0], 0.0, first[1], first[2], 0.0])
    assert weights[1].tolist() == [0.0] * 5 and weights[2].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert torch.equal(position_weights(active, 0.0), active.float())


def test_weights_by_difficulty():
    success = torch.tensor([1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    available = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], dtype=torch.bool)
    weights = difficulty_weights(success, available, 4)
    first, second = math.sqrt(3) / 4, 0.5
    mean = (3 * first + 4 * second) / 7
    assert weights.tolist() == pytest.approx([0.0, *[first / mean] * 3, *[second / mean] * 4, *[0.0] * 4])
    assert weights[available & (weights > 0)].mean().item() == pytest.approx(1.0)
    assert difficulty_weights(success[8:], available[8:], 4).tolist() == [0.0] * 4


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo", "bnpo"])
def test_the_policy_term_is_normalised_over_its_own_rows(loss_type):
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    rows = torch.tensor([True, False, True, False])
    values = torch.arange(16, dtype=torch.float64).view(4, 4)

    def theirs(values, mask):  # as TRL aggregates one whole batch
        if loss_type in ("grpo", "sapo"):
            return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
        if loss_type == "dr_grpo":
            return (values * mask).sum() / (len(values) * 4)
        if loss_type == "luspo":
            return (values * mask).sum(-1).mean()
        return (values * mask).sum() / mask.sum()

    cut = torch.tensor([True, True, False, True])[:, None] & mask  # as `mask_truncated_completions` leaves a row
    for part in (mask, cut):
        own = rows & part.any(dim=1)
        counts = torch.tensor([part[own].sum(), own.sum(), part.sum(), 4])
        factor = policy_factor(rows, part, loss_type, counts).double()
        expected = theirs(values[own], part[own]).item()
        assert theirs(values * factor[:, None], part).item() == pytest.approx(expected)
    nothing = policy_factor(torch.zeros(4, dtype=torch.bool), mask, loss_type, torch.tensor([0, 0, 10, 4]))
    assert nothing.tolist() == [0.0] * 4


def test_the_size_of_an_advantage():
    advantages = torch.tensor([[2.0], [-2.0]], dtype=torch.float64)
    gap = torch.tensor([[0.1, 3.0, -3.0], [0.1, 3.0, -3.0]], dtype=torch.float64)
    factor = magnitude_factor(advantages, gap, 1.0, 0.2)
    assert factor[0].tolist() == pytest.approx([math.exp(0.1), 1.2, 0.8])
    assert factor[1].tolist() == pytest.approx([math.exp(-0.1), 0.8, 1.2])
    assert ((advantages * factor).sign() == advantages.sign()).all()
    half = magnitude_factor(advantages, gap, 0.5, 0.2)
    assert half[0].tolist() == pytest.approx([(1 + math.exp(0.1)) / 2, 1.1, 0.9])
    assert (magnitude_factor(advantages, gap, 0.0, 0.2) == 1).all()


# Schedules


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (WeightPlan(0.8, "constant", 0.0, 0, None), [0.8] * 6),
        (WeightPlan(0.8, "constant", 0.0, 2, None), [0.0, 0.4, 0.8, 0.8, 0.8, 0.8]),
        (WeightPlan(0.8, "linear", 0.3, 0, 5), [0.8, 0.7, 0.6, 0.5, 0.4, 0.3]),
        (WeightPlan(0.8, "linear", 0.0, 1, 2), [0.0, 0.8, 0.4, 0.0, 0.0, 0.0]),
        (WeightPlan(1.0, "linear", 0.0, 0, None), [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]),
        (WeightPlan(1.0, "cosine", 0.0, 0, 4), [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(5)] + [0.0]),
    ],
    ids=str,
)
def test_the_weights_schedule(plan, expected):
    assert [plan.at(step, 10) for step in range(6)] == pytest.approx(expected)


# What a run remembers


def again(thing, *args):
    """The same thing after a checkpoint: plain data, through JSON."""
    other = type(thing)(*args)
    other.restore(json.loads(json.dumps(thing.state())))
    return other


def test_the_running_mean_moves_at_steps_alone():
    mean = RunningMean(0.5)
    mean.add(6.0, 2.0)
    mean.add(0.0, 1.0)
    assert mean.value is None
    mean.step_finished()
    assert mean.value == 2.0
    mean.add(4.0, 1.0)
    mean.step_finished()
    mean.step_finished()  # a step that scored nothing
    mean.add(math.inf, 1.0)
    mean.step_finished()  # a step that broke
    assert mean.value == 3.0 and again(mean, 0.5).value == 3.0


def test_the_gate_opens_when_success_rose_and_truncation_did_not():
    gate = SnapshotGate()
    assert not gate.opens()
    gate.observe(0.2, 0.1)
    assert not gate.opens()  # no better than the run's first batch
    gate.observe(0.3, 0.0)
    gate.observe(0.5, 0.1)
    gate = again(gate)
    assert gate.opens()  # 0.4 after 0.2, 0.05 after 0.1
    gate.observe(0.45, 0.06)
    assert not gate.opens()  # more answers are cut
    gate.observe(0.45, 0.05)
    assert gate.opens()
    gate.observe(0.45, 0.0)
    assert not gate.opens()  # success must rise


def test_the_buffer_keeps_the_latest_successes_of_each_question():
    buffer = SuccessBuffer(2, 2, 10, "first", 0)
    buffer.add(["a", "b", "a", "a"], ["one", None, "two", "three"], step=1)
    assert buffer.offer("a", 1) == "three" and buffer.offer("b", 1) is None
    buffer.add(["a"], ["two"], step=5)  # again: now the latest
    assert buffer.offer("a", 5) == "two"
    buffer = again(buffer, 2, 2, 10, "first", 0)
    assert buffer.state()["answers"] == {"a": [(1, "three"), (5, "two")]}
    assert buffer.offer("a", 15) == "two" and buffer.offer("a", 16) is None  # too old
    assert again(buffer, 2, 2, 10, "shortest", 0).offer("a", 11) == "two"
    buffer.add(["c", "d"], ["c", "d"], step=6)
    assert [buffer.offer(key, 6) for key in "acd"] == [None, "c", "d"]  # "a" was answered longest ago
    drawn = {again(buffer, 2, 9, None, "random", seed).offer("c", 6) for seed in range(5)}
    assert drawn == {"c"}
    many = SuccessBuffer(5, 5, None, "random", 3)
    many.add(["q"] * 5, list("abcde"), 0)
    draws = [many.offer("q", step) for step in range(40)]
    assert draws == [again(many, 5, 5, None, "random", 3).offer("q", step) for step in range(40)]
    assert len(set(draws)) == 5


def test_what_names_a_question():
    prompt = [{"role": "user", "content": "x"}]
    assert question_key({"prompt": prompt}, prompt, None) == question_key({}, [dict(prompt[0])], None)
    assert question_key({"id": 7}, prompt, "id") == "7"
    with pytest.raises(ValueError, match=r"`success_buffer_key='id'`: a row has no such value.*'prompt'"):
        question_key({"prompt": prompt}, prompt, "id")
    image = [{"role": "user", "content": [{"type": "image", "image": object()}]}]
    with pytest.raises(ValueError, match="Name its question by a dataset column"):
        question_key({}, image, None)


# Which demonstration


def test_groups_whose_rewards_are_equal_up_to_rounding():
    rewards = torch.tensor([[0.3], [0.1 + 0.2], [0.3], [0.3001], [0.0], [0.0]], dtype=torch.float64)
    assert differing_groups(rewards, 2).tolist() == [False, False, True, True, False, False]
    assert differing_groups(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 2).tolist() == [True, True]  # equal sums
    assert differing_groups(torch.tensor([[torch.nan], [torch.nan]]), 2).tolist() == [False, False]


def test_the_order_of_demonstrations():
    texts = ["long one", None, "b", "ab", "c"]
    questions = torch.zeros(5, dtype=torch.long)
    success = torch.tensor([True, False, True, True, True])
    rich = torch.zeros(5, dtype=torch.bool)

    def chosen(choice, exclude_self, seed=0):
        order = demonstration_order(choice, texts, seed)
        index, available = _select_in_order(order, questions, success, rich, exclude_self)
        assert available.all()
        return index.tolist()

    assert chosen("first", True) == [2, 0, 0, 0, 0]
    assert chosen("shortest", True) == [2, 2, 4, 2, 2]
    assert chosen("shortest", False) == [0, 2, 2, 3, 4]
    draws = [chosen("random", True, seed) for seed in range(30)]
    assert draws == [chosen("random", True, seed) for seed in range(30)]
    assert {draw[1] for draw in draws} == {0, 2, 3, 4}
    for draw in draws:
        assert all(index != row for row, index in enumerate(draw)) and 1 not in draw
    # Another question's success is never shown.
    index, available = _select_in_order(
        torch.tensor([3, 2, 1, 0]), torch.tensor([0, 0, 1, 1]), torch.tensor([True, False, False, False]),
        torch.tensor([False, False, False, True]), True,
    )  # fmt: skip
    assert index.tolist() == [-1, 0, -1, -1] and available.tolist() == [False, True, False, True]


# Health


def healthy(**changes):
    values = {"success_share": 0.4, "hinted_share": 0.5, "distilled_share": 0.5, "truncated_share": 0.0,
              "length": 10.0, "divergence": 0.2, "entropy": 1.0}  # fmt: skip
    return BatchHealth(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"success_share": 0.0, "hinted_share": 0.0, "distilled_share": 0.0}, "no rollout succeeded or had feedback"),
        ({"distilled_share": 0.0}, "no rollout was distilled and there is no policy term"),
        ({"truncated_share": 0.96}, "nearly all answers were cut"),
        ({"divergence": 0.0}, "exactly as the student does"),
        ({"divergence": 2.0}, "drifting apart"),
        ({"entropy": 0.1}, "becoming all alike"),
        ({"length": 3.0}, "half as long"),
    ],
    ids=str,
)
def test_a_warning_comes_once_and_then_every_so_often(changes, words):
    monitor = HealthMonitor(3, 1e-8)
    assert not any(monitor.observe(healthy()) for _ in range(9))
    warned = [[words in message for message in monitor.observe(healthy(**changes))] for _ in range(2)]
    monitor = again(monitor, 3, 1e-8)  # a resumed run knows what was usual, and how long it has gone on
    warned += [[words in message for message in monitor.observe(healthy(**changes))] for _ in range(1)]
    assert warned == [[], [], [True]]
    assert monitor.observe(healthy()) == []
    monitor = HealthMonitor(0, 1e-8)
    assert not any(monitor.observe(healthy(**changes)) for _ in range(9))


def test_what_lasts_is_said_again_and_again():
    monitor = HealthMonitor(3, 1e-8)
    lasting = [bool(monitor.observe(healthy(truncated_share=1.0))) for _ in range(9)]
    assert lasting == [False, False, True] * 3


def test_a_policy_term_makes_idle_rollouts_harmless():
    idle = healthy(success_share=1.0, hinted_share=0.0, distilled_share=0.0, divergence=None, entropy=None)
    assert HealthMonitor(1, 1e-8, has_policy_term=True).observe(idle) == []
    assert "no rollout was distilled" in HealthMonitor(1, 1e-8).observe(idle)[0]


def test_a_slow_collapse_of_the_entropy_is_seen_and_a_success_is_none():
    def warned(success):
        monitor = HealthMonitor(10, 1e-8)
        said = [monitor.observe(healthy(entropy=0.99**i, success_share=success)) for i in range(600)]
        return sum("all alike" in message for messages in said for message in messages)

    assert warned(0.2) > 0 and warned(0.9) == 0


def test_answers_that_settled_at_a_shorter_length_are_not_complained_about_for_ever():
    monitor = HealthMonitor(10, 1e-8)
    said = [monitor.observe(healthy(length=10.0 if i < 30 else 4.5)) for i in range(400)]
    assert sum(len(messages) for messages in said) == 1


def test_a_dead_gradient_and_a_falling_teacher():
    monitor = HealthMonitor(2, 1e-8)
    assert monitor.observe_gradient(0.0, 0.3) == [] and "frozen layers" in monitor.observe_gradient(0.0, 0.3)[0]
    assert monitor.observe_gradient(0.0, 0.0) == [] and monitor.observe_gradient(1.0, 0.3) == []
    assert monitor.observe_teacher(0.6) == [] and monitor.observe_teacher(0.9) == []
    assert monitor.observe_teacher(0.8) == []
    assert monitor.observe_teacher(0.3, "eval_other_runtime") == []  # another set has its own best
    (message,) = monitor.observe_teacher(0.5)
    assert monitor.observe_teacher(0.5) == [] and len(monitor.observe_teacher(0.5)) == 1  # every second one
    assert "50%" in message and "90%" in message and "teacher_model_kind='base'" in message


# Contradictions

MAGNITUDE = {"distillation_signal": "advantage_magnitude"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distillation_routing": "good"}, "must be one of all, failed, positive_advantage"),
        ({"distillation_weight_end": 2.0}, r"`distillation_weight_end` must be in \[0, 1\]"),
        ({"distillation_weight_schedule": "step"}, "must be one of constant, linear, cosine"),
        ({"distillation_weight_end": 0.5}, "no effect.*schedule"),
        ({"distillation_weight_decay_steps": 5}, "no effect.*schedule"),
        ({"distillation_weight_decay_steps": 0, "distillation_weight_schedule": "linear"}, "at least 1, got 0"),
        ({"distillation_weight_warmup_steps": -1}, "at least 0, got -1"),
        ({"distillation_weight_warmup_steps": 2, "distillation_weight": 0.0}, "no effect.*above 0"),
        ({"distillation_weight_schedule": "linear", "distillation_weight": 0.0}, "no effect.*above 0"),
        ({"distillation_log_ratio_clip": 0.0}, "must be positive, got 0.0"),
        ({"distillation_log_ratio_clip": True}, "must be positive, got True"),
        ({"distillation_log_ratio_clip_running": -1.0}, "must be positive"),
        ({"distillation_is_clip_low": -0.1}, r"must be in \[0, 1\]"),
        ({"distillation_is_clip_low": 1.5, "distillation_is_clip": None}, r"must be in \[0, 1\]"),
        ({"distillation_is_clip_low": 0.9, "distillation_is_clip": 0.9}, "must be below `distillation_is_clip=0.9`"),
        ({"distillation_weight_schedule": "linear", "distillation_weight_end": 1.0}, "goes nowhere"),
        ({"token_weighting": "teacher_entropy", "token_weighting_beta": 8.0}, "too much for 'teacher_entropy'"),
        ({"num_generations": 1, "demonstration_choice": "random"}, "`num_generations=1` has one"),
        ({"distillation_mode": "topk_logits", "distillation_topk": 5, **MAGNITUDE}, "distillation_signal='loss'"),
        ({"token_weighting": "entropy"}, "must be one of none, teacher_entropy, position, gap_gate"),
        ({"token_weighting_beta": 2.0}, "no effect.*token_weighting"),
        ({"token_weighting_beta": -1.0, "token_weighting": "position"}, "must not be negative"),
        ({"distillation_gain_max": 3.0}, "no effect.*distillation_gain_target"),
        ({"distillation_gain_max": 0.5, "distillation_gain_target": 1.0}, "at least 1, got 0.5"),
        ({"advantage_magnitude_clip": 0.1}, "no effect.*advantage_magnitude"),
        ({"advantage_magnitude_clip": 1.0, **MAGNITUDE}, r"must be in \(0, 1\)"),
        *(
            ({name: value, **MAGNITUDE}, f"`{name}=.*no effect.*distillation_signal='loss'")
            for name, value in {
                "distillation_routing": "failed", "prompt_weighting": "difficulty", "token_weighting": "position",
                "distillation_log_ratio_clip": 5.0, "distillation_log_ratio_clip_running": 3.0,
                "distillation_is_clip": 3.0, "distillation_is_clip_low": 0.5, "teacher_proximal_share": 0.5,
            }.items()
        ),
        ({"distillation_gain_target": 1.0, **MAGNITUDE}, "distillation_signal='loss'"),
        ({"teacher_proximal_share": 0.0}, r"must be in \(0, 1\]"),
        ({"teacher_snapshot_gate": True}, "no effect.*snapshot"),
        ({"demonstration_choice": "best"}, "must be one of first, shortest, random"),
        ({"demonstration_choice": "random", "use_successful_as_teacher": False}, "use_successful_as_teacher=True"),
        ({"success_buffer_size": 2, "use_successful_as_teacher": False}, "use_successful_as_teacher=True"),
        ({"success_buffer_size": -1}, "at least 0, got -1"),
        ({"success_buffer_max_age": 5}, "no effect.*success_buffer_size"),
        ({"success_buffer_key": "id"}, "no effect.*success_buffer_size"),
        ({"success_buffer_questions": 5}, "no effect.*success_buffer_size"),
        ({"num_generations": 1, "distillation_routing": "positive_advantage"}, "`num_generations=1` has one"),
        ({"num_generations": 1, "prompt_weighting": "difficulty"}, "`num_generations=1` has one"),
        ({"num_generations": 1, **MAGNITUDE}, "at least 2 generations"),
        ({"num_generations": 1, "distillation_weight_schedule": "linear"}, "at least 2 generations"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_contradictions_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        tiny.config(tmp_path, **options)


def test_what_goes_together(tmp_path):
    tiny.config(
        tmp_path, distillation_weight=0.7, distillation_routing="failed", distillation_weight_schedule="cosine",
        distillation_weight_warmup_steps=3, distillation_log_ratio_clip=5.0, distillation_log_ratio_clip_running=3.0,
        distillation_is_clip_low=0.1, token_weighting="teacher_entropy", prompt_weighting="difficulty",
        teacher_proximal_share=0.9, teacher_model_kind="snapshot", teacher_sync_steps=5, teacher_snapshot_gate=True,
        success_buffer_size=2, demonstration_choice="shortest", epsilon=0.1,
    )  # fmt: skip
    tiny.config(tmp_path, num_generations=1, num_iterations=3, distillation_log_ratio_clip_running=3.0)
