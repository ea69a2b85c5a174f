"""The online session: a person (or a program) denies what a local model did, it learns at once, and tries again."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .journal import journal_rows, read_journal
from .records import (
    Attempt,
    AttemptChange,
    Call,
    ContextTooLong,
    Observation,
    Progress,
    Reply,
    SessionError,
    TokenChange,
)

if TYPE_CHECKING:
    from .config import online_config
    from .session import OnlineSession
    from .tools import workspace_tools
    from .trainer import OnlineTrainer

_LATER = {
    "OnlineSession": "session",
    "OnlineTrainer": "trainer",
    "online_config": "config",
    "workspace_tools": "tools",
}
__all__ = [
    "Attempt",
    "AttemptChange",
    "Call",
    "ContextTooLong",
    "Observation",
    "OnlineSession",
    "OnlineTrainer",
    "Progress",
    "Reply",
    "SessionError",
    "TokenChange",
    "journal_rows",
    "online_config",
    "read_journal",
    "workspace_tools",
]


def __getattr__(name: str) -> Any:
    """TRL is imported when a session is asked for; records and journals do not need it."""
    if name in _LATER:
        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
