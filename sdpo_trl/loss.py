"""How much each token counts: from one value per token to one scalar.

Knows: masks, TRL's `loss_type`s, counts. Deliberately does not know: models, teachers, trainers.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Normalizer:
    """
    What the loss is divided by, for one micro-batch of one process.

    Args:
        tokens (`torch.Tensor`): Active tokens of the whole rollout batch, all processes, shape `()`.
        rows (`torch.Tensor`): Rows with an active token, counted likewise, shape `()`.
        share (`float`): What part of those one optimizer step's micro-batches, which are summed, and one process, of
            which the mean is taken, stand for: `accumulation_steps / steps_per_generation / processes` in training.
        accumulation (`int`): Micro-batches per optimizer step, for the types that average each of them by itself.
        max_length (`int`): The constant length of `"dr_grpo"`.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    share: float
    accumulation: int
    max_length: int


def token_coefficients(active: torch.Tensor, loss_type: str, norm: Normalizer) -> torch.Tensor:
    """
    What each token's value counts in the loss, by TRL's `loss_type`, counting only active tokens and their rows.

    The loss is `(coefficients * values).sum()`:

    - `dapo`, `cispo`, `vespo`: mean over all active tokens of the accumulated batch;
    - `grpo`, `sapo`: mean over rows of each row's token mean;
    - `dr_grpo`: sum over `rows * max_completion_length`; `luspo`: mean over rows of each row's token sum;
    - `bnpo`: mean over the active tokens of this micro-batch.

    All but `bnpo` are the same for one batch of 8, two of 4 accumulated, and two processes.

    Args:
        active (`torch.Tensor`): bool of shape `(B, T)`: completion x tool mask x feedback available.
        loss_type (`str`): One of the above.
        norm ([`Normalizer`]): Counts.

    Returns:
        `torch.Tensor`: float32 of shape `(B, T)`, zero where inactive.
    """
    rows = norm.rows.clamp(min=1) * norm.share
    weights = active.float()
    if loss_type in ("dapo", "cispo", "vespo"):
        return weights / (norm.tokens.clamp(min=1) * norm.share)
    if loss_type in ("grpo", "sapo"):
        return weights / active.sum(-1, keepdim=True).clamp(min=1) / rows
    if loss_type == "dr_grpo":
        return weights / (rows * norm.max_length)
    if loss_type == "luspo":
        return weights / rows
    if loss_type == "bnpo":
        return weights / active.sum().clamp(min=1) / norm.accumulation
    raise ValueError(f"Unknown `loss_type`: {loss_type!r}.")
