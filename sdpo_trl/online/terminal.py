"""How a session looks in a terminal.

Knows: records, diffs, colours, and that nothing which a model or a tool wrote may speak to the terminal. Deliberately
does not know: sessions, keys, what happens next. All text goes through [`plain`], and none is read as markup.
"""

import json
import math
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import regex
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .records import Attempt, AttemptChange, Call, Message, Observation, TokenChange

MAX_LINES = 60  # of a diff that are shown at first
MAX_WIDTH = 1000  # characters of a line
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


# Fillers, joiners and selectors that are letters or marks by their category, and spaces that look like the usual one.
_UNSEEN = regex.compile(r"\p{Default_Ignorable_Code_Point}|[\p{Zs}--[ \u3000]]|\u2800", regex.VERSION1)


def plain(text: str) -> str:
    """
    A text that a terminal shows as it is: control characters (escape sequences begin with one), directions of writing,
    invisible characters, spaces that are none of the usual ones and what is no text become `\\xNN` or `\\uNNNN`; line
    feeds and tabs stay.
    """
    return "".join(_escaped(character) if _is_hidden(character) else character for character in text)


def _is_hidden(character: str) -> bool:
    if character in "\n\t" or " " <= character <= "~":
        return False
    return unicodedata.category(character) in _HIDDEN or _UNSEEN.match(character) is not None


def in_line(text: str) -> str:
    """The same where a line feed or a tab would be out of place: in a name."""
    return plain(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def hidden(text: str) -> bool:
    """Whether [`plain`] would change a text."""
    return plain(text) != text


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"


def console(**options: Any) -> Console:
    """A console that reads no markup, draws no pictures for `:names:` and colours nothing by itself."""
    return Console(**{"markup": False, "emoji": False, "highlight": False, **options})


def text_of(words: str, style: str = "") -> Text:
    """Words of a model or a tool, safe to print. What [`plain`] had to escape is reversed, which nobody can fake."""
    return _append(Text(), words, style)


def _append(text: Text, words: str, style: str = "") -> Text:
    for escaped, run in groupby(words, key=lambda character: plain(character) != character):
        text.append(plain("".join(run)), style=f"{style} reverse".strip() if escaped else style)
    return text


def cut(lines: Sequence[str], limit: int | None = MAX_LINES) -> list[str]:
    """The first lines and the last ones, and how many stand between; the start of long lines. With `None`, all."""
    if limit is None:
        return list(lines)
    if len(lines) > limit:
        tail = limit // 4
        middle = f"[... {len(lines) - limit + 1} more lines ...]"
        lines = [*lines[: limit - tail - 1], middle, *lines[len(lines) - tail :]]
    return [
        line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]} [... {len(line) - MAX_WIDTH} more characters ...]"
        for line in lines
    ]


def diff_view(diff: str, limit: int | None = MAX_LINES) -> Text:
    """A unified diff in colours; white space at a line's end is shown."""
    shown = Text()
    for number, line in enumerate(cut(diff.rstrip("\n").split("\n"), limit)):
        sign = line[:1] if number > 1 else ""
        style = {"+": "green", "-": "red", "@": "cyan"}.get(sign, "bold" if number < 2 else "")
        body = line.rstrip(" \t")
        _append(shown, body, style)
        if sign == "+" and len(body) < len(line):
            shown.append("·" * (len(line) - len(body)), style="green reverse")
        shown.append("\n")
    shown.rstrip()
    return shown


def call_view(
    call: Call, diff: str | None, problem: str | None, number: int, total: int, whole: bool = False
) -> RenderableType:
    """
    A tool call before it runs.

    Args:
        call ([`Call`]): The call.
        diff (`str`, *optional*): What it would change; `None`: it writes no file itself.
        problem (`str`, *optional*): Why it would fail.
        number, total (`int`): Which of the reply's calls, from 1.
        whole (`bool`): Leave nothing out. A command is always shown whole.
    """
    command = call.name == "shell"
    head = Text("tool call", style="bold yellow")
    if total > 1:
        head.append(f" {number} of {total}")
    head.append(f"  {in_line(call.name)}", style="bold")
    rows: list[RenderableType] = [head]
    for name, value in arguments_of(call).items():
        if diff and name != "path":
            continue  # the diff says it better
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        lines = cut(shown.split("\n"), None if whole or command else 12)
        rows.append(Padding(text_of(f"{in_line(name)}: " + "\n  ".join(lines)), (0, 0, 0, 2), expand=False))
    if diff:
        rows.append(Padding(diff_view(diff, None if whole else MAX_LINES), (0, 0, 0, 2), expand=False))
    elif diff == "" and problem is None:
        rows.append(Text("  changes nothing", style="dim"))
    if problem is not None:
        rows.append(Padding(text_of(f"would fail: {problem}", "red"), (0, 0, 0, 2), expand=False))
    return Group(*rows)


def arguments_of(call: Call) -> dict[str, Any]:
    """A call's arguments by name, also where a model wrote something else."""
    return call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}


def observation_view(observation: Observation) -> Text:
    """What a tool replied."""
    shown = Text("tool reply " if observation.ok else "tool failed ", style="bold yellow" if observation.ok else "red")
    lines = cut(observation.text.split("\n"), 20)
    shown.append(plain("\n  ".join([in_line(observation.call.name), *lines])), style="dim")
    return shown


def metrics_view(metrics: Sequence[dict[str, float]], last: int = 10) -> Table:
    """The latest updates, one a row."""
    names = ["loss", "grad_norm", "seconds", "sdpo/divergence", "sdpo/gain", "sdpo/anchor"]
    rows = list(enumerate(metrics, 1))[-last:]
    present = [name for name in names if any(name in row for _, row in rows)]
    table = Table(box=None, pad_edge=False)
    for name in ("update", *(name.removeprefix("sdpo/") for name in present)):
        table.add_column(name, justify="right")
    for number, row in rows:
        table.add_row(str(number), *(_number(row.get(name)) for name in present))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def taught_view(attempts: Iterable[Attempt]) -> Group:
    """What the teacher was told about each denied answer."""
    rows: list[RenderableType] = []
    for number, attempt in enumerate(attempts, 1):
        rows.append(Text(f"attempt {number}", style="bold"))
        parts = {
            "answer": attempt.reply.text, "correction": attempt.feedback, "tool": attempt.environment_feedback,
            "demonstration": attempt.solution,
        }  # fmt: skip
        for name, words in parts.items():
            if words is not None:
                body = "\n    ".join(cut(words.strip("\n").split("\n"), 20))
                rows.append(Text.assemble((f"  {name}: ", "bold"), plain(body)))
    return Group(*rows)


def history_view(messages: Sequence[Message]) -> Group:
    """The conversation, one turn a line."""
    rows = []
    for number, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        content = message.get("content") or ""
        words = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
        words = " ".join([words, *(json.dumps(call["function"], ensure_ascii=False, default=str) for call in calls)])
        words, role = plain(" ".join(words.split())), plain(message["role"])
        rows.append(Text.assemble((f"{number:3} {role:9} ", "bold"), words, no_wrap=True, overflow="ellipsis"))
    return Group(*rows)


def changes_view(changes: Sequence[AttemptChange], listed: int = 8) -> Group:
    """
    What the last update changed, token by token: the answer coloured by how its probability moved, and the tokens that
    moved, or on which the teacher disagrees.

    Args:
        changes (`Sequence[AttemptChange]`): See [`OnlineSession.changes`].
        listed (`int`): Tokens to list of each answer.
    """
    rows: list[RenderableType] = []
    for number, change in enumerate(changes, 1):
        head = "what the correction changed" + (f" in attempt {number}" if len(changes) > 1 else "")
        answer = Text()
        for token in change.tokens:
            _append(answer, token.text, _colour(token.after - token.before))
        rows += [Text(head, style="bold"), Padding(answer, (0, 0, 0, 2), expand=False)]
        told = [i for i, token in enumerate(change.tokens) if max(_moved(token), token.divergence) >= 0.005]
        chosen = sorted(sorted(told, key=lambda i, tokens=change.tokens: -_moved(tokens[i]))[:listed])
        if chosen:
            rows.append(_probabilities([change.tokens[index] for index in chosen]))
        rest = len(change.tokens) - len(chosen)
        if rest:
            rows.append(Text(f"  {rest} other tokens moved less", style="dim"))
    return Group(*rows)


def _probabilities(tokens: Sequence[TokenChange]) -> Table:
    """One token a row: by the model before and after, by the teacher, and what the teacher wanted instead."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = [("  token", "left"), ("before", "right"), ("after", "right"), ("teacher", "right"), ("wanted", "left")]
    for name, side in columns:
        table.add_column(name, justify=side)
    for token in tokens:
        shares = [f"{math.exp(value):.3f}" for value in (token.before, token.after, token.teacher)]
        colour = _colour(token.after - token.before)
        table.add_row(Text("  ").append(_visible(token.text), colour), *shares, Text(_visible(token.wanted)))
    return table


def _moved(token: TokenChange) -> float:
    return abs(math.exp(token.after) - math.exp(token.before))


def _visible(token: str) -> str:
    """A token in one line, its white space marked where it is all there is."""
    shown = plain(token).replace("\n", "⏎").replace("\t", "⇥")
    return shown if shown.strip() else shown.replace(" ", "·")


def _colour(change: float) -> str:
    """Red: less likely than before. Green: likelier. Bold from a factor of e on."""
    if abs(change) < 0.05:
        return ""
    return ("bold " if abs(change) >= 1 else "") + ("red" if change < 0 else "green")


def progress_line(screen: Console) -> Progress:
    """One line that shows where an update stands, and its time; it goes away at the end. Files get none."""
    columns = TextColumn("learning"), BarColumn(30), TextColumn("{task.description}"), TimeElapsedColumn()
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)


def learned(metrics: dict[str, float], updates: int) -> str:
    """An update in one line."""
    return f"learned: update {updates}, loss {_number(metrics['loss'])}, {metrics['seconds']:.2f} s"
