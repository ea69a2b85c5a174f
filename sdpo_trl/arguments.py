"""What can be known to be wrong before anything is built."""

from typing import Any

from .config import SDPOConfig
from .faults import check_output_folder


def check_arguments(model: Any, args: Any, peft_config: Any, feedback_func: Any, teacher_model: Any) -> None:
    """
    Refuse arguments of [`SDPOTrainer`] that contradict each other, with a `TypeError` or `ValueError` that says why.

    Args: see [`SDPOTrainer`].
    """
    if model is None:
        raise TypeError("`model` is missing: give a Hub id, a folder, or a model.")
    if not isinstance(args, SDPOConfig):
        raise TypeError(
            f"`args` must be an `SDPOConfig`, got {type(args).__name__}. It takes all fields of GRPOConfig."
        )
    if not isinstance(model, str) and peft_config is None and not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            "Nothing in the model trains. A `PeftModel` must be loaded with `is_trainable=True`; otherwise pass a "
            "`peft_config`, or unfreeze the parameters."
        )
    if feedback_func is not None and not callable(feedback_func):
        raise TypeError(f"`feedback_func` must be callable, got {type(feedback_func).__name__}.")
    if feedback_func is not None and not args.include_environment_feedback:
        raise ValueError("`feedback_func` would never be read: set `include_environment_feedback=True`, or drop it.")
    if args.distillation_weight == 0.0 and (feedback_func is not None or teacher_model is not None):
        raise ValueError(
            "`distillation_weight=0` is GRPO: drop `feedback_func` and `teacher_model`, or raise the weight."
        )
    if not args.reads_feedback and teacher_model is None:
        raise ValueError(
            "`teacher_context='none'` needs a `teacher_model`: the student's own weights, reading the same, would "
            "teach nothing. Pass one, or leave `teacher_context='feedback'`."
        )
    if not args.reads_feedback and feedback_func is not None:
        raise ValueError("`feedback_func` would never be read: set `teacher_context='feedback'`, or drop it.")
    if teacher_model is None and args.teacher_model_init_kwargs:
        raise ValueError("`teacher_model_init_kwargs` has no effect without `teacher_model`.")
    if teacher_model is not None and args.use_teacher_server:
        raise ValueError(
            "`use_teacher_server=True` scores with the student's own weights, and `teacher_model` brings others. Drop "
            "one of them."
        )
    if teacher_model is not None:
        if teacher_model is model and not isinstance(model, str):
            raise ValueError(
                "`teacher_model` is the student itself: use `teacher_model_kind='live'` or 'base' instead."
            )
        if not isinstance(model, str) and not isinstance(teacher_model, str):
            own = {id(parameter) for parameter in model.parameters()}
            if any(id(parameter) in own for parameter in teacher_model.parameters()):
                raise ValueError("`teacher_model` shares parameters with the student. Pass a copy (`copy.deepcopy`).")
        names = ["teacher_model_kind", "teacher_update_rate", "teacher_sync_steps", "teacher_mix"]
        names += ["teacher_offload"] if args.beta == 0.0 else []  # a KL anchor has values of its own too
        changed = [name for name in names if getattr(args, name) != SDPOConfig._default(name)]
        if changed:
            raise ValueError(
                f"An external `teacher_model` never moves, so `{changed[0]}` has no effect. Drop one of them."
            )
    if args.should_save:
        check_output_folder(args.output_dir, args.save_strategy != "no" or args.push_to_hub or args.log_completions)
