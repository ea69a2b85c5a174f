"""A shell command in the working folder, under bubblewrap, once somebody has allowed it.

Knows: the command's walls and limits, and that it needs a yes. Deliberately does not know: who gives it, models.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence

from ..environments.confinement import base_python, system_call_filter, system_folders
from ..environments.sandbox import INSTALL, SandboxUnavailable
from ..environments.supervision import Supervisor, Watched
from ..reprompt import cut_middle
from .paths import WorkspaceError
from .workspace import Workspace

_READY = b"\x06"  # written before the command starts: what fails earlier is the sandbox
# `ulimit` counts in KiB and in blocks of 512 bytes; processes have another letter in dash than in bash.
_PRELUDE = """printf '\\006'; exec </dev/null 2>&1
ulimit -c 0; ulimit -v 8388608; ulimit -f 2097152; ulimit -u 512 2>/dev/null || ulimit -p 512
exec "$0" -c "$1"
"""


class Approval:
    """
    A yes for some commands, each once and in order: what [`Shell`] asks where a person has just seen them.

        approval = Approval()
        tools = workspace_tools(folder, approve=approval)
        with approval.granting("make test"):
            ...  # here `shell("make test")` runs, and no other command
    """

    def __init__(self) -> None:
        self._granted: list[str] = []

    @contextlib.contextmanager
    def granting(self, *commands: str) -> Iterator[None]:
        """Within, each of these commands may run once. The first other one that is asked for ends that."""
        self._granted = list(commands)
        try:
            yield
        finally:
            self._granted = []

    def __call__(self, command: str) -> bool:
        if not self._granted or self._granted[0] != command:
            self._granted = []
            return False
        del self._granted[0]
        return True


class Shell:
    """
    Runs commands that were approved, with nothing writable but the working folder and an empty `/tmp`: no network, no
    home, none of the host's environment variables, a read-only system, a system-call filter, limits on time, memory,
    processes and output. Of the host only `/usr`, the interpreter's own prefix and `read_only` can be seen.

    Args:
        workspace ([`Workspace`]): Where it runs.
        approve (`Callable[[str], bool]`): Is asked with the command each time, just before it runs. Anything but
            `True` refuses it.
        unsafe (`bool`): Without bubblewrap: the command may do all that this user can. Warns.
        read_only (`Sequence[str]`): Further folders to show.
        output_bytes (`int`): More output ends the command.

    Raises:
        [`~sdpo_trl.environments.sandbox.SandboxUnavailable`]: bubblewrap is missing or cannot work here.
    """

    def __init__(
        self,
        workspace: Workspace,
        approve: Callable[[str], bool],
        *,
        unsafe: bool = False,
        read_only: Sequence[str] = (),
        output_bytes: int = 1 << 20,
    ) -> None:
        self._workspace = workspace
        self._approve = approve
        self._unsafe = unsafe
        self._read_only = [os.path.realpath(folder) for folder in read_only]
        self._output_bytes = output_bytes
        self._stop = threading.Event()
        if unsafe:
            warnings.warn(
                "Approved commands run without a sandbox (`unsafe=True`): they can do what this user can.",
                stacklevel=2,
            )
            return
        if shutil.which("bwrap") is None:
            raise SandboxUnavailable(f"Commands run under bubblewrap, and there is no `bwrap` on the path. {INSTALL}")
        trial = self._started("echo $((6 * 7))", 10)
        if trial.out != _READY + b"42\n":
            said = (trial.err or trial.out).decode("utf-8", "replace").strip()
            raise SandboxUnavailable(
                f"A trial command failed under bubblewrap: {said}. In a container, unprivileged user namespaces may "
                "be switched off (Docker: `--security-opt seccomp=unconfined --security-opt systempaths=unconfined`)."
            )

    @staticmethod
    def check(command: str) -> None:
        """
        What no shell could be given.

        Raises:
            [`WorkspaceError`]: with a hint.
        """
        if not command.strip() or "\0" in command or len(command) > 30_000:
            raise WorkspaceError("The command is empty, holds a NUL or is too long.", "give one short command line.")
        try:
            command.encode()
        except UnicodeEncodeError as error:
            raise WorkspaceError("The command holds half of a character.", "write whole characters.") from error

    def run(self, command: str, seconds: int, characters: int) -> str:
        """
        Ask, run, and give back what it wrote, standard error included.

        Args:
            command (`str`): For `sh -c`.
            seconds (`int`): Time after which it and all that it started are killed.
            characters (`int`): Of the output; the middle is left out.

        Raises:
            [`WorkspaceError`]: it was not approved, it failed, or it met a limit; with what it wrote.
        """
        self.check(command)
        if self._approve(command) is not True:
            raise WorkspaceError(
                "The command was not approved, and nothing ran.", "a person must see and approve each command first."
            )
        try:
            watched = self._started(command, seconds)
        finally:
            self._stop.clear()
        if watched.out[:1] != _READY and watched.ending != "stop":
            said = bytes(watched.err or watched.out).decode("utf-8", "replace").strip()
            raise WorkspaceError(f"The sandbox could not start the command: {said}", "try again, or ask the user.")
        output = bytes(watched.out[1 : 1 + self._output_bytes]).decode("utf-8", "replace")
        output = cut_middle(output.rstrip("\n"), characters)
        endings = {
            "wall": (f"It was killed after {seconds} seconds.", "give more `seconds`, or a quicker command."),
            "cpu": (f"It was killed after {4 * seconds} seconds of processor time.", "give a quicker command."),
            "stop": ("It was stopped.", "ask the user why."),
            "output": (f"It wrote more than {self._output_bytes} bytes.", "let it write less, say with `| head`."),
        }
        if watched.ending in endings:
            what, hint = endings[watched.ending]
            raise WorkspaceError(f"{output}\n{what}".lstrip(), hint)
        if watched.code:
            raise WorkspaceError(f"{output}\nExit status {watched.code}.".lstrip(), "read what it wrote.")
        return output or "(no output)"

    def stop(self) -> None:
        """End the command that runs, or that is about to; from a signal handler or another thread."""
        self._stop.set()

    def ready(self) -> None:
        """Forget a stop that met no command."""
        self._stop.clear()

    def _started(self, command: str, seconds: float) -> Watched:
        self._workspace.require_in_place()
        supervisor = Supervisor(seconds, 4 * seconds, self._output_bytes, stop=self._stop)
        folder = str(self._workspace.path)
        shell = ["/bin/sh", "-c", _PRELUDE, "/bin/sh", command]
        if self._unsafe:
            with tempfile.TemporaryDirectory(prefix="sdpo-home-", ignore_cleanup_errors=True) as home:
                return supervisor.run(_popen(shell, folder, home, ()), b"")
        with contextlib.ExitStack() as opened:

            def keep(descriptor: int) -> int:
                opened.callback(os.close, descriptor)
                return descriptor

            filter_fd = keep(os.memfd_create("seccomp"))
            os.write(filter_fd, system_call_filter(forks=True))
            os.lseek(filter_fd, 0, os.SEEK_SET)
            read_info, write_info = os.pipe()
            keep(read_info)
            try:
                line = self._command(folder, filter_fd, write_info) + shell
                process = _popen(line, "/", "/tmp", (filter_fd, write_info))
            finally:
                os.close(write_info)
            return supervisor.run(process, b"", read_info)

    def _command(self, folder: str, filter_fd: int, info_fd: int) -> list[str]:
        """Bubblewrap's command line. As root, it keeps none of root's capabilities."""
        line = [shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
        line += ["--unshare-uts", "--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1"]
        line += ["--cap-drop", "ALL", *system_folders(), "--perms", "1777", "--size", str(1 << 30), "--tmpfs", "/tmp"]
        if os.path.isdir("/etc/alternatives"):  # where Debian's /usr/bin points for awk and others
            line += ["--ro-bind", "/etc/alternatives", "/etc/alternatives"]
        prefix = os.path.dirname(os.path.dirname(base_python()))
        shown = [os.path.join(prefix, part) for part in ("bin", "lib")] + self._read_only
        for path in dict.fromkeys(shown):
            if os.path.isdir(path) and not path.startswith("/usr/"):
                line += ["--ro-bind", path, path]
        line += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--bind", folder, folder]
        for closed in self._workspace.closed:
            path = os.path.join(folder, *closed)
            if os.path.isdir(path) and os.path.realpath(path) == path:
                for depth in range(1, len(closed)):  # mounted, so that no command moves it with what is closed in it
                    above = os.path.join(folder, *closed[:depth])
                    line += ["--bind", above, above]
                line += ["--tmpfs", path, "--remount-ro", path]
        line += ["--remount-ro", "/", "--chdir", folder]
        return [*line, "--seccomp", str(filter_fd), "--info-fd", str(info_fd), "--"]


def _popen(line: list[str], folder: str, home: str, keep: tuple[int, ...]) -> subprocess.Popen:
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
    environment |= {"TERM": "dumb", "PAGER": "cat", "PYTHONDONTWRITEBYTECODE": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        line, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, cwd=folder, env=environment, pass_fds=keep,
        start_new_session=True,
    )  # fmt: skip
