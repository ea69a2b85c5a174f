"""The options that SDPO adds to TRL's GRPO, each checked; everything else is `trl.GRPOConfig`."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from trl import GRPOConfig

from .agent_options import AgentOptions
from .controls import ControlOptions
from .divergence import DivergenceSpec
from .faults import FaultOptions
from .reprompt import DEFAULT_FEEDBACK, DEFAULT_REPROMPT, DEFAULT_SOLUTION, Templates
from .rollouts import RoutingRule
from .server_options import ServerOptions

TeacherKind = Literal["live", "base", "ema", "snapshot", "trust_region"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _SingleGeneration(int):
    """
    The number 1 that passes `GRPOConfig`'s demand for at least two generations.

    GRPO needs a group to centre its rewards; without a policy term nothing is centred, and feedback alone teaches.
    """

    def __lt__(self, other: int) -> bool:
        return False


class _Token(str):
    """A token that stays out of `training_args.bin`, which `Trainer` writes and pushes to the Hub."""

    def __reduce__(self) -> tuple[type, tuple]:
        return type(None), ()

    def __copy__(self) -> "_Token":
        return self

    def __deepcopy__(self, memo: dict) -> "_Token":
        return self


@dataclass
class SDPOConfig(AgentOptions, ServerOptions, FaultOptions, ControlOptions, GRPOConfig):
    r"""
    Configuration of [`SDPOTrainer`]: all of [`~trl.GRPOConfig`], the options below, those of [`ControlOptions`] for
    long runs, of [`AgentOptions`] for agents and other teachers, of [`ServerOptions`] for scoring on vLLM's server,
    and of [`FaultOptions`] for runs that break.

    Fields that TRL's experimental `SDPOConfig` also has keep its names and meanings; where a default differs it
    follows the paper (arXiv 2601.20802), see docs/options.md. Every option is either effective or refused with
    a `ValueError` that says what to do instead.

    Parameters:
        > Parameters that control the loss (paper, sections 3 and 4)

        distillation_weight (`float`, *optional*, defaults to `1.0`):
            `w` in `(1 - w) * policy_loss + w * distillation_loss`, in `[0, 1]`. `1.0` has no policy term, `0.0` is
            TRL's GRPO bit for bit. The KL anchor (`beta`), the entropy bonus and a router's loss are added at full
            weight.
        distillation_mode (`str`, *optional*, defaults to `"full_logits"`):
            `"full_logits"` (exact), `"topk_logits"` (the student's `distillation_topk` likeliest items) or
            `"sampled_token"` (reverse divergence on the sampled token alone; needs `distillation_alpha=1.0`).
        distillation_alpha (`float`, *optional*, defaults to `0.5`):
            `0` is `KL(teacher || student)`, `1` is `KL(student || teacher)`, between them the generalised
            Jensen-Shannon divergence. In `[0, 1]`.
        distillation_topk (`int`, *optional*):
            Size of the support with `distillation_mode="topk_logits"`, at least 1; required there, refused elsewhere.
        distillation_add_tail (`bool`, *optional*, defaults to `True`):
            With `"topk_logits"`: hold the rest of the mass in one more item. `False` renormalises the support.
        distillation_is_clip (`float`, *optional*, defaults to `2.0`):
            Upper bound of the importance ratio of stale rollouts, `> 0`; `None` does not cut it.
        distillation_impl (`str`, *optional*, defaults to `"fused"`):
            `"fused"`: values and gradients chunk by chunk, in memory that does not grow with the answers.
            `"reference"`: both models' full logits and plain autograd; the same up to rounding.

        > Parameters that control the teacher (paper, section 3.3)

        teacher_model_kind (`str`, *optional*, defaults to `"ema"`):
            `"live"` (the student now), `"base"` (the student at the start), `"ema"`, `"snapshot"` (a copy renewed
            whole every `teacher_sync_steps`) or `"trust_region"` (logits `(1 - teacher_mix) * base + teacher_mix *
            live`). An external teacher is `SDPOTrainer(teacher_model=...)`.
        teacher_update_rate (`float`, *optional*, defaults to `0.05`):
            `r` of the EMA teacher, `t <- (1 - r) t + r s`, in `[0, 1]`.
        teacher_sync_steps (`int`, *optional*):
            Optimizer steps between two moves of the teacher. `None` moves an EMA teacher once per rollout batch, the
            paper's cadence (at most once per optimizer step). Required by `"snapshot"`.
        teacher_mix (`float`, *optional*, defaults to `0.01`):
            Share of the live model in a trust-region teacher, in `[0, 1]`.
        teacher_offload (`bool`, *optional*, defaults to `False`):
            Keep the teacher's own values (an EMA teacher's are float32) in host memory; each teacher's pass and each
            move then reads them from there.
        teacher_model_init_kwargs (`dict`, *optional*):
            Keyword arguments of `from_pretrained` when `teacher_model` is a path.

        > Parameters that control the feedback (paper, section 2 and Table 2)

        success_reward_threshold (`float`, *optional*, defaults to `1.0`):
            An attempt succeeded if its weighted reward is at least this (up to a relative 1e-6 of rounding).
        success_reward_func (`str`, *optional*):
            Name of the one reward function that decides success instead of the weighted sum.
        use_successful_as_teacher (`bool`, *optional*, defaults to `True`):
            Show a successful answer to the same question to the teacher.
        dont_reprompt_on_self_success (`bool`, *optional*, defaults to `True`):
            A success is not its own demonstration (the reference code). `False` follows the paper's Table 2.
        include_environment_feedback (`bool`, *optional*, defaults to `True`):
            Show the attempt's own feedback text to the teacher.
        environment_feedback_only_without_solution (`bool`, *optional*, defaults to `True`):
            Leave the text out where there is a demonstration.
        remove_thinking_from_demonstration (`bool`, *optional*, defaults to `True`):
            Strip `<think>` blocks from demonstrations; one whose thinking never closed is not used.

        > Parameters that control the teacher's prompt (paper, Table 2)

        reprompt_placement (`str`, *optional*, defaults to `"last_user"`):
            `"last_user"`: the last user turn becomes the reprompt. `"append"`: one more user turn follows.
        max_reprompt_len (`int`, *optional*, defaults to `10240`):
            Longest teacher prompt in tokens. Feedback and demonstration are cut to fit it, nothing else is.
        reprompt_template (`str`, *optional*): Holds `{prompt}`, `{solution}` and `{feedback}`.
        solution_template (`str`, *optional*): Holds `{successful_previous_attempt}`.
        feedback_template (`str`, *optional*): Holds `{feedback_raw}`.

        > Parameters that control diagnostics

        diagnostics_warning_interval (`int`, *optional*, defaults to `10`):
            Warn after this many degenerate rollout batches in a row, and again after as many more: no success and no
            feedback, nothing distilled, answers all truncated, a teacher equal to the student or drifting away,
            entropy or length falling, no gradient, the teacher's own success falling. `0` disables.
        diagnostics_flat_tolerance (`float`, *optional*, defaults to `1e-8`):
            What counts as zero for these warnings.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]  # noqa: RUF012 - as in TRL

    distillation_weight: float = field(
        default=1.0,
        metadata={"help": "w in (1 - w) * policy_loss + w * distillation_loss, in [0, 1]. 0 is TRL's GRPO."},
    )
    distillation_mode: Literal["full_logits", "topk_logits", "sampled_token"] = field(
        default="full_logits", metadata={"help": "Support of the divergence."}
    )
    distillation_alpha: float = field(
        default=0.5, metadata={"help": "0: KL(teacher || student), 1: KL(student || teacher), between: JSD."}
    )
    distillation_topk: int | None = field(
        default=None, metadata={"help": "Size of the student's support with distillation_mode='topk_logits'."}
    )
    distillation_add_tail: bool = field(
        default=True, metadata={"help": "With topk_logits: one more item holds the rest of the mass."}
    )
    distillation_is_clip: float | None = field(
        default=2.0, metadata={"help": "Upper bound of the importance ratio of stale rollouts."}
    )
    distillation_impl: Literal["fused", "reference"] = field(
        default="fused", metadata={"help": "Chunk by chunk in constant memory, or full logits and plain autograd."}
    )
    teacher_model_kind: TeacherKind = field(default="ema", metadata={"help": "Whose weights the teacher has."})
    teacher_update_rate: float = field(
        default=0.05, metadata={"help": "r of the EMA teacher: t <- (1 - r) t + r s, in [0, 1]."}
    )
    teacher_sync_steps: int | None = field(
        default=None,
        metadata={"help": "Optimizer steps between two moves of the teacher. None: once per rollout batch (ema)."},
    )
    teacher_mix: float = field(
        default=0.01, metadata={"help": "Share of the live model in a trust-region teacher, in [0, 1]."}
    )
    teacher_offload: bool = field(
        default=False, metadata={"help": "Keep the teacher's own values in host memory, read at each of its passes."}
    )
    teacher_model_init_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Keyword arguments of from_pretrained when teacher_model is a path."}
    )
    success_reward_threshold: float = field(
        default=1.0, metadata={"help": "An attempt succeeded if its reward is at least this."}
    )
    success_reward_func: str | None = field(
        default=None, metadata={"help": "Name of the reward function that decides success. None: the weighted sum."}
    )
    use_successful_as_teacher: bool = field(
        default=True, metadata={"help": "Show a successful answer to the same question to the teacher."}
    )
    dont_reprompt_on_self_success: bool = field(
        default=True, metadata={"help": "A success is not its own demonstration."}
    )
    include_environment_feedback: bool = field(
        default=True, metadata={"help": "Show the attempt's own feedback text to the teacher."}
    )
    environment_feedback_only_without_solution: bool = field(
        default=True, metadata={"help": "Leave the feedback text out where there is a demonstration."}
    )
    remove_thinking_from_demonstration: bool = field(
        default=True, metadata={"help": "Strip thinking blocks from demonstrations."}
    )
    reprompt_placement: Literal["last_user", "append"] = field(
        default="last_user", metadata={"help": "Replace the last user turn by the reprompt, or append one user turn."}
    )
    max_reprompt_len: int = field(
        default=10240,
        metadata={"help": "Longest teacher prompt in tokens; feedback and demonstration are cut to fit."},
    )
    reprompt_template: str = field(
        default=DEFAULT_REPROMPT, metadata={"help": "Holds {prompt}, {solution} and {feedback}."}
    )
    solution_template: str = field(default=DEFAULT_SOLUTION, metadata={"help": "Holds {successful_previous_attempt}."})
    feedback_template: str = field(default=DEFAULT_FEEDBACK, metadata={"help": "Holds {feedback_raw}."})
    diagnostics_warning_interval: int = field(
        default=10, metadata={"help": "Warn after this many degenerate rollout batches in a row. 0 disables."}
    )
    diagnostics_flat_tolerance: float = field(
        default=1e-8, metadata={"help": "What counts as zero for these warnings."}
    )

    def __post_init__(self) -> None:
        single = self.num_generations == 1 and not self.has_policy_term
        if single:
            self.num_generations = _SingleGeneration(1)
        super().__post_init__()
        if single:
            self.num_generations = 1
        if self.hub_token is not None:
            self.hub_token = _Token(self.hub_token)
        self._check_kinds()
        self._check_ranges()
        self._check_control_ranges()
        self._check_agent_ranges()
        self._check_fault_ranges()
        self._check_pairs()
        self._check_control_pairs()
        self._check_server_pairs()
        self.templates  # noqa: B018 - building them checks their slots

    @property
    def templates(self) -> Templates:
        """The three templates of the teacher's prompt."""
        return Templates(self.reprompt_template, self.solution_template, self.feedback_template)

    @property
    def divergence(self) -> DivergenceSpec:
        """What is computed per token."""
        return DivergenceSpec(
            self.distillation_mode, self.distillation_alpha, self.distillation_topk, self.distillation_add_tail,
            self.teacher_proximal_share, self.distillation_log_ratio_clip,
        )  # fmt: skip

    @property
    def routing_rule(self) -> RoutingRule:
        """Which hint a row's teacher gets."""
        return RoutingRule(
            self.use_successful_as_teacher,
            self.dont_reprompt_on_self_success,
            self.include_environment_feedback,
            self.environment_feedback_only_without_solution,
        )

    def _check_kinds(self) -> None:
        """Switches and texts are what they say: the text "false", for one, would switch on."""
        inherited = {option.name for option in fields(GRPOConfig)}
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in inherited:
                continue
            if isinstance(option.default, bool) and not isinstance(value, bool):
                raise ValueError(f"`{option.name}` must be `True` or `False`, got {value!r}.")
        for name in ("reprompt_template", "solution_template", "feedback_template", "turn_feedback_template"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"`{name}` must be a text, got {getattr(self, name)!r}.")
        for name in ("success_reward_func", "success_buffer_key"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise ValueError(f"`{name}` must be a text or `None`, got {getattr(self, name)!r}.")

    def _check_ranges(self) -> None:
        for name in ("distillation_weight", "distillation_alpha", "teacher_update_rate", "teacher_mix"):
            if not _is_number(getattr(self, name)) or not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"`{name}` must be in [0, 1], got {getattr(self, name)!r}.")
        for name in ("distillation_topk", "teacher_sync_steps", "max_reprompt_len"):
            value = getattr(self, name)
            absent = value is None and name != "max_reprompt_len"
            if not absent and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"`{name}` must be at least 1 and whole, got {value!r}.")
        clip = self.distillation_is_clip
        if clip is not None and not (_is_number(clip) and clip > 0):
            raise ValueError(f"`distillation_is_clip` must be positive, got {clip!r}. `None` does not cut.")
        for name in ("diagnostics_warning_interval", "diagnostics_flat_tolerance"):
            value = getattr(self, name)
            if not _is_number(value) or not value >= 0:
                raise ValueError(f"`{name}` must be a number and must not be negative, got {value!r}.")
        if self.diagnostics_warning_interval % 1 != 0:
            raise ValueError(f"`diagnostics_warning_interval` must be whole, got {self.diagnostics_warning_interval}.")
        if self.max_completion_length is None and (self.distillation_weight > 0 or self.max_turn_length is not None):
            raise ValueError(
                "`max_completion_length` must be a number: the teacher's prompt has to leave room for the answer."
            )
        threshold = self.success_reward_threshold
        if not _is_number(threshold) or threshold != threshold:
            raise ValueError(f"`success_reward_threshold` must be a number, got {threshold!r}.")
        for name, allowed in (
            ("distillation_mode", ("full_logits", "topk_logits", "sampled_token")),
            ("distillation_impl", ("fused", "reference")),
            ("teacher_model_kind", ("live", "base", "ema", "snapshot", "trust_region")),
            ("reprompt_placement", ("last_user", "append")),
            ("teacher_context", ("feedback", "none")),
            ("distillation_span", ("all", "from_hint", "hinted_turn")),
            ("distillation_routing", ("all", "failed", "positive_advantage")),
            ("distillation_weight_schedule", ("constant", "linear", "cosine")),
            ("distillation_signal", ("loss", "advantage_magnitude")),
            ("token_weighting", ("none", "teacher_entropy", "position", "gap_gate")),
            ("prompt_weighting", ("none", "difficulty")),
            ("demonstration_choice", ("first", "shortest", "random")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}, got {getattr(self, name)!r}.")

    def _check_pairs(self) -> None:
        if self.distillation_mode == "topk_logits" and self.distillation_topk is None:
            raise ValueError(
                "`distillation_mode='topk_logits'` needs `distillation_topk`. The paper uses 100 without and 20 with "
                "rich feedback."
            )
        if self.distillation_mode == "sampled_token" and self.distillation_alpha != 1.0:
            raise ValueError(
                "`distillation_mode='sampled_token'` estimates the reverse divergence alone: set "
                f"`distillation_alpha=1.0` (got {self.distillation_alpha})."
            )
        if self.teacher_model_kind == "snapshot" and self.teacher_sync_steps is None:
            raise ValueError("`teacher_model_kind='snapshot'` needs `teacher_sync_steps`, say 50.")
        dependent = [*self._dependent_options(), *self._dependent_controls(), *self._dependent_agent_options()]
        for name, active, needs in dependent:
            if not active and getattr(self, name) != self._default(name):
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` has no effect here: it needs {needs}. Leave it at its default "
                    f"({self._default(name)!r}), or change the other option."
                )

    def _dependent_options(self) -> list[tuple[str, bool, str]]:
        """Options that mean something only beside another one: name, whether that holds, and what it is."""
        policy = self.has_policy_term
        bonus = self.entropy_coef != 0.0 or self.use_adaptive_entropy
        kind = self.teacher_model_kind
        policy_only = [
            "epsilon", "epsilon_high", "delta", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos",
            "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
            "off_policy_mask_threshold",
        ]  # fmt: skip
        return [
            ("distillation_topk", self.distillation_mode == "topk_logits", "`distillation_mode='topk_logits'`"),
            ("distillation_add_tail", self.distillation_mode == "topk_logits", "`distillation_mode='topk_logits'`"),
            ("teacher_update_rate", kind == "ema", "`teacher_model_kind='ema'`"),
            ("teacher_sync_steps", kind in ("ema", "snapshot"), "`teacher_model_kind` 'ema' or 'snapshot'"),
            ("teacher_mix", kind == "trust_region", "`teacher_model_kind='trust_region'`"),
            ("teacher_offload", kind != "live" or self.beta != 0.0, "a teacher with own values, or a KL anchor"),
            ("dont_reprompt_on_self_success", self.use_successful_as_teacher, "`use_successful_as_teacher=True`"),
            (
                "environment_feedback_only_without_solution",
                self.include_environment_feedback,
                "`include_environment_feedback=True`",
            ),
            ("feedback_template", self.include_environment_feedback, "`include_environment_feedback=True`"),
            (
                "diagnostics_flat_tolerance",
                self.diagnostics_warning_interval > 0,
                "a `diagnostics_warning_interval` above 0",
            ),
            ("top_entropy_quantile", policy or bonus, "a policy term (`distillation_weight < 1`) or an entropy bonus"),
            ("importance_sampling_level", policy or self.beta != 0.0, "a policy term or a KL anchor"),
            *((name, policy, "a policy term (`distillation_weight < 1`)") for name in policy_only),
        ]

    @classmethod
    def _default(cls, name: str) -> Any:
        value = next(f for f in fields(cls) if f.name == name)
        factory: Callable[[], Any] | Any = value.default_factory
        return factory() if callable(factory) else value.default
