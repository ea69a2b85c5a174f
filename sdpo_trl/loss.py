"""How much each token and each row counts: from one value per token to one scalar.

Knows: masks, TRL's `loss_type`s, counts, schedules. Deliberately does not know: models, teachers, trainers.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

WeightSchedule = Literal["constant", "linear", "cosine"]


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


def policy_factor(rows: torch.Tensor, mask: torch.Tensor, loss_type: str, counts: torch.Tensor) -> torch.Tensor:
    """
    What the advantages of the rows that stay in the policy term are multiplied by, so that it is normalised over their
    own tokens while TRL divides by all of them; 0 for the other rows (SRPO, arXiv 2604.02288).

    Args:
        rows (`torch.Tensor`): bool of shape `(B,)`: stays in the policy term.
        mask (`torch.Tensor`): bool of shape `(B, T)`: completion x tool mask.
        loss_type (`str`): See [`token_coefficients`].
        counts (`torch.Tensor`): Over the whole rollout batch and all processes, shape `(4,)`: tokens and rows of the
            policy term, then of all. Rows of the policy term are those with a token left; of all, every row, as TRL
            counts them.

    Returns:
        `torch.Tensor`: float32 of shape `(B,)`.
    """
    kept_tokens, kept_rows, all_tokens, all_rows = counts.float().clamp(min=1).unbind()
    if loss_type in ("dapo", "cispo", "vespo"):
        factor = all_tokens / kept_tokens
    elif loss_type == "bnpo":
        factor = mask.sum().clamp(min=1) / (mask & rows[:, None]).sum().clamp(min=1)
    else:
        factor = all_rows / kept_rows
    return rows * factor


def position_weights(active: torch.Tensor, beta: float) -> torch.Tensor:
    """
    A decay over the position, `exp(-beta * i / n)` for the `i`-th of a row's `n` active tokens, brought to mean 1 in
    each row: early tokens carry most of the signal (IW-OPD, arXiv 2606.22600).

    Args:
        active (`torch.Tensor`): bool of shape `(B, T)`.
        beta (`float`): `>= 0`; 0 weighs all alike.

    Returns:
        `torch.Tensor`: float32 of shape `(B, T)`, 0 where inactive.
    """
    count = active.sum(-1, keepdim=True).clamp(min=1)
    index = active.cumsum(-1) - 1
    weights = torch.exp(-beta * index / count) * active
    return weights * count / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def difficulty_weights(success: torch.Tensor, available: torch.Tensor, group_size: int) -> torch.Tensor:
    """
    `sqrt(p (1 - p))` of each row's group, `p` its success rate, brought to mean 1 over the rows that are distilled
    (SC-SDPO, arXiv 2605.27765). A group that all passed or all failed has weight 0, and is not distilled.

    Args:
        success (`torch.Tensor`): bool of shape `(N,)`, consecutive groups.
        available (`torch.Tensor`): bool of shape `(N,)`: the row has feedback.
        group_size (`int`): Rows per group.

    Returns:
        `torch.Tensor`: float32 of shape `(N,)`; 0 where a row is not distilled.
    """
    rate = success.view(-1, group_size).float().mean(dim=1)
    weights = (rate * (1 - rate)).sqrt().repeat_interleave(group_size) * available
    counted = weights > 0
    return weights / weights[counted].mean() if counted.any() else weights


def magnitude_factor(advantages: torch.Tensor, gap: torch.Tensor, mix: float, clip: float) -> torch.Tensor:
    """
    What scales the size of each token's advantage while the reward keeps its sign (RLSD, arXiv 2604.03128):
    `(1 - mix) + mix * clamp((p_T / p_S) ** sign(A), 1 - clip, 1 + clip)`.

    Args:
        advantages (`torch.Tensor`): Shape `(B, 1)` or `(B, T)`.
        gap (`torch.Tensor`): `log p_T - log p_S` of the sampled tokens, shape `(B, T)`; 0 leaves a token as it is.
        mix (`float`): In `[0, 1]`.
        clip (`float`): In `(0, 1)`.
    """
    ratio = torch.exp((advantages.sign() * gap).clamp(-20.0, 20.0)).clamp(1 - clip, 1 + clip)
    return (1 - mix) + mix * ratio


@dataclass(frozen=True)
class WeightPlan:
    """
    The weight of the distillation over optimizer steps: warm-up from 0 to `peak`, then constant or decaying (SDPG,
    arXiv 2606.04036). A pure function of the step, so a resumed run goes on where it was.

    Args:
        peak (`float`): In `[0, 1]`.
        schedule (`str`): `"constant"`, `"linear"` or `"cosine"`.
        end (`float`): The value after the decay, in `[0, 1]`.
        warmup_steps (`int`): Steps of the warm-up, `>= 0`.
        decay_steps (`int`, *optional*): Steps of the decay; `None`: the rest of the run.
    """

    peak: float
    schedule: WeightSchedule
    end: float
    warmup_steps: int
    decay_steps: int | None

    def at(self, step: int, last_step: int) -> float:
        """
        Args:
            step (`int`): Optimizer steps done so far.
            last_step (`int`): Optimizer steps of the run.
        """
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        steps = self.decay_steps or max(last_step - self.warmup_steps, 1)
        done = min((step - self.warmup_steps) / steps, 1.0)
        if self.schedule == "cosine":
            done = 0.5 * (1.0 - math.cos(math.pi * done))
        return self.peak + (self.end - self.peak) * done
