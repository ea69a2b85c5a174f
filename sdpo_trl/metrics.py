"""The logs: sums and counts over processes and micro-batches, averaged once when they are logged.

Knows: accelerate's `reduce`, names. Deliberately does not know: models, prompts. The set of keys is fixed.
"""

import logging
from collections import defaultdict
from dataclasses import replace

import torch
from accelerate import Accelerator

from .divergence import DivergenceSpec, bounded_teacher
from .health import BatchHealth, HealthMonitor
from .scores import TokenScores

logger = logging.getLogger(__name__)

BATCH_METRICS = (
    "success_share",
    "success_group_share",
    "demonstration_share",
    "feedback_share",
    "hinted_share",
    "distilled_share",
    "lone_success_share",
    "remembered_share",
    "shortened_share",
)
TOKEN_METRICS = (
    "divergence",
    "teacher_student_gap",
    "student_entropy",
    "teacher_entropy",
    "ratio_clipped_share",
    "gap_size",
    "log_ratio_clipped_share",
    "token_weight",
)


@torch.no_grad()
def token_sums(scores: TokenScores, spec: DivergenceSpec) -> torch.Tensor:
    """
    Sums over the scored tokens in the order of `TOKEN_METRICS`, then their count: float64, shape `(9,)`.

    The gap is `log p_T - log p_S` of the sampled token: what the feedback tells the teacher about it. In the
    sampled-token mode the divergence shown is its one-sample estimate, minus the gap. The share of clipped log-ratios
    is that of the sampled tokens: on-policy, an unbiased estimate of the share by the student's probability.
    """
    gap = scores.teacher_log_prob - scores.log_prob.detach()
    shown = -gap if spec.mode == "sampled_token" else scores.divergence
    own = scores.log_prob.detach()
    unclipped = bounded_teacher(own, scores.teacher_log_prob, replace(spec, log_ratio_clip=None)) - own
    cut = unclipped.abs() > (float("inf") if spec.log_ratio_clip is None else spec.log_ratio_clip)
    columns = (
        shown, gap, scores.entropy, scores.teacher_entropy, scores.clipped, gap.abs(), cut, scores.weight,
        torch.ones_like(gap),
    )  # fmt: skip
    return torch.stack([column.double().sum() for column in columns])


class MetricSums:
    """
    Args:
        accelerator (`accelerate.Accelerator`): Sums over the processes.
        health ([`HealthMonitor`]): Is shown every training batch.
    """

    def __init__(self, accelerator: Accelerator, health: HealthMonitor) -> None:
        self._accelerator = accelerator
        self._health = health
        self._tokens: dict[str, torch.Tensor] = {}
        self._rows: dict[str, dict[str, float]] = {"train": defaultdict(float), "eval": defaultdict(float)}
        self._shares: dict[str, dict[str, float]] = {}
        self._scored = torch.zeros(len(TOKEN_METRICS) + 1, dtype=torch.float64)  # since the last training batch

    def add_tokens(self, mode: str, sums: torch.Tensor) -> dict[str, float]:
        """Add the [`token_sums`] of one micro-batch; a collective. Its sums by name, and their `count`."""
        sums = self._accelerator.reduce(sums, reduction="sum").cpu()
        self._tokens[mode] = self._tokens[mode] + sums if mode in self._tokens else sums
        if mode == "train":
            self._scored = self._scored + sums
        return dict(zip((*TOKEN_METRICS, "count"), sums.tolist(), strict=True))

    def add_batch(self, mode: str, stats: dict[str, float], truncated_share: float, length: float) -> dict[str, float]:
        """
        Add one rollout batch, and warn if batch after batch cannot teach anything; a collective.

        Args:
            mode (`str`): `"train"` or `"eval"`.
            stats (`dict[str, float]`): Local sums named in `BATCH_METRICS`, and `rollouts`, the number of rows.
            truncated_share (`float`): Share of answers that were cut, in `[0, 1]`.
            length (`float`): Mean tokens of an answer.

        Returns:
            `dict[str, float]`: the sums over all processes.
        """
        names = sorted(stats)
        local = torch.tensor([stats[name] for name in names], device=self._accelerator.device)
        total = dict(zip(names, self._accelerator.reduce(local, reduction="sum").tolist(), strict=True))
        for name, value in total.items():
            self._rows[mode][name] += value
        if mode == "train":
            *sums, count = self._scored.tolist()
            self._scored = torch.zeros_like(self._scored)
            means = dict(zip(TOKEN_METRICS, (value / count if count else None for value in sums), strict=True))
            rollouts = total["rollouts"]
            health = BatchHealth(
                total["success_share"] / rollouts, total["hinted_share"] / rollouts,
                total["distilled_share"] / rollouts, truncated_share, length, means["divergence"],
                means["student_entropy"],
            )  # fmt: skip
            self.warn(self._health.observe(health))
        return total

    def add_teacher(self, mode: str, passed: float, answers: float) -> None:
        """Add what the self-teacher answered with feedback in its context: sums over all processes."""
        self._rows[mode]["teacher_passed"] += passed
        self._rows[mode]["teacher_answers"] += answers

    def observe_gradient(self, norm: float, gap_size: float) -> None:
        """See [`HealthMonitor.observe_gradient`]."""
        self.warn(self._health.observe_gradient(norm, gap_size))

    def warn(self, messages: list[str]) -> None:
        """Log them, once for all processes."""
        if self._accelerator.is_main_process:
            for message in messages:
                logger.warning(message)

    def flush(self, mode: str, evaluated: str = "eval") -> dict[str, float]:
        """
        The means since the last call; nothing if nothing was trained on or sampled since.

        The keys are always the same: while a rollout batch is trained on further, its shares still hold.

        Args:
            mode (`str`): `"train"` or `"eval"`.
            evaluated (`str`): Names the evaluation set.
        """
        rows = self._rows[mode]
        if not rows and mode not in self._tokens:
            return {}
        if rows:
            self._shares[mode] = {f"sdpo/{name}": rows[name] / rows["rollouts"] for name in BATCH_METRICS}
            if rows["teacher_answers"]:
                success = rows["teacher_passed"] / rows["teacher_answers"]
                self._shares[mode]["sdpo/teacher_success_share"] = success
                self.warn(self._health.observe_teacher(success, evaluated))
            rows.clear()
        *totals, count = self._tokens.pop(mode, torch.zeros_like(self._scored)).tolist()
        means = {f"sdpo/{name}": total / max(count, 1.0) for name, total in zip(TOKEN_METRICS, totals, strict=True)}
        return {**self._shares[mode], **means}
