"""A folder, and nothing outside it: how tools open, write and list files.

Knows: file descriptors, names, kinds of files. Deliberately does not know: tools, diffs, models. Every name is opened
relative to the folder above it, and no symbolic link is followed, so that nothing that another process swaps between a
check and its use leads outside. Needs the `*at` system calls (Linux, macOS).
"""

import contextlib
import difflib
import errno
import os
import secrets
import stat
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .paths import MAX_DEPTH, WorkspaceError, shown, split_path

MAX_FILE_BYTES = 8 << 20  # what a tool reads or writes at most
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = [
    (stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
]  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """
    Something in the folder.

    Args:
        path (`str`): Relative, with `/`. Bytes that are no UTF-8 stand as `\\xNN`.
        kind (`str`): `file`, or what else it is.
        size (`int`): Bytes.
    """

    path: str
    kind: str
    size: int


def kind_of(mode: int) -> str:
    """`file`, or what else a mode says."""
    return "file" if stat.S_ISREG(mode) else next((name for test, name in _KINDS if test(mode)), "a special file")


class Workspace:
    """
    The working folder of a session.

    Args:
        folder (`str` or `Path`): An existing folder, not the root of the file system. It is opened once: if it is
            moved, the same folder goes on being used.
        closed (`Sequence[str]`): Paths in it that nobody may look into, such as where the session keeps its own files.

    Raises:
        `NotADirectoryError`, `FileNotFoundError`: it is no folder.
        `ValueError`: it is the root of the file system.
        `NotImplementedError`: the system cannot open a name relative to an open folder.
    """

    def __init__(self, folder: str | Path, closed: Sequence[str] = ()) -> None:
        if os.open not in os.supports_dir_fd or os.stat not in os.supports_follow_symlinks:
            raise NotImplementedError("A working folder needs a system with `openat` (Linux, macOS).")
        self.path = Path(folder).resolve(strict=True)
        if self.path == Path(self.path.anchor):
            raise ValueError("The whole file system cannot be a working folder. Give a folder in it.")
        self.closed = [split_path(path) for path in closed]
        self._root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._root)

    def require_in_place(self) -> None:
        """
        For what goes by the folder's path and not by its descriptor.

        Raises:
            [`WorkspaceError`]: another folder, or none, is at its path now.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._root)):
                return
        raise WorkspaceError(
            f"The working folder is not at {self.path} any more.", "use the other tools, or ask the user."
        )

    def read(self, path: str) -> bytes:
        """
        The content of a regular file of at most 8 MiB.

        Raises:
            [`WorkspaceError`]: with a hint.
        """
        with self._parent(path) as (folder, name), self.open_file(folder, name, path) as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise WorkspaceError(
                f"`{path}` has more than {MAX_FILE_BYTES >> 20} MiB.", "look for the part you need with `grep`."
            )
        return data

    def exists(self, path: str) -> bool:
        """
        Whether there is a regular file that could be written over.

        Raises:
            [`WorkspaceError`]: there is something else, or the file is write-protected.
        """
        parts = self._file_parts(path)
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(self._open_folder(parts[:-1], path, create=False))
            except WorkspaceError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    return False
                raise
            return self._writable(folder, parts[-1], path) is not None

    def write(self, path: str, data: bytes) -> None:
        """
        Put a file in place whole; folders that are missing are made. Whatever happens, the old content or the new one
        is there. A file with several names is separated from them.

        Raises:
            [`WorkspaceError`]: with a hint.
        """
        parts = self._file_parts(path)
        if any(part.lower() == ".git" for part in parts):
            raise WorkspaceError(f"`{path}` is of git's own.", "leave `.git` alone; ask the user.")
        with self._open_folder(parts[:-1], path, create=True) as folder, _explained(path):
            old = self._writable(folder, parts[-1], path)
            temporary = f".{secrets.token_hex(8)}.tmp"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o666, dir_fd=folder)
            try:
                with os.fdopen(descriptor, "wb") as stream:
                    stream.write(data)
                    if old is not None:
                        new = os.fstat(stream.fileno())
                        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                            os.fchown(stream.fileno(), old.st_uid, old.st_gid)
                        os.fchmod(stream.fileno(), old.st_mode & 0o777)
                os.replace(temporary, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def walk(self, hidden: bool = False) -> Iterator[tuple[Entry, int, str]]:
        """
        All that lies in the folder, in order, without following a link: the entry, the open folder it lies in and its
        name there. The folder is open only until the next entry is asked for.

        Args:
            hidden (`bool`): Also what begins with a dot.
        """
        for top, folders, files, descriptor in os.fwalk(".", follow_symlinks=False, dir_fd=self._root):
            above = [part for part in top.split("/") if part != "."]
            folders[:] = sorted(
                name for name in folders if (hidden or name[0] != ".") and [*above, name] not in self.closed
            )
            for name in sorted([*folders, *files]):
                if not hidden and name.startswith("."):
                    continue
                try:
                    found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                except FileNotFoundError:
                    continue  # it went away meanwhile
                path = shown(os.path.normpath(os.path.join(top, name)))
                yield Entry(path, kind_of(found.st_mode), found.st_size), descriptor, name
            if top.count("/") >= MAX_DEPTH:
                folders.clear()

    @staticmethod
    def open_file(folder: int, name: str, path: str):
        """
        A regular file for reading in bytes: never a link, and never a pipe or a device, which could block or act.

        Args:
            folder (`int`): Descriptor of the folder it lies in.
            name (`str`): Its name there.
            path (`str`): How an error calls it.
        """
        with _explained(path):
            try:
                _refuse_unless_file(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode, path, folder, name)
            except FileNotFoundError as error:
                raise _missing(path, folder, name) from error
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=folder)
            try:
                _refuse_unless_file(os.fstat(descriptor).st_mode, path, folder, name)  # it may be another one by now
            except BaseException:
                os.close(descriptor)
                raise
            return os.fdopen(descriptor, "rb")

    def _file_parts(self, path: str) -> list[str]:
        parts = split_path(path)
        if not parts or path.endswith("/"):
            raise WorkspaceError(f"`{path}` names a folder.", "name a file in it; `glob` lists them.")
        if any(parts[: len(closed)] == closed for closed in self.closed):
            raise WorkspaceError(f"`{path}` is of the session's own files.", "leave them alone.")
        return parts

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        parts = self._file_parts(path)
        with self._open_folder(parts[:-1], path, create=False) as folder:
            yield folder, parts[-1]

    @contextlib.contextmanager
    def _open_folder(self, parts: list[str], path: str, create: bool) -> Iterator[int]:
        """A descriptor of a folder below the root, each step relative to the one before."""
        current = os.dup(self._root)
        try:
            for name in parts:
                with _explained(path):
                    if create:
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(name, dir_fd=current)
                    try:
                        following = os.open(name, _FOLDER, dir_fd=current)
                    except FileNotFoundError as error:
                        raise _missing(path, current, name) from error
                    except NotADirectoryError as error:  # also a link, although `O_NOFOLLOW` alone says ELOOP
                        mode = os.stat(name, dir_fd=current, follow_symlinks=False).st_mode
                        raise _not_a_folder(mode, path, name) from error
                os.close(current)
                current = following
            yield current
        finally:
            os.close(current)

    @staticmethod
    def _writable(folder: int, name: str, path: str) -> os.stat_result | None:
        """The state of the file that would be replaced, `None` if there is none."""
        with _explained(path):
            try:
                old = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                return None
        _refuse_unless_file(old.st_mode, path, folder, name)
        if not old.st_mode & 0o222:
            raise WorkspaceError(f"`{path}` is write-protected.", "leave it as it is, or ask the user.")
        return old


def _not_a_folder(mode: int, path: str, name: str) -> WorkspaceError:
    if stat.S_ISLNK(mode):
        return WorkspaceError(
            f"`{name}` in `{path}` is a symbolic link, and links are not followed.",
            "name the real folder, if it lies in the working folder; `glob` lists what does.",
        )
    return WorkspaceError(f"`{name}` in `{path}` is {kind_of(mode)}, no folder.", "`glob` lists what there is.")


def _refuse_unless_file(mode: int, path: str, folder: int, name: str) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISLNK(mode):
        hint = "name the file itself, if it lies in the working folder; `glob` lists what does."
        raise WorkspaceError(f"`{path}` is a symbolic link, and links are not followed.", hint)
    if stat.S_ISDIR(mode):
        raise WorkspaceError(f"`{path}` is a folder.", "name a file in it; `glob` lists them.")
    raise WorkspaceError(f"`{path}` is {kind_of(mode)}, no file.", "only regular files are read and written.")


def _missing(path: str, folder: int, name: str) -> WorkspaceError:
    """There is no such name; the likeliest other one is the hint."""
    near = difflib.get_close_matches(name, [shown(other) for other in os.listdir(folder)[:2000]], 1)
    hint = f"did you mean `{near[0]}`?" if near else "`glob` lists what there is."
    return WorkspaceError(f"There is no `{name}`." if name == path else f"There is no `{name}` for `{path}`.", hint)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """What the system refuses becomes an error with a hint."""
    hints = {
        errno.ELOOP: "links are not followed; name the file itself.",
        errno.EACCES: "this user may not do that; ask the user.",
        errno.EPERM: "this user may not do that; ask the user.",
        errno.EROFS: "nothing can be written there; ask the user.",
        errno.ENOSPC: "the disk is full; ask the user.",
        errno.EDQUOT: "the disk is full; ask the user.",
        errno.ENAMETOOLONG: "use a shorter name.",
        errno.EMFILE: "too many files are open; try again.",
    }
    try:
        yield
    except OSError as error:
        hint = hints.get(error.errno, "look at the folder with `glob` and try again.")
        raise WorkspaceError(f"`{path}`: {error.strerror}.", hint) from error
