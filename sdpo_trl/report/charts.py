"""Curves as SVG that takes its colours from the page.

Knows: matplotlib, which draws. Deliberately does not know: runs, HTML. The pictures hold no style of their own, so a
strict content security policy may forbid inline styles, and light and dark are the page's business.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any
from xml.etree import ElementTree

DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2), (3, 1, 1, 1, 1, 1), (9, 3))  # in widths of the line
LINE_WIDTH = 1.7
COLOURS = 8  # in the page's palette; further lines begin it anew, with other dashes
_SVG = "http://www.w3.org/2000/svg"
# Colours that stand for a place in the page's palette until the picture is drawn.
_INK, _GRID, _WARN = "#010101", "#020202", "#030303"
_PLACES = {_INK: "-ink", _GRID: "-grid", _WARN: "-warn"}
_REFERENCE = re.compile(r"^(?:url\()?#(\w+)\)?$")
_SIZE = (5.2, 2.35)  # inches; the page scales them


def _colour(index: int) -> str:
    return f"#04{index % COLOURS:04x}"


@dataclass(frozen=True)
class Series:
    """
    One line.

    Args:
        label (`str`): What it is.
        points (`tuple[tuple[int, float], ...]`): Step and value.
    """

    label: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Chart:
    """
    Lines that share an axis.

    Args:
        title (`str`): What is shown.
        unit (`str`): Of the values.
        series (`tuple[Series, ...]`): At least one.
        stacked (`bool`): Whether they are parts of a whole, at the same steps.
        share (`bool`): Whether values lie in `[0, 1]`.
    """

    title: str
    unit: str
    series: tuple[Series, ...]
    stacked: bool = False
    share: bool = False


@dataclass(frozen=True)
class Picture:
    """
    A drawn chart.

    Args:
        svg (`str`): Without styles, scripts and references; strokes and fills have the classes `s0`, `f0`, ...
        box (`tuple[float, float]`): Where the axis begins and ends, as shares of the width.
        limits (`tuple[float, float]`): The steps there.
    """

    svg: str
    box: tuple[float, float]
    limits: tuple[float, float]


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Centred means over `width` neighbours, fewer at the ends."""
    half = width // 2
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    ends = [(max(i - half, 0), min(i + half + 1, len(values))) for i in range(len(values))]
    return [(sums[b] - sums[a]) / (b - a) for a, b in ends]


def smoothing(count: int) -> int:
    """How many neighbours are averaged: none of few points, a thirtieth of many."""
    return 1 if count < 60 else count // 30 * 2 + 1


def draw(chart: Chart, marks: Sequence[int] = ()) -> Picture:
    """
    Draw it.

    Args:
        chart ([`Chart`]): What to draw.
        marks (`Sequence[int]`): Steps with a short line at the bottom.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError('The report draws with matplotlib: `pip install "sdpo-trl[viz]"`.') from error
    options = {
        "svg.fonttype": "none", "svg.hashsalt": chart.title, "path.simplify": True, "axes.edgecolor": _GRID,
        "xtick.color": _INK, "ytick.color": _INK, "axes.labelcolor": _INK, "font.size": 9,
        "axes.formatter.use_mathtext": False, "axes.unicode_minus": True,
    }  # fmt: skip
    with matplotlib.rc_context(options):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        (_stack if chart.stacked else _lines)(axes, chart.series)
        for step in marks:
            axes.axvline(step, ymax=0.07, color=_WARN, linewidth=2, zorder=4, solid_capstyle="butt")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        if chart.share:
            axes.set_ylim(-0.03, 1.03)
        elif chart.stacked:
            axes.set_ylim(bottom=0)
        steps = [step for series in chart.series for step, _ in series.points]
        if min(steps) == max(steps):
            axes.set_xlim(min(steps) - 1, max(steps) + 1)
        axes.tick_params(length=0)
        text = StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        place = axes.get_position()
        limits = tuple(float(x) for x in axes.get_xlim())
    return Picture(_bare(text.getvalue()), (float(place.x0), float(place.x1)), limits)


def _lines(axes: Any, series: Sequence[Series]) -> None:
    for index, line in enumerate(series):
        steps, values = zip(*line.points, strict=True)
        width = smoothing(len(values))
        dashes = DASHES[index % len(DASHES)]
        style = {"color": _colour(index), "linestyle": (0, dashes) if dashes else "-"}
        if width > 1:
            axes.plot(steps, values, color=_colour(index), linewidth=0.6, alpha=0.35)
            values = smooth(values, width)
        few = len(values) <= 12
        axes.plot(steps, values, linewidth=LINE_WIDTH, marker="o" if few else None, markersize=3.5, **style)


def _stack(axes: Any, series: Sequence[Series]) -> None:
    steps = [step for step, _ in series[0].points]
    if len(steps) == 1:  # an area needs a width
        steps = [steps[0] - 0.4, steps[0] + 0.4]
    values = [[value for _, value in part.points] * (2 if len(part.points) == 1 else 1) for part in series]
    colours = [_colour(i) for i in range(len(series))]
    axes.stackplot(steps, *values, colors=colours, edgecolor=_GRID, linewidth=0.4)


def _bare(svg: str) -> str:
    """The picture with classes instead of colours and attributes instead of styles, and nothing around it."""
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", svg))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    wanted = {
        name for element in root.iter() for value in element.attrib.values() for name in _REFERENCE.findall(value)
    }
    for element in root.iter():
        if element.get("id") not in wanted:  # the others would be the same in every picture
            element.attrib.pop("id", None)
        for name in [name for name in element.attrib if name.startswith("{")]:
            if name.endswith("}href"):  # of a marker that is drawn once; SVG 2 needs no namespace
                element.set("href", element.attrib[name])
            del element.attrib[name]
        classes = []
        for declaration in element.attrib.pop("style", "").split(";"):
            name, _, value = (part.strip() for part in declaration.partition(":"))
            place = _PLACES.get(value) if name in ("stroke", "fill") else None
            if value.startswith("#04") and name in ("stroke", "fill"):
                place = str(int(value[3:], 16))
            if place is not None:
                classes.append(f"{name[0]}{place}")
            elif name and name not in ("font", "font-size", "font-family"):
                element.set(name, value)
        if element.tag == f"{{{_SVG}}}text":
            classes = ["tick"]
        if classes:
            element.set("class", " ".join(classes))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    return re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode"))
