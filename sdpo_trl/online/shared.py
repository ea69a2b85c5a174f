"""One update encodes what its answers and their teacher have in common once.

The denied answers of an episode answer one prompt, and the teacher's prompt begins with it. The student's forward over
that beginning, with its graph, is continued by every answer, so the gradient through it is exact; a live teacher has
the very same weights, so it goes on from the same keys and values without their graph.

Knows: batches, forwards, caches. Deliberately does not know: conversations, optimizers.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..prefixes import EncodedPrefixes, PrefixPlan, deviation, plan_prefixes
from ..teacher import evaluation_mode
from ..teacher_pass import TeacherPass

logger = logging.getLogger(__name__)

# Sharing must save this share of the positions to be worth a forward more.
_WORTH = 0.95


def drops_out(model: nn.Module) -> bool:
    """Whether the training mode changes what the model computes: then the teacher reads other keys and values."""
    modules = any(isinstance(m, (nn.Dropout, nn.AlphaDropout)) and m.p > 0 for m in model.modules())
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    values = base.config.get_text_config().to_dict()
    return modules or any(
        isinstance(value, float) and value > 0
        for name, value in values.items()
        if "dropout" in name or "pdrop" in name
    )


def _unpadded(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[used.bool()].tolist() for row, used in zip(ids, mask, strict=True)]


def _positions(prompts: list[list[int]], length: int) -> int:
    """What a forward computes, padding included."""
    return len(prompts) * (max(map(len, prompts)) + length)


class SharedPrefixes:
    """
    Args:
        trainer ([`OnlineTrainer`]): Whose micro-batches.
        live (`bool`): Whether the teacher has the student's weights of the moment.
    """

    def __init__(self, trainer: Any, live: bool) -> None:
        self._trainer = trainer
        self._live = live
        self._encoded: EncodedPrefixes | None = None
        self._plan: PrefixPlan | None = None
        self._works: bool | None = None  # not known before the first use

    @property
    def live(self) -> bool:
        """Whether the teacher goes on from the student's prefixes, where there are any."""
        return self._live and self.allowed

    @property
    def allowed(self) -> bool:
        """Whether a cache can stand for a prefix here, in both forwards."""
        trainer = self._trainer
        return (
            trainer.shares_prefixes
            and self._works is not False
            and trainer._teacher_pass.can_share
            and trainer.accelerator.num_processes == 1
            and not trainer.args.gradient_checkpointing
            and not trainer.aux_loss_enabled  # TRL's forward makes the router's loss, of whole rows
            and not drops_out(trainer.model)
        )

    @contextmanager
    def of(self, model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
        """Within, the beginnings of this micro-batch's prompts are encoded, where that saves something."""
        self._plan = self._planned(inputs) if self.allowed else None
        try:
            if self._plan is not None:
                self._encoded = self._encode(model)
                if self._works is None:
                    self._check(model, inputs)
            yield
        finally:
            self._plan = self._encoded = None

    def _planned(self, inputs: dict[str, Any]) -> PrefixPlan | None:
        prompts = _unpadded(inputs["prompt_ids"], inputs["prompt_mask"])
        keys = [tuple(prompt) for prompt in prompts]
        rows, length = list(prompts), inputs["completion_ids"].size(1)
        if self._live:
            rows += _unpadded(inputs["teacher_prompt_ids"], inputs["teacher_prompt_mask"])
        plan = plan_prefixes(rows, keys * (len(rows) // len(keys)))
        if plan is None:
            return None
        forwards = [slice(start, start + len(keys)) for start in range(0, len(rows), len(keys))]
        apart = sum(_positions(rows[part], length) for part in forwards)
        shared = _positions(plan.prefixes, 0) + sum(_positions(plan.rests[part], length) for part in forwards)
        return plan if shared <= _WORTH * apart else None

    def _encode(self, model: nn.Module) -> EncodedPrefixes:
        trainer = self._trainer
        with trainer.accelerator.autocast(), trainer._tap.capture():
            return EncodedPrefixes.of(
                model, trainer._tap.model, self._plan.prefixes, trainer.accelerator.device,
                fused_lm_head=True, labels=None,
            )  # fmt: skip

    def _continued(self, encoded: EncodedPrefixes, inputs: dict[str, Any], rows: slice) -> dict[str, Any]:
        """The forward's arguments for some of the plan's rows and the answers of as many rows of the batch."""
        plan = self._plan
        return encoded.continued(
            plan.group[rows], plan.rests[rows], inputs["completion_ids"], inputs["completion_mask"]
        )

    def _check(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """Once: do rows that go on from a cache see what whole rows see? If not, nothing is shared from now on."""
        trainer, length = self._trainer, inputs["completion_ids"].size(1)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        options = {"fused_lm_head": True, "labels": None}
        own = self._continued(self._encoded.detach(), inputs, slice(len(ids)))
        with evaluation_mode(model), trainer.accelerator.autocast(), trainer._tap.capture() as heads:
            model(input_ids=ids, attention_mask=mask, **options)
            model(**own, **options)
        truth, hidden = (head.hidden[:, -length - 1 : -1] for head in heads)
        error, limit = deviation(hidden, truth, inputs["completion_mask"].bool())
        self._works = error.item() <= limit
        if not self._works:
            logger.warning("SDPO: this model's cached prefixes are not exact, so they are not shared.")
            self._plan = self._encoded = None

    @contextmanager
    def student(self, model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
        """Within, the student's forward over whole rows goes on from the prefixes instead; its outputs are shorter."""
        if self._encoded is None:
            yield
            return
        rows = slice(len(inputs["completion_ids"]))
        own = self._continued(self._encoded, inputs, rows)

        def shorten(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            return args, {**kwargs, "labels": kwargs["labels"][:, -own["input_ids"].size(1) :], **own}

        hook = model.register_forward_pre_hook(shorten, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def teacher_hidden(self, model: nn.Module, inputs: dict[str, Any], rows: torch.Tensor) -> torch.Tensor | None:
        """The teacher's states along the answers of all rows, `(B, T, H)`; `None` where it reads for itself."""
        batch = len(inputs["completion_ids"])
        if self._encoded is None or not self._live or rows.numel() != batch:
            return None
        length = inputs["completion_ids"].size(1)
        own = self._continued(self._encoded.detach(), inputs, slice(batch, 2 * batch))
        with self._trainer.accelerator.autocast(), self._trainer._tap.capture() as heads:
            model(**own, fused_lm_head=True, labels=None)
        return heads[0].hidden[:, -length - 1 : -1]


class SharedTeacherPass(TeacherPass):
    """A teacher's pass that goes on from the student's prefixes where the trainer has encoded them."""

    @property
    def can_share(self) -> bool:
        """Whether this model's prefixes may be cached."""
        return self._shares

    def cached(self, output: dict[str, Any], active: torch.Tensor) -> dict[str, torch.Tensor]:
        # Weights by the teacher's entropy are brought to their mean over the whole batch, which is made here.
        waits = self._trainer.prefixes.live and self._trainer.args.token_weighting != "teacher_entropy"
        return {} if waits else super().cached(output, active)

    def _cheaper_hidden(self, model: nn.Module, inputs: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
        hidden = self._trainer.prefixes.teacher_hidden(model, inputs, rows)
        return super()._cheaper_hidden(model, inputs, rows) if hidden is None else hidden
