"""A trainer as it was before an update, to be brought back bit for bit.

Knows: what an optimizer step of [`OnlineTrainer`] changes. Deliberately does not know: conversations, journals.
"""

import copy
from typing import Any

import torch

from ..callbacks import TeacherUpdateCallback

# What `Trainer`, TRL and the layers of SDPOTrainer count from step to step.
_COUNTERS = (
    "_step", "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos", "_broken_steps",
    "_current_train_step_time", "_used_weight", "entropy_coef", "_last_world_entropy",
)  # fmt: skip


class Snapshot:
    """
    Weights, optimizer, schedule, gradient scaler, the teacher's values, counters and memories at one moment.

    Args:
        trainer ([`OnlineTrainer`]): Between two updates.
    """

    def __init__(self, trainer: Any) -> None:
        self._weights = {
            name: parameter.detach().clone()
            for name, parameter in trainer.model.named_parameters()
            if parameter.requires_grad
        }
        self._optimizer = copy.deepcopy(trainer.optimizer.state_dict())
        self._schedule = copy.deepcopy(trainer.lr_scheduler.state_dict())
        scaler = trainer.accelerator.scaler
        self._scaler = None if scaler is None else copy.deepcopy(scaler.state_dict())
        self._stores = {name: store.copied() for name, store in trainer._stores.items()}
        self._memories = {name: copy.deepcopy(part.state()) for name, part in trainer._remembers.items()}
        self._gap_size = copy.deepcopy(trainer._gap_size)
        # The entropy's are there with an adaptive bonus alone.
        self._counters = {name: copy.deepcopy(getattr(trainer, name)) for name in _COUNTERS if hasattr(trainer, name)}
        self._state = copy.deepcopy(trainer.state)

    @torch.no_grad()
    def restore(self, trainer: Any) -> None:
        """Bring it all back; the snapshot may be restored again later."""
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(self._weights[name])
        trainer.model.zero_grad(set_to_none=True)
        trainer.optimizer.load_state_dict(copy.deepcopy(self._optimizer))
        trainer.lr_scheduler.load_state_dict(copy.deepcopy(self._schedule))
        if self._scaler is not None:
            trainer.accelerator.scaler.load_state_dict(copy.deepcopy(self._scaler))
        for name, values in self._stores.items():
            trainer._stores[name].put_back(values)
        trainer._teacher.version += 1  # what was computed with the weights that go is of another teacher
        for name, state in self._memories.items():
            trainer._remembers[name].restore(copy.deepcopy(state))
        vars(trainer._gap_size).update(copy.deepcopy(vars(self._gap_size)))
        for name, value in self._counters.items():
            setattr(trainer, name, copy.deepcopy(value))
        trainer.state = copy.deepcopy(self._state)
        trainer._buffered_inputs = None
        trainer._metrics["train"].clear()
        trainer._sums.flush("train", "eval")
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TeacherUpdateCallback):
                callback.on_train_begin(trainer.args, trainer.state, trainer.control)
