"""Little stores as bytes, made by the real encoders, whose KV is known; and edits of such bytes that keep checksums
right, so that what refuses them is the check under test. No engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_persist.format import codec, envelope, manifest, segment
from sglang_persist.format.segment import IndexBuilder, RecordKey, SegmentIndex, Trailer
from sglang_persist.format.weights import WeightDigest, WeightFile
from sglang_persist.model import HASH_BYTES, Buffer, Identity, Manifest, Node, Piece, Pool, SegmentRef, Space
from sglang_persist.store import names, shard
from sglang_persist.store.writer import encode_record

SHARD = "dp0-adp0-pp0-cp0-tp0"

POOLS = (
    Pool(
        "kv",
        "slot",
        (
            Buffer("k0", "bfloat16", (1, 8), 16),
            Buffer("v0", "bfloat16", (1, 8), 16),
            Buffer("k1", "bfloat16", (1, 8), 16),
            Buffer("v1", "bfloat16", (1, 8), 16),
            Buffer("scale", "float32", (2,), 8),
            Buffer("index", "float8_e4m3fn", (7,), 7),
        ),
    ),
    Pool("window", "page", (Buffer("state", "uint8", (5,), 5), Buffer("sums", "float16", (6,), 12))),
    Pool("states", "state", (Buffer("conv0.2", "bfloat16", (3,), 6), Buffer("state2", "float32", (2, 2), 16))),
)

SPACES = (
    Space(),
    Space("", None),
    Space("ключ-鍵", "соль"),
    Space("\ud800", "\udfff\ud800"),  # lone surrogates: Python strings that no UTF-8 holds
    Space(None, "", True),
)

#: (parent, space, pages) of each node, in restore order.
NODES = ((-1, 0, 4), (0, 0, 3), (0, 0, 2), (-1, 1, 1), (-1, 2, 2), (-1, 3, 1), (-1, 4, 3), (6, 4, 2))

#: Of each segment its records: (pool, [(node, first page, pages), ...]). Node 0 is cut in two, records span nodes, and
#: the window pool covers only parts of nodes 0, 1 and 7; after nodes 0 and 7 there is a state.
RECORDS = (
    ((0, ((0, 0, 2),)), (0, ((0, 2, 2), (1, 0, 3))), (1, ((1, 1, 2),))),
    (
        (0, ((2, 0, 2),)),
        (0, ((3, 0, 1),)),
        (0, ((4, 0, 2),)),
        (1, ((0, 3, 1), (1, 0, 1))),
        (0, ((5, 0, 1),)),
        (0, ((6, 0, 3), (7, 0, 2))),
        (1, ((7, 1, 1),)),
        (2, ((0, 3, 1),)),
        (2, ((7, 1, 1),)),
    ),
)
WIDE_NODE = 4  # its token ids need 64 bits


#: Of a checkpoint in two files; the second has a name that is no UTF-8 and times before 1970.
WEIGHTS = WeightDigest(
    "/models/golden",
    "1 first 8589934592 65536 16777216",
    (
        WeightFile(
            "/models/golden/a.safetensors", 2**63 + 1, 1 << 33, 1_700_000_000_123_456_789, 1_700_000_001_000_000_000
        ),
        WeightFile("/models/golden/\udcff.safetensors", 7, 0, -1, -2),
    ),
    "whole:" + "0123456789abcdef" * 4,
)


def identity(page_tokens: int = 1) -> Identity:
    return Identity(
        {"architecture": "GoldenModel", "weights": "0" * 16, "kv_dtype": "bfloat16"},
        {"topology": {"tp": 1, "pp": 1}, "page": page_tokens, "layout": 1},
        {"model_path": "golden"},
    )


# ------------------------------------------------------------------------------------------------ KV, tokens, hashes


def values(rng: np.random.Generator, dtype: str, count_bytes: int) -> np.ndarray:
    """Bytes that look like a tensor of this type."""
    if dtype == "bfloat16":
        return (rng.standard_normal(count_bytes // 2).astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
    if dtype == "float16":
        return rng.standard_normal(count_bytes // 2).astype("<f2").view(np.uint8)
    if dtype == "float32":
        return rng.standard_normal(count_bytes // 4).astype("<f4").view(np.uint8)
    return rng.integers(0, 12, count_bytes).astype(np.uint8)


def chain(parent: bytes, tokens: np.ndarray, page_tokens: int, extra: int) -> bytes:
    """A hash for each page that names the whole path up to its end."""
    out = []
    for at in range(0, len(tokens) - extra, page_tokens):
        page = tokens[at : at + page_tokens + extra].astype("<i8").tobytes()
        parent = hashlib.sha256(parent + page).digest()
        out.append(parent)
    return b"".join(out)


# ------------------------------------------------------------------------------------------------ whole files


def build_segment(
    pools: tuple[Pool, ...], page_tokens: int, records: list[tuple[RecordKey, np.ndarray]], segment_id: bytes,
    namespace: bytes = bytes(16), setting: str = "auto",
) -> bytes:  # fmt: skip
    header = segment.encode_header(segment_id, namespace)
    index, payload = IndexBuilder(pools, page_tokens), bytearray()
    for ordinal, (key, raw) in enumerate(records):
        pool = pools[key.pool]
        encoded = encode_record(setting, pool, pool.rows(key.pages, page_tokens), raw)
        checksum = segment.record_checksum(segment_id, ordinal, [encoded.data])
        index.add(key, len(header) + len(payload), encoded.stored_bytes, checksum, encoded.parts)
        payload += encoded.data.tobytes()
    stored, raw_bytes, digest = envelope.seal(index.body())
    trailer = Trailer(len(header) + len(payload), len(stored), raw_bytes, index.records, digest)
    return header + bytes(payload) + stored + segment.encode_trailer(header, trailer)


@dataclass
class LittleNode:
    parent: int
    space: Space
    start: int
    pages: int
    tokens: np.ndarray
    hashes: bytes
    before: bytes  # hash of the page before the first one
    rows: dict[int, list[np.ndarray]]  # of each pool: of each buffer, [rows, row bytes]

    def kv(self, pools: tuple[Pool, ...], pool: int, at: int, pages: int, page_tokens: int) -> bytes:
        unit = pools[pool].rows(1, page_tokens)
        return b"".join(b[at * unit : (at + pages) * unit].tobytes() for b in self.rows[pool])

    def hash_before(self, page: int) -> bytes:
        return self.hashes[(page - 1) * HASH_BYTES : page * HASH_BYTES] if page else self.before


@dataclass
class LittleStore:
    page_tokens: int
    pools: tuple[Pool, ...]
    nodes: list[LittleNode]
    segments: dict[bytes, bytes]
    manifest: Manifest

    @property
    def indexes(self) -> dict[bytes, SegmentIndex]:
        return {k: read_segment(data) for k, data in self.segments.items()}

    def write(self, root: Path) -> Path:
        """The store as files below `root`; returns the shard's directory."""
        m = self.manifest
        path = root / names.model_dir(m.identity) / names.cut_dir(m.identity) / m.shard
        path.mkdir(parents=True)
        for segment_id, data in self.segments.items():
            (path / names.segment(segment_id)).write_bytes(data)
        (path / names.manifest(m.generation)).write_bytes(manifest.encode(m))
        return path


def little_store(page_tokens: int = 1, setting: str = "auto", seed: int = 7) -> LittleStore:
    """Eight nodes in five spaces, three pools and two segments. The same bytes each time."""
    rng = np.random.default_rng(seed)
    nodes: list[LittleNode] = []
    for i, (parent, space_at, pages) in enumerate(NODES):
        space, above = SPACES[space_at], nodes[parent] if parent >= 0 else None
        low = 2**40 if i == WIDE_NODE else 1
        tokens = rng.integers(low, low + 50_000, pages * page_tokens + space.extra_tokens)
        if above and space.bigram:
            tokens[0] = above.tokens[-1]
        before = above.hash_before(above.pages) if above else bytes(HASH_BYTES)
        rows = {
            p: [
                values(rng, b.dtype, pool.rows(pages, page_tokens) * b.row_bytes).reshape(-1, b.row_bytes)
                for b in pool.buffers
            ]
            for p, pool in enumerate(POOLS)
        }
        start = above.start + above.pages * page_tokens if above else 0
        hashes = chain(before, tokens, page_tokens, space.extra_tokens)
        nodes.append(LittleNode(parent, space, start, pages, tokens, hashes, before, rows))
    of = identity(page_tokens)
    segments, pieces, raw_bytes = {}, [[] for _ in nodes], 0
    for number, plan in enumerate(RECORDS):
        segment_id, records = bytes([16 * number + page_tokens] * 16), []
        for ordinal, (pool, sources) in enumerate(plan):
            records.append(_record(nodes, page_tokens, pool, sources))
            raw_bytes += records[-1][1].nbytes
            first = 0
            for node, at, pages in sources:
                pieces[node].append(Piece(pool, at, segment_id, ordinal, first, pages))
                first += pages
        segments[segment_id] = build_segment(POOLS, page_tokens, records, segment_id, names.namespace_id(of), setting)
    indexes = [read_segment(data) for data in segments.values()]
    m = Manifest(
        generation=3,
        created=1_700_000_000.5,
        reason="manual",
        shard=SHARD,
        shards=(SHARD,),
        page_tokens=page_tokens,
        identity=of,
        pools=POOLS,
        spaces=SPACES,
        segments=tuple(SegmentRef(i.id, i.file_bytes, i.index_digest, i.records) for i in indexes),
        nodes=tuple(Node(*NODES[i], tuple(sorted(p, key=lambda p: (p.pool, p.at)))) for i, p in enumerate(pieces)),
        tokens=sum(n.pages for n in nodes) * page_tokens,
        raw_bytes=raw_bytes,
        stored_bytes=sum(int(i.stored.sum()) for i in indexes),
        left_out_tokens=5,
        taken={"dp1-adp0": 2},
    )
    return LittleStore(page_tokens, POOLS, nodes, segments, m)


def _record(nodes: list[LittleNode], page_tokens: int, pool: int, sources) -> tuple[RecordKey, np.ndarray]:
    """Of each buffer the rows of all sources in path order, buffer after buffer."""
    node, at, _ = sources[0]
    first, unit = nodes[node], POOLS[pool].rows(1, page_tokens)
    extra = first.space.extra_tokens
    tokens, hashes = [], b""
    for n, low, pages in sources:
        own = nodes[n].tokens[low * page_tokens : (low + pages) * page_tokens + extra]
        tokens.append(own[extra:] if tokens else own)
        hashes += nodes[n].hashes[low * HASH_BYTES : (low + pages) * HASH_BYTES]
    raw = [
        nodes[n].rows[pool][b][low * unit : (low + pages) * unit].reshape(-1)
        for b in range(len(POOLS[pool].buffers))
        for n, low, pages in sources
    ]
    key = RecordKey(
        pool, first.space, first.start + at * page_tokens, first.hash_before(at), np.concatenate(tokens), hashes
    )
    return key, np.concatenate(raw)


def small_segment() -> bytes:
    """One record of one page in one pool: few enough bytes to try each bit."""
    pools = (Pool("kv", "slot", (Buffer("k", "uint8", (4,), 4),)),)
    tokens = np.arange(3)
    key = RecordKey(0, Space("k"), 0, bytes(32), tokens, chain(bytes(32), tokens, 1, 0))
    return build_segment(pools, 1, [(key, np.arange(12, dtype=np.uint8))], bytes(range(16)))


def small_manifest() -> Manifest:
    pools = (Pool("kv", "slot", (Buffer("k", "uint8", (4,), 4),)),)
    refs = (SegmentRef(bytes(range(16)), 500, bytes(16), 1),)
    nodes = (Node(-1, 0, 2, (Piece(0, 0, refs[0].id, 0, 0, 2),)), Node(0, 0, 1, (Piece(0, 0, refs[0].id, 0, 2, 1),)))
    return Manifest(
        1, 0.5, "manual", "dp0-tp0", ("dp0-tp0",), 1, Identity({}, {}), pools, (Space("k"),), refs, nodes, 3, 12, 12
    )


# ------------------------------------------------------------------------------------------------ reading bytes


class BytesFile:
    """What `shard.Segment` needs of a file."""

    path = Path("in-memory")

    def __init__(self, data: bytes):
        self._data, self.bytes = data, len(data)

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]

    def read_into(self, offset: int, out: np.ndarray) -> int:
        found = self._data[offset : offset + len(out)]
        out[: len(found)] = np.frombuffer(found, np.uint8)
        return len(found)

    def close(self) -> None:
        pass


def read_segment(data: bytes) -> SegmentIndex:
    """The index of a segment that is all in memory, checked in the order in which a store checks a file."""
    header = data[: segment.HEADER_BYTES]
    segment.decode_header(header)
    trailer = segment.decode_trailer(header, data[-segment.TRAILER_BYTES :], len(data))
    stored = data[trailer.index_offset : trailer.index_offset + trailer.index_bytes]
    return segment.decode_index(header, trailer, stored, len(data))


def load_records(data: bytes) -> list[bytes]:
    """The decoded KV of every record."""
    opened = shard.Segment(BytesFile(data), read_segment(data))
    return [opened.load(r).tobytes() for r in range(opened.index.records)]


def record_buffers(index: SegmentIndex, record: int, raw: bytes) -> Iterator[np.ndarray]:
    """Of each buffer of a record's KV: [rows, row bytes]."""
    pool = index.pools[index.pool[record]]
    rows, at = pool.rows(int(index.pages[record]), index.page_tokens), 0
    for buffer in pool.buffers:
        size = rows * buffer.row_bytes
        yield np.frombuffer(raw, np.uint8, size, at).reshape(rows, buffer.row_bytes)
        at += size
    assert at == len(raw)


def piece_kv(index: SegmentIndex, piece: Piece, raw: bytes) -> bytes:
    """The KV of a piece, out of its record's."""
    unit = index.pools[index.pool[piece.record]].rows(1, index.page_tokens)
    low, high = piece.first * unit, (piece.first + piece.pages) * unit
    return b"".join(b[low:high].tobytes() for b in record_buffers(index, piece.record, raw))


# ------------------------------------------------------------------------------------------------ sound edits


def put(data: bytes, offset: int, new: bytes) -> bytes:
    return data[:offset] + new + data[offset + len(new) :]


def flip(data: bytes, bit: int) -> bytes:
    return put(data, bit // 8, bytes([data[bit // 8] ^ (1 << bit % 8)]))


def segment_parts(data: bytes) -> tuple[bytes, bytes, bytes, Trailer]:
    """Header, payloads, stored index, trailer."""
    header = data[: segment.HEADER_BYTES]
    trailer = segment.decode_trailer(header, data[-segment.TRAILER_BYTES :], len(data))
    payload, stored = data[len(header) : trailer.index_offset], data[trailer.index_offset : -segment.TRAILER_BYTES]
    return header, payload, stored, trailer


def sign_header(header: bytes) -> bytes:
    """A segment's or a manifest's fixed part with its checksum made right."""
    return header[:-8] + envelope.digest64(header[:-8]).to_bytes(8, "little")


def sign_trailer(header: bytes, tail: bytes) -> bytes:
    return tail[:-8] + envelope.digest64(header, tail[:-8]).to_bytes(8, "little")


def with_header(data: bytes, offset: int, new: bytes) -> bytes:
    """A segment with other bytes in its header, both checksums made right."""
    header = sign_header(put(data[: segment.HEADER_BYTES], offset, new))
    at = len(data) - segment.TRAILER_BYTES
    return header + data[segment.HEADER_BYTES : at] + sign_trailer(header, data[at:])


def with_trailer(data: bytes, offset: int, new: bytes) -> bytes:
    at = len(data) - segment.TRAILER_BYTES
    return data[:at] + sign_trailer(data[: segment.HEADER_BYTES], put(data[at:], offset, new))


def with_index_bytes(data: bytes, stored: bytes, raw_bytes: int, records: int | None = None) -> bytes:
    """A segment with another stored index, its digest and the trailer made right."""
    header, payload, _, trailer = segment_parts(data)
    count = trailer.records if records is None else records
    new = Trailer(len(header) + len(payload), len(stored), raw_bytes, count, envelope.digest128(stored))
    return header + payload + stored + segment.encode_trailer(header, new)


def index_body(data: bytes) -> dict:
    _, _, stored, trailer = segment_parts(data)
    return envelope.unseal(stored, trailer.index_raw_bytes, trailer.index_digest)


def index_raw(data: bytes) -> bytes:
    _, _, stored, trailer = segment_parts(data)
    return codec.unpack(stored, trailer.index_raw_bytes)


def edit_index(data: bytes, edit: Callable[[dict], object], records: int | None = None) -> bytes:
    body = index_body(data)
    edit(body)
    stored, raw_bytes, _ = envelope.seal(body)
    return with_index_bytes(data, stored, raw_bytes, records)


def with_body_bytes(data: bytes, stored: bytes, raw_bytes: int) -> bytes:
    """A manifest with another stored body, digest and checksum made right."""
    fixed = manifest.HEADER.unpack_from(data)[:4]
    head = manifest.HEADER.pack(*fixed, len(stored), raw_bytes, envelope.digest128(stored))
    return sign_header(head + bytes(8)) + stored


def manifest_raw(data: bytes) -> bytes:
    raw_bytes = manifest.HEADER.unpack_from(data)[5]
    return codec.unpack(data[manifest.HEADER_BYTES :], raw_bytes)


def manifest_body(data: bytes) -> dict:
    *_, raw_bytes, digest = manifest.HEADER.unpack_from(data)
    return envelope.unseal(data[manifest.HEADER_BYTES :], raw_bytes, digest)


def edit_manifest(data: bytes, edit: Callable[[dict], object]) -> bytes:
    body = manifest_body(data)
    edit(body)
    stored, raw_bytes, _ = envelope.seal(body)
    return with_body_bytes(data, stored, raw_bytes)


def set_cell(body: dict, name: str, dtype: str, at: int, value: int) -> None:
    """One number of a column."""
    cells = np.frombuffer(body[name], dtype).copy()
    cells[at] = value
    body[name] = cells.tobytes()
