"""The run's own log: a line of JSON for each thing that happens, on the disk at once.

It is there while the run goes on and after it was killed, with or without checkpoints, and it holds what
`trainer_state.json` does not: warnings, settings, how it ended. Knows: files, options, the standard library.
Deliberately does not know: trainers, models, pages.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# What begins with an underscore is not pushed to the Hub: warnings may quote prompts.
RUN_LOG = "_run_log.jsonl"
# Where things are, who may, how it is shown; or what the library derives by itself.
_UNTOLD = (
    "output_dir", "run_name", "logging_dir", "disable_tqdm", "report_to", "accelerator_config", "debug",
    "activation_checkpointing", "pad_to_multiple_of", "local_rank", "project", "trackio_space_id",
    "model_init_kwargs", "teacher_model_init_kwargs", "resume_from_checkpoint", "_n_gpu", "distributed_state",
)  # fmt: skip


def changed_settings(args: Any) -> dict[str, tuple[Any, Any]]:
    """
    The options that are not at their default: the value and the default, as plain data.

    Paths, names, and options that may hold a token are left out.

    Args:
        args ([`SDPOConfig`]): Of the run.
    """
    changed = {}
    for option in fields(args):
        name = option.name
        if not option.init or name in _UNTOLD or name.endswith("_token") or "hub" in name.split("_"):
            continue
        value, default = plain(getattr(args, name)), plain(args._default(name))
        if value != default:
            changed[name] = (value, default)
    return changed


def plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite as text, unknown things as their text."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return plain(value.item())
    return str(value)


class RunLog:
    """
    Appends records to a file: `{"kind": ..., "time": ..., ...}`.

    Kinds: `session` (what `train()` was called with), `begin` (the step from which training goes on), `log` (what the
    trainer logs), `warning`, `end`, and `error` (why `train()` ended).

    Args:
        path (`Path`): The file; its folder is made as needed.
        step (`Callable`): The optimizer steps done so far.
        writes (`Callable`): Whether this process writes.
    """

    def __init__(self, path: Path, step: Callable[[], int], writes: Callable[[], bool]) -> None:
        self._path = path
        self._step = step
        self._writes = writes
        self._refused = False

    def write(self, kind: str, **record: Any) -> None:
        """Add a record. A disk that refuses is spoken of once: it is no reason to end a run."""
        if self._refused or not self._writes():
            return
        record = {"kind": kind, "time": round(time.time(), 3), "step": self._step(), **record}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps(plain(record), allow_nan=False).encode() + b"\n"
            with self._path.open("a+b") as file:
                # A process that was killed, or a disk that was full, may have left half a line.
                torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
                file.write(b"\n" + line if torn else line)
        except OSError as error:
            self._refused = True
            logger.warning(f"SDPO: the run log {self._path} is not written any more ({error}).")

    @contextmanager
    def recording(self, **session: Any) -> Iterator[None]:
        """
        Within, a training session is recorded, with the package's warnings and how it ended.

        Args:
            session: What to remember of it.
        """
        self._refused = False
        self.write("session", process=os.getpid(), **session)
        handler = _WarningHandler(self)
        listened = logging.getLogger(__package__)
        listened.addHandler(handler)
        try:
            yield
        except BaseException as error:  # an interrupt too ends the run
            self.write("error", error=type(error).__name__, text=str(error))
            raise
        else:
            self.write("end")
        finally:
            listened.removeHandler(handler)


class _WarningHandler(logging.Handler):
    """Passes warnings on to the log. Whoever has not set logging up reads them on the terminal all the same."""

    def __init__(self, log: RunLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.write("warning", text=record.getMessage())
        # Python's last resort serves loggers without any handler, which this one has now.
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and not self._is_heard(record):
            last.handle(record)

    @staticmethod
    def _is_heard(record: logging.LogRecord) -> bool:
        """Whether another handler will see it."""
        node: logging.Logger | None = logging.getLogger(record.name)
        while node is not None:
            if any(not isinstance(handler, _WarningHandler) for handler in node.handlers):
                return True
            node = node.parent if node.propagate else None
        return False
