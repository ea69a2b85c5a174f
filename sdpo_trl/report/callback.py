"""A heat map of a live training step, from the very forward pass that the step trains on.

Knows: the trainer's batches, folders. Deliberately does not know: how the page looks.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..callbacks import RolloutWatcher
from ..config import SDPOConfig
from ..divergence import DivergenceSpec
from ..feedback_sources import shown_feedback
from ..heads import MixedHead, TokenHead, predicting
from ..rollouts import Rollouts, weighted_rewards
from .record import Heatmap, RolloutView, TokenValues
from .rollouts import HEATMAPS, note_page
from .table import TableRow
from .trackers import log_page
from .values import TokenTexts, describe, take_tokens, token_values, token_views

logger = logging.getLogger(__name__)

_ROW = "heatmap_row"
_KEPT = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "teacher_prompt_ids",
    "teacher_prompt_mask", "feedback_available", "advantages",
)  # fmt: skip


@dataclass
class _Batch:
    """A rollout batch of this process before it was shuffled."""

    trainer: Any
    rollouts: Rollouts
    tensors: dict[str, torch.Tensor]
    number: int  # of row 0, among all rows of this process since training began
    first: int  # of row 0, among the rows of all processes
    group_size: int

    def row(self, number: int) -> int | None:
        """The row with this number, `None` if it is of another batch."""
        row = number - self.number
        return row if 0 <= row < len(self.rollouts.prompts) else None

    def group(self, row: int) -> int:
        return (self.first + row) // self.group_size


class TokenHeatmapCallback(RolloutWatcher):
    """
    Writes a heat map of one prompt's rollouts every few optimizer steps: `SDPOTrainer(..., callbacks=[...])`.

    The main process reads both models' heads while its own step uses them (so with dropout, sharding and images the
    values are those that were trained on), without a forward pass, a collective or a random number of its own:
    training is bit-identical with and without it. It costs the projection of the shown tokens.

    Shown are rollouts of the main process that this optimizer step scored; siblings without feedback, or of another
    step of the same batch, fill the page up without values. Where trackio or wandb is on, the page goes there too.

    Args:
        every (`int`): Optimizer steps between two pages; the first step has one.
        rollouts (`int`): Siblings on a page, at least 1.
        topk (`int`): Likeliest tokens of each model per token, at least 1.
        folder (`str` or `Path`, *optional*): Where pages go; `heatmaps` in the output folder by default.

    Raises:
        `ValueError`: a number is below 1, or, when training begins, nothing is distilled.
        `TypeError`: when training begins, the trainer is no [`SDPOTrainer`].
    """

    def __init__(self, every: int = 10, rollouts: int = 1, topk: int = 10, folder: "str | Path | None" = None) -> None:
        for name, value in (("every", every), ("rollouts", rollouts), ("topk", topk)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self._every, self._rollouts, self._topk, self._folder = every, rollouts, topk, folder
        self._due = False
        self._numbered = 0
        self._batch: _Batch | None = None
        self._spec: DivergenceSpec | None = None
        self._group: int | None = None
        self._scored: dict[int, dict[int, TokenValues]] = {}  # by row, by position
        self._texts: TokenTexts | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if not isinstance(args, SDPOConfig):
            raise TypeError(
                f"`TokenHeatmapCallback` needs an `SDPOTrainer`, whose `args` are an `SDPOConfig`, got "
                f"{type(args).__name__}: no other trainer compares a student with a teacher."
            )
        if args.distillation_weight == 0.0:
            raise ValueError(
                "`distillation_weight=0` is GRPO, which has no teacher to look at. Raise the weight, or drop the "
                "`TokenHeatmapCallback`."
            )
        self._due, self._group, self._batch = False, None, None  # an earlier run may have ended within a step
        self._scored.clear()

    def on_step_begin(self, args, state, control, **kwargs):
        self._due |= state.is_world_process_zero and state.global_step % self._every == 0

    def batch_made(self, trainer: Any, rollouts: Rollouts, output: dict[str, Any]) -> None:
        """Remember the rows by number: the trainer is about to shuffle them. See [`RolloutWatcher.batch_made`]."""
        if not trainer.accelerator.is_main_process:
            return
        count = len(rollouts.prompts)
        number, self._numbered = self._numbered, self._numbered + count
        output[_ROW] = torch.arange(number, number + count, device=output["completion_ids"].device)
        if self._scored:  # one optimizer step may train on several batches; the page is about the first of them
            return
        tensors = {name: output[name] for name in _KEPT if name in output}
        first = trainer.accelerator.process_index * count
        self._batch = _Batch(trainer, rollouts, tensors, number, first, trainer.num_generations)
        if self._texts is None:
            self._texts = TokenTexts(trainer._tokenizer)

    def tokens_scored(
        self,
        inputs: dict[str, Any],
        active: torch.Tensor,
        student: TokenHead,
        teacher: "TokenHead | MixedHead",
        spec: DivergenceSpec,
    ) -> None:
        """Read the values of the rows to show. See [`RolloutWatcher.tokens_scored`]."""
        if not self._due or self._batch is None or _ROW not in inputs:
            return
        counts = active.sum(dim=1).tolist()
        ends = active.sum(dim=1).cumsum(0).tolist()
        self._spec = spec
        for place, number in enumerate(inputs[_ROW].tolist()):
            row = self._batch.row(number)
            if row is None or row in self._scored or not counts[place] or len(self._scored) == self._rollouts:
                continue
            if self._group is None:
                self._group = self._batch.group(row)
            if self._batch.group(row) != self._group:
                continue
            mask = active[place : place + 1]  # (1, T)
            own = predicting(take_tokens(student, slice(place, place + 1)), mask)
            others = take_tokens(teacher, slice(ends[place] - counts[place], ends[place]))
            ids = inputs["completion_ids"][place][mask[0]]
            values = token_values(own, others, ids, spec, self._texts, self._topk)
            self._scored[row] = dict(zip(mask[0].nonzero().squeeze(1).tolist(), values, strict=True))

    def on_step_end(self, args, state, control, **kwargs):
        if not self._scored:
            return
        heatmap = self._heatmap(state.global_step)
        folder = Path(args.output_dir) / HEATMAPS if self._folder is None else Path(self._folder)
        path = folder / f"step_{state.global_step:06d}.html"
        page = heatmap.html()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(page, encoding="utf-8")
            rows = zip(self._shown_rows(), heatmap.rollouts, strict=True)
            note_page(path, state.global_step, [self._table_row(row, view) for row, view in rows])
        except OSError as error:  # a full disk is no reason to end a run
            logger.warning(f"SDPO: the heat map of step {state.global_step} was not written: {error}")
        log_page(page, args.report_to)
        self._due, self._group = False, None
        self._scored.clear()

    def on_train_end(self, args, state, control, **kwargs):
        self._batch = self._texts = None

    def _shown_rows(self) -> list[int]:
        batch = self._batch
        siblings = [
            row for row in range(len(batch.rollouts.prompts))
            if batch.group(row) == self._group and row not in self._scored
        ]  # fmt: skip
        return sorted([*self._scored, *siblings[: self._rollouts - len(self._scored)]])

    def _table_row(self, row: int, view: RolloutView) -> TableRow:
        rollouts = self._batch.rollouts
        return TableRow(
            rollouts.prompts[row], rollouts.completions[row], view.feedback, view.teacher_prompt, view.rewards,
            view.advantage, None,
        )  # fmt: skip

    def _heatmap(self, step: int) -> Heatmap:
        batch, rows = self._batch, self._shown_rows()
        trainer = batch.trainer
        settings = {"Step": str(step), **describe(self._spec, trainer.temperature)}
        itself = trainer._teacher_pass.reads_student
        settings["Teacher"] = trainer.args.teacher_model_kind if itself else "an external model"
        prompts = [self._texts.text(self._ids("prompt_ids", "prompt_mask", row)) for row in rows]
        views = tuple(self._view(row) for row in rows)
        notes = [] if all(row in self._scored for row in rows) else [
            "An answer without colours was not scored in this step: its teacher had nothing to read, or another "
            "optimizer step trains on it."
        ]  # fmt: skip
        if len(set(prompts)) > 1:
            notes.append("The environment gave these rollouts different prompts; shown is that of the first one.")
        return Heatmap(f"Step {step}", prompts[0], views, settings, tuple(notes))

    def _ids(self, ids: str, mask: str, row: int) -> list[int]:
        tensors = self._batch.tensors
        return tensors[ids][row][tensors[mask][row].bool()].tolist()

    def _view(self, row: int) -> RolloutView:
        batch, tensors = self._batch, self._batch.tensors
        used = int(tensors["completion_mask"][row].bool().nonzero().max()) + 1 if self._length(row) else 0
        ids = tensors["completion_ids"][row, :used].tolist()
        observed = [False] * used
        if "tool_mask" in tensors:
            observed = (tensors["tool_mask"][row, :used] == 0).tolist()
        rewards = batch.rollouts.rewards[batch.first + row]  # (F,)
        total = weighted_rewards(rewards[None], batch.trainer.reward_weights)
        teacher_prompt = None
        if tensors["feedback_available"][row]:
            teacher_prompt = self._texts.text(self._ids("teacher_prompt_ids", "teacher_prompt_mask", row))
        return RolloutView(
            name=f"Rollout {(batch.first + row) % batch.group_size + 1}",
            tokens=token_views(ids, observed, self._scored.get(row, {}), self._texts),
            feedback=shown_feedback(batch.rollouts.feedback[row], batch.rollouts.turns[row]),
            teacher_prompt=teacher_prompt,
            reward=total.item(),
            rewards=dict(zip(batch.trainer.reward_func_names, rewards.tolist(), strict=True)),
            advantage=tensors["advantages"][row].item(),
        )

    def _length(self, row: int) -> int:
        return int(self._batch.tensors["completion_mask"][row].sum())
