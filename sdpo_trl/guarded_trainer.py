"""The part of the trainer that meets faults: killed processes, full disks, dead reward functions, broken gradients.

Knows: TRL's and transformers' steps and folders. Deliberately does not know: feedback, teachers, losses.
"""

import logging
from concurrent.futures import wait
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn

from .checkpoints import damage, last_complete, set_aside
from .faults import RewardError, check_numbers, guarded, shown_prompts, writing
from .files import FilesTrainer, attribute

logger = logging.getLogger(__name__)


class GuardedTrainer(FilesTrainer):
    """GRPO that resumes from whole checkpoints alone, and whose errors say what broke, where, and how to go on."""

    _broken_steps = 0
    _rewards_were_missing = False

    @property
    def _store_files(self) -> list[str]:
        return [f"sdpo_{name}.safetensors" for name in self._stores] if self._distills else []

    def _how_to_go_on(self) -> str:
        folder, _ = last_complete(self.args.output_dir, self._store_files)
        if folder is None:
            return f"There is no checkpoint in {self.args.output_dir} to go on from."
        return (
            f"The last complete checkpoint is {folder}, and nothing has touched it: once this is mended, go on with "
            "`train(resume_from_checkpoint=True)`."
        )

    # Checkpoints

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        self._check_size()
        if isinstance(resume_from_checkpoint, bool) and resume_from_checkpoint:
            resume_from_checkpoint = self._whole_checkpoint()
        elif resume_from_checkpoint and Path(resume_from_checkpoint).is_dir():
            wrong = damage(Path(resume_from_checkpoint))
            if wrong is not None:
                raise ValueError(
                    f"The checkpoint {resume_from_checkpoint} is incomplete: it {wrong}. Give another one, or "
                    "`resume_from_checkpoint=True` for the last complete one of `output_dir`."
                )
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            self._upload_tables()

    def _run_epoch(
        self,
        model,
        epoch,
        train_dataloader,
        steps_in_epoch,
        num_update_steps_per_epoch,
        trial,
        ignore_keys_for_eval,
        start_time,
        resume_from_checkpoint,
        epochs_trained,
        steps_trained_in_current_epoch,
    ):
        if self._ends_at_once(model, start_time):
            self.control.should_training_stop = True
            return
        super()._run_epoch(
            model,
            epoch,
            train_dataloader,
            steps_in_epoch,
            num_update_steps_per_epoch,
            trial,
            ignore_keys_for_eval,
            start_time,
            resume_from_checkpoint,
            epochs_trained,
            steps_trained_in_current_epoch,
        )

    def _ends_at_once(self, model: nn.Module, start_time: float) -> bool:
        """Whether an epoch has no step: a resumed run may be over, and transformers looks for that behind a step."""
        return self.state.global_step >= self.state.max_steps

    def _check_size(self) -> None:
        """TRL leaves out a rollout batch that is not full; without a full one, a run would end at once."""
        needed = self.args.generation_batch_size // self.num_generations
        rows = len(self.train_dataset) if isinstance(self.train_dataset, Dataset) else needed
        if rows < needed:
            raise ValueError(
                f"The training set has {rows} rows, and one rollout batch needs {needed} different prompts "
                f"(`generation_batch_size={self.args.generation_batch_size}` answers, `num_generations="
                f"{self.num_generations}` to each), so not one step could be made. Add rows, raise `num_generations`, "
                "or lower `generation_batch_size` (or what it follows from: `per_device_train_batch_size`, "
                "`steps_per_generation`, processes)."
            )

    def _upload_tables(self) -> None:
        """
        Upload what TRL's scheduler, which looks every two minutes, has not uploaded yet.

        Its own last upload, when Python ends, fails for two files or more, since no thread can be started by then.
        What goes wrong here it logs itself.
        """
        if self.args.log_completions_hub_repo is not None and self.accelerator.is_main_process:
            wait([self.commit_scheduler.trigger()])

    def _whole_checkpoint(self) -> "str | bool":
        """The checkpoint to resume from; `True`, so that transformers says so, where there is none of any kind."""
        folder, passed = last_complete(self.args.output_dir, self._store_files)
        if folder is None and passed:
            listed = "\n".join(f"- {path} {wrong}" for path, wrong in passed.items())
            raise ValueError(
                f"No checkpoint in {self.args.output_dir} is complete:\n{listed}\nResume with the settings that wrote "
                "one of them, or start anew, without `resume_from_checkpoint`."
            )
        for path, wrong in passed.items():
            logger.warning(f"SDPO: {path} is passed over, since it {wrong}. The run goes on from {folder}.")
        return True if folder is None else str(folder)

    def _writing(self, path: Path) -> AbstractContextManager[None]:
        return writing(path, self._how_to_go_on)

    def _save_checkpoint(self, model, trial):
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        with self._writing(folder):
            if self.args.should_save and folder.is_dir():
                # One that is written over is incomplete until it has its last file again.
                (folder / "trainer_state.json").unlink(missing_ok=True)
            if self.args.should_save and self.args.save_total_limit:
                for path in set_aside(folder.parent, self.state.global_step):
                    logger.warning(f"SDPO: {path} is an incomplete checkpoint of a run that was killed. Delete it.")
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with self._writing(Path(output_dir or self.args.output_dir)):
            super().save_model(output_dir, _internal_call)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        with self._writing(Path(self.args.output_dir) / "completions"):  # TRL's tables
            super().log(logs, start_time)

    # Rewards

    def _guard(self, func: Any, name: str, rewards: bool = False) -> Any:
        """
        The function with a time limit and errors that name its prompts, also for what is no list of `rewards`; a
        reward model as it is.
        """
        if isinstance(func, nn.Module):
            return func
        limit = None if getattr(func, "limits_itself", False) else self.args.reward_timeout
        return guarded(func, name, limit, self._how_to_go_on, check_numbers if rewards else None)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        named = zip(self.reward_funcs, self.reward_func_names, strict=True)
        functions = [self._guard(func, f"The reward function `{name}`", rewards=True) for func, name in named]
        with attribute(self, "reward_funcs", functions):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._check_rewards(rewards, prompts)
        return rewards

    def _check_rewards(self, rewards: torch.Tensor, prompts: list[Any]) -> None:
        """Refuse infinite rewards and speak of missing ones; `(N, F)`, the same on every process."""
        for row, column in rewards.isinf().nonzero()[:1].tolist():
            process, place = divmod(row, len(prompts))
            own = process == self.accelerator.process_index
            where = shown_prompts([prompts[place]]) if own else f"- see the error of process {process}"
            raise RewardError(
                f"The reward function `{self.reward_func_names[column]}` gave {rewards[row, column].item()} for an "
                f"answer to this prompt:\n{where}\nA reward must be finite, or `None` where there is none. "
                f"{self._how_to_go_on()}"
            )
        missing = bool(rewards.isnan().all())
        if missing and not self._rewards_were_missing:
            logger.warning(
                f"SDPO: at step {self.state.global_step} no reward function gave a reward for any of the "
                f"{len(rewards)} answers: they are no successes, and only feedback can teach. Do the reward functions "
                f"({', '.join(self.reward_func_names)}) return NaN or None for these prompts?\n"
                f"{shown_prompts(prompts)}"
            )
        self._rewards_were_missing = missing

    # Gradients

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm)
        # fp16's loss scaler meets such gradients on purpose, and skips them itself.
        if not self.args.max_nonfinite_steps or self.args.fp16 or norm is None:
            return norm
        value = norm.item() if isinstance(norm, torch.Tensor) else norm
        if 0 <= value < float("inf"):  # DeepSpeed gives -1 for NaN
            self._broken_steps = 0
            return norm
        self._meet_broken_gradient(model, value)
        return norm

    def _meet_broken_gradient(self, model: nn.Module, norm: float) -> None:
        """Skip an optimizer step, or end the run where that cannot be done or has been done often enough."""
        step, most = self.state.global_step + 1, self.args.max_nonfinite_steps
        causes = (
            "Lower the learning rate, or bound the divergence (`distillation_log_ratio_clip=5.0`); if the model's "
            "weights themselves hold NaN, only an earlier checkpoint helps."
        )
        if self.is_deepspeed_enabled and self.model_wrapped.was_step_applied():
            raise FloatingPointError(
                f"SDPO: the gradient of step {step} is not finite (norm {norm}), and DeepSpeed has applied it. "
                f"{causes} {self._how_to_go_on()}"
            )
        self._broken_steps += 1
        if self._broken_steps >= most:
            raise FloatingPointError(
                f"SDPO: the gradient was not finite (norm {norm}) at {most} steps in a row, up to step {step}; none "
                f"of them was applied (`max_nonfinite_steps={most}`). {causes} {self._how_to_go_on()}"
            )
        logger.warning(
            f"SDPO: the gradient of step {step} is not finite (norm {norm}), so the step is skipped: the weights stay "
            f"as they are ({self._broken_steps} in a row; the run ends at {most}). {causes}"
        )
        if not self.is_deepspeed_enabled:  # which has skipped it itself
            model.zero_grad(set_to_none=True)  # an optimizer leaves a parameter without a gradient alone
