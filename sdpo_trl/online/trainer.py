"""The trainer behind a session: answers that were given instead of sampled, one optimizer step whenever asked for one.

Knows: rows with recorded answers, transformers' loop. Deliberately does not know: conversations, journals, tools.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, set_seed
from transformers.trainer_utils import TrainOutput

from ..batches import same_random_numbers
from ..divergence import safe_log_softmax
from ..files import attribute
from ..teacher import evaluation_mode
from ..trainer import SDPOTrainer
from .shared import SharedPrefixes, SharedTeacherPass

_KEPT_LOGS = 100  # entries of the trainer's history; a session has no end


class OnlineTrainer(SDPOTrainer):
    """
    An `SDPOTrainer` whose rows hold the answers: it reads feedback on what was said, and samples nothing.

    A row has, beside `prompt`, `privileged_context`, `demonstration` and `tools`, the `prompt_ids` and
    `completion_ids` (`list[int]`) of a recorded answer and its `logprobs` (`list[float]`) at the sampling temperature,
    by the weights that sampled it: the importance ratio of each answer is that of its own sampler.

    With a dataset of such rows (`journal_rows`) it trains as any `SDPOTrainer`, by `train()`. A session calls
    [`OnlineTrainer.open`] once, and then [`OnlineTrainer.update`] for one optimizer step on the rows that it is given.

    Args:
        model, args: As in [`SDPOTrainer`]; no reward is read, so `use_successful_as_teacher=False`.
        train_dataset (*optional*): Rows as above.
        shares_prefixes (`bool`, *optional*, defaults to `True`): Encode common beginnings once (the same loss and
            gradient; off to compare).
        **kwargs: All of [`SDPOTrainer`]'s but `rollout_func`.
    """

    _teacher_pass_type = SharedTeacherPass

    def __init__(
        self, model: Any, args: Any, train_dataset: Any = None, *, shares_prefixes: bool = True, **kwargs: Any
    ) -> None:
        self.shares_prefixes = shares_prefixes
        self._opening = False
        self._recorded: list[dict[str, Any]] = []
        self._loop: dict[str, Any] | None = None
        rows = Dataset.from_dict({"prompt": ["-"]}) if train_dataset is None else train_dataset
        with warnings.catch_warnings():  # of TRL's, that its `rollout_func` may change; the tests watch it
            warnings.filterwarnings("ignore", message=".*rollout_func.*")
            super().__init__(model, None, args, train_dataset=rows, rollout_func=self._answers, **kwargs)
        if not self._distills:
            raise ValueError("With `distillation_weight=0` no correction would be learned. Raise it.")
        live = args.teacher_model_kind == "live" and self._teacher_pass.reads_student
        self.prefixes = SharedPrefixes(self, live)

    # Recorded answers

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list({*self._signature_columns, "prompt_ids", "completion_ids", "logprobs"})

    def _answers(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """TRL's `rollout_func`."""
        return {
            "prompt_ids": [list(row["prompt_ids"]) for row in self._recorded],
            "completion_ids": [list(row["completion_ids"]) for row in self._recorded],
            "logprobs": [list(row["logprobs"]) for row in self._recorded],
        }

    def _generate_and_score_completions(self, inputs):
        for number, row in enumerate(inputs):
            if len(row["completion_ids"]) != len(row["logprobs"]) or not row["completion_ids"]:
                raise ValueError(
                    f"Row {number} has {len(row['completion_ids'])} answer tokens and {len(row['logprobs'])} "
                    "log-probabilities. It needs one per token, and at least one token."
                )
        with attribute(self, "_recorded", inputs):
            output = super()._generate_and_score_completions(inputs)
        # Answers of one batch may come from different weights, so the ratio is always that of their own.
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    # One forward for what answers have in common

    def _needed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._needed(inputs)
        self._shared.enter_context(self.prefixes.of(self.model_wrapped, inputs))
        return inputs

    def _compute_loss(self, model, inputs):
        with ExitStack() as self._shared:
            return super()._compute_loss(model, inputs)

    def _around_student(self, model: torch.nn.Module, inputs: dict[str, Any]) -> AbstractContextManager[None]:
        return self.prefixes.student(model, inputs)

    # One step at a time

    def open(self, checkpoint: str | None = None) -> None:
        """
        Make all that `train()` makes before its first step: optimizer, schedule, wrapped model.

        Args:
            checkpoint (`str`, *optional*): A folder that `save` or a checkpoint wrote, to go on from.
        """
        for callback in (ProgressCallback, PrinterCallback):  # they draw the bar of a run with an end
            self.remove_callback(callback)
        limit = self.args.max_steps if self.args.max_steps > 0 else sys.maxsize
        with attribute(self, "_opening", True), attribute(self.args, "max_steps", limit):
            self.train(resume_from_checkpoint=checkpoint)
        self.control.should_training_stop = False

    def _ends_at_once(self, model: torch.nn.Module, start_time: float) -> bool:
        if self._opening:
            self._loop = {"model": model, "start_time": start_time}
            return True
        return super()._ends_at_once(model, start_time)

    def _finalize_training(self, trial, num_train_samples, start_time):
        if self._opening:  # nothing has ended
            return TrainOutput(self.state.global_step, 0.0, {})
        return super()._finalize_training(trial, num_train_samples, start_time)

    @property
    def used_up(self) -> bool:
        """Whether the schedule has no step left."""
        return 0 < self.state.max_steps <= self.state.global_step

    def update(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """
        One optimizer step on these rows; the same rows and weights give the same step bit for bit.

        Returns:
            `dict`: what the trainer logged: `loss`, `grad_norm`, `sdpo/...`.
        """
        with same_random_numbers(self.accelerator.device):
            set_seed(self.args.seed + self.state.global_step)
            self._run_epoch(
                self._loop["model"], self.state.global_step, [rows], 1, 1, None, None, self._loop["start_time"],
                None, 0, 0,
            )  # fmt: skip
        logs = dict(self.state.log_history[-1])
        del self.state.log_history[:-_KEPT_LOGS]
        self._buffered_inputs = None
        self.control.should_training_stop = False
        return logs

    # What a session asks of the tokenizer and the model

    @contextmanager
    def describing(self, tools: list[Any]) -> Iterator[None]:
        """Within, prompts describe these tools (JSON schemas)."""
        with attribute(self, "_batch_tools", [tools] if tools else None):
            yield

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
        """What the student reads, generation header included."""
        with self.describing(tools):
            return list(self._tokenize_prompts([messages])[0][0])

    @torch.no_grad()
    def log_probs(self, rows: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """
        The log-probabilities of given answers by the model as it is now, at the sampling temperature.

        Args:
            rows (`list`): Pairs of prompt ids and answer ids.
        """
        values = []
        for prompt, answer in rows:
            ids = torch.tensor([[*prompt, *answer]], device=self.accelerator.device)
            with evaluation_mode(self.model):
                scores, _, _ = self._get_per_token_logps_and_entropies(
                    self.model, ids, torch.ones_like(ids), len(answer)
                )
            values.append(scores[0].tolist())
        return values

    @torch.no_grad()
    def next_tokens(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Log-probabilities of the token after a prompt and after each token of an answer, `(T + 1, V)`, as of now."""
        ids = torch.tensor([[*prompt, *answer]], device=self.accelerator.device)
        with evaluation_mode(self.model), self.accelerator.autocast(), self._tap.capture() as heads:
            self.model(input_ids=ids, attention_mask=torch.ones_like(ids), fused_lm_head=True, labels=None)
        head = replace(heads[0], hidden=heads[0].hidden[0, len(prompt) - 1 :])
        return safe_log_softmax(head.logits(head.vocab_size))
