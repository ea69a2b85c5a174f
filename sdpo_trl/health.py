"""A run that cannot learn, or is about to break, says so in plain words, with what to do.

Knows: shares, means, thresholds. Deliberately does not know: models, trainers, loggers.
"""

import math
from dataclasses import dataclass
from typing import Any

_MESSAGES = {
    "no_feedback": (
        "no rollout succeeded or had feedback, so there was nothing to distil. Lower `success_reward_threshold`, "
        "give feedback (`log_extra('feedback', ...)`, `feedback_func`, a `privileged_context` column), keep successes "
        "across steps (`success_buffer_size`), or start with easier prompts."
    ),
    "nothing_distilled": (
        "there were successes or feedback, but no rollout was distilled and there is no policy term, so nothing was "
        "learned. A success that stands alone is not its own demonstration (`dont_reprompt_on_self_success=False`), "
        "and `distillation_routing` and `prompt_weighting` leave rollouts out; give the policy term a share "
        "(`distillation_weight=0.9`), or ask harder questions."
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
        "the student's entropy was less than half of its usual value, or a tenth of its highest, while answers fail: "
        "they are becoming all alike. Lower the "
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
        hinted_share (`float`): Share of rollouts whose teacher could be told something, in `[0, 1]`.
        distilled_share (`float`): Share of rollouts that are distilled, in `[0, 1]`.
        truncated_share (`float`): Share of answers without an end token, in `[0, 1]`.
        length (`float`): Mean tokens of an answer.
        divergence (`float`, *optional*): Mean over the tokens scored since the last batch, `None` if none was.
        entropy (`float`, *optional*): The student's, likewise.
    """

    success_share: float
    hinted_share: float
    distilled_share: float
    truncated_share: float
    length: float
    divergence: float | None
    entropy: float | None


class _Usual:
    """A slow mean of a positive quantity: what it used to be. What is suddenly far from it enters it late."""

    def __init__(self, batches: int, low: float, high: float) -> None:
        self._batches = max(batches, 1)
        self._low, self._high = low, high
        self.mean = self.highest = 0.0
        self._seen = self._outside = 0

    def left_by(self, value: float | None) -> bool:
        """Whether `value` is below `low` or above `high` times its usual; then note it."""
        if value is None or not math.isfinite(value):
            return False
        known = self._seen >= self._batches and self.mean > 0
        outside = known and not self._low * self.mean <= value <= self._high * self.mean
        self._outside = self._outside + 1 if outside else 0
        if self._outside <= self._batches:
            if outside:
                return True
            self._outside = 0
        self._seen += 1
        self.mean += (value - self.mean) / min(self._seen, 5 * self._batches)
        self.highest = max(self.highest, self.mean) if self._seen >= self._batches else 0.0
        return outside

    def state(self) -> list[float]:
        return [self.mean, self.highest, self._seen, self._outside]

    def restore(self, state: list[float]) -> None:
        self.mean, self.highest, self._seen, self._outside = state


class HealthMonitor:
    """
    Counts degenerate rollout batches (and optimizer steps) in a row; a checkpoint keeps what it knows.

    Args:
        interval (`int`): In a row before a warning, and between two of them; 0 disables.
        tolerance (`float`): What counts as zero.
        has_policy_term (`bool`): Whether rollouts that are not distilled teach all the same.
    """

    def __init__(self, interval: int, tolerance: float, has_policy_term: bool = False) -> None:
        self._interval = interval
        self._tolerance = tolerance
        self._has_policy_term = has_policy_term
        self._streaks = dict.fromkeys(_MESSAGES, 0)
        self._usual = {
            "divergence": _Usual(interval, 0.0, 5.0),
            "entropy": _Usual(interval, 0.5, math.inf),
            "length": _Usual(interval, 0.5, math.inf),
        }
        self._teachers: dict[str, list[float]] = {}  # by evaluation set: the best success, and evaluations far below

    def observe(self, batch: BatchHealth) -> list[str]:
        """Note one rollout batch; the warnings that are due now."""
        left = {name: usual.left_by(getattr(batch, name)) for name, usual in self._usual.items()}
        nothing = batch.hinted_share + batch.success_share <= self._tolerance
        idle = batch.distilled_share <= self._tolerance and not self._has_policy_term
        flat = batch.divergence is not None and abs(batch.divergence) <= self._tolerance
        gone = batch.entropy is not None and batch.entropy < 0.1 * self._usual["entropy"].highest
        return self._due({
            "no_feedback": nothing,
            "nothing_distilled": idle and not nothing,
            "truncated": batch.truncated_share >= 0.95,
            "flat_teacher": flat,
            "exploding_gap": left["divergence"] and batch.divergence > 0.1,
            "falling_entropy": (left["entropy"] or gone) and batch.success_share < 0.5,
            "falling_length": left["length"],
        })  # fmt: skip

    def observe_gradient(self, norm: float, gap_size: float) -> list[str]:
        """Note one logged optimizer step that descends the divergence: its gradient's norm, and the mean `|gap|`."""
        return self._due({"no_gradient": norm <= self._tolerance and gap_size > 1e-3})

    def observe_teacher(self, success: float, evaluated: str = "eval") -> list[str]:
        """Note one evaluation of the self-teacher on a set: the share of its answers that passed, in `[0, 1]`."""
        best, low = self._teachers.get(evaluated, (success, 0))
        fell = best - success > max(0.1, 0.2 * best)
        low = low + 1 if fell else 0
        self._teachers[evaluated] = [max(best, success), low]
        if not (fell and self._interval and (low - 1) % self._interval == 0):
            return []
        return [_TEACHER_FALLING.format(now=success, best=best)]

    def _due(self, degenerate: dict[str, bool]) -> list[str]:
        due = []
        for name, bad in degenerate.items():
            self._streaks[name] = self._streaks[name] + 1 if bad else 0
            if self._interval and bad and self._streaks[name] % self._interval == 0:
                what = "logged steps" if name == "no_gradient" else "rollout batches"
                due.append(f"SDPO: for {self._streaks[name]} {what} in a row {_MESSAGES[name]}")
        return due

    def state(self) -> dict[str, Any]:
        usual = {name: usual.state() for name, usual in self._usual.items()}
        return {"streaks": self._streaks, "usual": usual, "teachers": self._teachers}

    def restore(self, state: dict[str, Any]) -> None:
        self._streaks |= state["streaks"]
        self._teachers = state["teachers"]
        for name, usual in self._usual.items():
            usual.restore(state["usual"][name])
