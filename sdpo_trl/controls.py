"""Options for long runs: gates, schedules, clips and weights, each off by default, each with its source.

Knows: names, ranges, which options mean something together. Deliberately does not know: tensors, trainers.
"""

from dataclasses import dataclass, field
from typing import Literal

from .loss import WeightPlan, WeightSchedule

Routing = Literal["all", "failed", "positive_advantage"]
Weighting = Literal["none", "teacher_entropy", "position", "gap_gate"]
Signal = Literal["loss", "advantage_magnitude"]
Choice = Literal["first", "shortest", "random"]


@dataclass
class ControlOptions:
    """
    The part of [`SDPOConfig`] that keeps a long run healthy. With the defaults nothing changes.

    Parameters:
        > Which rollouts, and how much

        distillation_routing (`str`, *optional*, defaults to `"all"`):
            `"failed"`: failed rollouts that have feedback are distilled and all others go to the policy term, each
            normalised over its own tokens (SRPO, arXiv 2604.02288; with `distillation_weight=1.0` that term has no
            weight, and they teach nothing). `"positive_advantage"`: only rollouts with a
            positive advantage are distilled; the policy term keeps all (SDPG, arXiv 2606.04036).
        distillation_weight_schedule (`str`, *optional*, defaults to `"constant"`):
            `"linear"` or `"cosine"`: `distillation_weight` goes to `distillation_weight_end` over
            `distillation_weight_decay_steps` optimizer steps after the warm-up (SDPG).
        distillation_weight_end (`float`, *optional*, defaults to `0.0`):
            Value after the decay, in `[0, 1]`.
        distillation_weight_warmup_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps in which the weight rises from 0; the policy term has the rest.
        distillation_weight_decay_steps (`int`, *optional*):
            Optimizer steps of the decay. `None`: until the end of the run.
        prompt_weighting (`str`, *optional*, defaults to `"none"`):
            `"difficulty"`: `sqrt(p (1 - p))` of the group's success rate, mean 1 over the distilled rollouts (SC-SDPO,
            arXiv 2605.27765). Groups that all passed or all failed are not distilled then.
        token_weighting (`str`, *optional*, defaults to `"none"`):
            `"teacher_entropy"`: `exp(-b H_teacher)`, mean 1 over the tokens of the rollout batch (of the micro-batch,
            for a teacher that moves within the batch and for images) (SRPO). `"position"`:
            `exp(-b i / n)` over a row's `n` tokens, mean 1 (IW-OPD, arXiv 2606.22600). `"gap_gate"`:
            `sigmoid(b * gap)`, the gap `log p_T - log p_S` of the sampled token (SDAR, arXiv 2605.15155).
        token_weighting_beta (`float`, *optional*, defaults to `1.0`):
            `b` above, `>= 0`; at most 7 for `"teacher_entropy"`, whose weights else vanish in float32.

        > Bounds

        distillation_log_ratio_clip (`float`, *optional*):
            Bound `c > 0` of each item's `|log p_S - log p_T|`, in nats: the paper's advantage clip (section 5; 5.0 at
            test time). The teacher is moved to within `c` of the student, as a constant, in every mode.
        distillation_log_ratio_clip_running (`float`, *optional*):
            The same bound at this multiple of the running mean of `|gap|` over past optimizer steps (say 3.0). Beside
            the fixed clip the smaller bound counts; before the first step's end there is none.
        distillation_is_clip_low (`float`, *optional*):
            Lower bound of the importance ratio of stale rollouts, in `[0, 1]` and below `distillation_is_clip`.
        distillation_gain_target (`float`, *optional*):
            Scale the divergence of each micro-batch up so that the mean size of what the teacher says about the
            sampled tokens (`|log p_T - log p_S|`, over all processes) reaches this, in nats: a small correction then
            counts beside the larger ones that an optimizer remembers, and beside a KL anchor.
        distillation_gain_max (`float`, *optional*, defaults to `10.0`):
            Bound of that gain, `>= 1`.

        > Another signal

        distillation_signal (`str`, *optional*, defaults to `"loss"`):
            `"advantage_magnitude"`: no loss of its own; the clipped ratio `p_T / p_S` scales the *size* of GRPO's
            token advantages while the reward keeps their sign, mixed in with `distillation_weight` and its schedule
            (RLSD, arXiv 2604.03128).
        advantage_magnitude_clip (`float`, *optional*, defaults to `0.2`):
            The factor stays in `[1 - clip, 1 + clip]`; in `(0, 1)`.

        > The teacher

        teacher_proximal_share (`float`, *optional*, defaults to `1.0`):
            `a` in `a p_T + (1 - a) p_S`, in `(0, 1]`: no log-ratio is below `log(1 - a)` (TOP-D, arXiv 2607.04751).
            `p_S` is the student as it is now, which on-policy is the one that sampled.
        teacher_snapshot_gate (`bool`, *optional*, defaults to `False`):
            A snapshot is renewed only if success has risen since the last renewal and the share of truncated answers
            has not (CGTR, arXiv 2606.03532).

        > Demonstrations

        demonstration_choice (`str`, *optional*, defaults to `"first"`):
            Which success of the group is shown: `"first"`, `"shortest"` or `"random"` (seeded by `seed`).
        success_buffer_size (`int`, *optional*, defaults to `0`):
            Latest successful answers kept per question across steps, and in checkpoints, and shown where the group has
            none (DRIFT, arXiv 2606.30345). 0 keeps none.
        success_buffer_questions (`int`, *optional*, defaults to `4096`):
            Questions that the buffer holds at most; the one that was answered longest ago leaves first.
        success_buffer_max_age (`int`, *optional*):
            Optimizer steps after which an answer is no longer shown.
        success_buffer_key (`str`, *optional*):
            Dataset column that names the question. `None`: the prompt itself.

        > Evaluation

        evaluate_teacher (`bool`, *optional*, defaults to `True`):
            `evaluate()` also samples one answer under each self-teacher's prompt, with its weights, grades it (so
            reward functions run twice) and reports `eval_sdpo/teacher_success_share`. Left out for external teachers,
            vLLM, tools, environments, own rollout functions and images.
    """

    distillation_routing: Routing = field(default="all", metadata={"help": "Which rollouts are distilled."})
    distillation_weight_schedule: WeightSchedule = field(
        default="constant", metadata={"help": "How distillation_weight moves over the run."}
    )
    distillation_weight_end: float = field(default=0.0, metadata={"help": "distillation_weight after its decay."})
    distillation_weight_warmup_steps: int = field(
        default=0, metadata={"help": "Optimizer steps in which distillation_weight rises from 0."}
    )
    distillation_weight_decay_steps: int | None = field(
        default=None, metadata={"help": "Optimizer steps of the decay. None: the whole run."}
    )
    prompt_weighting: Literal["none", "difficulty"] = field(
        default="none", metadata={"help": "Weight of a prompt by its success rate."}
    )
    token_weighting: Weighting = field(default="none", metadata={"help": "Weight of a token."})
    token_weighting_beta: float = field(default=1.0, metadata={"help": "Strength of token_weighting."})
    distillation_log_ratio_clip: float | None = field(
        default=None, metadata={"help": "Bound of each item's log-ratio, in nats."}
    )
    distillation_log_ratio_clip_running: float | None = field(
        default=None,
        metadata={"help": "The same bound as a multiple of the running mean of the sampled tokens' log-ratio."},
    )
    distillation_is_clip_low: float | None = field(
        default=None, metadata={"help": "Lower bound of the importance ratio of stale rollouts."}
    )
    distillation_gain_target: float | None = field(
        default=None, metadata={"help": "Mean |log p_T - log p_S| that small corrections are scaled up to."}
    )
    distillation_gain_max: float = field(default=10.0, metadata={"help": "Bound of that gain."})
    distillation_signal: Signal = field(
        default="loss", metadata={"help": "A loss, or the size of GRPO's token advantages."}
    )
    advantage_magnitude_clip: float = field(
        default=0.2, metadata={"help": "The factor of an advantage stays in [1 - clip, 1 + clip]."}
    )
    teacher_proximal_share: float = field(default=1.0, metadata={"help": "a in a p_T + (1 - a) p_S."})
    teacher_snapshot_gate: bool = field(
        default=False, metadata={"help": "Renew a snapshot only if success rose and truncation did not."}
    )
    demonstration_choice: Choice = field(default="first", metadata={"help": "Which success of the group is shown."})
    success_buffer_size: int = field(
        default=0, metadata={"help": "Successful answers kept per question across steps."}
    )
    success_buffer_questions: int = field(default=4096, metadata={"help": "Questions that the buffer holds at most."})
    success_buffer_max_age: int | None = field(
        default=None, metadata={"help": "Optimizer steps after which an answer is no longer shown."}
    )
    success_buffer_key: str | None = field(
        default=None, metadata={"help": "Dataset column that names the question. None: the prompt."}
    )
    evaluate_teacher: bool = field(
        default=True, metadata={"help": "evaluate() also reports the success of the self-teacher."}
    )

    @property
    def weight_plan(self) -> WeightPlan:
        """`distillation_weight` over the optimizer steps."""
        return WeightPlan(
            self.distillation_weight, self.distillation_weight_schedule, self.distillation_weight_end,
            self.distillation_weight_warmup_steps, self.distillation_weight_decay_steps,
        )  # fmt: skip

    @property
    def has_policy_term(self) -> bool:
        """Whether GRPO's term ever has a weight above 0."""
        moves = self.distillation_weight_schedule != "constant" or self.distillation_weight_warmup_steps > 0
        return self.distillation_weight < 1.0 or moves or self.distillation_signal == "advantage_magnitude"

    def _check_control_ranges(self) -> None:
        positive = "must be positive"
        for name, holds, rule in (
            ("distillation_weight_end", lambda x: 0 <= x <= 1, "must be in [0, 1]"),
            ("token_weighting_beta", lambda x: x >= 0, "must not be negative"),
            ("distillation_log_ratio_clip", lambda x: x > 0, positive),
            ("distillation_log_ratio_clip_running", lambda x: x > 0, positive),
            ("distillation_is_clip_low", lambda x: 0 <= x <= 1, "must be in [0, 1] (on-policy the ratio is 1)"),
            ("distillation_gain_target", lambda x: x > 0, positive),
            ("distillation_gain_max", lambda x: x >= 1, "must be at least 1"),
            ("advantage_magnitude_clip", lambda x: 0 < x < 1, "must be in (0, 1)"),
            ("teacher_proximal_share", lambda x: 0 < x <= 1, "must be in (0, 1]"),
        ):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value)
            ):
                raise ValueError(f"`{name}` {rule}, got {value!r}.")
        for name, least in (
            ("distillation_weight_warmup_steps", 0), ("distillation_weight_decay_steps", 1),
            ("success_buffer_size", 0), ("success_buffer_questions", 1), ("success_buffer_max_age", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"`{name}` must be whole and at least {least}, got {value!r}.")

    def _check_control_pairs(self) -> None:
        if self.token_weighting == "teacher_entropy" and self.token_weighting_beta > 7:
            raise ValueError(
                f"`token_weighting_beta={self.token_weighting_beta}` is too much for 'teacher_entropy': `exp(-b H)` "
                "would vanish. Take at most 7; SRPO takes 1."
            )
        low, high = self.distillation_is_clip_low, self.distillation_is_clip
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"`distillation_is_clip_low={low}` must be below `distillation_is_clip={high}`: the ratio is kept "
                "between them."
            )
        if (
            self.distillation_weight_schedule != "constant"
            and self.distillation_weight_end == self.distillation_weight
        ):
            raise ValueError(
                f"`distillation_weight_schedule={self.distillation_weight_schedule!r}` goes nowhere: "
                f"`distillation_weight` and `distillation_weight_end` are both {self.distillation_weight}."
            )
        if self.num_generations == 1:
            choice = [] if self.success_buffer_size else [("demonstration_choice", self.demonstration_choice)]
            for name, value in (
                ("distillation_routing", "positive_advantage"),
                ("prompt_weighting", "difficulty"),
                *((name, value) for name, value in choice if value != "first"),
            ):
                if getattr(self, name) == value:
                    raise ValueError(
                        f"`{name}={value!r}` compares the answers to one prompt, and `num_generations=1` has one. "
                        f"Raise `num_generations`, or leave `{name}` at its default."
                    )

    def _dependent_controls(self) -> list[tuple[str, bool, str]]:
        """As `SDPOConfig._dependent_options`."""
        moves = self.distillation_weight_schedule != "constant"
        own_loss = self.distillation_signal == "loss"
        buffer = "`success_buffer_size` above 0"
        loss_only = [
            "distillation_routing", "prompt_weighting", "token_weighting", "distillation_log_ratio_clip",
            "distillation_log_ratio_clip_running", "distillation_is_clip", "distillation_is_clip_low",
            "distillation_gain_target", "teacher_proximal_share", "distillation_mode", "distillation_alpha",
        ]  # fmt: skip
        return [
            *((name, own_loss, "`distillation_signal='loss'`") for name in loss_only),
            *(
                (f"distillation_weight_{name}", self.distillation_weight > 0, "a `distillation_weight` above 0")
                for name in ("schedule", "warmup_steps")
            ),
            *(
                (f"distillation_weight_{name}", moves, "`distillation_weight_schedule` 'linear' or 'cosine'")
                for name in ("end", "decay_steps")
            ),
            ("token_weighting_beta", self.token_weighting != "none", "a `token_weighting`"),
            ("distillation_gain_max", self.distillation_gain_target is not None, "a `distillation_gain_target`"),
            ("advantage_magnitude_clip", not own_loss, "`distillation_signal='advantage_magnitude'`"),
            ("teacher_snapshot_gate", self.teacher_model_kind == "snapshot", "`teacher_model_kind='snapshot'`"),
            ("demonstration_choice", self.use_successful_as_teacher, "`use_successful_as_teacher=True`"),
            ("success_buffer_size", self.use_successful_as_teacher, "`use_successful_as_teacher=True`"),
            *(
                (f"success_buffer_{name}", self.success_buffer_size > 0, buffer)
                for name in ("questions", "max_age", "key")
            ),
        ]
