"""A run that cannot learn, or is about to break, says so in plain words, with what to do.

Knows: shares, means, thresholds. Deliberately does not know: models, trainers, loggers.
"""

from dataclasses import dataclass

_MESSAGES = {
    "no_feedback": (
        "no rollout succeeded or had feedback, so there was nothing to distil. Lower `success_reward_threshold`, "
        "give feedback (`log_extra('feedback', ...)`, `feedback_func`, a `privileged_context` column), keep successes "
        "across steps (`success_buffer_size`), or start with easier prompts."
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
    "exploding_gap": (
        "the divergence from the teacher was more than five times what it used to be: student and teacher are "
        "drifting apart. Bound it (`distillation_log_ratio_clip=5.0`, `teacher_proximal_share=0.9`), lower the "
        "learning rate, or take a teacher that follows (`teacher_model_kind='ema'`)."
    ),
    "falling_entropy": (
        "the student's entropy was less than half of its usual value: answers are becoming all alike. Lower the "
        "learning rate, add an anchor (`beta`), weigh tokens (`token_weighting='teacher_entropy'`), or distil "
        "failures alone (`distillation_routing='failed'`)."
    ),
    "falling_length": (
        "answers were less than half as long as they used to be. If they also get worse, the model stops thinking: "
        "add an anchor (`beta`), or leave the solution out of the hints "
        "(`use_successful_as_teacher=False`)."
    ),
    "no_gradient": (
        "the gradient was almost zero although student and teacher disagree. Does anything that trains take part in "
        "the answer (frozen layers, an inactive adapter, fp16 underflow)?"
    ),
}
_TEACHER_FALLING = (
    "SDPO: the self-teacher answers {now:.0%} of the prompts right with feedback in its context, after {best:.0%} at "
    "its best: the model is losing the ability that it is taught with. Use a teacher that does not move "
    "(`teacher_model_kind='base'`), an anchor (`beta`), or let the weight decay (`distillation_weight_schedule`)."
)


@dataclass(frozen=True)
class BatchHealth:
    """
    What one rollout batch looked like, over all processes.

    Args:
        success_share (`float`): Share of rollouts that passed, in `[0, 1]`.
        distilled_share (`float`): Share of rollouts that are distilled, in `[0, 1]`.
        truncated_share (`float`): Share of answers without an end token, in `[0, 1]`.
        length (`float`): Mean tokens of an answer.
        divergence (`float`, *optional*): Mean over the tokens scored since the last batch, `None` if none was.
        entropy (`float`, *optional*): The student's, likewise.
    """

    success_share: float
    distilled_share: float
    truncated_share: float
    length: float
    divergence: float | None
    entropy: float | None


class _Usual:
    """A slow mean of a positive quantity: what it used to be. What is far from it does not enter it."""

    def __init__(self, batches: int, low: float, high: float) -> None:
        self._batches = max(batches, 1)
        self._low, self._high = low, high
        self._mean = 0.0
        self._seen = 0

    def left_by(self, value: float | None) -> bool:
        """Whether `value` is below `low` or above `high` times its usual; if not, it is noted."""
        if value is None:
            return False
        known = self._seen >= self._batches and self._mean > 0
        if known and not self._low * self._mean <= value <= self._high * self._mean:
            return True
        self._seen += 1
        self._mean += (value - self._mean) / min(self._seen, 5 * self._batches)
        return False


class HealthMonitor:
    """
    Counts degenerate rollout batches (and optimizer steps) in a row.

    Args:
        interval (`int`): In a row before a warning, and between two of them; 0 disables.
        tolerance (`float`): What counts as zero.
    """

    def __init__(self, interval: int, tolerance: float) -> None:
        self._interval = interval
        self._tolerance = tolerance
        self._streaks = dict.fromkeys(_MESSAGES, 0)
        self._divergence = _Usual(interval, 0.0, 5.0)
        self._entropy = _Usual(interval, 0.5, float("inf"))
        self._length = _Usual(interval, 0.5, float("inf"))
        self._best_teacher: float | None = None

    def observe(self, batch: BatchHealth) -> list[str]:
        """Note one rollout batch; the warnings that are due now."""
        exploding = self._divergence.left_by(batch.divergence)
        flat = batch.divergence is not None and abs(batch.divergence) <= self._tolerance
        return self._due({
            "no_feedback": batch.distilled_share + batch.success_share <= self._tolerance,
            "truncated": batch.truncated_share >= 0.95,
            "flat_teacher": flat,
            "exploding_gap": exploding and batch.divergence > 0.1,
            "falling_entropy": self._entropy.left_by(batch.entropy),
            "falling_length": self._length.left_by(batch.length),
        })  # fmt: skip

    def observe_gradient(self, norm: float, divergence: float) -> list[str]:
        """Note one logged optimizer step: the norm of its gradient and the mean divergence."""
        return self._due({"no_gradient": norm <= self._tolerance and divergence > 1e-4})

    def observe_teacher(self, success: float) -> list[str]:
        """Note one evaluation of the self-teacher: the share of its answers that passed, in `[0, 1]`."""
        best = success if self._best_teacher is None else max(self._best_teacher, success)
        self._best_teacher = best
        fell = self._interval > 0 and best - success > max(0.1, 0.2 * best)
        return [_TEACHER_FALLING.format(now=success, best=best)] if fell else []

    def _due(self, degenerate: dict[str, bool]) -> list[str]:
        due = []
        for name, bad in degenerate.items():
            self._streaks[name] = self._streaks[name] + 1 if bad else 0
            if self._interval and bad and self._streaks[name] % self._interval == 0:
                what = "logged steps" if name == "no_gradient" else "rollout batches"
                due.append(f"SDPO: for {self._streaks[name]} {what} in a row {_MESSAGES[name]}")
        return due
