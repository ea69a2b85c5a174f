"""From two heads to everything the trainer needs about the sampled tokens: one function, two implementations.

Knows: heads, formulas, importance ratios. Deliberately does not know: prompts, rollouts, teachers' update rules.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from .divergence import (
    DivergenceSpec,
    TokenWeighting,
    confidence_weight,
    entropy,
    importance_ratio,
    safe_log_softmax,
    token_divergence,
    weight_scale,
)
from .fused import FusedPlan, FusedScores, chunk_length
from .heads import MixedHead, TokenHead
from .served_head import ServedHead

Implementation = Literal["fused", "reference"]


@dataclass(frozen=True)
class ScoreRequest:
    """
    What is asked about `n` tokens.

    Args:
        token_ids (`torch.Tensor`): int64 of shape `(n,)`, the sampled tokens.
        spec ([`DivergenceSpec`]): Mode and coefficients.
        coefficients (`torch.Tensor`, *optional*): Shape `(n,)`: what each token's divergence is multiplied by in the
            loss, beside its importance ratio and weight. `None`: the divergence is looked at and not descended.
        old_log_probs (`torch.Tensor`, *optional*): Shape `(n,)`: log-probabilities when the tokens were drawn; `None`
            for an on-policy batch, whose ratio is exactly 1.
        ratio_clip (`float`, *optional*): Upper bound of the ratio; `None` does not cut.
        ratio_floor (`float`, *optional*): Lower bound of the ratio; `None` does not cut.
        token_weighting (`str`, *optional*): See [`~sdpo_trl.divergence.confidence_weight`], as the next one.
        weighting_beta (`float`): `>= 0`.
        policy_gradient (`bool`): Whether `log_prob` carries a gradient.
        entropy_gradient (`bool`): Whether `entropy` carries a gradient.
        chunk_size (`int`, *optional*): Tokens per chunk of the fused loop; by default from a memory budget.
    """

    token_ids: torch.Tensor
    spec: DivergenceSpec
    coefficients: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    ratio_clip: float | None = None
    ratio_floor: float | None = None
    token_weighting: TokenWeighting | None = None
    weighting_beta: float = 1.0
    policy_gradient: bool = False
    entropy_gradient: bool = False
    chunk_size: int | None = None


@dataclass(frozen=True)
class TokenScores:
    """
    Values of `n` tokens, each of shape `(n,)` but the loss.

    Args:
        loss (`torch.Tensor`): `sum(coefficients * weight * ratio * divergence)`, shape `()`, attached to the graph.
        log_prob (`torch.Tensor`): The student's, of the sampled token; with a gradient if asked for.
        entropy (`torch.Tensor`): The student's, in nats; with a gradient if asked for.
        divergence (`torch.Tensor`): Per token, see [`~sdpo_trl.divergence.token_divergence`]; no gradient.
        teacher_log_prob (`torch.Tensor`): The teacher's, of the sampled token.
        teacher_entropy (`torch.Tensor`): The teacher's, in nats.
        clipped (`torch.Tensor`): bool, where the ratio was cut.
        weight (`torch.Tensor`): What the token weighting gave, 1 without one.
    """

    loss: torch.Tensor
    log_prob: torch.Tensor
    entropy: torch.Tensor
    divergence: torch.Tensor
    teacher_log_prob: torch.Tensor
    teacher_entropy: torch.Tensor
    clipped: torch.Tensor
    weight: torch.Tensor


def score_tokens(
    student: TokenHead,
    teacher: "TokenHead | MixedHead | ServedHead | None",
    request: ScoreRequest,
    implementation: Implementation = "fused",
) -> TokenScores:
    """
    Score `n` sampled tokens with both heads.

    Vocabularies that are padded to different sizes are compared over the items that both have; the student's own
    log-probability and entropy are over all of its items.

    Args:
        student ([`TokenHead`]): Receives the gradient.
        teacher ([`TokenHead`], [`MixedHead`] or [`ServedHead`], *optional*): Receives none. `None` scores the policy
            term alone.
        request ([`ScoreRequest`]): What is asked.
        implementation (`str`): `"fused"` (memory that does not grow with `n`) or `"reference"` (full logits, plain
            autograd); equal up to rounding.

    Returns:
        [`TokenScores`]: with `n = 0`, empty tensors and a zero loss that is attached to the graph.
    """
    if implementation == "reference":
        return reference_scores(student, teacher, request)
    weight_gradient = student.weight.requires_grad or (student.bias is not None and student.bias.requires_grad)
    item = torch.promote_types(student.matmul_dtype, torch.float32).itemsize
    count = request.token_ids.numel()
    chunk = request.chunk_size or chunk_length(count, student.vocab_size, item, student.hidden.device)
    teachers = [teacher.base, teacher.live] if isinstance(teacher, MixedHead) else [teacher]
    plan = FusedPlan(
        student=student.detach(),
        teacher=teacher,
        token_ids=request.token_ids,
        spec=request.spec,
        coefficients=request.coefficients,
        old_log_probs=request.old_log_probs,
        ratio_bounds=(request.ratio_clip, request.ratio_floor),
        token_weighting=request.token_weighting,
        weighting_beta=request.weighting_beta,
        policy_gradient=request.policy_gradient,
        entropy_gradient=request.entropy_gradient,
        chunk=max(min(chunk, count), 1),
        gradient=torch.is_grad_enabled() and (student.hidden.requires_grad or weight_gradient),
        weight_gradient=weight_gradient,
        may_exclude=any(head is not None and head.bias is not None for head in (student, *teachers)),
    )
    loss, log_prob, own_entropy = FusedScores.apply(student.hidden, student.weight, student.bias, plan)
    values = plan.statistics
    return TokenScores(
        loss,
        log_prob,
        own_entropy,
        values["divergence"],
        values["teacher_log_prob"],
        values["teacher_entropy"],
        values["clipped"],
        values["weight"],
    )


@torch.no_grad()
def head_entropy(head: TokenHead, vocab_size: int) -> torch.Tensor:
    """
    The entropy of each next-token distribution over the first `vocab_size` items, in nats, chunk by chunk.

    Args:
        head ([`TokenHead`]): Over hidden states of shape `(n, H)`.
        vocab_size (`int`): `V' <= V`.

    Returns:
        `torch.Tensor`: shape `(n,)`, float32 or better.
    """
    count = head.hidden.size(0)
    dtype = torch.promote_types(head.matmul_dtype, torch.float32)
    chunk = max(chunk_length(count, vocab_size, dtype.itemsize, head.hidden.device), 1)
    logits = torch.empty(chunk, vocab_size, dtype=dtype, device=head.hidden.device)
    entropies = [torch.empty(0, dtype=dtype, device=head.hidden.device)]
    with torch.autocast(head.hidden.device.type, enabled=False):
        for start in range(0, count, chunk):
            tokens = slice(start, min(start + chunk, count))
            part = head.logits_into(tokens, logits[: tokens.stop - start])
            entropies.append(entropy(safe_log_softmax(part)))
    return torch.cat(entropies)


def reference_scores(
    student: TokenHead, teacher: "TokenHead | MixedHead | ServedHead | None", request: ScoreRequest
) -> TokenScores:
    """The plain truth that the fused loop is tested against: full logits of both models, `(n, V)`, and autograd."""
    log_probs = safe_log_softmax(student.logits(student.vocab_size))  # (n, V)
    picked = request.token_ids[:, None]
    log_prob = log_probs.gather(-1, picked).squeeze(-1)
    own_entropy = entropy(log_probs)
    log_prob = log_prob if request.policy_gradient else log_prob.detach()
    own_entropy = own_entropy if request.entropy_gradient else own_entropy.detach()
    nothing = torch.zeros_like(log_prob.detach())
    if teacher is None:
        attached = log_probs.sum() * 0.0
        return TokenScores(attached, log_prob, own_entropy, nothing, nothing, nothing, nothing.bool(), nothing + 1)

    shared = min(student.vocab_size, teacher.vocab_size)
    with torch.no_grad():
        teacher_log_probs = safe_log_softmax(teacher.logits(shared))  # (n, shared)
    compared = log_probs if shared == student.vocab_size else safe_log_softmax(log_probs[:, :shared])
    support = teacher.support if isinstance(teacher, ServedHead) else None
    per_token = token_divergence(compared, teacher_log_probs, request.token_ids, request.spec, support)
    teacher_log_prob = teacher_log_probs.gather(-1, picked).squeeze(-1)
    teacher_entropy = entropy(teacher_log_probs)
    ratio, clipped = importance_ratio(log_prob, request.old_log_probs, request.ratio_clip, request.ratio_floor)
    weight = torch.ones_like(ratio)
    if request.token_weighting is not None:
        gap = teacher_log_prob - log_prob.detach()
        weight = confidence_weight(request.token_weighting, request.weighting_beta, gap, teacher_entropy)
        weight = weight * weight_scale(request.token_weighting, weight)
    coefficients = torch.zeros_like(weight) if request.coefficients is None else request.coefficients
    return TokenScores(
        (per_token * ratio * weight * coefficients).sum(),
        log_prob,
        own_entropy,
        per_token.detach(),
        teacher_log_prob,
        teacher_entropy,
        clipped if request.coefficients is not None else torch.zeros_like(clipped),
        weight if request.coefficients is not None else nothing + 1,
    )
