"""The learning half of a session: one update at a time, each journalled before and taken back exactly afterwards.

Knows: rows, the trainer, the journal's events of updates. Deliberately does not know: conversations, tools.
"""

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import storage
from .journal import Journal, saved_folders, updates_in_force
from .records import Progress, SessionError
from .snapshots import Snapshot
from .state import Event
from .trainer import OnlineTrainer
from .watch import UpdateWatch

logger = logging.getLogger(__name__)

STAGES = ("journal", "teacher", "student", "step", "done")


class Updates:
    """
    Args:
        trainer ([`OnlineTrainer`]): Not opened yet.
        journal ([`Journal`], *optional*): Is told of each update before it is made.
        undo_depth (`int`): Updates that can be taken back, at least 1.
        folder (`Path`, *optional*): A saved session to go on from. `None`: the last one that the journal names, if it
            is there.
    """

    def __init__(
        self, trainer: OnlineTrainer, journal: Journal | None, undo_depth: int, folder: Path | None = None
    ) -> None:
        self.trainer = trainer
        self.metrics: list[dict[str, Any]] = []  # of the updates in force
        self.applied: list[str] = []  # their ids
        self.version = 0  # of the weights; never comes back to an earlier value
        self._journal = journal
        self._owed: list[Event] = []  # to the journal, which could not be written
        self._snapshots: deque[Snapshot] = deque(maxlen=undo_depth)
        self._watch = UpdateWatch()
        trainer.add_callback(self._watch)
        events = [] if journal is None else journal.events
        if folder is None:
            folder = self._saved(events)
        trainer.open(None if folder is None else str(folder))
        if folder is not None:
            saved = storage.session_of(folder)
            self.applied, self.metrics = list(saved["updates"]), list(saved["metrics"])
            self.version = saved["version"]
        self._catch_up(events)

    @property
    def tokens(self) -> list[list[Any]]:
        """Per row of the last update, what was distilled."""
        return self._watch.tokens

    @property
    def can_undo(self) -> bool:
        """Whether the last update can be taken back."""
        return bool(self._snapshots)

    def learn(self, rows: list[dict[str, Any]], on_progress: Callable[[Progress], None] | None) -> dict[str, Any]:
        """
        One optimizer step. Whatever stops it, also a keyboard interrupt, leaves the weights as they were.

        Args:
            rows (`list[dict]`): See [`OnlineTrainer`].
            on_progress (`Callable`, *optional*): Is told of each stage.

        Returns:
            `dict`: what the trainer logged, and `seconds`.
        """
        if self.trainer.used_up:
            raise SessionError(
                f"The schedule ends after `max_steps={self.trainer.args.max_steps}` updates, and all were made. Save "
                "the session and load it with a larger one, or with a constant schedule."
            )

        def tell(stage: str) -> None:
            if on_progress is not None:
                on_progress(Progress(stage, STAGES.index(stage) + 1, len(STAGES)))

        identity = uuid.uuid4().hex  # no other session's update has it, whatever folder is saved over which
        self._write({"event": "update", "id": identity, "rows": rows})
        self._watch.on_stage = tell
        earlier = list(self._snapshots)
        try:
            tell("journal")
            logs = self._step(identity, rows)
            self._write({"event": "finished", "id": identity, "metrics": logs})
            tell("done")
        except BaseException:
            if identity in self.applied:
                self._take_back()
                self._snapshots = deque(earlier, maxlen=self._snapshots.maxlen)
            self._owed.append({"event": "aborted", "id": identity})
            with suppress(OSError):  # a full disk: written before the next update is
                self._pay()
            raise
        finally:
            self._watch.on_stage = None
        return logs

    def undo(self) -> None:
        """Take the last update back, bit for bit: weights, optimizer, teacher, counters."""
        if not self._snapshots:
            raise SessionError(
                "There is no update to take back: nothing was learned since the session began or was loaded, or "
                "`undo_depth` updates were taken back already."
            )
        self._write({"event": "undone", "id": self.applied[-1]})
        self._take_back()

    def _take_back(self) -> None:
        self._snapshots.pop().restore(self.trainer)
        self.applied.pop()
        self.metrics.pop()
        self.version += 1
        self._watch.tokens = []

    def record(self) -> dict[str, Any]:
        """What a saved session keeps."""
        return {"updates": self.applied, "metrics": self.metrics, "version": self.version}

    def _step(self, identity: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        snapshot = Snapshot(self.trainer)
        start = time.perf_counter()
        self.version += 1
        try:
            logs = self.trainer.update(rows)
            logs["seconds"] = time.perf_counter() - start
            self._snapshots.append(snapshot)
            self.metrics.append(logs)
            self.applied.append(identity)
        except BaseException:
            snapshot.restore(self.trainer)
            self.version += 1
            del self.metrics[len(self.applied) :]
            if self._snapshots and self._snapshots[-1] is snapshot:
                self._snapshots.pop()
            raise
        return logs

    def _write(self, event: Event) -> None:
        self._pay()
        if self._journal is not None:
            self._journal.write(event)

    def _pay(self) -> None:
        while self._owed:
            if self._journal is not None:
                self._journal.write(self._owed[0])
            del self._owed[0]

    @staticmethod
    def _saved(events: list[Event]) -> Path | None:
        """The last saved folder that the journal names, if what was learned there is still in force."""
        in_force = list(updates_in_force(events))
        for name in saved_folders(events):
            try:
                folder = storage.find(name)
            except (FileNotFoundError, ValueError):
                continue
            learned = storage.session_of(folder)["updates"]
            if in_force[: len(learned)] == learned:
                return folder
        return None

    def _catch_up(self, events: list[Event]) -> None:
        """Make the journal's updates that these weights lack."""
        if not events:
            return
        updates = updates_in_force(events)
        if list(updates)[: len(self.applied)] != self.applied:
            raise ValueError(
                "The saved folder and the journal do not belong together: the folder holds updates that the journal "
                "does not know or that were taken back later. Load the folder without the journal, or replay the "
                "journal onto a fresh adapter."
            )
        kinds = [event["event"] for event in events]
        missing = list(updates.items())[len(self.applied) :]
        if missing:
            logger.info(f"The journal holds {len(missing)} updates that are made again.")
        for identity, event in missing:
            if event["event"] == "opened":
                raise ValueError(
                    f"The journal goes on from the session in {event['folder']}, which is not there any more: what it "
                    "had learned is not in the journal."
                )
            try:
                self._step(identity, event["rows"])
            except ValueError as error:
                # It broke then, too, and the process was killed before that was noted.
                logger.warning(f"An update of the journal cannot be made and is given up: {error}")
                self._write({"event": "aborted", "id": identity})
        self.version = max(self.version, sum(map(kinds.count, ("update", "aborted", "undone"))))
