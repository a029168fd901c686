"""Every effect on files that this package has. Nothing else opens, syncs, renames, locks or deletes.

A fault-injecting file system for tests subclasses `FileSystem`. Each OSError leaves here as a StoreError that names the
path. Directories are made 0700 and files 0600 whatever the umask: token ids and salts are user data.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sglang_persist.errors import StoreBusy, from_os_error

DIR_MODE, FILE_MODE = 0o700, 0o600


@contextlib.contextmanager
def _place(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise from_os_error(error, path) from error


@dataclass(frozen=True)
class Entry:
    name: str
    is_dir: bool
    bytes: int


class Rights(NamedTuple):
    """Who may do what with a directory: its owner, its mode, and whether it is a link."""

    owner: int
    mode: int
    is_dir: bool

    @property
    def ours(self) -> bool:
        """A directory of this user's in which nobody else may change anything."""
        return self.is_dir and self.owner == os.geteuid() and not self.mode & (stat.S_IWGRP | stat.S_IWOTH)

    @property
    def shared(self) -> bool:
        """A directory that others use as well: of another user, open to others, or of a group (setgid)."""
        return not self.ours or bool(self.mode & stat.S_ISGID)


@dataclass(frozen=True)
class Stat:
    """What tells one content of a file from another without reading it; times in nanoseconds."""

    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int


class ReadFile:
    """A file open for reading at any place, from any thread."""

    def __init__(self, path: Path):
        self.path = path
        with _place(path):
            # Without O_NONBLOCK a named pipe would hold up whoever opens it, for ever.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                self.close()
                raise OSError(errno.EINVAL, "not a regular file")
        self.bytes = found.st_size

    def expect_order(self) -> None:
        """It will be read from its beginning to its end, more or less: the kernel may be further ahead of us."""
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, or fewer where the file ends."""
        out = np.empty(size, np.uint8)
        return out[: self.read_into(offset, out)].tobytes()

    def read_into(self, offset: int, out: np.ndarray) -> int:
        """Fill `out` (uint8, contiguous) from `offset`: how many bytes there were, fewer where the file ends."""
        view, got = memoryview(out), 0
        with _place(self.path):
            while got < len(view):
                count = os.preadv(self._fd, [view[got : got + (1 << 30)]], offset + got)
                if not count:
                    break
                got += count
        return got

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> ReadFile:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class NewFile:
    """A file that did not exist before, open for appending."""

    def __init__(self, path: Path):
        self.path, self.bytes = path, 0
        with _place(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(path, flags, FILE_MODE)
            os.fchmod(self._fd, FILE_MODE)

    def write(self, data) -> None:
        view = memoryview(data).cast("B")
        with _place(self.path):
            while len(view):
                written = os.write(self._fd, view)
                self.bytes += written
                view = view[written:]

    def sync(self) -> None:
        with _place(self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with _place(self.path):
                os.close(fd)


class Lock:
    """An exclusive advisory lock on an empty file; the kernel drops it when the process is gone, however it went.

    `release` removes the file. Whoever locks a file that was removed meanwhile holds nothing, so it tries again.
    """

    def __init__(self, path: Path):
        self._path = path
        while True:
            with _place(path):
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(PermissionError):  # another user's, and open to us
                    os.fchmod(self._fd, FILE_MODE)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(self._fd), os.stat(path)):
                        return
                os.close(self._fd)
            except OSError as error:
                os.close(self._fd)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise StoreBusy(f"{path}: another process writes here") from None
                raise from_os_error(error, path) from error

    def held(self) -> bool:
        """Whether its name still leads to it: the directory may have been deleted underneath."""
        with contextlib.suppress(OSError):
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        return False

    def release(self, remove: bool = True) -> None:
        """Let go of it. The file goes as well, unless its being there says something or it is another's by now."""
        if self._fd >= 0:
            if remove and self.held():
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1


class FileSystem:
    """The real one."""

    def make_dir(self, path: Path) -> None:
        """`path` and its missing parents, each 0700 and each name durable before the next is made."""
        missing = []
        at = path
        while not self.exists(at):
            missing.append(at)
            at = at.parent
        for directory in reversed(missing):
            with _place(directory):
                try:
                    os.mkdir(directory, DIR_MODE)
                    os.chmod(directory, DIR_MODE)
                except FileExistsError:
                    continue
            self.sync_dir(directory.parent)
        with _place(path):
            os.listdir(path)

    def writable(self, path: Path) -> None:
        """Raises StoreUnavailable unless files can be made in this directory."""
        with _place(path):
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def list(self, path: Path) -> list[Entry]:
        """What lies in a directory, by name; nothing where it does not exist. Links are never followed."""
        entries = []
        try:
            with os.scandir(path) as scan:
                for entry in scan:
                    with contextlib.suppress(FileNotFoundError):  # gone since: another process retires it
                        size = entry.stat(follow_symlinks=False).st_size
                        entries.append(Entry(entry.name, entry.is_dir(follow_symlinks=False), size))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise from_os_error(error, path) from error
        return sorted(entries, key=lambda e: e.name)

    def exists(self, path: Path) -> bool:
        """Whether this name is there; a link is, whatever it points to."""
        with _place(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)
            return True
        return False

    def rights(self, path: Path, follow: bool = True) -> Rights | None:
        """None where nothing is there."""
        with _place(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(path, follow_symlinks=follow)
            return Rights(found.st_uid, stat.S_IMODE(found.st_mode), stat.S_ISDIR(found.st_mode))
        return None

    def stat(self, path: Path) -> Stat:
        """Of the file itself, never of what a link points to. Raises StoreUnavailable where it is not there."""
        with _place(path):
            found = os.lstat(path)
        return Stat(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def open(self, path: Path) -> ReadFile:
        return ReadFile(path)

    def create(self, path: Path) -> NewFile:
        return NewFile(path)

    def rename(self, source: Path, target: Path) -> None:
        with _place(target):
            os.rename(source, target)

    def write_whole(self, temporary: Path, target: Path, data: bytes) -> None:
        """A file that is there under its name whole and durable, or not at all."""
        file = self.create(temporary)
        try:
            file.write(data)
            file.sync()
            file.close()
            self.rename(temporary, target)
        except BaseException:
            file.close()
            self.remove(temporary)
            raise
        self.sync_dir(target.parent)

    def remove(self, path: Path) -> None:
        """Deletes a file; one that is gone already is no error."""
        with _place(path), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def sync_dir(self, path: Path) -> None:
        with _place(path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def lock(self, path: Path) -> Lock:
        """Raises StoreBusy when another process holds it."""
        return Lock(path)

    def space(self, path: Path) -> tuple[int, int]:
        """(bytes that are free for us, bytes in all) of the file system that holds `path`."""
        with _place(path):
            found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


REAL = FileSystem()
