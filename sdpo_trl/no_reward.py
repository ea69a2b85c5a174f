"""Training without a reward function: nothing is rewarded, and nothing in the logs looks as if it were.

Knows: what of the options reads rewards, which logs are about them. Deliberately does not know: models, prompts.
"""

from typing import Any

# Logs that have no meaning where nothing is rewarded.
REWARD_METRICS = ("reward", "reward_std", "frac_reward_zero_std")
SUCCESS_METRICS = ("sdpo/success_share", "sdpo/success_group_share", "sdpo/lone_success_share")


def unrewarded(completions: list[Any], **kwargs: Any) -> list[None]:
    """Stands in for a reward function while TRL sets up, which refuses to start without one; never called."""
    return [None] * len(completions)


def may_lack_rewards(args: Any, reward_funcs: Any) -> bool:
    """Whether no reward function was given and none may be needed (an environment may still bring its own)."""
    given = reward_funcs is not None and (not isinstance(reward_funcs, list) or bool(reward_funcs))
    shows_successes = args.reads_feedback and args.use_successful_as_teacher
    if given or args.distillation_weight == 0.0 or shows_successes:
        return False
    if args.reward_weights is not None:
        raise ValueError("`reward_weights` has no effect without `reward_funcs`. Drop it, or give the functions.")
    return True


def check_unrewarded(args: Any) -> None:
    """
    Refuse options that read rewards where there is no source of any.

    Raises:
        `ValueError`: names the option.
    """
    for name, unused in (
        ("distillation_weight", not args.has_policy_term),
        ("distillation_routing", args.distillation_routing == "all"),
        ("prompt_weighting", args.prompt_weighting == "none"),
        ("success_reward_func", args.success_reward_func is None),
        ("teacher_snapshot_gate", not args.teacher_snapshot_gate),
        ("multi_objective_aggregation", args.multi_objective_aggregation == "sum_then_normalize"),
    ):
        if not unused:
            raise ValueError(
                f"`{name}={getattr(args, name)!r}` reads rewards, and there is no reward function. Pass "
                f"`reward_funcs`, or leave `{name}` at its default (with `distillation_weight=1.0` and no schedule "
                "there is no policy term)."
            )


def remove_stand_in(trainer: Any) -> None:
    """Take [`unrewarded`] out of a trainer that TRL has set up with it."""
    trainer.reward_funcs.pop(0)
    trainer.reward_func_names.pop(0)
    trainer.reward_processing_classes.pop(0)
    trainer.reward_weights = trainer.reward_weights[1:]
