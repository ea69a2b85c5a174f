"""The fused loop: both models' logits, the values per token and the student's gradient, chunk by chunk, in one pass.

For `n` tokens and `V` items no tensor of shape `(n, V)` exists at any time, forward or backward: a few buffers of
`(chunk, V)` are reused, the gradient with respect to the hidden states is made while the logits are there, and the
backward pass only scales it. It computes what [`~sdpo_trl.scores.reference_scores`] computes plainly.

Knows: heads and formulas. Deliberately does not know: prompts, rollouts, teachers' update rules.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from .divergence import (
    IMPOSSIBLE,
    DivergenceSpec,
    TokenWeighting,
    bounded_teacher,
    coarse_divergence,
    confidence_weight,
    importance_ratio,
    weight_scale,
)
from .heads import MixedHead, TokenHead
from .served_head import ServedHead

# Bytes of one (chunk, V) buffer: small beside the model, large enough to fill a GPU or to read the weights seldom.
_BUFFER_BYTES = {"cpu": 40 << 20}
_DEFAULT_BUFFER_BYTES = 256 << 20
# Bytes of the rows that the element-wise passes work on at a time, so that they stay in a CPU's cache.
_BLOCK_BYTES = {"cpu": 2 << 20}
# What keeps the logarithm of a mixture finite where both distributions vanish.
_SMALLEST = {torch.float32: 1e-37, torch.float64: 1e-300}


def chunk_length(count: int, vocab_size: int, item_bytes: int, device: torch.device) -> int:
    """
    Tokens per chunk that keep one `(chunk, V)` buffer within the memory budget of the device (at least 16), and share
    `count` tokens evenly.
    """
    most = max(_BUFFER_BYTES.get(device.type, _DEFAULT_BUFFER_BYTES) // (vocab_size * item_bytes), 16)
    return -(-count // max(-(-count // most), 1))


@dataclass
class FusedPlan:
    """
    What one call of the loop works on; see [`~sdpo_trl.scores.ScoreRequest`] for the fields of the same name.

    Args:
        student ([`TokenHead`]): Without a graph.
        teacher ([`TokenHead`], [`MixedHead`] or [`ServedHead`], *optional*): `None` scores the policy term alone.
        chunk (`int`): Tokens per chunk.
        gradient (`bool`): Whether the loss will be differentiated.
        weight_gradient (`bool`): Whether the student's output matrix trains.
        may_exclude (`bool`): Whether a head can give -inf, as one whose bias masks items can.
    """

    student: TokenHead
    teacher: "TokenHead | MixedHead | ServedHead | None"
    token_ids: torch.Tensor
    spec: DivergenceSpec
    coefficients: torch.Tensor | None
    old_log_probs: torch.Tensor | None
    ratio_bounds: tuple[float | None, float | None]
    token_weighting: TokenWeighting | None
    weighting_beta: float
    policy_gradient: bool
    entropy_gradient: bool
    chunk: int
    gradient: bool
    weight_gradient: bool
    may_exclude: bool
    statistics: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def distils(self) -> bool:
        """Whether the divergence is descended; without coefficients it is only looked at."""
        return self.teacher is not None and self.coefficients is not None


class _Buffers:
    """The reused memory of one call."""

    def __init__(self, plan: FusedPlan, dtype: torch.dtype, device: torch.device) -> None:
        vocab = plan.student.vocab_size

        def chunk(wanted: bool = True, size: int = vocab) -> torch.Tensor | None:
            return torch.empty(plan.chunk, size, dtype=dtype, device=device) if wanted else None

        policy = plan.gradient and (plan.policy_gradient or plan.entropy_gradient)
        teacher = plan.teacher
        self.student = chunk()
        self.teacher = chunk(teacher is not None, 0 if teacher is None else min(vocab, teacher.vocab_size))
        self.mixed = chunk(isinstance(teacher, MixedHead), 0 if teacher is None else min(vocab, teacher.vocab_size))
        self.slope = chunk(plan.student.softcap is not None)
        self.policy = chunk(policy and plan.policy_gradient)
        self.entropy = chunk(policy and plan.entropy_gradient)
        budget = _BLOCK_BYTES.get(device.type, _DEFAULT_BUFFER_BYTES)
        self.block = min(max(budget // (vocab * self.student.element_size()), 1), plan.chunk)
        self.p, self.q, self.m = (torch.empty(self.block, vocab, dtype=dtype, device=device) for _ in range(3))


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Row-wise dot product, `(r, V)`, `(r, V)` -> `(r, 1)`: a temporary of one block, and a cascaded sum."""
    return (a * b).sum(-1, keepdim=True)


def _excess(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The difference of two distributions' rounded masses, `(r, 1)`; see [`~sdpo_trl.divergence.kl`]."""
    return a.sum(-1, keepdim=True) - b.sum(-1, keepdim=True)


def _log_softmax_(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._log_softmax.out(x, -1, False, out=x)


def _full_divergence_(
    s: torch.Tensor,
    t: torch.Tensor,
    p: torch.Tensor,
    q: torch.Tensor,
    m: torch.Tensor,
    alpha: float,
    bounded: bool,
) -> torch.Tensor:
    """
    The divergence of a block, `(r, 1)`, and in place of `s` its gradient with respect to the student's logits, up to
    the factor [`_gradient_scale`].

    Args:
        s, t: Log-probabilities `(r, V)` of student and teacher; both are overwritten.
        p, q: Their exponentials.
        m: Memory of the same shape.
        alpha: See [`~sdpo_trl.divergence.divergence`].
        bounded: `t` went through [`~sdpo_trl.divergence.bounded_teacher`].
    """
    if alpha == 0.0:
        value = _dot(q, t.sub_(s)) + _excess(p, q)
        if bounded:  # a bounded teacher is no distribution
            torch.mul(p, q.sum(-1, keepdim=True), out=s).sub_(q)
        else:
            torch.sub(p, q, out=s)
        return value
    if alpha == 1.0:
        s.sub_(t)
        value = _dot(p, s)
        s.sub_(value).mul_(p)
        return value + _excess(q, p)
    torch.lerp(p, q, alpha, out=m).clamp_(min=_SMALLEST[m.dtype]).log_()
    teacher_part = _dot(q, t.sub_(m))
    torch.sub(s, m, out=m)
    value = (1 - alpha) * _dot(p, m) + alpha * teacher_part
    # p * (m - sum(p * m)) is what a softmax makes of the gradient m.
    if s.is_contiguous():
        torch.ops.aten._softmax_backward_data.out(m, p, -1, p.dtype, grad_input=s)
    else:  # the first items of a longer row
        s.copy_(torch.ops.aten._softmax_backward_data(m, p, -1, p.dtype))
    return value


def _bound_(s: torch.Tensor, t: torch.Tensor, p: torch.Tensor, q: torch.Tensor, m: torch.Tensor, spec) -> None:
    """[`~sdpo_trl.divergence.bounded_teacher`] in place of `t` and its exponential `q`; `m` is memory."""
    if spec.teacher_share < 1.0:
        torch.log(q.lerp_(p, 1.0 - spec.teacher_share).clamp_(min=_SMALLEST[q.dtype]), out=t)
    if spec.log_ratio_clip is not None:
        torch.sub(t, s, out=m).clamp_(-spec.log_ratio_clip, spec.log_ratio_clip)
        torch.exp(torch.add(s, m, out=t), out=q)


def _gradient_scale(spec: DivergenceSpec, vocab_size: int) -> float:
    """What the gradient that the block leaves behind is to be multiplied by, cheaply, after the product."""
    mixes = spec.mode == "full_logits" or (spec.mode == "topk_logits" and spec.topk >= vocab_size)
    return 1 - spec.alpha if mixes and 0.0 < spec.alpha < 1.0 else 1.0


def _coarse_divergence_(
    s: torch.Tensor, t: torch.Tensor, p: torch.Tensor, q: torch.Tensor, spec: DivergenceSpec, support: torch.Tensor
) -> torch.Tensor:
    """As `_full_divergence_`, over a support `(r, K)`; the small part is differentiated by autograd."""
    own = p.gather(-1, support)
    masses = [x.scatter_(-1, support, 0.0).sum(-1, keepdim=True) for x in (p, q)]  # of all other items, (r, 1)
    with torch.enable_grad():
        picked = s.gather(-1, support).requires_grad_()
        rests = [torch.where(mass > 0, mass.log(), IMPOSSIBLE).requires_grad_() for mass in masses]
        tail = (rests[0], rests[1].detach()) if spec.add_tail else None
        value = coarse_divergence(picked, t.gather(-1, support), spec, tail)
        slope, rest_slope = torch.autograd.grad(value.sum(), (picked, rests[0]), allow_unused=True)
    total = slope.sum(-1, keepdim=True)
    factor = -total
    if rest_slope is not None:
        total = total + rest_slope
        factor = torch.where(masses[0] > 0, rest_slope / masses[0], 0.0) - total
    torch.mul(p, factor, out=s).scatter_(-1, support, slope - own * total)
    return value.detach().unsqueeze(-1)


def _score_block(plan: FusedPlan, buffers: _Buffers, rows: slice, tokens: slice) -> None:
    """Values of some rows of the chunk; their gradients take the place of the logits."""
    size = rows.stop - rows.start
    stats, spec = plan.statistics, plan.spec
    s = _log_softmax_(buffers.student[rows])
    ids = plan.token_ids[tokens, None]
    stats["log_prob"][tokens] = s.gather(-1, ids).squeeze(-1)
    if plan.may_exclude:
        s.clamp_(min=IMPOSSIBLE)
    p = torch.exp(s, out=buffers.p[:size])
    entropy = -_dot(p, s)
    stats["entropy"][tokens] = entropy.squeeze(-1)
    if buffers.policy is not None:  # d log p(id) / d logits = onehot - p; the onehot is added after the product
        buffers.policy[rows] = p
    if buffers.entropy is not None:  # dH / d logits = -p (log p + H)
        torch.add(s, entropy, out=buffers.entropy[rows]).mul_(p).neg_()
    if plan.teacher is None:
        return
    shared = buffers.teacher.size(1)
    if shared < s.size(1):  # a teacher with a shorter padded vocabulary: compare what both have
        s[:, shared:] = 0
        s = s[:, :shared]
        s.sub_(torch.logsumexp(s, dim=-1, keepdim=True))
        p = torch.exp(s, out=buffers.p[:size, :shared])
    t = _log_softmax_(buffers.teacher[rows])
    teacher_log_prob = t.gather(-1, ids)
    stats["teacher_log_prob"][tokens] = teacher_log_prob.squeeze(-1)
    if plan.may_exclude:
        t.clamp_(min=IMPOSSIBLE)
    q = torch.exp(t, out=buffers.q[:size, :shared])
    stats["teacher_entropy"][tokens] = -_dot(q, t).squeeze(-1)
    if spec.mode == "sampled_token":
        own = s.gather(-1, ids)
        gap = own - bounded_teacher(own, teacher_log_prob, spec)
        value = gap * own
        torch.mul(p, -gap, out=s).scatter_add_(-1, ids, gap)
    elif spec.mode == "topk_logits" and spec.topk < shared:
        served = isinstance(plan.teacher, ServedHead)
        support = plan.teacher.support[tokens] if served else s.topk(spec.topk, dim=-1).indices  # (r, K)
        value = _coarse_divergence_(s, t, p, q, spec, support)
    else:
        m = buffers.m[:size, :shared]
        if spec.bounds_teacher:
            _bound_(s, t, p, q, m, spec)
        value = _full_divergence_(s, t, p, q, m, spec.alpha, spec.bounds_teacher)
    stats["divergence"][tokens] = value.squeeze(-1)


class FusedScores(torch.autograd.Function):
    """`(hidden, weight, bias, plan) -> loss, log_prob, entropy`; the other values are in `plan.statistics`."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: FusedPlan):
        count = hidden.size(0)
        dtype = torch.promote_types(plan.student.matmul_dtype, torch.float32)
        for name in ("log_prob", "entropy", "teacher_log_prob", "teacher_entropy", "divergence", "ratio"):
            plan.statistics[name] = hidden.new_zeros(count, dtype=dtype)
        plan.statistics["clipped"] = torch.zeros(count, dtype=torch.bool, device=hidden.device)
        plan.statistics["weight"] = hidden.new_ones(count, dtype=dtype)
        ctx.plan = plan
        saved: dict[str, torch.Tensor] = {}
        if plan.gradient:
            wanted = (plan.distils, plan.policy_gradient, plan.entropy_gradient)
            for name, wants in zip(("loss", "policy", "entropy"), wanted, strict=True):
                if wants:
                    saved[name] = hidden.new_empty(count, hidden.size(1), dtype=dtype)
            if plan.weight_gradient and plan.distils:
                saved["weight"] = torch.zeros_like(weight, dtype=dtype)
                if bias is not None:
                    saved["bias"] = torch.zeros_like(bias, dtype=dtype)
        ctx.saved = saved
        with torch.autocast(hidden.device.type, enabled=False):
            buffers = _Buffers(plan, dtype, hidden.device)
            for start in range(0, count, plan.chunk):
                _score_chunk(plan, buffers, slice(start, min(start + plan.chunk, count)), saved)
        loss = plan.statistics["log_prob"].new_zeros(())
        if plan.distils:
            scale = weight_scale(plan.token_weighting, plan.statistics["weight"])
            for name in ("loss", "weight", "bias"):
                if plan.token_weighting is not None and name in saved:
                    saved[name].mul_(scale)
            plan.statistics["weight"] *= scale
            loss = (plan.statistics["divergence"] * _factor(plan, slice(None))).sum()
        log_prob, entropy = plan.statistics["log_prob"].clone(), plan.statistics["entropy"].clone()
        ctx.mark_non_differentiable(
            *([] if plan.policy_gradient else [log_prob]), *([] if plan.entropy_gradient else [entropy])
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias)
        return loss, log_prob, entropy

    @staticmethod
    def backward(ctx: Any, loss_grad, log_prob_grad, entropy_grad):
        hidden, weight, bias = ctx.saved_tensors
        saved, plan = ctx.saved, ctx.plan
        grad = torch.zeros_like(hidden, dtype=plan.statistics["log_prob"].dtype)
        weight_grad, bias_grad = saved.get("weight"), saved.get("bias")
        if loss_grad is not None and "loss" in saved:
            grad.add_(saved["loss"] * loss_grad)
            weight_grad = None if weight_grad is None else weight_grad.mul_(loss_grad)
            bias_grad = None if bias_grad is None else bias_grad.mul_(loss_grad)
        for name, upstream in (("policy", log_prob_grad), ("entropy", entropy_grad)):
            if upstream is not None and name in saved:
                grad.add_(saved[name] * upstream[:, None])
        if plan.weight_gradient and (log_prob_grad is not None or entropy_grad is not None):
            # The policy term's weight per token is known only now, so its part of the output matrix's gradient (and
            # nothing else) needs the student's logits once more.
            if weight_grad is None:
                # Not `weight`, which ZeRO-3 may have emptied since.
                weight_grad = torch.zeros_like(plan.student.weight, dtype=grad.dtype)
                bias_grad = None if bias is None else torch.zeros_like(plan.student.bias, dtype=grad.dtype)
            with torch.autocast(hidden.device.type, enabled=False):
                _add_policy_weight_grad(plan, log_prob_grad, entropy_grad, weight_grad, bias_grad)
        ctx.saved = None
        return (
            grad.to(hidden.dtype),
            None if weight_grad is None or not ctx.needs_input_grad[1] else weight_grad.to(weight.dtype),
            None if bias_grad is None or not ctx.needs_input_grad[2] else bias_grad.to(bias.dtype),
            None,
        )


def _factor(plan: FusedPlan, tokens: slice) -> torch.Tensor:
    """What some tokens' divergences are multiplied by in the loss, `(c,)`."""
    stats = plan.statistics
    return stats["ratio"][tokens] * stats["weight"][tokens] * plan.coefficients[tokens]


def _score_chunk(plan: FusedPlan, buffers: _Buffers, tokens: slice, saved: dict[str, torch.Tensor]) -> None:
    size = tokens.stop - tokens.start
    student, teacher, stats = plan.student, plan.teacher, plan.statistics
    slope = None if buffers.slope is None else buffers.slope[:size]
    student.logits_into(tokens, buffers.student[:size], slope)
    if isinstance(teacher, MixedHead):
        teacher.base.logits_into(tokens, buffers.teacher[:size])
        teacher.live.logits_into(tokens, buffers.mixed[:size])
        teacher.combine_(buffers.teacher[:size], buffers.mixed[:size])
    elif teacher is not None:
        teacher.logits_into(tokens, buffers.teacher[:size])
    for first in range(0, size, buffers.block):
        rows = slice(first, min(first + buffers.block, size))
        _score_block(plan, buffers, rows, slice(tokens.start + rows.start, tokens.start + rows.stop))
    if plan.distils:
        old = None if plan.old_log_probs is None else plan.old_log_probs[tokens]
        stats["ratio"][tokens], stats["clipped"][tokens] = importance_ratio(
            stats["log_prob"][tokens], old, *plan.ratio_bounds
        )
        if plan.token_weighting is not None:
            gap = stats["teacher_log_prob"][tokens] - stats["log_prob"][tokens]
            stats["weight"][tokens] = confidence_weight(
                plan.token_weighting, plan.weighting_beta, gap, stats["teacher_entropy"][tokens]
            )
    if not plan.gradient:
        return
    if plan.distils:
        factor = _factor(plan, tokens)[:, None] * _gradient_scale(plan.spec, buffers.teacher.size(1))
        saved["loss"][tokens] = student.pull_back(buffers.student[:size], slope) * factor
        if "weight" in saved:
            student.add_weight_grad(tokens, buffers.student[:size], factor, saved["weight"], saved.get("bias"))
    if buffers.policy is not None:
        saved["policy"][tokens] = student.pick(plan.token_ids[tokens], slope) - student.pull_back(
            buffers.policy[:size], slope
        )
    if buffers.entropy is not None:
        saved["entropy"][tokens] = student.pull_back(buffers.entropy[:size], slope)


def _add_policy_weight_grad(plan: FusedPlan, log_prob_grad, entropy_grad, weight_grad, bias_grad) -> None:
    student = plan.student
    dtype = weight_grad.dtype
    logits = torch.empty(plan.chunk, student.vocab_size, dtype=dtype, device=weight_grad.device)
    slopes = None if student.softcap is None else torch.empty_like(logits)
    for start in range(0, plan.token_ids.numel(), plan.chunk):
        tokens = slice(start, min(start + plan.chunk, plan.token_ids.numel()))
        size = tokens.stop - start
        slope = None if slopes is None else slopes[:size]
        s = _log_softmax_(student.logits_into(tokens, logits[:size], slope)).clamp_(min=IMPOSSIBLE)
        p = s.exp()
        grad = torch.zeros_like(p)
        if entropy_grad is not None:
            s.add_(plan.statistics["entropy"][tokens, None]).mul_(p)
            grad.sub_(s * entropy_grad[tokens, None])
        if log_prob_grad is not None:
            upstream = log_prob_grad[tokens, None].to(dtype)
            grad.sub_(p * upstream).scatter_add_(-1, plan.token_ids[tokens, None], upstream)
        if slope is not None:
            grad.mul_(slope)
        student.add_weight_grad(tokens, grad, 1.0, weight_grad, bias_grad)
