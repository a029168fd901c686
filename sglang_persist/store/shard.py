"""One rank's files: its generations, its segments and their records, as a reader sees them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import numpy as np

from sglang_persist.errors import (
    ChecksumMismatch,
    FormatError,
    LimitExceeded,
    Malformed,
    StoreError,
    Truncated,
    Unusable,
)
from sglang_persist.format import codec, limits, manifest, segment
from sglang_persist.format.segment import Part, SegmentIndex
from sglang_persist.fs import FileSystem, ReadFile
from sglang_persist.model import Manifest, Pool, SegmentRef
from sglang_persist.spare import Spare
from sglang_persist.store import names

T = TypeVar("T")
NO_GATE = contextlib.nullcontext()


def generations(fs: FileSystem, path: Path) -> list[int]:
    """The generations whose manifests lie in a shard's directory, newest first."""
    found = (names.generation_of(entry.name) for entry in fs.list(path) if not entry.is_dir)
    return sorted((g for g in found if g is not None), reverse=True)


def read_whole(fs: FileSystem, place: Path, most: int, decode: Callable[[bytes], T]) -> T:
    """What `decode` makes of a file of at most `most` bytes. Raises FormatError or StoreError, with the path in it."""
    with fs.open(place) as file:
        if file.bytes > most:
            raise LimitExceeded(f"{file.bytes} bytes; a reader accepts {most}", place)
        data = file.read(0, file.bytes)
    try:
        return decode(data)
    except FormatError as error:
        raise error.at(place) from None


def load_manifest(fs: FileSystem, path: Path, generation: int, nodes: bool = True) -> Manifest:
    """Raises FormatError or StoreError, with the path in it. `nodes` as in `manifest.decode`."""

    def decode(data: bytes) -> Manifest:
        found = manifest.decode(data, nodes)
        if found.generation != generation or found.shard != path.name:
            raise Malformed(f"holds generation {found.generation} of {found.shard!r}")
        if names.namespace(found.identity) != f"{path.parent.parent.name}/{path.parent.name}":
            raise Malformed(f"belongs to namespace {names.namespace(found.identity)}")
        return found

    return read_whole(fs, path / names.manifest(generation), limits.MAX_INDEX_BYTES, decode)


def added_bytes(fs: FileSystem, path: Path, generation: int) -> int:
    """What a generation added to its shard: its manifest, and segments that the one before it does not name."""
    m = load_manifest(fs, path, generation, nodes=False)
    before = next((g for g in generations(fs, path) if g < generation), None)
    known = {ref.id for ref in load_manifest(fs, path, before, nodes=False).segments} if before is not None else set()
    (size,) = (e.bytes for e in fs.list(path) if e.name == names.manifest(generation))
    return size + sum(ref.bytes for ref in m.segments if ref.id not in known)


def is_complete(fs: FileSystem, path: Path, m: Manifest) -> bool:
    """Whether every rank of the generation has committed its part."""
    return fullness(fs, path, m) is not None


def fullness(fs: FileSystem, path: Path, m: Manifest) -> int | None:
    """The tokens that the ranks of a generation have, added up, so that all find the same number. None where one has
    not committed its part."""
    tokens = m.tokens
    for shard in m.shards:
        if shard == m.shard:
            continue
        if not names.SHARD.fullmatch(shard):
            return None
        try:
            other = load_manifest(fs, path.parent / shard, m.generation, nodes=False)
        except (FormatError, StoreError):
            return None
        if other.shards != m.shards:
            return None
        tokens += other.tokens
    return tokens


def newest(
    fs: FileSystem, path: Path, at_most: float = math.inf, deadly: Collection[int] = ()
) -> tuple[Manifest | None, list[Exception]]:
    """The newest generation that verifies and is complete, and why newer ones were passed over."""
    passed: list[Exception] = []
    for generation in generations(fs, path):
        if generation > at_most:
            continue
        if generation in deadly:
            passed.append(Unusable("processes died while they restored it", path / names.manifest(generation)))
            continue
        try:
            found = load_manifest(fs, path, generation)
        except (FormatError, StoreError) as error:
            passed.append(error)
            continue
        if is_complete(fs, path, found):
            return found, passed
        passed.append(Malformed("not every rank has this generation", path / names.manifest(generation)))
    return None, passed


def fullest(fs: FileSystem, path: Path, than: Manifest | None, deadly: Collection[int] = ()) -> Manifest | None:
    """The older generation with the most tokens, where that is more than `than` has and all else is alike."""
    if than is None:
        return None
    best, most = None, fullness(fs, path, than) or 0
    for generation in generations(fs, path):
        if generation < than.generation and generation not in deadly:
            try:
                found = load_manifest(fs, path, generation)
            except (FormatError, StoreError):
                continue
            alike = (found.pools, found.page_tokens, found.shards) == (than.pools, than.page_tokens, than.shards)
            if alike and (tokens := fullness(fs, path, found) or 0) > most:
                best, most = found, tokens
    return best


def decode_record(
    pool: Pool, rows: int, parts: Sequence[Part], stored: memoryview, targets: Sequence[np.ndarray]
) -> None:
    """The inverse of `writer.encode_record`, straight into where the bytes are wanted. `targets` as in `load_into`."""
    at = raw = 0
    for part in parts:
        buffers = pool.buffers[part.first_buffer : part.first_buffer + part.buffers]
        size = rows * sum(b.row_bytes for b in buffers)
        chunk = stored[at : at + part.stored_bytes]
        if len(targets) == 1:
            outs = [targets[0][raw : raw + size]]
        else:
            outs = targets[part.first_buffer : part.first_buffer + part.buffers]
        codec.decode(part.codec, part.frame_bytes, chunk, outs)
        at, raw = at + part.stored_bytes, raw + size


class Segment:
    """An open segment. Reading a record checks its bytes; `index` was checked when it was opened."""

    def __init__(self, file: ReadFile, index: SegmentIndex):
        self._file, self.index, self.path = file, index, file.path
        self._spare = Spare()

    def read(self, record: int) -> np.ndarray:
        """A record's stored bytes, uint8. Raises ChecksumMismatch or Truncated."""
        return self._read(record, np.empty(int(self.index.stored[record]), np.uint8))

    def _read(self, record: int, out: np.ndarray) -> np.ndarray:
        index, offset = self.index, int(self.index.offset[record])
        if self._file.read_into(offset, out) != len(out):
            raise Truncated(f"record {record} ends early", self.path, offset)
        if segment.record_checksum(index.id, record, [out]) != int(index.checksum[record]):
            raise ChecksumMismatch(f"record {record} does not match its checksum", self.path, offset)
        return out

    def load(self, record: int) -> np.ndarray:
        """A record's KV bytes, checked and decoded: buffer after buffer, rows of consecutive slots in each."""
        out = np.empty(self.index.raw_bytes(record), np.uint8)
        self.load_into(record, [out])
        return out

    def load_into(self, record: int, targets: Sequence[np.ndarray], gate: AbstractContextManager = NO_GATE) -> None:
        """A record's KV bytes into `targets`: uint8, contiguous; one for all of its buffers, or one for each. They are
        written to inside of `gate`.

        Raises FormatError and StoreError; the targets hold anything then.
        """
        index = self.index
        data = self._read(record, self._spare.take(int(index.stored[record])))
        pool = index.pools[index.pool[record]]
        rows = pool.rows(int(index.pages[record]), index.page_tokens)
        try:
            with gate:
                decode_record(pool, rows, index.record_parts(record), memoryview(data), targets)
        except FormatError as error:
            raise error.at(self.path, int(index.offset[record])) from None
        self._spare.give(data)

    def close(self) -> None:
        self._file.close()


def open_segments(
    fs: FileSystem, path: Path, refs: Iterable[SegmentRef], namespace: bytes, errors: list[str]
) -> dict[bytes, Segment]:
    """These segments of a shard; what cannot be opened, or is of another namespace, is in `errors`."""
    opened: dict[bytes, Segment] = {}
    for ref in refs:
        try:
            found = open_segment(fs, path, ref.id, ref)
        except (FormatError, StoreError) as error:
            errors.append(str(error))
            continue
        if found.index.namespace != namespace:
            found.close()
            errors.append(f"{found.path}: belongs to namespace {found.index.namespace.hex()}")
            continue
        opened[ref.id] = found
    return opened


def open_segment(fs: FileSystem, path: Path, segment_id: bytes, ref: SegmentRef | None = None) -> Segment:
    """A segment of this shard; `ref` is what a manifest says of it, and must agree."""
    place = path / names.segment(segment_id)
    file = fs.open(place)
    try:
        file.expect_order()
        header = file.read(0, segment.HEADER_BYTES)
        found_id, _ = segment.decode_header(header)
        tail = file.read(max(0, file.bytes - segment.TRAILER_BYTES), segment.TRAILER_BYTES)
        trailer = segment.decode_trailer(header, tail, file.bytes)
        stored = file.read(trailer.index_offset, trailer.index_bytes)
        index = segment.decode_index(header, trailer, stored, file.bytes)
        if found_id != segment_id:
            raise Malformed(f"holds segment {found_id.hex()}")
        if ref and (ref.bytes, ref.digest, ref.records) != (file.bytes, index.index_digest, index.records):
            raise Malformed("is not the segment that the manifest names")
    except FormatError as error:
        file.close()
        raise error.at(place) from None
    except BaseException:
        file.close()
        raise
    return Segment(file, index)


def close_after(reads: Sequence[Future], segments: Iterable[Segment]) -> None:
    """Close segments once the last read of them is done: on this thread, or on that of the last read."""
    left = itertools.count(len(reads), -1)

    def close(_: Future | None = None) -> None:
        if not next(left):  # this thread included, all have come here
            for segment in segments:
                segment.close()

    for read in reads:
        read.add_done_callback(close)
    close()
