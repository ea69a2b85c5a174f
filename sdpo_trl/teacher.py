"""Whose weights the teacher has, and how they move.

A store holds other values for the tensors that train, nothing else: one LoRA adapter's worth with PEFT, one model's
worth in full fine-tuning. For a teacher's pass they take the place of the student's values inside the very same
modules, whatever those are (LoRA, DoRA, biases, `modules_to_save`, tied heads), and the student's come back
afterwards. No second model or adapter exists, so none can reach the optimizer, a weight sync, an export, or a PEFT
flag.

Knows: modules and tensors. Deliberately does not know: prompts, losses, trainers.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from .heads import MixedHead, TokenHead

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
    Other values for the tensors of `model` that train, equal to the student's when it is made.

    Args:
        model (`torch.nn.Module`): The student, before it is wrapped.
        high_precision (`bool`): Keep the values in float32 or better, for averages (half precision would stall).

    Raises:
        `ValueError`: nothing in the model trains.
    """

    def __init__(self, model: nn.Module, *, high_precision: bool = False) -> None:
        self._model = model
        self._values: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                value = parameter.detach()
                dtype = torch.promote_types(value.dtype, torch.float32) if high_precision else value.dtype
                self._values[name] = value.to(dtype, copy=True)
        if not self._values:
            raise ValueError("Nothing in the model trains, so there is nothing a teacher could hold.")

    def _pairs(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        parameters = dict(self._model.named_parameters())
        for name, value in self._values.items():
            if value.device != parameters[name].device:  # the model was moved after the store was made
                self._values[name] = value.to(parameters[name].device)
        return [(parameters[name], value) for name, value in self._values.items()]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the student's modules compute with the stored values; its own are back afterwards, untouched."""
        pairs = self._pairs()
        own = [parameter.data for parameter, _ in pairs]
        try:
            for parameter, value in pairs:
                parameter.data = value.to(parameter.dtype)
            yield
        finally:
            for (parameter, _), data in zip(pairs, own, strict=True):
                parameter.data = data

    @torch.no_grad()
    def move(self, rate: float) -> None:
        """`t <- (1 - rate) t + rate s` for every tensor; `rate = 1` copies the student exactly."""
        for parameter, value in self._pairs():  # one after the other: no second copy of the model at any time
            value.lerp_(parameter.detach().to(value.dtype), rate)

    @torch.no_grad()
    def distance(self) -> float:
        """`||t - s||_2` over all stored tensors."""
        norms = [torch.linalg.vector_norm(value - parameter.detach()) for parameter, value in self._pairs()]
        return torch.stack([norm.float().cpu() for norm in norms]).norm().item()

    def save(self, path: Path) -> None:
        """Write the values to one safetensors file, complete or not at all."""
        partial = path.with_suffix(".partial")
        save_file({name: value.contiguous() for name, value in self._values.items()}, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """
        Read the values back.

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
        saved = load_file(path)
        differing = sorted(saved.keys() ^ self._values.keys())
        if differing:
            raise ValueError(
                f"{path} holds other tensors than the model trains now, first {differing[0]!r}. Resume with the model "
                "and adapter settings that wrote the checkpoint."
            )
        for name, value in self._values.items():
            value.copy_(saved[name])


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

    def speaks(self) -> AbstractContextManager[None]:
        """
        Within the context, the student's modules answer with the teacher's weights (of a trust region, with those it
        is anchored to). Not for an external teacher.
        """
        return nullcontext()

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
        gate (`Callable`, *optional*): Asked at each due move whether it may happen.
    """

    def __init__(
        self,
        student: nn.Module,
        store: WeightStore,
        rate: float = 0.0,
        every: int | None = None,
        gate: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(student, lives=False)
        self.store = store
        self._rate = rate
        self._every = every
        self._gate = gate

    def head(self, run: Run) -> TokenHead:
        """See [`Teacher.head`]."""
        with self.store.applied():
            return super().head(run)

    def speaks(self) -> AbstractContextManager[None]:
        """See [`Teacher.speaks`]."""
        return self.store.applied()

    def step_finished(self, global_step: int, batch_finished: bool) -> None:
        """See [`Teacher.step_finished`]."""
        due = batch_finished if self._every is None else global_step % self._every == 0
        if due and self._rate > 0.0 and (self._gate is None or self._gate()):
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
    model: nn.Module, args: Any, stores: dict[str, WeightStore], gate: Callable[[], bool] | None = None
) -> Teacher:
    """
    The self-teacher that `args.teacher_model_kind` names; at this moment it equals the student exactly.

    Args:
        model (`torch.nn.Module`): The student, before it is wrapped.
        args ([`SDPOConfig`]): Kind, rate, cadence and mix.
        stores (`dict[str, WeightStore]`): Holds `"initial_policy"` for the kinds that need it; a store of the
            teacher's own is added under `"teacher"`.
        gate (`Callable`, *optional*): Of a snapshot, see [`StoredTeacher`].
    """
    kind = args.teacher_model_kind
    if kind == "live":
        return Teacher(model, lives=True)
    if kind == "trust_region":
        return TrustRegionTeacher(model, stores["initial_policy"], args.teacher_mix)
    if kind == "base":
        return StoredTeacher(model, stores["initial_policy"])
    stores["teacher"] = WeightStore(model, high_precision=kind == "ema")
    rate = args.teacher_update_rate if kind == "ema" else 1.0
    return StoredTeacher(model, stores["teacher"], rate, args.teacher_sync_steps, gate)
