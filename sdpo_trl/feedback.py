"""Which feedback an attempt is given.

Knows: the selection rule over a global batch, and what a valid feedback text is. Deliberately does not know: models,
tokenizers, trainers, prompts. Imports torch only.
"""

from collections.abc import Sequence

import torch


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


def check_texts(texts: object, count: int, source: str) -> list[str | None]:
    """
    Return `texts` as a list with one `str | None` per rollout, blank texts turned into `None`.

    Args:
        texts (`object`): What a feedback source gave.
        count (`int`): The number of rollouts that it was asked about.
        source (`str`): Name of the source, for the error message.

    Raises:
        `TypeError`: it is not a sequence, or a value in it is neither `str` nor `None` (the row is named).
        `ValueError`: its length is not `count`.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"{source} must give a list with one `str` or `None` per rollout, got {type(texts).__name__}.")
    if len(texts) != count:
        raise ValueError(
            f"{source} gave {len(texts)} feedback texts, but there are {count} rollouts. Give exactly one per rollout "
            "(`None` where there is nothing to say)."
        )
    for row, text in enumerate(texts):
        if text is not None and not isinstance(text, str):
            raise TypeError(
                f"{source} gave a {type(text).__name__} as the text of rollout {row}; it must be a `str` or `None`."
            )
    return [text if text is not None and text.strip() else None for text in texts]


def join_texts(sources: Sequence[Sequence[str | None]], count: int) -> list[str | None]:
    """Join the texts that several sources gave for the same rollout, in order, one per paragraph."""
    joined = []
    for row in range(count):
        texts = [source[row] for source in sources if source[row] is not None]
        joined.append("\n\n".join(texts) if texts else None)
    return joined
