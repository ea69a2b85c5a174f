"""`SDPOTrainer`: TRL's `GRPOTrainer` whose per-token signal comes from the same network after it has read feedback."""

import asyncio
import atexit
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object, is_peft_model
from huggingface_hub import ModelCard
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.trainer.utils import (
    get_config_model_id,
    shutdown_event_loop_in_daemon,
    start_event_loop_in_daemon,
)

from . import rollouts as rollout_rules
from .arguments import check_arguments
from .batches import take_rows, trim_padding, vision_inputs
from .callbacks import HealthMonitor, TeacherUpdateCallback
from .config import SDPOConfig
from .external import load_external_teacher, prepare_external_teacher
from .heads import HeadTap, MixedHead, TapScores, TokenHead, predicting
from .loss import Normalizer, token_coefficients
from .metrics import MetricSums, token_sums
from .reprompt import strip_thinking
from .rollouts import Rollouts, Routing
from .scores import ScoreRequest, TokenScores, score_tokens
from .teacher import Teacher, WeightStore, build_teacher, evaluation_mode
from .teacher_pass import TeacherPass
from .teacher_prompts import TeacherPromptBuilder


class SDPOTrainer(GRPOTrainer):
    """
    Trainer for Self-Distilled Policy Optimization (SDPO, arXiv 2601.20802).

    The differences to [`~trl.GRPOTrainer`], each an override that calls it:

    - `_calculate_rewards` also collects feedback per rollout: `log_extra("feedback", [...])` in a reward function, the
      `feedback` of an environment, `feedback_func`, and the dataset columns `privileged_context` and `demonstration`.
    - `_generate_and_score_completions` also selects what each row's teacher is told ([`select_feedback`] over the
      global batch) and writes the teacher's prompt (paper, Table 2).
    - `_compute_loss` scores the sampled answer once more under that prompt, with the teacher's weights and without
      gradient, and adds `w` times the divergence of the two next-token distributions; GRPO's advantages are scaled by
      `1 - w`. With `w = 0` it is GRPO bit for bit.

    All that GRPO can do (vLLM, tools, environments, async rewards, images, every `loss_type`) is inherited.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`): As in GRPO.
        reward_funcs (`RewardFunc` or `list`, *optional*): As in GRPO.
        args ([`SDPOConfig`], *optional*): Options.
        feedback_func (`Callable`, *optional*):
            `(prompts, completions, rewards, **columns) -> list[str | None]`, sync or async: one text per rollout.
            `rewards` are the weighted rewards (NaN where there is none), `columns` the other dataset columns.
        teacher_model (`str` or `PreTrainedModel`, *optional*):
            An external, frozen teacher with the same token ids, instead of the student's own weights.
        **kwargs: All of [`~trl.GRPOTrainer`]'s.

    Raises:
        `TypeError`, `ValueError`: options that contradict each other, or a model with nothing to train.
    """

    _tag_names = ["trl", "sdpo"]  # noqa: RUF012 - as TRL declares it
    _name = "SDPO"
    _paper = {  # noqa: RUF012 - as TRL declares it
        "title": "Reinforcement Learning via Self-Distillation",
        "id": "2601.20802",
        "citation": (
            "@misc{sdpo2026,\n"
            "    title         = {{Reinforcement Learning via Self-Distillation}},\n"
            "    year          = 2026,\n"
            "    eprint        = {2601.20802},\n"
            "    archivePrefix = {arXiv},\n"
            "}"
        ),
    }

    def __init__(
        self,
        model: "str | PreTrainedModel",
        reward_funcs: Any = None,
        args: SDPOConfig | None = None,
        *positional: Any,
        feedback_func: Callable[..., Any] | None = None,
        teacher_model: "str | PreTrainedModel | None" = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = SDPOConfig(f"{name.split('/')[-1]}-SDPO")
        check_arguments(model, args, kwargs.get("peft_config"), feedback_func, teacher_model)
        self._feedback_func = feedback_func
        self._feedback_calls: list[Any] = []
        self._rollouts: Rollouts | None = None
        self._distills = args.distillation_weight > 0.0
        # TRL takes its reference from the model's path, and for an adapter from the bare model under it. Here it is
        # the policy as it was handed over, so TRL is asked for none. `sync_ref_model` moves it, which is TRL's own
        # business.
        self._anchors = self._distills and args.beta != 0.0 and not args.sync_ref_model
        with _no_reference(args, self._anchors):
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self._distills:
            self.beta = args.beta
            self._set_up_distillation(teacher_model)

    def _set_up_distillation(self, teacher_model: "str | PreTrainedModel | None") -> None:
        args = self.args
        if self.is_fsdp_enabled or (self.is_deepspeed_enabled and args.deepspeed_plugin.zero_stage == 3):
            raise NotImplementedError(
                "SDPO does not run with sharded parameters (FSDP, ZeRO-3) yet: a teacher's weights could not be "
                "swapped in. Use DDP or ZeRO-2, or `distillation_weight=0`."
            )
        if args.success_reward_func is not None and args.success_reward_func not in self.reward_func_names:
            raise ValueError(
                f"`success_reward_func={args.success_reward_func!r}` is not the name of a reward function. Yours are: "
                f"{', '.join(self.reward_func_names)}."
            )
        columns = set(getattr(self.train_dataset, "column_names", None) or ())
        if not (args.use_successful_as_teacher or args.include_environment_feedback or "demonstration" in columns):
            raise ValueError(
                "Nothing could teach: `use_successful_as_teacher` and `include_environment_feedback` are off, and the "
                "dataset has no `demonstration` column. Turn one on, or add the column."
            )
        base = self.model.get_base_model() if is_peft_model(self.model) else self.model
        self._tap = teacher_tap = self._make_tap(base)
        self._stores: dict[str, WeightStore] = {}
        if self._anchors or (teacher_model is None and args.teacher_model_kind in ("base", "trust_region")):
            self._stores["initial_policy"] = WeightStore(self.model)
        if teacher_model is None:
            self._teacher = build_teacher(self.model, args, self._stores)
        else:
            self._teacher, teacher_tap = self._external_teacher(teacher_model)
        steps_per_batch = args.steps_per_generation * self.num_iterations / args.gradient_accumulation_steps
        once = self._teacher.rests_within(steps_per_batch, lives=teacher_model is None)
        self._teacher_pass = TeacherPass(self, self._teacher, teacher_tap, once)
        self.add_callback(TeacherUpdateCallback(self._teacher, self._finished_rollout_batches))
        self._prompt_builder = TeacherPromptBuilder(self)
        self._sums = MetricSums(
            self.accelerator, HealthMonitor(args.diagnostics_warning_interval, args.diagnostics_flat_tolerance)
        )

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """TRL's event loop for async functions, started if none of its own needed it."""
        if not self._has_async_funcs:
            self.async_loop_thread, self.async_loop, ready = start_event_loop_in_daemon(name="SDPOTrainer-AsyncLoop")
            ready.wait()
            atexit.register(shutdown_event_loop_in_daemon, self.async_loop_thread, self.async_loop)
            self._has_async_funcs = True
        return self.async_loop

    def _make_tap(self, model: PreTrainedModel) -> HeadTap:
        return HeadTap(
            model,
            self.temperature,
            position_ids_from_mask=not self._is_vlm,
            cast_to_fp32=self.args.cast_lm_head_to_fp32,
        )

    def _external_teacher(self, model: "str | PreTrainedModel") -> tuple[Teacher, HeadTap]:
        loaded = load_external_teacher(
            model, self.args.teacher_model_init_kwargs, self._tokenizer, self.args.trust_remote_code
        )
        prepared = prepare_external_teacher(loaded, self.temperature, self)
        return Teacher(prepared), self._make_tap(loaded)

    def _finished_rollout_batches(self) -> int:
        return self._step // (self.args.steps_per_generation * self.num_iterations)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list({*self._signature_columns, "privileged_context", "demonstration"})

    # Rollouts

    def _log_completion_extra(self, column: str, values: list) -> None:
        if self._distills and column == "feedback":
            self._feedback_calls.append(values)  # shown in the table once, joined, by `_calculate_rewards`
        else:
            super()._log_completion_extra(column, values)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self._feedback_calls.clear()
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if not self._distills:
            return rewards
        count = len(prompts)
        total = rollout_rules.weighted_rewards(rewards, self.reward_weights)
        given = None
        if self._feedback_func is not None:
            given = rollout_rules.function_texts(
                self._feedback_func,
                prompts,
                completions,
                total[self._local_rows(count)].tolist(),
                inputs,
                self._event_loop,
            )
        feedback = rollout_rules.gather_feedback(
            [
                *rollout_rules.logged_texts(self._feedback_calls, count),
                rollout_rules.environment_texts(self.environments),
                given,
                rollout_rules.column_texts(inputs, "privileged_context"),
            ],
            count,
        )
        super()._log_completion_extra("feedback", feedback)
        worked = rollout_rules.column_texts(inputs, "demonstration")
        if self.args.remove_thinking_from_demonstration:
            worked = [text and strip_thinking(text) for text in worked]
        self._rollouts = Rollouts(prompts, completions, rewards, feedback, worked)
        return rewards

    def _generate_and_score_completions(self, inputs):
        if not self._distills:
            return super()._generate_and_score_completions(inputs)
        with _attribute(self, "beta", 0.0 if self._anchors else self.beta):
            output = super()._generate_and_score_completions(inputs)
        output.update(self._teacher_rows(output))
        if self._anchors:
            output["ref_per_token_logps"] = self._initial_log_probs(output)
        self._rollouts = None
        return output

    def _local_rows(self, count: int) -> slice:
        start = self.accelerator.process_index * count
        return slice(start, start + count)

    def _route(self, output: dict[str, Any]) -> Routing:
        args, rollouts = self.args, self._rollouts
        local = self._local_rows(len(rollouts.prompts))
        if args.success_reward_func is None:
            deciding = rollout_rules.weighted_rewards(rollouts.rewards, self.reward_weights)
        else:
            deciding = rollouts.rewards[:, self.reward_func_names.index(args.success_reward_func)]
        success = rollout_rules.succeeded(deciding, args.success_reward_threshold)
        texts = rollout_rules.demonstrations(
            rollouts,
            success[local],
            args.remove_thinking_from_demonstration,
            self._prompt_builder.thinking_opened(output["prompt_ids"]),
        )
        rich = torch.tensor([text is not None for text in rollouts.feedback], device=self.accelerator.device)
        return rollout_rules.route(
            rollouts,
            success,
            gather_object(texts),
            self.accelerator.gather(rich),
            local,
            self.num_generations if self.model.training else self.num_generations_eval,
            args.routing_rule,
        )

    def _teacher_rows(self, output: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The row-aligned tensors of the teacher, and the counts that the loss is divided by."""
        device = self.accelerator.device
        routing = self._route(output)
        built = self._prompt_builder.build(self._rollouts.prompts, routing.hints, output)
        available = torch.tensor([hint is not None for hint in routing.hints], device=device)
        active = self._loss_mask(output) & available[:, None]  # (B, T)
        counts = torch.stack([active.sum(), active.any(dim=1).sum()])
        counts = self.accelerator.reduce(counts, reduction="sum")
        self._sums.add_batch(
            self._mode,
            {**routing.stats, "shortened_share": float(built.shortened)},
            truncated_share=self._metrics[self._mode]["completions/clipped_ratio"][-1],
        )
        if self.log_completions:
            texts = [text if hint is not None else None for text, hint in zip(built.texts, routing.hints, strict=True)]
            self._logs["extra"]["teacher_prompt"].extend(gather_object(texts))
        rows = {
            "feedback_available": available,
            "active_tokens": counts[0],
            "active_rows": counts[1],
            **{key: value.to(device) for key, value in built.tensors.items()},
        }
        return {**rows, **self._teacher_pass.cached({**output, **rows}, active.any(dim=1))}

    def _initial_log_probs(self, output: dict[str, Any]) -> torch.Tensor:
        """TRL's reference log-probabilities, of the policy as it was at the start."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        training = self.model.training
        size = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        with evaluation_mode(self.model), self._stores["initial_policy"].applied():
            log_probs, _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, mask, output["completion_ids"].size(1), batch_size=size, **vision_inputs(output)
            )
        return log_probs

    # Loss

    @staticmethod
    def _loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
        """The sampled tokens that count, bool of shape `(B, T)`: one mask, used everywhere."""
        mask = inputs["completion_mask"].bool()
        return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask

    def _compute_loss(self, model, inputs):
        if not self._distills:
            return super()._compute_loss(model, inputs)
        inputs = self._needed(inputs)
        active = self._loss_mask(inputs) & inputs["feedback_available"][:, None]  # (B, T)
        teacher = self._teacher_pass.head(inputs, active)
        scored: list[TokenScores] = []

        def score(head: TokenHead) -> TapScores:
            scores, result = self._score_student(head, teacher, inputs, active)
            scored.append(scores)
            return result

        with self._tap.consume(score):
            policy_loss = super()._compute_loss(model, self._policy_inputs(inputs))
        self._sums.add_tokens(self._mode, token_sums(scored[0], self.args.divergence))
        return policy_loss + self.args.distillation_weight * scored[0].loss

    def _score_student(
        self, head: TokenHead, teacher: "TokenHead | MixedHead", inputs: dict[str, Any], active: torch.Tensor
    ) -> tuple[TokenScores, TapScores]:
        """Everything the loss needs from the student's one forward: the distilled tokens, then the others."""
        others = inputs["completion_mask"].bool() & ~active  # TRL also asks for what tools wrote
        old, correction = inputs.get("old_per_token_logps"), inputs.get("importance_sampling_ratio")
        coefficients = token_coefficients(active, self.loss_type, self._normalizer(inputs))
        if correction is not None:  # TRL's correction for its sampler: (B, T) or (B, 1)
            coefficients = coefficients * correction
        request = ScoreRequest(
            inputs["completion_ids"][active],
            self.args.divergence,
            coefficients[active],
            None if old is None else old[active],
            self.args.distillation_is_clip,
            policy_gradient=self._has_policy_term,
            entropy_gradient=self._entropy_bonus_enabled,
        )
        distilled = score_tokens(predicting(head, active), teacher, request, self.args.distillation_impl)
        policy = replace(request, token_ids=inputs["completion_ids"][others], coefficients=None, old_log_probs=None)
        rest = score_tokens(predicting(head, others), None, policy, self.args.distillation_impl)
        padding = head.hidden.size(1) - 1 - active.size(1)

        def place(name: str) -> torch.Tensor:  # (B, L - 1)
            values = rest.log_prob.new_zeros(active.shape)
            values = values.masked_scatter(active, getattr(distilled, name))
            return F.pad(values.masked_scatter(others, getattr(rest, name)), (padding, 0))

        return distilled, TapScores(distilled.loss + rest.loss, place("log_prob"), place("entropy"))

    @property
    def _has_policy_term(self) -> bool:
        return self.args.distillation_weight < 1.0 or self.beta != 0.0

    def _needed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Without a policy term, the rows that are distilled (and others where another process has more of them)."""
        if vision_inputs(inputs):
            return inputs  # images are not aligned with rows
        if not (self._has_policy_term or self._entropy_bonus_enabled or self.aux_loss_enabled):
            active = (self._loss_mask(inputs) & inputs["feedback_available"][:, None]).any(dim=1)  # (B,)
            # TRL gathers values per row, so all processes run as many rows as the one that has most to learn.
            count = int(self.accelerator.gather(active.sum().clamp(min=1).reshape(1)).max())
            rows = active.int().argsort(descending=True, stable=True)[:count]
            inputs = take_rows(inputs, rows)
        return trim_padding(inputs)

    def _policy_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """TRL's inputs with its advantages at their share: every `loss_type` is linear in them for one sign."""
        weight = self.args.distillation_weight
        scaled = {**inputs, "advantages": inputs["advantages"] * (1.0 - weight)}
        corrects_anchor = self.beta != 0.0 and self.args.use_bias_correction_kl
        if weight == 1.0 and not corrects_anchor:
            # Zero times the ratio of a very stale token would be zero times infinity.
            scaled.pop("old_per_token_logps", None)
        return scaled

    def _normalizer(self, inputs: dict[str, Any]) -> Normalizer:
        share = 1.0 / self.accelerator.num_processes
        accumulation = 1
        if self.model.training:  # in eval, the batch is neither split across steps nor accumulated
            accumulation = self.current_gradient_accumulation_steps
            share *= accumulation / self.args.steps_per_generation
        return Normalizer(
            inputs["active_tokens"], inputs["active_rows"], share, accumulation, self.max_completion_length
        )

    # Logs

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._distills:
            means = self._sums.flush(self._mode)
            if means and self._mode == "train" and self._teacher.store is not None:
                means["sdpo/teacher_distance"] = self._teacher.store.distance()
            self._metrics[self._mode].update({name: [value] for name, value in means.items()})
        super().log(logs, start_time)

    # Files

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._distills and self.args.should_save:
            for name, store in self._stores.items():
                store.save(Path(output_dir) / f"sdpo_{name}.safetensors")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._distills and checkpoint is not None:
            for name, store in self._stores.items():
                store.load(Path(checkpoint) / f"sdpo_{name}.safetensors")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        target = Path(output_dir or self.args.output_dir)
        if self.is_world_process_zero():
            # TRL writes a card with a checkpoint or a push alone; PEFT fills an empty one in wherever there is none.
            self.create_model_card(model_name=(self.args.hub_model_id or target.name).split("/")[-1])
            card = Path(self.args.output_dir) / "README.md"
            if target != card.parent:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(card, target)
        super().save_model(output_dir, _internal_call)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: "str | list[str] | None" = None
    ) -> None:
        super().create_model_card(model_name, dataset_name, tags)
        path = Path(self.args.output_dir) / "README.md"
        source = get_config_model_id(self.model.config)
        if self.is_world_process_zero() and (not source or Path(source).is_dir()):
            # TRL names no base model that is not on the Hub; its metadata must stay empty, its text need not.
            name = f"`{Path(source).name}` (a local folder)" if source else "a model built from its configuration"
            card = ModelCard.load(path)
            card.text = card.text.replace("[None](https://huggingface.co/None)", name)
            card.save(path)


@contextmanager
def _attribute(target: Any, name: str, value: Any) -> Iterator[None]:
    previous = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, previous)


@contextmanager
def _no_reference(args: SDPOConfig, active: bool) -> Iterator[None]:
    """Keep TRL from building a reference model while it sets up."""
    with _attribute(args, "beta", 0.0 if active else args.beta):
        yield
