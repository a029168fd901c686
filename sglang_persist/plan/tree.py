"""What a plan is made from: the nodes of the live tree, and what is known to be stored of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglang_persist.model import HASH_BYTES, Piece, Space
from sglang_persist.nodes import Pieces, places

NO_PARENT = bytes(HASH_BYTES)


class TreeNode(NamedTuple):
    """A node of the live tree: positions [start, end) of its path; `parent` is an index into the same list or -1."""

    id: int
    parent: int
    start: int
    end: int


class TreeNodes(Sequence):
    """`TreeNode`s, parents first, column by column (int64).

    `states`: of each node, which pools beside the first hold something of it, a bit each (u8).
    """

    def __init__(
        self, id: np.ndarray, parent: np.ndarray, start: np.ndarray, end: np.ndarray, states: np.ndarray | None = None
    ):
        self.id, self.parent, self.start, self.end = id, parent, start, end
        self.states = np.zeros(len(id), np.uint8) if states is None else states

    @classmethod
    def of(cls, nodes: Iterable[TreeNode]) -> TreeNodes:
        return cls(*np.array(list(nodes), np.int64).reshape(-1, 4).T)

    def take(self, chosen: np.ndarray) -> TreeNodes:
        """These nodes (rising indexes); a parent that is not among them becomes none."""
        parent = places(chosen, len(self))[self.parent[chosen]]
        return TreeNodes(self.id[chosen], parent, self.start[chosen], self.end[chosen], self.states[chosen])

    @property
    def tokens(self) -> int:
        return int((self.end - self.start).sum())

    def __len__(self) -> int:
        return len(self.id)

    def __getitem__(self, i: int) -> TreeNode:
        return TreeNode(int(self.id[i]), int(self.parent[i]), int(self.start[i]), int(self.end[i]))

    def __iter__(self) -> Iterator[TreeNode]:
        return map(TreeNode, *(c.tolist() for c in (self.id, self.parent, self.start, self.end)))


@dataclass(frozen=True)
class Content:
    """What identifies a live node's KV. `tokens` has one id more than positions in a bigram space."""

    space: Space
    tokens: np.ndarray
    hashes: bytes
    parent_hash: bytes

    def fits(self, node: TreeNode) -> bool:
        """Whether it is of this node, not of what was left of it when it was split since."""
        return len(self.tokens) == node.end - node.start + self.space.extra_tokens


class Known(NamedTuple):
    """A node whose KV the store holds, by positions and pieces."""

    start: int
    end: int
    space: Space
    pieces: tuple[Piece, ...]


class KnownNodes:
    """`Known` by the live node's id: most of them in columns, and those that were added one by one."""

    def __init__(
        self, id: np.ndarray | None = None, start=None, end=None, space=None, spaces: Sequence[Space] = (),
        pieces: Pieces | None = None,
    ):  # fmt: skip
        none = np.empty(0, np.int64)
        self.id, self.start, self.end, self.space = (none if c is None else c for c in (id, start, end, space))
        self.spaces, self.pieces = list(spaces), Pieces.of([]) if pieces is None else pieces
        self._order = np.argsort(self.id)
        self._more: dict[int, Known] = {}

    @classmethod
    def of(cls, known: dict[int, Known]) -> KnownNodes:
        spaces: dict[Space, int] = {}
        values = list(known.values())
        return cls(
            np.fromiter(known, np.int64, len(known)), np.array([k.start for k in values], np.int64),
            np.array([k.end for k in values], np.int64),
            np.array([spaces.setdefault(k.space, len(spaces)) for k in values], np.int64), list(spaces),
            Pieces.of([k.pieces for k in values]),
        )  # fmt: skip

    def _find(self, ids: np.ndarray) -> np.ndarray:
        if not len(self.id):
            return np.full(len(ids), -1, np.int64)
        at = np.minimum(np.searchsorted(self.id, ids, sorter=self._order), len(self.id) - 1)
        return np.where(self.id[self._order[at]] == ids, self._order[at], -1)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Of each id, its row in the columns, or -1: not known, or added since."""
        found = self._find(ids)
        if self._more:
            found[np.isin(ids, np.fromiter(self._more, np.int64, len(self._more)))] = -1
        return found

    def pages(self, pool: int) -> np.ndarray:
        """Of each row, how many of its pages are stored in a pool."""
        of_pool = self.pieces.rows["pool"] == pool
        return np.bincount(self.pieces.owner[of_pool], self.pieces.rows["pages"][of_pool], len(self.id))

    def row(self, i: int) -> Known:
        return Known(int(self.start[i]), int(self.end[i]), self.spaces[self.space[i]], self.pieces[i])

    def get(self, node_id: int) -> Known | None:
        if found := self._more.get(node_id):
            return found
        i = int(self._find(np.array([node_id]))[0])
        return None if i < 0 else self.row(i)

    def __setitem__(self, node_id: int, known: Known) -> None:
        self._more[node_id] = known

    def __len__(self) -> int:
        return len(self.id) + len(self._more)

    def in_columns(self) -> KnownNodes:
        """The same, with nothing left that was added one by one."""
        if not self._more:
            return self
        ids = self.id[~np.isin(self.id, np.fromiter(self._more, np.int64, len(self._more)))]
        old, new = self.take(self.rows(ids)), KnownNodes.of(self._more)
        spaces = {space: i for i, space in enumerate(old.spaces)}
        to = np.array([spaces.setdefault(space, len(spaces)) for space in new.spaces], np.int64)
        return KnownNodes(
            np.concatenate([old.id, new.id]), np.concatenate([old.start, new.start]),
            np.concatenate([old.end, new.end]), np.concatenate([old.space, to[new.space]]),
            list(spaces), Pieces.join([old.pieces, new.pieces]),
        )  # fmt: skip

    def take(self, rows: np.ndarray) -> KnownNodes:
        return KnownNodes(
            self.id[rows], self.start[rows], self.end[rows], self.space[rows], self.spaces, self.pieces.take(rows)
        )

    def without(self, segments: Collection[bytes]) -> KnownNodes:
        """Those that have no piece in these segments."""
        return self._only(lambda segment, _record: segment not in segments)

    def within(self, used: Collection[tuple[bytes, int]]) -> KnownNodes:
        """Those all of whose records are among these."""
        return self._only(lambda segment, record: (segment, record) in used)

    def _only(self, good) -> KnownNodes:
        whole = self.in_columns()
        lost = np.array([not good(*place) for place in whole.pieces.records()], bool)
        keep = np.ones(len(whole), bool)
        keep[whole.pieces.owner[lost]] = False
        return whole.take(np.flatnonzero(keep))
