"""The best and the worst rollouts of a run, from its tables and its heat maps.

Knows: `completions/*.parquet`, the folder of heat maps and the index in it. Deliberately does not know: HTML, models.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..reprompt import Prompt, completion_text, message_text
from ..run_log import plain
from .table import TableRow, read_table

HEATMAPS = "heatmaps"
INDEX = "index.jsonl"
# Tables that are read: the latest ones, and the latest ones that a heat map belongs to.
_TABLES = 20


def rollout_key(prompt: Prompt, completion: Prompt) -> str:
    """Tells a rollout from others by its texts."""
    text = f"{completion_text(prompt)}\0{completion_text(completion)}"
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:24]


def note_page(page: Path, step: int, rows: Sequence[TableRow]) -> None:
    """
    Write into the index beside a heat map which rollouts it shows, in their order on the page.

    Tables are written at the steps that are logged, and hold one batch; a heat map's step need not be one of them.
    """
    shown = [
        {
            "prompt": _texts(row.prompt),
            "completion": completion_text(row.completion),
            "feedback": row.feedback,
            "teacher_prompt": row.teacher_prompt,
            "rewards": row.rewards,
            "advantage": row.advantage,
        }
        for row in rows
    ]
    with (page.parent / INDEX).open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain({"step": step, "file": page.name, "rollouts": shown})) + "\n")


def _texts(prompt: Prompt) -> Prompt:
    """The prompt without images."""
    if isinstance(prompt, str):
        return prompt
    kept = ("role", "name")
    return [{**{k: m[k] for k in kept if k in m}, "content": message_text(m.get("content"))} for m in prompt]


@dataclass(frozen=True)
class Page:
    """
    A heat map that a run wrote.

    Args:
        step (`int`): When.
        file (`str`): Its name, inside of the folder of heat maps.
        rows (`tuple[TableRow, ...]`): Its rollouts, in the order of the page.
    """

    step: int
    file: str
    rows: tuple[TableRow, ...]


def read_pages(folder: Path) -> list[Page]:
    """The heat maps of a run, by step; a line of the index that cannot be read is passed over, as is a page gone."""
    path = folder / HEATMAPS / INDEX
    if not path.is_file():
        return []
    pages = {}
    for line in path.read_bytes().decode("utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            page = Page(int(row["step"]), str(row["file"]), tuple(_row(r, int(row["step"])) for r in row["rollouts"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        # Only what lies in the folder itself is linked.
        if Path(page.file).name == page.file and (folder / HEATMAPS / page.file).is_file():
            pages[page.file] = page
    return sorted(pages.values(), key=lambda page: page.step)


def _row(data: dict[str, Any], step: int) -> TableRow:
    rewards = {name: None if value is None else float(value) for name, value in data["rewards"].items()}
    return TableRow(
        data["prompt"], data["completion"], data["feedback"], data["teacher_prompt"], rewards, data["advantage"], step
    )


@dataclass(frozen=True)
class Choice:
    """
    A rollout worth a look.

    Args:
        row ([`TableRow`]): What is known of it.
        table (`Path`, *optional*): Where it stands; `None` if a heat map alone knows it.
        reward (`float`): The weighted sum.
        link (`str`, *optional*): Its heat map, relative to the run's folder.
    """

    row: TableRow
    table: Path | None
    reward: float
    link: str | None


def choose(
    folder: Path, weights: dict[str, float], notes: list[str], until: int | None = None, count: int = 3
) -> tuple[list[Choice], list[Choice]]:
    """
    The best and the worst rollouts in the latest tables, in those of steps that have a heat map, and in heat maps.

    Among equals come those with a heat map, then other prompts, then the latest.

    Args:
        folder (`Path`): The run's.
        weights (`dict[str, float]`): Of the reward functions; empty: each number in the table is a reward.
        notes (`list[str]`): Is told what could not be read.
        until (`int`, *optional*): What is of later steps is left from an earlier run.
        count (`int`): How many of each.
    """
    pages = [page for page in read_pages(folder) if until is None or page.step <= until]
    links = {
        rollout_key(row.prompt, row.completion): f"{HEATMAPS}/{page.file}#name-{place}"
        for page in pages for place, row in enumerate(page.rows)
    }  # fmt: skip
    mapped = {f"completions_{page.step:05d}.parquet" for page in pages[-_TABLES:]}
    tables = sorted((folder / "completions").glob("completions_*.parquet"))
    if not (tables or pages):
        notes.append("There are no completions tables, so no rollouts are shown: train with `log_completions=True`.")
    found: dict[str, Choice] = {}
    for row in [row for page in pages for row in page.rows]:
        reward, key = total_reward(row.rewards, weights), rollout_key(row.prompt, row.completion)
        if reward is not None:
            found[key] = Choice(row, None, reward, links[key])
    for path in [table for table in tables if table.name in mapped or table in tables[-_TABLES:]]:
        try:
            rows = [row for row in read_table(path) if until is None or (row.step or 0) <= until]
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).split("\n", 1)[0]
            notes.append(f"completions/{path.name} cannot be read and is passed over ({reason}).")
            continue
        for row in rows:
            reward = total_reward(row.rewards, weights)
            if reward is not None:
                key = rollout_key(row.prompt, row.completion)
                found[key] = Choice(row, path, reward, links.get(key))
    best = _spread(sorted(found.values(), key=lambda c: (-c.reward, c.link is None, -(c.row.step or 0))), count)
    taken = {id(choice) for choice in best}
    rest = [choice for choice in found.values() if id(choice) not in taken]
    worst = _spread(sorted(rest, key=lambda c: (c.reward, c.link is None, -(c.row.step or 0))), count)
    return best, worst


def total_reward(rewards: dict[str, float | None], weights: dict[str, float]) -> float | None:
    """The weighted sum, as TRL has it: a reward that is missing counts nothing; `None` where all are."""
    known = {
        name: value for name, value in rewards.items()
        if value is not None and math.isfinite(value) and (not weights or name in weights)
    }  # fmt: skip
    return sum(weights.get(name, 1.0) * value for name, value in known.items()) if known else None


def _spread(ordered: list[Choice], count: int) -> list[Choice]:
    """The first few; among those that are as good as the last of them, each prompt once before any comes again."""
    if len(ordered) <= count:
        return ordered
    level = [(choice.reward, choice.link is None) for choice in ordered]
    chosen: list[Choice] = []
    start = 0
    while len(chosen) < count:
        end = next((i for i in range(start, len(ordered)) if level[i] != level[start]), len(ordered))
        seen, again = set(), []
        for choice in ordered[start:end]:
            prompt = repr(choice.row.prompt)
            (again if prompt in seen else chosen).append(choice)
            seen.add(prompt)
        chosen += again
        start = end
    return chosen[:count]
