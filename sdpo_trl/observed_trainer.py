"""The part of the trainer that tells people what it does: times of each part, bars, the run's own log.

Knows: the order of a step. Deliberately does not know: feedback, losses, teachers, pages. Training is the same without
it, bit for bit; it draws no random number and sends nothing between processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from accelerate.utils import is_peft_model
from transformers import TrainerCallback
from trl.trainer.utils import get_config_model_id

from .loss_trainer import LossTrainer
from .progress import waiting
from .run_log import RUN_LOG, RunLog, changed_settings
from .timing import StepClock


class RunLogCallback(TrainerCallback):
    """
    Writes what the trainer logs.

    Args:
        log ([`RunLog`]): Where to.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log

    def on_train_begin(self, args, state, control, **kwargs):
        self._log.write("begin", max_steps=state.max_steps)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self._log.write("log", values=logs or {})


class StepClockCallback(TrainerCallback):
    """
    Tells the clock when steps begin and end. The last callback of the trainer's own, so that a step holds the others.

    Args:
        clock ([`StepClock`]): The clock.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_train_begin(self, args, state, control, **kwargs):
        self._clock.forget()

    def on_step_begin(self, args, state, control, **kwargs):
        self._clock.start()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._clock.change("other")

    def on_step_end(self, args, state, control, **kwargs):
        self._clock.stop()


class ObservedTrainer(LossTrainer):
    """
    GRPO with `sdpo/time/*` in its logs, bars while answers are generated and graded, and a log of its own.

    [`SDPOTrainer`] sets it up; its docstring says what each override adds.
    """

    _clock: StepClock
    _run_log: RunLog

    def _set_up_observation(self) -> None:
        """After TRL's own set-up, and before the callbacks whose time is told apart."""
        self._clock = StepClock(self.accelerator.device)
        self._run_log = RunLog(
            Path(self.args.output_dir) / RUN_LOG,
            step=lambda: self.state.global_step,
            writes=self.is_world_process_zero,
        )
        self.add_callback(RunLogCallback(self._run_log))

    @property
    def _shows_progress(self) -> bool:
        return self.accelerator.is_main_process and not self.args.disable_tqdm

    # The run's log

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        with self._run_log.recording(
            settings={name: list(pair) for name, pair in changed_settings(self.args).items()},
            model=get_config_model_id(self.model.config) or type(self.model).__name__,
            teacher=self._teacher_kind,
            rewards=list(self.reward_func_names),
            reward_weights=self.reward_weights.tolist(),
            processes=self.accelerator.num_processes,
            device=self.accelerator.device.type,
            versions={module.__name__: module.__version__ for module in (trl, transformers, torch)},
        ):
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._mode == "train":
            times = self._clock.flush()
            self._metrics["train"].update({f"sdpo/time/{name}": [value] for name, value in times.items()})
        super().log(logs, start_time)

    # Times

    def training_step(self, model, inputs, num_items_in_batch):
        with self._clock.part("other"):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._clock.change("optimizer")  # until `on_optimizer_step`
        return loss

    def _generate_and_score_completions(self, inputs):
        with self._clock.part("other"), self._student_passes_timed():
            return super()._generate_and_score_completions(inputs)

    @contextmanager
    def _student_passes_timed(self) -> Iterator[None]:
        """Within, the log-probabilities that TRL or an anchor needs beside the loss are the student's time."""
        name = "_get_per_token_logps_and_entropies"
        passes, own = getattr(self, name), vars(self).get(name)

        @wraps(passes)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._clock.part("student"):
                return passes(*args, **kwargs)

        setattr(self, name, timed)
        try:
            yield
        finally:
            if own is None:
                delattr(self, name)
            else:
                setattr(self, name, own)

    def _teacher_rows(self, output, inputs):
        with self._clock.part("teacher"):
            return super()._teacher_rows(output, inputs)

    def _teacher_head(self, inputs, active):
        with self._clock.part("teacher"):
            return super()._teacher_head(inputs, active)

    def _compute_loss(self, model, inputs):
        with self._clock.part("student"):
            loss = super()._compute_loss(model, inputs)
        self._clock.change("backward")  # until `training_step` ends
        return loss

    # Times and bars

    def _generate(self, prompts):
        own = self.rollout_func is not None
        with (
            self._clock.part("generation"),
            waiting(f"rollouts of {len(prompts)} prompts", shown=own and self._shows_progress),
        ):
            return super()._generate(prompts)

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        # What transformers' `generate` calls once per token; vLLM and continuous batching say nothing on the way.
        # A compiled model is left without a hook.
        counts = not (
            self.use_vllm
            or self.use_transformers_continuous_batching
            or self.generation_config.cache_implementation
            or self.args.torch_compile
        )
        total = self.generation_config.max_new_tokens if counts else None
        with waiting(
            f"generating {len(prompt_ids)} answers", shown=self._shows_progress, total=total, unit="token"
        ) as count:
            base = self.model.get_base_model() if is_peft_model(self.model) else self.model
            hook = base.register_forward_hook(lambda *_: count()) if counts and self._shows_progress else None
            try:
                return super()._generate_single_turn(
                    prompt_ids, images, multimodal_fields, num_generations, has_tool_images
                )
            finally:
                if hook is not None:
                    hook.remove()

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        names = ", ".join(self.reward_func_names)
        with (
            self._clock.part("reward"),
            waiting(f"grading {len(prompts)} answers ({names})", shown=self._shows_progress),
        ):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
