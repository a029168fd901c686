"""A file system that fails, stops the world or loses power at a chosen call.

Every call that changes something is counted and named. What a power cut leaves is modelled after POSIX: a file's bytes
are safe once the file was synced, a name (made, moved or removed) once its directory was. The model stands in for the
disk, so nothing is really synced.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sglang_persist.errors import from_os_error
from sglang_persist.fs import FileSystem, Lock, NewFile
from sglang_persist.store.names import is_lock

#: What a power cut makes of names and bytes that were not synced.
ALL_LOST, NAMES_SURVIVE, NAMES_SURVIVE_TORN = "all-lost", "names-survive", "names-survive-torn"
#: Names need not reach the disk in the order of the calls: of each directory only the last change did.
LAST_NAME_SURVIVES = "last-name-survives"
KILLED = "killed"
AFTERMATHS = (ALL_LOST, NAMES_SURVIVE, NAMES_SURVIVE_TORN, LAST_NAME_SURVIVES, KILLED)

#: Calls that need space or a writable disk; deleting works on a full one.
GROWING = ("make_dir", "create", "write", "sync", "rename")


class Crash(Exception):
    """The world has stopped: no later call has an effect, whatever handlers still run."""


class SimFile(NewFile):
    def __init__(self, fs: SimFs, path: Path):
        fs.count("create", path)
        super().__init__(path)
        self.fs, self.serial = fs, fs.born(path)

    def write(self, data) -> None:
        half = len(memoryview(data).cast("B")) // 2
        self.fs.count("write", self.path, lambda: NewFile.write(self, memoryview(data).cast("B")[:half]))
        super().write(data)

    def sync(self) -> None:
        self.fs.count("sync", self.path)
        self.fs.safe_bytes[self.serial] = self.path.read_bytes()

    def close(self) -> None:
        if self._fd < 0:
            return
        try:
            self.fs.count("close", self.path)
        finally:
            super().close()


class SimLock(Lock):
    def __init__(self, fs: SimFs, path: Path):
        self._fs = fs
        super().__init__(path)

    def release(self, remove: bool = True) -> None:
        # After a crash the kernel closes it, nobody removes the file.
        super().release(remove and not self._fs.crashed)


class SimFs(FileSystem):
    """`fail(n, error)` and `crash(n)` choose the call, counted from 0 since the last `arm`."""

    def __init__(self, root: Path):
        self.root = root
        self.calls: list[tuple[str, Path]] = []
        self.crashed = False
        self.safe_names: dict[Path, dict[str, int | None]] = {}
        self.safe_bytes: dict[int, bytes] = {}
        self._serials = itertools.count()
        self._files: dict[Path, int] = {}
        self._last_change: dict[Path, dict[str, int | None]] = {}
        self._plan: Callable[[int, str, Path, Callable[[], None]], None] = lambda *_: None

    # ------------------------------------------------------------------------------------- what goes wrong

    def arm(self, plan=lambda *_: None) -> None:
        self.calls, self._plan = [], plan

    def fail(self, at: int, error: int, short: bool = False, lasting: bool = False) -> None:
        """Call `at` raises; with `short`, a write does half of its work first; with `lasting`, all that need space."""

        def plan(n, name, path, half):
            if n == at or (lasting and n > at and name in GROWING):
                if short and name == "write":
                    half()
                raise from_os_error(OSError(error, os.strerror(error)), path)

        self.arm(plan)

    def fail_on(self, names: tuple[str, ...], matching: str, error: int = errno.EIO) -> None:
        """All calls of these names on paths that contain `matching` raise."""

        def plan(_n, name, path, _half):
            if name in names and matching in str(path):
                raise from_os_error(OSError(error, os.strerror(error)), path)

        self.arm(plan)

    def crash(self, at: int) -> None:
        def plan(n, name, _path, half):
            if n >= at:
                if n == at and name == "write":
                    half()
                self.crashed = True
                raise Crash(f"at call {at}: {name}")

        self.arm(plan)

    def count(self, name: str, path: Path, half: Callable[[], None] = lambda: None) -> None:
        self.calls.append((name, path))
        self._plan(len(self.calls) - 1, name, path, half)

    def born(self, path: Path) -> int:
        self._files[path] = serial = next(self._serials)
        self._last_change[path.parent] = {path.name: serial}
        return serial

    # ------------------------------------------------------------------------------------------- the calls

    def make_dir(self, path: Path) -> None:
        if not path.exists():
            self.count("make_dir", path)
        super().make_dir(path)

    def create(self, path: Path) -> SimFile:
        return SimFile(self, path)

    def open(self, path: Path):
        self.count("open", path)
        return super().open(path)

    def list(self, path: Path):
        self.count("list", path)
        return super().list(path)

    def rename(self, source: Path, target: Path) -> None:
        self.count("rename", target)
        super().rename(source, target)
        self._files[target] = serial = self._files.pop(source)
        self._last_change[target.parent] = {source.name: None, target.name: serial}

    def remove(self, path: Path) -> None:
        self.count("remove", path)
        super().remove(path)
        if self._files.pop(path, None) is not None:
            self._last_change[path.parent] = {path.name: None}

    def sync_dir(self, path: Path) -> None:
        self.count("sync_dir", path)
        self.safe_names[path] = self._names(KILLED, path)
        self._last_change.pop(path, None)

    def lock(self, path: Path) -> SimLock:
        self.count("lock", path)
        return SimLock(self, path)

    # ------------------------------------------------------------------------------------- what is left of it

    def leave(self, aftermath: str, target: Path) -> Path:
        """The directory as another process finds it afterwards, as `target`."""
        if aftermath == KILLED:
            shutil.copytree(self.root, target)
        else:
            self._leave(aftermath, self.root, target)
        return target

    def clone(self, target: Path) -> SimFs:
        """The same disk again, elsewhere."""

        def moved(path: Path) -> Path:
            return target / path.relative_to(self.root)

        shutil.copytree(self.root, target)
        out = SimFs(target)
        out.safe_names = {moved(p): dict(names) for p, names in self.safe_names.items() if p.is_relative_to(self.root)}
        out.safe_bytes = dict(self.safe_bytes)
        out._files = {moved(p): serial for p, serial in self._files.items()}
        out._serials = itertools.count(next(self._serials))
        return out

    def _leave(self, aftermath: str, source: Path, target: Path) -> None:
        target.mkdir()
        for name, serial in self._names(aftermath, source).items():
            if serial is None and not is_lock(name):
                self._leave(aftermath, source / name, target / name)
                continue
            safe = self.safe_bytes.get(serial)
            if safe is None:
                safe = b""
                if aftermath == NAMES_SURVIVE_TORN:
                    with suppress(OSError):
                        safe = (source / name).read_bytes()
                    safe = safe[: len(safe) // 2]
            (target / name).write_bytes(safe)

    def _names(self, aftermath: str, source: Path) -> dict[str, int | None]:
        if aftermath == ALL_LOST:
            return self.safe_names.get(source, {})
        if aftermath == LAST_NAME_SURVIVES:
            changed = self._last_change.get(source, {})
            names = {**self.safe_names.get(source, {}), **changed}
            return {name: serial for name, serial in names.items() if changed.get(name, 0) is not None}
        return {e.name: None if e.is_dir() else self._files.get(source / e.name) for e in os.scandir(source)}
