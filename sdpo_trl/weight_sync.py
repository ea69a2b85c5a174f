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
        `ValueError`: prompt learning, or an adapter on one of two tied modules.
    """
    config = model.active_peft_config
    if config.is_prompt_learning:
        raise ValueError(
            f"`use_vllm=True` sends the adapter merged into weights, and {config.peft_type.value} has none to merge. "
            "Use LoRA, or generate without vLLM."
        )
    users: dict[int, list[tuple[str, bool]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer):
            for p in module.get_base_layer().parameters():
                users.setdefault(id(p), []).append((name, True))
        for p in module.parameters(recurse=False):
            users.setdefault(id(p), []).append((name, False))
    for entries in users.values():
        adapted = [name for name, own in entries if own]
        plain = [name for name, own in entries if not own and not name.startswith(tuple(f"{a}." for a in adapted))]
        if adapted and plain:
            raise ValueError(
                f"The adapter changes {adapted[0]!r}, whose weight is also that of {plain[0]!r} (tied embeddings), so "
                "vLLM, which has one weight for both, could not be sent the student. Take it out of `target_modules`, "
                "use `trainable_token_indices`, or load the model with `tie_word_embeddings=False`."
            )


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
        active = [name for name in module.active_adapters if name in module.modules_to_save]
        yield from _walk(module.modules_to_save[active[0]] if active else module.original_module, prefix)
    else:
        yield from ((prefix + name, p, p) for name, p in module._parameters.items() if p is not None)
        for name, child in module.named_children():
            yield from _walk(child, f"{prefix}{name}.")


def _merged(layer: BaseTunerLayer, prefix: str) -> list[tuple[str, nn.Parameter, torch.Tensor]]:
    base = layer.get_base_layer()
    own = dict(base.named_parameters())
    with _borrowed(layer):
        for tuner in layer.modules():  # several where one parameter's adapter wraps another's
            if isinstance(tuner, BaseTunerLayer):
                tuner.merge(safe_merge=True)  # out of place; refuses what is not finite
        values = {name: p.data for name, p in base.named_parameters()}
    return [(prefix + name, p, _like(p, values[name])) for name, p in own.items()]


def _like(p: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """TRL asks FSDP2's parameters for their whole, so the merged values must be able to answer."""
    if not isinstance(p, DTensor):
        return values
    return DTensor.from_local(values, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)


@contextmanager
def _borrowed(layer: nn.Module) -> Iterator[None]:
    """Within, the layer's parameters are whole, and whatever becomes of them and their attributes is taken back."""
    modules = [(module, dict(module._parameters)) for module in layer.modules()]
    contents = [(p, p.data, dict(vars(p))) for p in layer.parameters()]
    try:
        for module, parameters in modules:
            for name, p in parameters.items():
                if p is not None and not is_replicated(p):
                    module._parameters[name] = nn.Parameter(whole(p, p.dtype), requires_grad=False)
        yield
    finally:
        for module, parameters in modules:
            module._parameters.update(parameters)
            if isinstance(module, BaseTunerLayer):
                module.merged_adapters.clear()
        for p, data, attributes in contents:
            p.data = data
            vars(p).clear()  # bitsandbytes' weights note there whether they are quantized
            vars(p).update(attributes)
