"""The rollout half of the trainer: feedback is collected and selected, and each row's teacher is told something.

Knows: TRL's rollouts and rewards, prompts. Deliberately does not know: losses, teachers' weights.
"""

import asyncio
import atexit
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from . import feedback_sources
from . import rollouts as rollout_rules
from .agent_trainer import AgentTrainer
from .batches import same_random_numbers, vision_inputs
from .callbacks import RolloutWatcher
from .files import attribute
from .loss import difficulty_weights
from .metrics import MetricSums
from .no_reward import REWARD_METRICS
from .reprompt import Hint, Prompt, strip_thinking
from .rollouts import Rollouts, Routing
from .run_state import SnapshotGate, SuccessBuffer, question_key
from .teacher import Teacher, evaluation_mode
from .teacher_pass import TeacherPass
from .teacher_prompts import NoRoomError, TeacherPromptBuilder, TeacherPrompts
from .teacher_server import ServerPass
from .turn_hints import TurnHintWriter
from .turns import keep_reached, span_mask, turn_index

logger = logging.getLogger(__name__)


class FeedbackTrainer(AgentTrainer):
    """
    GRPO whose batches also hold the teacher's prompts, which rows have feedback, and how many tokens are active.

    [`SDPOTrainer`] sets the collaborators up; its docstring says what each override adds.
    """

    _distills: bool
    _anchors: bool
    _feedback_func: Callable[..., Any] | None
    _feedback_calls: list[Any]
    _rollouts: Rollouts | None
    _prompt_builder: TeacherPromptBuilder
    _turn_hints: TurnHintWriter
    _teacher: Teacher
    _teacher_pass: TeacherPass | ServerPass
    _sums: MetricSums
    _gate: SnapshotGate | None
    _buffer: SuccessBuffer | None
    _known_tokens: int
    _teacher_answers: bool
    _trains: bool = True

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        key = self.args.success_buffer_key
        added = {"privileged_context", "demonstration", *([key] if key else [])}
        self._signature_columns = list({*self._signature_columns, *added})

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """TRL's event loop for async functions, started if none of its own needed it."""
        if not self._has_async_funcs:
            self.async_loop_thread, self.async_loop, ready = start_event_loop_in_daemon(name="SDPOTrainer-AsyncLoop")
            ready.wait()
            atexit.register(shutdown_event_loop_in_daemon, self.async_loop_thread, self.async_loop)
            self._has_async_funcs = True
        return self.async_loop

    @staticmethod
    def _loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
        """The sampled tokens that count, bool of shape `(B, T)`: one mask, used everywhere."""
        mask = inputs["completion_mask"].bool()
        return mask & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask

    def _log_completion_extra(self, column: str, values: list) -> None:
        if self._distills and column == "feedback":
            self._feedback_calls.append(values)  # shown in the table once, joined, by `_calculate_rewards`
        else:
            super()._log_completion_extra(column, values)

    def _active(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The tokens that are distilled, bool of shape `(B, T)`."""
        known = inputs["completion_ids"] < self._known_tokens
        active = self._loss_mask(inputs) & inputs["feedback_available"][:, None] & known
        return active & inputs["in_span"] if "in_span" in inputs else active

    def _active_counts(self, active: torch.Tensor) -> torch.Tensor:
        """What the loss is divided by: tokens and rows that are distilled, `(B, T)` -> int64 `(2,)`; a collective."""
        counts = torch.stack([active.sum(), active.any(dim=1).sum()])
        return self.accelerator.reduce(counts, reduction="sum")

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self._feedback_calls.clear()
        if self.reward_funcs:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        else:  # TRL would warn at every batch that all functions gave nothing
            rewards = torch.zeros(len(prompts) * self.accelerator.num_processes, 0, device=self.accelerator.device)
        if not self._distills:
            return rewards
        count = len(prompts)
        total = rollout_rules.weighted_rewards(rewards, self.reward_weights)
        given = None
        if self._feedback_func is not None:
            given = feedback_sources.function_texts(
                self._guard(self._feedback_func, "`feedback_func`"),
                prompts,
                completions,
                total[self._local_rows(count)].tolist(),
                inputs,
                self._event_loop,
            )
        sources = [
            *feedback_sources.logged_texts(self._feedback_calls, count),
            feedback_sources.environment_texts(self.environments),
            given,
            feedback_sources.column_texts(inputs, "privileged_context"),
        ]
        feedback = feedback_sources.gather_feedback(sources, count)
        turns = feedback_sources.gather_turn_feedback(sources, count)
        shown = [feedback_sources.shown_feedback(*row) for row in zip(feedback, turns, strict=True)]
        super()._log_completion_extra("feedback", shown)
        worked = feedback_sources.column_texts(inputs, "demonstration")
        if self.args.remove_thinking_from_demonstration:
            worked = [text and strip_thinking(text) for text in worked]
        keys = None
        if self._buffer is not None:
            column = self.args.success_buffer_key
            keys = [
                question_key(row, row.get("prompt", prompt), column)
                # An evaluation set may lack the column: its questions are then unknown.
                if self._trains or column is None or row.get(column) is not None
                else None
                for row, prompt in zip(inputs, prompts, strict=True)
            ]
        self._rollouts = Rollouts(prompts, completions, rewards, feedback, worked, keys, turns)
        return rewards

    def _generate_and_score_completions(self, inputs):
        self._trains = self.model.training  # some ways to generate leave the model in another mode
        if not self._distills:
            return super()._generate_and_score_completions(inputs)
        with attribute(self, "beta", 0.0 if self._anchors else self.beta):
            output = super()._generate_and_score_completions(inputs)
        output.update(self._teacher_rows(output, inputs))
        if self._anchors:
            output["ref_per_token_logps"] = self._initial_log_probs(output)
        for watcher in self._watchers:
            watcher.batch_made(self, self._rollouts, output)
        self._rollouts = None
        if not self.reward_funcs:
            for name in REWARD_METRICS:
                del self._metrics[self._mode][name]
        return output

    @property
    def _watchers(self) -> list[RolloutWatcher]:
        """Who looks on: in training alone."""
        watchers = [x for x in self.callback_handler.callbacks if self._trains and isinstance(x, RolloutWatcher)]
        if watchers and self.args.use_teacher_server:
            raise ValueError(
                f"`{type(watchers[0]).__name__}` shows the teacher's whole distribution, of which the server tells a "
                "few items (`use_teacher_server=True`). Drop one of them."
            )
        return watchers

    def _local_rows(self, count: int) -> slice:
        start = self.accelerator.process_index * count
        return slice(start, start + count)

    def _succeeded(self, rewards: torch.Tensor) -> torch.Tensor:
        """Which attempts passed, `(N, F)` -> bool `(N,)`."""
        if self.args.success_reward_func is None:
            deciding = rollout_rules.weighted_rewards(rewards, self.reward_weights)
        else:
            deciding = rewards[:, self.reward_func_names.index(self.args.success_reward_func)]
        return rollout_rules.succeeded(deciding, self.args.success_reward_threshold)

    @property
    def _group_size(self) -> int:
        return self.num_generations if self._trains else self.num_generations_eval

    def _route(self, output: dict[str, Any], success: torch.Tensor) -> Routing:
        args, rollouts = self.args, self._rollouts
        local = self._local_rows(len(rollouts.prompts))
        if not args.reads_feedback:
            return rollout_rules.route_without_feedback(rollouts, success, local, self._group_size)
        texts = rollout_rules.demonstrations(
            rollouts,
            success[local],
            args.remove_thinking_from_demonstration,
            self._prompt_builder.thinking_opened(output["prompt_ids"]),
        )
        everyones = gather_object(texts)
        seed = args.seed + self.state.global_step
        rich = torch.tensor(rollouts.rich, device=self.accelerator.device)
        routing = rollout_rules.route(
            rollouts,
            success,
            everyones,
            self.accelerator.gather(rich),
            local,
            self._group_size,
            args.routing_rule,
            remembered=self._remember(everyones),
            order=rollout_rules.demonstration_order(args.demonstration_choice, everyones, seed),
        )
        chosen = self.choose_hints(list(routing.hints), rollouts, success[local].tolist())
        return rollout_rules.rerouted(routing, chosen, rollouts, success, local, self._group_size)

    def choose_hints(self, hints: list[Hint | None], rollouts: Rollouts, success: list[bool]) -> list[Hint | None]:
        """
        What the teacher of each rollout is told: a method to override for a rule of your own.

        Called once per rollout batch, in training and in evaluation, on every process with its own rows; not with
        `teacher_context="none"`. The gates (`distillation_routing`, `prompt_weighting`) come after it.

        Args:
            hints (`list[Hint | None]`): By the options' rule ([`select_feedback`]), `B` of them; `None`: nothing to
                tell.
            rollouts ([`Rollouts`]): Prompts, completions, feedback texts and rewards.
            success (`list[bool]`): Whether each of the `B` rollouts passed.

        Returns:
            `list[Hint | None]`: `B` of them. A rollout with `None` (or a hint without a text) is not distilled.
        """
        return hints

    def _remember(self, everyones: list[str | None]) -> list[str | None] | None:
        """Earlier successes at the local questions; this batch's are then kept for later ones."""
        keys = self._rollouts.keys
        if self._buffer is None:
            return None
        step = self.state.global_step
        remembered = [self._buffer.offer(key, step) for key in keys]
        if self._trains:
            self._buffer.add(gather_object(keys), everyones, step)
        return remembered

    def _gated(
        self, routing: Routing, output: dict[str, Any], success: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Which local rows are distilled, bool of shape `(B,)`, and what the loss needs to weigh rows."""
        args = self.args
        device = self.accelerator.device
        local = self._local_rows(len(routing.hints))
        distilled = torch.tensor([hint is not None for hint in routing.hints], device=device)
        rows: dict[str, torch.Tensor] = {}
        compares = self._group_size > 1  # an evaluation may sample one answer per prompt
        if args.distillation_routing == "failed":
            distilled &= ~success[local]
        elif args.distillation_routing == "positive_advantage" and compares:
            differ = rollout_rules.differing_groups(self._rollouts.rewards, self._group_size)
            distilled &= (output["advantages"] > 0) & differ[local]
        if args.prompt_weighting == "difficulty" and compares:
            weights = difficulty_weights(success, self.accelerator.gather(distilled), self._group_size)[local]
            distilled &= weights > 0
            rows["prompt_weight"] = weights
        if args.distillation_routing == "failed":
            mask, kept = self._loss_mask(output), ~distilled
            counts = torch.stack([
                mask[kept].sum(), mask.any(dim=1)[kept].sum(), mask.sum(), torch.tensor(len(mask), device=device)
            ])  # fmt: skip
            counts = self.accelerator.reduce(counts, reduction="sum")
            names = ("policy_tokens", "policy_rows", "all_tokens", "all_rows")
            rows |= {"in_policy_term": kept, **dict(zip(names, counts.unbind(), strict=True))}
        return distilled, rows

    def _teacher_rows(self, output: dict[str, Any], inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The row-aligned tensors of the teacher, and the counts that the loss is divided by."""
        device = self.accelerator.device
        turns = turn_index(self._loss_mask(output))  # (B, T)
        self._rollouts = keep_reached(self._rollouts, turns, output["completion_mask"])
        success = self._succeeded(self._rollouts.rewards)
        routing = self._route(output, success)
        available, weights = self._gated(routing, output, success)
        hints = [hint if keep else None for hint, keep in zip(routing.hints, available.tolist(), strict=True)]
        hints, built, inserted, cut = self._told(hints, output)
        available &= torch.tensor([hint is not None for hint in hints], device=device)
        if self._teacher_answers and not self._trains:
            asked = built  # the teacher is asked about the rows that a gate leaves out, too
            wanted = routing.hints
            if hints != wanted:
                wanted, asked, *_ = self._told(wanted, output)
            self._evaluate_teacher(inputs, wanted, asked.prompts)
        if self.args.distillation_span != "all":
            weights = {**weights, "in_span": span_mask(turns, hints, self.args.distillation_span)}
        active = self._active({**output, **weights, "feedback_available": available})  # (B, T)
        counts = self._active_counts(active)
        metrics = self._metrics[self._mode]
        truncated = metrics["completions/clipped_ratio"][-1]
        stats = {
            **routing.stats,
            "distilled_share": float(active.any(dim=1).sum()),
            "shortened_share": float(len(built.shortened | cut)),
        }
        total = self._sums.add_batch(self._mode, stats, truncated, metrics["completions/mean_length"][-1])
        if self._trains and self._gate is not None:
            self._gate.observe(total["success_share"] / total["rollouts"], truncated)
        if self.log_completions:
            texts = [text if hint is not None else None for text, hint in zip(built.texts, hints, strict=True)]
            self._logs["extra"]["teacher_prompt"].extend(gather_object(texts))
        rows = {
            "feedback_available": available,
            "active_tokens": counts[0],
            "active_rows": counts[1],
            **({"turn_index": turns} if self._acts else {}),
            **weights,
            **{key: value.to(device) for key, value in {**built.tensors, **inserted}.items()},
        }
        return {**rows, **self._teacher_pass.cached({**output, **rows}, active)}

    def _told(
        self, hints: Sequence[Hint | None], output: dict[str, Any]
    ) -> tuple[list[Hint | None], TeacherPrompts, dict[str, torch.Tensor], set[int]]:
        """What the teachers read of these hints, without those of rollouts that leave them none of the positions."""
        left = list(hints)
        while True:
            try:
                built = self._prompt_builder.build(self._rollouts.prompts, left, output)
                return left, built, *self._turn_hints.build(left, output, built.room)
            except NoRoomError as error:
                if not self._prompt_builder.is_filled(error.row, output):
                    raise
                left[error.row] = None
                logger.warning(
                    "A rollout fills the model's positions, so that its teacher could not read any feedback besides, "
                    "and it is not distilled. Lower `max_completion_length`."
                )

    @torch.no_grad()
    def _evaluate_teacher(self, inputs: list[dict[str, Any]], hints: list[Hint | None], prompts: list[Prompt]) -> None:
        """
        Sample one answer under each teacher's prompt, with the teacher's weights, and note how many of them pass.

        Torch's, numpy's and Python's random numbers, the metrics and the tables stay as they are.
        """
        hinted = torch.tensor([hint is not None for hint in hints], device=self.accelerator.device)
        if not int(self.accelerator.reduce(hinted.sum(), reduction="sum")):
            return
        unseen = {"train": defaultdict(list), "eval": defaultdict(list)}
        with ExitStack() as stack:
            stack.enter_context(same_random_numbers(self.accelerator.device))
            stack.enter_context(attribute(self, "_metrics", unseen))
            for name in ("_pending_extra_logs", "_pending_metrics"):
                stack.enter_context(attribute(self, name, defaultdict(list)))
            stack.enter_context(self._teacher.speaks())
            _, ids, _, completions, *_ = super()._generate(prompts)
            rewards = super()._calculate_rewards(inputs, self._rollouts.prompts, completions, ids)
        passed = self._succeeded(rewards)[self._local_rows(len(prompts))] & hinted
        sums = self.accelerator.reduce(torch.stack([passed.sum(), hinted.sum()]), reduction="sum")
        self._sums.add_teacher(self._mode, *sums.tolist())

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
