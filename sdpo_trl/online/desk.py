"""A session, its working folder, and the rule between them: what runs is what was looked at.

Knows: sessions, tools, previews. Deliberately does not know: terminals, keys, script files.
"""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .paths import WorkspaceError
from .records import Call, Observation, Reply, SessionError
from .shell import Approval, Shell
from .tools import WorkspaceTools
from .workspace import Workspace


@dataclass(frozen=True)
class Look:
    """
    What a call would do.

    Args:
        call ([`Call`]): The call.
        diff (`str`, *optional*): What it would change in a file; `None`: it writes no file itself.
        problem (`str`, *optional*): The error that it would end in.
    """

    call: Call
    diff: str | None = None
    problem: str | None = None


class Changed(SessionError):
    """What a call would do is no longer what was looked at."""


class Desk:
    """
    Runs a session's calls only as they were looked at.

    Args:
        folder (`str` or `Path`, *optional*): The working folder; `None`: no tools.
        shell (`str`): `sandbox`, `unsafe` (no bubblewrap) or `none`.
        closed (`Sequence[str]`): Paths in the folder that tools may not look into.

    Raises:
        [`~sdpo_trl.environments.sandbox.SandboxUnavailable`]: a shell is wanted, and there is no bubblewrap.
    """

    def __init__(self, folder: str | Path | None, shell: str = "sandbox", closed: Sequence[str] = ()) -> None:
        self._approval = Approval()
        self.tools: WorkspaceTools | None = None
        self.session: Any = None
        if folder is not None:
            workspace = Workspace(folder, closed)
            runs = None if shell == "none" else Shell(workspace, self._approval, unsafe=shell == "unsafe")
            self.tools = WorkspaceTools(workspace, runs)

    def functions(self) -> list[Any]:
        """The tools for the session."""
        return [] if self.tools is None else self.tools.functions()

    def look(self, call: Call) -> Look:
        """What a call would do now; nothing happens."""
        known = {tool.__name__ for tool in self.functions()} | set(self.session.tools)
        if call.name not in known:
            return Look(call, problem=f"there is no tool {call.name!r}")
        if self.tools is None:
            return Look(call)
        try:
            return Look(call, self.tools.preview({"name": call.name, "arguments": call.arguments}))
        except WorkspaceError as error:
            return Look(call, problem=str(error))

    def looks(self, calls: Sequence[Call]) -> list[Look]:
        """What several calls would do, one after the other."""
        with contextlib.nullcontext() if self.tools is None else self.tools.looking_ahead():
            return [self.look(call) for call in calls]

    def approve(self, seen: Sequence[Look]) -> list[Observation]:
        """
        Accept the pending reply, and run its calls.

        Args:
            seen (`Sequence[Look]`): What was looked at before the yes.

        Raises:
            [`Changed`]: a file has changed meanwhile, so that a call would do something else; nothing ran.
            [`SessionError`]: nothing is pending.
        """
        pending: Reply | None = self.session.pending
        self._check(seen, () if pending is None else pending.calls)
        with self._granting(seen):
            return self.session.approve()

    def approve_edited(self, seen: Sequence[Look] | str) -> list[Observation]:
        """
        Put other calls, or another text, in the place of the pending reply, and run them. The reply counts as denied.

        Raises:
            as [`Desk.approve`].
        """
        if isinstance(seen, str):
            return self.session.approve_edited(seen)
        calls = [look.call for look in seen]
        self._check(seen, calls)
        with self._granting(seen):
            return self.session.approve_edited(calls[0] if len(calls) == 1 else calls)

    def stop(self) -> None:
        """End the shell command that runs, or that is about to."""
        if self.tools is not None:
            self.tools.stop()

    def _check(self, seen: Sequence[Look], calls: Sequence[Call]) -> None:
        if self.tools is not None:
            self.tools.ready()
        if list(seen) != self.looks(calls):
            raise Changed("The folder has changed since the call was shown; look at it again. Nothing ran.")

    @contextlib.contextmanager
    def _granting(self, seen: Sequence[Look]) -> Iterator[None]:
        """Within, the commands and the changes that were looked at can be made, and no others: an earlier call of the
        same reply may have changed what a later one meets."""
        runs = [look.call.arguments["command"] for look in seen if look.call.name == "shell" and look.problem is None]
        diffs = [look.diff for look in seen if look.diff is not None]
        with contextlib.ExitStack() as granted:
            if self.tools is not None:
                granted.enter_context(self.tools.only(diffs))
            granted.enter_context(self._approval.granting(*runs))
            yield


def shell_kind(wanted: str) -> tuple[str, str | None]:
    """`sandbox` only where bubblewrap is; else `none`, and why."""
    if wanted == "sandbox" and shutil.which("bwrap") is None:
        return "none", "there is no shell tool: it needs bubblewrap (`apt-get install bubblewrap`), or --shell unsafe"
    return wanted, None
