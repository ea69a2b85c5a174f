"""Running a Python program that nobody has read, and saying how it ended.

Knows: programs, limits, endings. Deliberately does not know: right answers. A [`Sandbox`] is given one input and hands
back output; whoever compares it does so outside, so a program that wants to be judged right must print what is right.

What is left to a program: bugs of the kernel, with which it shares the machine; the processor's time and the memory
bandwidth that its limits allow; and reading `/usr` and the interpreter's library, which hold no secrets.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .confinement import base_python, command, system_call_filter
from .program import Limits, Program, Run, Status
from .supervision import Ending, Supervisor, Watched

_READY = b"\x06"  # written by child.py before the program starts
_CHILD = Path(__file__).with_name("child.py").read_text(encoding="utf-8")
_STATUS_OF_ENDING: dict[Ending, Status] = {
    "wall": "time",
    "cpu": "time",
    "output": "output",
    "files": "files",
    "stop": "stopped",
}
INSTALL = "Install it: `apt-get install bubblewrap` (Debian, Ubuntu) or `dnf install bubblewrap` (Fedora)."


class SandboxUnavailable(RuntimeError):
    """No sandbox can be built on this machine; the message says what to do."""


class SandboxError(RuntimeError):
    """The sandbox failed before the program started; this says nothing about the program."""


@dataclass(frozen=True)
class Sandbox:
    """
    Runs programs under bubblewrap: no network, no home, a read-only system, a private temporary folder, an empty
    environment, namespaces of its own, a system-call filter and [`Limits`].

    Args:
        limits ([`Limits`]): For every run.
        python (`str`, *optional*): Interpreter; by default that of this process without its virtual environment.
        read_only (`Sequence[str]`): Folders of the host to show, put on the program's module search path; such as one
            into which `pip install --target` put NumPy. As root, everybody must be allowed to read them.
        unsafe (`bool`): Run plain subprocesses with the limits alone: the program sees and may change all that this
            user can. Warns. For machines without bubblewrap and code that you trust.

    Raises:
        [`SandboxUnavailable`]: bubblewrap is missing or cannot work here. A trial run at construction finds out.
    """

    limits: Limits = field(default_factory=Limits)
    python: str = field(default_factory=base_python)
    read_only: Sequence[str] = ()
    unsafe: bool = False

    def __post_init__(self) -> None:
        if self.unsafe:
            warnings.warn(
                "Programs run without a sandbox (`unsafe=True`): they can read, change and send what this user can.",
                stacklevel=3,
            )
        elif shutil.which("bwrap") is None:
            raise SandboxUnavailable(
                f"Programs run under bubblewrap, and there is no `bwrap` on the path. {INSTALL} With code that you "
                "trust, `unsafe=True` runs plain subprocesses."
            )
        try:
            trial = self.run(Program("print(6 * 7)"))
        except (SandboxError, FileNotFoundError) as error:  # the latter: root also needs `setpriv`, of util-linux
            raise SandboxUnavailable(
                f"{error} In a container, unprivileged user namespaces may be switched off (Docker: `--security-opt "
                "seccomp=unconfined --security-opt systempaths=unconfined`; Ubuntu 24.04: an AppArmor profile for "
                f"bwrap). The interpreter was {self.python}."
            ) from error
        if trial.status != "ok" or trial.stdout != "42\n":
            raise SandboxUnavailable(f"A trial program should have printed 42, but it ended as {trial}.")

    def run(self, program: Program, stop: threading.Event | None = None) -> Run:
        """
        Run one program to its end or to a limit. Safe to call from several threads.

        Raises:
            [`SandboxError`]: the sandbox failed three times before the program started.
        """
        data, arguments = self._request(program)
        for attempt in range(3):
            watched = self._unsafe(data, arguments, stop) if self.unsafe else self._confined(data, arguments, stop)
            if watched.out[:1] == _READY or watched.ending == "stop":
                return self._verdict(watched)
            time.sleep(0.2 * attempt)  # the machine may have been short of processes or memory for a moment
        said = watched.err.decode("utf-8", "replace").strip() or f"status {watched.code}, ended by {watched.ending}"
        raise SandboxError(f"The sandbox could not start a program: {said}.")

    def _request(self, program: Program) -> tuple[bytes, list[str]]:
        """Standard input and arguments of child.py."""
        limits = self.limits
        folders = [os.path.realpath(folder) for folder in self.read_only]
        paths = f"import sys; sys.path += {folders!r}\n" if folders else ""
        prelude = (paths + program.prelude).encode("utf-8", "surrogatepass")
        code = program.code.encode("utf-8", "surrogatepass")
        rest = program.stdin if program.function is None else json.dumps(list(program.arguments))
        # The parent applies the limit; the kernel's own is for the case that the parent is gone, and for descendants.
        cpu = 2 + 2 * math.ceil(limits.cpu_seconds)
        # Without a sandbox the kernel counts all tasks of the user, of which there may be many already.
        tasks = 0 if self.unsafe else limits.tasks if limits.processes == 1 else limits.processes
        numbers = [
            len(prelude), len(code), limits.memory_bytes // limits.processes, cpu, limits.disk_bytes,
            limits.files, tasks,
        ]  # fmt: skip
        mode = "script" if program.function is None else "call"
        arguments = [mode, *map(str, numbers), program.function or "-"]
        return prelude + code + rest.encode("utf-8", "surrogatepass"), arguments

    def _confined(self, data: bytes, arguments: list[str], stop: threading.Event | None) -> Watched:
        with contextlib.ExitStack() as opened:

            def keep(descriptor: int) -> int:
                opened.callback(os.close, descriptor)
                return descriptor

            filter_fd = keep(os.memfd_create("seccomp"))
            os.write(filter_fd, system_call_filter(forks=self.limits.processes > 1))
            os.lseek(filter_fd, 0, os.SEEK_SET)
            read_info, write_info = os.pipe()
            keep(read_info)
            try:
                bwrap = shutil.which("bwrap") or "bwrap"
                line = command(bwrap, self.python, self.limits.disk_bytes, self.read_only, filter_fd, write_info)
                line += ["-S", "-s", "-c", _CHILD, *arguments]
                process = _start(line, "/", "/tmp", (filter_fd, write_info))
            finally:
                os.close(write_info)
            return self._supervisor(self.limits.inodes, stop).run(process, data, read_info)

    def _unsafe(self, data: bytes, arguments: list[str], stop: threading.Event | None) -> Watched:
        with tempfile.TemporaryDirectory(prefix="sdpo-unsafe-", ignore_cleanup_errors=True) as folder:
            process = _start([self.python, "-S", "-s", "-c", _CHILD, *arguments], folder, folder, ())
            return self._supervisor(None, stop).run(process, data)

    def _supervisor(self, inodes: int | None, stop: threading.Event | None) -> Supervisor:
        limits = self.limits
        return Supervisor(limits.wall_seconds, limits.cpu_seconds, limits.output_bytes, inodes, stop)

    def _verdict(self, watched: Watched) -> Run:
        error = watched.err.decode("utf-8", "replace")
        killed = watched.code in (-signal.SIGKILL, 128 + signal.SIGKILL)
        status: Status
        if watched.ending != "exit":
            status = _STATUS_OF_ENDING[watched.ending]
        elif watched.cpu_seconds >= self.limits.cpu_seconds:
            status = "time"
        elif killed or error.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            status = "memory"  # the kernel's killer for want of memory, or an allocation beyond the limit
        else:
            status = "error" if watched.code else "ok"
        output = bytes(watched.out[len(_READY) :]).decode("utf-8", "replace")
        return Run(status, watched.code, output, error, watched.seconds, watched.cpu_seconds)


def _start(line: list[str], folder: str, home: str, keep: tuple[int, ...]) -> subprocess.Popen:
    # No `preexec_fn` and no `user`: with either, Python forks instead of calling vfork, which copies the page tables
    # of a trainer that holds a model, and is unsafe among threads.
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8", "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2",
    }  # fmt: skip
    pipe = subprocess.PIPE
    return subprocess.Popen(
        line, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, cwd=folder, env=environment, pass_fds=keep,
        start_new_session=True,
    )  # fmt: skip
