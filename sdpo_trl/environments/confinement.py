"""The walls of the sandbox: bubblewrap's command line and the system-call filter.

Knows: namespaces, mounts, system calls. Deliberately does not know: programs, limits on time, verdicts. Linux on
x86-64 or AArch64.
"""

import os
import platform
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

# Opcodes of classic BPF (linux/filter.h): load a word, jump if equal / greater-or-equal / any bit set, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # linux/seccomp.h
_EPERM, _EAGAIN, _ENOSYS = 1, 11, 38
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000  # any CLONE_NEW* namespace
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`, little-endian

# What no judged program needs and what would get around a limit or a namespace: memory that RLIMIT_AS does not count
# (memfd, System V, message queues, keys, socket options, which could make a socket's buffer megabytes large), new
# namespaces, other processes' memory, sockets (AF_VSOCK and AF_ALG know no network namespace; `socketpair`, which
# asyncio needs, is another call, allowed for AF_UNIX), and large kernel interfaces.
_DENIED = {  # name: (x86-64, AArch64)
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "fsopen": (430, 430), "fsmount": (432, 432), "open_tree": (428, 428),
    "move_mount": (429, 429), "mount_setattr": (442, 442), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "socket": (41, 198), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "fanotify_init": (300, 262), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "syslog": (103, 116), "quotactl": (179, 60),
    "swapon": (167, 224), "acct": (163, 89), "setsockopt": (54, 208),
}  # fmt: skip
_MACHINES = {"x86_64": (0, 0xC000003E, 56, (57, 58)), "aarch64": (1, 0xC00000B7, 220, ())}  # audit arch, clone, forks
_CLONE3 = 435
_SOCKETPAIR = (53, 199)
_AF_UNIX = 1


def system_call_filter(forks: bool) -> bytes:
    """
    The filter as bubblewrap's `--seccomp` reads it: an array of `struct sock_filter`.

    Denied calls fail with an error that Python turns into an `OSError`; a foreign architecture kills.

    Args:
        forks (`bool`): Whether the program may start processes. Threads it may always start.

    Raises:
        `NotImplementedError`: the machine is neither x86-64 nor AArch64.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        raise NotImplementedError(f"The sandbox's system-call filter knows {' and '.join(_MACHINES)}, not {machine}.")
    column, architecture, clone, fork_calls = _MACHINES[machine]
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 0x40000000),  # the x32 calls, which have other numbers
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]

    def deny(number: int, error: int) -> None:
        lines.extend([(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)])

    for numbers in _DENIED.values():
        deny(numbers[column], _EPERM)
    deny(_CLONE3, _ENOSYS)  # its flags lie in memory, where no filter can look; the C library falls back to clone
    if not forks:
        for number in fork_calls:
            deny(number, _EAGAIN)
    # These come last: after the load of an argument the accumulator no longer holds the call's number.
    lines += [
        (_EQUAL, 0, 4, _SOCKETPAIR[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, _AF_UNIX),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 2, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 1, 0, _CLONE_NEW) if forks else (_ANY_BIT, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EAGAIN),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)


_NOBODY = 65534  # whom root becomes, before bubblewrap: not even a mapped root is in the sandbox
# What root does first, in a mount namespace of its own, to show nobody folders that lie in root's home.
_OPEN_FOLDERS = """
mount -t tmpfs tmpfs /mnt || exit 1
number=0
while [ "$1" != -- ]; do
    mkdir /mnt/$number && mount --bind "$1" /mnt/$number || exit 1
    number=$((number + 1))
    shift
done
shift
exec "$@"
"""


def _closed(folder: str) -> bool:
    """Whether a folder or one above it is closed to other users than its owner."""
    return not all(os.stat(path).st_mode & 0o001 for path in (folder, *Path(folder).parents))


def system_folders() -> list[str]:
    """Bubblewrap's options that show the programs of the host and their libraries, read-only."""
    line = ["--ro-bind", "/usr", "/usr"]
    for folder in ("/bin", "/lib", "/lib64"):
        if os.path.islink(folder):
            line += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            line += ["--ro-bind", folder, folder]
    if os.path.exists("/etc/ld.so.cache"):
        line += ["--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    return line


def command(
    bwrap: str, python: str, disk_bytes: int, read_only: Sequence[str], filter_fd: int, info_fd: int
) -> list[str]:
    """
    The command line up to the interpreter.

    Nothing of the host is visible but `/usr`, the interpreter's own `bin` and `lib`, and `read_only`, all read-only.
    `/tmp` is an empty memory file system of `disk_bytes`, the rest cannot be written to. New user, process, network,
    IPC and UTS namespaces. Process 1 is the program, so all that it started dies with it; it dies with bubblewrap, and
    bubblewrap with the thread that started it.

    Args:
        bwrap (`str`): Path of bubblewrap.
        python (`str`): Path of the interpreter, resolved.
        disk_bytes (`int`): Size of `/tmp`.
        read_only (`Sequence[str]`): Further folders of the host to show.
        filter_fd (`int`): File descriptor with the system-call filter.
        info_fd (`int`): File descriptor to which bubblewrap writes the process id, as JSON.
    """
    # Of the interpreter's prefix only what it needs: `~/.local`, for one, holds more than Python.
    prefix = str(Path(python).parent.parent)
    roots = dict.fromkeys([prefix, *(os.path.realpath(folder) for folder in read_only)])
    roots = [root for root in roots if not Path(root).is_relative_to("/usr")]
    closed = [] if os.geteuid() else [root for root in roots if _closed(root)]

    line = [bwrap, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    line += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1"]
    line += ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", "/tmp", *system_folders()]
    for root in roots:
        source = f"/mnt/{closed.index(root)}" if root in closed else root
        for part in ("/bin", "/lib", "/lib64") if root == prefix else ("",):
            if os.path.isdir(root + part):
                line += ["--ro-bind", source + part, root + part]
    line += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    line += ["--seccomp", str(filter_fd), "--info-fd", str(info_fd), "--", python]
    if os.geteuid():
        return line
    drop = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    line = ["setpriv", *drop, *line]
    return ["unshare", "--mount", "sh", "-ec", _OPEN_FOLDERS, "sh", *closed, "--", *line] if closed else line


def base_python() -> str:
    """The interpreter behind a virtual environment: the sandbox shows the standard library, not what is installed."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
