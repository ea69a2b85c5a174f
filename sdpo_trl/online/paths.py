"""Names that a tool may use, and the error that says what to do instead.

Knows: strings. Deliberately does not know: files. Standard library only.
"""

import os
import unicodedata

MAX_DEPTH = 64
_NO_NAME = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of characters, line separators


class WorkspaceError(ValueError):
    """
    A tool cannot do what it was asked.

    Args:
        what (`str`): What was wrong, and where.
        hint (`str`): What to do instead.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what} Hint: {hint}")
        self.what = what
        self.hint = hint


def shown(name: str) -> str:
    """A name in one line: bytes that are no UTF-8, which Python keeps as lone surrogates, and control characters
    become `\\xNN`."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(
        character if unicodedata.category(character) not in _NO_NAME else ascii(character)[1:-1] for character in text
    )


def split_path(path: str, what: str = "path") -> list[str]:
    """
    The names of a relative path; an empty list is the folder itself.

    Args:
        path (`str`): Such as `src/main.py`.
        what (`str`): How an error calls it.

    Raises:
        [`WorkspaceError`]: it leads outside, or holds what no name should.
    """
    inside = "give a path relative to the working folder, such as `src/main.py`."
    if not path:
        raise WorkspaceError(f"The {what} is empty.", inside)
    quoted = f"The {what} {path[:200]!r}"
    if any(unicodedata.category(character) in _NO_NAME for character in path):
        raise WorkspaceError(f"{quoted} holds a control character or one that is no text.", "use plain letters.")
    if path.startswith("/"):
        raise WorkspaceError(f"{quoted} is absolute.", inside)
    if "\\" in path:
        raise WorkspaceError(f"{quoted} holds a backslash.", "separate folders with `/`.")
    if path.startswith("~"):
        raise WorkspaceError(f"{quoted} starts with `~`, which stands for no folder here.", inside)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise WorkspaceError(f"{quoted} holds `..`.", f"nothing above the working folder can be reached; {inside}")
    if len(parts) > MAX_DEPTH or any(len(part.encode()) > 255 for part in parts):
        raise WorkspaceError(f"{quoted} is too long.", f"a name has at most 255 bytes, a path {MAX_DEPTH} names.")
    return parts
