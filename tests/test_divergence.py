"""The formulas against sums written out in Python, one item at a time."""

import math

import numpy as np
import pytest
import torch

from sdpo_trl import feedback_reverse_kl
from sdpo_trl.divergence import DivergenceSpec, divergence, importance_ratio, safe_log_softmax, token_divergence

ALPHAS = [0.0, 0.3, 0.5, 1.0]
SPECS = {
    "forward": DivergenceSpec("full_logits", 0.0),
    "skewed": DivergenceSpec("full_logits", 0.3),
    "middle": DivergenceSpec("full_logits", 0.5),
    "reverse": DivergenceSpec("full_logits", 1.0),
    "forward_tail": DivergenceSpec("topk_logits", 0.0, 3, True),
    "middle_tail": DivergenceSpec("topk_logits", 0.5, 3, True),
    "reverse_tail": DivergenceSpec("topk_logits", 1.0, 3, True),
    "forward_renormalised": DivergenceSpec("topk_logits", 0.0, 3, False),
    "middle_renormalised": DivergenceSpec("topk_logits", 0.5, 3, False),
    "reverse_renormalised": DivergenceSpec("topk_logits", 1.0, 3, False),
    "sampled": DivergenceSpec("sampled_token", 1.0),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
exact_specs = pytest.mark.parametrize("spec", [SPECS[n] for n in SPECS if n != "sampled"], ids=list(SPECS)[:-1])


def probabilities(logits):
    """Softmax of a list of floats, in Python."""
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / math.fsum(weights) for w in weights]


def slow_kl(p, q):
    return math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


def slow_divergence(s, t, alpha):
    if alpha == 0:
        return slow_kl(t, s)
    if alpha == 1:
        return slow_kl(s, t)
    middle = [(1 - alpha) * a + alpha * b for a, b in zip(s, t, strict=True)]
    return (1 - alpha) * slow_kl(s, middle) + alpha * slow_kl(t, middle)


def slow_value(student_logits, teacher_logits, token, spec):
    """One token's value, from two lists of logits."""
    s, t = probabilities(student_logits), probabilities(teacher_logits)
    if spec.mode == "sampled_token":
        return (math.log(s[token]) - math.log(t[token])) * math.log(s[token])
    if spec.mode == "topk_logits":
        kept = sorted(range(len(s)), key=lambda v: -s[v])[: spec.topk]
        s, t = [s[v] for v in kept], [t[v] for v in kept]
        if spec.add_tail:
            s, t = [*s, 1 - math.fsum(s)], [*t, 1 - math.fsum(t)]
        else:
            s, t = [a / math.fsum(s) for a in s], [b / math.fsum(t) for b in t]
    return slow_divergence(s, t, spec.alpha)


def pair(n=5, vocab=7, scale=2.0, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (scale * torch.randn(2, n, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    return student, teacher, torch.randint(0, vocab, (n,), generator=generator)


def from_logits(student, teacher, tokens, spec, temperature=1.0):
    return token_divergence(
        safe_log_softmax(student / temperature), safe_log_softmax(teacher / temperature), tokens, spec
    )


@every_spec
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_equal_the_written_sums(spec, temperature):
    student, teacher, tokens = pair()
    expected = [
        slow_value(s, t, token, spec)
        for s, t, token in zip(
            (student / temperature).tolist(), (teacher / temperature).tolist(), tokens.tolist(), strict=True
        )
    ]
    values = from_logits(student, teacher, tokens, spec, temperature)
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-11, atol=1e-12)
    halved = from_logits(student.float(), teacher.float(), tokens, spec, temperature)
    assert halved.dtype == torch.float32
    np.testing.assert_allclose(halved.numpy(), expected, rtol=2e-5, atol=2e-6)


def test_a_divergence_that_can_be_done_by_hand():
    student, teacher = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.25, 0.75]]).double().log()
    forward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    reverse = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert divergence(student, teacher, 0.0).item() == pytest.approx(forward, abs=1e-14)
    assert divergence(student, teacher, 1.0).item() == pytest.approx(reverse, abs=1e-14)
    # The mixture leans to the teacher as alpha grows: (0.7 * 0.5 + 0.3 * 0.25, ...) = (0.425, 0.575).
    skewed = 0.7 * (0.5 * math.log(0.5 / 0.425) + 0.5 * math.log(0.5 / 0.575)) + 0.3 * (
        0.25 * math.log(0.25 / 0.425) + 0.75 * math.log(0.75 / 0.575)
    )
    assert divergence(student, teacher, 0.3).item() == pytest.approx(skewed, abs=1e-14)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("add_tail", [True, False])
@pytest.mark.parametrize("topk", [7, 8, 1000])
def test_topk_of_everything_is_full(alpha, add_tail, topk):
    student, teacher, tokens = pair()
    student.requires_grad_()
    results = []
    for spec in (DivergenceSpec("topk_logits", alpha, topk, add_tail), DivergenceSpec("full_logits", alpha)):
        values = from_logits(student, teacher, tokens, spec)
        results.append((values, *torch.autograd.grad(values.sum(), student)))
    for topped, full in zip(*results, strict=True):
        assert torch.equal(topped, full)


def test_topk_follows_the_student_not_the_teacher():
    student = torch.tensor([[3.0, 2.0, 0.0, 0.0]], dtype=torch.float64)
    teacher = torch.tensor([[0.0, 0.0, 2.0, 3.0]], dtype=torch.float64)
    spec = DivergenceSpec("topk_logits", 1.0, 2, False)
    expected = slow_kl(probabilities([3.0, 2.0]), [0.5, 0.5])
    assert from_logits(student, teacher, torch.tensor([0]), spec).item() == pytest.approx(expected, abs=1e-12)


@exact_specs
def test_topk_and_full_pull_the_same_items_apart_from_rounding_of_the_tail(spec):
    """Everything in the first k items: the tail holds nothing, and the value is that of those k alone."""
    student, teacher, tokens = pair(vocab=3)
    rest = torch.full((5, 4), -80.0, dtype=torch.float64)
    wide = from_logits(torch.cat([student, rest], 1), torch.cat([teacher, rest], 1), tokens, spec)
    narrow = from_logits(student, teacher, tokens, DivergenceSpec("full_logits", spec.alpha))
    torch.testing.assert_close(wide, narrow, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@every_spec
def test_zero_for_equal_distributions(spec, temperature):
    student, _, tokens = pair(dtype=torch.float32)
    student.requires_grad_()
    shifted = student.detach() + 2.0  # the same distribution, from other logits
    for teacher in (student.detach().clone(), shifted):
        values = from_logits(student, teacher, tokens, spec, temperature)
        (gradient,) = torch.autograd.grad(values.sum(), student)
        assert values.abs().max() < 2e-6
        assert gradient.abs().max() < 2e-6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@exact_specs
def test_positive_for_different_distributions(spec, temperature):
    student, teacher, tokens = pair()
    assert (from_logits(student, teacher, tokens, spec, temperature) > 1e-4).all()
    if spec.mode == "full_logits":  # one item out of seven, also where it is rare
        nudged = student.clone()
        nudged[:, 0] += 0.1
        assert (from_logits(student, nudged, tokens, spec, temperature) > 1e-10).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("vocab", [5, 1000, 30000])
@exact_specs
def test_never_negative(spec, vocab, noise, dtype):
    generator = torch.Generator().manual_seed(3)
    for scale in (0.1, 3.0, 10.0):
        student = (scale * torch.randn(16, vocab, generator=generator)).to(dtype)
        teacher = (student.float() + noise * torch.randn(16, vocab, generator=generator)).to(dtype)
        values = from_logits(student, teacher, torch.zeros(16, dtype=torch.long), spec)
        assert values.dtype == torch.float32
        assert values.min() >= -1e-6


@exact_specs
def test_half_precision_is_computed_in_float32(spec):
    student, teacher, tokens = pair(n=16, vocab=50, dtype=torch.bfloat16)
    exact = from_logits(student.double(), teacher.double(), tokens, spec)
    values = from_logits(student, teacher, tokens, spec)
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-6)


@exact_specs
def test_gradients_are_those_of_the_values(spec):
    student, teacher, tokens = pair(n=4, vocab=6)
    student.requires_grad_()
    assert torch.autograd.gradcheck(lambda s: from_logits(s, teacher, tokens, spec), (student,))


def test_gradient_of_the_sampled_token():
    """The value's weight is a constant: d/ds of `w log p_S(token)`, with `w = log p_S - log p_T` held fixed."""
    student, teacher, tokens = pair(n=4, vocab=6)
    student.requires_grad_()
    from_logits(student, teacher, tokens, SPECS["sampled"]).sum().backward()
    for row, token in enumerate(tokens.tolist()):
        s, t = probabilities(student[row].tolist()), probabilities(teacher[row].tolist())
        weight = math.log(s[token]) - math.log(t[token])
        expected = [weight * ((v == token) - s[v]) for v in range(6)]
        np.testing.assert_allclose(student.grad[row].numpy(), expected, atol=1e-12)
    log_probs = safe_log_softmax(student.detach())
    weights = (log_probs - safe_log_softmax(teacher)).gather(1, tokens[:, None])[:, 0]
    assert torch.autograd.gradcheck(
        lambda s: weights * safe_log_softmax(s).gather(1, tokens[:, None])[:, 0], (student.detach().requires_grad_(),)
    )


def test_sampled_tokens_estimate_the_reverse_gradient():
    """The expectation over the student's own tokens is the gradient of KL(S || T)."""
    student, teacher, _ = pair(n=1, vocab=6)
    student.requires_grad_()
    (exact,) = torch.autograd.grad(from_logits(student, teacher, torch.tensor([0]), SPECS["reverse"]).sum(), student)
    chances = student.detach().softmax(-1)[0]
    estimate = torch.zeros_like(exact)
    for token in range(6):
        value = from_logits(student, teacher, torch.tensor([token]), SPECS["sampled"]).sum()
        estimate += chances[token] * torch.autograd.grad(value, student)[0]
    torch.testing.assert_close(estimate, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@every_spec
def test_one_step_raises_what_the_teacher_prefers(spec, temperature):
    student = torch.tensor([[0.4, 0.1, 0.0, -0.2, -0.6]], dtype=torch.float64, requires_grad=True)
    for preferred in (0, 1):
        teacher = student.detach().clone()
        teacher[0, preferred] += 1.5
        (gradient,) = torch.autograd.grad(
            from_logits(student, teacher, torch.tensor([preferred]), spec, temperature).sum(), student
        )
        stepped = (student - 0.05 * gradient).detach()
        before, after = student.detach().softmax(-1)[0, preferred], stepped.softmax(-1)[0, preferred]
        assert after > before + 1e-4
        if spec.mode != "sampled_token":
            now = from_logits(stepped, teacher, torch.tensor([preferred]), spec, temperature)
            assert now < from_logits(student, teacher, torch.tensor([preferred]), spec, temperature)
    if spec.mode == "sampled_token":  # a sampled token that the teacher dislikes becomes rarer
        teacher = student.detach().clone()
        teacher[0, 3] -= 1.5
        (gradient,) = torch.autograd.grad(from_logits(student, teacher, torch.tensor([3]), spec).sum(), student)
        assert (student - 0.05 * gradient).softmax(-1)[0, 3] < student.softmax(-1)[0, 3] - 1e-4


@pytest.mark.parametrize("impossible", [float("-inf"), -1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@every_spec
def test_a_vocabulary_doubled_with_impossible_items(spec, dtype, impossible):
    student, teacher, tokens = pair(dtype=dtype)
    nothing = torch.full_like(student, impossible)
    results = []
    for double in (False, True):
        s = (torch.cat([student, nothing], 1) if double else student.clone()).requires_grad_()
        t = torch.cat([teacher, nothing], 1) if double else teacher
        values = from_logits(s, t, tokens, spec)
        (gradient,) = torch.autograd.grad(values.sum(), s)
        results.append((values.detach(), gradient[:, :7]))
        assert torch.equal(gradient[:, 7:], torch.zeros_like(gradient[:, 7:]))
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[1][1], results[0][1], **tolerance)


@every_spec
def test_items_that_only_one_side_excludes_stay_finite(spec):
    student, teacher, tokens = pair(dtype=torch.float32)
    student[:, 2], teacher[:, 4] = float("-inf"), float("-inf")
    student.requires_grad_()
    values = from_logits(student, teacher, tokens * 0, spec)
    (gradient,) = torch.autograd.grad(values.sum(), student)
    assert not values.isnan().any() and not gradient.isnan().any()
    if 0.0 < spec.alpha < 1.0:
        assert (values <= math.log(2) + 1e-5).all()  # the middle of the two bounds it


def test_no_gradient_reaches_the_teacher_through_the_sampled_weight():
    student, teacher, tokens = pair()
    teacher.requires_grad_()
    student.requires_grad_()
    from_logits(student, teacher, tokens, SPECS["sampled"]).sum().backward()
    assert teacher.grad is None


def test_importance_ratio():
    now = torch.tensor([-1.0, -1.0, -1.0, -40.0, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0, -2.0, -1.5, -0.1, -40.0], dtype=torch.float64)
    ratio, clipped = importance_ratio(now, old, 2.0)
    expected = [1.0, 2.0, math.exp(0.5), math.exp(-20), 2.0]
    np.testing.assert_allclose(ratio.numpy(), expected, rtol=1e-14)
    assert clipped.tolist() == [False, True, False, False, True]
    assert not ratio.requires_grad
    free, untouched = importance_ratio(now, old, None)
    np.testing.assert_allclose(free.numpy(), [1.0, math.e, math.exp(0.5), math.exp(-20), math.exp(20)], rtol=1e-14)
    assert not untouched.any()


@pytest.mark.parametrize("clip", [None, 2.0, 0.5])
def test_importance_ratio_is_one_on_policy(clip):
    now = torch.tensor([-1.234, -700.0, float("-inf")], requires_grad=True)
    ratio, clipped = importance_ratio(now, None, clip)
    assert ratio.tolist() == [1.0, 1.0, 1.0] and not clipped.any() and not ratio.requires_grad
    if clip != 0.5:
        same, cut = importance_ratio(now[:2], now[:2].detach().clone(), clip)
        assert same.tolist() == [1.0, 1.0] and not cut.any()


# The kernel


def slow_kernel(student, teacher, mask, available):
    values = [
        slow_kl(probabilities(student[b][t].tolist()), probabilities(teacher[b][t].tolist()))
        for b in range(student.shape[0])
        for t in range(student.shape[1])
        if mask[b, t] and available[b]
    ]
    return math.fsum(values) / len(values)


def kernel_inputs(dtype=torch.float64, batch=3, length=4, vocab=5):
    generator = torch.Generator().manual_seed(5)
    student, teacher = (2 * torch.randn(2, batch, length, vocab, generator=generator, dtype=torch.float64)).to(dtype)
    mask = torch.ones(batch, length, dtype=torch.bool)
    mask[0, 2:] = False
    mask[1, 0] = False
    return student.requires_grad_(), teacher, mask, torch.tensor([True, True, False])[:batch]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_kernel_value(dtype):
    student, teacher, mask, available = kernel_inputs(dtype)
    loss = feedback_reverse_kl(student, teacher, mask, available)
    assert loss.shape == () and loss.dtype == dtype and loss.device == student.device
    # One rounding, at the end: half precision is computed in float32.
    expected = torch.tensor(slow_kernel(student.detach(), teacher, mask, available), dtype=torch.float64).to(dtype)
    rounding = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)
    torch.testing.assert_close(loss.detach(), expected, rtol=rounding, atol=rounding)


def test_kernel_gradient():
    student, teacher, mask, available = kernel_inputs()
    assert torch.autograd.gradcheck(lambda s: feedback_reverse_kl(s, teacher, mask, available), (student,))
    feedback_reverse_kl(student, teacher, mask, available).backward()
    eligible = mask & available[:, None]
    assert torch.equal(student.grad[~eligible], torch.zeros_like(student.grad[~eligible]))
    assert (student.grad[eligible].abs().sum(-1) > 1e-6).all()
    # The mean over eligible positions, not over all: d/ds = p (log p - log t - KL) / n.
    p, t = (np.array(probabilities(x[0, 0].tolist())) for x in (student, teacher))
    expected = p * (np.log(p / t) - slow_kl(p, t)) / int(eligible.sum())
    np.testing.assert_allclose(student.grad[0, 0].numpy(), expected, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernel_gradient_in_half_precision(dtype):
    student, teacher, mask, available = kernel_inputs(dtype)
    feedback_reverse_kl(student, teacher, mask, available).backward()
    exact = student.detach().double().requires_grad_()
    feedback_reverse_kl(exact, teacher.double(), mask, available).backward()
    torch.testing.assert_close(student.grad.double(), exact.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_kernel_leaves_teacher_and_inputs_alone():
    student, teacher, mask, available = kernel_inputs()
    teacher.requires_grad_()
    copies = [x.detach().clone() for x in (student, teacher, mask, available)]
    feedback_reverse_kl(student, teacher, mask, available).backward()
    assert teacher.grad is None
    for now, before in zip((student, teacher, mask, available), copies, strict=True):
        assert torch.equal(now.detach(), before)


def test_kernel_accepts_a_teacher_of_another_precision():
    student, teacher, mask, available = kernel_inputs(torch.float32)
    loss = feedback_reverse_kl(student, teacher.bfloat16(), mask, available)
    expected = slow_kernel(student.detach(), teacher.bfloat16().double(), mask, available)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("where", ["mask", "row", "length"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_without_an_eligible_position(where, dtype):
    student, teacher, mask, available = kernel_inputs(dtype)
    if where == "mask":
        mask = torch.zeros_like(mask)
    elif where == "row":
        available = torch.zeros_like(available)
    else:
        student = student.detach()[:, :0].clone().requires_grad_()
        teacher, mask = teacher[:, :0], mask[:, :0]
    loss = feedback_reverse_kl(student, teacher, mask, available)
    assert loss.item() == 0.0 and loss.shape == () and loss.dtype == dtype and loss.requires_grad
    loss.backward()
    assert student.grad.shape == student.shape
    assert torch.equal(student.grad, torch.zeros_like(student))


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["student", "teacher", "both"])
def test_kernel_ignores_what_masked_positions_hold(junk, side):
    student, teacher, mask, available = kernel_inputs()
    clean = feedback_reverse_kl(student, teacher, mask, available)
    (expected,) = torch.autograd.grad(clean, student)
    masked = ~(mask & available[:, None])[..., None]
    dirty = student.detach().clone()
    if side != "teacher":
        dirty = dirty.masked_fill(masked, junk)
    if side != "student":
        teacher = teacher.masked_fill(masked, junk)
    dirty.requires_grad_()
    loss = feedback_reverse_kl(dirty, teacher, mask, available)
    (gradient,) = torch.autograd.grad(loss, dirty)
    assert torch.equal(loss, clean) and torch.equal(gradient, expected)
    nothing = feedback_reverse_kl(dirty, teacher, torch.zeros_like(mask), available)
    (gradient,) = torch.autograd.grad(nothing, dirty)
    assert nothing.item() == 0.0 and torch.equal(gradient, torch.zeros_like(gradient))


def test_kernel_with_impossible_items_on_both_sides():
    student, teacher, mask, available = kernel_inputs()
    expected = feedback_reverse_kl(student, teacher, mask, available)
    nothing = torch.full_like(teacher, float("-inf"))
    wide = torch.cat([student.detach(), nothing], -1).requires_grad_()
    loss = feedback_reverse_kl(wide, torch.cat([teacher, nothing], -1), mask, available)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    loss.backward()
    assert torch.equal(wide.grad[..., 5:], torch.zeros_like(wide.grad[..., 5:]))


def test_kernel_smallest_input():
    one = torch.zeros(1, 1, 1, requires_grad=True)
    loss = feedback_reverse_kl(one, torch.ones(1, 1, 1), torch.tensor([[True]]), torch.tensor([True]))
    loss.backward()
    assert loss.item() == 0.0 and one.grad.item() == 0.0


def test_kernel_trains_towards_the_teacher():
    student, teacher, mask, available = kernel_inputs()
    before = student.detach().clone()
    optimizer = torch.optim.SGD([student], lr=2.0)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = feedback_reverse_kl(student, teacher, mask, available)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]
    eligible = mask & available[:, None]
    torch.testing.assert_close(student.softmax(-1)[eligible], teacher.softmax(-1)[eligible], rtol=0, atol=0.05)
    assert torch.equal(student.detach()[~eligible], before[~eligible])


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("student_logits", lambda x: x.tolist(), TypeError),
        ("student_logits", lambda x: x.long(), TypeError),
        ("student_logits", lambda x: x[0], ValueError),
        ("student_logits", lambda x: x[:0], ValueError),
        ("student_logits", lambda x: x[..., :0], ValueError),
        ("teacher_logits", lambda x: x.numpy(), TypeError),
        ("teacher_logits", lambda x: x > 0, TypeError),
        ("teacher_logits", lambda x: x[..., None], ValueError),
        ("teacher_logits", lambda x: x[:, :2], ValueError),
        ("teacher_logits", lambda x: x[:1], ValueError),
        ("teacher_logits", lambda x: x[..., :3], ValueError),
        ("token_mask", lambda x: x.tolist(), TypeError),
        ("token_mask", lambda x: x.long(), TypeError),
        ("token_mask", lambda x: x.float(), TypeError),
        ("token_mask", lambda x: x[:, :2], ValueError),
        ("token_mask", lambda x: x.T, ValueError),
        ("token_mask", lambda x: x[..., None], ValueError),
        ("feedback_available", lambda x: x.tolist(), TypeError),
        ("feedback_available", lambda x: x.long(), TypeError),
        ("feedback_available", lambda x: x[:2], ValueError),
        ("feedback_available", lambda x: x[:, None], ValueError),
    ],
)
def test_kernel_errors_name_the_argument(name, change, error):
    student, teacher, mask, available = kernel_inputs()
    arguments = {
        "student_logits": student.detach(),
        "teacher_logits": teacher,
        "token_mask": mask,
        "feedback_available": available,
    }
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=f"`{name}`"):
        feedback_reverse_kl(**arguments)


@pytest.mark.parametrize("position", range(4))
def test_kernel_refuses_two_devices(position):
    arguments = [x.detach() for x in kernel_inputs()]
    arguments[position] = arguments[position].to("meta")
    with pytest.raises(ValueError, match=r"one device.*cpu.*meta"):
        feedback_reverse_kl(*arguments)
