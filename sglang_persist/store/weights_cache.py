"""The digest of a checkpoint's weights, kept in the store's root so that a restart need not read them again.

Nothing depends on it: absent, damaged, unreadable or unwritable, it costs the reading of the weights.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path

from sglang_persist.errors import FormatError, Malformed, StoreError
from sglang_persist.format import limits, weights
from sglang_persist.format.weights import WeightDigest
from sglang_persist.fs import FileSystem
from sglang_persist.store import names, shard

#: Seconds after which nobody can still be writing a temporary file of this size.
_ABANDONED = 3600


def read(fs: FileSystem, place: Path) -> WeightDigest:
    """The file at `place`. Raises FormatError or StoreError, with the path in it."""

    def decode(data: bytes) -> WeightDigest:
        found = weights.decode(data)
        if names.weights(found.checkpoint) != place.name:
            raise Malformed(f"holds the digest of {found.checkpoint!r}")
        return found

    return shard.read_whole(fs, place, limits.MAX_WEIGHT_DIGEST_BYTES, decode)


def load(fs: FileSystem, root: Path, checkpoint: str) -> WeightDigest | None:
    """What is stored of this checkpoint, or None."""
    try:
        found = read(fs, root / names.weights(checkpoint))
    except (FormatError, StoreError):
        return None
    return found if found.checkpoint == checkpoint else None


def save(fs: FileSystem, root: Path, digest: WeightDigest) -> bool:
    """Replace what is stored of this checkpoint, durably and at once: ranks may do so at the same time. False where
    it cannot be written."""
    temporary = root / f"tmp-weights-{secrets.token_hex(8)}"
    try:
        fs.make_dir(root)
        _sweep(fs, root)
        fs.write_whole(temporary, root / names.weights(digest.checkpoint), weights.encode(digest))
    except StoreError:
        return False
    return True


def _sweep(fs: FileSystem, root: Path) -> None:
    """Remove what a write that did not end left here, unless another rank may be at it."""
    for entry in fs.list(root):
        if not entry.is_dir and entry.name.startswith("tmp-weights-"):
            with contextlib.suppress(StoreError):
                if fs.stat(root / entry.name).mtime_ns < (time.time() - _ABANDONED) * 1e9:
                    fs.remove(root / entry.name)
