"""Little stores, made with the package's own writer: a generation is one call, and which bytes it holds is known."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sglang_persist.format.segment import RecordKey
from sglang_persist.fs import REAL, FileSystem
from sglang_persist.model import HASH_BYTES, Buffer, Identity, Manifest, Node, Piece, Pool, SegmentRef, Space
from sglang_persist.store import shard
from sglang_persist.store.home import Home
from sglang_persist.store.writer import SegmentWriter, commit

SHARD = "dp0-adp0-pp0-cp0-tp0"
OTHER = "dp0-adp0-pp0-cp0-tp1"
PAGE = 2
PLAIN = Space()
IDENTITY = Identity(
    {"architecture": "LittleModel", "weights": "w"},
    {"topology": {"tp": 1, "pp": 1}, "page": PAGE, "layout": 1},
    {"model_path": "/models/little", "sglang": "test"},
)
POOLS = (
    Pool(
        "kv",
        "slot",
        (
            Buffer("k0", "bfloat16", (2, 8), 32),
            Buffer("v0", "bfloat16", (2, 8), 32),
            Buffer("scale", "uint8", (4,), 4),
            Buffer("norm", "float32", (2,), 8),
        ),
    ),
)


def key(rng: np.random.Generator, pages: int, space: Space = PLAIN, parent: RecordKey | None = None) -> RecordKey:
    """A path of its own, or the continuation of one."""
    tokens = rng.integers(1, 50_000, pages * PAGE + space.extra_tokens)
    start = parent.start + parent.pages * PAGE if parent else 0
    before = parent.hashes[-HASH_BYTES:] if parent else bytes(HASH_BYTES)
    return RecordKey(0, space, start, before, tokens, rng.bytes(pages * HASH_BYTES))


def payload(rng: np.random.Generator, pages: int, pools: tuple[Pool, ...] = POOLS) -> np.ndarray:
    """KV bytes of a record: normal values where floats stand, small numbers where bytes do."""
    rows, parts = pages * PAGE, []
    for buffer in pools[0].buffers:
        size = rows * buffer.row_bytes
        if buffer.dtype == "bfloat16":
            parts.append((rng.standard_normal(size // 2).astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8))
        elif buffer.dtype == "float32":
            parts.append(rng.standard_normal(size // 4).astype("<f4").view(np.uint8))
        else:
            parts.append(rng.integers(0, 4, size, dtype=np.uint8))
    return np.concatenate(parts)


def writer(fs: FileSystem, home: Home, setting: str = "auto", pools=POOLS, **limits) -> SegmentWriter:
    return SegmentWriter(fs, home.path, home.namespace, pools, PAGE, setting, 1, **limits)


@dataclass
class Stored:
    """A record that was sealed: where it is, what it is about, and its bytes."""

    place: tuple[bytes, int]
    key: RecordKey
    raw: bytes


@dataclass
class Little:
    """One rank that takes snapshots of a tree which each time loses its oldest records and gets new ones."""

    root: Path
    fs: FileSystem = REAL
    shard: str = SHARD
    shards: tuple[str, ...] = (SHARD,)
    identity: Identity = IDENTITY
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))
    #: Of each generation: its manifest and its records.
    manifests: dict[int, Manifest] = field(default_factory=dict)
    records: dict[int, list[Stored]] = field(default_factory=dict)

    def __post_init__(self):
        self.home = Home(self.fs, self.root, self.identity, self.shard)

    @property
    def path(self) -> Path:
        return self.home.path

    def manifest_file(self, generation: int) -> Path:
        return self.path / f"gen-{generation:010d}.kvm"

    def segment_files(self) -> list[Path]:
        return sorted(self.path.glob("seg-*.kvs"))

    def open(self) -> Little:
        self.home.find()
        self.home.become_writer()
        return self

    def take(self, *, retire: bool = True, created: float | None = None, pages: int = 20) -> int:
        """A snapshot of two segments: a path that no later generation holds, of so many pages, and one that the next
        holds as well."""
        generation = self.home.next_generation()
        first = key(self.rng, 1)
        keys = [key(self.rng, pages), first, key(self.rng, 1, parent=first)]
        raws = [payload(self.rng, k.pages) for k in keys]
        out = writer(self.fs, self.home, segment_bytes=3000)
        for one, raw in zip(keys, raws, strict=True):
            out.submit(one, raw)
        out.seal().result(30)
        out.join(30)
        new = [Stored(p, k, r.tobytes()) for p, k, r in zip(out.placed, keys, raws, strict=True)]
        kept = self.records.get(self.home.generation, [])[-2:]
        m = self.manifest(generation, kept + new, {**self.home.segments, **{i.id: i for i in out.indexes}}, created)
        self.manifests[generation], self.records[generation] = m, kept + new
        commit(self.fs, self.path, m)
        self.home.adopt(m, {}, out.indexes)
        if retire:
            self.home.retire()
        return generation

    def manifest(self, generation: int, records: list[Stored], segments, created=None) -> Manifest:
        nodes = []
        for i, stored in enumerate(records):
            segment, ordinal = stored.place
            parent = i - 1 if stored.key.start else -1
            nodes.append(Node(parent, 0, stored.key.pages, (Piece(0, 0, segment, ordinal, 0, stored.key.pages),)))
        named = [segments[s] for s in dict.fromkeys(r.place[0] for r in records)]
        return Manifest(
            generation=generation,
            created=time.time() if created is None else created,
            reason="manual",
            shard=self.shard,
            shards=self.shards,
            page_tokens=PAGE,
            identity=self.identity,
            pools=POOLS,
            spaces=(PLAIN,),
            segments=tuple(SegmentRef(i.id, i.file_bytes, i.index_digest, i.records) for i in named),
            nodes=tuple(nodes),
            tokens=sum(n.pages for n in nodes) * PAGE,
            raw_bytes=sum(len(r.raw) for r in records),
            stored_bytes=sum(int(segments[r.place[0]].stored[r.place[1]]) for r in records),
        )

    def close(self) -> None:
        self.home.close()


def loads_whole(path: Path, manifest: Manifest, records: list[Stored]) -> bool:
    """Whether a shard holds every record of a generation, bit for bit."""
    for ref in manifest.segments:
        with_ref = shard.open_segment(REAL, path, ref.id, ref)
        try:
            for stored in records:
                if stored.place[0] == ref.id and with_ref.load(stored.place[1]).tobytes() != stored.raw:
                    return False
        finally:
            with_ref.close()
    return {r.place[0] for r in records} == {ref.id for ref in manifest.segments}


def error_of(future) -> BaseException | None:
    return future.exception(30)


def snapshot_of(path: Path) -> dict[str, bytes]:
    """Names and bytes of a directory's files."""
    return {p.name: p.read_bytes() for p in sorted(path.iterdir()) if p.is_file()} if path.exists() else {}


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
