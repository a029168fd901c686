"""Segments: immutable files of records. FORMAT.md section 2 is this module in tables; a test compares the two.

    header | record payloads, without gaps | index (a checked body) | trailer

The index says everything about the records: token ids, page hashes, where the bytes are and how they are coded. It is
written last and found through the trailer, so a file that was cut short is not a segment.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from sglang_persist.errors import ChecksumMismatch, LimitExceeded, Malformed, NewerFormat, NotOurs, Truncated
from sglang_persist.format import envelope, limits
from sglang_persist.format.codec import Codec
from sglang_persist.model import HASH_BYTES, Pool, Space
from sglang_persist.nodes import prefix_sum

MAJOR, MINOR = 1, 0
ID_BYTES = 16
KEY_BYTES = 16  # of a page hash, in the index

HEADER_MAGIC = b"\x89KVSEG\r\n"
TRAILER_MAGIC = b"KVSEGEND"
# magic, major, minor, header bytes, required features, optional features, segment id, namespace; then the checksum
HEADER = struct.Struct("<8sHHIII16s16s")
# magic, index offset, index stored bytes, index decoded bytes, records, reserved, index digest; then the checksum
TRAILER = struct.Struct("<8sQQQII16s")
CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = HEADER.size + CHECKSUM.size
TRAILER_BYTES = TRAILER.size + CHECKSUM.size


def encode_header(segment_id: bytes, namespace: bytes) -> bytes:
    head = HEADER.pack(HEADER_MAGIC, MAJOR, MINOR, HEADER_BYTES, 0, 0, segment_id, namespace)
    return head + CHECKSUM.pack(envelope.digest64(head))


def decode_header(data: bytes) -> tuple[bytes, bytes]:
    """(segment id, namespace) of the first `HEADER_BYTES` of a file."""
    if len(data) < HEADER_BYTES:
        raise Truncated("shorter than a segment header", offset=0)
    magic, major, _minor, size, required, _optional, segment_id, namespace = HEADER.unpack_from(data)
    if magic != HEADER_MAGIC:
        raise NotOurs("not a segment", offset=0)
    if CHECKSUM.unpack_from(data, HEADER.size)[0] != envelope.digest64(data[: HEADER.size]):
        raise ChecksumMismatch("the header does not match its checksum", offset=0)
    if major != MAJOR:
        raise NewerFormat(f"segment format {major}; this reader knows {MAJOR}", offset=8)
    if required:
        raise NewerFormat(f"required features {required:#x} are not known", offset=16)
    if size != HEADER_BYTES:
        raise Malformed(f"header of {size} bytes", offset=12)
    return segment_id, namespace


@dataclass(frozen=True)
class Trailer:
    index_offset: int
    index_bytes: int
    index_raw_bytes: int
    records: int
    index_digest: bytes


def encode_trailer(header: bytes, trailer: Trailer) -> bytes:
    tail = TRAILER.pack(
        TRAILER_MAGIC, trailer.index_offset, trailer.index_bytes, trailer.index_raw_bytes, trailer.records, 0,
        trailer.index_digest,
    )  # fmt: skip
    return tail + CHECKSUM.pack(envelope.digest64(header, tail))


def decode_trailer(header: bytes, data: bytes, file_bytes: int) -> Trailer:
    at = file_bytes - TRAILER_BYTES
    if len(data) < TRAILER_BYTES or at < HEADER_BYTES:
        raise Truncated("the file ends before a trailer", offset=file_bytes)
    magic, offset, stored, raw, records, reserved, digest = TRAILER.unpack_from(data)
    if magic != TRAILER_MAGIC:
        raise Truncated("no trailer at the end", offset=at)
    if CHECKSUM.unpack_from(data, TRAILER.size)[0] != envelope.digest64(header, data[: TRAILER.size]):
        raise ChecksumMismatch("the trailer does not match its checksum", offset=at)
    if reserved or offset < HEADER_BYTES or offset + stored != at:
        raise Malformed("the index does not stand between the records and the trailer", offset=at)
    if records > limits.MAX_RECORDS:
        raise LimitExceeded(f"{records} records", offset=at)
    envelope.check_sizes(stored, raw)
    return Trailer(offset, stored, raw, records, digest)


class Part(NamedTuple):
    """Consecutive buffers of a record, coded as one: `frame_bytes` of zstd, then a plane that stays as it is."""

    codec: int
    first_buffer: int
    buffers: int
    stored_bytes: int
    frame_bytes: int


@dataclass(frozen=True, slots=True)
class RecordKey:
    """What a record is about: the pages after `parent_hash` on a path, from token position `start` on."""

    pool: int
    space: Space
    start: int
    parent_hash: bytes
    tokens: np.ndarray
    hashes: bytes  # HASH_BYTES a page

    @property
    def pages(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def first_pages(self, count: int, page_tokens: int) -> RecordKey:
        """The same record, cut off after `count` pages."""
        if count == self.pages:
            return self
        tokens = self.tokens[: count * page_tokens + self.space.extra_tokens]
        return replace(self, tokens=tokens, hashes=self.hashes[: count * HASH_BYTES])


def record_checksum(segment_id: bytes, ordinal: int, chunks: Sequence) -> int:
    """Seeded with the record's place, so that a sound record in another place or file does not pass."""
    seed = int.from_bytes(segment_id[:8], "little") ^ ordinal
    return envelope.digest64(*chunks, seed=seed)


#: A segment is sealed when its index is so large before it is compressed: it is held several times while that is done.
INDEX_BYTES = 16 << 20


def entry_bytes(pages: int, tokens: int, parts: int) -> int:
    """At most so much does a record add to an index: its row with a space of its own, its parts, hashes and tokens."""
    return 256 + 24 * parts + KEY_BYTES * pages + 8 * tokens


#: Columns of numbers in an index, and how wide: with a row for each record, and for each part in the order of `Part`.
_RECORD_COLUMNS = {
    "record_pool": "B", "record_space": "I", "record_start": "I", "record_pages": "I", "record_offset": "Q",
    "record_bytes": "Q", "record_checksum": "Q", "record_parts": "H",
}  # fmt: skip
_PART_COLUMNS = {
    "part_codec": "B", "part_first_buffer": "H", "part_buffers": "H", "part_bytes": "Q", "part_frame_bytes": "Q",
}  # fmt: skip
#: A row of `SegmentIndex.parts`.
PART = np.dtype([(name, f"<{code}") for name, code in zip(Part._fields, _PART_COLUMNS.values(), strict=True)])


class IndexBuilder:
    """Collects what `SegmentIndex` will read. One call of `add` per record, in file order."""

    def __init__(self, pools: tuple[Pool, ...], page_tokens: int):
        self.pools, self.page_tokens = pools, page_tokens
        self._spaces: dict[Space, int] = {}
        # As numbers in rows: of objects, one for each record, Python's garbage collector would have to look at each.
        self._of_records = {name: array(code) for name, code in _RECORD_COLUMNS.items()}
        self._of_parts = {name: array(code) for name, code in _PART_COLUMNS.items()}
        self._parents, self._keys = bytearray(), bytearray()
        self._tokens: list[np.ndarray] = []
        self.records = 0
        #: More than the index will take, whatever it compresses to.
        self.bytes = 256 + sum(128 + len(b.name) for p in pools for b in p.buffers)

    def add(self, key: RecordKey, offset: int, stored_bytes: int, checksum: int, parts: Sequence[Part]) -> int:
        """A new record; returns its ordinal."""
        keys = np.frombuffer(key.hashes, np.uint8).reshape(-1, HASH_BYTES)[:, :KEY_BYTES].tobytes()
        place = (offset, stored_bytes, checksum)
        return self._append(key.pool, key.space, key.start, key.pages, place, parts, key.parent_hash, keys, key.tokens)

    def copy(self, index: SegmentIndex, record: int, offset: int, stored_bytes: int, checksum: int) -> int:
        """A record of another segment, whose payload is taken over as it is; returns its new ordinal."""
        pages = int(index.pages[record])
        first = int(index.first_page[record])
        return self._append(
            int(index.pool[record]), index.spaces[index.space[record]], int(index.start[record]), pages,
            (offset, stored_bytes, checksum), index.record_parts(record), index.parent[record].tobytes(),
            index.page_hash[first : first + pages].tobytes(), index.page_tokens_of(record, 0, pages),
        )  # fmt: skip

    def _append(self, pool, space, start, pages, place, parts, parent, keys, tokens) -> int:
        space = self._spaces.setdefault(space, len(self._spaces))
        _add_row(self._of_records, (pool, space, start, pages, *place, len(parts)))
        for part in parts:
            _add_row(self._of_parts, part)
        self._parents += parent
        self._keys += keys
        self._tokens.append(tokens)
        self.records += 1
        self.bytes += entry_bytes(pages, len(tokens), len(parts))
        return self.records - 1

    def body(self) -> dict:
        tokens = np.concatenate(self._tokens) if self._tokens else np.empty(0, np.int64)
        wide = bool(tokens.size) and not (tokens.min() >= -(2**31) and tokens.max() < 2**31)
        return {
            "pools": envelope.encode_pools(self.pools),
            "spaces": [envelope.encode_space(s) for s in self._spaces],
            "page_tokens": self.page_tokens,
            **_numbers(self._of_records),
            "record_parent": bytes(self._parents),
            **_numbers(self._of_parts),
            "page_hash": bytes(self._keys),
            "token_width": 8 if wide else 4,
            "tokens": tokens.astype("<i8" if wide else "<i4").tobytes(),
        }


def _add_row(columns: dict[str, array], row: Sequence[int]) -> None:
    for column, value in zip(columns.values(), row, strict=True):
        column.append(value)


def _numbers(columns: dict[str, array]) -> dict[str, bytes]:
    return {name: np.array(c, c.typecode).astype(f"<{c.typecode}").tobytes() for name, c in columns.items()}


@dataclass
class SegmentIndex:
    """A decoded and checked index. Columns are arrays; `first_page` and `first_token` are prefix sums over records."""

    id: bytes
    namespace: bytes
    file_bytes: int
    index_digest: bytes
    pools: tuple[Pool, ...]
    spaces: tuple[Space, ...]
    page_tokens: int
    pool: np.ndarray
    space: np.ndarray
    start: np.ndarray
    pages: np.ndarray
    offset: np.ndarray
    stored: np.ndarray
    checksum: np.ndarray
    parent: np.ndarray  # [records, HASH_BYTES]
    first_part: np.ndarray
    parts: np.ndarray  # PART
    tokens: np.ndarray
    first_page: np.ndarray
    first_token: np.ndarray
    page_hash: np.ndarray  # [pages, 2] u64, the first KEY_BYTES of each hash
    #: Records whose bytes turned out to be damaged: never referred to again.
    bad: set[int] = field(default_factory=set)
    _sorted: list[tuple[np.ndarray, np.ndarray]] | None = None

    @property
    def records(self) -> int:
        return len(self.pool)

    @property
    def is_full(self) -> bool:
        """Whether the index leaves no room for as many records again."""
        size = entry_bytes(len(self.page_hash), len(self.tokens), len(self.parts)) + self.records * entry_bytes(0, 0, 0)
        return 2 * size > INDEX_BYTES

    def raw_bytes(self, record: int) -> int:
        return self.pools[self.pool[record]].bytes(int(self.pages[record]), self.page_tokens)

    def record_parts(self, record: int) -> list[Part]:
        return [Part(*row) for row in self.parts[self.first_part[record] : self.first_part[record + 1]].tolist()]

    def page_tokens_of(self, record: int, first: int, pages: int) -> np.ndarray:
        """Token ids of pages [first, first + pages) of a record (one more in a bigram space)."""
        extra = self.spaces[self.space[record]].extra_tokens
        low = int(self.first_token[record]) + first * self.page_tokens
        return self.tokens[low : low + pages * self.page_tokens + extra]

    def sort(self) -> None:
        """Make `find` ready, which takes a tenth of a second for 10^6 pages: on a thread that nobody waits for."""
        if self._sorted is None:
            orders = [self._order(pool) for pool in range(len(self.pools))]
            self._sorted = [(self.page_hash[order, 0], order) for order in orders]

    def _order(self, pool: int) -> np.ndarray:
        """The pages in records of a pool, in the order of their hashes."""
        if len(self.pools) == 1:
            return np.argsort(self.page_hash[:, 0], kind="stable").astype(np.uint32)
        own = np.flatnonzero(np.repeat(self.pool == pool, self.pages))
        return own[np.argsort(self.page_hash[own, 0], kind="stable")].astype(np.uint32)

    def find(self, keys: np.ndarray, pool: int = 0) -> np.ndarray:
        """For page hashes [n, 2] u64: the ordinal of a page of that pool with that hash in this segment, or -1."""
        self.sort()
        heads, order = self._sorted[pool] if pool < len(self.pools) else (self.page_hash[:0, 0], None)
        if not len(heads) or not len(keys):
            return np.full(len(keys), -1, np.int64)
        at = np.minimum(np.searchsorted(heads, keys[:, 0]), len(heads) - 1)
        page = order[at].astype(np.int64)
        return np.where((self.page_hash[page] == keys).all(axis=1), page, -1)

    def record_of(self, page: int) -> tuple[int, int]:
        """(record, page within it) of a page ordinal."""
        record = int(np.searchsorted(self.first_page, page, side="right")) - 1
        return record, int(page - self.first_page[record])


def decode_index(header: bytes, trailer: Trailer, stored: bytes, file_bytes: int) -> SegmentIndex:
    """The index of a segment, every field checked against the file's size and against the others."""
    segment_id, namespace = decode_header(header)
    body = envelope.unseal(stored, trailer.index_raw_bytes, trailer.index_digest)
    column, n = envelope.column, trailer.records
    pools, spaces = envelope.decode_pools(body), envelope.decode_spaces(body)
    page_tokens = envelope.field(body, "page_tokens", int)
    if not 1 <= page_tokens <= limits.MAX_RECORD_PAGES:
        raise LimitExceeded(f"pages of {page_tokens} tokens")
    pool, space = column(body, "record_pool", "<u1", n), column(body, "record_space", "<u4", n)
    start, pages = column(body, "record_start", "<u4", n), column(body, "record_pages", "<u4", n)
    offset, size = column(body, "record_offset", "<u8", n), column(body, "record_bytes", "<u8", n)
    checksum, part_count = column(body, "record_checksum", "<u8", n), column(body, "record_parts", "<u2", n)
    parent = column(body, "record_parent", "<u1", n * HASH_BYTES).reshape(n, HASH_BYTES)
    if n and (pool.max() >= len(pools) or space.max() >= len(spaces)):
        raise Malformed("a record names a pool or a space that is not there")
    if n and (pages.min() < 1 or pages.max() > limits.MAX_RECORD_PAGES or part_count.min() < 1):
        raise LimitExceeded("a record without pages or parts, or with too many")

    # The payloads must tile the file between header and index: no holes, no overlap, in order.
    ends = prefix_sum(np.minimum(size, trailer.index_offset)) + HEADER_BYTES
    if (size > trailer.index_offset).any() or (offset != ends[:-1]).any() or ends[-1] != trailer.index_offset:
        raise Malformed("records do not fill the space between header and index")

    first_part, parts = prefix_sum(part_count), _decode_parts(body)
    if first_part[-1] != len(parts):
        raise Malformed("parts and records differ in number")
    _check_parts(parts, first_part, size)
    _check_sizes(parts, first_part, pools, pool, pages, page_tokens, size)

    first_page = prefix_sum(pages)
    extra = np.array([s.extra_tokens for s in spaces], np.int64)[space] if n else np.empty(0, np.int64)
    first_token = prefix_sum(pages.astype(np.int64) * page_tokens + extra)
    width = envelope.field(body, "token_width", int)
    if width not in (4, 8):
        raise Malformed(f"tokens of {width} bytes")
    tokens = column(body, "tokens", f"<i{width}", int(first_token[-1]))
    page_hash = column(body, "page_hash", "<u8", int(first_page[-1]) * 2).reshape(-1, 2)
    return SegmentIndex(
        segment_id, namespace, file_bytes, trailer.index_digest, pools, spaces, page_tokens, pool, space, start, pages,
        offset, size, checksum, parent, first_part, parts, tokens, first_page, first_token, page_hash,
    )  # fmt: skip


def _decode_parts(body: dict) -> np.ndarray:
    columns = [envelope.column(body, name, f"<{code}") for name, code in _PART_COLUMNS.items()]
    envelope.same_length(*columns)
    parts = np.empty(len(columns[0]), PART)
    for name, column in zip(PART.names, columns, strict=True):
        parts[name] = column
    return parts


def _check_parts(parts: np.ndarray, first_part: np.ndarray, size: np.ndarray) -> None:
    """The parts of each record follow each other and are as long as the record; each record has at least one."""
    if not len(size):
        return
    first, last = first_part[:-1], first_part[1:] - 1
    begin, end = parts["first_buffer"].astype(np.int64), parts["first_buffer"].astype(np.int64) + parts["buffers"]
    before = np.concatenate([[0], end[:-1]])
    before[first] = 0
    if (begin != before).any() or (parts["buffers"] < 1).any() or (parts["frame_bytes"] > parts["stored_bytes"]).any():
        raise Malformed("parts of a record do not follow each other")
    unknown = parts["codec"][~np.isin(parts["codec"], list(Codec))]
    if len(unknown):
        raise NewerFormat(f"codec {unknown[0]} is not known")
    # None is larger than its record, so that their sum cannot overflow.
    if (parts["stored_bytes"] > np.repeat(size, last - first + 1)).any() or (
        np.add.reduceat(parts["stored_bytes"], first) != size
    ).any():
        raise Malformed("parts of a record do not cover its buffers and bytes")


def _check_sizes(parts: np.ndarray, first_part: np.ndarray, pools: tuple[Pool, ...], pool: np.ndarray,
                 pages: np.ndarray, page_tokens: int, size: np.ndarray) -> None:  # fmt: skip
    """The parts of each record cover its pool's buffers, and are not longer than what they hold."""
    for number, of in enumerate(pools):
        records = np.flatnonzero(pool == number)
        ends = parts[first_part[1:][records] - 1]
        if (ends["first_buffer"].astype(np.int64) + ends["buffers"] != len(of.buffers)).any():
            raise Malformed("parts of a record do not cover its buffers and bytes")
        most = min(of.bytes(1, page_tokens), limits.MAX_RECORD_BYTES + 1)  # of a page
        raw = pages[records].astype(np.int64) * most
        # No encoder writes more than it was given, so the stored bytes need no limit of their own.
        bad = np.flatnonzero((size[records] > raw.astype(np.uint64)) | (raw > limits.MAX_RECORD_BYTES))
        if len(bad):
            raise LimitExceeded(f"a record of {raw[bad[0]]} bytes, {size[records][bad[0]]} stored")
