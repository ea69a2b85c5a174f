"""What tools do to texts: decoding, lines, exact and line edits, patterns, diffs.

Knows: strings. Deliberately does not know: files, models, terminals.
"""

import difflib
import fnmatch
import re
from dataclasses import dataclass

from .paths import WorkspaceError

_DIFF_CELLS = 4_000_000  # lines times lines, beyond which a comparison line by line would take seconds
_NUMBERED = re.compile(r"^ *\d+\| ", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """
    What a tool would do to a file.

    Args:
        path (`str`): The file.
        before (`str`, *optional*): Its content; `None`: there is no such file.
        after (`str`): The content that it would have.
        said (`str`): What the tool answers once it is done.
    """

    path: str
    before: str | None
    after: str
    said: str

    def diff(self) -> str:
        """A unified diff; an empty string if nothing changes."""
        if self.before == self.after:
            return ""
        before, after = self.before or "", self.after
        if _crlf(before) and (_crlf(after) or not after):  # they would stand at the end of every line
            before, after = before.replace("\r\n", "\n"), after.replace("\r\n", "\n")
        old = "/dev/null" if self.before is None else f"a/{self.path}"
        return f"--- {old}\n+++ b/{self.path}\n" + "".join(_hunks(split_lines(before), split_lines(after)))


def _hunks(before: list[str], after: list[str]) -> list[str]:
    """The body of a unified diff, with a remark where a last line has no line end."""
    if len(before) * len(after) > _DIFF_CELLS:
        whole = [f"@@ -1,{len(before)} +1,{len(after)} @@ compared as a whole: the file is large\n"]
        lines = [*whole, *(f"-{line}" for line in before), *(f"+{line}" for line in after)]
    else:
        lines = list(difflib.unified_diff(before, after))[2:]
    return [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]


def split_lines(text: str) -> list[str]:
    """Lines with their ends, at line feeds alone, as editors and tools count them."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _crlf(text: str) -> bool:
    return "\r\n" in text and text.count("\n") == text.count("\r\n")


def decoded(data: bytes, path: str) -> str:
    """
    The text of a file that may be changed.

    Raises:
        [`WorkspaceError`]: it is no text in UTF-8.
    """
    if b"\0" in data[:8192]:
        raise WorkspaceError(f"`{path}` is a binary file.", "only text can be read and changed.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WorkspaceError(
            f"`{path}` is not in UTF-8 (byte {error.start}).", "an edit would damage it; ask the user to convert it."
        ) from error


def encoded(text: str, what: str) -> bytes:
    """
    A text as the bytes of a file.

    Raises:
        [`WorkspaceError`]: it holds what no text file should.
    """
    if "\0" in text:
        raise WorkspaceError(f"The {what} holds a NUL character.", "only text can be written.")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise WorkspaceError(
            f"The {what} holds half of a character at {error.start}.", "write whole characters, not `\\ud83d` alone."
        ) from error


def numbered(text: str, first: int, lines: int, characters: int, width: int) -> str:
    """
    Lines of a text with their numbers, as `12| text`, and what was left out.

    Args:
        text (`str`): The file.
        first (`int`): From this line, from 1.
        lines, characters (`int`): At most so many.
        width (`int`): Characters of a line that are shown.
    """
    every = split_lines(text)
    shown, used = [], 0
    for number, line in enumerate(every[first - 1 : first - 1 + lines], first):
        line = line.rstrip("\r\n")
        cut = f" [{len(line) - width} more characters]" if len(line) > width else ""
        row = f"{number}| {line[:width]}{cut}"
        used += len(row)
        if used > characters:
            break
        shown.append(row)
    last = first - 1 + len(shown)
    if last < len(every):
        shown.append(f"[lines {last + 1} to {len(every)} are left out: ask for them with `first`]")
    return "\n".join(shown)


def exact_edit(text: str, old: str, new: str, path: str) -> tuple[str, int]:
    """
    Replace the one place where `old` stands. In a file whose lines all end in CRLF, `old` and `new` may have line
    feeds alone.

    Returns:
        The new text and the number of the first line of that place.

    Raises:
        [`WorkspaceError`]: it stands nowhere, or more than once.
    """
    if not old:
        raise WorkspaceError("`old` is empty.", "give the exact text to replace; `edit_lines` inserts.")
    if old == new:
        raise WorkspaceError("`old` and `new` are the same.", "give another `new`.")
    if _crlf(text) and "\r" not in old:
        old, new = old.replace("\n", "\r\n"), re.sub(r"\r?\n", "\r\n", new)
    places, start = [], text.find(old)
    while start >= 0 and len(places) < 6:
        places.append(text.count("\n", 0, start) + 1)
        start = text.find(old, start + 1)
    if not places:
        raise WorkspaceError(f"`old` does not stand in `{path}`.", _near(text, old))
    if len(places) > 1:
        lines = ", ".join(map(str, places[:5])) + (", ..." if len(places) > 5 else "")
        raise WorkspaceError(
            f"`old` stands more than once in `{path}` (lines {lines}).",
            "give more of the text around it, or use `edit_lines`.",
        )
    return text.replace(old, new), places[0]


def _near(text: str, old: str) -> str:
    """A hint on a text that was not found."""
    if _NUMBERED.match(old):
        return "leave out the line numbers that `read_file` puts before each line."
    wanted = next((line.strip() for line in old.split("\n") if line.strip()), "")
    lines = [line.strip() for line in text.split("\n")[:5000]]
    candidates = [line for line in lines if line and len(line) < 300]
    near = [wanted] if wanted in candidates else difflib.get_close_matches(wanted[:300], candidates, 1)
    if not near:
        return "read the file again and copy the text exactly."
    number = lines.index(near[0]) + 1
    return f"line {number} is like it: {text.split(chr(10))[number - 1].rstrip()!r}. Copy the text exactly."


def line_edit(text: str, first: int, last: int, new: str, path: str) -> str:
    """
    Replace lines `first` to `last`, both included, from 1; `last = first - 1` inserts before `first`.

    Raises:
        [`WorkspaceError`]: there are no such lines.
    """
    lines = split_lines(text)
    if not (1 <= first <= len(lines) + 1 and first - 1 <= last <= len(lines)):
        raise WorkspaceError(
            f"`{path}` has {len(lines)} lines; lines {first} to {last} are none of them.",
            f"`first` is 1 to {len(lines) + 1}, `last` is `first - 1` (to insert) to {len(lines)}.",
        )
    end = "\r\n" if _crlf(text) else "\n"
    middle = re.sub(r"\r?\n", end, new) if end == "\r\n" else new
    before, after = "".join(lines[: first - 1]), "".join(lines[last:])
    if before and middle and not before.endswith("\n"):
        before += end
    had_end = not lines or text.endswith("\n") or bool(after)
    if middle and not middle.endswith("\n") and had_end:
        middle += end
    return before + middle + after


def matches(path: str, pattern: list[str]) -> bool:
    """
    Whether the names of a path fit a pattern's, as a shell with `**` has it: `*`, `?` and `[...]` within one name,
    `**` for any number of names, and a leading dot only where the pattern has one.
    """
    reached = {0}
    for name in path.split("/"):
        dotted = name.startswith(".")
        following = set()
        for place in _over_stars(reached, pattern):
            if place < len(pattern) and pattern[place] == "**":
                following |= set() if dotted else {place}
            elif place < len(pattern) and (pattern[place].startswith(".") or not dotted):
                following |= {place + 1} if fnmatch.fnmatchcase(name, pattern[place]) else set()
        reached = following
    return len(pattern) in _over_stars(reached, pattern)


def _over_stars(places: set[int], pattern: list[str]) -> set[int]:
    """The places that are reached when each `**` may also stand for nothing."""
    found = set(places)
    for place in sorted(places):
        while place < len(pattern) and pattern[place] == "**":
            place += 1
            found.add(place)
    return found
