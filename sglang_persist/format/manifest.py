"""Manifests: one generation of one shard, the commit record. FORMAT.md section 3.

fixed header (magic, version, sizes, digest, checksum) | body (a checked msgpack map)
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields

import numpy as np

from sglang_persist.errors import LimitExceeded, Malformed
from sglang_persist.format import envelope, limits
from sglang_persist.model import Identity, Manifest, Pool, Rates, SegmentRef
from sglang_persist.nodes import PIECE, NodeTable, Pieces

MAJOR, MINOR = 1, 0
MAGIC = b"\x89KVMAN\r\n"
HEADER, CHECKSUM, HEADER_BYTES = envelope.HEADER, envelope.CHECKSUM, envelope.HEADER_BYTES


def encode(m: Manifest) -> bytes:
    return envelope.encode_file(MAGIC, MAJOR, MINOR, _body(m))


def _body(m: Manifest) -> dict:
    nodes = NodeTable.of(m.nodes)
    rows = nodes.pieces.numbered({s.id: i for i, s in enumerate(m.segments)})
    columns = {n: np.ascontiguousarray(rows[n]).tobytes() for n in PIECE.names}
    return {
        "generation": m.generation,
        "created": m.created,
        "reason": m.reason,
        "shard": m.shard,
        "shards": list(m.shards),
        "page_tokens": m.page_tokens,
        "identity": asdict(m.identity),
        "pools": envelope.encode_pools(m.pools),
        "spaces": [envelope.encode_space(s) for s in m.spaces],
        "segments": [[s.id, s.bytes, s.digest, s.records] for s in m.segments],
        "node_parent": nodes.parent.astype("<i4").tobytes(),
        "node_space": nodes.space.astype("<u4").tobytes(),
        "node_pages": nodes.pages.astype("<u4").tobytes(),
        "piece_node": nodes.pieces.owner.astype("<u4").tobytes(),
        **{f"piece_{name}": column for name, column in columns.items()},
        "tokens": m.tokens,
        "raw_bytes": m.raw_bytes,
        "stored_bytes": m.stored_bytes,
        "left_out_tokens": m.left_out_tokens,
        "rates": asdict(m.rates),
        **({"taken": dict(m.taken)} if m.taken else {}),
    }


def decode(data: bytes, nodes: bool = True) -> Manifest:
    """A manifest file. Raises FormatError for anything that is not exactly what `encode` writes.

    Without `nodes`, the tree is neither looked at nor made, which takes most of the time: the rest says what a
    generation holds on to.
    """
    return _from_body(envelope.decode_file(data, MAGIC, MAJOR, "manifest"), nodes)


def _from_body(body: dict, with_nodes: bool) -> Manifest:
    field = envelope.field
    shards = field(body, "shards", list)
    if len(shards) > limits.MAX_SHARDS or not all(isinstance(s, str) for s in shards):
        raise LimitExceeded("shards")
    if field(body, "shard", str) not in shards:
        raise Malformed("the shard is not among the generation's shards")
    pools, spaces, segments = envelope.decode_pools(body), envelope.decode_spaces(body), _segments(body)
    page_tokens = field(body, "page_tokens", int)
    if not 1 <= page_tokens <= limits.MAX_RECORD_PAGES:
        raise LimitExceeded(f"pages of {page_tokens} tokens")
    nodes = _nodes(body, pools, len(spaces), segments) if with_nodes else ()
    identity = field(body, "identity", dict)
    if not _is_json(identity):
        raise Malformed("the identity is not plain text, numbers, lists and maps")
    counts = {n: field(body, n, int) for n in ("generation", "tokens", "raw_bytes", "stored_bytes", "left_out_tokens")}
    created = float(field(body, "created", (int, float)))
    if min(counts.values()) < 0 or not math.isfinite(created):
        raise Malformed("a count is negative, or the time is none")
    if with_nodes and counts["tokens"] != int(nodes.pages.sum()) * page_tokens:
        raise Malformed("the number of tokens is not that of the nodes")
    return Manifest(
        **counts,
        created=created,
        reason=field(body, "reason", str),
        shard=body["shard"],
        shards=tuple(shards),
        page_tokens=page_tokens,
        identity=Identity(field(identity, "model", dict), field(identity, "cut", dict), field(identity, "soft", dict)),
        pools=pools,
        spaces=spaces,
        segments=segments,
        nodes=nodes,
        rates=_rates(body),
        taken=_taken(body),
    )


def _rates(body: dict) -> Rates:
    """Measurements, which a manifest may do without. One that makes no sense counts as not there."""
    found = envelope.field(body, "rates", dict) if "rates" in body else {}
    values = {f.name: found.get(f.name, 0.0) for f in fields(Rates)}
    sane = all(isinstance(v, (int, float)) and 0 <= v < math.inf for v in values.values())
    return Rates(**{name: float(v) for name, v in values.items()}) if sane else Rates()


def _taken(body: dict) -> dict[str, int]:
    """Something that saves work, and that a manifest may do without."""
    found = envelope.field(body, "taken", dict) if "taken" in body else {}
    sane = len(found) <= limits.MAX_SHARDS and all(
        isinstance(group, str) and isinstance(number, int) and not isinstance(number, bool) and number >= 0
        for group, number in found.items()
    )
    return found if sane else {}


def _is_json(value) -> bool:
    """Whether names can be derived from a value. Its depth was bounded before it was made."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float))


def _check_coverage(owner, pool, at, length, pages) -> None:
    """Pieces of one node and pool stand in order without overlap; those of pool 0 fill the node exactly."""
    group = owner * limits.MAX_POOLS + pool
    if (np.diff(group) < 0).any():
        raise Malformed("pieces are not ordered by node and pool")
    follows = np.diff(group) == 0
    if (at[1:] < (at + length)[:-1])[follows].any():
        raise Malformed("pieces of a node overlap")
    filled = np.bincount(owner[pool == 0], weights=length[pool == 0], minlength=len(pages))
    if (filled != pages).any():
        raise Malformed("a node is not covered by its pieces")


def _segments(body: dict) -> tuple[SegmentRef, ...]:
    rows = envelope.field(body, "segments", list)
    if len(rows) > limits.MAX_SEGMENTS:
        raise LimitExceeded(f"{len(rows)} segments")
    for row in rows:
        kinds = (bytes, int, bytes, int)
        if not isinstance(row, list) or len(row) != 4 or not all(map(isinstance, row, kinds)):
            raise Malformed("a segment is not [id, bytes, digest, records]")
        if len(row[0]) != 16 or len(row[2]) != 16 or row[1] < 0 or row[3] < 0:
            raise Malformed("a segment's id or digest is not 16 bytes")
        if row[3] > limits.MAX_RECORDS:
            raise LimitExceeded(f"{row[3]} records in a segment")
    if len({row[0] for row in rows}) != len(rows):
        raise Malformed("a segment is named twice")
    return tuple(SegmentRef(*row) for row in rows)


def _nodes(body: dict, pools: tuple[Pool, ...], spaces: int, segments: tuple[SegmentRef, ...]) -> NodeTable:
    column = envelope.column
    parent, space = column(body, "node_parent", "<i4"), column(body, "node_space", "<u4")
    pages = column(body, "node_pages", "<u4")
    n = envelope.same_length(parent, space, pages)
    names = ("node", "pool", "at", "segment", "record", "first", "pages")
    pieces = [column(body, f"piece_{name}", "<u1" if name == "pool" else "<u4") for name in names]
    total = envelope.same_length(*pieces)
    if n > limits.MAX_NODES or total > limits.MAX_NODES:
        raise LimitExceeded(f"{n} nodes, {total} pieces")
    # Parents stand before their children, so a cycle cannot be written down.
    if n and (parent.min() < -1 or (parent >= np.arange(n)).any() or space.max(initial=0) >= spaces or pages.min() < 1):
        raise Malformed("a node's parent, space or length is impossible")
    if n and (space[parent[parent >= 0]] != space[parent >= 0]).any():
        raise Malformed("a node is of another space than its parent")
    owner, pool, at, segment, record, first, length = (p.astype(np.int64) for p in pieces)
    if total:
        counts = np.array([s.records for s in segments], np.int64)
        if (np.diff(owner) < 0).any() or owner.max() >= n or pool.max() >= len(pools) or segment.max() >= len(segments):
            raise Malformed("a piece names a node, pool or segment that is not there")
        if (record >= counts[segment]).any() or length.min() < 1 or (at + length > pages[owner]).any():
            raise Malformed("a piece lies outside its record or node")
        if (first + length > limits.MAX_RECORD_PAGES).any():
            raise LimitExceeded("a piece is longer than a record may be")
        _check_coverage(owner, pool, at, length, pages)
        of_states = np.array([p.at_ends for p in pools])[pool]
        if (of_states & ((length != 1) | (at + 1 != pages[owner]))).any():
            raise Malformed("a state does not stand at the end of its node")
    if n and not total:
        raise Malformed("nodes without pieces")
    rows = np.empty(total, PIECE)
    for name, values in zip(names[1:], pieces[1:], strict=True):
        rows[name] = values
    bounds = np.searchsorted(owner, np.arange(n + 1))
    return NodeTable(parent, space, pages, Pieces([s.id for s in segments], rows, bounds))
