"""What vLLM is sent: the student as a plain model, under its base model's names, without a touch on its weights.

TRL merges an adapter in place, sends all weights and subtracts the adapter again, which leaves rounding errors in the
frozen base, gathers the whole model at once under ZeRO-3, and sends other adapters' `modules_to_save` along. Here
TRL's own path for plain models walks over a view whose tensors are merged out of place, a layer at a time.

Knows: PEFT's layers, TRL's sender. Deliberately does not know: teachers, losses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from .files import attribute
from .shards import is_replicated, rest, whole


def send_merged(generation: Any) -> None:
    """
    Let TRL's `VLLMGeneration` send a PEFT model's merged weights from copies.

    Raises:
        `ValueError`: the adapter cannot be merged into weights.
    """
    if not is_peft_model(generation.model):
        return
    check_mergeable(generation.model)
    generation._iter_named_params = partial(_send, generation, generation._iter_named_params)


def _send(generation: Any, plain: Callable[[], Iterator[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    with attribute(generation, "model", MergedView(generation.model)):
        yield from plain()


def check_mergeable(model: nn.Module) -> None:
    """
    Refuse adapters that vLLM could not be sent as weights.

    Raises:
        `ValueError`: prompt learning, an adapter that PEFT cannot merge, or one weight that stands for several.
    """
    config = model.active_peft_config
    if config.is_prompt_learning:
        raise ValueError(
            f"`use_vllm=True` sends the adapter merged into weights, and {config.peft_type.value} has none to merge. "
            "Use LoRA, or generate without vLLM."
        )
    sent: dict[int, tuple[str, int]] = {}
    for name, original, source in _sources(model.get_base_model(), ""):
        first, own = sent.setdefault(original, (name, source))
        if own != source:
            raise ValueError(
                f"{first!r} and {name!r} are one weight of the base model (tied embeddings, `layer_replication`), "
                "which the adapter turns into two, so vLLM, which has one for both, could not be sent the student. "
                "Take them out of `target_modules` and `modules_to_save`, use `ensure_weight_tying=True` or "
                "`trainable_token_indices`, or load the model with `tie_word_embeddings=False`."
            )
    _try_merging(model)


def _sources(module: nn.Module, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Of each weight of the base model: its name, its identity, and that of what is sent in its place."""
    if isinstance(module, TrainableTokensLayer):
        source = id(module.tied_adapter or module)  # both see the same tokens
        yield from ((prefix + name, id(p), source) for name, p in module.get_base_layer().named_parameters())
    elif isinstance(module, BaseTunerLayer):
        yield from ((prefix + name, id(p), id(module)) for name, p in module.get_base_layer().named_parameters())
    elif isinstance(module, TrainableTokensWrapper):
        yield from _sources(module.token_adapter, prefix)
    elif isinstance(module, ModulesToSaveWrapper):
        used = dict(_used_module(module).named_parameters())
        for name, p in module.original_module.named_parameters():
            yield prefix + name, id(p), id(used[name])
    else:
        yield from ((prefix + name, id(p), id(p)) for name, p in module._parameters.items() if p is not None)
        for name, child in module.named_children():
            yield from _sources(child, f"{prefix}{name}.")


def _try_merging(model: nn.Module) -> None:
    """Merge one layer of each kind, so that what PEFT cannot merge is known before the first rollout."""
    tried: set[str] = set()
    for name, layer in model.named_modules():
        kind = repr(layer) if isinstance(layer, BaseTunerLayer) else ""  # tells layers apart that differ in structure
        if not kind or kind in tried:
            continue
        tried.add(kind)
        try:
            _merged(layer, "")
        except (NotImplementedError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"`use_vllm=True` sends the adapter merged into weights, and PEFT cannot merge that of {name!r}: "
                f"{error} Use another adapter, or generate without vLLM."
            ) from error


class MergedView(nn.Module):
    """
    A PEFT model as TRL's sender sees a plain one.

    Args:
        model (`peft.PeftModel`): The student.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        vars(self)["_student"] = model  # not a submodule: nothing but what is yielded below can be seen

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """
        The base model's names, each once, with the values that the active adapter makes of them; a collective where
        parameters are sharded. The model itself is as it was whenever something is yielded.
        """
        rest(self._student)
        seen: set[int] = set()
        for name, own, values in _walk(self._student.get_base_model(), ""):
            if id(own) not in seen:
                seen.add(id(own))
                yield name, values


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Name, parameter and values of everything below a module of the base model."""
    if isinstance(module, BaseTunerLayer):
        yield from _merged(module, prefix)
    elif isinstance(module, TrainableTokensWrapper):
        yield from _walk(module.token_adapter, prefix)
    elif isinstance(module, ModulesToSaveWrapper):
        yield from _walk(_used_module(module), prefix)
    else:
        yield from ((prefix + name, p, p) for name, p in module._parameters.items() if p is not None)
        for name, child in module.named_children():
            yield from _walk(child, f"{prefix}{name}.")


def _used_module(module: ModulesToSaveWrapper) -> nn.Module:
    active = [name for name in module.active_adapters if name in module.modules_to_save]
    return module.modules_to_save[active[0]] if active else module.original_module


def _merged(layer: BaseTunerLayer, prefix: str) -> list[tuple[str, nn.Parameter, torch.Tensor]]:
    own = dict(layer.get_base_layer().named_parameters())
    with _borrowed(layer):
        for tuner in layer.modules():  # several where one parameter's adapter wraps another's
            if isinstance(tuner, BaseTunerLayer):
                tuner.merge(safe_merge=True)  # out of place; refuses what is not finite
        # Asked anew: layer norm tuning puts another module in the base layer's place.
        values = {name: p.data for name, p in layer.get_base_layer().named_parameters()}
    return [(prefix + name, p, _like(p, values[name])) for name, p in own.items()]


def _like(p: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """TRL asks FSDP2's parameters for their whole, so the merged values must be able to answer."""
    if not isinstance(p, DTensor):
        return values
    return DTensor.from_local(values, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)


@contextmanager
def _borrowed(layer: nn.Module) -> Iterator[None]:
    """Within, the layer's parameters are whole; what becomes of them, their attributes and modules is taken back."""
    modules = [(module, dict(module._parameters), dict(module._modules)) for module in layer.modules()]
    contents = [(p, p.data, dict(vars(p))) for p in layer.parameters()]
    try:
        for module, parameters, _ in modules:
            for name, p in parameters.items():
                if p is not None and not is_replicated(p):
                    module._parameters[name] = nn.Parameter(whole(p, p.dtype), requires_grad=False)
        yield
    finally:
        for module, parameters, children in modules:
            module._parameters.update(parameters)
            module._modules.update(children)
            if isinstance(module, BaseTunerLayer):
                module.merged_adapters.clear()
        for p, data, attributes in contents:
            p.data = data
            vars(p).clear()  # bitsandbytes' weights note there whether they are quantized
            vars(p).update(attributes)
