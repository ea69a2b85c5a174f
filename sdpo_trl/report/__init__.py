"""See what the teacher saw: heat maps of tokens, in training, from a completions table, or for what is typed in.

Imports the core; nothing in the core imports it.
"""

from typing import TYPE_CHECKING, Any

from .record import Candidate, Heatmap, RolloutView, TokenValues, TokenView

if TYPE_CHECKING:
    from .callback import TokenHeatmapCallback
    from .rescore import Rescorer, scoring_config
    from .table import read_table, table_heatmap

_LATER = {
    "TokenHeatmapCallback": "callback",
    "Rescorer": "rescore",
    "scoring_config": "rescore",
    "read_table": "table",
    "table_heatmap": "table",
}
__all__ = [
    "Candidate",
    "Heatmap",
    "Rescorer",
    "RolloutView",
    "TokenHeatmapCallback",
    "TokenValues",
    "TokenView",
    "read_table",
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
