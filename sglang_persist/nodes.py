"""Nodes of a stored tree and their pieces, column by column.

As objects, a tree of 10^5 nodes is half a million things for Python's garbage collector to visit, again and again, on
the thread that serves. Here they are a few arrays; a node becomes an object when someone looks at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from sglang_persist.model import Node, Piece

PIECE = np.dtype(
    [("pool", "u1"), ("at", "<u4"), ("segment", "<u4"), ("record", "<u4"), ("first", "<u4"), ("pages", "<u4")]
)


def prefix_sum(counts: np.ndarray) -> np.ndarray:
    """Where groups of so many rows begin, and, last, where they end."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def owners(bounds: np.ndarray) -> np.ndarray:
    """Of each row, the group that it is in: rows of group i are [bounds[i], bounds[i + 1])."""
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def taken(bounds: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows of these groups, one group after the other, and the bounds that they then have."""
    starts, counts = bounds[:-1][groups], np.diff(bounds)[groups]
    out = prefix_sum(counts)
    return np.arange(out[-1]) + np.repeat(starts - out[:-1], counts), out


def places(chosen: np.ndarray, total: int) -> np.ndarray:
    """Of each number below `total` its place among the chosen ones, or -1; and -1 for -1."""
    out = np.full(total + 1, -1, np.int64)
    out[chosen] = np.arange(len(chosen))
    return out


class Places(Sequence):
    """Records, (segment, ordinal) each: row i is an index into `segments`, shifted left by 32 bits, and the ordinal."""

    def __init__(self, segments: Sequence[bytes] = (), rows: np.ndarray | Sequence[int] = ()):
        self.segments, self.rows = list(segments), np.array(rows, np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[bytes, int]:
        row = int(self.rows[i])
        return self.segments[row >> 32], row & 0xFFFFFFFF


class Pieces:
    """The pieces of node i are `rows[bounds[i]:bounds[i + 1]]`; their column `segment` is an index into `segments`."""

    def __init__(self, segments: Sequence[bytes], rows: np.ndarray, bounds: np.ndarray):
        self.segments, self.rows, self.bounds = list(segments), rows, bounds

    @classmethod
    def of(cls, groups: Iterable[Sequence[Piece]]) -> Pieces:
        numbers: dict[bytes, int] = {}
        rows, counts = [], []
        for group in groups:
            counts.append(len(group))
            rows += [(p.pool, p.at, numbers.setdefault(p.segment, len(numbers)), *p[3:]) for p in group]
        return cls(list(numbers), np.array(rows, PIECE), prefix_sum(np.array(counts, np.int64)))

    @classmethod
    def join(cls, parts: Sequence[Pieces]) -> Pieces:
        """The nodes of one after those of the other."""
        numbers: dict[bytes, int] = {}
        rows, counts = [], []
        for part in parts:
            to = np.array([numbers.setdefault(s, len(numbers)) for s in part.segments], np.uint32)
            own = part.rows.copy()
            if len(own):
                own["segment"] = to[own["segment"]]
            rows.append(own)
            counts.append(np.diff(part.bounds))
        return cls(list(numbers), np.concatenate(rows), prefix_sum(np.concatenate(counts)))

    def __len__(self) -> int:
        """Of nodes."""
        return len(self.bounds) - 1

    def __getitem__(self, node: int) -> tuple[Piece, ...]:
        rows = self.rows[self.bounds[node] : self.bounds[node + 1]].tolist()
        return tuple(Piece(pool, at, self.segments[s], *rest) for pool, at, s, *rest in rows)

    def take(self, nodes: np.ndarray) -> Pieces:
        """Those of these nodes, in this order."""
        rows, bounds = taken(self.bounds, nodes)
        return Pieces(self.segments, self.rows[rows], bounds)

    @property
    def owner(self) -> np.ndarray:
        """Of each row, its node."""
        return owners(self.bounds)

    def _places(self) -> np.ndarray:
        """Of each row, segment and record as one number."""
        return self.rows["segment"].astype(np.int64) << 32 | self.rows["record"]

    def used(self) -> set[tuple[bytes, int]]:
        """The records that are referred to."""
        return {(self.segments[p >> 32], p & 0xFFFFFFFF) for p in np.unique(self._places()).tolist()}

    def records(self) -> Iterator[tuple[bytes, int]]:
        """Of each row, the record that it refers to."""
        return ((self.segments[s], r) for s, r in zip(self.rows["segment"].tolist(), self.rows["record"].tolist(),
                                                      strict=True))  # fmt: skip

    def moved(self, places: Mapping[tuple[bytes, int], tuple[bytes, int]]) -> Pieces:
        """Records were rewritten elsewhere: the same, referred to there."""
        found, of = np.unique(self._places(), return_inverse=True)
        numbers = {s: i for i, s in enumerate(self.segments)}
        to = []
        for place in found.tolist():
            old = self.segments[place >> 32], place & 0xFFFFFFFF
            segment, record = places.get(old, old)
            to.append((numbers.setdefault(segment, len(numbers)), record))
        rows = self.rows.copy()
        if to:
            rows["segment"], rows["record"] = np.array(to, np.int64)[of].T
        return Pieces(list(numbers), rows, self.bounds)

    def numbered(self, segments: Mapping[bytes, int]) -> np.ndarray:
        """The rows with these numbers for segments. KeyError where one is not among them."""
        used = np.unique(self.rows["segment"])
        to = np.zeros(len(self.segments), np.uint32)
        for number in used.tolist():
            to[number] = segments[self.segments[number]]
        rows = self.rows.copy()
        rows["segment"] = to[rows["segment"]]
        return rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pieces):
            return NotImplemented
        if not np.array_equal(self.bounds, other.bounds):
            return False
        numbers = {s: i for i, s in enumerate(dict.fromkeys((*self.segments, *other.segments)))}
        return np.array_equal(self.numbered(numbers), other.numbered(numbers))

    __hash__ = None


class NodeTable(Sequence):
    """Nodes, parents first: `parent` (index or -1), `space` (index), `pages`, and their pieces."""

    def __init__(self, parent: np.ndarray, space: np.ndarray, pages: np.ndarray, pieces: Pieces):
        self.parent, self.space, self.pages, self.pieces = parent, space, pages, pieces

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> NodeTable:
        if isinstance(nodes, NodeTable):
            return nodes
        return cls(
            np.array([n.parent for n in nodes], np.int32), np.array([n.space for n in nodes], np.uint32),
            np.array([n.pages for n in nodes], np.uint32), Pieces.of([n.pieces for n in nodes]),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.parent)

    def __getitem__(self, i: int) -> Node:
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        i %= len(self)
        return Node(int(self.parent[i]), int(self.space[i]), int(self.pages[i]), self.pieces[i])

    def __iter__(self) -> Iterator[Node]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, NodeTable)):
            return NotImplemented
        other = NodeTable.of(other)
        columns = ((self.parent, other.parent), (self.space, other.space), (self.pages, other.pages))
        return all(np.array_equal(a, b) for a, b in columns) and self.pieces == other.pieces

    __hash__ = None
