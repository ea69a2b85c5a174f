"""A divergence at another temperature than that of sampling.

Knows: heads, scores. Deliberately does not know: prompts, trainers.
"""

from dataclasses import replace

import torch

from .divergence import importance_ratio
from .heads import MixedHead, TokenHead
from .scores import Implementation, ScoreRequest, TokenScores, score_tokens


def at_temperature(head: "TokenHead | MixedHead", temperature: float) -> "TokenHead | MixedHead":
    """The same head with its logits divided by another temperature, `> 0`."""
    if isinstance(head, MixedHead):
        return replace(head, base=at_temperature(head.base, temperature), live=at_temperature(head.live, temperature))
    return replace(head, temperature=temperature)


def score_at_temperature(
    student: TokenHead,
    teacher: "TokenHead | MixedHead",
    request: ScoreRequest,
    temperature: float,
    implementation: Implementation = "fused",
) -> tuple[TokenScores, TokenScores]:
    """
    Score `n` tokens twice: the divergence at `temperature`, what belongs to sampling at the heads' own.

    The importance ratio compares probabilities of sampling, so it is computed from the second and multiplied into the
    first. The divergence's part of the loss is multiplied by `temperature ** 2`.

    Args:
        student, teacher, request, implementation: As in [`~sdpo_trl.scores.score_tokens`].
        temperature (`float`): `> 0`.

    Returns:
        `tuple`: two [`TokenScores`]. The first one's values are at `temperature`, and neither its `log_prob` nor its
        `entropy` has a gradient; the second one's are of the student alone, with the gradients that were asked for.
    """
    own = score_tokens(student, None, replace(request, coefficients=None, old_log_probs=None), implementation)
    ratio, clipped = importance_ratio(
        own.log_prob.detach(), request.old_log_probs, request.ratio_clip, request.ratio_floor
    )
    coefficients = request.coefficients
    if coefficients is not None:
        coefficients = coefficients * ratio * temperature**2
    else:
        clipped = torch.zeros_like(clipped)
    asked = replace(
        request, coefficients=coefficients, old_log_probs=None, policy_gradient=False, entropy_gradient=False
    )
    distilled = score_tokens(
        at_temperature(student, temperature), at_temperature(teacher, temperature), asked, implementation
    )
    return replace(distilled, clipped=clipped), own
