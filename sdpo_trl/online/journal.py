"""The journal of a session: one JSON line per event, on the disk before what it says happens.

Knows: lines, files, which updates were taken back. Deliberately does not know: models, trainers. Standard library
only.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: two sessions on one journal are then not noticed
    fcntl = None  # type: ignore[assignment]

from .records import SessionError
from .state import Event

logger = logging.getLogger(__name__)

FORMAT = 1


def _complete(path: Path) -> tuple[list[Event], int]:
    """The events, and the length of the lines that are whole."""
    events: list[Event] = []
    length = 0
    data = path.read_bytes()
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        try:
            event = json.loads(line)
        except ValueError as error:
            if length + len(line) == len(data):
                break  # the last line: cut off by a crash
            raise ValueError(
                f"{path}, line {number} is no event ({error}). Is it a journal? Mend the line or remove it."
            ) from error
        if not line.endswith(b"\n"):
            break
        if not isinstance(event, dict) or "event" not in event:
            raise ValueError(f"{path}, line {number} is no event of a session: {line[:80]!r}.")
        if event["event"] == "opened" and event.get("format") != FORMAT:
            raise ValueError(f"{path} has the format {event.get('format')}, and this version reads {FORMAT}.")
        events.append(event)
        length += len(line)
    if not events and not _may_begin(data):
        raise ValueError(f"{path} is no journal: it holds something else. Take another file.")
    if events and events[0]["event"] != "opened":
        raise ValueError(
            f"{path} begins with {events[0]['event']!r} and not with the line that opens a session: its first lines "
            "are missing. Bring them back, or begin a new journal."
        )
    if length < len(data):
        logger.warning(f"{path}: its last line was cut off while it was written, and is passed over.")
    return events, length


def _may_begin(data: bytes) -> bool:
    """Whether a crash may have left this of a first line: a part of it, or zeros that were not written over."""
    first = b'{"event": "opened"'
    return data.startswith(first) or first.startswith(data) or not data.strip(b"\0")


def read_journal(path: "str | Path") -> list[Event]:
    """
    The events of a journal, oldest first. A last line that was cut off is passed over with a message.

    Raises:
        `FileNotFoundError`: there is none.
        `ValueError`: a line before the last one is no event (it is named), or the format is another one.
    """
    return _complete(Path(path))[0]


def updates_in_force(events: list[Event]) -> dict[str, Event]:
    """
    The updates that were neither taken back nor given up, by their id, in order; of those that a saved session brought
    along, the event that opened the journal.

    One that was begun when the session was killed is among them: its correction had been given.
    """
    updates: dict[str, Event] = {}
    for event in events:
        if event["event"] == "opened":
            updates = dict.fromkeys(event["updates"], event)
        elif event["event"] == "update":
            updates[event["id"]] = event
        elif event["event"] in ("aborted", "undone"):
            updates.pop(event["id"], None)
    return updates


def journal_rows(path: "str | Path") -> list[dict[str, Any]]:
    """
    A journal as a dataset: every denied answer that was learned from (and not undone), once, with its correction.

    An `SDPOTrainer` samples its own answers to the `prompt`s and shows `privileged_context` and `demonstration` to the
    teacher; an [`OnlineTrainer`] trains on the recorded ones.

    Args:
        path (`str` or `Path`): Of the journal.

    Returns:
        `list[dict]`: `messages` and `tools` (JSON schemas as text, `None` where the chat template describes none), as
        [`~sdpo_trl.rows.prompt_row`] reads them; `privileged_context` and `demonstration` (text or `None`); and of the
        answer `prompt_ids`, `completion_ids`, `logprobs`. Arguments of calls are text, too, so that
        `Dataset.from_list` takes the rows of any session.
    """
    rows: dict[str, dict[str, Any]] = {}
    for event in updates_in_force(read_journal(path)).values():
        for row in event.get("rows", []):  # none for what was learned before the journal began
            # An answer is learned from again at each later update of its episode; what it was told last counts.
            rows[json.dumps([row["prompt_ids"], row["completion_ids"], row["logprobs"]])] = {
                "messages": [_flat(turn) for turn in row["prompt"]],
                "tools": json.dumps(row["tools"]) if "tools" in row else None,
                **{name: row[name] for name in _COLUMNS},
            }
    return list(rows.values())


_COLUMNS = ("privileged_context", "demonstration", "prompt_ids", "completion_ids", "logprobs")


def _flat(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn whose calls have their arguments as text."""
    if not turn.get("tool_calls"):
        return turn
    functions = [call["function"] for call in turn["tool_calls"]]
    calls = [{**function, "arguments": json.dumps(function["arguments"])} for function in functions]
    return {**turn, "tool_calls": [{"type": "function", "function": function} for function in calls]}


class Journal:
    """
    A journal that is written to, by one session at a time.

    Args:
        path (`str` or `Path`): Made with its folder if it is not there.

    Raises:
        `SessionError`: another session writes to it.
        `ValueError`: it is no journal.
    """

    def __init__(self, path: "str | Path") -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what could not be written is not written later after all.
        self._file: FileIO = self.path.open("ab", buffering=0)
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self._file.close()
                raise SessionError(
                    f"Another session writes to {self.path}. Close it, or take another journal."
                ) from error
        try:
            self.events, self._length = _complete(self.path)
        except ValueError:
            self.close()
            raise
        self._file.truncate(self._length)
        if not self.events and os.name == "posix":  # the name of a new file is on the disk, too
            folder = os.open(self.path.absolute().parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)

    def write(self, event: Event) -> None:
        """Append one event; it is on the disk when this returns, and nothing of it is where this raises."""
        line = json.dumps(event).encode() + b"\n"
        if self._file.closed:
            raise SessionError(f"This session was closed; open another one with {self.path}.")
        try:
            self._file.truncate(self._length)  # what an earlier failure left
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
            os.fsync(self._file.fileno())
        except BaseException:
            with suppress(OSError, ValueError):
                self._file.truncate(self._length)
            raise
        self._length += len(line)

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def saved_folders(events: list[Event]) -> Iterator[str]:
    """The folders that were saved, latest first, and the one that the journal began with."""
    for event in reversed(events):
        if event["event"] == "saved" or (event["event"] == "opened" and event["folder"] is not None):
            yield event["folder"]
