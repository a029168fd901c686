"""Restores that ended with the death of their process: an empty file for each, which its process holds locked.

A generation can be structurally sound and still kill whoever restores it. After two such deaths the next start takes
the generation before; a restore that was completed, by whatever process, clears the count.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from sglang_persist.errors import StoreError
from sglang_persist.fs import FileSystem, Lock
from sglang_persist.store import names

#: So many deaths make a generation unusable. One may have been anybody's.
DEADLY = 2


def begin(fs: FileSystem, path: Path, generation: int) -> Lock | None:
    """Note that a restore begins; None where that cannot be written down."""
    try:
        attempt = fs.lock(path / names.restoring(generation, secrets.token_bytes(4)))
    except StoreError:
        return None
    try:
        fs.sync_dir(path)
    except StoreError:
        attempt.release()
        return None
    return attempt


def end(fs: FileSystem, path: Path, generation: int, attempt: Lock | None, completed: bool = True) -> None:
    """The process lived through it. Once a restore was completed, nothing is held against the generation any more."""
    if attempt is not None:
        attempt.release()
    for _, lock in _dead(fs, path, generation) if completed else ():
        lock.release()


def deadly(fs: FileSystem, path: Path) -> set[int]:
    """Generations that are not to be restored again. Raises StoreError."""
    counts: dict[int, int] = {}
    for generation, lock in _dead(fs, path):
        lock.release(remove=False)
        counts[generation] = counts.get(generation, 0) + 1
    return {generation for generation, count in counts.items() if count >= DEADLY}


def _dead(fs: FileSystem, path: Path, only: int | None = None) -> list[tuple[int, Lock]]:
    """Attempts whose process is gone, locked by us meanwhile."""
    found: list[tuple[int, Lock]] = []
    for entry in fs.list(path):
        generation = names.restoring_of(entry.name)
        if generation is None or (only is not None and generation != only):
            continue
        try:
            found.append((generation, fs.lock(path / entry.name)))
        except StoreError:  # it goes on
            continue
    return found
