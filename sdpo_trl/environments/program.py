"""What is run, what it may use, and how it ended: three records.

Knows: nothing but their fields. Deliberately does not know: how a program is run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "error", "time", "memory", "output", "files", "stopped"]


@dataclass(frozen=True)
class Limits:
    """
    What one run may use.

    Memory in total is at most `memory_bytes + disk_bytes`: each of `processes` may map an equal part of `memory_bytes`
    (virtual memory, as the kernel limits no other), files lie in memory, and what else could hold memory is refused.
    (The kernel's buffers of 64 open files come to some megabytes more.)

    Args:
        cpu_seconds (`float`): CPU time of a process, start-up (about 0.02 s) included. LiveCodeBench gives 6 s.
        wall_seconds (`float`): Time after which everything is killed; longer than the CPU time, because other work on
            the machine must not turn a right program into a failure.
        memory_bytes (`int`): See above.
        disk_bytes (`int`): Size of the temporary folder, and of the largest file.
        inodes (`int`): Files and folders in the temporary folder.
        files (`int`): Open files.
        processes (`int`): 1: the program may start threads but no processes. More: so many processes and threads
            together, each process with `memory_bytes // processes`.
        tasks (`int`): Threads, where there is one process. (Linux before 5.14 counts all tasks of the user here.)
        output_bytes (`int`): Standard output and standard error together.
    """

    cpu_seconds: float = 6.0
    wall_seconds: float = 15.0
    memory_bytes: int = 1 << 30
    disk_bytes: int = 16 << 20
    inodes: int = 4096
    files: int = 64
    processes: int = 1
    tasks: int = 64
    output_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"`{name}` must be above 0, got {value!r}.")


@dataclass(frozen=True)
class Program:
    """
    A program and one input.

    Args:
        code (`str`): Python source.
        stdin (`str`): What it reads, if it is a script.
        function (`str`, *optional*): Call this function (or this method of a class `Solution`) instead of running a
            script; its return value must be plain data (JSON).
        arguments (`Sequence`): Of the call; plain data.
        prelude (`str`): Source that runs before, in the same namespace, such as imports that a benchmark grants.
    """

    code: str
    stdin: str = ""
    function: str | None = None
    arguments: Sequence[Any] = ()
    prelude: str = ""


@dataclass(frozen=True)
class Run:
    """
    How a program ended.

    Args:
        status (`str`): `ok` (exit status 0), `error`, or the limit that it met; `stopped` from outside.
        exit_code (`int`): Negative or above 128: a signal.
        stdout (`str`): Of a script, its output; of a call, the JSON document that should be its result. Bytes that are
            no UTF-8 are replaced.
        stderr (`str`): Its traceback, and in a call also what it printed.
        seconds, cpu_seconds (`float`): Wall and CPU time.
    """

    status: Status
    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    cpu_seconds: float
