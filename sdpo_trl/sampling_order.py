"""The order of the prompts, which a resumed run takes up where it was.

TRL's sampler draws one order after the other from a generator of its own, which no checkpoint holds: a resumed run
would begin its epoch with the order of the first. Knows: samplers. Deliberately does not know: trainers, models.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler
from trl.trainer.utils import RepeatSampler


class ResumableOrder(Sampler):
    """
    The very orders of TRL's sampler, each one found by the number of its epoch.

    Args:
        sampler ([`~trl.trainer.utils.RepeatSampler`]): Has a seed.
    """

    def __init__(self, sampler: RepeatSampler) -> None:
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Called by transformers' `Trainer` as an epoch begins: draw what the epochs before it have drawn."""
        if self._sampler.shuffle:
            self._sampler.generator.manual_seed(self._sampler.seed)
            for _ in range(epoch):
                torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)
