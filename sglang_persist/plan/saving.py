"""What a snapshot must write, and the tree that a generation is then made of.

Nodes seen before are known by id (an id survives a split as the lower half, so the end stays and the start can only
move up). Of others the page hashes are looked up among the stored ones; runs of pages that are not stored become
records, packed along a path across node boundaries, so that many short nodes of one path share a record.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_persist.format.segment import KEY_BYTES, RecordKey, SegmentIndex
from sglang_persist.model import HASH_BYTES, Node, Piece, Space
from sglang_persist.plan.tree import Content, Known, TreeNode

#: Nodes of one step.
STEP_NODES = 256


@dataclass
class Source:
    """A run of pages of one live node, as part of a record."""

    node: int
    first: int
    pages: int


@dataclass
class RecordPlan:
    key: RecordKey
    sources: list[Source]


@dataclass
class SavePlan:
    page_tokens: int
    nodes: list[TreeNode]
    #: Of each node: how many of its pages are to be stored, from its start. Fewer than all where room ends within it.
    pages: list[int]
    #: Of each node: its space and what is stored already; None where the node vanished while it was planned.
    stored: list[tuple[Space, Sequence[Piece]] | None]
    records: list[RecordPlan]

    @property
    def new_pages(self) -> int:
        return sum(r.key.pages for r in self.records)


@dataclass
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
    nodes: Sequence[TreeNode],
    content: Callable[[int], Content | None],
    known: Mapping[int, Known],
    segments: Mapping[bytes, SegmentIndex],
    page_tokens: int,
    record_pages: int,
    pages: Sequence[int] | None = None,
) -> Generator[None, None, SavePlan]:
    """What a snapshot of `nodes` (parents first, oldest path first) has to write, and what it can refer to. In steps.

    `pages`: how many of each node's, from its start; all of them unless it is given.
    """
    whole = [(n.end - n.start) // page_tokens for n in nodes]
    plan = SavePlan(page_tokens, list(nodes), list(whole if pages is None else pages), [], [])
    run: _Run | None = None
    for low in range(0, len(nodes), STEP_NODES):
        unknown: dict[int, Content] = {}
        for i, node in enumerate(nodes[low : low + STEP_NODES], low):
            before, end = known.get(node.id), node.start + plan.pages[i] * page_tokens
            if node.parent >= 0 and plan.stored[node.parent] is None:
                plan.stored.append(None)
            elif before and before.start <= node.start and end <= before.end:
                skip = (node.start - before.start) // page_tokens
                if not skip and end == before.end:
                    plan.stored.append((before.space, before.pieces))
                else:
                    cut = [c for p in before.pieces if (c := p.cut(skip, skip + plan.pages[i]))]
                    plan.stored.append((before.space, cut))
            elif (found := content(node.id)) is None or not found.fits(node):
                plan.stored.append(None)
            else:
                unknown[i] = found
                plan.stored.append((found.space, []))
                yield None
        # What is stored is closed under prefixes: a node whose first page is nowhere is not looked for page by page.
        for (i, found), somewhere in zip(unknown.items(), _first_pages(unknown.values(), segments), strict=True):
            if somewhere:
                pieces = find_pieces(found, nodes[i].start, segments, page_tokens)
                plan.stored[i] = (found.space, [c for p in pieces if (c := p.cut(0, plan.pages[i]))])
            run = _pack(plan, run, i, nodes[i], found, plan.stored[i][1], record_pages)
            yield None
        yield None
    if run:
        plan.records.append(run.plan())
    if plan.records:
        # Whatever cuts a snapshot short (time, space) costs the coldest: records of the newest paths are written first.
        newest = list(range(len(nodes)))
        for i in reversed(range(len(nodes))):
            if (parent := nodes[i].parent) >= 0 and newest[parent] < newest[i]:
                newest[parent] = newest[i]
        yield None
        plan.records.sort(key=lambda r: min((-newest[source.node], source.node) for source in r.sources))
    return plan


def _pack(plan: SavePlan, run: _Run | None, i: int, node: TreeNode, content: Content, pieces: Sequence[Piece],
          record_pages: int) -> _Run | None:  # fmt: skip
    """Add the pages of a node that no piece covers to the open run, closing runs that are full or end elsewhere."""
    page, extra = plan.page_tokens, content.space.extra_tokens
    for low, high in _gaps(pieces, plan.pages[i]):
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
    return low == 0 and plan.nodes[i].parent == last.node and end == (parent.end - parent.start) // plan.page_tokens


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

    nodes: list[Node]
    spaces: list[Space]
    known: dict[int, Known]
    tokens: int
    left_out_tokens: int

    def used(self) -> set[tuple[bytes, int]]:
        """The records that the tree refers to."""
        return {(p.segment, p.record) for node in self.nodes for p in node.pieces}

    def move(self, places: Mapping[tuple[bytes, int], tuple[bytes, int]]) -> None:
        """Records were rewritten elsewhere: refer to them there."""

        def moved(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
            now = [(p, places.get((p.segment, p.record), (p.segment, p.record))) for p in pieces]
            return tuple(p._replace(segment=segment, record=record) for p, (segment, record) in now)

        self.nodes = [replace(n, pieces=moved(n.pieces)) for n in self.nodes]
        self.known = {i: k._replace(pieces=moved(k.pieces)) for i, k in self.known.items()}


def settle(plan: SavePlan, placed: Sequence[tuple[bytes, int, int]]) -> Generator[None, None, Settled]:
    """`placed`: segment, record and pages that were really written, for each record of the plan in order (fewer where
    the snapshot was cut short). A node that lacks a page is left out, and all below it: prefix-closed. In steps."""
    written: dict[int, list[Piece]] = {}
    for record, (segment, ordinal, pages) in zip(plan.records, placed, strict=False):
        first = 0
        for source in record.sources:
            count = min(source.pages, pages - first)
            if count > 0:
                piece = Piece(0, source.first, segment, ordinal, first, count)
                written.setdefault(source.node, []).append(piece)
            first += source.pages
    out = Settled([], [], {}, 0, 0)
    index: dict[int, int] = {}
    spaces: dict[Space, int] = {}
    for i, node in enumerate(plan.nodes):
        if i % STEP_NODES == 0:
            yield None
        entry = plan.stored[i]
        pages = plan.pages[i]
        end = node.start + pages * plan.page_tokens
        pieces = entry[1] if entry else ()
        if i in written:
            pieces = sorted([*pieces, *written[i]], key=lambda p: p.at)
        if sum(p.pages for p in pieces) != pages or (node.parent >= 0 and node.parent not in index):
            out.left_out_tokens += node.end - node.start
            continue
        pieces = tuple(pieces)
        index[i] = len(out.nodes)
        space = spaces.setdefault(entry[0], len(spaces))
        out.nodes.append(Node(index.get(node.parent, -1), space, pages, pieces))
        out.known[node.id] = Known(node.start, end, entry[0], pieces)
        out.tokens += end - node.start
        out.left_out_tokens += node.end - end
    out.spaces = list(spaces)
    return out
