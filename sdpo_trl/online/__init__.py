"""The online session: a person (or a program) denies what a local model did, it learns at once, and tries again."""

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
    "Progress",
    "Reply",
    "SessionError",
    "TokenChange",
]
