"""Heat maps of the rollouts that a run's report shows and the run itself has none of.

Knows: tables, the scorer, where pages lie. Deliberately does not know: HTML.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..reprompt import completion_text
from .rollouts import Choice
from .run import read_run
from .table import rows_heatmap

if TYPE_CHECKING:
    from .rescore import Rescorer

# What decides how tokens are compared and prompts are written; the rest of a run's options is about training it.
_COMPARING = (
    "distillation_mode", "distillation_alpha", "distillation_topk", "distillation_add_tail", "temperature",
    "distillation_log_ratio_clip", "teacher_proximal_share", "chat_template_kwargs", "reprompt_template",
    "solution_template", "feedback_template", "reprompt_placement", "max_reprompt_len", "max_completion_length",
)  # fmt: skip


def comparing_settings(folder: Path) -> dict[str, Any]:
    """The run's options that a heat map of it needs, those that are not at their default."""
    settings = read_run(folder).settings
    return {name: settings[name][0] for name in _COMPARING if name in settings}


class MapWriter:
    """
    Scores a rollout of a table and writes its heat map beside the report.

    Args:
        folder (`Path`): The run's.
        out (`Path`): The report; pages go to a folder with its name and `_heatmaps`.
        scorer (`Callable`): Makes the scorer from [`comparing_settings`], when the first rollout needs it.
    """

    def __init__(self, folder: Path, out: Path, scorer: "Callable[[dict[str, Any]], Rescorer]") -> None:
        self._folder = folder
        self._out = out
        self._make = scorer
        self._scorer: Rescorer | None = None
        self._written = 0

    def __call__(self, choice: Choice) -> str | None:
        """The page's address as the report sees it; `None` for an empty answer."""
        if choice.table is None or not completion_text(choice.row.completion):
            return None
        if self._scorer is None:
            self._scorer = self._make(comparing_settings(self._folder))
        asked = "teacher_prompt" in pd.read_parquet(choice.table).columns
        self._written += 1
        pages = self._out.with_name(f"{self._out.stem}_heatmaps")
        page = rows_heatmap([choice.row], self._scorer, asked=asked).save(pages / f"rollout_{self._written}.html")
        return os.path.relpath(page, self._out.parent)
