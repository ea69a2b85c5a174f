"""The online session: a person (or a program) denies what a local model did, it learns at once, and tries again."""

from typing import Any

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
]


def __getattr__(name: str) -> Any:
    """TRL is imported when a session is asked for; records and journals do not need it."""
    if name == "OnlineSession":
        from .session import OnlineSession

        return OnlineSession
    if name == "OnlineTrainer":
        from .trainer import OnlineTrainer

        return OnlineTrainer
    if name == "online_config":
        from .config import online_config

        return online_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
