"""Looking for files by name and for lines by expression, within bounds of size and time.

Knows: patterns, entries of a folder. Deliberately does not know: tools, models.
"""

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import regex

from .paths import WorkspaceError, split_path
from .texts import matches
from .workspace import MAX_FILE_BYTES, Entry, Workspace

MAX_FOUND = 200
MAX_CHARACTERS = 16_000  # of the lines found
MAX_ENTRIES = 50_000  # that are looked at
SECONDS = 10.0
_WIDTH = 500  # characters of a line that are shown


def find_paths(workspace: Workspace, pattern: str) -> str:
    """
    The files and folders whose paths match, one a line.

    Args:
        workspace ([`Workspace`]): The folder.
        pattern (`str`): See [`~sdpo_trl.online.texts.matches`].

    Raises:
        [`WorkspaceError`]: with a hint.
    """
    wanted = _pattern(pattern, "pattern")
    found, total = [], 0
    for entry, _, _ in _entries(workspace, pattern):
        if matches(entry.path, wanted):
            total += 1
            if len(found) < MAX_FOUND:
                mark = {"file": "", "a folder": "/"}.get(entry.kind, f"  ({entry.kind}, not followed)")
                found.append(entry.path + mark)
    if not found:
        return f"Nothing matches {pattern}."
    return "\n".join(found) + (f"\n[{total - MAX_FOUND} more]" if total > MAX_FOUND else "")


def find_lines(workspace: Workspace, pattern: str, files: str) -> str:
    """
    The lines of text files that match an expression, each as `path:number: text`.

    Args:
        workspace ([`Workspace`]): The folder.
        pattern (`str`): A regular expression.
        files (`str`): Which files, by a pattern as of [`find_paths`].

    Raises:
        [`WorkspaceError`]: with a hint; also if it takes longer than 10 seconds.
    """
    wanted, deadline = _pattern(files, "files pattern"), time.monotonic() + SECONDS
    expression = _expression(pattern)
    found, skipped, characters = [], 0, 0
    for entry, folder, name in _entries(workspace, files):
        if entry.kind != "file" or not matches(entry.path, wanted):
            continue
        data = b"\0"
        if entry.size <= MAX_FILE_BYTES:
            with (
                contextlib.suppress(WorkspaceError),  # it may not be read, or it went away meanwhile
                workspace.open_file(folder, name, entry.path) as stream,
            ):
                data = stream.read(MAX_FILE_BYTES)
        if b"\0" in data[:8192]:
            skipped += 1
            continue
        for number, line in enumerate(data.decode("utf-8", "backslashreplace").split("\n"), 1):
            if _hit(expression, line[:20_000], deadline):
                row = f"{entry.path}:{number}: {line[:_WIDTH].rstrip()}"
                characters += len(row)
                if len(found) == MAX_FOUND or characters > MAX_CHARACTERS:
                    return "\n".join([*found, "[there are more: narrow the pattern or the files]"])
                found.append(row)
    note = f"\n[{skipped} binary, very large or unreadable files were not searched]" if skipped else ""
    return ("\n".join(found) or f"No line matches {pattern} in {files}.") + note


def _entries(workspace: Workspace, pattern: str) -> Iterator[tuple[Entry, int, str]]:
    hidden = any(part.startswith(".") for part in pattern.split("/"))
    for number, found in enumerate(workspace.walk(hidden)):
        if number == MAX_ENTRIES:
            raise WorkspaceError(
                f"The folder holds more than {MAX_ENTRIES} files.", "start the session in a smaller folder."
            )
        yield found


def _pattern(pattern: str, what: str) -> list[str]:
    parts = split_path(pattern, what)
    if not parts:
        raise WorkspaceError(f"The {what} {pattern!r} names the folder itself.", "use `*` for what lies in it.")
    return parts


def _expression(pattern: str) -> Any:
    if not pattern or len(pattern) > 1000:
        raise WorkspaceError("The regular expression is empty or too long.", "give a short one.")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        hint = f"put a backslash before characters meant literally: {re.escape(pattern)!r}."
        raise WorkspaceError(f"{pattern!r} is no regular expression: {error}.", hint) from error


def _hit(expression: Any, line: str, deadline: float) -> bool:
    """Whether a line matches; an expression that tries for ever is ended."""
    left = deadline - time.monotonic()
    try:
        if left <= 0:
            raise TimeoutError
        return expression.search(line, timeout=left) is not None
    except TimeoutError:
        raise WorkspaceError(
            f"The search took more than {SECONDS:g} seconds.", "use a simpler expression, or fewer files."
        ) from None
