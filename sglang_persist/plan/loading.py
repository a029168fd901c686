"""What a restore can take: the sound nodes of a stored tree, and the newest paths of them that fit.

Paths are chosen newest first until the capacity is used up, parents before children, and inserted oldest first, because
insertion order is what the engine's eviction order will be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from sglang_persist.format.segment import KEY_BYTES, SegmentIndex
from sglang_persist.model import Manifest, Node, Piece
from sglang_persist.plan.paths import choose_paths
from sglang_persist.plan.tree import NO_PARENT

#: A node below the last state of its path: nothing can go on from there.
NO_STATE = "no_state"


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
    nodes = list(m.nodes)  # each is looked at many times
    alike = {key: s for key, s in segments.items() if s.page_tokens == m.page_tokens and s.pools == m.pools}
    out = Resolved(m, [], Counter(), [])
    last_key: list[bytes] = []
    for i, node in enumerate(nodes):
        parent = node.parent
        start = 0 if parent < 0 else out.start[parent] + nodes[parent].pages * m.page_tokens
        out.start.append(start)
        key = NO_PARENT[:KEY_BYTES] if parent < 0 else last_key[parent]
        if parent >= 0 and not out.sound[parent]:
            reason = "parent_refused"
        else:
            reason, key, pieces = _chain(m, node, start, key, alike)
            if reason is None and len(pieces) != len(node.pieces):
                nodes[i] = replace(node, pieces=pieces)
        last_key.append(key)
        out.sound.append(reason is None)
        if reason:
            out.refused[reason] += 1
    out.manifest = replace(m, nodes=tuple(nodes))
    return out


def _chain(m: Manifest, node: Node, start: int, key: bytes, segments: Mapping[bytes, SegmentIndex]):
    """(None, hash key of the node's last page, its sound pieces), or (reason, b"", None).

    Pieces of pool 0 cover the node, so their page hashes are the node's. Those of other pools must have the same, or
    they count as not there: the node can do without them.
    """
    keys: list[np.ndarray] = []
    sound: list[Piece] = []
    for piece in node.pieces:
        index, record, first = segments.get(piece.segment), piece.record, piece.first
        good = (
            index is not None
            and record < index.records
            and first + piece.pages <= index.pages[record]
            and record not in index.bad
            and index.pool[record] == piece.pool
            and index.spaces[index.space[record]] == m.spaces[node.space]
            and int(index.start[record]) + first * m.page_tokens == start + piece.at * m.page_tokens
        )
        if good:
            page = int(index.first_page[record]) + first
            own = index.page_hash[page : page + piece.pages]
            if piece.pool:
                good = np.array_equal(own, np.concatenate(keys)[piece.at : piece.at + piece.pages])
            else:
                before = index.page_hash[page - 1].tobytes() if first else index.parent[record, :KEY_BYTES].tobytes()
                good = before == key
                keys.append(own)
                key = own[-1].tobytes()
        if good:
            sound.append(piece)
        elif not piece.pool:
            return "damaged", b"", None
    return None, key, tuple(sound)


def node_tokens(m: Manifest, node: Node, segments: Mapping[bytes, SegmentIndex]) -> np.ndarray:
    """A node's token ids (one more than positions in a bigram space)."""
    extra = m.spaces[node.space].extra_tokens
    runs = [segments[p.segment].page_tokens_of(p.record, p.first, p.pages) for p in node.pieces if p.pool == 0]
    return np.concatenate([runs[0], *(r[extra:] for r in runs[1:])])


class Slice(NamedTuple):
    """Bytes [low, high) of each row of a stored buffer belong to byte `at` and following of each row of one of ours."""

    source: int
    low: int
    high: int
    target: int
    at: int


class Fit(NamedTuple):
    """A stored pool belongs to this one of the engine's: as it is, or only these slices of its rows."""

    pool: int
    slices: tuple[Slice, ...] | None = None


class Use(NamedTuple):
    """Pages [first, first + pages) of a record belong to page `at` and following of node `node`."""

    node: int
    at: int
    first: int
    pages: int


class Read(NamedTuple):
    """A record to load, of a pool as it is stored."""

    pool: int
    segment: bytes
    record: int
    uses: list[Use]


@dataclass
class LoadPlan:
    nodes: list[int]  # in the order of insertion: oldest path first; one that comes again is only used again
    chosen: list[int]  # in the order of choice: newest path first, parents before children
    #: For each pool of the engine, the chosen nodes of which it gets something, in the order of choice.
    held: list[list[int]]
    reads: list[Read]  # in their order: newest path first
    refused: Counter


def plan_restore(
    resolved: Resolved, fits: Sequence[Fit], capacity_pages: Sequence[int], min_tokens: int = 0,
    ends: Sequence[int] | None = None,
) -> LoadPlan:  # fmt: skip
    """The newest paths that fit into `capacity_pages` of the first pool, closed under parents; none shorter than
    `min_tokens`. Of what other pools hold of them, what fits as well.

    `fits`: where each pool of the manifest belongs. `ends`: where paths end, oldest first, if not at the leaves in
    their order.
    """
    m, refused = resolved.manifest, Counter(resolved.refused)
    stored = [[v for v, fit in enumerate(fits) if fit.pool == pool] for pool in range(len(capacity_pages))]
    at_ends = [any(m.pools[v].at_ends for v in of_pool) for of_pool in stored]
    sizes, parents = [n.pages for n in m.nodes], [n.parent for n in m.nodes]
    least = -(-min_tokens // m.page_tokens)
    sound = resolved.sound
    if len(stored[0]) > 1:  # of one alone this is known
        sound = [good and is_whole(m, node, stored[0]) for good, node in zip(sound, m.nodes, strict=True)]
        refused["damaged"] += sum(resolved.sound) - sum(sound)
    wanted, short, _ = choose_paths(parents, sizes, capacity_pages[0], least, sound, ends)
    chosen = set(wanted)
    for i in range(len(m.nodes)):
        if sound[i] and i not in chosen:
            refused["too_short" if i in short else "no_capacity"] += 1
    held = [wanted]
    for pool in range(1, len(capacity_pages)):
        there = [i for i in wanted if is_whole(m, m.nodes[i], stored[pool])]
        if at_ends[pool]:
            held.append(_deepest_first(there, parents)[: capacity_pages[pool]])
            can, leads = leading(parents, there), leading(parents, held[pool])
            refused[NO_STATE] += len(chosen - can)
            refused["no_capacity"] += len(chosen & can - leads)
            chosen &= leads
        else:
            held.append(_as_fits(there, sizes, capacity_pages[pool]))
    wanted = held[0] = [i for i in wanted if i in chosen]
    reads: dict[tuple[int, bytes, int], list[Use]] = {}
    takes = [set(of_pool) for of_pool in held]
    for i in wanted:
        for p in m.nodes[i].pieces:
            if i in takes[fits[p.pool].pool]:
                reads.setdefault((p.pool, p.segment, p.record), []).append(Use(i, p.at, p.first, p.pages))
    order = sorted(wanted) if ends is None else _use_order(parents, ends, chosen)
    return LoadPlan(
        order, wanted, held, [Read(*k, sorted(u, key=lambda u: u.first)) for k, u in reads.items()], refused
    )


def _as_fits(nodes: Iterable[int], sizes: Sequence[int], capacity: int) -> list[int]:
    out = []
    for i in nodes:
        if sizes[i] <= capacity:
            out.append(i)
            capacity -= sizes[i]
    return out


def _deepest_first(nodes: Iterable[int], parents: Sequence[int]) -> list[int]:
    """Nodes that stand path after path, parents before children, path after path from its end."""
    out, path = [], []
    for i in nodes:
        above = parents[i]
        while path and above > path[-1]:  # a node without one stands between
            above = parents[above]
        if path and above != path[-1]:
            out += reversed(path)
            path = []
        path.append(i)
    return out + path[::-1]


def leading(parents: Sequence[int], ends: Iterable[int]) -> set[int]:
    """The nodes on the way from the root to any of these, which are among them."""
    out: set[int] = set()
    for i in ends:
        while i >= 0 and i not in out:
            out.add(i)
            i = parents[i]
    return out


def is_whole(m: Manifest, node: Node, pools: Sequence[int]) -> bool:
    """Whether all that each of these stored pools can have of a node is stored."""
    filled = Counter()
    for p in node.pieces:
        if not m.pools[p.pool].at_ends:
            filled[p.pool] += p.pages
        elif p.at + p.pages == node.pages:
            filled[p.pool] = node.pages
    return bool(pools) and all(filled[pool] == node.pages for pool in pools)


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
