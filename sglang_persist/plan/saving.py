"""What a snapshot must write, and the tree that a generation is then made of.

Nodes seen before are known by id (an id survives a split as the lower half, so the end stays and the start can only
move up). Of others the page hashes are looked up among the stored ones; runs of pages that are not stored become
records, packed along a path across node boundaries, so that many short nodes of one path share a record.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_persist.format.segment import KEY_BYTES, RecordKey, SegmentIndex
from sglang_persist.model import HASH_BYTES, Piece, Space
from sglang_persist.nodes import NodeTable, Pieces
from sglang_persist.plan.paths import highest_below
from sglang_persist.plan.tree import Content, KnownNodes, TreeNode, TreeNodes

#: Nodes of one step.
STEP_NODES = 256


@dataclass(slots=True)
class Source:
    """A run of pages of one live node, as part of a record."""

    node: int
    first: int
    pages: int


@dataclass(slots=True)
class RecordPlan:
    key: RecordKey
    sources: list[Source]


class Stored(Sequence):
    """Of each node of a plan: its space and what is stored of it; None where it vanished while it was planned.

    Those that are stored as they are known are rows of `known`; the others have an entry of their own.
    """

    def __init__(self, known: KnownNodes, rows: np.ndarray):
        self.known, self.rows = known, rows
        self.own: dict[int, tuple[Space, Sequence[Piece]] | None] = {}

    @classmethod
    def of(cls, entries: Sequence[tuple[Space, Sequence[Piece]] | None]) -> Stored:
        out = cls(KnownNodes(), np.full(len(entries), -1, np.int64))
        out.own = dict(enumerate(entries))
        return out

    def vanished(self, i: int) -> bool:
        return self.rows[i] < 0 and self.own[i] is None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Space, Sequence[Piece]] | None:
        if not 0 <= i < len(self.rows):
            raise IndexError(i)
        if (row := int(self.rows[i])) < 0:
            return self.own[i]
        return self.known.spaces[self.known.space[row]], self.known.pieces[row]


@dataclass
class SavePlan:
    page_tokens: int
    nodes: TreeNodes
    #: Of each node: how many of its pages are to be stored, from its start. Fewer than all where room ends within it.
    pages: np.ndarray
    stored: Stored
    records: list[RecordPlan]

    @property
    def new_pages(self) -> int:
        return sum(r.key.pages for r in self.records)


@dataclass(slots=True)
class _Run:
    """A record in the making."""

    space: Space
    start: int
    parent_hash: bytes
    sources: list[Source]
    tokens: list[np.ndarray]
    hashes: list[bytes]
    pages: int = 0

    def add(self, source: Source, tokens: np.ndarray, hashes: bytes) -> None:
        # Neighbouring bigram runs share their boundary token.
        self.tokens.append(tokens[self.space.extra_tokens :] if self.tokens else tokens)
        self.sources.append(source)
        self.hashes.append(hashes)
        self.pages += source.pages

    def plan(self) -> RecordPlan:
        key = RecordKey(0, self.space, self.start, self.parent_hash, np.concatenate(self.tokens), b"".join(self.hashes))
        return RecordPlan(key, self.sources)


def plan_save(
    nodes: TreeNodes,
    content: Callable[[int], Content | None],
    known: KnownNodes,
    segments: Mapping[bytes, SegmentIndex],
    page_tokens: int,
    record_pages: int,
    pages: np.ndarray | None = None,
) -> Generator[None, None, SavePlan]:
    """What a snapshot of `nodes` (parents first, oldest path first) has to write, and what it can refer to. In steps.

    `pages`: how many of each node's, from its start; all of them unless it is given.
    """
    pages = (nodes.end - nodes.start) // page_tokens if pages is None else pages
    rows, end = known.rows(nodes.id), nodes.start + pages * page_tokens
    if len(known.id):
        rows[(known.start[rows] != nodes.start) | (known.end[rows] != end)] = -1
    plan = SavePlan(page_tokens, nodes, pages, stored := Stored(known, rows), [])
    others = np.flatnonzero(rows < 0).tolist()
    yield None
    run: _Run | None = None
    for low in range(0, len(others), STEP_NODES):
        unknown: dict[int, Content] = {}
        for i in others[low : low + STEP_NODES]:
            node = nodes[i]
            before = known.get(node.id)
            if node.parent >= 0 and stored.vanished(node.parent):
                stored.own[i] = None
            elif before and before.start <= node.start and end[i] <= before.end:
                skip = (node.start - before.start) // page_tokens
                cut = [c for p in before.pieces if (c := p.cut(skip, skip + int(pages[i])))]
                stored.own[i] = (before.space, cut)
            elif (found := content(node.id)) is None or not found.fits(node):
                stored.own[i] = None
            else:
                unknown[i] = found
                stored.own[i] = (found.space, [])
            yield None
        # What is stored is closed under prefixes: a node whose first page is nowhere is not looked for page by page.
        for (i, found), somewhere in zip(unknown.items(), _first_pages(unknown.values(), segments), strict=True):
            if somewhere:
                pieces = find_pieces(found, int(nodes.start[i]), segments, page_tokens)
                stored.own[i] = (found.space, [c for p in pieces if (c := p.cut(0, int(pages[i])))])
            run = _pack(plan, run, i, nodes[i], found, stored.own[i][1], record_pages)
            yield None
    if run:
        plan.records.append(run.plan())
    if plan.records:
        # Whatever cuts a snapshot short (time, space) costs the coldest: records of the newest paths are written first.
        newest = highest_below(nodes.parent, range(len(nodes)))
        yield None
        plan.records.sort(key=lambda r: min((-newest[source.node], source.node) for source in r.sources))
    return plan


def _pack(plan: SavePlan, run: _Run | None, i: int, node: TreeNode, content: Content, pieces: Sequence[Piece],
          record_pages: int) -> _Run | None:  # fmt: skip
    """Add the pages of a node that no piece covers to the open run, closing runs that are full or end elsewhere."""
    page, extra = plan.page_tokens, content.space.extra_tokens
    for low, high in _gaps(pieces, int(plan.pages[i])):
        while low < high:
            if run and not (run.pages < record_pages and _continues(plan, run, i, low)):
                plan.records.append(run.plan())
                run = None
            if run is None:
                parent = content.hashes[(low - 1) * HASH_BYTES : low * HASH_BYTES] if low else content.parent_hash
                run = _Run(content.space, node.start + low * page, parent, [], [], [])
            count = min(high - low, record_pages - run.pages)
            tokens = content.tokens[low * page : (low + count) * page + extra]
            run.add(Source(i, low, count), tokens, content.hashes[low * HASH_BYTES : (low + count) * HASH_BYTES])
            low += count
    return run


def _gaps(pieces: Sequence[Piece], total: int) -> Iterable[tuple[int, int]]:
    at = 0
    for piece in pieces:
        if piece.at > at:
            yield at, piece.at
        at = piece.at + piece.pages
    if at < total:
        yield at, total


def _continues(plan: SavePlan, run: _Run, i: int, low: int) -> bool:
    """Whether page `low` of node `i` directly follows the run's last page on the same path."""
    last = run.sources[-1]
    end = last.first + last.pages
    if last.node == i:
        return end == low
    parent = plan.nodes[last.node]
    return low == 0 and plan.nodes.parent[i] == last.node and end == (parent.end - parent.start) // plan.page_tokens


def _keys(hashes: bytes) -> np.ndarray:
    """What an index has of page hashes, [pages, 2] u64."""
    pages = len(hashes) // HASH_BYTES
    return np.frombuffer(hashes, np.uint8).reshape(pages, HASH_BYTES)[:, :KEY_BYTES].copy().view("<u8")


def _first_pages(contents: Iterable[Content], segments: Mapping[bytes, SegmentIndex]) -> np.ndarray:
    """Of each node, whether a page like its first one is in any segment."""
    keys = _keys(b"".join(c.hashes[:HASH_BYTES] for c in contents))
    out = np.zeros(len(keys), bool)
    for index in segments.values():
        out |= index.find(keys) >= 0
    return out


def find_pieces(content: Content, start: int, segments: Mapping[bytes, SegmentIndex], page_tokens: int) -> list[Piece]:
    """The stored pages of a node, as pieces in order. A hash finds a page; its token ids and position decide."""
    pages = len(content.hashes) // HASH_BYTES
    keys = _keys(content.hashes)
    pieces: list[Piece] = []
    free = np.ones(pages, bool)
    for index in segments.values():
        if not free.any():
            break
        found = index.find(keys)
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
                pieces.append(Piece(0, at, index.id, record, first, length))
                free[at : at + length] = False
            at += length
    return sorted(pieces, key=lambda p: p.at)


def _same(content: Content, start: int, at: int, pages: int, index: SegmentIndex, record: int, first: int,
          page_tokens: int) -> bool:  # fmt: skip
    extra = content.space.extra_tokens
    tokens = content.tokens[at * page_tokens : (at + pages) * page_tokens + extra]
    return (
        index.page_tokens == page_tokens
        and index.pool[record] == 0
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


def settle(plan: SavePlan, placed: Sequence[tuple[bytes, int, int]]) -> Generator[None, None, Settled]:
    """`placed`: segment, record and pages that were really written, for each record of the plan in order (fewer where
    the snapshot was cut short). A node that lacks a page is left out, and all below it: prefix-closed. In steps."""
    stored, nodes, known = plan.stored, plan.nodes, plan.stored.known
    changed = {i: list(entry[1]) if entry else [] for i, entry in stored.own.items()}
    for record, (segment, ordinal, pages) in zip(plan.records, placed, strict=False):
        first = 0
        for source in record.sources:
            count = min(source.pages, pages - first)
            if count > 0:
                piece = Piece(0, source.first, segment, ordinal, first, count)
                changed[source.node].append(piece)
            first += source.pages
    yield None
    own = Pieces.of([sorted(pieces, key=lambda p: p.at) for pieces in changed.values()])
    # Of every node its row in what is known, or, behind that, in what is of its own.
    rows = stored.rows.copy()
    rows[list(changed)] = len(known.id) + np.arange(len(changed))
    yield None
    every = Pieces.join([known.pieces, own])
    whole = every.pages()[rows] == plan.pages
    whole[[i for i, entry in stored.own.items() if entry is None]] = False
    has_parent = nodes.parent >= 0
    while (lost := whole & has_parent & ~whole[nodes.parent]).any():
        whole &= ~lost
    yield None
    chosen = np.flatnonzero(whole)
    kept, pages = nodes.take(chosen), plan.pages[chosen]
    spaces = {space: i for i, space in enumerate(known.spaces)}
    of_own = [spaces.setdefault(entry[0], len(spaces)) if entry else 0 for entry in stored.own.values()]
    space = np.concatenate([known.space, np.array(of_own, np.int64)])[rows[chosen]]
    numbers, firsts, space = np.unique(space, return_index=True, return_inverse=True)
    order = np.argsort(firsts)  # spaces in the order in which they first appear
    names, space = list(spaces), np.argsort(order)[space]
    names = [names[i] for i in numbers[order]]
    yield None
    pieces = every.take(rows[chosen])
    end = kept.start + pages * plan.page_tokens
    tokens = int(pages.sum()) * plan.page_tokens
    table = NodeTable(kept.parent.astype(np.int32), space.astype(np.uint32), pages.astype(np.uint32), pieces)
    remembered = KnownNodes(kept.id, kept.start, end, space, names, pieces)
    return Settled(table, names, remembered, tokens, nodes.tokens - tokens)
