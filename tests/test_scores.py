"""The fused loop against the plain truth, values and gradients, in float64, at odd sizes."""

import itertools
from dataclasses import replace

import pytest
import torch

from sdpo_trl.divergence import DivergenceSpec
from sdpo_trl.fused import FusedScores, chunk_length
from sdpo_trl.heads import MixedHead, TokenHead
from sdpo_trl.scores import ScoreRequest, score_tokens

N, V, H = 23, 37, 8
SPECS = [
    *(DivergenceSpec("full_logits", alpha) for alpha in (0.0, 0.2, 0.5, 1.0)),
    *(
        DivergenceSpec("topk_logits", alpha, k, tail)
        for alpha, k, tail in itertools.product((0.0, 0.5, 1.0), (1, 5, 37, 99), (True, False))
    ),
    DivergenceSpec("sampled_token", 1.0),
]
VALUES = ("loss", "log_prob", "entropy", "divergence", "teacher_log_prob", "teacher_entropy", "clipped", "weight")
BOUNDED = [
    replace(spec, teacher_share=share, log_ratio_clip=clip)
    for spec in (
        *(DivergenceSpec("full_logits", alpha) for alpha in (0.0, 0.3, 1.0)),
        *(DivergenceSpec("topk_logits", alpha, 5, tail) for alpha in (0.0, 0.5, 1.0) for tail in (True, False)),
        DivergenceSpec("sampled_token", 1.0),
    )
    for share, clip in ((1.0, 0.4), (0.3, None), (0.8, 0.1))
]


def case(spec, *, trained_head, bias, softcap, mixed, policy, teacher_vocab, old, count=N, dtype=torch.float64):
    """Heads of random numbers, a request, a scalar function of the scores, and the tensors that get a gradient."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden = random(count, H).requires_grad_()
    weight = random(V, H).requires_grad_(trained_head)
    offset = random(V).requires_grad_(trained_head) if bias else None
    student = TokenHead(hidden, weight, offset, 0.7, 1.3, softcap)
    teacher = TokenHead(random(count, H + 2), random(teacher_vocab, H + 2), None, 0.7, 0.9, softcap)
    if mixed:
        teacher = MixedHead(teacher, TokenHead(random(count, H), random(teacher_vocab, H), None, 0.7), 0.3)
    request = ScoreRequest(
        torch.randint(0, min(V, teacher_vocab), (count,), generator=generator),
        spec,
        torch.rand(count, generator=generator, dtype=torch.float64).to(dtype),
        random(count) - 3 if old else None,
        2.0,
        policy_gradient=policy,
        entropy_gradient=policy,
        chunk_size=5,
    )
    weights = random(count), random(count)

    def total(scores):
        result = scores.loss * 1.7
        return result + (scores.log_prob * weights[0] + scores.entropy * weights[1]).sum() if policy else result

    return student, teacher, request, total, [x for x in (hidden, weight, offset) if x is not None and x.requires_grad]


def compare(student, teacher, request, total, inputs):
    truth = score_tokens(student, teacher, request, "reference")
    fused = score_tokens(student, teacher, request, "fused")
    for name in VALUES:
        torch.testing.assert_close(getattr(fused, name), getattr(truth, name), rtol=1e-8, atol=1e-8)
    expected = torch.autograd.grad(total(truth), inputs, allow_unused=True)
    for ours, theirs in zip(torch.autograd.grad(total(fused), inputs, allow_unused=True), expected, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(
            *(zero if x is None or not x.any() else x for x in (ours, theirs)), rtol=1e-8, atol=1e-8
        )


@pytest.mark.parametrize("spec", BOUNDED, ids=str)
def test_fused_equals_reference_with_every_control(spec):
    for trained_head, bias, mixed, teacher_vocab, weighting in itertools.product(
        (False, True), (False, True), (False, True), (37, 33), (None, "teacher_entropy", "gap_gate")
    ):
        student, teacher, request, total, inputs = case(
            spec, trained_head=trained_head, bias=bias, softcap=None, mixed=mixed, policy=trained_head,
            teacher_vocab=teacher_vocab, old=mixed,
        )  # fmt: skip
        request = replace(request, ratio_floor=0.5, token_weighting=weighting, weighting_beta=0.7)
        compare(student, teacher, request, total, inputs)
        compare(student, teacher, replace(request, coefficients=None), total, inputs)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_fused_equals_reference(spec):
    for trained_head, bias, softcap, mixed, policy, teacher_vocab, old in itertools.product(
        (False, True), (False, True), (None, 3.0), (False, True), (False, True), (37, 33, 41), (False, True)
    ):
        student, teacher, request, total, inputs = case(
            spec, trained_head=trained_head, bias=bias, softcap=softcap, mixed=mixed, policy=policy,
            teacher_vocab=teacher_vocab, old=old,
        )  # fmt: skip
        compare(student, teacher, request, total, inputs)


def usual(spec=SPECS[2], **changes):
    options = {
        "trained_head": True, "bias": True, "softcap": None, "mixed": False, "policy": True, "teacher_vocab": V,
        "old": True, **changes,
    }  # fmt: skip
    return case(spec, **options)


@pytest.mark.parametrize("chunk", [1, 4, 22, 23, 24, 1000])
def test_no_chunk_size_changes_anything(chunk):
    student, teacher, request, total, inputs = usual()
    expected = torch.autograd.grad(total(score_tokens(student, teacher, request)), inputs)
    other = torch.autograd.grad(total(score_tokens(student, teacher, replace(request, chunk_size=chunk))), inputs)
    for ours, theirs in zip(other, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", ["fused", "reference"])
@pytest.mark.parametrize("with_teacher", [True, False])
def test_nothing_to_score_is_a_zero_on_the_graph(implementation, with_teacher):
    student, teacher, request, total, inputs = usual(count=0)
    scores = score_tokens(student, teacher if with_teacher else None, request, implementation)
    assert scores.loss.item() == 0.0 and scores.log_prob.shape == (0,)
    for grad in torch.autograd.grad(total(scores), inputs, allow_unused=True):
        assert grad is None or not grad.any()
    assert scores.loss.requires_grad


@pytest.mark.parametrize("policy", [True, False])
def test_without_a_teacher_the_policy_term_alone(policy):
    student, _, request, total, inputs = usual(policy=policy)
    truth, fused = (score_tokens(student, None, request, name) for name in ("reference", "fused"))
    torch.testing.assert_close(fused.log_prob, truth.log_prob)
    torch.testing.assert_close(fused.entropy, truth.entropy)
    if policy:
        expected = torch.autograd.grad(total(truth), inputs)
        for ours, theirs in zip(torch.autograd.grad(total(fused), inputs), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    else:
        assert not fused.log_prob.requires_grad and not fused.entropy.requires_grad


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2], SPECS[3], DivergenceSpec("topk_logits", 0.5, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_stays_that_of_float32(spec, dtype):
    """Half-precision weights and states are multiplied as they are; everything behind the logits is float32."""
    student, teacher, request, total, inputs = usual(spec, dtype=dtype, old=False)
    fused = score_tokens(student, teacher, request)
    assert fused.divergence.dtype == torch.float32
    assert fused.divergence.min() >= -1e-6
    truth = score_tokens(student, teacher, request, "reference")
    torch.testing.assert_close(fused.divergence, truth.divergence, rtol=1e-5, atol=1e-5)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    expected = torch.autograd.grad(total(truth), inputs)
    for ours, theirs in zip(torch.autograd.grad(total(fused), inputs), expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), theirs.float(), **tolerance)


def test_the_tail_is_exact_where_the_support_holds_nearly_everything():
    """As at most tokens of a trained model: 1 - mass would be lost in float32."""
    vocab, generator = 4000, torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 6, vocab, generator=generator, dtype=torch.float64).unbind()
    student[:, 3] += 22.0 + torch.arange(6)  # the others share between 4e-6 and 3e-8
    teacher[:, 3] += 12.0

    logits = student.clone().requires_grad_()
    s, t = logits.log_softmax(-1), teacher.log_softmax(-1)
    support = s.topk(5, dim=-1).indices
    others = torch.ones_like(student, dtype=torch.bool).scatter(-1, support, False)
    s, t = (
        torch.cat([x.gather(-1, support), x.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)], -1)
        for x in (s, t)
    )
    truth = (t.exp() * (t - s)).sum(-1)
    truth.sum().backward()

    for name in ("fused", "reference"):
        states = student.float().requires_grad_()
        heads = [TokenHead(x, torch.eye(vocab)) for x in (states, teacher.float())]  # the hidden states are the logits
        spec = DivergenceSpec("topk_logits", 0.0, 5)
        request = ScoreRequest(torch.full((6,), 3), spec, torch.ones(6), chunk_size=4)
        scores = score_tokens(*heads, request, name)
        scores.loss.backward()
        torch.testing.assert_close(scores.divergence.double(), truth.detach(), rtol=1e-5, atol=0)
        assert (states.grad.double() - logits.grad).norm() < 1e-4 * logits.grad.norm()


def test_equal_heads_have_no_divergence_and_no_gradient():
    student, _, request, _, _ = usual(old=False, policy=False)
    for spec in SPECS:
        scores = score_tokens(student, student.detach(), replace(request, spec=spec))
        shown = scores.log_prob - scores.teacher_log_prob if spec.mode == "sampled_token" else scores.divergence
        assert shown.abs().max() < 1e-12
        (grad,) = torch.autograd.grad(scores.loss, [student.hidden])
        assert grad.abs().max() < 1e-12


@pytest.mark.parametrize("half_dtype", [torch.bfloat16, torch.float16])
def test_autocast_projects_in_half_precision_and_nothing_else(half_dtype):
    student, teacher, request, _, _ = usual(dtype=torch.float32, policy=False, old=False)
    with torch.autocast("cpu", half_dtype):
        full = score_tokens(student, teacher, request)
    torch.testing.assert_close(full.divergence, score_tokens(student, teacher, request).divergence)
    halves = [replace(head, matmul_dtype=half_dtype) for head in (student, teacher)]
    half = score_tokens(*halves, request)
    assert half.divergence.dtype == torch.float32
    truth = score_tokens(*halves, request, "reference")
    torch.testing.assert_close(half.divergence, truth.divergence, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(half.loss, [student.weight])
    assert grad.dtype == torch.float32


def test_a_gradient_below_float16_is_not_lost():
    """Over many items each one's share is smaller than float16 can hold."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200_000, 4, generator=generator) * 0.1
    hidden = torch.randn(3, 4, generator=generator)
    other = hidden + 0.03 * torch.randn(3, 4, generator=generator)
    grads = []
    for dtype in (torch.float32, torch.float16):
        states = hidden.clone().requires_grad_()
        heads = [TokenHead(x, weight, matmul_dtype=dtype) for x in (states, other)]
        request = ScoreRequest(torch.zeros(3, dtype=torch.long), SPECS[3], torch.ones(3))
        score_tokens(*heads, request).loss.backward()
        grads.append(states.grad)
    assert (grads[1] - grads[0]).norm() < 0.05 * grads[0].norm()


def test_the_backward_pass_projects_nothing_when_the_head_is_frozen(monkeypatch):
    student, teacher, request, total, inputs = usual(trained_head=False)
    loss = total(score_tokens(student, teacher, request))
    for name in ("logits_into", "pull_back", "add_weight_grad"):
        monkeypatch.setattr(
            TokenHead, name, lambda *args, **kwargs: pytest.fail("the backward pass recomputed logits")
        )
    assert torch.autograd.grad(loss, inputs)[0].any()


def test_no_tensor_holds_all_tokens_times_the_vocabulary():
    """Whatever autograd keeps, and whatever the loop allocates, stays below `(n, V)`."""
    count = 400
    student, teacher, request, _, _ = usual(count=count, policy=False, trained_head=False)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        scores = score_tokens(student, teacher, request)
    assert max(kept) < count * V
    plan_tensors = [x for x in scores.loss.grad_fn.saved.values() if isinstance(x, torch.Tensor)]
    assert plan_tensors and max(x.numel() for x in plan_tensors) <= count * H
    assert isinstance(scores.loss.grad_fn, type(FusedScores.apply(*_arguments(student, teacher, request))[0].grad_fn))


def _arguments(student, teacher, request):
    from sdpo_trl.fused import FusedPlan

    plan = FusedPlan(
        student.detach(), teacher, request.token_ids, request.spec, request.coefficients, None, (None, None), None,
        1.0, False, False, request.chunk_size, True, False, True,
    )  # fmt: skip
    return student.hidden, student.weight, student.bias, plan


def test_items_that_a_bias_excludes_change_nothing():
    student, teacher, request, total, _ = usual(old=False)
    for spec in SPECS:
        request = replace(request, spec=spec)
        plain = score_tokens(student, teacher, request)
        masked = []
        for head in (student, teacher):
            weight = torch.cat([head.weight, head.weight.new_zeros(3, head.weight.size(1))])
            bias = head.bias if head.bias is not None else head.weight.new_zeros(V)
            masked.append(replace(head, weight=weight, bias=torch.cat([bias, bias.new_full((3,), -torch.inf)])))
        wider = score_tokens(*masked, request)
        for name in VALUES:
            torch.testing.assert_close(getattr(wider, name), getattr(plain, name), rtol=1e-9, atol=1e-9)
        grads = [torch.autograd.grad(total(scores), student.hidden)[0] for scores in (plain, wider)]
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_the_chunk_follows_the_memory_budget():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert chunk_length(10**6, 49152, 4, cpu) * 49152 * 4 <= 40 << 20
    assert chunk_length(10**6, 10**7, 4, cpu) == 16
    assert chunk_length(10**6, 151936, 4, cuda) > chunk_length(10**6, 151936, 4, cpu)
    assert chunk_length(1024, 49152, 4, cpu) == 205  # five equal chunks, not four and a small one
    assert chunk_length(0, 49152, 4, cpu) == 0
