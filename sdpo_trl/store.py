"""Other values for the tensors that train: one LoRA adapter's worth with PEFT, one model's worth in full fine-tuning.

For a teacher's pass they take the place of the student's values inside the very same modules, whatever those are
(LoRA, DoRA, biases, `modules_to_save`, tied heads), and the student's come back afterwards. No second model or adapter
exists, so none can reach the optimizer, a weight sync, an export, or a PEFT flag.

Knows: names, files, precision. Deliberately does not know: what a teacher is, how parameters are sharded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from .shards import collective_device, is_replicated, layout_of, rest, settle, whole_shape


class WeightStore:
    """
    Other values for the tensors of `model` that train, equal to the student's when they are taken.

    Where parameters are sharded, each process holds its own part of every tensor, and all methods are collectives.

    Args:
        model (`torch.nn.Module`): The student, before it is wrapped.
        high_precision (`bool`): Keep the values in float32 or better, for averages (half precision would stall).
        offload (`bool`): Keep them in host memory; each teacher's pass and each move then reads them from there.
        deferred (`bool`): Take them at the first use, when the model has been wrapped, instead of now: a process
            whose parameters will be sharded never holds a second whole model.

    Raises:
        `ValueError`: nothing in the model trains.
    """

    def __init__(
        self, model: nn.Module, *, high_precision: bool = False, offload: bool = False, deferred: bool = False
    ) -> None:
        self._model = model
        self._high_precision = high_precision
        self._offload = offload
        self._values: dict[str, torch.Tensor] = {}
        self._names = [_bare(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not self._names:
            raise ValueError("Nothing in the model trains, so there is nothing a teacher could hold.")
        if not deferred:
            self._pairs()

    def _parameters(self) -> dict[str, nn.Parameter]:
        """The student's, in their parts."""
        rest(self._model)
        named = {_bare(name): parameter for name, parameter in self._model.named_parameters()}
        return {name: named[name] for name in self._names}

    def _kept(self, part: torch.Tensor) -> torch.Tensor:
        """A copy of a process's part, in the precision and the memory in which it is kept."""
        dtype = torch.promote_types(part.dtype, torch.float32) if self._high_precision else part.dtype
        return part.to("cpu" if self._offload else part.device, dtype, copy=True)

    def _pairs(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        parameters = self._parameters()
        if not self._values:
            for name, parameter in parameters.items():
                self._values[name] = self._kept(layout_of(parameter).part(parameter))
        for name, value in self._values.items():
            parameter = parameters[name]
            part = layout_of(parameter).part(parameter)
            if value.shape != part.shape:  # the model was sharded after the store was made
                value = layout_of(parameter).cut(parameter, value)
            if value.device != part.device and not self._offload:  # it was moved
                value = value.to(part.device)
            self._values[name] = value
        return [(parameters[name], value) for name, value in self._values.items()]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the student's modules compute with the stored values; its own are back afterwards, untouched."""
        pairs = self._pairs()
        back: list[Callable[[], None]] = []
        try:
            for parameter, value in pairs:
                back.append(layout_of(parameter).lend(parameter, value))
            settle(parameter for parameter, _ in pairs)
            yield
        finally:
            rest(self._model)  # nothing that was gathered from the teacher stays
            for bring_back in back:
                bring_back()
            settle(parameter for parameter, _ in pairs)

    @torch.no_grad()
    def move(self, rate: float) -> None:
        """`t <- (1 - rate) t + rate s` for every tensor; `rate = 1` copies the student exactly."""
        for parameter, value in self._pairs():  # one after the other: no second copy of the model at any time
            value.lerp_(layout_of(parameter).part(parameter).to(value.device, value.dtype), rate)

    def copied(self) -> dict[str, torch.Tensor]:
        """A copy of this process's part of every tensor, for [`WeightStore.put_back`]."""
        self._pairs()
        return {name: value.clone() for name, value in self._values.items()}

    def put_back(self, values: dict[str, torch.Tensor]) -> None:
        """Take the values as they were copied, bit for bit."""
        self._values = {name: value.clone() for name, value in values.items()}

    @torch.no_grad()
    def distance(self) -> float:
        """`||t - s||_2` over all stored tensors, each whole."""
        norms, shares = [], []
        for parameter, value in self._pairs():
            part = layout_of(parameter).part(parameter)
            norms.append(torch.linalg.vector_norm(value - part.to(value.device)).float().cpu())
            shares.append(1 / layout_of(parameter).holders(parameter))
        if all(is_replicated(parameter) for parameter in self._parameters().values()):
            return torch.stack(norms).norm().item()
        square = (torch.stack(norms).double().square() * torch.tensor(shares)).sum().to(collective_device())
        dist.all_reduce(square)
        return square.sqrt().item()

    @torch.no_grad()
    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each name with its whole tensor, one after the other; a collective where parameters are sharded."""
        for (parameter, value), name in zip(self._pairs(), list(self._values), strict=True):
            yield name, layout_of(parameter).join(parameter, value)

    def save(self, path: Path, *, writes: bool = True) -> None:
        """
        Write the whole tensors to one safetensors file, complete or not at all.

        Args:
            path (`Path`): The file.
            writes (`bool`): Whether this process writes; the others help to gather.
        """
        tensors = {}
        for name, value in self.whole():
            if writes:
                tensors[name] = value.contiguous().cpu()
        if writes:
            partial = path.with_suffix(".partial")
            save_file(tensors, partial)
            partial.replace(path)

    def load(self, path: Path) -> None:
        """
        Read the values back, under any number of processes and any sharding.

        Raises:
            `FileNotFoundError`: the checkpoint has no such file.
            `ValueError`: the file holds other tensors than the model trains now.
        """
        if not path.is_file():
            raise FileNotFoundError(
                f"The checkpoint lacks {path.name}, so it was written without this teacher (another "
                "`teacher_model_kind`, `save_only_model=True`, or another trainer). Resume with the settings it was "
                "written with, or start a "
                f"new run from its weights by passing {str(path.parent)!r} as the model."
            )
        parameters = self._parameters()
        with safe_open(path, framework="pt") as file:
            differing = sorted(set(file.keys()) ^ parameters.keys())
            differing = differing or [
                name for name, parameter in parameters.items()
                if list(whole_shape(parameter)) != file.get_slice(name).get_shape()
            ]  # fmt: skip
            if differing:
                raise ValueError(
                    f"{path} holds other tensors than the model trains now, first {differing[0]!r}. Resume with the "
                    "model and adapter settings that wrote the checkpoint."
                )
            for name, parameter in parameters.items():  # one after the other: never the whole model
                part = layout_of(parameter).cut(parameter, file.get_tensor(name))
                if name in self._values:
                    part = part.to(self._values[name].dtype)
                self._values[name] = self._kept(part.to(layout_of(parameter).part(parameter).device))


def _bare(name: str) -> str:
    """A parameter's name without what activation checkpointing and compilation put into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
