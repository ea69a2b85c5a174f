"""The page in the experiment tracker, where one is on."""

import importlib
from collections.abc import Sequence

# What transformers calls them is also what they are imported as; both have `Html` and `log`.
_TRACKERS = ("trackio", "wandb")


def log_page(page: str, report_to: Sequence[str], key: str = "sdpo/heatmap") -> list[str]:
    """
    Log a page of HTML to each tracker that the trainer reports to; nothing happens without one.

    Args:
        page (`str`): HTML.
        report_to (`Sequence[str]`): `TrainingArguments.report_to`.
        key (`str`): Under which name.

    Returns:
        `list[str]`: the trackers that it went to.
    """
    reached = []
    for name in _TRACKERS:
        if name not in report_to:
            continue
        tracker = importlib.import_module(name)
        if name == "wandb" and tracker.run is None:  # as TRL does with its tables
            continue
        tracker.log({key: tracker.Html(page, inject=False)})
        reached.append(name)
    return reached
