"""Options for agents and for distillation from another model, each off by default.

Knows: names, ranges, which options mean something together. Deliberately does not know: tensors, trainers.
"""

from dataclasses import dataclass, field
from typing import Literal

from .turns import Span

TeacherContext = Literal["feedback", "none"]


@dataclass
class AgentOptions:
    """
    The part of [`SDPOConfig`] for multi-turn rollouts and for other teachers. With the defaults nothing changes.

    Parameters:
        > Another teacher (on-policy distillation)

        teacher_context (`str`, *optional*, defaults to `"feedback"`):
            `"feedback"`: the teacher reads the feedback of a rollout, and rollouts without any are not distilled.
            `"none"`: the teacher reads exactly what the student reads, and all rollouts are distilled; needs
            `teacher_model=`, since the student itself would teach nothing. Then (and with feedback alone,
            `use_successful_as_teacher=False`) no reward function is needed where nothing else reads rewards.
        distillation_temperature (`float`, *optional*):
            `T > 0`: both models' logits are divided by it in the divergence, and the loss is multiplied by `T ** 2`,
            which keeps the size of its gradient (Hinton et al., arXiv 1503.02531). `None`: the sampling temperature,
            without the factor. The policy term and the importance ratio keep the sampling temperature.

        > Turns and tools (TRL's `max_tool_calling_iterations` limits the turns, its `max_completion_length` the tokens
        of a whole rollout, replies of tools included)

        distillation_span (`str`, *optional*, defaults to `"all"`):
            Which turns of a rollout are distilled where its feedback names turns: `"all"`, `"from_hint"` (from the
            first hinted turn on) or `"hinted_turn"` (the hinted ones alone). A text or a demonstration that is about
            the whole rollout hints all of its turns.
        turn_feedback_template (`str`, *optional*, defaults to `"{feedback_raw}"`):
            What the teacher reads where a hinted turn after the first begins, as a user turn; holds `{feedback_raw}`.
            The first turn's text stands in the prompt, in `feedback_template`.
        max_turn_length (`int`, *optional*):
            Tokens that the student may write in one turn. A turn that is cut there ends the rollout; its tokens are
            distilled. `None`: only the rollout as a whole is limited.
        max_observation_length (`int`, *optional*):
            Characters of one tool's reply that the student reads; the middle of a longer one is left out. `None`:
            all of them.
    """

    teacher_context: TeacherContext = field(
        default="feedback", metadata={"help": "What the teacher reads beside the student's context."}
    )
    distillation_temperature: float | None = field(
        default=None, metadata={"help": "Divides both models' logits in the divergence. None: as in sampling."}
    )
    distillation_span: Span = field(
        default="all", metadata={"help": "Which turns are distilled: those hinted, or all."}
    )
    turn_feedback_template: str = field(
        default="{feedback_raw}", metadata={"help": "What the teacher reads where a hinted turn begins."}
    )
    max_turn_length: int | None = field(default=None, metadata={"help": "Tokens that the student writes in one turn."})
    max_observation_length: int | None = field(
        default=None, metadata={"help": "Characters of a tool's reply that the student reads."}
    )

    @property
    def reads_feedback(self) -> bool:
        """Whether the teacher's context may differ from the student's."""
        return self.teacher_context == "feedback"

    def _check_agent_ranges(self) -> None:
        temperature = self.distillation_temperature
        number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
        if temperature is not None and not (number and 0 < temperature < float("inf")):
            raise ValueError(f"`distillation_temperature` must be a positive number or `None`, got {temperature!r}.")
        if "{feedback_raw}" not in self.turn_feedback_template:
            raise ValueError(
                f"`turn_feedback_template` lacks the slot {{feedback_raw}}: {self.turn_feedback_template!r}. Add it "
                "where it belongs."
            )
        for name in ("max_turn_length", "max_observation_length"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` must be whole and at least 1, got {value!r}.")
        if self.max_turn_length is not None and self.max_turn_length > self.max_completion_length:
            raise ValueError(
                f"`max_turn_length={self.max_turn_length}` is more than the whole rollout may have "
                f"(`max_completion_length={self.max_completion_length}`), so it would never be reached."
            )
        if self.max_turn_length is not None and "max_new_tokens" in (self.generation_kwargs or {}):
            raise ValueError("`max_turn_length` and `max_new_tokens` in `generation_kwargs` say the same. Drop one.")

    def _dependent_agent_options(self) -> list[tuple[str, bool, str]]:
        """As `SDPOConfig._dependent_options`."""
        told = "`teacher_context='feedback'`"
        of_feedback = [
            "use_successful_as_teacher", "dont_reprompt_on_self_success", "include_environment_feedback",
            "environment_feedback_only_without_solution", "remove_thinking_from_demonstration", "reprompt_placement",
            "max_reprompt_len", "reprompt_template", "solution_template", "feedback_template", "demonstration_choice",
            "success_buffer_size", "distillation_span", "turn_feedback_template",
        ]  # fmt: skip
        return [
            *((name, self.reads_feedback, told) for name in of_feedback),
            ("distillation_temperature", self.distillation_weight > 0, "a `distillation_weight` above 0"),
            ("teacher_context", self.distillation_weight > 0, "a `distillation_weight` above 0"),
            *(
                (name, self.include_environment_feedback, "`include_environment_feedback=True`")
                for name in ("distillation_span", "turn_feedback_template")
            ),
            ("max_observation_length", self.distillation_weight > 0, "a `distillation_weight` above 0"),
        ]
