"""Decisions, without effects: what a snapshot must write, what a restore can take, what a store no longer needs.

Save.  Nodes seen before are known by id (an id survives a split as the lower half, so the end stays and the start can
only move up). Of others the page hashes are looked up among the stored ones; runs of pages that are not stored become
records, packed along a path across node boundaries, so that many short nodes of one path share a record.

Restore.  Newest paths first until the capacity is used up, parents before children; executed oldest first, because
insertion order is what the engine's eviction order will be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from sglang_persist.format.segment import KEY_BYTES, RecordKey, SegmentIndex
from sglang_persist.model import HASH_BYTES, Manifest, Node, Piece, Space

NO_PARENT = bytes(HASH_BYTES)


class TreeNode(NamedTuple):
    """A node of the live tree: positions [start, end) of its path; `parent` is an index into the same list or -1."""

    id: int
    parent: int
    start: int
    end: int


@dataclass(frozen=True)
class Content:
    """What identifies a live node's KV. `tokens` has one id more than positions in a bigram space."""

    space: Space
    tokens: np.ndarray
    hashes: bytes
    parent_hash: bytes


class Known(NamedTuple):
    """A node whose KV the store holds, by positions and pieces."""

    start: int
    end: int
    space: Space
    pieces: tuple[Piece, ...]


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
    stored: list[tuple[Space, list[Piece]] | None]
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
) -> SavePlan:
    """What a snapshot of `nodes` (parents first, oldest path first) has to write, and what it can refer to.

    `pages`: how many of each node's, from its start; all of them unless it is given.
    """
    whole = [(n.end - n.start) // page_tokens for n in nodes]
    plan = SavePlan(page_tokens, list(nodes), list(whole if pages is None else pages), [], [])
    run: _Run | None = None
    for i, node in enumerate(nodes):
        before, end = known.get(node.id), node.start + plan.pages[i] * page_tokens
        if node.parent >= 0 and plan.stored[node.parent] is None:
            plan.stored.append(None)
        elif before and before.start <= node.start and end <= before.end:
            skip = (node.start - before.start) // page_tokens
            cut = [c for p in before.pieces if (c := p.cut(skip, skip + plan.pages[i]))]
            plan.stored.append((before.space, cut))
        elif (found := content(node.id)) is None:
            plan.stored.append(None)
        else:
            pieces = find_pieces(found, node.start, segments, page_tokens)
            pieces = [c for p in pieces if (c := p.cut(0, plan.pages[i]))]
            plan.stored.append((found.space, pieces))
            run = _pack(plan, run, i, node, found, pieces, record_pages)
    if run:
        plan.records.append(run.plan())
    # Whatever cuts a snapshot short (time, space) costs the coldest: records of the newest paths are written first.
    newest_first = choose_paths([n.parent for n in plan.nodes], [0] * len(plan.nodes), 0).nodes
    order = {node: place for place, node in enumerate(newest_first)}
    plan.records.sort(key=lambda r: min(order[source.node] for source in r.sources))
    return plan


def restrict(plan: SavePlan, sizes: Sequence[int], budget: float, of_new: bool = False) -> SavePlan:
    """The newest paths of a plan whose nodes' `sizes` fit into `budget`: nodes and records of the others fall away.

    Of the node in which the room ends, the first pages are kept. `of_new`: sizes are those of new pages alone.
    """
    choice = choose_paths([n.parent for n in plan.nodes], sizes, budget, partial=True)
    pages = {i: plan.pages[i] for i in choice.nodes}
    for i, share in choice.cut.items():
        if count := _cut(plan, i, share, of_new):
            pages[i] = count
    index = {old: new for new, old in enumerate(sorted(pages))}
    out = SavePlan(
        plan.page_tokens,
        [plan.nodes[i]._replace(parent=index.get(plan.nodes[i].parent, -1)) for i in index],
        [pages[i] for i in index],
        [_first_pieces(plan.stored[i], pages[i]) for i in index],
        [],
    )
    for record in plan.records:
        # A record follows a path downwards, so what falls away is its end.
        sources = [
            Source(index[s.node], s.first, n)
            for s in record.sources
            if s.node in index and (n := min(s.pages, pages[s.node] - s.first)) > 0
        ]
        if sources:
            count = sum(s.pages for s in sources)
            out.records.append(RecordPlan(record.key.first_pages(count, plan.page_tokens), sources))
    return out


def _cut(plan: SavePlan, i: int, share: float, of_new: bool) -> int:
    """How many pages of a node to keep that has room for a share of its bytes."""
    stored = 0
    for piece in plan.stored[i][1] if plan.stored[i] else ():
        if piece.at != stored:
            break
        stored += piece.pages
    if of_new:
        return stored + int(share * (plan.pages[i] - stored))
    count = int(share * plan.pages[i])
    # Sizes are estimates until they are written: what is stored stays where it was cut, not a page more or less.
    return stored if abs(count - stored) * 10 <= stored else count


def _first_pieces(stored: tuple[Space, list[Piece]] | None, pages: int) -> tuple[Space, list[Piece]] | None:
    return stored and (stored[0], [c for p in stored[1] if (c := p.cut(0, pages))])


def stored_sizes(pieces: Sequence[Sequence[Piece]], segments: Mapping[bytes, SegmentIndex]) -> list[int]:
    """Bytes on disk that these nodes' pieces take: each record as a whole, shared among the pieces that are of it."""
    used = Counter()
    for of_node in pieces:
        for p in of_node:
            used[p.segment, p.record] += p.pages
    # What an index takes is shared as well.
    whole = {s: segments[s].file_bytes / max(1, int(segments[s].stored.sum())) for s in {s for s, _ in used}}
    a_page = {(s, r): int(segments[s].stored[r]) * whole[s] / pages for (s, r), pages in used.items()}
    return [round(sum(a_page[p.segment, p.record] * p.pages for p in of_node)) for of_node in pieces]


def fit(plan: SavePlan, segments: Mapping[bytes, SegmentIndex], page_bytes: float, budget: float) -> Iterator[SavePlan]:
    """The newest paths of a plan that fit into `budget` bytes on disk, what is to be written included. Step by step:
    a record stays for as long as any page of it is used, so without the others each of its pages takes more."""
    before = None
    while before != (before := plan.pages):
        stored = stored_sizes([entry[1] if entry else () for entry in plan.stored], segments)
        sizes = [a + b for a, b in zip(stored, new_sizes(plan, page_bytes), strict=True)]
        plan = restrict(plan, sizes, budget)
        yield plan


def new_sizes(plan: SavePlan, page_bytes: float) -> list[int]:
    """Bytes that the pages of each node will take which are not stored yet."""
    pages = [0] * len(plan.nodes)
    for record in plan.records:
        for source in record.sources:
            pages[source.node] += source.pages
    return [round(n * page_bytes) for n in pages]


def _pack(plan: SavePlan, run: _Run | None, i: int, node: TreeNode, content: Content, pieces: list[Piece],
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


def _gaps(pieces: list[Piece], total: int) -> Iterable[tuple[int, int]]:
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


def find_pieces(content: Content, start: int, segments: Mapping[bytes, SegmentIndex], page_tokens: int) -> list[Piece]:
    """The stored pages of a node, as pieces in order. A hash finds a page; its token ids and position decide."""
    pages = len(content.hashes) // HASH_BYTES
    keys = np.frombuffer(content.hashes, np.uint8).reshape(pages, HASH_BYTES)[:, :KEY_BYTES].copy().view("<u8")
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


def newest_part(
    m: Manifest, segments: Mapping[bytes, SegmentIndex], known: Mapping[int, Known], budget: float
) -> Settled:
    """The newest paths of a stored tree that fit into `budget` bytes on disk, and what of `known` they still hold."""
    nodes, sound, before = list(m.nodes), resolve(m, segments).sound, None
    while before != (before := [n.pages for n in nodes]):  # step by step, as in `fit`
        sizes = stored_sizes([n.pieces if good else () for n, good in zip(nodes, sound, strict=True)], segments)
        choice = choose_paths([n.parent for n in nodes], sizes, budget, usable=sound, partial=True)
        pages = {i: nodes[i].pages for i in choice.nodes}
        pages.update({i: n for i, share in choice.cut.items() if (n := int(share * nodes[i].pages))})
        index = {old: new for new, old in enumerate(sorted(pages))}
        nodes = [
            Node(
                index.get(nodes[i].parent, -1), nodes[i].space, pages[i],
                tuple(c for p in nodes[i].pieces if (c := p.cut(0, pages[i]))),
            )
            for i in index
        ]  # fmt: skip
        sound = [True] * len(nodes)
    tokens = sum(n.pages for n in nodes) * m.page_tokens
    out = Settled(nodes, list(m.spaces), {}, tokens, m.left_out_tokens + m.tokens - tokens)
    used = out.used()
    out.known = {i: k for i, k in known.items() if all((p.segment, p.record) in used for p in k.pieces)}
    return out


def settle(plan: SavePlan, placed: Sequence[tuple[bytes, int, int]]) -> Settled:
    """`placed`: segment, record and pages that were really written, for each record of the plan in order (fewer where
    the snapshot was cut short). A node that lacks a page is left out, and all below it: prefix-closed."""
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
        entry = plan.stored[i]
        pages = plan.pages[i]
        end = node.start + pages * plan.page_tokens
        pieces = sorted([*entry[1], *written.get(i, ())], key=lambda p: p.at) if entry else []
        if sum(p.pages for p in pieces) != pages or (node.parent >= 0 and node.parent not in index):
            out.left_out_tokens += node.end - node.start
            continue
        index[i] = len(out.nodes)
        space = spaces.setdefault(entry[0], len(spaces))
        out.nodes.append(Node(index.get(node.parent, -1), space, pages, tuple(pieces)))
        out.known[node.id] = Known(node.start, end, entry[0], tuple(pieces))
        out.tokens += end - node.start
        out.left_out_tokens += node.end - end
    out.spaces = list(spaces)
    return out


# ---------------------------------------------------------------------------------------------------- restore


@dataclass
class Resolved:
    """A stored tree whose pieces were checked against the segments that are there."""

    manifest: Manifest
    start: list[int]  # first position of each node
    refused: Counter = field(default_factory=Counter)  # nodes, by reason
    sound: list[bool] = field(default_factory=list)


def resolve(m: Manifest, segments: Mapping[bytes, SegmentIndex]) -> Resolved:
    """Check that every node's pieces are records of its own path: space, position and the hash chain all agree.

    A node that fails, or stands below one that does, is refused; its siblings are not concerned.
    """
    out = Resolved(m, [], Counter(), [])
    last_key: list[bytes] = []
    for node in m.nodes:
        parent = node.parent
        start = 0 if parent < 0 else out.start[parent] + m.nodes[parent].pages * m.page_tokens
        out.start.append(start)
        key = NO_PARENT[:KEY_BYTES] if parent < 0 else last_key[parent]
        if parent >= 0 and not out.sound[parent]:
            reason = "parent_refused"
        else:
            reason, key = _chain(m, node, start, key, segments)
        last_key.append(key)
        out.sound.append(reason is None)
        if reason:
            out.refused[reason] += 1
    return out


def _chain(m: Manifest, node: Node, start: int, key: bytes, segments: Mapping[bytes, SegmentIndex]):
    """(None, hash key of the node's last page), or (reason, b"").

    Pieces of pool 0 cover the node, so their page hashes are the node's; those of other pools must have the same.
    """
    keys: list[np.ndarray] = []
    for piece in node.pieces:
        index, record, first = segments.get(piece.segment), piece.record, piece.first
        if index is None or record >= index.records or first + piece.pages > index.pages[record] or record in index.bad:
            return "damaged", b""
        if (
            index.page_tokens != m.page_tokens
            or index.pools != m.pools
            or index.pool[record] != piece.pool
            or index.spaces[index.space[record]] != m.spaces[node.space]
            or int(index.start[record]) + first * m.page_tokens != start + piece.at * m.page_tokens
        ):
            return "damaged", b""
        page = int(index.first_page[record]) + first
        own = index.page_hash[page : page + piece.pages]
        if piece.pool != 0:
            if not np.array_equal(own, np.concatenate(keys)[piece.at : piece.at + piece.pages]):
                return "damaged", b""
            continue
        before = index.page_hash[page - 1].tobytes() if first else index.parent[record, :KEY_BYTES].tobytes()
        if before != key:
            return "damaged", b""
        keys.append(own)
        key = own[-1].tobytes()
    return None, key


def node_tokens(m: Manifest, node: Node, segments: Mapping[bytes, SegmentIndex]) -> np.ndarray:
    """A node's token ids (one more than positions in a bigram space)."""
    extra = m.spaces[node.space].extra_tokens
    runs = [segments[p.segment].page_tokens_of(p.record, p.first, p.pages) for p in node.pieces if p.pool == 0]
    return np.concatenate([runs[0], *(r[extra:] for r in runs[1:])])


class Use(NamedTuple):
    """Pages [first, first + pages) of a record belong to page `at` and following of node `node`."""

    node: int
    at: int
    first: int
    pages: int


@dataclass
class LoadPlan:
    nodes: list[int]  # in the order of insertion: oldest path first; one that comes again is only used again
    chosen: list[int]  # in the order of choice: newest path first, parents before children
    pages: int
    records: list[tuple[bytes, int, list[Use]]]  # in the order of reading: newest path first
    refused: Counter


def plan_restore(
    resolved: Resolved, capacity_pages: int, min_tokens: int = 0, ends: Sequence[int] | None = None
) -> LoadPlan:
    """The newest paths that fit into `capacity_pages`, closed under parents; none shorter than `min_tokens`.

    `ends`: where paths end, oldest first, if not at the leaves in their order.
    """
    m, refused = resolved.manifest, Counter(resolved.refused)
    sizes, parents = [n.pages for n in m.nodes], [n.parent for n in m.nodes]
    least = -(-min_tokens // m.page_tokens)
    wanted, short, _ = choose_paths(parents, sizes, capacity_pages, least, resolved.sound, ends)
    chosen = set(wanted)
    for i in range(len(m.nodes)):
        if resolved.sound[i] and i not in chosen:
            refused["too_short" if i in short else "no_capacity"] += 1
    records: dict[tuple[bytes, int], list[Use]] = {}
    for i in wanted:
        for p in m.nodes[i].pieces:
            records.setdefault((p.segment, p.record), []).append(Use(i, p.at, p.first, p.pages))
    pages = sum(sizes[i] for i in wanted)
    order = sorted(wanted) if ends is None else _use_order(parents, ends, chosen)
    return LoadPlan(order, wanted, pages, [(*k, u) for k, u in records.items()], refused)


def _use_order(parents: Sequence[int], ends: Iterable[int], chosen: set[int]) -> list[int]:
    """The chosen nodes, each after its parent, in the order in which these paths are used; an end above which others
    have gone already comes again."""
    out: list[int] = []
    seen: set[int] = set()
    for end in ends:
        path, at = [], end
        while at >= 0 and at not in seen:
            path.append(at)
            at = parents[at]
        seen.update(path)
        out += [i for i in reversed(path) if i in chosen] if path else [end] if end in chosen else []
    return out


class Choice(NamedTuple):
    """`nodes` in the order of choice, parents first. `short`: nodes on paths that are too short alone. `cut`: nodes in
    which the budget ended, and the share of them that it had room for."""

    nodes: list[int]
    short: set[int]
    cut: dict[int, float]


def choose_paths(
    parents: Sequence[int], sizes: Sequence[int], budget: float, least: int = 0, usable: Sequence[bool] | None = None,
    ends: Sequence[int] | None = None, partial: bool = False,
) -> Choice:  # fmt: skip
    """The newest paths within `budget` (the unit of `sizes`), none of them shorter than `least`.

    Paths end at `ends`, oldest first: at the leaves in their order, if not given. A path that does not fit is taken as
    far as it does: to its last node that fits, or, with `partial`, into the next one.
    """
    depth: list[int] = []
    for parent, size in zip(parents, sizes, strict=True):
        depth.append(size + (depth[parent] if parent >= 0 else 0))
    if ends is None:
        inner = set(parents)
        ends = [i for i in range(len(parents)) if i not in inner]
    wanted: list[int] = []
    chosen: set[int] = set()
    short: set[int] = set()
    refused: set[int] = set()  # they do not fit, and never will: every node is looked at once
    cut: dict[int, float] = {}
    used = 0
    for end in reversed(ends):
        at = end
        if depth[end] < least:
            while at >= 0 and at not in chosen and at not in short:
                short.add(at)
                at = parents[at]
            continue
        path = []
        while at >= 0 and at not in chosen and at not in refused:
            path.append(at)
            at = parents[at]
        if at in refused:
            refused.update(path)
            continue
        while path:
            node = path[-1]
            unusable = usable is not None and not usable[node]
            if unusable or (sizes[node] and used + sizes[node] > budget):
                if partial and not unusable:
                    cut[node] = max(0.0, (budget - used) / sizes[node])
                    used = max(used, budget)
                refused.update(path)
                break
            chosen.add(path.pop())
            wanted.append(node)
            used += sizes[node]
    return Choice(wanted, short - chosen, cut)


def select(nodes: Sequence[TreeNode], share: float, min_tokens: int) -> list[TreeNode]:
    """The part of a live tree that is worth saving: the most recently used paths up to `share` of its tokens."""
    if share >= 1 and min_tokens <= 0:
        return list(nodes)
    sizes = [n.end - n.start for n in nodes]
    wanted = choose_paths([n.parent for n in nodes], sizes, share * sum(sizes), min_tokens).nodes
    index = {old: new for new, old in enumerate(sorted(wanted))}
    return [nodes[old]._replace(parent=index.get(nodes[old].parent, -1)) for old in index]


# ---------------------------------------------------------------------------------------------------- rewrite

#: Of segments that may be joined, a generation refers to at most so many; then the smaller ones are joined.
MAX_SEGMENTS = 8


def plan_merge(
    indexes: Sequence[SegmentIndex], used: Iterable[tuple[bytes, int]], segment_bytes: int
) -> list[SegmentIndex]:
    """Segments to rewrite into one: those that are mostly dead, and the smallest where there are too many.

    Joined are at least two, and as long as the next is not larger than what is joined already, so that a byte is
    rewritten a number of times that grows with the logarithm of the store, not with its age. What fills half of the
    largest segment that is written, `segment_bytes`, is left as it is.
    """
    live = _live(indexes, used)
    dead = [i for i in indexes if live[i.id] * 2 < int(i.stored.sum())]
    rest = [i for i in indexes if i not in dead and live[i.id] * 2 < segment_bytes]
    rest.sort(key=lambda i: live[i.id])
    chosen, total = list(dead), sum(live[i.id] for i in dead)
    excess = len(rest) + bool(chosen) - MAX_SEGMENTS
    for count, index in enumerate(rest):
        if excess <= 0 or (count > excess and live[index.id] > total):
            break
        chosen.append(index)
        total += live[index.id]
    return chosen if len(chosen) > 1 or dead else []


def plan_reclaim(indexes: Sequence[SegmentIndex], used: Iterable[tuple[bytes, int]]) -> list[SegmentIndex]:
    """Segments a quarter of which is dead, in the order in which rewriting them frees most for what it copies."""
    live = _live(indexes, used)
    sizes = {i.id: int(i.stored.sum()) for i in indexes}
    worth = [i for i in indexes if live[i.id] * 4 <= sizes[i.id] * 3]
    return sorted(worth, key=lambda i: live[i.id] / max(1, sizes[i.id]))


def _live(indexes: Sequence[SegmentIndex], used: Iterable[tuple[bytes, int]]) -> Counter:
    """Bytes of each segment's records that are used."""
    by_id = {i.id: i for i in indexes}
    live = Counter()
    for segment, record in used:
        live[segment] += int(by_id[segment].stored[record])
    return live
