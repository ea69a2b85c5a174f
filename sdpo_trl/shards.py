"""Where a parameter's values are when processes share a model, and how a teacher reads and writes its own part.

Three layouts: all of it on every process (one process, DDP, ZeRO-1 and 2), a `DTensor` (FSDP2), a flat partition
(ZeRO-3). Each process's part is read and written in place, so no process ever holds a second whole model.

Knows: FSDP2, ZeRO-3, collectives. Deliberately does not know: teachers, trainers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from trl.trainer.utils import maybe_gather_lm_head_ctx


class Layout(ABC):
    """How one parameter `p` lies over the processes. [`rest`] its model first, so that nothing gathered is in use."""

    @abstractmethod
    def shape(self, p: nn.Parameter) -> torch.Size:
        """Of the whole parameter."""

    @abstractmethod
    def part(self, p: nn.Parameter) -> torch.Tensor:
        """The values that this process holds, without a graph; shares the parameter's memory."""

    @abstractmethod
    def cut(self, p: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """This process's part of the whole, without communication."""

    @abstractmethod
    def join(self, p: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        """The whole, from every process's part: a collective."""

    @abstractmethod
    def holders(self, p: nn.Parameter) -> int:
        """How many processes hold the same part as this one."""

    @torch.no_grad()
    def lend(self, p: nn.Parameter, values: torch.Tensor) -> Callable[[], Any]:
        """Let the model compute with other values, shaped as [`part`]; what is returned brings its own ones back."""
        own = self.part(p).clone()
        self.part(p).copy_(values)
        return lambda: self.part(p).copy_(own)  # FSDP2 may have moved the part in between


class _Replicated(Layout):
    """Every process holds all of it, and the parameter may simply point at other memory."""

    def shape(self, p: nn.Parameter) -> torch.Size:
        return p.shape

    def part(self, p: nn.Parameter) -> torch.Tensor:
        return p.detach()

    def cut(self, p: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def join(self, p: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        return part

    def holders(self, p: nn.Parameter) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def lend(self, p: nn.Parameter, values: torch.Tensor) -> Callable[[], Any]:
        own = p.data
        p.data = values.to(p.device, p.dtype)
        return lambda: setattr(p, "data", own)


class _Sharded(Layout):
    """FSDP2: a `DTensor`; all-gathers read the memory of its local tensor."""

    def shape(self, p: DTensor) -> torch.Size:
        return p.shape

    def part(self, p: DTensor) -> torch.Tensor:
        return p.detach().to_local()

    def cut(self, p: DTensor, whole: torch.Tensor) -> torch.Tensor:
        whole = whole.to(p.device_mesh.device_type)
        return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local().clone()

    def join(self, p: DTensor, part: torch.Tensor) -> torch.Tensor:
        part = part.to(p.device_mesh.device_type)
        sharded = DTensor.from_local(
            part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
        whole = sharded.full_tensor()
        shares = whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()  # a mesh of one process
        return whole.clone() if shares else whole

    def holders(self, p: DTensor) -> int:
        sizes = [p.device_mesh.size(i) for i, placement in enumerate(p.placements) if not placement.is_replicate()]
        return dist.get_world_size() // int(torch.tensor(sizes).prod())


class _Partitioned(Layout):
    """ZeRO-3: `ds_tensor` holds this process's piece of the flattened parameter; the last pieces are padded."""

    def shape(self, p: nn.Parameter) -> torch.Size:
        return p.ds_shape

    def _range(self, p: nn.Parameter) -> slice:
        start = dist.get_rank(p.ds_process_group) * p.ds_tensor.ds_numel
        return slice(start, max(start, min(start + p.ds_tensor.ds_numel, p.ds_numel)))

    def part(self, p: nn.Parameter) -> torch.Tensor:
        own = self._range(p)
        return p.ds_tensor.detach()[: own.stop - own.start]

    def cut(self, p: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(-1)[self._range(p)].clone()

    def join(self, p: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        group = p.ds_process_group
        padded = torch.zeros(p.ds_tensor.ds_numel, dtype=part.dtype, device=collective_device(group))
        padded[: part.numel()] = part
        pieces = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, padded, group=group)
        return torch.cat(pieces)[: p.ds_numel].view(p.ds_shape)

    def holders(self, p: nn.Parameter) -> int:
        return dist.get_world_size() // dist.get_world_size(p.ds_process_group)


_REPLICATED, _SHARDED, _PARTITIONED = _Replicated(), _Sharded(), _Partitioned()


def layout_of(p: nn.Parameter) -> Layout:
    """The layout of a parameter of a model that [`rest`]s."""
    if isinstance(p, DTensor):
        return _SHARDED
    return _PARTITIONED if hasattr(p, "ds_id") else _REPLICATED


def is_replicated(p: nn.Parameter) -> bool:
    """Whether every process holds all of `p`."""
    return layout_of(p) is _REPLICATED


def rest(model: nn.Module) -> None:
    """
    Free whatever is gathered, so that each parameter is in its parts and the next forward gathers what they hold then.

    Not within a forward, nor between a forward and its backward.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    partitioned = [p for p in model.parameters() if layout_of(p) is _PARTITIONED]
    if partitioned:
        partitioned[0].partition(param_list=partitioned)


def settle(parameters: Iterable[nn.Parameter]) -> None:
    """Wait until what was written to parameters is there: ZeRO-3 gathers them on a stream of its own."""
    if torch.accelerator.is_available() and any(layout_of(p) is _PARTITIONED for p in parameters):
        torch.accelerator.current_stream().synchronize()


def collective_device(group: Any = None) -> torch.device:
    """Where the tensors of a collective must be."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator()


def whole(p: "nn.Parameter | None", dtype: torch.dtype) -> "torch.Tensor | None":
    """All values of a parameter of a model that [`rest`]s: itself if it is replicated, else a copy; a collective."""
    if p is None or is_replicated(p):
        return p
    layout = layout_of(p)
    return layout.join(p, layout.part(p).to(dtype))


def whole_shape(p: nn.Parameter) -> torch.Size:
    """The shape of all of it, also where ZeRO-3 shows an empty tensor."""
    return layout_of(p).shape(p)


@contextmanager
def gathered(module: nn.Module, model: nn.Module) -> Iterator[None]:
    """
    Within the forward of `model`, the weights of `module` are whole although its own forward is not called, and their
    gradients are reduced as every other's.
    """
    if isinstance(module, FSDPModule):
        module.unshard()  # kept for the backward, after which FSDP2 shards it again
    for p in (module.weight, module.bias):
        if p is not None and p.requires_grad and layout_of(p) is _PARTITIONED:
            import deepspeed

            deepspeed.zero.register_external_parameter(model, p)  # its gradient can only be added while it is whole
    with maybe_gather_lm_head_ctx(module.weight, module.bias):
        yield


def check_sharding(state: Any) -> None:
    """
    Refuse what could not be swapped for a teacher's values.

    Args:
        state (`accelerate.state.AcceleratorState`): Says how the model will be wrapped.

    Raises:
        `NotImplementedError`: FSDP1, or ZeRO-3 with parameters on NVMe, in secondary partitions, or quantized.
    """
    if state.distributed_type is DistributedType.FSDP and state.fsdp_plugin.fsdp_version != 2:
        raise NotImplementedError(
            "SDPO does not run under FSDP1, whose flat parameters mix trained and frozen values. Use FSDP2: "
            "`fsdp_version: 2`, see accelerate_configs/fsdp2.yaml."
        )
    if state.deepspeed_plugin is None or state.deepspeed_plugin.zero_stage != 3:
        return
    zero = state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    offload = zero.get("offload_param") or {}
    for name, used in (
        ("offload_param.device=nvme", offload.get("device") == "nvme"),
        ("zero_hpz_partition_size", zero.get("zero_hpz_partition_size", 1) > 1),
        ("zero_quantized_weights", zero.get("zero_quantized_weights", False)),
        ("zero_quantized_nontrainable_weights", zero.get("zero_quantized_nontrainable_weights", False)),
    ):
        if used:
            raise NotImplementedError(
                f"SDPO does not run with ZeRO-3's `{name}`: a teacher's values could not be put in place of the "
                "student's. Drop it (parameters may be offloaded to the CPU), or use FSDP2."
            )
