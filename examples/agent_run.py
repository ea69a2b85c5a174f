"""What both agent examples do around their trainings: options checked before anything is computed, and counting.

Knows options, folders, rewards and rollouts. Does not know the tools or the questions.
"""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_llama import Row
from transformers import Trainer

from sdpo_trl import SDPOConfig, SDPOTrainer
from sdpo_trl.faults import check_output_folder

RESULTS = "results.json"


def check_counts(options: Any, *names: str) -> None:
    """
    Raises:
        `ValueError`: If an option is below one.
    """
    for name in names:
        if getattr(options, name) < 1:
            raise ValueError(f"`--{name}` must be at least 1, got {getattr(options, name)}.")


def check_rates(name: str, rates: Sequence[float]) -> None:
    """
    Raises:
        `ValueError`: If there is no learning rate, one that cannot be trained with, or one twice.
    """
    if not rates or len(set(rates)) < len(rates) or not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise ValueError(f"`--{name}` needs one or more different learning rates above 0, got {list(rates)}.")


def prepare(args: SDPOConfig) -> None:
    """
    Make `output_dir` ready; results that an earlier run left there are removed, or they would stand beside new models.

    Raises:
        `ValueError`: If a run is to be continued.
        `CheckpointError`: If nothing can be written there.
    """
    if args.resume_from_checkpoint is not None:
        raise ValueError(
            "`--resume_from_checkpoint` cannot be used here: the example trains several models one after another, and "
            "a checkpoint holds one of them. Run it anew, without the option."
        )
    check_output_folder(args.output_dir, True)
    Path(args.output_dir, RESULTS).unlink(missing_ok=True)


def in_folder(args: SDPOConfig, name: str) -> SDPOConfig:
    """The options with a folder of its own for one training, so that no checkpoint or log replaces another's."""
    args = copy.copy(args)
    args.output_dir = str(Path(args.output_dir, name))
    return args


def asking(args: SDPOConfig) -> SDPOConfig:
    """The options for evaluation alone: every question is asked, also those that fill no batch."""
    args = copy.copy(args)
    args.dataloader_drop_last = False
    return args


def kept(reward: Callable[..., list[float]], given: list[float]) -> Callable[..., list[float]]:
    """
    A reward function that also adds what it gives to `given`.

    TRL's mean is one over batches, and so not over answers where the last batch is smaller.
    """

    @functools.wraps(reward)
    def keeping(*args: Any, **columns: Any) -> list[float]:
        rewards = reward(*args, **columns)
        given.extend(rewards)
        return rewards

    return keeping


def rollouts(trainer: Trainer) -> int:
    """How many rollouts were made for the steps of a GRPO-like trainer, on all processes."""
    args = trainer.args
    batches = trainer.state.global_step * args.gradient_accumulation_steps
    return math.ceil(batches / (args.steps_per_generation * args.num_iterations)) * args.generation_batch_size


class RecordingTrainer(SDPOTrainer):
    """Keeps the rollouts that its loss reads, with the very ids that the model sampled as labels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batches: list[list[torch.Tensor]] = []

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        kept = [inputs[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")]
        self._batches.append([*kept, kept[-1] * inputs.get("tool_mask", 1)])
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @property
    def read(self) -> list[Row]:
        """The rollouts so far, an entry for each time that the loss read one."""
        rows = []
        for batch in self._batches:  # of tensors where they were: a copy per micro-batch would wait for the device
            prompts, in_prompt, ids, in_completion, sampled = (tensor.cpu() for tensor in batch)
            labels = ids.masked_fill(sampled == 0, -100)
            for row in range(len(ids)):
                before, own = prompts[row][in_prompt[row].bool()].tolist(), in_completion[row].bool()
                rows.append((before + ids[row][own].tolist(), [-100] * len(before) + labels[row][own].tolist()))
        return rows


def tokens_in(rows: Sequence[Row]) -> int:
    """How many tokens are learned."""
    return sum(sum(label != -100 for label in labels) for _, labels in rows)
