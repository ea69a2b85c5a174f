"""`SDPOTrainer`: TRL's `GRPOTrainer` whose per-token signal comes from the same network after it has read feedback."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from accelerate.utils import is_peft_model
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl.trainer.utils import get_config_model_id

from . import no_reward
from .adapters import check_adapter, show_bias
from .arguments import check_arguments
from .batches import position_limit
from .callbacks import PromptOrderCallback, TeacherUpdateCallback
from .config import SDPOConfig
from .external import load_external_teacher, prepare_external_teacher
from .files import attribute
from .heads import HeadTap
from .health import HealthMonitor
from .metrics import MetricSums
from .observed_trainer import ObservedTrainer, StepClockCallback
from .run_state import RunningMean, SnapshotGate, SuccessBuffer
from .shards import check_sharding, whole_shape
from .store import WeightStore
from .teacher import Teacher, build_teacher, keep_gradients
from .teacher_pass import TeacherPass
from .teacher_prompts import TeacherPromptBuilder
from .teacher_server import ServerPass
from .turn_hints import TurnHintWriter
from .weight_sync import send_merged


class SDPOTrainer(ObservedTrainer):
    """
    Trainer for Self-Distilled Policy Optimization (SDPO, arXiv 2601.20802).

    The differences to [`~trl.GRPOTrainer`], each an override that calls it:

    - Rows may hold `messages` or `conversations`, and the `tools` that may be called in them
      ([`~sdpo_trl.rows.prompt_row`]). A tool call that cannot be read becomes an observation, as TRL makes of a tool
      that raises.
    - `_calculate_rewards` also collects feedback per rollout: `log_extra("feedback", [...])` in a reward function, the
      `feedback` of an environment, `feedback_func`, and the dataset columns `privileged_context` and `demonstration`.
    - `_generate_and_score_completions` also selects what each row's teacher is told ([`select_feedback`] over the
      global batch) and writes the teacher's prompt (paper, Table 2).
    - `_compute_loss` scores the sampled answer once more under that prompt, with the teacher's weights and without
      gradient, and adds `w` times the divergence of the two next-token distributions; GRPO's advantages are scaled by
      `1 - w`. With `w = 0` it is GRPO bit for bit.

    All that GRPO can do (vLLM, tools, environments, async rewards, images, every `loss_type`) is inherited. For a rule
    of your own about what the teacher is told, override `choose_hints`.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`): As in GRPO.
        reward_funcs (`RewardFunc` or `list`, *optional*):
            As in GRPO. Not needed where no option reads rewards: with `teacher_context="none"`, or with feedback and
            `use_successful_as_teacher=False`.
        args ([`SDPOConfig`], *optional*): Options.
        feedback_func (`Callable`, *optional*):
            `(prompts, completions, rewards, **columns) -> list`, sync or async: per rollout a text, `None`, or a list
            of `(turn, text)`, each told where that turn begins (the first one is 0). The other sources of feedback
            but the columns may give such lists too.
            `rewards` are the weighted rewards (NaN where there is none), `columns` the other dataset columns.
        teacher_model (`str` or `PreTrainedModel`, *optional*):
            An external, frozen teacher with the same token ids, instead of the student's own weights.
        **kwargs: All of [`~trl.GRPOTrainer`]'s.

    Raises:
        `TypeError`, `ValueError`: options that contradict each other, or a model with nothing to train.
        `NotImplementedError`: FSDP1, or forms of ZeRO-3 whose weights a teacher's could not replace.
    """

    _teacher_pass_type = TeacherPass
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
        own_kind = args.teacher_model_kind if teacher_model is None else "external"
        self._teacher_kind = own_kind if self._distills else "none"
        # TRL takes its reference from the model's path, and for an adapter from the bare model under it. Here it is
        # the policy as it was handed over, so TRL is asked for none. `sync_ref_model` moves it, which is TRL's own
        # business.
        self._anchors = self._distills and args.beta != 0.0 and not args.sync_ref_model
        unrewarded = no_reward.may_lack_rewards(args, reward_funcs)
        if unrewarded:
            reward_funcs = [no_reward.unrewarded]
        with _no_reference(args, self._anchors):
            super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if unrewarded:
            no_reward.remove_stand_in(self)
            if not self.reward_funcs:  # no environment brought its own
                no_reward.check_unrewarded(args)
        self._set_up_agent()
        self._set_up_observation()
        self.add_callback(PromptOrderCallback())
        if self._distills:
            self.beta = args.beta
            if self.use_vllm:
                send_merged(self.vllm_generation)
            self._set_up_distillation(teacher_model)
        self.add_callback(StepClockCallback(self._clock))

    def _set_up_distillation(self, teacher_model: "str | PreTrainedModel | None") -> None:
        args = self.args
        check_sharding(self.accelerator.state)
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError("Nothing in the model trains: leave `inference_mode=False` in the `peft_config`.")
        if is_peft_model(self.model):
            check_adapter(self.model)
        if args.success_reward_func is not None and args.success_reward_func not in self.reward_func_names:
            raise ValueError(
                f"`success_reward_func={args.success_reward_func!r}` is not the name of a reward function. Yours are: "
                f"{', '.join(self.reward_func_names)}."
            )
        columns = self._train_columns
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
        keep_gradients(base)
        show_bias(base, sharded=self.is_fsdp_enabled or is_deepspeed_zero3_enabled())
        self._tap = teacher_tap = self._make_tap(base)
        self._stores: dict[str, WeightStore] = {}
        self._set_up_memory()
        # DeepSpeed and FSDP change the parameters' layout and precision when training begins.
        make_store = partial(
            WeightStore, offload=args.teacher_offload, deferred=self.is_deepspeed_enabled or self.is_fsdp_enabled
        )
        if self._anchors or (teacher_model is None and args.teacher_model_kind in ("base", "trust_region")):
            self._stores["initial_policy"] = make_store(self.model)
        if teacher_model is None:
            gate = None if self._gate is None else self._gate.opens
            self._teacher = build_teacher(self.model, args, self._stores, make_store, gate)
        else:
            self._teacher, teacher_tap = self._external_teacher(teacher_model)
        once = self._teacher.rests_within(
            batch=args.steps_per_generation * self.num_iterations, step=args.gradient_accumulation_steps
        )
        self.add_callback(
            TeacherUpdateCallback(self._teacher, self._finished_rollout_batches, self._gap_size, self._clock)
        )
        limit = None if teacher_model is None else position_limit(teacher_tap.model.config)
        self._prompt_builder = TeacherPromptBuilder(self, limit)
        if args.reads_feedback:
            self._prompt_builder.check_dataset(self.train_dataset)
        self._turn_hints = TurnHintWriter(self)
        # A teacher whose padded vocabulary is shorter knows nothing of the student's last items.
        self._known_tokens = whole_shape(teacher_tap.model.get_output_embeddings().weight)[0]
        if args.use_teacher_server:
            self._teacher_pass = ServerPass(self)
        else:
            self._teacher_pass = self._teacher_pass_type(self, self._teacher, teacher_tap, once)
        self._sums = MetricSums(self.accelerator, self._health)

        self._teacher_answers = args.evaluate_teacher and not (
            teacher_model is not None or self.use_vllm or self.tools or self.environment_factories is not None
            or self.rollout_func is not None or self._is_vlm or not self.reward_funcs
        )  # fmt: skip

    def _set_up_memory(self) -> None:
        """What the run remembers from step to step, and keeps in its checkpoints."""
        args = self.args
        self._health = HealthMonitor(
            args.diagnostics_warning_interval, args.diagnostics_flat_tolerance, args.has_policy_term
        )
        self._gap_size = RunningMean()
        self._remembers = {"health": self._health}
        if args.distillation_log_ratio_clip_running is not None:
            self._remembers["gap_size"] = self._gap_size
        self._gate = SnapshotGate() if args.teacher_snapshot_gate else None
        if self._gate is not None:
            self._remembers["snapshot_gate"] = self._gate
        self._buffer = None
        if args.success_buffer_size > 0:
            self._check_buffer_key()
            self._buffer = SuccessBuffer(
                args.success_buffer_size, args.success_buffer_questions, args.success_buffer_max_age,
                args.demonstration_choice, args.seed,
            )  # fmt: skip
            self._remembers["success_buffer"] = self._buffer

    @property
    def _train_columns(self) -> set[str]:
        """The columns of the training set; a streamed one may not know them, a list has none."""
        return set(getattr(self.train_dataset, "column_names", None) or ())

    def _check_buffer_key(self) -> None:
        """A question must have a name that tells it from the others."""
        key = self.args.success_buffer_key
        columns = self._train_columns
        if key is not None and columns and key not in columns:
            raise ValueError(
                f"`success_buffer_key={key!r}` is not a column of the training set. Its columns: {sorted(columns)}."
            )
        unnamed = "its images" if columns & {"image", "images"} else "its environment's observation"
        if key is None and (columns & {"image", "images"} or self.environment_factories is not None):
            raise ValueError(
                f"The success buffer knows a question by its prompt, which lacks {unnamed}, so another question's "
                "answer could be shown. Name questions by a dataset column: `success_buffer_key='id'`."
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

    # Logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._distills:
            evaluated = next((name for name in logs if name.endswith("_runtime")), "eval")
            means = self._sums.flush(self._mode, evaluated)
            if means and self._mode == "train":
                means["sdpo/distillation_weight"] = self._used_weight
                if self._teacher.store is not None:
                    means["sdpo/teacher_distance"] = self._teacher.store.distance()
                if "grad_norm" in logs and self._used_weight > 0 and not self._scales_advantages:
                    self._sums.observe_gradient(logs["grad_norm"], means["sdpo/gap_size"])
            if self.args.use_teacher_server:  # which tells too little to know it
                means.pop("sdpo/teacher_entropy", None)
            if not self.reward_funcs:
                means = {name: value for name, value in means.items() if name not in no_reward.SUCCESS_METRICS}
            if self._acts:
                means |= self._agent_metrics.flush(self._mode)
            self._metrics[self._mode].update({name: [value] for name, value in means.items()})
        super().log(logs, start_time)


@contextmanager
def _no_reference(args: SDPOConfig, active: bool) -> Iterator[None]:
    """Keep TRL from building a reference model while it sets up."""
    with attribute(args, "beta", 0.0 if active else args.beta):
        yield
