"""Tool calls as text that a person can change, and an editor to change it in.

Knows: YAML, `$EDITOR`. Deliberately does not know: sessions, what a call means.
"""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from .records import Call
from .terminal import hidden, plain

_DEEPEST = 64  # levels of an argument
HEAD = "# Change the arguments and leave the editor. An empty file leaves all as it was.\n"


class EditError(ValueError):
    """What came back from the editor cannot be used; the message says why."""


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stand as blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value and not hidden(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def calls_text(calls: Sequence[Call]) -> str:
    """Calls as YAML: one mapping each; characters that a terminal would hide are escaped."""
    data = [{"name": call.name, "arguments": call.arguments} for call in calls]
    options = {"sort_keys": False, "width": 1000, "default_flow_style": False}
    text = yaml.dump(data, Dumper=_Dumper, allow_unicode=True, **options)
    return yaml.dump(data, Dumper=_Dumper, allow_unicode=False, **options) if hidden(text) else text


def read_calls(text: str) -> list[Call]:
    """
    The inverse of [`calls_text`].

    Raises:
        [`EditError`]: it is no YAML, or no list of calls.
    """
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise EditError(f"That is no YAML: {' '.join(str(error).split())}") from error
    data = [data] if isinstance(data, dict) else data
    if not isinstance(data, list) or not data:
        raise EditError("There should be a list of calls, each with `name` and `arguments`.")
    return [read_call(entry, f"call {number}") for number, entry in enumerate(data, 1)]


def read_call(entry: Any, what: str) -> Call:
    """
    One call from plain data.

    Raises:
        [`EditError`]: names the key.
    """
    if not isinstance(entry, dict) or set(entry) - {"name", "arguments"}:
        raise EditError(f"{what}: it needs the keys `name` and `arguments`, and no others.")
    name, arguments = entry.get("name"), entry.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise EditError(f"{what}: `name` should be a tool's name.")
    if not isinstance(arguments, dict) or not all(isinstance(key, str) for key in arguments):
        raise EditError(f"{what}: `arguments` should be a mapping.")
    for key, value in arguments.items():
        if not _is_plain(value, _DEEPEST):
            raise EditError(f"{what}: `{key}` is no JSON value (a date or the like; put it in quotes), or too deep.")
    return Call(name, arguments)


def _is_plain(value: Any, levels: int) -> bool:
    if levels < 0:
        return False
    if isinstance(value, list):
        return all(_is_plain(item, levels - 1) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item, levels - 1) for key, item in value.items())
    return value is None or isinstance(value, (str, bool, int, float))


def run_editor(text: str, suffix: str) -> str:
    """
    Let a person change a text in `$VISUAL`, `$EDITOR` or `vi`.

    Raises:
        [`EditError`]: the editor does not start, or it ends with an error.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="sdpo-edit-") as folder:
        file = Path(folder) / f"answer{suffix}"
        file.write_text(text, encoding="utf-8")
        try:
            status = subprocess.run([*shlex.split(editor), str(file)], check=False).returncode
            changed = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise EditError(f"The editor {editor!r} did not work ({error}); set $EDITOR.") from error
    if status:
        raise EditError(f"The editor {editor!r} ended with status {status}; nothing was changed.")
    return changed


def fix_call(text: str, editor: Callable[[str, str], str] = run_editor) -> list[Call] | None:
    """
    The calls that a person makes of an answer whose call could not be read, `None` if they make none.

    Raises:
        [`EditError`]: see [`read_calls`] and [`run_editor`].
    """
    said = "".join(f"# {line}\n" for line in plain(text).split("\n"))
    skeleton = "- name:\n  arguments:\n"
    changed = editor(f"# Write the call that was meant. The answer was:\n#\n{said}{skeleton}", ".yaml")
    return None if _blank(changed) or changed.endswith(f"\n{skeleton}") else read_calls(changed)


def edit_calls(calls: Sequence[Call], editor: Callable[[str, str], str] = run_editor) -> list[Call] | None:
    """
    The calls as a person changed them, `None` if they did not.

    Raises:
        [`EditError`]: see [`read_calls`] and [`run_editor`].
    """
    text = editor(HEAD + calls_text(calls), ".yaml")
    if _blank(text):
        return None
    changed = read_calls(text)
    # Not `==`: for Python 2 is 2.0 and True is 1, for a tool they are not.
    return None if calls_text(changed) == calls_text(calls) else changed


def _blank(text: str) -> bool:
    return not "".join(line for line in text.split("\n") if not line.startswith("#")).strip()
