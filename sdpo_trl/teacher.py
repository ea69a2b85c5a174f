"""Whose weights the teacher has, and how they move.

A teacher with weights of its own has them in a [`WeightStore`]; no second model or adapter exists.

Knows: modules, stores. Deliberately does not know: prompts, losses, trainers, how parameters are sharded.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .heads import MixedHead, TokenHead
from .store import WeightStore

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


def keep_gradients(model: nn.Module) -> None:
    """
    On some CPUs bitsandbytes lays 4-bit weights out anew in the first forward in evaluation mode, which a teacher's
    pass is, and from then on no gradient passes through them. Here it is told that this CPU is not of that kind.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


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
    model: nn.Module,
    args: Any,
    stores: dict[str, WeightStore],
    make_store: Callable[..., WeightStore],
    gate: Callable[[], bool] | None = None,
) -> Teacher:
    """
    The self-teacher that `args.teacher_model_kind` names; at this moment it equals the student exactly.

    Args:
        model (`torch.nn.Module`): The student, before it is wrapped.
        args ([`SDPOConfig`]): Kind, rate, cadence and mix.
        stores (`dict[str, WeightStore]`): Holds `"initial_policy"` for the kinds that need it; a store of the
            teacher's own is added under `"teacher"`.
        make_store (`Callable`): [`WeightStore`] with where and when it keeps values already decided.
        gate (`Callable`, *optional*): Of a snapshot, see [`StoredTeacher`].
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
    return StoredTeacher(model, stores["teacher"], rate, args.teacher_sync_steps, gate)
