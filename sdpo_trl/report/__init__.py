"""See what the teacher saw, and how a run goes: heat maps of tokens, and a run's folder as one page.

Imports the core; nothing in the core imports it.
"""

from typing import TYPE_CHECKING, Any

from .record import Candidate, Heatmap, RolloutView, TokenValues, TokenView

if TYPE_CHECKING:
    from .callback import TokenHeatmapCallback
    from .rescore import Rescorer, scoring_config
    from .run import RunRecord, read_run
    from .run_page import run_report
    from .table import read_table, table_heatmap

_LATER = {
    "TokenHeatmapCallback": "callback",
    "Rescorer": "rescore",
    "scoring_config": "rescore",
    "RunRecord": "run",
    "read_run": "run",
    "run_report": "run_page",
    "read_table": "table",
    "table_heatmap": "table",
}
__all__ = [
    "Candidate",
    "Heatmap",
    "Rescorer",
    "RolloutView",
    "RunRecord",
    "TokenHeatmapCallback",
    "TokenValues",
    "TokenView",
    "read_run",
    "read_table",
    "run_report",
    "scoring_config",
    "table_heatmap",
]


def __getattr__(name: str) -> Any:
    """A saved heat map is shown without TRL; what needs it is imported when it is asked for."""
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
