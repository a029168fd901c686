"""The digest of a checkpoint's weights, kept in the store's root so that a restart need not read them again.

Nothing depends on it: absent, damaged, unreadable or unwritable, it costs the reading of the weights.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path

from sglang_persist.errors import FormatError, LimitExceeded, Malformed, StoreError
from sglang_persist.format import limits, weights
from sglang_persist.format.weights import WeightDigest
from sglang_persist.fs import FileSystem
from sglang_persist.store import names

#: Seconds after which nobody can still be writing a temporary file of this size.
_ABANDONED = 3600


def read(fs: FileSystem, place: Path) -> WeightDigest:
    """The file at `place`. Raises FormatError or StoreError, with the path in it."""
    with fs.open(place) as file:
        if file.bytes > limits.MAX_WEIGHT_DIGEST_BYTES:
            raise LimitExceeded(f"a weight digest of {file.bytes} bytes", place)
        data = file.read(0, file.bytes)
    try:
        found = weights.decode(data)
        if names.weights(found.checkpoint) != place.name:
            raise Malformed(f"holds the digest of {found.checkpoint!r}")
    except FormatError as error:
        raise error.at(place) from None
    return found


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
        file = fs.create(temporary)
        try:
            file.write(weights.encode(digest))
            file.sync()
        finally:
            file.close()
        fs.rename(temporary, root / names.weights(digest.checkpoint))
        fs.sync_dir(root)
    except StoreError:
        with contextlib.suppress(StoreError):
            fs.remove(temporary)
        return False
    return True


def _sweep(fs: FileSystem, root: Path) -> None:
    """Remove what a write that did not end left here, unless another rank may be at it."""
    for entry in fs.list(root):
        if not entry.is_dir and entry.name.startswith("tmp-weights-"):
            with contextlib.suppress(StoreError):
                if fs.stat(root / entry.name).mtime_ns < (time.time() - _ABANDONED) * 1e9:
                    fs.remove(root / entry.name)
