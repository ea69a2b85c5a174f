"""Completions tables, as TRL writes them with `log_completions`: read back, and scored again with a given model.

Knows: the columns. Deliberately does not know: HTML.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..reprompt import Hint, Prompt, completion_text, message_text
from .record import Heatmap, RolloutView

if TYPE_CHECKING:
    from .rescore import Rescorer

_TEXTS = ("step", "prompt", "completion", "feedback", "teacher_prompt", "advantage")


@dataclass(frozen=True)
class TableRow:
    """
    One rollout of a table.

    Args:
        prompt (`str` or `list[dict]`): The student's.
        completion (`str` or `list[dict]`): What was sampled (and observed).
        feedback (`str`, *optional*): Its own.
        teacher_prompt (`str`, *optional*): What its teacher read.
        rewards (`dict[str, float | None]`): By reward function.
        advantage (`float`, *optional*): GRPO's.
        step (`int`, *optional*): When it was logged.
    """

    prompt: Prompt
    completion: Prompt
    feedback: str | None
    teacher_prompt: str | None
    rewards: dict[str, float | None]
    advantage: float | None
    step: int | None


def read_table(table: "str | Path | pd.DataFrame") -> list[TableRow]:
    """
    The rows of a table.

    Args:
        table (`str`, `Path` or `pandas.DataFrame`): A parquet file, or what was read of one.

    Raises:
        `ValueError`: it has no `prompt` or `completion` column.
    """
    frame = table if isinstance(table, pd.DataFrame) else pd.read_parquet(table)
    missing = [name for name in ("prompt", "completion") if name not in frame]
    if missing:
        raise ValueError(
            f"The table has no column `{missing[0]}`, only {', '.join(map(str, frame.columns))}. Give one of the "
            "`completions/*.parquet` files that `log_completions=True` writes."
        )
    numeric = [name for name in frame if name not in _TEXTS and pd.api.types.is_numeric_dtype(frame[name])]
    return [
        TableRow(
            _messages(row["prompt"]),
            _messages(row["completion"]),
            _text(row.get("feedback")),
            _text(row.get("teacher_prompt")),
            {name: float(row[name]) for name in numeric},
            float(row["advantage"]) if _is_there(row.get("advantage")) else None,
            int(row["step"]) if _is_there(row.get("step")) else None,
        )
        for row in frame.to_dict("records")
    ]


def _is_there(value: Any) -> bool:
    """Whether a cell holds something: pandas writes NaN where there is nothing."""
    return value is not None and value == value


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _messages(value: Any) -> Prompt:
    """Text as it is; messages as lists and dictionaries again, without the empty keys that a table fills in."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) or value is None:
        return ""  # an empty cell
    return [_plain(message) for message in value]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(_read(key, item)) for key, item in value.items() if item is not None}
    return value if isinstance(value, str) or not hasattr(value, "__iter__") else [_plain(item) for item in value]


def _read(key: str, value: Any) -> Any:
    """The arguments of a call, which a table holds as JSON text."""
    if key != "arguments" or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def table_heatmap(
    table: "str | Path | pd.DataFrame", scorer: "Rescorer", *, prompt: int = 0, rollouts: int | None = None
) -> Heatmap:
    """
    Score the rollouts of one prompt again.

    The texts are tokenised anew, so a token may differ from what was sampled, and the end token is not shown. Where
    the table holds teachers' prompts, those are read, and a rollout without one is not scored; else they are written
    from the feedback.

    Args:
        table (`str`, `Path` or `pandas.DataFrame`): See [`read_table`].
        scorer ([`Rescorer`]): With the model to look through.
        prompt (`int`): Which of the table's different prompts, counted from 0.
        rollouts (`int`, *optional*): The first of them; all by default.

    Raises:
        `IndexError`: the table has fewer prompts.
        `ValueError`: the prompt's answers are all empty, or `rollouts` is below 1.
    """
    if rollouts is not None and rollouts < 1:
        raise ValueError(f"`rollouts` must be at least 1, got {rollouts}.")
    groups: dict[str, list[TableRow]] = {}
    everything = read_table(table)
    asked = any(row.teacher_prompt is not None for row in everything)
    for row in everything:
        groups.setdefault(repr(row.prompt), []).append(row)
    if not 0 <= prompt < len(groups):
        raise IndexError(f"The table has {len(groups)} prompts, so there is no number {prompt}. Count from 0.")
    rows = [row for row in list(groups.values())[prompt][:rollouts] if completion_text(row.completion)]
    if not rows:
        raise ValueError(f"All answers to prompt {prompt} are empty. Choose another `prompt`.")
    return rows_heatmap(rows, scorer, asked=asked)


def rows_heatmap(rows: Sequence[TableRow], scorer: "Rescorer", *, asked: bool) -> Heatmap:
    """
    Score rollouts of one prompt again.

    Args:
        rows (`Sequence[TableRow]`): At least one, with answers that are not empty.
        scorer ([`Rescorer`]): With the model to look through.
        asked (`bool`): Whether the table holds teachers' prompts: then a rollout without one is not scored.
    """
    views = tuple(_view(scorer, row, asked, f"Rollout {i + 1}") for i, row in enumerate(rows))
    settings = dict(scorer.settings)
    if rows[0].step is not None:
        settings = {"Logged at step": str(rows[0].step), **settings}
    notes = ["Scored again from a table of texts: tokens may be cut differently than they were sampled."]
    if any(re.search(r"^\[turn \d+\] ", row.feedback or "", re.MULTILINE) for row in rows):
        notes.append(
            "Some feedback is about single turns. In training, what was told where a later turn begins stood between "
            "the turns; here, the teacher did not read it there."
        )
    return Heatmap("Token heat map", scorer.prompt_text(rows[0].prompt), views, settings, tuple(notes))


def _view(scorer: "Rescorer", row: TableRow, asked: bool, name: str) -> RolloutView:
    return scorer.rollout(
        row.prompt,
        None if asked or row.feedback is None else Hint(feedback=row.feedback),
        _parts(scorer, row),
        teacher_prompt=row.teacher_prompt,
        name=name,
        feedback=row.feedback,
        reward=next(iter(row.rewards.values())) if len(row.rewards) == 1 else None,  # how to weigh them is not known
        rewards=row.rewards,
        advantage=row.advantage,
    )


def _parts(scorer: "Rescorer", row: TableRow) -> "str | list[tuple[str, bool]]":
    """The answer; of several messages, what the chat template makes of them, with who wrote each part."""
    if isinstance(row.completion, str):
        return row.completion
    if len(row.completion) == 1 and not row.completion[0].get("tool_calls"):
        return message_text(row.completion[0].get("content"))
    trainer = scorer.trainer
    options = {"tokenize": False, "chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
    parts: list[tuple[str, bool]] = []
    conversation = list(row.prompt)
    before = trainer.processing_class.apply_chat_template(conversation, add_generation_prompt=True, **options)
    for message in row.completion:
        conversation.append(message)
        by_tool = message["role"] != "assistant"
        after = trainer.processing_class.apply_chat_template(conversation, add_generation_prompt=by_tool, **options)
        if not after.startswith(before):  # a template that rewrites earlier turns
            return completion_text(row.completion)
        parts.append((after[len(before) :], by_tool))
        before = after
    return parts
