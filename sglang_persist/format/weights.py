"""Weight digests: what a checkpoint's files were when they were read, and the digest that came out. FORMAT.md
section 10.

A cache and nothing else: a file that does not decode is read as absent, and the weights are read again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sglang_persist.errors import LimitExceeded, Malformed
from sglang_persist.format import envelope, limits

MAJOR, MINOR = 1, 0
MAGIC = b"\x89KVWTS\r\n"


@dataclass(frozen=True)
class WeightFile:
    """A file as it was when it was read; times in nanoseconds."""

    path: str
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True)
class WeightDigest:
    """`checkpoint` is the resolved path; `rule` says what of the files went into the digest."""

    checkpoint: str
    rule: str
    files: tuple[WeightFile, ...]
    digest: str


def path_digest(checkpoint: str) -> str:
    """The 16 hex digits that name the file of a checkpoint: SHA-256 of its path."""
    return hashlib.sha256(checkpoint.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def encode(w: WeightDigest) -> bytes:
    rows = [[f.path, f.inode, f.bytes, f.mtime_ns, f.ctime_ns] for f in w.files]
    body = {"checkpoint": w.checkpoint, "rule": w.rule, "files": rows, "digest": w.digest}
    return envelope.encode_file(MAGIC, MAJOR, MINOR, body)


def decode(data: bytes) -> WeightDigest:
    """A weight digest file. Raises FormatError for anything that is not what `encode` writes."""
    body = envelope.decode_file(data, MAGIC, MAJOR, "weight digest")
    rows = envelope.field(body, "files", list)
    if len(rows) > limits.MAX_WEIGHT_FILES:
        raise LimitExceeded(f"{len(rows)} weight files")
    for row in rows:
        if not isinstance(row, list) or len(row) != 5 or not isinstance(row[0], str):
            raise Malformed("a weight file is not [path, inode, bytes, mtime, ctime]")
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in row[1:]):
            raise Malformed("a weight file is not [path, inode, bytes, mtime, ctime]")
    checkpoint, rule, digest = (envelope.field(body, n, str) for n in ("checkpoint", "rule", "digest"))
    return WeightDigest(checkpoint, rule, tuple(WeightFile(*row) for row in rows), digest)
