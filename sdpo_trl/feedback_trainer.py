"""The rollout half of the trainer: feedback is collected and selected, and each row's teacher is told something.

Knows: TRL's rollouts and rewards, prompts. Deliberately does not know: losses, teachers' weights.
"""

import asyncio
import atexit
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from . import rollouts as rollout_rules
from .batches import vision_inputs
from .files import FilesTrainer, attribute
from .metrics import MetricSums
from .reprompt import strip_thinking
from .rollouts import Rollouts, Routing
from .teacher import evaluation_mode
from .teacher_pass import TeacherPass
from .teacher_prompts import TeacherPromptBuilder


class FeedbackTrainer(FilesTrainer):
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
    _teacher_pass: TeacherPass
    _sums: MetricSums
    _known_tokens: int

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list({*self._signature_columns, "privileged_context", "demonstration"})

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
        return self._loss_mask(inputs) & inputs["feedback_available"][:, None] & known

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
        with attribute(self, "beta", 0.0 if self._anchors else self.beta):
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
        active = self._active({**output, "feedback_available": available})  # (B, T)
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
