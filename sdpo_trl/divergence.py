"""The formulas: from two next-token distributions to one value per token.

Knows: logits, log-probabilities, masks. Deliberately does not know: models, prompts, trainers, where the logits come
from. Every function is pure. Half precision is computed in float32, float64 stays float64.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

DistillationMode = Literal["full_logits", "topk_logits", "sampled_token"]

# Stands for the log-probability of an impossible item: exp() of it is exactly 0, yet 0 times it is 0 and not NaN.
IMPOSSIBLE = -1e30


def upcast(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def safe_log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities over the last dimension in float32 or better, with -inf replaced by a huge finite number."""
    return F.log_softmax(upcast(logits), dim=-1).clamp(min=IMPOSSIBLE)


def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """
    `KL(P || Q) = sum_v p_v (log p_v - log q_v)`: `(..., V)`, `(..., V)` -> `(...)`, in nats.

    `sum_v q_v - sum_v p_v`, which is zero but for rounding, is added: it takes back what a rounded normaliser of
    either side adds to every log-ratio alike, so that two nearly equal distributions over many items stay near zero.
    """
    p, q = log_p.exp(), log_q.exp()
    return (p * (log_p - log_q)).sum(-1) + (q.sum(-1) - p.sum(-1))


def entropy(log_p: torch.Tensor) -> torch.Tensor:
    """`-sum_v p_v log p_v`: `(..., V)` -> `(...)`, in nats."""
    return -(log_p.exp() * log_p).sum(-1)


def divergence(student_log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, alpha: float) -> torch.Tensor:
    """
    The generalised Jensen-Shannon divergence between two distributions (paper, section 3).

    `alpha = 0`: `KL(T || S)` (forward). `alpha = 1`: `KL(S || T)` (reverse). Between, with `M = (1 - alpha) S + alpha
    T`: `(1 - alpha) KL(S || M) + alpha KL(T || M)`. Never negative beyond rounding; zero only for equal distributions.

    Args:
        student_log_probs (`torch.Tensor`): Log-probabilities of shape `(..., V)`.
        teacher_log_probs (`torch.Tensor`): Log-probabilities of shape `(..., V)`.
        alpha (`float`): In `[0, 1]`.

    Returns:
        `torch.Tensor`: shape `(...)`, in nats.
    """
    if alpha == 0.0:
        return kl(teacher_log_probs, student_log_probs)
    if alpha == 1.0:
        return kl(student_log_probs, teacher_log_probs)
    mixture = torch.logaddexp(student_log_probs + math.log1p(-alpha), teacher_log_probs + math.log(alpha))
    return (1 - alpha) * kl(student_log_probs, mixture) + alpha * kl(teacher_log_probs, mixture)


def _rest(log_probs: torch.Tensor, support: torch.Tensor) -> torch.Tensor:
    """
    The log-mass of all items outside of the support: `(n, V)`, `(n, K)` -> `(n, 1)`.

    Summed over those items, not as one minus the support's mass, which float32 cannot tell from zero where the support
    holds nearly everything, as it does at most tokens of a trained model.
    """
    return log_probs.scatter(-1, support, IMPOSSIBLE).logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class DivergenceSpec:
    """
    What is computed per token.

    Args:
        mode (`str`): `"full_logits"`, `"topk_logits"` or `"sampled_token"`.
        alpha (`float`): See [`divergence`].
        topk (`int`, *optional*): Size of the student's support with `"topk_logits"`; `K >= V` equals `"full_logits"`.
        add_tail (`bool`): With `"topk_logits"`, hold the rest of the mass in one more item instead of renormalising.
        teacher_share (`float`): See [`bounded_teacher`], as the next one.
        log_ratio_clip (`float`, *optional*): In nats.
    """

    mode: DistillationMode = "full_logits"
    alpha: float = 0.5
    topk: int | None = None
    add_tail: bool = True
    teacher_share: float = 1.0
    log_ratio_clip: float | None = None

    @property
    def bounds_teacher(self) -> bool:
        """Whether [`bounded_teacher`] changes anything."""
        return self.teacher_share < 1.0 or self.log_ratio_clip is not None


def bounded_teacher(student: torch.Tensor, teacher: torch.Tensor, spec: DivergenceSpec) -> torch.Tensor:
    """
    The teacher held near the student, as constants: log-probabilities `(..., K)`, `(..., K)` -> `(..., K)`.

    1. A proximal teacher (TOP-D, arXiv 2607.04751): `a p_T + (1 - a) p_S` with `a = spec.teacher_share`, so that no
       item's `log p_T - log p_S` is below `log(1 - a)`.
    2. A clip of the per-item log-ratio, the paper's advantage (section 5): `|log p_T - log p_S| <= c`. The result is
       no distribution any more; [`kl`] between measures, `sum(p log(p / q) - p + q)`, stays non-negative, zero for
       equal ones alone, and its gradient is `p * (r - sum(p * r))` with the clipped log-ratios `r` as they are.
    """
    student = student.detach()
    if spec.teacher_share < 1.0:
        own = student + math.log1p(-spec.teacher_share)
        teacher = torch.logaddexp(teacher + math.log(spec.teacher_share), own)
    if spec.log_ratio_clip is not None:
        teacher = student + (teacher - student).clamp(-spec.log_ratio_clip, spec.log_ratio_clip)
    return teacher


def coarse_divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    spec: DivergenceSpec,
    rests: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """
    The divergence over a support of `K` items with a tail item, or renormalised: `(n, K)`, `(n, K)` -> `(n,)`.

    Args:
        student (`torch.Tensor`): Log-probabilities under the full distribution, shape `(n, K)`.
        teacher (`torch.Tensor`): The teacher's, at the same items.
        spec ([`DivergenceSpec`]): `alpha` and the teacher's bounds.
        rests (`tuple`, *optional*): Log-masses of the student's and the teacher's other items, `(n, 1)` each, as one
            more item; `None` renormalises.
    """
    if rests is None:
        student, teacher = safe_log_softmax(student), safe_log_softmax(teacher)
    else:
        student, teacher = (torch.cat(parts, dim=-1) for parts in zip((student, teacher), rests, strict=True))
    return divergence(student, bounded_teacher(student, teacher, spec), spec.alpha)


def token_divergence(
    student_log_probs: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    spec: DivergenceSpec,
    support: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    One value per scored token, differentiable through the student.

    Args:
        student_log_probs (`torch.Tensor`): Shape `(n, V)`.
        teacher_log_probs (`torch.Tensor`): Shape `(n, V)`, without gradient.
        token_ids (`torch.Tensor`): int64 of shape `(n,)`: the sampled tokens, used by `"sampled_token"` alone.
        spec ([`DivergenceSpec`]): Mode and coefficients.
        support (`torch.Tensor`, *optional*): int64 of shape `(n, K)`: the items of `"topk_logits"`, instead of the
            student's likeliest.

    Returns:
        `torch.Tensor`: shape `(n,)`. With `"sampled_token"`, `(log p_S - log p_T).detach() * log p_S` of the sampled
        token, whose gradient is that of the reverse divergence's one-sample estimate.
    """
    if spec.mode == "sampled_token":
        student = student_log_probs.gather(-1, token_ids[:, None]).squeeze(-1)
        teacher = teacher_log_probs.gather(-1, token_ids[:, None]).squeeze(-1)
        return (student - bounded_teacher(student, teacher, spec)).detach() * student
    if spec.mode == "topk_logits" and spec.topk < student_log_probs.size(-1):
        if support is None:
            support = student_log_probs.detach().topk(spec.topk, dim=-1).indices  # (n, K)
        both = (student_log_probs, teacher_log_probs)
        rests = tuple(_rest(log_probs, support) for log_probs in both) if spec.add_tail else None
        return coarse_divergence(*(log_probs.gather(-1, support) for log_probs in both), spec, rests)
    return divergence(student_log_probs, bounded_teacher(student_log_probs, teacher_log_probs, spec), spec.alpha)


TokenWeighting = Literal["teacher_entropy", "gap_gate"]


@torch.no_grad()
def confidence_weight(
    weighting: TokenWeighting, beta: float, gap: torch.Tensor, teacher_entropy: torch.Tensor
) -> torch.Tensor:
    """
    How much each token counts, from what both models say about it: `(...)`, `(...)` -> `(...)`.

    `"teacher_entropy"`: `exp(-beta * H_T)` (SRPO, arXiv 2604.02288), up to the scale that [`weight_scale`] settles;
    `"gap_gate"`: `sigmoid(beta * gap)` (SDAR, arXiv 2605.15155), which strengthens tokens that the teacher prefers.

    Args:
        weighting (`str`): One of the two.
        beta (`float`): `>= 0`, in 1 / nats.
        gap (`torch.Tensor`): `log p_T - log p_S` of the sampled token.
        teacher_entropy (`torch.Tensor`): In nats.
    """
    return torch.exp(-beta * teacher_entropy) if weighting == "teacher_entropy" else torch.sigmoid(beta * gap)


def weight_scale(weighting: TokenWeighting | None, weights: torch.Tensor) -> torch.Tensor:
    """What brings the weights of `n` tokens, `(n,)`, to mean 1 where their rule asks for that; shape `()`."""
    if weighting != "teacher_entropy" or weights.numel() == 0:
        return weights.new_ones(())
    return 1.0 / weights.mean().clamp(min=torch.finfo(weights.dtype).tiny)


@torch.no_grad()
def importance_ratio(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor | None,
    clip: float | None,
    floor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    How much likelier the sampled tokens are now than when they were drawn, cut from above (paper, section 3; clip 2).

    `exp(clamp(log p_now - log p_old, -20, 20)).clamp(floor, clip)`, without gradient; exactly 1 if `old_log_probs` is
    `None` (the batch is on-policy).

    Args:
        log_probs (`torch.Tensor`): Shape `(...)`.
        old_log_probs (`torch.Tensor`, *optional*): Same shape.
        clip (`float`, *optional*): Upper bound, `> 0`; `None` does not cut.
        floor (`float`, *optional*): Lower bound, in `[0, clip)`; `None` does not cut.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the ratio and a bool tensor that is true where it was cut.
    """
    if old_log_probs is None:
        return torch.ones_like(log_probs), torch.zeros_like(log_probs, dtype=torch.bool)
    ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0).exp()
    bounded = ratio if clip is None and floor is None else ratio.clamp(min=floor, max=clip)
    return bounded, bounded != ratio


def feedback_reverse_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    token_mask: torch.Tensor,
    feedback_available: torch.Tensor,
) -> torch.Tensor:
    """
    The mean reverse divergence over the tokens whose attempt has feedback: SDPO's loss in one function.

    Equals, over the positions where `token_mask & feedback_available[:, None]`,
    `(softmax(s) * (log_softmax(s) - log_softmax(t))).sum(-1).mean()`. The teacher scores the *original* student
    prefixes also when its own context holds another, successful answer.

    Args:
        student_logits (`torch.Tensor`): Floating, shape `(B, T, V)`, `B, V >= 1`, `T >= 0`. Receives the gradient.
        teacher_logits (`torch.Tensor`): Floating, shape `(B, T, V)`. Receives none.
        token_mask (`torch.Tensor`): bool of shape `(B, T)`.
        feedback_available (`torch.Tensor`): bool of shape `(B,)`.

    Returns:
        `torch.Tensor`: a scalar of shape `()`, in nats, with the dtype and device of the student. Without an eligible
        position: a zero attached to the graph, with an exactly-zero gradient. What masked positions hold, -inf and NaN
        included, has no effect on the value or the gradient.

    Raises:
        `TypeError`: an argument is not a tensor or has the wrong dtype.
        `ValueError`: a shape or a device does not fit.
    """
    for name, value in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise TypeError(f"`{name}` must be a floating-point tensor, got {getattr(value, 'dtype', type(value))}.")
        if value.dim() != 3 or value.size(0) == 0 or value.size(2) == 0:
            raise ValueError(f"`{name}` must have shape (B, T, V) with B, V >= 1, got {tuple(value.shape)}.")
    batch, length, _ = student_logits.shape
    for name, value, shape in (
        ("token_mask", token_mask, (batch, length)),
        ("feedback_available", feedback_available, (batch,)),
    ):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.bool:
            raise TypeError(f"`{name}` must be a bool tensor, got {getattr(value, 'dtype', type(value))}.")
        if value.shape != shape:
            raise ValueError(f"`{name}` must have shape {shape} to fit `student_logits`, got {tuple(value.shape)}.")
    if teacher_logits.shape != student_logits.shape:
        raise ValueError(
            f"`teacher_logits` has shape {tuple(teacher_logits.shape)}, but `student_logits` has "
            f"{tuple(student_logits.shape)}; both must be (B, T, V)."
        )
    devices = {str(x.device) for x in (student_logits, teacher_logits, token_mask, feedback_available)}
    if len(devices) > 1:
        raise ValueError(f"All arguments must be on one device, got {sorted(devices)}.")

    eligible = token_mask & feedback_available[:, None]  # (B, T)
    # Selecting first keeps whatever masked positions hold out of the graph.
    student = safe_log_softmax(student_logits[eligible])  # (n, V)
    teacher = safe_log_softmax(teacher_logits.detach()[eligible])
    per_token = kl(student, teacher)  # (n,)
    return (per_token.sum() / max(per_token.numel(), 1)).to(student_logits.dtype)
