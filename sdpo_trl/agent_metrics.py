"""The logs of rollouts with several turns: sums and counts over processes, averaged once when they are logged.

Knows: accelerate's `reduce`, names, turn numbers. Deliberately does not know: models, prompts. The set of keys is
fixed by the trainer's tools.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

ROLLOUT_METRICS = ("turns", "tool_calls", "tool_failures", "assistant_tokens", "truncated_share")
_OWN_TURNS = 4  # turns with a divergence of their own in the logs; the later ones share one


def is_truncated(completion: Any, ids: Sequence[int], end_ids: Sequence[int]) -> bool:
    """Whether a limit stopped the rollout: its last turn has no end token, or calls a tool that never replied."""
    waits = isinstance(completion, list) and bool(completion) and bool(completion[-1].get("tool_calls"))
    return waits or len(ids) == 0 or ids[-1] not in end_ids


def turn_sums(divergence: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """
    Sums of the divergence by turn, then the counts: float64, shape `(10,)`.

    Args:
        divergence (`torch.Tensor`): Of `n` tokens, shape `(n,)`.
        turns (`torch.Tensor`): Their turns, int64 of shape `(n,)`.
    """
    bucket = turns.clamp(max=_OWN_TURNS)
    sums = divergence.new_zeros(2, _OWN_TURNS + 1, dtype=torch.float64)
    sums[0].index_add_(0, bucket, divergence.detach().double())
    sums[1].index_add_(0, bucket, torch.ones_like(divergence, dtype=torch.float64))
    return sums.flatten()


class AgentMetrics:
    """
    Args:
        accelerator (`accelerate.Accelerator`): Sums over the processes.
        tools (`Sequence[str]`): Names of all tools.
    """

    def __init__(self, accelerator: Accelerator, tools: Sequence[str]) -> None:
        self._accelerator = accelerator
        self._tools = sorted(set(tools))
        self._rollouts: dict[str, torch.Tensor] = {}
        self._turns: dict[str, torch.Tensor] = {}
        self._shown: dict[str, dict[str, float]] = {}

    def add_rollouts(
        self, mode: str, sums: Mapping[str, float], count: int, calls: Mapping[str, int], successes: Mapping[str, int]
    ) -> None:
        """
        Add one batch of this process; a collective.

        Args:
            mode (`str`): `"train"` or `"eval"`.
            sums (`Mapping[str, float]`): Over its rollouts, named in `ROLLOUT_METRICS`.
            count (`int`): Its rollouts.
            calls, successes (`Mapping[str, int]`): By tool.
        """
        values = [*(sums[name] for name in ROLLOUT_METRICS), count]
        values += [table.get(name, 0) for table in (calls, successes) for name in self._tools]
        local = torch.tensor(values, dtype=torch.float64, device=self._accelerator.device)
        self._add(self._rollouts, mode, local)

    def add_tokens(self, mode: str, sums: torch.Tensor) -> None:
        """Add the [`turn_sums`] of one micro-batch; a collective."""
        self._add(self._turns, mode, sums)

    def _add(self, table: dict[str, torch.Tensor], mode: str, local: torch.Tensor) -> None:
        total = self._accelerator.reduce(local, reduction="sum").cpu()
        table[mode] = table[mode] + total if mode in table else total

    def flush(self, mode: str) -> dict[str, float]:
        """
        The means since the last call; NaN for a tool that was not called and a turn that was not reached.

        The keys are always the same: while a rollout batch is trained on further, what it was like still holds.
        """
        if mode in self._rollouts:
            *sums, count = self._rollouts[mode][: len(ROLLOUT_METRICS) + 1].tolist()
            calls, successes = self._rollouts.pop(mode)[len(ROLLOUT_METRICS) + 1 :].view(2, -1)
            shown = {f"sdpo/{name}": total / count for name, total in zip(ROLLOUT_METRICS, sums, strict=True)}
            for name, share in zip(self._tools, (successes / calls).tolist(), strict=True):  # 0 / 0 is NaN
                shown[f"sdpo/tool_success/{name}"] = share
            self._shown[mode] = shown
        if mode not in self._shown:
            return {}
        totals, counts = self._turns.pop(mode, torch.zeros(2 * (_OWN_TURNS + 1))).view(2, -1)
        names = [*(f"turn_{turn}" for turn in range(_OWN_TURNS)), f"turn_{_OWN_TURNS}_on"]
        means = (totals / counts).tolist()
        return {**self._shown[mode], **{f"sdpo/divergence/{n}": v for n, v in zip(names, means, strict=True)}}
