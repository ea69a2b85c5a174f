"""The options of a session: `SDPOConfig` with other defaults, and what a session cannot honour.

Knows: names, values. Deliberately does not know: models, conversations.
"""

import json
from dataclasses import fields
from typing import Any

import torch
from trl import GRPOConfig

from ..config import SDPOConfig

_DEFAULTS = {
    "num_generations": 1,
    "per_device_train_batch_size": 1,
    "use_successful_as_teacher": False,
    "environment_feedback_only_without_solution": False,
    "reprompt_placement": "append",
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-4,
    "max_completion_length": 512,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


def online_config(output_dir: str = "runs/online", **options: Any) -> SDPOConfig:
    """
    An [`SDPOConfig`] for a session: constant rate, one answer per prompt, the correction as a turn behind the whole
    conversation (`reprompt_placement="append"`), a person's text shown also beside a solution, on the CPU in float32
    where there is no accelerator.

    Args:
        output_dir (`str`, *optional*): Of what the trainer itself writes; its run log alone by default.
        options: Any fields of [`SDPOConfig`].
    """
    accelerated = torch.accelerator.is_available()
    device = {} if accelerated else {"use_cpu": True, "bf16": False}
    return SDPOConfig(output_dir, **{**_DEFAULTS, **device, **options})


def check_online(args: Any) -> None:
    """
    Refuse what would be accepted and then have no effect in a session.

    Raises:
        `TypeError`, `ValueError`: names the option and what to do.
    """
    if not isinstance(args, SDPOConfig):
        raise TypeError(f"`args` must be an `SDPOConfig`, got {type(args).__name__}: `online_config(...)` makes one.")
    for name, needed, reason in (
        ("num_generations", 1, "the answers of an update are the denied ones, however many there are"),
        ("gradient_accumulation_steps", 1, "an update is one optimizer step on all denied answers"),
        ("num_iterations", 1, "an update is one optimizer step on all denied answers"),
        ("use_successful_as_teacher", False, "nothing is rewarded here; approved answers become demonstrations"),
        ("include_environment_feedback", True, "the corrections are the feedback"),
        ("teacher_context", "feedback", "the corrections are the feedback"),
        ("logging_steps", 1, "every update is logged"),
        ("use_vllm", False, "the weights change at each correction, so the model itself generates"),
        ("use_transformers_continuous_batching", False, "the model itself generates, one answer at a time"),
        ("max_turn_length", None, "every answer is one turn: `max_completion_length` limits it"),
        ("max_observation_length", None, "the tools of a session cut what they reply themselves"),
        ("do_eval", False, "there is nothing to evaluate; `session.score` scores an answer"),
    ):
        if getattr(args, name) != needed:
            raise ValueError(
                f"A session needs `{name}={needed!r}`, got {getattr(args, name)!r}: {reason}. `online_config(...)` "
                "makes a configuration with the defaults of a session."
            )
    if args.max_steps > 0:
        return
    if args.lr_scheduler_type not in ("constant", "constant_with_warmup"):
        raise ValueError(
            f"`lr_scheduler_type={str(args.lr_scheduler_type)!r}` goes to the end of a run, and a session has none: "
            "take 'constant' or 'constant_with_warmup', or say how many updates there will be (`max_steps`)."
        )
    if 0 < args.warmup_steps < 1:
        raise ValueError(
            f"`warmup_steps={args.warmup_steps}` is a share of a run, and a session has no end: give a whole number "
            "of updates, or `max_steps`."
        )
    if args.distillation_weight_schedule != "constant" and args.distillation_weight_decay_steps is None:
        raise ValueError(
            "`distillation_weight_schedule` decays until the end of a run, and a session has none: give "
            "`distillation_weight_decay_steps`, or `max_steps`."
        )


# Of what GRPO has too: those that decide what an update does to the weights.
_DECIDING = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "max_steps", "optim", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm", "seed", "bf16", "fp16", "temperature", "beta", "loss_type",
    "chat_template_kwargs",
)  # fmt: skip


def settings_of(args: SDPOConfig) -> dict[str, Any]:
    """The options that decide what an update does, as JSON keeps them: a journal notes them, and is compared."""
    shared = {option.name for option in fields(GRPOConfig)}
    names = [*_DECIDING, *(option.name for option in fields(SDPOConfig) if option.name not in shared)]
    return {name: json.loads(json.dumps(getattr(args, name), default=str)) for name in names}


def changed_settings(args: SDPOConfig, noted: dict[str, Any]) -> str:
    """What of noted settings is different now, as text; empty if nothing is."""
    now = settings_of(args)
    return ", ".join(f"{name}={now[name]!r} (was {was!r})" for name, was in noted.items() if now.get(name, was) != was)
