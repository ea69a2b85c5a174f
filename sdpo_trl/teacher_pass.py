"""Running the teacher: only the rows that have feedback, once per rollout batch where it can, shared prefixes once.

Knows: forwards, padding. Deliberately does not know: what the teacher is told, losses.
"""

import logging
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import is_peft_model

from .batches import student_positions, teacher_view, vision_inputs
from .heads import HeadTap, MixedHead, TokenHead
from .prefixes import EncodedPrefixes, PrefixPlan, deviation, plan_prefixes, shares_prefixes
from .scores import head_entropy
from .shards import whole_shape
from .teacher import Teacher, TrustRegionTeacher
from .temperature import at_temperature

logger = logging.getLogger(__name__)

# Hidden states of a rollout batch that may stay on the accelerator; larger ones wait in host memory.
_DEVICE_BYTES = 1 << 30
# Sharing must save this share of the tokens to be worth a second forward.
_WORTH = 0.9


class TeacherPass:
    """
    Args:
        trainer ([`SDPOTrainer`]): Runs the forwards.
        teacher ([`Teacher`]): Whose weights.
        tap ([`HeadTap`]): Of the teacher's model.
        once_per_batch (`bool`): The teacher is expected to rest while a rollout batch is trained on, so its hidden
            states are made with the batch and travel with the rows, as TRL's reference log-probabilities do. They are
            made anew if it has moved all the same.
    """

    def __init__(self, trainer: Any, teacher: Teacher, tap: HeadTap, once_per_batch: bool) -> None:
        self._trainer = trainer
        self._teacher = teacher
        self._tap = tap
        self._once = once_per_batch and not isinstance(teacher, TrustRegionTeacher)
        adapters = trainer.model.peft_config.values() if is_peft_model(trainer.model) else ()
        # Prompts of their own, or weights that change at a token of the prompt (aLoRA), need the whole of it.
        whole = any(a.is_prompt_learning or getattr(a, "alora_invocation_tokens", None) for a in adapters)
        usual = not (trainer._is_vlm or whole or trainer.pad_to_multiple_of)
        self._shares = usual and shares_prefixes(tap.model)
        self._verified = False

    @property
    def reads_student(self) -> bool:
        """Whether the teacher's forwards run through the student's modules."""
        return self._tap is self._trainer._tap

    def cached(self, output: dict[str, Any], active: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        The hidden states that predict the answers' tokens, `teacher_hidden` of shape `(B, T, H)`, if they can be made
        now; with weights by the teacher's entropy also these, `token_weight` of shape `(B, T)`, of mean 1 over the
        whole batch.

        Args:
            output (`dict`): TRL's batch with the teacher's prompts.
            active (`torch.Tensor`): bool of shape `(B, T)`; rows without an active token stay zero.
        """
        if not self._once or self._trainer._is_vlm:
            return {}
        trainer = self._trainer
        training = trainer.model.training
        size = trainer.args.per_device_train_batch_size if training else trainer.args.per_device_eval_batch_size
        rows = active.any(dim=1).nonzero().squeeze(1)
        chunks = torch.tensor(-(-rows.numel() // size), device=active.device)
        chunks = int(trainer.accelerator.gather(chunks.reshape(1)).max())  # as many forwards on every process
        made: list[torch.Tensor] = []
        weighs = trainer.args.token_weighting == "teacher_entropy"

        def run(model: torch.nn.Module) -> TokenHead:
            with trainer.accelerator.autocast():  # as where the loss scores
                hidden = self._hidden(model, output, filled)
                return self._tap.resting_head(hidden, model) if weighs else self._tap.head(hidden)

        entropies: list[torch.Tensor] = []
        for index in range(chunks):
            chosen = rows[index * size : (index + 1) * size]
            filled = chosen if chosen.numel() else rows.new_zeros(1)
            head = self._teacher.head(run)
            made.append(head.hidden[: chosen.numel()])
            if weighs:
                entropies.append(self._entropies(head, active[chosen]))
        if not chunks:
            return {}
        states = torch.cat(made)
        hidden = states.new_zeros(active.size(0), *states.shape[1:])
        hidden[rows] = states
        cached = {
            "teacher_hidden": hidden if hidden.nbytes <= _DEVICE_BYTES else hidden.cpu(),
            "teacher_version": torch.tensor(self._teacher.version),
        }
        if weighs:
            cached["token_weight"] = self._weights(torch.cat(entropies), active)
        return cached

    def _entropies(self, head: TokenHead, active: torch.Tensor) -> torch.Tensor:
        """Of the active tokens of the first rows of a head, over the items that the student has too."""
        temperature = self._trainer.args.distillation_temperature
        head = head if temperature is None else at_temperature(head, temperature)
        student = self._trainer._tap.model.get_output_embeddings().weight
        shared = min(head.vocab_size, whole_shape(student)[0])
        return head_entropy(replace(head, hidden=head.hidden[: active.size(0)][active]), shared)

    def _weights(self, entropies: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """`exp(-b H)` at the active tokens, brought to mean 1 over all processes."""
        accelerator, beta = self._trainer.accelerator, self._trainer.args.token_weighting_beta
        entropies = entropies.double()
        lowest = entropies.min() if entropies.numel() else entropies.new_full((), torch.inf)
        lowest = accelerator.gather(lowest.reshape(1)).min()
        weights = torch.exp(-beta * (entropies - lowest))
        sums = accelerator.reduce(torch.stack([weights.sum(), weights.new_tensor(weights.numel())]), reduction="sum")
        weights = weights * (sums[1] / sums[0].clamp(min=1e-300))
        return torch.zeros(active.shape, device=active.device).masked_scatter(active, weights.float())

    def head(self, inputs: dict[str, Any], active: torch.Tensor) -> "TokenHead | MixedHead":
        """
        The teacher's head over the active tokens; every process makes the same forwards.

        Args:
            inputs (`dict`): A micro-batch.
            active (`torch.Tensor`): bool of shape `(B, T)`.
        """
        cached = inputs.get("teacher_hidden")
        if cached is not None and int(inputs["teacher_version"]) != self._teacher.version:
            cached = None  # the teacher has moved since
        rows = active.any(dim=1).nonzero().squeeze(1)
        if vision_inputs(inputs):
            rows = torch.arange(active.size(0), device=active.device)  # images are not aligned with rows
        elif rows.numel() == 0:
            rows = rows.new_zeros(1)

        def run(model: torch.nn.Module) -> TokenHead:
            with self._trainer.accelerator.autocast():
                if cached is not None:
                    hidden = cached[active.to(cached.device)].to(active.device)
                else:
                    hidden = self._hidden(model, inputs, rows)[active[rows]]
                return self._tap.resting_head(hidden, model)

        return self._teacher.head(run)

    def _hidden(self, model: torch.nn.Module, inputs: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
        """The states that predict the answers' tokens of some rows, `(R, T, H)`."""
        return student_positions(self._cheaper_hidden(model, teacher_view(inputs), rows), inputs, rows)

    def _cheaper_hidden(self, model: torch.nn.Module, inputs: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
        """The states along the completions that the teacher reads, by the cheaper way."""
        plan = self._plan(inputs, rows) if self._shares else None
        if not self._is_worth_sharing(inputs, rows, plan):
            return self._plain_hidden(model, inputs, rows)
        hidden = self._shared_hidden(model, inputs, rows, plan)
        if not self._verified:
            self._verified = True
            truth = self._plain_hidden(model, inputs, rows)
            error, limit = deviation(hidden, truth, inputs["completion_mask"][rows].bool())
            if self._trainer.accelerator.gather(error.reshape(1)).max().item() > limit:
                logger.warning("SDPO: this model's cached prefixes are not exact, so they are not shared.")
                self._shares = False
                return truth
        return hidden

    def _is_worth_sharing(self, inputs: dict[str, Any], rows: torch.Tensor, plan: PrefixPlan | None) -> bool:
        """Whether sharing saves enough over all processes, which all decide alike."""
        if not self._shares:
            return False
        length = inputs["completion_ids"].size(1)
        plain = rows.numel() * int(inputs["teacher_prompt_mask"][rows].sum(1).max() + length)
        shared = float("inf") if plan is None else plan.tokens(length)
        costs = torch.tensor([shared, plain], device=rows.device, dtype=torch.float32)
        shared, plain = self._trainer.accelerator.reduce(costs, reduction="sum").tolist()
        return shared <= _WORTH * plain

    def _plan(self, inputs: dict[str, Any], rows: torch.Tensor) -> PrefixPlan | None:
        chosen = rows.tolist()
        prompts = [
            inputs["teacher_prompt_ids"][row][inputs["teacher_prompt_mask"][row].bool()].tolist() for row in chosen
        ]
        keys = [tuple(inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()) for row in chosen]
        return plan_prefixes(prompts, keys)

    def _completions(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The sampled ids; those that the teacher's embedding lacks are never scored."""
        return inputs["completion_ids"].clamp(max=self._trainer._known_tokens - 1)

    def _plain_hidden(self, model: torch.nn.Module, inputs: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
        vision = vision_inputs(inputs)
        length = inputs["completion_ids"].size(1)
        prompt_mask = inputs["teacher_prompt_mask"][rows]
        start = int(prompt_mask.any(dim=0).int().argmax())  # padding that all rows share
        if self._trainer.pad_to_multiple_of:
            start = 0
        ids = torch.cat([inputs["teacher_prompt_ids"][rows, start:], self._completions(inputs)[rows]], dim=1)
        mask = torch.cat([prompt_mask[:, start:], inputs["completion_mask"][rows]], dim=1)
        for key in ("token_type_ids", "mm_token_type_ids"):
            if key in vision:
                vision[key] = torch.cat([inputs[f"teacher_{key}"][:, start:], vision[key][:, -length:]], dim=1)
        with self._tap.capture() as heads:
            self._trainer._get_per_token_logps_and_entropies(model, ids, mask, length, **vision)
        return heads[0].hidden[:, -length - 1 : -1]

    def _shared_hidden(
        self, model: torch.nn.Module, inputs: dict[str, Any], rows: torch.Tensor, plan: PrefixPlan
    ) -> torch.Tensor:
        """Two forwards: the distinct prefixes, then each row's rest and answer on top of its prefix' cache."""
        length = inputs["completion_ids"].size(1)
        options = {"fused_lm_head": True, "labels": None}
        with self._trainer.accelerator.autocast(), self._tap.capture() as heads:
            prefixes = EncodedPrefixes.of(model, self._tap.model, plan.prefixes, rows.device, **options)
            answers = self._completions(inputs)[rows], inputs["completion_mask"][rows]
            model(**prefixes.continued(plan.group, plan.rests, *answers), **options)
        return heads[1].hidden[:, -length - 1 : -1]
