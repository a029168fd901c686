"""Records to segments to a committed generation, off the thread that hands them in.

`submit` only queues: encoding runs on a few threads, and one thread writes what they return in the order of submission.
Memory is bounded by `pending_bytes` of records that are not written yet. Order of a commit, each step durable before
the next: segment data, segment name, manifest data, manifest name. The rename of the manifest is the commit.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_persist.errors import StoreBusy
from sglang_persist.format import codec, envelope, manifest, segment
from sglang_persist.format.segment import IndexBuilder, Part, RecordKey, SegmentIndex
from sglang_persist.fs import FileSystem, NewFile
from sglang_persist.model import Manifest, Pool
from sglang_persist.nodes import Places
from sglang_persist.spare import Spare
from sglang_persist.store import names
from sglang_persist.store.shard import Segment, open_segment
from sglang_persist.workers import stand_back, workers

#: Buffers of a record are coded together until they reach this size. Smaller parts cost more calls, between which
#: threads wait for the interpreter lock; much larger ones leave the processor's caches.
PART_BYTES = 2 << 20
#: Of what was handed in and is not written yet.
PENDING_BYTES, PENDING_RECORDS = 32 << 20, 256
SEGMENT_BYTES = 4 << 30


@dataclass(frozen=True)
class Encoded:
    parts: list[Part]
    data: np.ndarray | bytes

    @property
    def stored_bytes(self) -> int:
        return len(self.data)


def encode_record(setting: str, pool: Pool, rows: int, raw: np.ndarray, out: np.ndarray | None = None) -> Encoded:
    """A record's KV bytes as parts of at least PART_BYTES (the last may be smaller), one codec each, in `out`."""
    out = np.empty(raw.nbytes, np.uint8) if out is None else out
    parts, at, first, stored = [], 0, 0, 0
    while first < len(pool.buffers):
        dtype, count, size = pool.buffers[first].dtype, 0, 0
        while first + count < len(pool.buffers) and size < PART_BYTES and pool.buffers[first + count].dtype == dtype:
            size += rows * pool.buffers[first + count].row_bytes
            count += 1
        used, frame_bytes, took = codec.encode(codec.choose(setting, dtype), raw[at : at + size], out[stored:])
        parts.append(Part(int(used), first, count, took, frame_bytes))
        first, at, stored = first + count, at + size, stored + took
    return Encoded(parts, out[:stored])


def least_segment_bytes(pools: tuple[Pool, ...], page_tokens: int) -> int:
    """At most so large is a segment of one record of one page, whatever its pool."""
    record = max(p.bytes(1, page_tokens) + segment.entry_bytes(1, 2 * page_tokens, len(p.buffers)) for p in pools)
    return segment.HEADER_BYTES + record + IndexBuilder(pools, page_tokens).bytes + segment.TRAILER_BYTES


def _temporary(path: Path, name: str) -> Path:
    return path / f"tmp-{os.getpid()}-{name}"


class _OpenSegment:
    """The segment that is being written. Nothing of it counts before `seal`."""

    def __init__(self, fs: FileSystem, path: Path, namespace: bytes, pools: tuple[Pool, ...], page_tokens: int):
        self.fs, self.path, self.id = fs, path, secrets.token_bytes(segment.ID_BYTES)
        self.temporary = _temporary(path, names.segment(self.id))
        self.header = segment.encode_header(self.id, namespace)
        self.index = IndexBuilder(pools, page_tokens)
        self.file: NewFile = fs.create(self.temporary)
        try:
            self.file.write(self.header)
        except BaseException:
            self.abort()
            raise

    def add(self, source: RecordKey | tuple[SegmentIndex, int], encoded: Encoded) -> int:
        offset = self.file.bytes
        self.file.write(encoded.data)
        checksum = segment.record_checksum(self.id, self.index.records, [encoded.data])
        if isinstance(source, RecordKey):
            return self.index.add(source, offset, encoded.stored_bytes, checksum, encoded.parts)
        return self.index.copy(*source, offset, encoded.stored_bytes, checksum)

    def would_be(self, source: RecordKey | tuple[SegmentIndex, int], encoded: Encoded) -> int:
        """At most so large would the sealed file be with this record in it."""
        if isinstance(source, RecordKey):
            pages, parts = source.pages, encoded.parts
        else:
            pages, parts = int(source[0].pages[source[1]]), source[0].record_parts(source[1])
        entry = segment.entry_bytes(pages, (pages + 1) * self.index.page_tokens, len(parts))
        return self.bytes + encoded.stored_bytes + entry

    @property
    def bytes(self) -> int:
        """At most so large would the sealed file be."""
        return self.file.bytes + self.index.bytes + segment.TRAILER_BYTES

    def seal(self) -> SegmentIndex:
        stored, raw_bytes, digest = envelope.seal(self.index.body())
        trailer = segment.Trailer(self.file.bytes, len(stored), raw_bytes, self.index.records, digest)
        self.file.write(stored)
        self.file.write(segment.encode_trailer(self.header, trailer))
        self.file.sync()
        self.file.close()
        self.fs.rename(self.temporary, self.path / names.segment(self.id))
        self.fs.sync_dir(self.path)
        # Reading it back is the cheapest proof that what was written can be restored.
        opened = open_segment(self.fs, self.path, self.id)
        opened.close()
        return opened.index

    def abort(self) -> None:
        self.file.close()
        self.fs.remove(self.temporary)


class SegmentWriter:
    """The records of one snapshot. Not for two snapshots at once; all public calls come from one thread."""

    def __init__(
        self, fs: FileSystem, path: Path, namespace: bytes, pools: tuple[Pool, ...], page_tokens: int, setting: str,
        threads: int, segment_bytes: int = SEGMENT_BYTES, pending_bytes: int = PENDING_BYTES,
    ):  # fmt: skip
        self._new = lambda: _OpenSegment(fs, path, namespace, pools, page_tokens)
        self._pools, self._page_tokens, self._setting = pools, page_tokens, setting
        self._segment_bytes, self._limit = segment_bytes, pending_bytes
        self._encoders = workers(threads, "persist-encode")
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._room = threading.Condition()
        self._spare = Spare()
        self._pending = self._owed = self._records = 0
        #: Bytes of segments so far; of the open one at most, once it is sealed.
        self.written = 0
        self._stop = False
        self._open: _OpenSegment | None = None
        self.indexes: list[SegmentIndex] = []
        self._ids: list[bytes] = []
        self._placed = array("q")
        self.sealed: Future = Future()
        self._thread = threading.Thread(target=self._run, name="persist-write", daemon=True)
        self._thread.start()

    @property
    def placed(self) -> Places:
        """Where every record is that was written, in order of submission."""
        return Places(self._ids, self._placed)

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether another record may be handed in now, waiting up to `timeout` seconds for room."""
        with self._room:
            return self._room.wait_for(lambda: self._has_room() or self.sealed.done(), timeout)

    def _has_room(self) -> bool:
        return self._pending < self._limit and self._records < PENDING_RECORDS

    def due(self) -> int:
        """Bytes of what was handed in: on disk, or, not coded yet, at most."""
        with self._room:
            return self.written + self._owed

    def idle(self, timeout: float = 0.0) -> bool:
        """Whether everything that was handed in is written, waiting up to `timeout` seconds for it."""
        with self._room:
            return self._room.wait_for(lambda: not self._pending or self.sealed.done(), timeout)

    def cost(self, pool: int, pages: int) -> int:
        """At most so much does a record take in a segment, its index entry included."""
        of, tokens = self._pools[pool], pages * self._page_tokens + 1
        return of.bytes(pages, self._page_tokens) + segment.entry_bytes(pages, tokens, len(of.buffers))

    def submit(
        self, key: RecordKey, raw: np.ndarray, arrived: Callable[[], object] = bool, done: Callable[[], object] = bool
    ) -> None:
        """Queue one record. `raw` does not change between the return of `arrived` and the call of `done`, which a
        worker makes before and after it looks there. Raises what stopped the writer, if something did."""
        if self.sealed.done():
            self.sealed.result()
        with self._room:
            self._pending += raw.nbytes
            self._records += 1
            self._owed += self.cost(key.pool, key.pages)
        pool = self._pools[key.pool]
        rows = pool.rows(key.pages, self._page_tokens)
        try:
            job = self._encoders.submit(self._encode, pool, rows, raw, arrived, done)
        except RuntimeError:  # the writer has stopped since we looked
            self.sealed.result()
            raise
        self._queue.put((key, raw.nbytes, job))

    def _encode(self, pool: Pool, rows: int, raw: np.ndarray, arrived, done) -> Encoded:
        arrived()
        encoded = encode_record(self._setting, pool, rows, raw, self._spare.take(raw.nbytes))
        done()
        return encoded

    def copy(self, index: SegmentIndex, record: int, stored: bytes) -> None:
        """Queue a record of an older segment, coded as it is. Waits for room: not for the scheduler's thread."""
        while not self.ready(1.0):
            pass
        if self.sealed.done():
            self.sealed.result()
        with self._room:
            self._pending += len(stored)
            self._records += 1
        job: Future = Future()
        job.set_result(Encoded([], stored))
        self._queue.put(((index, record), len(stored), job))

    def seal(self) -> Future:
        """No more records: the future is done when all segments are durable, or holds what went wrong."""
        self._queue.put(None)
        return self.sealed

    def abort(self) -> None:
        """Stop, and leave nothing behind that counts. Safe after `seal`."""
        self._stop = True
        self._queue.put(None)

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        stand_back()
        try:
            while (item := self._queue.get()) is not None and not self._stop:
                source, size, job = item
                encoded: Encoded = job.result()
                if self._open and self._is_full(source, encoded):
                    self._seal_open()
                if self._open is None:
                    self._open = self._new()
                    self._ids.append(self._open.id)
                self._placed.append((len(self._ids) - 1) << 32 | self._open.add(source, encoded))
                if isinstance(encoded.data, np.ndarray):
                    self._spare.give(encoded.data)
                with self._room:
                    self.written = sum(i.file_bytes for i in self.indexes) + self._open.bytes
                    self._pending -= size
                    self._records -= 1
                    self._owed -= self.cost(source.pool, source.pages) if isinstance(source, RecordKey) else 0
                    self._room.notify_all()
            if self._stop:
                raise InterruptedError("the snapshot was stopped")
            self._seal_open()
            self.sealed.set_result(self.indexes)
        except BaseException as error:
            self._discard(error)
        finally:
            self._encoders.shutdown(wait=False, cancel_futures=True)
            with self._room:
                self._room.notify_all()

    def _is_full(self, source: RecordKey | tuple[SegmentIndex, int], encoded: Encoded) -> bool:
        too_large = self._open.would_be(source, encoded) > self._segment_bytes
        return too_large or self._open.index.bytes > segment.INDEX_BYTES

    def _seal_open(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            try:
                self.indexes.append(opened.seal())
            except BaseException:
                opened.abort()
                raise

    def _discard(self, error: BaseException) -> None:
        try:
            if self._open is not None:
                self._open.abort()
        except Exception as second:
            error.add_note(f"and its temporary file could not be removed: {second}")
        self.sealed.set_exception(error)


def commit(fs: FileSystem, path: Path, m: Manifest, again: bool = False) -> int:
    """Make a generation count: its manifest, durable under its name. Returns the manifest's bytes.

    `again`: in the place of what is committed under that name. Readers find the one or the other.
    """
    if not again and fs.exists(path / names.manifest(m.generation)):
        raise StoreBusy(f"{path / names.manifest(m.generation)}: this generation is committed already")
    data, name = manifest.encode(m), names.manifest(m.generation)
    fs.write_whole(_temporary(path, name), path / name, data)
    return len(data)


def merge(writer: SegmentWriter, opened: dict[bytes, Segment], records: list[tuple[bytes, int]]) -> dict:
    """Rewrite these records into new segments: where each of them is now. Raises FormatError, StoreError."""
    for name, record in records:
        writer.copy(opened[name].index, record, opened[name].read(record))
    writer.seal().result()
    return dict(zip(records, writer.placed, strict=True))
