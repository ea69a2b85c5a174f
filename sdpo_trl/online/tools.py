"""Tools for a working folder: read, write, exact edit, line edit, glob, grep, and a shell that needs a yes.

Knows: what each tool promises, and what it would do before it does it. Deliberately does not know: sessions, models,
terminals. Each tool is a function with types and a docstring, as TRL and `get_json_schema` read them.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .paths import WorkspaceError, split_path
from .searching import find_lines, find_paths
from .shell import Shell
from .texts import Change, decoded, encoded, exact_edit, line_edit, numbered, split_lines
from .workspace import MAX_FILE_BYTES, Workspace

MAX_CHARACTERS = 16_000  # of a reply
MAX_LINES = 400
_WIDTH = 500  # characters of a line that are shown


def _tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrong arguments, as a model may write them, become errors with a hint. `_plan_x` goes by the name of `x`."""
    signature, tool = inspect.signature(function), function.__name__.removeprefix("_plan_")
    wanted = {name: value for name, value in signature.parameters.items() if name != "self"}
    usage = f"{tool} takes " + ", ".join(
        f"{name} ({value.annotation.__name__}{'' if value.default is value.empty else ', optional'})"
        for name, value in wanted.items()
    )

    @functools.wraps(function)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise WorkspaceError(f"{tool}: {error}.", f"{usage}.") from None
        for name, value in bound.arguments.items():
            if name != "self" and type(value) is not wanted[name].annotation:
                kind = "null" if value is None else type(value).__name__
                raise WorkspaceError(f"{tool}: `{name}` is of type {kind}.", f"{usage}.")
        return function(*bound.args, **bound.kwargs)

    return checked


class WorkspaceTools:
    """
    The tools of one working folder, and what they would change.

    Args:
        workspace ([`Workspace`] or `str` or `Path`): The folder.
        shell ([`Shell`], *optional*): Without one, there is no shell tool.
    """

    def __init__(self, workspace: Workspace | str | Path, shell: Shell | None = None) -> None:
        self.workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._shell = shell
        self._ahead: dict[tuple[str, ...], str] | None = None  # what the calls looked at so far would leave
        self._shown: list[str] | None = None  # the changes that may be made, `None`: any

    def functions(self) -> list[Callable[..., str]]:
        """The tools, for `tools=` of a session or a trainer."""
        every = [self.read_file, self.write_file, self.edit_file, self.edit_lines, self.glob, self.grep]
        return every if self._shell is None else [*every, self.shell]

    def stop(self) -> None:
        """End the shell command that runs, or that is about to."""
        if self._shell is not None:
            self._shell.stop()

    def ready(self) -> None:
        """Forget a stop that met no command."""
        if self._shell is not None:
            self._shell.ready()

    @contextlib.contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Within, each preview is of a file as the calls that were previewed before would leave it."""
        self._ahead = {}
        try:
            yield
        finally:
            self._ahead = None

    @contextlib.contextmanager
    def only(self, diffs: Sequence[str]) -> Iterator[None]:
        """Within, a file is changed only as one of these diffs says, each once; other calls fail and write nothing."""
        self._shown = list(diffs)
        try:
            yield
        finally:
            self._shown = None

    def preview(self, call: dict[str, Any]) -> str | None:
        """
        What a call would change, as a unified diff, without doing it.

        Args:
            call (`dict`): `{"name": ..., "arguments": {...}}`.

        Returns:
            The diff; empty if the file would stay as it is; `None` for a tool that writes no file itself.

        Raises:
            [`WorkspaceError`]: the call would fail with this error.
        """
        plans = (self._plan_write_file, self._plan_edit_file, self._plan_edit_lines, self._plan_shell)
        plan = {plan.__name__.removeprefix("_plan_"): plan for plan in plans}.get(call["name"])
        if plan is None:
            return None
        arguments = call["arguments"]
        if not isinstance(arguments, dict) or not all(isinstance(name, str) for name in arguments):
            raise WorkspaceError(f"The arguments of {call['name']} are no object.", "give a JSON object.")
        change = plan(**arguments)
        if change is None:
            return None
        if self._ahead is not None:
            self._ahead[tuple(split_path(change.path))] = change.after
        return change.diff()

    @_tool
    def read_file(self, path: str, first: int = 1, lines: int = 200) -> str:
        """
        Read a text file with line numbers.

        Args:
            path: The file, relative to the working folder.
            first: The first line to read, from 1.
            lines: How many lines to read, at most 400.

        Returns:
            The lines, each as `number| text`.
        """
        if first < 1 or not 1 <= lines <= MAX_LINES:
            raise WorkspaceError(f"`first` is {first} and `lines` {lines}.", f"from 1, and 1 to {MAX_LINES} lines.")
        data = self.workspace.read(path)
        if b"\0" in data[:8192]:
            raise WorkspaceError(f"`{path}` is a binary file of {len(data)} bytes.", "only text can be read.")
        try:
            text, note = data.decode(), ""
        except UnicodeDecodeError:
            text = data.decode("utf-8", "backslashreplace")
            note = "\n[not in UTF-8: other bytes are shown as \\xNN; this file cannot be edited here]"
        total = text.count("\n") + (not text.endswith("\n"))
        if not text:
            return "(the file is empty)"
        if first > total:
            raise WorkspaceError(f"`{path}` has {total} lines, none from {first} on.", f"use `first` of 1 to {total}.")
        return numbered(text, first, lines, MAX_CHARACTERS, _WIDTH) + note

    @_tool
    def write_file(self, path: str, text: str) -> str:
        """
        Make a file, or replace all of one.

        Args:
            path: The file, relative to the working folder; missing folders are made.
            text: All of its content.

        Returns:
            What was done.
        """
        return self._do(self._plan_write_file(path=path, text=text))

    @_tool
    def edit_file(self, path: str, old: str, new: str) -> str:
        """
        Replace a piece of text that stands in a file exactly once.

        Args:
            path: The file, relative to the working folder.
            old: The exact text to replace, without line numbers.
            new: The text to put there.

        Returns:
            What was done.
        """
        return self._do(self._plan_edit_file(path=path, old=old, new=new))

    @_tool
    def edit_lines(self, path: str, first: int, last: int, text: str) -> str:
        """
        Replace whole lines of a file.

        Args:
            path: The file, relative to the working folder.
            first: The first line to replace, from 1.
            last: The last line to replace; first - 1 inserts before first and replaces nothing.
            text: The new lines; empty to delete.

        Returns:
            What was done.
        """
        return self._do(self._plan_edit_lines(path=path, first=first, last=last, text=text))

    @_tool
    def glob(self, pattern: str) -> str:
        """
        List files and folders by pattern.

        Args:
            pattern: Relative to the working folder, such as *.py or **/*.md.

        Returns:
            The paths, one a line; folders end in a slash.
        """
        return find_paths(self.workspace, pattern)

    @_tool
    def grep(self, pattern: str, files: str = "**") -> str:
        """
        Find the lines of text files that match a regular expression.

        Args:
            pattern: A Python regular expression.
            files: Which files to search, such as **/*.py.

        Returns:
            The lines, each as `path:number: text`.
        """
        return find_lines(self.workspace, pattern, files)

    @_tool
    def shell(self, command: str, seconds: int = 60) -> str:
        """
        Run a shell command in the working folder, after a person has approved it. There is no network.

        Args:
            command: The command line.
            seconds: The time it may take, at most 600.

        Returns:
            What it wrote.
        """
        self._plan_shell(command=command, seconds=seconds)
        return self._shell.run(command, seconds, MAX_CHARACTERS)

    @_tool
    def _plan_shell(self, command: str, seconds: int = 60) -> None:
        if self._shell is None:
            raise WorkspaceError("There is no shell here.", "use the other tools.")
        if not 1 <= seconds <= 600:
            raise WorkspaceError(f"`seconds` is {seconds}.", "give 1 to 600.")
        self._shell.check(command)

    @_tool
    def _plan_write_file(self, path: str, text: str) -> Change:
        data, before, said = self._small(text), None, "Made"
        ahead = self._left(path)
        if ahead is not None:
            said, before = "Replaced all of", ahead
        elif self.workspace.exists(path):
            said = "Replaced all of"
            # It may be replaced whatever it holds; what is no text is shown as well as can be.
            before = self.workspace.read(path).decode("utf-8", "backslashreplace")
        return Change(path, before, text, f"{said} {path}: {len(data)} bytes.")

    @_tool
    def _plan_edit_file(self, path: str, old: str, new: str) -> Change:
        encoded(old, "text `old`"), encoded(new, "text `new`")
        before = self._editable(path)
        after, line = exact_edit(before, old, new, path)
        self._small(after)
        return Change(path, before, after, f"Edited {path} at line {line}.")

    @_tool
    def _plan_edit_lines(self, path: str, first: int, last: int, text: str) -> Change:
        encoded(text, "text")
        before = self._editable(path)
        after = line_edit(before, first, last, text, path)
        self._small(after)
        return Change(path, before, after, f"Edited {path}: it has {len(split_lines(after))} lines now.")

    @staticmethod
    def _small(text: str) -> bytes:
        """The bytes of a file, if they are few enough."""
        data = encoded(text, "text")
        if len(data) > MAX_FILE_BYTES:
            raise WorkspaceError(f"That is more than {MAX_FILE_BYTES >> 20} MiB.", "write a smaller file.")
        return data

    def _left(self, path: str) -> str | None:
        """What an earlier call that was looked at would leave there."""
        return None if not self._ahead else self._ahead.get(tuple(split_path(path)))

    def _editable(self, path: str) -> str:
        ahead = self._left(path)
        if ahead is not None:
            return ahead
        text = decoded(self.workspace.read(path), path)
        self.workspace.exists(path)  # an error if it is write-protected
        return text

    def _do(self, change: Change) -> str:
        if self._shown is not None:
            if change.diff() not in self._shown:
                raise WorkspaceError(
                    f"`{change.path}` is not as it was when this change was shown, so nothing was written.",
                    "read the file and call again.",
                )
            self._shown.remove(change.diff())
        self.workspace.write(change.path, encoded(change.after, "file"))
        return change.said


def workspace_tools(
    folder: str | Path, *, approve: Callable[[str], bool] | None = None, unsafe_shell: bool = False
) -> list[Callable[..., str]]:
    """
    Tools confined to a folder, for `OnlineSession(tools=...)` or `GRPOTrainer(tools=...)`.

    Args:
        folder (`str` or `Path`): What they may read and write; nothing else.
        approve (`Callable[[str], bool]`, *optional*): Whether a shell command may run; it is asked each time. Without
            it there is no shell among the tools.
        unsafe_shell (`bool`): Approved commands run without bubblewrap.

    Raises:
        `FileNotFoundError`, `NotADirectoryError`: there is no such folder.
        `ValueError`: `unsafe_shell` without `approve`, or the folder is the root of the file system.
        [`~sdpo_trl.environments.sandbox.SandboxUnavailable`]: a shell is wanted, and bubblewrap is missing.
    """
    if unsafe_shell and approve is None:
        raise ValueError("`unsafe_shell=True` without `approve=` has no effect: without it there is no shell.")
    workspace = Workspace(folder)
    shell = None if approve is None else Shell(workspace, approve, unsafe=unsafe_shell)
    return WorkspaceTools(workspace, shell).functions()
