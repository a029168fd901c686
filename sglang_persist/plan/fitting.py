"""What has room: a plan, or a stored tree, cut down to its newest paths by what they take on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sglang_persist.format.segment import SegmentIndex
from sglang_persist.model import Manifest, Node, Piece, Space
from sglang_persist.nodes import NodeTable, places
from sglang_persist.plan.loading import leading, resolve
from sglang_persist.plan.paths import choose_paths
from sglang_persist.plan.saving import SavePlan, Settled, Stored
from sglang_persist.plan.tree import KnownNodes


def restrict(plan: SavePlan, sizes: Sequence[int], budget: float, of_new: bool = False) -> SavePlan:
    """The newest paths of a plan whose nodes' `sizes` fit into `budget`: nodes and records of the others fall away.

    Of the node in which the room ends, the first pages are kept. `of_new`: sizes are those of new pages alone.
    """
    choice = choose_paths(plan.nodes.parent.tolist(), sizes, budget, partial=True)
    pages = {i: int(plan.pages[i]) for i in choice.nodes}
    for i, share in choice.cut.items():
        if count := _cut(plan, i, share, of_new):
            pages[i] = count
    return _only(plan, pages)


def up_to_states(plan: SavePlan, at_ends: Collection[int]) -> SavePlan:
    """A plan without what stands below the last state of its path. `at_ends`: pools of states."""
    if not at_ends:
        return plan
    whole = (plan.nodes.end - plan.nodes.start) // plan.page_tokens == plan.pages
    written = plan.records.node[np.isin(plan.records.pool[plan.records.owner], list(at_ends))]
    stored = [i for i, entry in enumerate(plan.stored) if entry and any(p.pool in at_ends for p in entry[1])]
    leads = leading(plan.nodes.parent.tolist(), [i for i in {*written.tolist(), *stored} if whole[i]])
    return _only(plan, {i: int(plan.pages[i]) for i in leads})


def _only(plan: SavePlan, pages: Mapping[int, int]) -> SavePlan:
    """These nodes of a plan, and so many pages of each."""
    chosen = np.array(sorted(pages), np.int64)
    kept = np.array([pages[i] for i in chosen.tolist()], np.int64)
    stored = Stored.of([_first_pieces(plan.stored[i], pages[i]) for i in chosen.tolist()])
    return SavePlan(
        plan.page_tokens, plan.nodes.take(chosen), kept, stored, plan.records.cut(places(chosen, len(plan.nodes)), kept)
    )


def _cut(plan: SavePlan, i: int, share: float, of_new: bool) -> int:
    """How many pages of a node to keep that has room for a share of its bytes."""
    stored = 0
    for piece in plan.stored[i][1] if plan.stored[i] else ():
        if piece.pool or piece.at != stored:
            break
        stored += piece.pages
    if of_new:
        return stored + int(share * (int(plan.pages[i]) - stored))
    count = int(share * int(plan.pages[i]))
    # Sizes are estimates until they are written: what is stored stays where it was cut, not a page more or less.
    return stored if abs(count - stored) * 10 <= stored else count


def _first_pieces(stored: tuple[Space, Sequence[Piece]] | None, pages: int) -> tuple[Space, list[Piece]] | None:
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


def new_sizes(plan: SavePlan, page_bytes: Sequence[float]) -> list[int]:
    """Bytes that the pages of each node will take which are not stored yet. `page_bytes`: a page in each pool."""
    records = plan.records
    each = records.pages * np.array(page_bytes)[records.pool][records.owner]
    return np.rint(np.bincount(records.node, each, len(plan.nodes))).astype(np.int64).tolist()


def fit(
    plan: SavePlan, segments: Mapping[bytes, SegmentIndex], page_bytes: Sequence[float], budget: float
) -> Iterator[SavePlan]:
    """The newest paths of a plan that fit into `budget` bytes on disk, what is to be written included. Step by step:
    a record stays for as long as any page of it is used, so without the others each of its pages takes more."""
    before = None
    while before != (before := plan.pages.tolist()):
        stored = stored_sizes([entry[1] if entry else () for entry in plan.stored], segments)
        sizes = [a + b for a, b in zip(stored, new_sizes(plan, page_bytes), strict=True)]
        plan = restrict(plan, sizes, budget)
        yield plan


def newest_part(m: Manifest, segments: Mapping[bytes, SegmentIndex], known: KnownNodes, budget: float) -> Settled:
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
    if ends := {number for number, pool in enumerate(m.pools) if pool.at_ends}:
        stateful = [i for i, n in enumerate(nodes) if any(p.pool in ends for p in n.pieces)]
        leads = sorted(leading([n.parent for n in nodes], stateful))
        index = {old: new for new, old in enumerate(leads)}
        nodes = [replace(nodes[i], parent=index.get(nodes[i].parent, -1)) for i in leads]
    tokens = sum(n.pages for n in nodes) * m.page_tokens
    table = NodeTable.of(nodes)
    return Settled(
        table, list(m.spaces), known.within(table.pieces.used()), tokens, m.left_out_tokens + m.tokens - tokens
    )
