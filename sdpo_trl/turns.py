"""The turns of a rollout: which of its tokens the student wrote, and in which turn.

A turn is an unbroken run of sampled tokens; what tools, environments and the chat template wrote stands between two.
Knows: masks, turn numbers. Deliberately does not know: tokenizers, models, trainers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from .feedback import reached_turns
from .reprompt import Hint
from .rollouts import Rollouts

Span = Literal["all", "from_hint", "hinted_turn"]


def turn_index(sampled: torch.Tensor) -> torch.Tensor:
    """
    The turn of each token, counted from 0; -1 where the token is context or padding.

    Args:
        sampled (`torch.Tensor`): bool of shape `(B, T)`: written by the student.

    Returns:
        `torch.Tensor`: int64 of shape `(B, T)`.
    """
    before = torch.nn.functional.pad(sampled, (1, 0))[:, :-1]
    return ((sampled & ~before).cumsum(-1) - 1).masked_fill(~sampled, -1)


def turn_starts(sampled: Sequence[int]) -> list[int]:
    """The position of each turn's first token, given for each token of one row whether the student wrote it."""
    return [i for i, own in enumerate(sampled) if own and (i == 0 or not sampled[i - 1])]


def span_mask(turns: torch.Tensor, hints: Sequence[Hint | None], span: Span) -> torch.Tensor:
    """
    Which tokens are distilled, as far as the hints' turns decide it.

    Args:
        turns (`torch.Tensor`): See [`turn_index`], shape `(B, T)`.
        hints (`Sequence[Hint | None]`): `B` of them. One that is about the whole trajectory hints all turns.
        span (`str`): `"all"` turns, `"from_hint"`: from the first hinted one on, `"hinted_turn"`: the hinted ones.

    Returns:
        `torch.Tensor`: bool of shape `(B, T)`.

    Raises:
        `ValueError`: a hint is about none of its rollout's turns.
    """
    mask = turns >= 0
    if span == "all" or not turns.size(1):
        return mask
    counts = (turns.amax(dim=1) + 1).tolist()
    for row, hint in enumerate(hints):
        if hint is None or hint.hinted is None:
            continue
        if 0 < counts[row] <= min(hint.hinted):
            raise ValueError(
                f"The hint of row {row} is about turn {min(hint.hinted)}, and that rollout has turns 0 to "
                f"{counts[row] - 1}, so nothing of it would be distilled. Return hints on turns that were sampled "
                "from `choose_hints`, or `None`."
            )
        if span == "from_hint":
            mask[row] &= turns[row] >= min(hint.hinted)
        else:
            mask[row] &= torch.isin(turns[row], turns.new_tensor(hint.hinted))
    return mask


def keep_reached(rollouts: Rollouts, turns: torch.Tensor, completion_mask: torch.Tensor) -> Rollouts:
    """
    The rollouts with the texts of those turns that were sampled, see [`~sdpo_trl.feedback.reached_turns`].

    Args:
        rollouts ([`Rollouts`]): `B` of them.
        turns (`torch.Tensor`): See [`turn_index`], shape `(B, T)`.
        completion_mask (`torch.Tensor`): Shape `(B, T)`; a row of zeros was masked out as truncated.
    """
    if not any(rollouts.turns):
        return rollouts
    counts = (turns.amax(dim=1) + 1).tolist()
    masked = (~completion_mask.bool().any(dim=1)).tolist()
    known = [None if hidden else count for count, hidden in zip(counts, masked, strict=True)]
    return replace(rollouts, turn_feedback=reached_turns(rollouts.turns, known))
