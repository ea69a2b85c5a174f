"""Beginnings that several prompts have in common are encoded once: a cache of keys and values from which rows go on.

Knows: token ids, caches, which architectures allow it. Deliberately does not know: teachers, trainers, losses.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache


@dataclass(frozen=True)
class PrefixPlan:
    """
    Which beginnings of `R` prompts are encoded once.

    Args:
        prefixes (`list[list[int]]`): One per group.
        group (`list[int]`): The group of each row.
        rests (`list[list[int]]`): What follows in each row's prompt, at least one token.
    """

    prefixes: list[list[int]]
    group: list[int]
    rests: list[list[int]]

    def tokens(self, completion_length: int) -> int:
        """Positions that the two forwards compute, padding included."""
        longest_prefix, longest_rest = max(map(len, self.prefixes)), max(map(len, self.rests))
        return len(self.prefixes) * longest_prefix + len(self.rests) * (longest_rest + completion_length)


def plan_prefixes(prompts: Sequence[Sequence[int]], keys: Sequence[Any]) -> PrefixPlan | None:
    """
    The longest common beginning of the prompts that share a key, leaving each at least one token of its own.

    Args:
        prompts (`Sequence[Sequence[int]]`): Token ids without padding.
        keys (`Sequence`): One hashable per row, say the student's prompt; prompts with one key are likely to begin
        alike.

    Returns:
        [`PrefixPlan`] or `None`: `None` if a group has no common beginning.
    """
    members: dict[Any, list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    prefixes, group, rests = [], [0] * len(prompts), [[]] * len(prompts)
    for index, rows in enumerate(members.values()):
        shortest = min(len(prompts[row]) for row in rows)
        first = prompts[rows[0]]
        length = next((i for i in range(shortest) if any(prompts[row][i] != first[i] for row in rows)), shortest)
        length = min(length, shortest - 1)
        if length < 1:
            return None
        prefixes.append(list(first[:length]))
        for row in rows:
            group[row], rests[row] = index, list(prompts[row][length:])
    return PrefixPlan(prefixes, group, rests)


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, int64 of shape `(R, longest)`."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


@dataclass(frozen=True)
class EncodedPrefixes:
    """
    The keys and values of some beginnings, with the graph of the forward that made them.

    Args:
        layers (`tuple`): Keys and values per layer, each of shape `(prefixes, heads, longest, size)`.
        mask (`torch.Tensor`): int64 of shape `(prefixes, longest)`, padded left.
        config (`transformers.PretrainedConfig`): Of the model.
        argument (`str`): Under which the model takes a cache.
    """

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    mask: torch.Tensor
    config: Any
    argument: str

    @classmethod
    def of(
        cls, model: torch.nn.Module, bare: Any, prefixes: Sequence[Sequence[int]], device: torch.device, **options: Any
    ) -> "EncodedPrefixes":
        """
        Run the model over the prefixes.

        Args:
            model (`torch.nn.Module`): With its wrappers.
            bare (`transformers.PreTrainedModel`): The same without them, see [`shares_prefixes`].
            prefixes (`Sequence[Sequence[int]]`): Token ids, at least one each.
            device (`torch.device`): Where the ids go.
            options: Further arguments of the forward.
        """
        ids, mask = pad_left(prefixes, device)
        # Newer versions of transformers call it `cache`, and deprecate the older name.
        accepted = inspect.signature(type(bare.base_model).forward).parameters
        argument = "cache" if "cache" in accepted else "past_key_values"
        cache = DynamicCache(config=bare.config)
        model(input_ids=ids, attention_mask=mask, use_cache=True, **{argument: cache}, **options)
        return cls(tuple((layer.keys, layer.values) for layer in cache.layers), mask, bare.config, argument)

    def detach(self) -> "EncodedPrefixes":
        """The same without a graph."""
        return replace(self, layers=tuple((keys.detach(), values.detach()) for keys, values in self.layers))

    def cache(self, group: Sequence[int]) -> DynamicCache:
        """A fresh cache for rows that begin with these prefixes."""
        chosen = torch.tensor(list(group), device=self.mask.device)
        return DynamicCache(((keys[chosen], values[chosen]) for keys, values in self.layers), config=self.config)

    def continued(
        self,
        group: Sequence[int],
        rests: Sequence[Sequence[int]],
        completion_ids: torch.Tensor,
        completion_mask: torch.Tensor,
    ) -> dict[str, Any]:
        """
        What the model's forward is given so that rows go on from their prefixes; these stay as they are.

        Args:
            group (`Sequence[int]`): Which prefix each of the `R` rows begins with.
            rests (`Sequence[Sequence[int]]`): What follows in each row's prompt, at least one token.
            completion_ids (`torch.Tensor`): int64 of shape `(R, T)`, as the next one.
            completion_mask (`torch.Tensor`): 1 where a token is.
        """
        chosen = torch.tensor(list(group), device=self.mask.device)
        rest_ids, rest_mask = pad_left(rests, self.mask.device)
        mask = torch.cat([self.mask[chosen], rest_mask, completion_mask], dim=1)
        return {
            "input_ids": torch.cat([rest_ids, completion_ids], dim=1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, self.mask.size(1) :],
            "use_cache": True,
            self.argument: self.cache(group),
        }


def deviation(hidden: torch.Tensor, truth: torch.Tensor, used: torch.Tensor) -> tuple[torch.Tensor, float]:
    """How far hidden states are from the true ones, relative to the largest of them, and what rounding may do."""
    limit = 1e-4 if hidden.dtype in (torch.float32, torch.float64) else 5e-2
    if not used.any():
        return truth.new_zeros(()).float(), limit
    scale = truth[used].abs().max().clamp(min=1e-6)
    return ((hidden - truth)[used].abs().max() / scale).float(), limit


def shares_prefixes(model: Any) -> bool:
    """Whether a cache of keys and values can stand for a prefix: full attention in every layer, with a plain mask."""
    config = model.config.get_text_config()
    values = config.to_dict()
    # Frequencies that follow the length of the input ("dynamic", "longrope") differ between a prefix and the whole.
    rotary = _values_of("rope_type", values) <= {None, "default", "linear", "llama3", "yarn"}
    plain = all(kind == "full_attention" for kind in values.get("layer_types") or [])
    windowed = values.get("sliding_window") is not None and values.get("use_sliding_window", True)
    known = config._attn_implementation in ("eager", "sdpa")
    attends = model._supports_sdpa and not model._is_stateful and not values.get("is_encoder_decoder")
    return plain and rotary and not windowed and known and attends


def _values_of(key: str, tree: Any) -> set[Any]:
    """All values of `key` in nested dictionaries."""
    if not isinstance(tree, dict):
        return set()
    return {value for name, value in tree.items() if name == key}.union(*(_values_of(key, x) for x in tree.values()))
