"""Which feedback an attempt is given.

Knows: the selection rule over a global batch, and what a valid feedback text is. Deliberately does not know: models,
tokenizers, trainers. Imports torch only.
"""

from collections.abc import Sequence

import torch

from .reprompt import well_formed


def _check_vector(name: str, value: object, dtype: torch.dtype, like: torch.Tensor | None = None) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor of dtype {dtype}, got {type(value).__name__}.")
    if value.dtype != dtype:
        raise TypeError(f"`{name}` must have dtype {dtype}, got {value.dtype}. Convert it with `.to({dtype})`.")
    if value.dim() != 1 or value.numel() == 0:
        raise ValueError(f"`{name}` must have shape (N,) with N >= 1, got {tuple(value.shape)}.")
    if like is not None and value.shape != like.shape:
        raise ValueError(
            f"`{name}` must have one entry per attempt: got {value.numel()}, but `question_ids` has {like.numel()}."
        )
    if like is not None and value.device != like.device:
        raise ValueError(f"`{name}` is on {value.device}, but `question_ids` is on {like.device}. Move it there.")


@torch.no_grad()
def select_feedback(
    question_ids: torch.Tensor,
    success: torch.Tensor,
    rich_feedback: torch.Tensor,
    *,
    exclude_self: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Choose, for each attempt, the successful attempt that its teacher is shown, and say whether it has any feedback.

    Per attempt, in this order (paper, section 3 and Table 2):

    1. it succeeded: its own row; with `exclude_self`, the smallest *other* successful row of the same question;
    2. it failed and its question has a success: the smallest such row;
    3. none, but it has rich feedback: index -1, and feedback is available;
    4. neither: index -1, and nothing is available.

    A solution never comes from another question. Cost: one sort of `N` ids, no Python loop.

    Args:
        question_ids (`torch.Tensor`): int64 of shape `(N,)`, `N >= 1`. Any integers, in any order.
        success (`torch.Tensor`): bool of shape `(N,)`. The attempt passed.
        rich_feedback (`torch.Tensor`): bool of shape `(N,)`. The attempt has text from its environment, judge or user.
        exclude_self (`bool`, *optional*, defaults to `False`): A success may not be its own demonstration.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `solution_indices`, int64 of shape `(N,)` with values in `[-1, N)`, and
        `feedback_available`, bool of shape `(N,)`; both on the device of `question_ids`, neither with a gradient.

    Raises:
        `TypeError`: an argument is not a tensor or has the wrong dtype.
        `ValueError`: an argument has the wrong shape or device, or `N = 0`.

    Example:
    ```python
    >>> select_feedback(torch.tensor([7, 8, 7]), torch.tensor([False, True, True]), torch.tensor([False] * 3))
    (tensor([2, 1, 2]), tensor([True, True, True]))
    ```
    """
    _check_vector("question_ids", question_ids, torch.int64)
    _check_vector("success", success, torch.bool, question_ids)
    _check_vector("rich_feedback", rich_feedback, torch.bool, question_ids)
    if not isinstance(exclude_self, bool):
        raise TypeError(f"`exclude_self` must be a bool, got {type(exclude_self).__name__}.")

    size = question_ids.numel()
    rows = torch.arange(size, device=question_ids.device)  # (N,)
    questions, group = torch.unique(question_ids, return_inverse=True)  # (Q,), (N,)

    def smallest_row(candidates: torch.Tensor) -> torch.Tensor:  # (N,) bool -> (Q,), `size` where there is none
        start = rows.new_full((questions.numel(),), size)
        return start.scatter_reduce(0, group, torch.where(candidates, rows, size), "amin")

    first = smallest_row(success)[group]  # (N,)
    if exclude_self:
        second = smallest_row(success & (rows != first))[group]
        solution = torch.where(first == rows, second, first)
    else:
        solution = torch.where(success, rows, first)
    solution = torch.where(solution == size, -1, solution)
    return solution, (solution >= 0) | rich_feedback


TurnText = tuple[int, str]
Feedback = str | tuple[TurnText, ...] | None


def _turn_texts(value: Sequence[object], row: int, source: str) -> tuple[TurnText, ...] | None:
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[1], str):
            raise TypeError(
                f"{source} gave {pair!r} among the feedback of rollout {row}; a list must hold pairs `(turn, text)`."
            )
        if not isinstance(pair[0], int) or isinstance(pair[0], bool) or pair[0] < 0:
            raise ValueError(
                f"{source} gave the turn {pair[0]!r} for rollout {row}; turns are whole numbers, the first one is 0."
            )
    return tuple((turn, well_formed(text)) for turn, text in value if text.strip()) or None


def check_texts(texts: object, count: int, source: str, *, turns: bool = False) -> list[Feedback]:
    """
    Return `texts` as a list with one `str | None` per rollout, blank texts turned into `None` (see [`well_formed`] for
    odd ones).

    Args:
        texts (`object`): What a feedback source gave.
        count (`int`): The number of rollouts that it was asked about.
        source (`str`): Name of the source, for the error message.
        turns (`bool`, *optional*, defaults to `False`): A value may also be a list of `(turn, text)`, which is
            returned as a tuple without its blank texts.

    Raises:
        `TypeError`: it is not a sequence, or a value in it is none of these (the row is named).
        `ValueError`: its length is not `count`, or a turn is negative.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"{source} must give a list with one `str` or `None` per rollout, got {type(texts).__name__}.")
    if len(texts) != count:
        raise ValueError(
            f"{source} gave {len(texts)} feedback texts, but there are {count} rollouts. Give exactly one per rollout "
            "(`None` where there is nothing to say)."
        )
    checked: list[Feedback] = []
    for row, text in enumerate(texts):
        if turns and isinstance(text, (list, tuple)):
            checked.append(_turn_texts(text, row, source))
        elif text is not None and not isinstance(text, str):
            raise TypeError(
                f"{source} gave a {type(text).__name__} as the text of rollout {row}; it must be a `str` or `None`."
            )
        else:
            checked.append(well_formed(text) if text is not None and text.strip() else None)
    return checked


def join_texts(sources: Sequence[Sequence[Feedback]], count: int) -> list[str | None]:
    """Join the texts that several sources gave for the same rollout, in order, one per paragraph."""
    joined = []
    for row in range(count):
        texts = [source[row] for source in sources if isinstance(source[row], str)]
        joined.append("\n\n".join(texts) if texts else None)
    return joined


def join_turns(sources: Sequence[Sequence[Feedback]], count: int) -> list[tuple[TurnText, ...]]:
    """The texts per turn that several sources gave for the same rollout, one per turn, in the order of the turns."""
    joined = []
    for row in range(count):
        texts: dict[int, list[str]] = {}
        for source in sources:
            for turn, text in source[row] if isinstance(source[row], tuple) else ():
                texts.setdefault(turn, []).append(text)
        joined.append(tuple((turn, "\n\n".join(texts[turn])) for turn in sorted(texts)))
    return joined


def reached_turns(
    feedback: Sequence[tuple[TurnText, ...]], counts: Sequence[int | None]
) -> list[tuple[TurnText, ...]]:
    """
    The texts of turns that were sampled; a text for the turn that would have come next has nobody to tell.

    Args:
        feedback (`Sequence`): Per rollout, its texts per turn.
        counts (`Sequence[int | None]`): Per rollout, its number of turns; `None` where it is not known.

    Raises:
        `ValueError`: a text is for a turn later than that (the row is named).
    """
    kept = []
    for row, (pairs, count) in enumerate(zip(feedback, counts, strict=True)):
        beyond = [turn for turn, _ in pairs if count is not None and turn > count]
        if beyond:
            raise ValueError(
                f"There is feedback for turn {beyond[0]} of rollout {row}, which has {count} turns. A turn is what "
                "the student writes between two replies, and the first one is 0."
            )
        kept.append(tuple((turn, text) for turn, text in pairs if count is not None and turn < count))
    return kept
