"""What a run wrote about itself, read back: from one that goes on, that has ended, or that was killed.

Knows: the run log, `trainer_state.json`, who still lives. Deliberately does not know: HTML, charts, models. What
cannot be read is passed over, and said.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from ..run_log import RUN_LOG
from .numbers import Logs, by_set, gaps, is_drawn, numbers

State = Literal["running", "finished", "failed", "stopped", "unknown"]
# Steps that a browser counts exactly, and seconds that are a date.
_STEPS = 2**53
_SECONDS = 1e11


@dataclass(frozen=True)
class RunRecord:
    """
    A run as its folder shows it.

    Args:
        name (`str`): Of the folder.
        state (`str`): `"running"`, `"finished"`, `"failed"` (with an error), `"stopped"` (without a word) or
            `"unknown"`.
        said (`str`): The state in words.
        logs (`tuple[tuple[int, dict], ...]`): Step and numbers of each log, evaluations too, in order.
        warnings (`tuple[tuple[int, str], ...]`): Step and text.
        settings (`dict[str, tuple]`): The options that are not at their default: value and default.
        facts (`dict[str, str]`): What else is known, in words.
        reward_weights (`dict[str, float]`): By reward function.
        notes (`tuple[str, ...]`): What could not be read.
        evaluations (`tuple[str, ...]`): What stands before the names of an evaluation's numbers: `"eval"`, or
            `"eval_NAME"` for each of several sets.
    """

    name: str
    state: State
    said: str
    logs: tuple[tuple[int, dict[str, float]], ...] = ()
    warnings: tuple[tuple[int, str], ...] = ()
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    reward_weights: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    evaluations: tuple[str, ...] = ("eval",)

    @property
    def step(self) -> int:
        """The last one that was logged."""
        return max((step for step, _ in self.logs), default=0)

    def series(self, name: str) -> list[tuple[int, float]]:
        """Step and value wherever a number was logged under this name; what cannot be drawn is left out."""
        return [(step, values[name]) for step, values in self.logs if name in values and is_drawn(values[name])]


def read_run(folder: "str | Path", now: float | None = None) -> RunRecord:
    """
    Read a run's folder.

    Args:
        folder (`str` or `Path`): The `output_dir`.
        now (`float`, *optional*): Seconds since 1970; by default the time of the call.

    Raises:
        `FileNotFoundError`: there is no such folder, or nothing in it that a trainer logged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}. Give the `output_dir` of a run.")
    now = time.time() if now is None else now
    notes: list[str] = []
    records = _sessions(_records(folder / RUN_LOG, notes), notes)
    logs = [
        (r["step"], numbers(r["values"])) for r in records if r["kind"] == "log" and isinstance(r.get("values"), dict)
    ]
    if not logs:
        logs = _saved_logs(folder, notes)
    if not logs and not records:
        raise FileNotFoundError(
            f"{folder} holds neither a `{RUN_LOG}` nor a `trainer_state.json` that can be read"
            f"{': ' + ' '.join(notes) if notes else '.'} Give the `output_dir` of a run of `SDPOTrainer`."
        )
    session = next((r for r in reversed(records) if r["kind"] == "session"), {})
    state, said = _state(records, session, now)
    logs, evaluations = by_set(logs)
    notes += gaps(logs)
    settings = session.get("settings")
    pairs = settings.items() if isinstance(settings, dict) else ()
    names, weights = session.get("rewards"), session.get("reward_weights")
    weighed = zip(names, weights, strict=False) if isinstance(names, list) and isinstance(weights, list) else ()
    return RunRecord(
        folder.absolute().name,
        state,
        said,
        tuple(logs),
        tuple((r["step"], str(r.get("text"))) for r in records if r["kind"] == "warning"),
        {name: (pair[0], pair[1]) for name, pair in pairs if isinstance(pair, list) and len(pair) == 2},
        _facts(records, session),
        {str(name): float(weight) for name, weight in weighed if isinstance(weight, (int, float))},
        tuple(notes),
        evaluations,
    )


def _records(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The records of a log; a line that is none is passed over."""
    if not path.exists():
        return
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error}.")
        return
    broken = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError):
            record = None
        whole = isinstance(record, dict) and isinstance(record.get("kind"), str)
        if whole and _is_within(record.get("step"), int, _STEPS) and _is_within(record.get("time"), float, _SECONDS):
            yield record
        else:
            broken.append(number)
    if broken:
        which = f"line {broken[0]}" if len(broken) == 1 else f"{len(broken)} lines, first {broken[0]}"
        notes.append(f"{path.name}: {which} of {len(lines)} cannot be read and is passed over.")


def _is_within(value: Any, kind: type, limit: float) -> bool:
    known = isinstance(value, (kind, int)) and not isinstance(value, bool)
    return known and 0 <= value < limit


def _sessions(records: Iterator[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """
    The records that still hold: a session that resumed from step `k` replaces what came after `k`, one that began anew
    everything before it (but an evaluation right before it).
    """
    kept: list[tuple[int, dict[str, Any]]] = []
    session, ended, dropped = 0, True, False
    for record in records:
        kind, step = record["kind"], record["step"]
        if kind == "session":
            session, ended = session + 1, False
        # What is logged before training begins, by a trainer that knows of no steps, belongs to what follows.
        kept.append((session + 1 if ended and step == 0 else session, record))
        ended |= step > 0 or kind in ("end", "error")
        if kind == "begin" and step == 0:
            before = len(kept)
            kept = [(s, r) for s, r in kept if s >= session]
            dropped |= len(kept) < before
        elif kind == "begin":
            kept = [(s, r) for s, r in kept if (_goes_on(r, step) if s < session else r["step"] or r["kind"] != "log")]
    if dropped:
        notes.append("An earlier run in this folder is left out: training began anew.")
    if session and any(s > session for s, _ in kept):
        kept = [(s, r) for s, r in kept if s <= session]
        notes.append("An evaluation by a trainer of its own is left out: of which step its model was is not known.")
    return [record for _, record in kept]


def _goes_on(record: dict[str, Any], step: int) -> bool:
    """Whether it still holds for a session that resumed from this step; what is said at each start is not kept."""
    return record["step"] <= step and (record["step"] > 0 or record["kind"] in ("session", "log"))


def _saved_logs(folder: Path, notes: list[str]) -> Logs:
    """The history in the latest checkpoint that can be read: all that a run of another trainer leaves."""
    best: tuple[int, list[Any]] = (-1, [])
    for path in sorted([*folder.glob("trainer_state.json"), *folder.glob("checkpoint-*/trainer_state.json")]):
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            best = max(best, (int(state["global_step"]), list(state["log_history"])), key=lambda pair: pair[0])
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"{path.relative_to(folder)} cannot be read and is passed over ({type(error).__name__}).")
    rows = [row for row in best[1] if isinstance(row, dict) and isinstance(row.get("step"), int)]
    if rows:
        notes.append(
            f"There is no {RUN_LOG}: the numbers are those of a checkpoint at step {best[0]}, and neither warnings "
            "nor settings are known."
        )
    return [(row["step"], numbers({k: v for k, v in row.items() if k != "step"})) for row in rows]


def _state(records: list[dict[str, Any]], session: dict[str, Any], now: float) -> tuple[State, str]:
    if not session:
        return "unknown", "It is not known whether the run goes on."
    following = records[records.index(session) :]
    last = following[-1]
    begin = next((r for r in reversed(following) if r["kind"] == "begin"), {})
    of = f" of {begin['max_steps']}" if isinstance(begin.get("max_steps"), int) and begin["max_steps"] > 0 else ""
    for record in following:
        if record["kind"] == "end":
            return "finished", f"Finished at step {record['step']}{of}, {_ago(now - record['time'])}."
        if record["kind"] == "error":
            what = f"{record.get('error')}: {record.get('text')}".removesuffix(": ")
            return "failed", f"Ended at step {record['step']}{of} with {what}"
    heard = f"step {last['step']}{of}, last heard of {_ago(now - last['time'])}"
    if _lives(session):
        return "running", f"Running: {heard}."
    return "stopped", f"Stopped without a word (killed, or on another machine): {heard}."


def _lives(session: dict[str, Any]) -> bool:
    """Whether the process that wrote the session still runs on this machine."""
    try:
        # A number is given to another process later on.
        return psutil.Process(int(session["process"])).create_time() <= session["time"] + 1.0
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def _ago(seconds: float) -> str:
    return f"{duration(max(seconds, 0.0))} ago"


def duration(seconds: float) -> str:
    """In words, with two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, hours = whole // 60, whole // 3600
    if minutes < 60:
        return f"{minutes} min {whole % 60} s"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def _facts(records: list[dict[str, Any]], session: dict[str, Any]) -> dict[str, str]:
    facts = {name: str(session[key]) for key, name in (("model", "Model"), ("teacher", "Teacher")) if key in session}
    names = session.get("rewards")
    if names and isinstance(names, list):
        facts["Reward"] = ", ".join(map(str, names))
    if records:
        began, last = records[0]["time"], records[-1]["time"]
        facts["Began"] = datetime.fromtimestamp(began).strftime("%Y-%m-%d %H:%M")
        facts["Time"] = duration(max(last - began, 0.0))
    resumed = [r["step"] for r in records if r["kind"] == "begin" and r["step"] > 0]
    if resumed:
        facts["Resumed at step"] = ", ".join(map(str, resumed))
    if "processes" in session:
        facts["Processes"] = f"{session['processes']} ({session.get('device')})"
    versions = session.get("versions")
    if isinstance(versions, dict):
        facts["Versions"] = ", ".join(f"{name} {number}" for name, number in versions.items())
    return facts
