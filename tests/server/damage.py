"""Rewrites a store so that it is sound but wrong: what a checksum cannot tell, and only an output shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sglang_persist import config
from sglang_persist.format.segment import KEY_BYTES, RecordKey
from sglang_persist.fs import REAL
from sglang_persist.model import HASH_BYTES
from sglang_persist.store import names, shard
from sglang_persist.store.writer import SegmentWriter, commit

#: Not at the very beginning: attention to the first token would drown everything else.
SKIP = 100


def zero_tokens(root: Path, count: int) -> int:
    """Zero the KV of `count` tokens of the longest shared prefix, every checksum right. Returns how many it were."""
    (path,) = names.shard_dirs(REAL, root)
    generation = shard.generations(REAL, path)[0]
    manifest = shard.load_manifest(REAL, path, generation)
    opened = {ref.id: shard.open_segment(REAL, path, ref.id, ref) for ref in manifest.segments}
    writer = SegmentWriter(
        REAL, path, names.namespace_id(manifest.identity), manifest.pools, manifest.page_tokens, "auto",
        config.auto_threads(),
    )  # fmt: skip
    zeroed, moved = 0, []
    for segment in opened.values():
        index = segment.index
        for record in range(index.records):
            raw, pages = segment.load(record), int(index.pages[record])
            start = int(index.start[record])
            low, high = max(0, SKIP - start), min(pages, SKIP + count - start)
            if low < high:
                zeroed = max(zeroed, high - low)
                at = 0
                for buffer in manifest.pools[0].buffers:
                    raw[at + low * buffer.row_bytes : at + high * buffer.row_bytes] = 0
                    at += pages * buffer.row_bytes
            first = int(index.first_page[record])
            hashes = b"".join(
                key.tobytes() + bytes(HASH_BYTES - KEY_BYTES) for key in index.page_hash[first : first + pages]
            )
            key = RecordKey(
                0, index.spaces[index.space[record]], start, index.parent[record].tobytes(),
                index.page_tokens_of(record, 0, pages), hashes,
            )  # fmt: skip
            writer.ready(60)
            writer.submit(key, raw)
            moved.append((index.id, record))
    writer.seal().result()
    places = dict(zip(moved, writer.placed, strict=True))
    nodes = tuple(
        replace(
            node,
            pieces=tuple(
                p._replace(segment=places[p.segment, p.record][0], record=places[p.segment, p.record][1])
                for p in node.pieces
            ),
        )
        for node in manifest.nodes
    )
    refs = tuple(shard.SegmentRef(i.id, i.file_bytes, i.index_digest, i.records) for i in writer.indexes)
    commit(REAL, path, replace(manifest, generation=generation + 1, nodes=nodes, segments=refs))
    return zeroed
