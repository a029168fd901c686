"""Where the store of a directory is: there, or, on a volume that others may change, in a directory of its own below it.

A mount point is often open to everybody (0777) or to a group (setgid), and token ids and salts are user data.
"""

from __future__ import annotations

from pathlib import Path

from sglang_persist.errors import StoreUnavailable
from sglang_persist.fs import FileSystem
from sglang_persist.store import names

SUBDIRECTORY = "sglang-persist"


def writers_root(fs: FileSystem, directory: Path) -> Path:
    """The store's root for a server. Raises StoreUnavailable where another user owns it or may change it."""
    rights = fs.rights(directory)
    if rights is None or not rights.shared:
        return directory
    root = directory / SUBDIRECTORY
    # A link in a place where others may write is theirs to move.
    rights = fs.rights(root, follow=False)
    if rights is not None and not rights.ours:
        raise StoreUnavailable(
            f"{root}: not a directory that only this user may change (owner {rights.owner}, mode {rights.mode:04o})"
        )
    return root


def readers_root(fs: FileSystem, directory: Path) -> Path:
    """The store's root for a tool that is given the directory a server was given, or the root itself."""
    below = directory / SUBDIRECTORY
    return below if fs.exists(below) and not names.shard_dirs(fs, directory) else directory
