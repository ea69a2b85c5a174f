"""From a run's folder to one self-contained HTML page: curves, warnings, settings, rollouts.

Knows: HTML, what a reader looks for first. Deliberately does not know: models, tensors, how pictures are drawn. Texts
are made visible and escaped as on the heat map's page, and the policy of that page forbids everything from outside.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from ..reprompt import Prompt, completion_text, message_text
from .charts import COLOURS, DASHES, LINE_WIDTH, Chart, draw, smoothing
from .curves import charts, names_of, thin
from .page import asset, digest, embedded, environment, number
from .rollouts import Choice, Page, choose, read_pages
from .run import RunRecord, read_run

REPORT = "report.html"
_MOST_MARKS = 30
_MOST_WARNINGS = 100
Linker = Callable[[Choice], "str | None"]


def run_report(folder: "str | Path", out: "str | Path | None" = None, linker: Linker | None = None) -> Path:
    """
    Write the report of a run.

    Args:
        folder (`str` or `Path`): The `output_dir`, of a run that goes on, has ended, or was killed.
        out (`str` or `Path`, *optional*): The page; `report.html` in the folder by default.
        linker (`Callable`, *optional*): The heat map of a rollout that the run itself has none of, as a path.

    Returns:
        `Path`: the page.

    Raises:
        `FileNotFoundError`: there is no run in the folder.
        `ImportError`: matplotlib is not installed.
        `OSError`: the page cannot be written.
    """
    folder = Path(folder)
    out = folder / REPORT if out is None else Path(out)
    run = read_run(folder)
    notes = list(run.notes)
    until = None if run.state == "unknown" else run.step
    best, worst = choose(folder, run.reward_weights, notes, until)
    pages = [page for page in read_pages(folder) if until is None or page.step <= until]
    base = os.path.relpath(folder.absolute(), out.absolute().parent)
    page = render(run, (best, worst), pages, notes, base, linker)
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(page, encoding="utf-8")
        partial.replace(out)  # a browser that reloads never meets half a page
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise OSError(f"The report cannot be written to {out} ({error}). Give another place with `--out`.") from error
    return out


def render(
    run: RunRecord,
    rollouts: tuple[Sequence[Choice], Sequence[Choice]],
    pages: Sequence[Page] = (),
    notes: Sequence[str] = (),
    base: str = ".",
    linker: Linker | None = None,
) -> str:
    """
    The page.

    Args:
        run ([`RunRecord`]): What to show.
        rollouts (`tuple`): The best and the worst.
        pages (`Sequence[Page]`): The heat maps that the run wrote.
        notes (`Sequence[str]`): What could not be read.
        base (`str`): The run's folder as the page sees it.
        linker (`Callable`, *optional*): See [`run_report`].
    """
    # Evenly over all of them, so that many warnings do not look like late ones.
    marks = [step for step, _ in thin(sorted({(step, 0.0) for step, _ in run.warnings}), _MOST_MARKS)]
    drawn = [(chart, draw(chart, [m for m in marks if _within(m, chart)])) for chart in charts(run)]
    style, script = asset("run.css"), asset("run.js")
    return environment().get_template("run.html.jinja").render(
        run=run,
        notes=notes,
        tiles=_tiles(run),
        warnings=_warnings(run),
        charts=[_chart(chart, picture.svg) for chart, picture in drawn],
        smoothed=any(_is_smoothed(chart) for chart, _ in drawn),
        groups=[
            (title, [_rollout(choice, base, linker) for choice in choices])
            for title, choices in zip(("Best rollouts", "Worst rollouts"), rollouts, strict=True) if choices
        ],
        pages=[(page.step, _link(base, f"heatmaps/{page.file}")) for page in pages],
        settings=[(name, _value(value), _value(default)) for name, (value, default) in sorted(run.settings.items())],
        numbers=_numbers(run),
        made=datetime.now().strftime("%Y-%m-%d %H:%M"),
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; base-uri 'none'; "
        "form-action 'none'",
        data=Markup(embedded([
            {
                "lines": [[[step, _exact(value)] for step, value in line.points] for line in chart.series],
                "box": picture.box,
                "limits": picture.limits,
            }
            for chart, picture in drawn
        ])),
    )  # fmt: skip


def _within(step: int, chart: Chart) -> bool:
    steps = [s for line in chart.series for s, _ in line.points]
    return min(steps) <= step <= max(steps)


def _is_smoothed(chart: Chart) -> bool:
    return not chart.stacked and any(smoothing(len(line.points)) > 1 for line in chart.series)


def _exact(value: float) -> float:
    return float(f"{value:.6g}")


def _chart(chart: Chart, svg: str) -> dict[str, Any]:
    last = max(step for line in chart.series for step, _ in line.points)
    lines = [
        {
            "label": line.label,
            "colour": index % COLOURS,
            "last": number(line.points[-1][1]),
            "dashes": " ".join(f"{part * LINE_WIDTH:g}" for part in DASHES[index % len(DASHES)]) or "none",
        }
        for index, line in enumerate(chart.series)
    ]
    ends = [(line.label, line.points[0], line.points[-1]) for line in chart.series]
    words = "; ".join(
        f"{label} from {number(a[1])} at step {a[0]} to {number(b[1])} at step {b[0]}" for label, a, b in ends
    )
    return {"chart": chart, "svg": Markup(svg), "lines": lines, "last": last, "words": f"{chart.title}: {words}."}


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """What a reader looks for first: name, value now, and what to compare it with."""
    tiles = []
    for label, name in (
        ("Success", "sdpo/success_share"),
        ("Success in evaluation", "eval_sdpo/success_share"),
        ("Self-teacher's success", "eval_sdpo/teacher_success_share"),
        ("Reward", "reward"),
    ):
        for logged, suffix in names_of(run, name):
            points = run.series(logged)
            if points:
                best = max(points, key=lambda point: point[1])
                tiles.append((label + suffix, number(points[-1][1]), f"best {number(best[1])} at step {best[0]}"))
    points = run.series("sdpo/divergence")
    if points:
        tiles.append(("Divergence", number(points[-1][1]), f"{number(points[0][1])} at step {points[0][0]}"))
    times = [values for _, values in run.logs if "sdpo/time/step" in values][-5:]
    if times:
        whole = sum(values["sdpo/time/step"] for values in times) / len(times)
        parts = {
            name.removeprefix("sdpo/time/"): sum(values.get(name, 0.0) for values in times) / len(times)
            for name in times[-1]
            if name.startswith("sdpo/time/") and not name.endswith(("/step", "/outside"))
        }
        largest = max(parts, key=parts.__getitem__, default=None)
        if largest is not None and math.isfinite(whole) and whole > 0:
            share = f"{parts[largest] / whole:.0%} {largest.replace('_', ' ')}"
            tiles.append(("Time of a step", f"{number(whole)} s", share))
    return tiles


def _warnings(run: RunRecord) -> list[tuple[str, str]]:
    """Steps and text; where only the numbers differ, the latest text and all of its steps."""
    steps: dict[str, list[int]] = {}
    latest: dict[str, str] = {}
    for step, text in run.warnings:
        words = re.sub(r"\d+", "#", text)
        steps.setdefault(words, []).append(step)
        latest[words] = text
    rows = [
        (", ".join(map(str, at[:8])) + (f", … {at[-1]}" if len(at) > 8 else ""), latest[words])
        for words, at in steps.items()
    ]
    hidden = len(rows) - _MOST_WARNINGS
    return [*([("", f"{hidden} earlier warnings are not shown.")] if hidden > 0 else []), *rows[-_MOST_WARNINGS:]]


def _numbers(run: RunRecord) -> list[tuple[str, str, str, str, str]]:
    names = sorted({name for _, values in run.logs for name in values})
    rows = []
    for name in names:
        values = [value for _, value in run.series(name)]
        if values:
            rows.append((name, *map(number, (values[0], values[-1], min(values), max(values)))))
    return rows


def _value(value: Any) -> str:
    """As one writes it in Python."""
    return value if isinstance(value, str) and value and "\n" not in value else repr(value)


def _link(base: str, path: str) -> str:
    """A relative address that no browser takes for a scheme."""
    file, _, anchor = path.partition("#")
    whole = quote(Path(base, file).as_posix())
    return f"{'' if whole.startswith(('.', '/')) else './'}{whole}{f'#{anchor}' if anchor else ''}"


def _rollout(choice: Choice, base: str, linker: Linker | None) -> dict[str, Any]:
    link = None if choice.link is None else _link(base, choice.link)
    if link is None and linker is not None:
        link = linker(choice)
    row = choice.row
    return {
        "row": row,
        "reward": choice.reward,
        "prompt": _text(row.prompt),
        "completion": completion_text(row.completion),
        "link": link,
    }


def _text(prompt: Prompt) -> str:
    """A prompt to read: who says what."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"[{message['role']}]\n{message_text(message.get('content'))}" for message in prompt)
