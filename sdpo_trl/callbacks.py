"""What happens between two optimizer steps: the teacher moves, and a run that cannot learn says so once."""

from collections.abc import Callable

from transformers import TrainerCallback

from .teacher import Teacher


class TeacherUpdateCallback(TrainerCallback):
    """
    Moves the teacher after the optimizer step, before a checkpoint is written.

    Args:
        teacher ([`Teacher`]): Decides whether it is time.
        finished_batches (`Callable`): How many rollout batches have been trained on so far.
    """

    def __init__(self, teacher: Teacher, finished_batches: Callable[[], int]) -> None:
        self._teacher = teacher
        self._finished_batches = finished_batches
        self._seen = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._seen = self._finished_batches()

    def on_step_end(self, args, state, control, **kwargs):
        finished = self._finished_batches()
        self._teacher.step_finished(state.global_step, batch_finished=finished > self._seen)
        self._seen = finished


class HealthMonitor:
    """
    Counts degenerate rollout batches in a row and says, in plain words, what is wrong and what to do.

    Args:
        interval (`int`): Batches in a row before a warning, and between two of them; 0 disables.
        tolerance (`float`): What counts as zero.
    """

    MESSAGES = {  # noqa: RUF012 - a constant
        "no_feedback": (
            "no rollout succeeded or had feedback, so there was nothing to distil. Lower `success_reward_threshold`, "
            "give feedback (`log_extra('feedback', ...)`, `feedback_func`, a `privileged_context` column), or start "
            "with easier prompts."
        ),
        "truncated": (
            "nearly all answers were cut at `max_completion_length`. Raise it, or ask for shorter answers; "
            "`mask_truncated_completions=True` keeps them out of the loss."
        ),
        "flat_teacher": (
            "the teacher predicted the sampled tokens exactly as the student does, so its prompt taught it nothing. "
            "Look at the `teacher_prompt` column (`log_completions=True`): is the feedback there, and does the model "
            "use it when asked directly?"
        ),
    }

    def __init__(self, interval: int, tolerance: float) -> None:
        self._interval = interval
        self._tolerance = tolerance
        self._streaks = dict.fromkeys(self.MESSAGES, 0)

    def observe(self, distilled_share: float, truncated_share: float, divergence: float | None) -> list[str]:
        """
        Note one rollout batch.

        Args:
            distilled_share (`float`): Share of rollouts that have any feedback, in `[0, 1]`.
            truncated_share (`float`): Share of answers without an end token, in `[0, 1]`.
            divergence (`float`, *optional*): Mean over the tokens scored since the last batch, `None` if none was.

        Returns:
            `list[str]`: the warnings that are due now.
        """
        degenerate = {
            "no_feedback": distilled_share <= self._tolerance,
            "truncated": truncated_share >= 0.95,
            "flat_teacher": divergence is not None and abs(divergence) <= self._tolerance,
        }
        due = []
        for name, bad in degenerate.items():
            self._streaks[name] = self._streaks[name] + 1 if bad else 0
            if self._interval and bad and self._streaks[name] % self._interval == 0:
                due.append(f"SDPO: for {self._streaks[name]} rollout batches in a row {self.MESSAGES[name]}")
        return due
