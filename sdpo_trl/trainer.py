"""`SDPOTrainer`: TRL's `GRPOTrainer` whose per-token signal comes from the same network after it has read feedback."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from trl.trainer.utils import get_config_model_id

from .arguments import check_arguments
from .batches import take_rows, trim_padding
from .callbacks import HealthMonitor, TeacherUpdateCallback
from .config import SDPOConfig
from .external import load_external_teacher, prepare_external_teacher
from .feedback_trainer import FeedbackTrainer
from .files import attribute
from .heads import HeadTap, MixedHead, TapScores, TokenHead, outputs_of, predicting
from .loss import Normalizer, token_coefficients
from .metrics import MetricSums, token_sums
from .scores import ScoreRequest, TokenScores, score_tokens
from .shards import check_sharding, whole_shape
from .store import WeightStore
from .teacher import Teacher, build_teacher
from .teacher_pass import TeacherPass
from .teacher_prompts import TeacherPromptBuilder


class SDPOTrainer(FeedbackTrainer):
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
        `NotImplementedError`: FSDP1, or forms of ZeRO-3 whose weights a teacher's could not replace.
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
        self._feedback_calls = []
        self._rollouts = None
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
        check_sharding(self.accelerator.state)
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
        if self.reward_func_names.count(args.success_reward_func) > 1:
            raise ValueError(
                f"`success_reward_func={args.success_reward_func!r}` names several reward functions. Rename one."
            )
        base = self.model.get_base_model() if is_peft_model(self.model) else self.model
        self._tap = teacher_tap = self._make_tap(base)
        self._stores: dict[str, WeightStore] = {}
        # DeepSpeed and FSDP change the parameters' layout and precision when training begins.
        make_store = partial(
            WeightStore, offload=args.teacher_offload, deferred=self.is_deepspeed_enabled or self.is_fsdp_enabled
        )
        if self._anchors or (teacher_model is None and args.teacher_model_kind in ("base", "trust_region")):
            self._stores["initial_policy"] = make_store(self.model)
        if teacher_model is None:
            self._teacher = build_teacher(self.model, args, self._stores, make_store)
        else:
            self._teacher, teacher_tap = self._external_teacher(teacher_model)
        once = self._teacher.rests_within(
            batch=args.steps_per_generation * self.num_iterations, step=args.gradient_accumulation_steps
        )
        self._teacher_pass = TeacherPass(self, self._teacher, teacher_tap, once)
        self.add_callback(TeacherUpdateCallback(self._teacher, self._finished_rollout_batches))
        self._prompt_builder = TeacherPromptBuilder(self)
        # A teacher whose padded vocabulary is shorter knows nothing of the student's last items.
        self._known_tokens = whole_shape(teacher_tap.model.get_output_embeddings().weight)[0]
        self._sums = MetricSums(
            self.accelerator, HealthMonitor(args.diagnostics_warning_interval, args.diagnostics_flat_tolerance)
        )

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
        return Teacher(prepared, lives=False), self._make_tap(loaded)

    def _finished_rollout_batches(self) -> int:
        return self._step // (self.args.steps_per_generation * self.num_iterations)

    # Loss

    def _compute_loss(self, model, inputs):
        if not self._distills:
            return super()._compute_loss(model, inputs)
        inputs = self._needed(inputs)
        active = self._active(inputs)  # (B, T)
        teacher = self._teacher_pass.head(inputs, active)
        scored: list[TokenScores] = []

        def score(head: TokenHead) -> TapScores:
            scores, result = self._score_student(head, teacher, inputs, active)
            scored.append(scores)
            return result

        with self._tap.consume(score), outputs_of(model) as outputs:
            policy_loss = super()._compute_loss(model, self._policy_inputs(inputs))
        self._sums.add_tokens(self._mode, token_sums(scored[0], self.args.divergence))
        return policy_loss + self.args.distillation_weight * outputs[0]["loss"]

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

        return distilled, TapScores(distilled.loss, place("log_prob"), place("entropy"))

    @property
    def _has_policy_term(self) -> bool:
        return self.args.distillation_weight < 1.0 or self.beta != 0.0

    def _needed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Without a policy term, the rows that are distilled (and others where another process has more of them)."""
        if self._is_vlm:
            return inputs  # images are not aligned with rows
        if not (self._has_policy_term or self._entropy_bonus_enabled or self.aux_loss_enabled):
            active = self._active(inputs).any(dim=1)  # (B,)
            # TRL gathers values per row, so all processes run as many rows as the one that has most to learn.
            count = int(self.accelerator.gather(active.sum().clamp(min=1).reshape(1)).max())
            rows = active.int().argsort(descending=True, stable=True)[:count]
            inputs = take_rows(inputs, rows)
        return inputs if self.pad_to_multiple_of else trim_padding(inputs)

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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._distills:
            means = self._sums.flush(self._mode)
            if means and self._mode == "train" and self._teacher.store is not None:
                means["sdpo/teacher_distance"] = self._teacher.store.distance()
            self._metrics[self._mode].update({name: [value] for name, value in means.items()})
        super().log(logs, start_time)


@contextmanager
def _no_reference(args: SDPOConfig, active: bool) -> Iterator[None]:
    """Keep TRL from building a reference model while it sets up."""
    with attribute(args, "beta", 0.0 if active else args.beta):
        yield
