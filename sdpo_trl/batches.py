"""Views of TRL's row-aligned batch: fewer rows, less padding, the parts that vision models need.

Knows: the keys of the batch. Deliberately does not know: models, losses.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

_PROMPT = (("prompt_ids", "prompt_mask"), ("teacher_prompt_ids", "teacher_prompt_mask"))
_COMPLETION = (
    "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio", "advantages", "teacher_hidden", "token_weight",
    "in_span", "turn_index", "teacher_positions",
)  # fmt: skip
_VISION = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def position_limit(config: Any) -> int | None:
    """Tokens that a model of this configuration can read at once, `None` where it sets no limit."""
    # Some architectures have no such limit; others name it differently, which only the attribute knows.
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def vision_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """What a vision model's forward needs beside the ids; empty for text."""
    return {name: batch[name] for name in _VISION if name in batch} if "pixel_values" in batch else {}


def take_rows(batch: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """The batch of some rows, int64 of shape `(R,)`; counts of shape `()` stay. Not for batches with images."""
    return {key: value[rows.to(value.device)] if value.dim() > 0 else value for key, value in batch.items()}


def trim_padding(batch: dict[str, Any]) -> dict[str, Any]:
    """Cut the padding that all rows share: left of the prompts, right of the completions. Not for images."""
    trimmed = dict(batch)
    for ids, mask in _PROMPT:
        if mask in batch:
            start = int(batch[mask].bool().any(dim=0).int().argmax())
            trimmed[ids], trimmed[mask] = batch[ids][:, start:], batch[mask][:, start:]
    width = batch["completion_mask"].size(1)
    end = _used(batch["completion_mask"])
    for key in _COMPLETION:
        if key in batch and batch[key].dim() > 1 and batch[key].size(1) == width:
            trimmed[key] = batch[key][:, :end]
    for key in ("teacher_completion_ids", "teacher_completion_mask"):
        if key in batch:
            trimmed[key] = batch[key][:, : _used(batch["teacher_completion_mask"])]
    return trimmed


def merge_rows(
    first: dict[str, Any], second: dict[str, Any], free: torch.Tensor, found: torch.Tensor, pad_token_id: int
) -> dict[str, Any]:
    """
    The first batch, with some of its rows replaced by rows of the second; both of `B` rows. Not for images.

    Padding is added where one of the two is longer: left of prompts, right of everything else. Counts of shape `()`
    stay those of the first batch. What only one batch has (hidden states of a teacher that the other never asked) is
    zero in the rows of the other.

    Args:
        first, second (`dict`): Batches of the same trainer.
        free, found (`torch.Tensor`): Rows of the first that give way, and rows of the second that take their places,
            int64 of the same shape `(R,)`.
        pad_token_id (`int`): Fills what is added to token ids.
    """
    merged = dict(second)  # what only the second has, and counts
    for key in {**first, **second}:
        given = [batch[key] for batch in (first, second) if key in batch]
        if given[0].dim() == 0:
            merged[key] = given[0]
            continue
        one = first.get(key, torch.zeros_like(given[-1]))
        two = second.get(key, torch.zeros_like(given[0]))
        if one.dim() > 1 and one.size(1) != two.size(1):
            longest = max(one.size(1), two.size(1))
            value = pad_token_id if key.endswith("_ids") else 0
            left = key in {name for pair in _PROMPT for name in pair}
            one, two = (_widened(tensor, longest, left, value) for tensor in (one, two))
        merged[key] = one.clone()
        merged[key][free.to(one.device)] = two[found.to(two.device)].to(one.device)
    return merged


def _widened(tensor: torch.Tensor, width: int, left: bool, value: int) -> torch.Tensor:
    """`(B, L, ...)` -> `(B, width, ...)`."""
    added = tensor.new_full((tensor.size(0), width - tensor.size(1), *tensor.shape[2:]), value)
    return torch.cat([added, tensor] if left else [tensor, added], dim=1)


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """What is drawn within changes nothing of what is drawn afterwards, by torch, numpy or Python."""
    python, array = random.getstate(), numpy.random.get_state()
    accelerator = {} if device.type == "cpu" else {"device_type": device.type}
    try:
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else None, **accelerator):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)


def _used(mask: torch.Tensor) -> int:
    """Columns up to the last one that any row uses, at least 1."""
    used = mask.bool().any(dim=0).nonzero()
    return int(used[-1]) + 1 if used.numel() else 1


def teacher_view(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with the completions as the teacher reads them: with hints between the turns, where there are any."""
    if "teacher_positions" not in batch:
        return batch
    return {
        **batch,
        "completion_ids": batch["teacher_completion_ids"],
        "completion_mask": batch["teacher_completion_mask"],
    }


def student_positions(hidden: torch.Tensor, batch: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
    """
    From states along the teacher's completions to states along the student's.

    Args:
        hidden (`torch.Tensor`): Shape `(R, T', H)`.
        batch (`dict`): Where the teacher reads other completions, `teacher_positions` of shape `(B, T)` says where
            each of the student's tokens stands in them.
        rows (`torch.Tensor`): int64 of shape `(R,)`.

    Returns:
        `torch.Tensor`: shape `(R, T, H)`.
    """
    if "teacher_positions" not in batch:
        return hidden
    positions = batch["teacher_positions"][rows]
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.size(-1)))
