"""What a script of a session may say: a strict form, and errors that name the step and the key.

Knows: YAML, the steps and their arguments. Deliberately does not know: sessions, how a step is played.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .editing import EditError, read_call


class ScriptError(ValueError):
    """A script that cannot be played; the message names the step and the key."""


@dataclass(frozen=True)
class Step:
    """
    One step.

    Args:
        where (`str`): How messages name it, such as `step 3 (deny)`.
        name (`str`): What to do.
        value: Its argument, checked; `None` where there is none.
        steps (`list[Step]`): Of a `repeat`, what is repeated.
    """

    where: str
    name: str
    value: Any = None
    steps: list["Step"] = field(default_factory=list)


@dataclass(frozen=True)
class Script:
    """
    A session to be played.

    Args:
        steps (`list[Step]`): In order.
        about (`str`): What it shows.
        system (`str`, *optional*): The system prompt.
        config (`dict`): Fields of `SDPOConfig`.
    """

    steps: list[Step]
    about: str = ""
    system: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


class _Loader(yaml.SafeLoader):
    """A key that stands twice is an error, not the last one's victory."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key, _ in node.value:
        name = loader.construct_object(key, deep=True)
        if isinstance(name, (str, int, float, bool)) and name in seen:
            raise ScriptError(f"line {key.start_mark.line + 1}: the key `{name}` stands twice.")
        seen.add(name if isinstance(name, (str, int, float, bool)) else id(key))
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load_script(path: str | Path) -> Script:
    """
    Read and check a script.

    Raises:
        [`ScriptError`]: names the step and the key; nothing has been played.
        `OSError`: the file cannot be read.
    """
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ScriptError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except ScriptError as error:
        raise ScriptError(f"{path}, {error}") from error
    if not isinstance(data, dict) or "steps" not in data:
        raise ScriptError(f"{path}: it needs a key `steps` with a list of steps.")
    top = {"steps": _steps_of, "about": _words, "system": _words, "config": _fields}
    _known(str(path), data, top)
    values = {key: top[key](f"{path}: `{key}`", value) for key, value in data.items() if key != "steps"}
    return Script(_steps_of("", data["steps"]), **values)


def _known(where: str, given: Any, keys: Any) -> None:
    if not isinstance(given, dict):
        raise ScriptError(f"{where}: there should be a mapping with some of {', '.join(keys)}.")
    for key in given:
        if key not in keys:
            raise ScriptError(f"{where}: unknown key `{key}`; known are {', '.join(keys)}.")


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ScriptError(f"{where} should be text (in quotes, if it looks like a number or a date).")
    return value


def _words(where: str, value: Any) -> str:
    if not _text(where, value).strip():
        raise ScriptError(f"{where} is blank.")
    return value


def _name(where: str, value: Any) -> str | None:
    return None if value is None else _words(where, value)


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ScriptError(f"{where} should be true or false.")
    return value


def _count(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ScriptError(f"{where} should be a whole number from 0.")
    return value


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ScriptError(f"{where} should be a number.")
    return float(value)


def _fields(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ScriptError(f"{where} should be a mapping.")
    return value


def _expression(where: str, value: Any) -> re.Pattern:
    try:
        return re.compile(_words(where, value))
    except re.error as error:
        raise ScriptError(f"{where} is no regular expression: {error}.") from error


def _answer(where: str, value: Any) -> Any:
    """A call, several calls, or a text."""
    if isinstance(value, str):
        return _words(where, value)
    entries = value if isinstance(value, list) else [value]
    try:
        if entries:
            return [read_call(entry, where) for entry in entries]
    except EditError as error:
        raise ScriptError(str(error)) from error
    raise ScriptError(f"{where} should be a text or a call (`name`, `arguments`).")


def _form(checks: dict[str, Callable[[str, Any], Any]], *needed: str) -> Callable[[str, Any], dict[str, Any]]:
    """A mapping with these keys, some of them needed; with none needed, at least one."""

    def check(where: str, value: Any) -> dict[str, Any]:
        _known(where, value, checks)
        for key in needed:
            if key not in value:
                raise ScriptError(f"{where}: the key `{key}` is missing.")
        if not value:
            raise ScriptError(f"{where} is empty; it takes {', '.join(checks)}.")
        return {key: checks[key](f"{where}: `{key}`", entry) for key, entry in value.items()}

    return check


_RANGE = {"at_least": _number, "at_most": _number}


def _metrics(where: str, value: Any) -> dict[str, dict[str, float]]:
    return {name: _form(_RANGE)(f"{where}: `{name}`", entry) for name, entry in _fields(where, value).items()}


_EXPECT = _form(
    {
        "tool": _name, "arguments": _fields, "text": _words, "not_text": _words, "matches": _expression,
        "error": _flag, "truncated": _flag, "pending": _flag, "observation": _words, "observation_ok": _flag,
        "file": _form({"path": _words, "text": _text, "contains": _words, "exists": _flag}, "path"),
        "updates": _count, "metrics": _metrics, "probability": _form({"of": _answer, **_RANGE}, "of"),
    }
)  # fmt: skip
_DENY = _form({"feedback": _words, "solution": _answer, "environment_feedback": _words})
NOTHING: set[str] = {
    "respond", "approve", "learn", "retry", "undo", "clear", "metrics", "teacher", "changes", "history",
}  # fmt: skip
_WITH: dict[str, Callable[[str, Any], Any]] = {
    "say": _words,
    "expect": _EXPECT,
    "deny": lambda where, value: _DENY(where, {"feedback": value} if isinstance(value, str) else value),
    "edit": _answer,
    "drop": _count,
    "save": _words,
    "file": _form({"path": _words, "text": _text}, "path", "text"),
}


def _steps_of(where: str, value: Any) -> list[Step]:
    if not isinstance(value, list) or not value:
        raise ScriptError(f"{where or 'steps'}: there should be a list of steps.")
    return [_step(f"{where}step {number}", entry) for number, entry in enumerate(value, 1)]


def _step(where: str, entry: Any) -> Step:
    known = sorted({*NOTHING, *_WITH, "repeat"})
    if isinstance(entry, str):
        entry = {entry: None}
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ScriptError(f"{where}: a step is one word or one `word: value`, of {', '.join(known)}.")
    name, value = next(iter(entry.items()))
    if name not in known:
        raise ScriptError(f"{where}: there is no step `{name}`; there are {', '.join(known)}.")
    where = f"{where} ({name})"
    if name == "repeat":
        _known(where, value, ("at_most", "until", "steps"))
        for key in ("at_most", "until", "steps"):
            if key not in value:
                raise ScriptError(f"{where}: the key `{key}` is missing.")
        wanted = {"at_most": _count(f"{where}: `at_most`", value["at_most"]), "until": _EXPECT(where, value["until"])}
        return Step(where, name, wanted, _steps_of(f"{where}, ", value["steps"]))
    if name in NOTHING:
        if value is not None:
            raise ScriptError(f"{where}: it takes no value.")
        return Step(where, name)
    if value is None and name == "save":
        return Step(where, name)
    return Step(where, name, _WITH[name](where, value))
