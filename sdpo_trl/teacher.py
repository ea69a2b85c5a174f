"""Whose weights the teacher has, and how they move.

A store holds other values for the tensors that train, nothing else: one LoRA adapter's worth with PEFT, one model's
worth in full fine-tuning. For a teacher's pass they take the place of the student's values inside the very same
modules, whatever those are (LoRA, DoRA, biases, `modules_to_save`, tied heads), and the student's come back
afterwards. No second model or adapter exists, so none can reach the optimizer, a weight sync, an export, or a PEFT
flag.

Knows: modules and tensors. Deliberately does not know: prompts, losses, trainers, how parameters are sharded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from .heads import MixedHead, TokenHead
from .shards import collective_device, is_replicated, layout_of, rest, settle, whole_shape

Run = Callable[[nn.Module], TokenHead]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No gradient and no dropout within; each module's own mode is restored, also after an exception."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


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


class Teacher:
    """
    A model as it is now: the student (`live`), or an external model; and what all kinds share.

    Args:
        model (`torch.nn.Module`): The model as TRL runs it outside the training graph.
        lives (`bool`): Whether the model is the student, which moves with each optimizer step.

    `version` counts the moves of the weights: what was computed under another version is of another teacher.
    """

    store: WeightStore | None = None
    version: int = 0

    def __init__(self, model: nn.Module, *, lives: bool) -> None:
        self._model = model
        self._lives = lives

    def head(self, run: Run) -> "TokenHead | MixedHead":
        """
        Score with the teacher's weights.

        Args:
            run (`Callable`): Runs a model on the teacher's rows and returns the head over the scored tokens.
        """
        with evaluation_mode(self._model):
            return run(self._model).detach()

    def step_finished(self, global_step: int, batch_finished: bool) -> None:
        """Called after each optimizer step; moves the weights if it is time."""
        self.version += self._lives

    def rests_within(self, batch: int, step: int) -> bool:
        """
        Whether the weights are expected to stay the same while one rollout batch is trained on.

        Args:
            batch (`int`): Micro-batches that one rollout batch is trained on.
            step (`int`): Micro-batches per optimizer step.
        """
        return not self._lives or step % batch == 0


class StoredTeacher(Teacher):
    """
    A teacher with weights of its own: `base`, `ema` and `snapshot`.

    Args:
        student (`torch.nn.Module`): Supplies the modules.
        store ([`WeightStore`]): Supplies the weights.
        rate (`float`): Share of the student at each move; 0 never moves.
        every (`int`, *optional*): Optimizer steps between two moves; `None` moves once per rollout batch.
    """

    def __init__(self, student: nn.Module, store: WeightStore, rate: float = 0.0, every: int | None = None) -> None:
        super().__init__(student, lives=False)
        self.store = store
        self._rate = rate
        self._every = every

    def head(self, run: Run) -> TokenHead:
        """See [`Teacher.head`]."""
        with self.store.applied():
            return super().head(run)

    def step_finished(self, global_step: int, batch_finished: bool) -> None:
        """See [`Teacher.step_finished`]."""
        due = batch_finished if self._every is None else global_step % self._every == 0
        if due and self._rate > 0.0:
            self.store.move(self._rate)
            self.version += 1

    def rests_within(self, batch: int, step: int) -> bool:
        """See [`Teacher.rests_within`]."""
        if self._rate == 0.0 or step % batch == 0:
            return True
        return batch % step == 0 and (self._every is None or self._every % (batch // step) == 0)


class TrustRegionTeacher(StoredTeacher):
    """
    Logits `(1 - mix) * base + mix * live`, both reading the feedback (paper, section 3.3).

    Args:
        student (`torch.nn.Module`): The live part.
        store ([`WeightStore`]): The student at the start.
        mix (`float`): In `[0, 1]`.
    """

    def __init__(self, student: nn.Module, store: WeightStore, mix: float) -> None:
        super().__init__(student, store)
        self._mix = mix

    def head(self, run: Run) -> MixedHead:
        """See [`Teacher.head`]."""
        return MixedHead(super().head(run), Teacher.head(self, run), self._mix)


def build_teacher(
    model: nn.Module, args: Any, stores: dict[str, WeightStore], make_store: Callable[..., WeightStore]
) -> Teacher:
    """
    The self-teacher that `args.teacher_model_kind` names; at this moment it equals the student exactly.

    Args:
        model (`torch.nn.Module`): The student, before it is wrapped.
        args ([`SDPOConfig`]): Kind, rate, cadence and mix.
        stores (`dict[str, WeightStore]`): Holds `"initial_policy"` for the kinds that need it; a store of the
            teacher's own is added under `"teacher"`.
        make_store (`Callable`): [`WeightStore`] with where and when it keeps values already decided.
    """
    kind = args.teacher_model_kind
    if kind == "live":
        return Teacher(model, lives=True)
    if kind == "trust_region":
        return TrustRegionTeacher(model, stores["initial_policy"], args.teacher_mix)
    if kind == "base":
        return StoredTeacher(model, stores["initial_policy"])
    stores["teacher"] = make_store(model, high_precision=kind == "ema")
    rate = args.teacher_update_rate if kind == "ema" else 1.0
    return StoredTeacher(model, stores["teacher"], rate, args.teacher_sync_steps)
