"""What an update looked like from within: where it stands, and what both models thought of each token.

Knows: heads, batches. Deliberately does not know: conversations, optimizers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..callbacks import RolloutWatcher
from ..heads import MixedHead, TokenHead, predicting
from ..scores import ScoreRequest, score_tokens

_CHUNK = 64  # tokens whose logits exist at once


@dataclass(frozen=True)
class SeenToken:
    """
    One distilled token before the update.

    Args:
        place (`int`): In its answer, from 0.
        token (`int`): Its id.
        before (`float`): The student's log-probability at the sampling temperature.
        teacher (`float`): The teacher's.
        divergence (`float`): In nats, as it was descended.
        wanted (`int`): The teacher's likeliest token.
    """

    place: int
    token: int
    before: float
    teacher: float
    divergence: float
    wanted: int


class UpdateWatch(RolloutWatcher):
    """
    Callback of [`OnlineTrainer`]; `tokens` holds, per row of the last update, what was distilled.

    `on_stage`, where it is set, is called with `"teacher"` when the teacher's prompts are written (and a resting
    teacher has read them), `"student"` when both models have scored, `"step"` after the optimizer.
    """

    def __init__(self) -> None:
        self.on_stage: Callable[[str], None] | None = None
        self.tokens: list[list[SeenToken]] = []

    def _tell(self, stage: str) -> None:
        if self.on_stage is not None:
            self.on_stage(stage)

    def batch_made(self, trainer, rollouts, output):
        count = len(output["completion_ids"])
        self.tokens = [[] for _ in range(count)]
        output["row_number"] = torch.arange(count, device=output["completion_ids"].device)
        self._tell("teacher")

    @torch.no_grad()
    def tokens_scored(self, inputs, active, student, teacher, spec):
        ids = inputs["completion_ids"][active]
        scores = score_tokens(predicting(student, active), teacher, ScoreRequest(ids, spec))
        wanted = _likeliest(teacher, len(ids)) if len(ids) else ids
        rows, places = active.nonzero(as_tuple=True)
        numbers = inputs["row_number"][rows].tolist()
        columns = [places, ids, scores.log_prob, scores.teacher_log_prob, scores.divergence, wanted]
        for row, *values in zip(numbers, *(column.tolist() for column in columns), strict=True):
            self.tokens[row].append(SeenToken(*values))
        self._tell("student")

    def on_step_end(self, args, state, control, **kwargs):
        self._tell("step")


def _likeliest(head: "TokenHead | MixedHead", count: int) -> torch.Tensor:
    """The likeliest token at each of `count` positions, int64 of shape `(count,)`."""
    made = []
    for start in range(0, count, _CHUNK):
        tokens = slice(start, start + _CHUNK)
        if isinstance(head, MixedHead):
            part = replace(head, base=_of(head.base, tokens), live=_of(head.live, tokens))
        else:
            part = _of(head, tokens)
        made.append(part.logits(part.vocab_size).argmax(-1))
    return torch.cat(made)


def _of(head: TokenHead, tokens: slice) -> TokenHead:
    return replace(head, hidden=head.hidden[tokens])
