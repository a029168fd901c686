"""What a snapshot must write, and the tree that a generation is then made of.

Nodes seen before are known by id (an id survives a split as the lower half, so the end stays and the start can only
move up). Of others the page hashes are looked up among the stored ones; runs of pages that are not stored become
records, packed along a path across node boundaries, so that many short nodes of one path share a record.

A plan holds no token ids and no hashes, and next to no object a node: it may be of a large tree, and is made on the
thread that serves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_persist.format.segment import KEY_BYTES, SegmentIndex
from sglang_persist.model import HASH_BYTES, Piece, Space
from sglang_persist.nodes import PIECE, NodeTable, Pieces, Places, owners, places, prefix_sum, taken
from sglang_persist.plan.paths import highest_below
from sglang_persist.plan.tree import Content, KnownNodes, TreeNode, TreeNodes

#: Nodes of one step.
STEP_NODES = 256


class Records:
    """Records to write. The sources of record i, which is of `pool[i]`, are rows [bounds[i], bounds[i + 1]) of three
    columns: pages [first, first + pages) of a node each, one following the other on a path."""

    def __init__(self, node: np.ndarray, first: np.ndarray, pages: np.ndarray, bounds: np.ndarray, pool: np.ndarray):
        self.node, self.first, self.pages, self.bounds, self.pool = node, first, pages, bounds, pool

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        sources = prefix_sum(np.array([len(p.node) for p in parts]))
        bounds = [p.bounds[:-1] + low for p, low in zip(parts, sources.tolist(), strict=False)]
        return cls(
            *(np.concatenate([getattr(p, name) for p in parts]) for name in ("node", "first", "pages")),
            np.concatenate([*bounds, sources[-1:]]), np.concatenate([p.pool for p in parts]),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def sources(self, record: int) -> list[tuple[int, int, int]]:
        """(node, first, pages) of each."""
        rows = slice(self.bounds[record], self.bounds[record + 1])
        return list(zip(*(c[rows].tolist() for c in (self.node, self.first, self.pages)), strict=True))

    @property
    def owner(self) -> np.ndarray:
        """Of each source, its record."""
        return owners(self.bounds)

    def record_pages(self) -> np.ndarray:
        """Of each record, its pages."""
        return np.bincount(self.owner, self.pages, len(self)).astype(np.int64)

    def take(self, records: np.ndarray) -> Records:
        """These records, in this order."""
        rows, bounds = taken(self.bounds, records)
        return Records(self.node[rows], self.first[rows], self.pages[rows], bounds, self.pool[records])

    def cut(self, node: np.ndarray, pages: np.ndarray) -> Records:
        """With other numbers for nodes, -1 for those that fall away, and as far as nodes have so many `pages` (by new
        numbers). A record follows a path downwards, so what falls away is its end."""
        to = node[self.node]
        left = np.where(to >= 0, np.minimum(self.pages, pages[to] - self.first), 0) if len(pages) else self.pages * 0
        keep = left > 0
        counts = np.bincount(self.owner[keep], minlength=len(self))
        return Records(to[keep], self.first[keep], left[keep], prefix_sum(counts[counts > 0]), self.pool[counts > 0])


class Stored(Sequence):
    """Of each node of a plan: its space and what is stored of it; None where it vanished while it was planned.

    Those that are stored as they are known are rows of `known`; of some, pieces were found or cut, these are in `own`;
    of the others nothing is stored, and `new` has their spaces by number, or -1 where they vanished.
    """

    def __init__(self, known: KnownNodes, rows: np.ndarray):
        self.known, self.rows = known, rows
        self.own: dict[int, tuple[Space, Sequence[Piece]]] = {}
        self.new = np.full(len(rows), -1, np.int64)
        self.spaces: dict[Space, int] = {}

    @classmethod
    def of(cls, entries: Sequence[tuple[Space, Sequence[Piece]] | None]) -> Stored:
        out = cls(KnownNodes(), np.full(len(entries), -1, np.int64))
        for i, entry in enumerate(entries):
            if entry:
                out.put(i, *entry)
        return out

    def put(self, i: int, space: Space, pieces: Sequence[Piece]) -> None:
        self.new[i] = self.spaces.setdefault(space, len(self.spaces))
        if pieces:
            self.own[i] = (space, pieces)

    def vanished(self) -> np.ndarray:
        return (self.rows < 0) & (self.new < 0)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Space, Sequence[Piece]] | None:
        if not 0 <= i < len(self.rows):
            raise IndexError(i)
        if (row := int(self.rows[i])) >= 0:
            return self.known.spaces[self.known.space[row]], self.known.pieces[row]
        if i in self.own:
            return self.own[i]
        return (list(self.spaces)[self.new[i]], ()) if self.new[i] >= 0 else None


@dataclass
class SavePlan:
    page_tokens: int
    nodes: TreeNodes
    #: Of each node: how many of its pages are to be stored, from its start. Fewer than all where room ends within it.
    pages: np.ndarray
    stored: Stored
    records: Records


class _Packer:
    """Makes records of one pool of runs of pages, in the order in which these come."""

    def __init__(self, nodes: TreeNodes, page_tokens: int, record_pages: int, pool: int):
        self._nodes, self._page_tokens, self._most, self._pool = nodes, page_tokens, record_pages, pool
        self._sources, self._bounds = array("q"), array("q", [0])
        self._room = 0  # in the open record
        self._node = self._end = -1  # where its last source ends

    def add(self, i: int, low: int, high: int) -> None:
        """Pages [low, high) of node i."""
        while low < high:
            if not self._room or not self._continues(i, low):
                self._close()
                self._room = self._most
            count = min(high - low, self._room)
            self._sources.extend((i, low, count))
            self._room -= count
            low += count
            self._node, self._end = i, low

    def _continues(self, i: int, low: int) -> bool:
        """Whether page `low` of node `i` directly follows the last page on the same path."""
        if self._node == i:
            return self._end == low
        start, end = int(self._nodes.start[self._node]), int(self._nodes.end[self._node])
        below = int(self._nodes.parent[i]) == self._node
        return low == 0 and below and self._end == (end - start) // self._page_tokens

    def _close(self) -> None:
        if len(self._sources) // 3 > self._bounds[-1]:
            self._bounds.append(len(self._sources) // 3)

    def records(self) -> Records:
        self._close()
        columns = np.array(self._sources, np.int64).reshape(-1, 3).T.copy()
        bounds = np.array(self._bounds, np.int64)
        return Records(*columns, bounds, np.full(len(bounds) - 1, self._pool, np.uint8))


def plan_save(
    nodes: TreeNodes,
    content: Callable[[TreeNode], Content | None],
    known: KnownNodes,
    segments: Mapping[bytes, SegmentIndex],
    page_tokens: int,
    record_pages: Sequence[int],
    pages: np.ndarray | None = None,
    at_ends: Collection[int] = (),
) -> Generator[None, None, SavePlan]:
    """What a snapshot of `nodes` (parents first, oldest path first) has to write, and what it can refer to. In steps.

    `record_pages`: for each pool, how many pages a record may have. `pages`: how many of each node's, from its start;
    all of them unless it is given. `at_ends`: pools that have something of a node's last page alone.
    """
    whole = (nodes.end - nodes.start) // page_tokens
    pages = whole if pages is None else pages
    rows, end = known.rows(nodes.id), nodes.start + pages * page_tokens
    pools = range(len(record_pages))
    if len(known.id):
        rows[(known.start[rows] != nodes.start) | (known.end[rows] != end)] = -1
        for pool in pools[1:]:
            wanted = pages == whole if pool in at_ends else pages
            rows[holds(nodes, pool) & (known.pages(pool)[rows] < wanted)] = -1
    stored = Stored(known, rows)
    packers = [_Packer(nodes, page_tokens, record_pages[pool], pool) for pool in pools]
    others = np.flatnonzero(rows < 0).tolist()
    yield None
    for low in range(0, len(others), STEP_NODES):
        step: list[int] = []
        firsts: dict[int, bytes] = {}  # of those of which nothing is known
        for i in others[low : low + STEP_NODES]:
            node = nodes[i]
            before = known.get(node.id)
            if node.parent >= 0 and rows[node.parent] < 0 and stored.new[node.parent] < 0:
                continue  # what it stands on has vanished
            if before and before.start <= node.start and end[i] <= before.end:
                skip = (node.start - before.start) // page_tokens
                cut = [c for p in before.pieces if (c := p.cut(skip, skip + int(pages[i])))]
                stored.put(i, before.space, cut)
            elif (found := content(node)) is not None:
                stored.put(i, found.space, ())
                firsts[i] = found.hashes[:HASH_BYTES]
            else:
                continue
            step.append(i)
            yield None
        # What is stored is closed under prefixes: a node whose first page is nowhere is not looked for page by page.
        somewhere = dict(zip(firsts, _anywhere(firsts.values(), segments), strict=True))
        for i in step:
            if somewhere.get(i) and (found := content(nodes[i])) is not None:
                pieces = [
                    p for pool in pools for p in find_pieces(found, int(nodes.start[i]), segments, page_tokens, pool)
                ]
                pieces = [c for p in pieces if (c := p.cut(0, int(pages[i])))]
                stored.put(i, found.space, [p for p in pieces if p.pool not in at_ends or p.at + p.pages == whole[i]])
            there = stored.own[i][1] if i in stored.own else ()
            for pool in pools:
                own = [p for p in there if p.pool == pool]
                if pool in at_ends:
                    if nodes.states[i] >> pool & 1 and pages[i] == whole[i] and not own:
                        packers[pool].add(i, int(pages[i]) - 1, int(pages[i]))
                elif pool == 0 or nodes.states[i] >> pool & 1:
                    for first, last in _gaps(own, int(pages[i])):
                        packers[pool].add(i, first, last)
            yield None
    records = Records.join([packer.records() for packer in packers])
    yield None
    if len(records) > 1:
        # Whatever cuts a snapshot short (time, space) costs the coldest: records of the newest paths are written first.
        newest = np.array(highest_below(nodes.parent, range(len(nodes))))
        yield None
        top = records.node[records.bounds[:-1]]
        records = records.take(np.lexsort((records.pool, top, -newest[top])))
    return SavePlan(page_tokens, nodes, pages, stored, records)


def holds(nodes: TreeNodes, pool: int) -> np.ndarray:
    """Of each node, whether the live tree has what this pool holds of it."""
    return (nodes.states >> pool & 1).astype(bool)


def _gaps(pieces: Sequence[Piece], total: int) -> Iterable[tuple[int, int]]:
    at = 0
    for piece in pieces:
        if piece.at > at:
            yield at, piece.at
        at = piece.at + piece.pages
    if at < total:
        yield at, total


def _keys(hashes: bytes) -> np.ndarray:
    """What an index has of page hashes, [pages, 2] u64."""
    pages = len(hashes) // HASH_BYTES
    return np.frombuffer(hashes, np.uint8).reshape(pages, HASH_BYTES)[:, :KEY_BYTES].copy().view("<u8")


def _anywhere(hashes: Iterable[bytes], segments: Mapping[bytes, SegmentIndex]) -> list[bool]:
    """Of each page hash, whether a page like that is in any segment."""
    keys = _keys(b"".join(hashes))
    out = np.zeros(len(keys), bool)
    for index in segments.values():
        out |= index.find(keys) >= 0
    return out.tolist()


def find_pieces(
    content: Content, start: int, segments: Mapping[bytes, SegmentIndex], page_tokens: int, pool: int = 0
) -> list[Piece]:
    """What is stored of a node's pages in one pool, as pieces in order. A hash finds a page; its token ids and position
    decide."""
    pages = len(content.hashes) // HASH_BYTES
    keys = _keys(content.hashes)
    pieces: list[Piece] = []
    free = np.ones(pages, bool)
    for index in segments.values():
        if not free.any():
            break
        found = index.find(keys, pool)
        at = 0
        while at < pages:
            if found[at] < 0 or not free[at]:
                at += 1
                continue
            record, first = index.record_of(int(found[at]))
            length = 1
            limit = min(pages - at, int(index.pages[record]) - first)
            while length < limit and free[at + length] and found[at + length] == found[at] + length:
                length += 1
            if record not in index.bad and _same(content, start, at, length, index, record, first, page_tokens):
                pieces.append(Piece(pool, at, index.id, record, first, length))
                free[at : at + length] = False
            at += length
    return sorted(pieces, key=lambda p: p.at)


def _same(content: Content, start: int, at: int, pages: int, index: SegmentIndex, record: int, first: int,
          page_tokens: int) -> bool:  # fmt: skip
    extra = content.space.extra_tokens
    tokens = content.tokens[at * page_tokens : (at + pages) * page_tokens + extra]
    return (
        index.page_tokens == page_tokens
        and index.spaces[index.space[record]] == content.space
        and int(index.start[record]) + first * page_tokens == start + at * page_tokens
        and np.array_equal(tokens, index.page_tokens_of(record, first, pages))
    )


@dataclass
class Settled:
    """A plan after its records were written: the nodes that are whole, and what to remember of them."""

    nodes: NodeTable
    spaces: list[Space]
    known: KnownNodes
    tokens: int
    left_out_tokens: int

    def used(self) -> set[tuple[bytes, int]]:
        """The records that the tree refers to."""
        return self.nodes.pieces.used()

    def move(self, places: Mapping[tuple[bytes, int], tuple[bytes, int]]) -> None:
        """Records were rewritten elsewhere: refer to them there."""
        # What was adopted before refers to where they were, and stays as it is.
        n, k = self.nodes, self.known
        pieces = n.pieces.moved(places)
        self.nodes = NodeTable(n.parent, n.space, n.pages, pieces)
        of_known = pieces if k.pieces is n.pieces else k.pieces.moved(places)
        self.known = KnownNodes(k.id, k.start, k.end, k.space, k.spaces, of_known)


def settle(
    plan: SavePlan, written: Sequence[int] = (), placed: Places | None = None
) -> Generator[None, None, Settled]:  # fmt: skip
    """`written`: how many pages of each of the first records of the plan were really written (fewer records where the
    snapshot was cut short). `placed`: where those are of which any were. A node that lacks a page is left out, and all
    below it: prefix-closed. In steps."""
    stored, nodes, known = plan.stored, plan.nodes, plan.stored.known
    of_known = np.flatnonzero(stored.rows >= 0)
    groups = (
        (of_known, known.pieces.take(stored.rows[of_known])),
        (np.fromiter(stored.own, np.int64, len(stored.own)), Pieces.of([pieces for _, pieces in stored.own.values()])),
        _written(plan.records, np.array(written, np.int64), placed or Places()),
    )
    yield None
    every = Pieces.join([pieces for _, pieces in groups])
    owner = np.concatenate([owners for owners, _ in groups])[every.owner]
    yield None
    covers = every.rows["pages"] * (every.rows["pool"] == 0)
    filled = np.bincount(owner, covers, len(nodes)).astype(np.int64)
    whole = (filled == plan.pages) & ~stored.vanished()
    has_parent = nodes.parent >= 0
    while (lost := whole & has_parent & ~whole[nodes.parent]).any():
        whole &= ~lost
    yield None
    chosen = np.flatnonzero(whole)
    kept, pages = nodes.take(chosen), plan.pages[chosen]
    place = places(chosen, len(nodes))
    rows = np.flatnonzero(place[owner] >= 0)
    rows = rows[np.lexsort((every.rows["at"][rows], every.rows["pool"][rows], owner[rows]))]
    counts = np.bincount(place[owner[rows]], minlength=len(chosen))
    pieces = Pieces(every.segments, every.rows[rows], prefix_sum(counts))
    yield None
    names, space = _spaces(stored, chosen)
    end = kept.start + pages * plan.page_tokens
    tokens = int(pages.sum()) * plan.page_tokens
    table = NodeTable(kept.parent.astype(np.int32), space.astype(np.uint32), pages.astype(np.uint32), pieces)
    remembered = KnownNodes(kept.id, kept.start, end, space, names, pieces)
    return Settled(table, names, remembered, tokens, nodes.tokens - tokens)


def _written(records: Records, written: np.ndarray, placed: Places) -> tuple[np.ndarray, Pieces]:
    """The pieces that were written, each with its node."""
    sources = int(records.bounds[len(written)])
    owner, length = records.owner[:sources], records.pages[:sources]
    first = np.cumsum(length) - length
    first -= first[records.bounds[: len(written)]][owner] if sources else 0
    count = np.clip(written[owner] - first, 0, length)
    there = np.flatnonzero(count > 0)
    place = np.zeros(len(written), np.int64)
    place[written > 0] = placed.rows
    place = place[owner[there]]
    rows = np.zeros(len(there), PIECE)
    rows["pool"] = records.pool[owner[there]]
    rows["at"], rows["first"], rows["pages"] = records.first[:sources][there], first[there], count[there]
    rows["segment"], rows["record"] = place >> 32, place & 0xFFFFFFFF
    return records.node[:sources][there], Pieces(placed.segments, rows, np.arange(len(there) + 1))


def _spaces(stored: Stored, chosen: np.ndarray) -> tuple[list[Space], np.ndarray]:
    """The spaces of these nodes in the order in which they first appear, and the number of each node's."""
    known = stored.known
    numbers = {space: i for i, space in enumerate(known.spaces)}
    more = np.array([numbers.setdefault(space, len(numbers)) for space in stored.spaces], np.int64)
    rows, new = stored.rows[chosen], stored.new[chosen]
    space = np.zeros(len(chosen), np.int64)
    space[rows >= 0] = known.space[rows[rows >= 0]]
    space[rows < 0] = more[new[rows < 0]]
    used, firsts, inverse = np.unique(space, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    names = list(numbers)
    return [names[i] for i in used[order].tolist()], np.argsort(order)[inverse]
