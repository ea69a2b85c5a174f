"""What happens between two optimizer steps: the teacher moves. And what may look on while one is made."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from .divergence import DivergenceSpec
from .heads import MixedHead, TokenHead
from .rollouts import Rollouts
from .run_state import RunningMean
from .teacher import Teacher
from .timing import StepClock


class PromptOrderCallback(TrainerCallback):
    """
    Tells the sampler of the prompts which epoch begins.

    `Trainer` does so too, but on several processes it does not reach the sampler behind the batches that a resumed
    run skips.
    """

    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        if hasattr(train_dataloader, "set_epoch"):  # not before Accelerate has wrapped it
            train_dataloader.set_epoch(int((state.epoch or 0.0) + 1e-6))


class RolloutWatcher(TrainerCallback):
    """
    A callback that [`SDPOTrainer`] also shows what it trains on, on every process; it looks and changes nothing.

    It must not communicate with other processes, nor draw random numbers.
    """

    def batch_made(self, trainer: Any, rollouts: Rollouts, output: dict[str, Any]) -> None:
        """
        A rollout batch was made, and will be shuffled and split.

        Args:
            trainer ([`SDPOTrainer`]): Whose batch.
            rollouts ([`Rollouts`]): This process' rows (and the rewards of all), in the order of `output`.
            output (`dict`): The batch. Row-aligned tensors that are added to it come back in `inputs`.
        """

    def tokens_scored(
        self,
        inputs: dict[str, Any],
        active: torch.Tensor,
        student: TokenHead,
        teacher: "TokenHead | MixedHead",
        spec: DivergenceSpec,
    ) -> None:
        """
        A micro-batch was scored, inside of the student's forward, where its weights are whole.

        Args:
            inputs (`dict`): The micro-batch.
            active (`torch.Tensor`): bool of shape `(B, T)`, the `n` distilled tokens.
            student ([`TokenHead`]): Hidden states of shape `(B, L, H)`, see [`~sdpo_trl.heads.predicting`].
            teacher ([`TokenHead`] or [`MixedHead`]): Hidden states of shape `(n, H)`.
            spec ([`DivergenceSpec`]): What was computed per token.
        """


class TeacherUpdateCallback(TrainerCallback):
    """
    Moves the teacher after the optimizer step, before a checkpoint is written.

    Args:
        teacher ([`Teacher`]): Decides whether it is time.
        finished_batches (`Callable`): How many rollout batches have been trained on so far.
        gap_size ([`RunningMean`]): Is told that a step ended.
        clock ([`StepClock`]): Is told how long the move takes.
    """

    def __init__(
        self, teacher: Teacher, finished_batches: Callable[[], int], gap_size: RunningMean, clock: StepClock
    ) -> None:
        self._teacher = teacher
        self._clock = clock
        self._gap_size = gap_size
        self._finished_batches = finished_batches
        self._seen = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._seen = self._finished_batches()

    def on_step_end(self, args, state, control, **kwargs):
        finished = self._finished_batches()
        with self._clock.part("teacher_update"):
            self._teacher.step_finished(state.global_step, batch_finished=finished > self._seen)
        self._seen = finished
        self._gap_size.step_finished()
