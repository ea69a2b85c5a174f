"""From a heat map to one self-contained HTML page: escaped, coloured, without network.

Knows: HTML, colours' levels. Deliberately does not know: models, tensors. Text that models, tools and users wrote is
made visible, then escaped by the template engine; a content security policy allows the page's own script alone.
"""

import base64
import hashlib
import html
import json
import math
import unicodedata
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from .record import Candidate, Heatmap, RolloutView, TokenView

LEVELS = 7
_STRONGEST = 8


def visible(text: str) -> str:
    """
    `text` with every character that would act instead of showing as a symbol: control characters as their pictures,
    marks that turn the direction of writing, invisible ones, halves of surrogate pairs and characters of no meaning as
    `⟨U+202E⟩`. New lines and tabs stay.
    """
    return "".join(_visible_character(c) for c in text)


@cache
def _visible_character(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    # Fillers and selectors that are letters and marks by category, yet show nothing.
    hidden = hidden or code in (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0) or 0xFE00 <= code <= 0xFE0F
    hidden = hidden or 0x180B <= code <= 0x180F or 0xE0100 <= code <= 0xE01EF
    return f"⟨U+{code:04X}⟩" if hidden else character


def token_text(text: str) -> str:
    """A token inside of an answer: also its white space leaves a trace."""
    shown = visible(text)
    if shown and not shown.strip(" "):
        return "·" * len(shown)
    return shown.replace("\t", "⇥\t").replace("\n", "↵\n")


def candidate_text(text: str) -> str:
    """A token in a list: on one line, all of its white space visible."""
    return visible(text).replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")


def scale_of(values: Sequence[float]) -> float:
    """What has the strongest colour: the 98th percentile of the sizes, so that one outlier does not pale the rest."""
    sizes = sorted(abs(value) for value in values if math.isfinite(value))
    if not sizes:
        return 1.0
    return sizes[min(int(0.98 * len(sizes)), len(sizes) - 1)] or 1.0


def level(value: float, scale: float) -> int:
    """From 0 to `LEVELS`: level `k` begins above `scale * ((k - 1) / LEVELS) ** 2`, level 1 at 1 % of the scale."""
    share = abs(value) / scale
    if not share >= 0.01:  # NaN too
        return 0
    return max(min(math.ceil(LEVELS * math.sqrt(min(share, 1.0))), LEVELS), 1)


def render(heatmap: Heatmap) -> str:
    """
    The page.

    Args:
        heatmap ([`Heatmap`]): What to show.

    Returns:
        `str`: HTML without any reference to something outside of it.
    """
    values = [token.values for rollout in heatmap.rollouts for token in rollout.tokens if token.values is not None]
    scales = {
        "divergence": scale_of([value.divergence for value in values]),
        "ratio": scale_of([value.log_ratio for value in values]),
    }
    style, script = asset("heatmap.css"), asset("heatmap.js")
    return environment().get_template("heatmap.html.jinja").render(
        heatmap=heatmap,
        rollouts=[_rollout(rollout, scales) for rollout in heatmap.rollouts],
        scales=scales,
        levels=LEVELS,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; base-uri 'none'; "
        "form-action 'none'",
        data=Markup(_data(heatmap)),
    )  # fmt: skip


def framed(page: str, title: str, height: int = 640) -> str:
    """The page inside of another one, apart from its styles and scripts: for notebooks."""
    return (
        f'<iframe title="{html.escape(visible(title))}" sandbox="allow-scripts" srcdoc="{html.escape(page)}" '
        f'style="width:100%;height:{height}px;border:1px solid #8888;border-radius:8px"></iframe>'
    )


def asset(name: str) -> str:
    """A file of the templates."""
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """How a content security policy names a style or a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def environment() -> jinja2.Environment:
    """The template engine, which escapes all that is put in, with the filters above."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "number": number, "signed": signed}
    return environment


def signed(value: float) -> str:
    """Two places behind the point, always with a sign."""
    return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def number(value: float | None) -> str:
    """A few digits, with a real minus sign; a dash for none."""
    if value is None or math.isnan(value):
        return "\N{EN DASH}"
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}")


def _rollout(rollout: RolloutView, scales: dict[str, float]) -> dict[str, Any]:
    scored = [(i, token) for i, token in enumerate(rollout.tokens) if token.values is not None]
    strongest = sorted(scored, key=lambda pair: -abs(pair[1].values.log_ratio))[:_STRONGEST]
    mean = sum(token.values.divergence for _, token in scored) / len(scored) if scored else None
    return {
        "view": rollout,
        "tokens": [(token_text(token.text), _classes(token, scales)) for token in rollout.tokens],
        "strongest": [
            (i, candidate_text(token.text), token.values.log_ratio, _classes(token, scales)) for i, token in strongest
        ],
        "mean": mean,
        "scored": len(scored),
        "context": sum(token.role == "context" for token in rollout.tokens),
    }


def _classes(token: TokenView, scales: dict[str, float]) -> str:
    if token.values is None:
        return "t c" if token.role == "context" else "t u"
    direction = "up" if token.values.log_ratio > 0 else "down"
    ratio = level(token.values.log_ratio, scales["ratio"])
    return f"t s d{level(token.values.divergence, scales['divergence'])} {direction}{ratio}"


def _data(heatmap: Heatmap) -> str:
    """What the script reads: texts by token id, then numbers."""
    texts: dict[int, str] = {}

    def top(candidates: Sequence[Candidate]) -> list[list[float]]:
        texts.update((c.id, candidate_text(c.text)) for c in candidates)
        return [[c.id, _short(c.probability)] for c in candidates]

    def row(token: TokenView) -> list[Any]:
        texts[token.id] = candidate_text(token.text)
        if token.values is None:
            return [token.id, token.role]
        v = token.values
        numbers = (
            v.divergence, v.log_ratio, v.student_log_prob, v.teacher_log_prob, v.student_entropy, v.teacher_entropy,
        )  # fmt: skip
        return [token.id, token.role, *map(_short, numbers), top(v.student_top), top(v.teacher_top)]

    rollouts = [[row(token) for token in rollout.tokens] for rollout in heatmap.rollouts]
    return embedded({"texts": texts, "rollouts": rollouts})


def embedded(data: Any) -> str:
    """JSON that no HTML parser can be ended by."""
    data = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data


def _short(value: float) -> "float | str":
    """Seven digits, more than float32 holds of what is computed in it; what is not finite as text."""
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)
