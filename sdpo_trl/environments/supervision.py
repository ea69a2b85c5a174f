"""Feeding, watching and ending one child process.

Knows: pipes, deadlines, signals, `/proc`. Deliberately does not know: sandboxes' walls, programs, verdicts on answers.
"""

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Literal

POLL_SECONDS = 0.05  # how often the watch looks, and how late a deadline or a stop may be noticed
Ending = Literal["exit", "wall", "cpu", "output", "files", "stop"]


@dataclass
class Watched:
    """
    How a child process ended.

    Args:
        ending (`str`): `exit` by itself; else what the parent killed it for.
        code (`int`): Exit status; negative: the signal.
        out, err (`bytearray`): What it wrote.
        seconds (`float`): Wall time.
        cpu_seconds (`float`): User and system time of it and of all its descendants that were waited for.
    """

    ending: Ending = "exit"
    code: int = 0
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    seconds: float = 0.0
    cpu_seconds: float = 0.0


class Supervisor:
    """
    Runs one command to its end, which is at most `wall` seconds away.

    Args:
        wall (`float`): Seconds after which everything is killed.
        cpu (`float`): CPU seconds of the program after which it is killed. The kernel's own limit counts whole ticks,
            so that on a busy machine it comes at anything from half to twice the time.
        output_bytes (`int`): Standard output and error together; more kills.
        inodes (`int`, *optional*): Files that may exist in the child's `/tmp`, a memory file system of its own; more
            kills. A size limits the bytes in such a file system but not the kernel's memory for its names.
        stop (`threading.Event`, *optional*): Set from elsewhere, it kills.
    """

    def __init__(
        self,
        wall: float,
        cpu: float,
        output_bytes: int,
        inodes: int | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.wall = wall
        self.cpu = cpu
        self.output_bytes = output_bytes
        self.inodes = inodes
        self.stop = stop
        self._inner: int | None = None  # process 1 of the sandbox, seen from here

    def run(self, process: subprocess.Popen, data: bytes, info: int | None = None) -> Watched:
        """
        Wait for its first byte, feed it `data`, collect what it writes, and leave nothing behind of it.

        Args:
            process (`subprocess.Popen`): Started with three unbuffered pipes in a session of its own.
            data (`bytes`): Its standard input.
            info (`int`, *optional*): File descriptor from which bubblewrap's JSON on the child can be read.
        """
        watched, start = Watched(), time.monotonic()
        try:
            if info is not None:
                self._inner = _inner_process(info, start + self.wall)
            watched.ending = self._exchange(process, data, watched, start + self.wall)
        finally:
            # Also after an exception, such as an interrupt by the user, nothing may go on running.
            self._kill(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = watched.code = os.waitstatus_to_exitcode(status)
        watched.seconds = time.monotonic() - start
        watched.cpu_seconds = usage.ru_utime + usage.ru_stime
        return watched

    def _exchange(self, process: subprocess.Popen, data: bytes, watched: Watched, deadline: float) -> Ending:
        view, sent = memoryview(data), 0
        with selectors.DefaultSelector() as selector:
            for pipe in (process.stdin, process.stdout, process.stderr):
                os.set_blocking(pipe.fileno(), False)
            exited = os.pidfd_open(process.pid)
            try:
                selector.register(exited, selectors.EVENT_READ, "exit")
                selector.register(process.stdout, selectors.EVENT_READ, watched.out)
                selector.register(process.stderr, selectors.EVENT_READ, watched.err)
                next_look, fed = time.monotonic() + POLL_SECONDS, False
                while True:
                    if watched.out and not fed:
                        fed = True
                        selector.register(process.stdin, selectors.EVENT_WRITE, "in")
                    now = time.monotonic()
                    if now >= deadline:
                        return "wall"
                    if self.stop is not None and self.stop.is_set():
                        return "stop"
                    if now >= next_look:
                        next_look = now + POLL_SECONDS
                        if self._too_many_files():
                            return "files"
                        if _cpu_seconds(self._inner or process.pid) >= self.cpu:
                            return "cpu"
                    ready = selector.select(min(POLL_SECONDS, deadline - now))
                    for key, _ in ready:
                        if key.data == "in":
                            sent = _write(selector, process, view, sent)
                        elif isinstance(key.data, bytearray):
                            _read(selector, key)
                    if len(watched.out) + len(watched.err) > self.output_bytes:
                        return "output"
                    # Its pipes may stay open in a process that it left behind, and it may close them and go on.
                    if any(key.data == "exit" for key, _ in ready):
                        self._drain(process, watched)
                        return "output" if len(watched.out) + len(watched.err) > self.output_bytes else "exit"
            finally:
                os.close(exited)

    def _drain(self, process: subprocess.Popen, watched: Watched) -> None:
        """What still lies in the pipes after the exit."""
        for pipe, kept in ((process.stdout, watched.out), (process.stderr, watched.err)):
            while len(kept) <= self.output_bytes:
                try:
                    part = os.read(pipe.fileno(), 1 << 16)
                except BlockingIOError:
                    break
                if not part:
                    break
                kept += part

    def _too_many_files(self) -> bool:
        if self.inodes is None or self._inner is None:
            return False
        try:
            state = os.statvfs(f"/proc/{self._inner}/root/tmp")
        except (FileNotFoundError, ProcessLookupError):
            return False  # it has just ended
        return state.f_files - state.f_ffree > self.inodes

    def _kill(self, process: subprocess.Popen) -> None:
        """
        Process 1 of the sandbox first: the kernel then ends all of its namespace, and bubblewrap reaps it. Killing
        bubblewrap itself would leave a process for the host's init to reap, which containers often lack.
        """
        if self._inner is not None:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(self._inner)
                try:
                    # The number may have been given to another process; a child of bubblewrap it is until reaped.
                    if _parent(self._inner) == process.pid:
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    return
                time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _inner_process(info: int, deadline: float) -> int | None:
    """The process id in bubblewrap's `{"child-pid": N, ...}`; `None` if it ended before it could start one."""
    text = b""
    while not text.rstrip().endswith(b"}"):
        if not select.select([info], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        part = os.read(info, 4096)
        if not part:
            return None
        text += part
    return json.loads(text)["child-pid"]


def _state(pid: int) -> list[bytes]:
    """The fields of `/proc/PID/stat` from the third on (see proc(5)); empty if there is no such process any more."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _parent(pid: int) -> int | None:
    state = _state(pid)
    return int(state[1]) if state else None


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process, its threads, and the children that it has waited for."""
    return sum(map(int, _state(pid)[11:15])) / os.sysconf("SC_CLK_TCK")


def _write(selector: selectors.BaseSelector, process: subprocess.Popen, view: memoryview, sent: int) -> int:
    try:
        sent += os.write(process.stdin.fileno(), view[sent : sent + (1 << 16)]) if sent < len(view) else 0
    except BrokenPipeError:
        sent = len(view)  # a program need not read its input
    except BlockingIOError:
        return sent
    if sent == len(view):
        selector.unregister(process.stdin)
        process.stdin.close()
    return sent


def _read(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    part = os.read(key.fd, 1 << 16)
    if part:
        key.data.extend(part)
    else:
        selector.unregister(key.fileobj)
