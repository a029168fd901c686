"""The words of this package, as small frozen types. No behaviour beyond arithmetic on their own fields.

A *prefix* is a path of token ids from the root of the radix tree. A *page* is the engine's unit of KV (`page_tokens`
tokens, 1 by default), and the engine gives every page a chained hash that names the whole prefix that ends with it.
A *record* holds the KV of a run of consecutive pages of one path; a *segment* is an immutable file of records; a
*generation* is a tree whose nodes are made of *pieces* of records, written down in a *manifest* per *shard* (rank).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

HASH_BYTES = 32


@dataclass(frozen=True)
class Space:
    """What separates trees of equal tokens: never aliased, None is not the empty string."""

    extra_key: str | None = None
    cache_salt: str | None = None
    bigram: bool = False

    @property
    def extra_tokens(self) -> int:
        """A bigram path of n positions has n + 1 token ids."""
        return 1 if self.bigram else 0


@dataclass(frozen=True)
class Buffer:
    """One tensor of a KV pool: `row_bytes` bytes for each unit (slot or page), elements of type `dtype`."""

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    row_bytes: int


@dataclass(frozen=True)
class Pool:
    """Buffers that are addressed by the same slots. `unit` is "slot" (a row a token), "page" (a row a page) or "state"
    (a row for the end of a node: what the model has in place of KV after the whole path)."""

    name: str
    unit: str
    buffers: tuple[Buffer, ...]

    def rows(self, pages: int, page_tokens: int) -> int:
        return pages * page_tokens if self.unit == "slot" else pages

    @property
    def at_ends(self) -> bool:
        """Whether of a node only its last page can have something here."""
        return self.unit == "state"

    @cached_property
    def row_bytes(self) -> int:
        """Of a row of all buffers."""
        return sum(b.row_bytes for b in self.buffers)

    def bytes(self, pages: int, page_tokens: int) -> int:
        return self.rows(pages, page_tokens) * self.row_bytes


class Piece(NamedTuple):
    """`pages` pages of a record, beginning with its page `first`, that stand at page `at` of a node."""

    pool: int
    at: int
    segment: bytes
    record: int
    first: int
    pages: int

    def cut(self, start: int, stop: int) -> Piece | None:
        """The part of this piece that lies in pages [start, stop) of its node, placed relative to `start`."""
        low, high = max(self.at, start), min(self.at + self.pages, stop)
        if low >= high:
            return None
        return self._replace(at=low - start, first=self.first + low - self.at, pages=high - low)


@dataclass(frozen=True)
class Identity:
    """What stored KV belongs to. `model` and `cut` are compared, by digest; `soft` is only shown."""

    model: dict[str, Any]
    cut: dict[str, Any]
    soft: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rates:
    """What was measured on a store and a model: tokens a second that a restore loads and that the engine computes, and
    the seconds that a restore takes for each path beside its tokens. 0: not measured yet."""

    load: float = 0.0
    path_seconds: float = 0.0
    prefill: float = 0.0


@dataclass(frozen=True)
class Node:
    """A node of a stored tree. `parent` is an index into the same list, -1 for the root; parents come first."""

    parent: int
    space: int
    pages: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class SegmentRef:
    """How a manifest names a segment: a file of another content with the same name does not pass."""

    id: bytes
    bytes: int
    digest: bytes
    records: int


@dataclass(frozen=True)
class Manifest:
    """A generation of one shard. Nodes stand in restore order: oldest path first, so eviction order is kept."""

    generation: int
    created: float
    reason: str
    shard: str
    shards: tuple[str, ...]
    page_tokens: int
    identity: Identity
    pools: tuple[Pool, ...]
    spaces: tuple[Space, ...]
    segments: tuple[SegmentRef, ...]
    nodes: tuple[Node, ...]
    tokens: int
    raw_bytes: int
    stored_bytes: int
    left_out_tokens: int = 0
    rates: Rates = Rates()
    #: Of other replicas, by the group that their shards' names begin with, the newest generation that this tree was
    #: restored from.
    taken: Mapping[str, int] = field(default_factory=dict)
