"""One stored tree as several ranks have it: the nodes that all of them hold, in one order."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from sglang_persist.format.segment import SegmentIndex
from sglang_persist.plan.loading import Fit, Resolved, is_whole, node_tokens

#: A node that is sound here and not on every other rank.
ELSEWHERE = "other_rank"


@dataclass(frozen=True)
class Offer:
    """The sound nodes of a stored tree, parents first, in the order of the manifest: of each what it is (the tokens of
    its whole path, its start and its space, as a digest), its parent's place in this list or -1, and which of the
    engine's pools beside the first get something of it, a bit each. `ends`: where paths end, oldest first."""

    ids: list[bytes]
    parents: list[int]
    states: list[int]
    ends: list[int]


def offer(
    resolved: Resolved, ends: Sequence[int] | None, segments: Mapping[bytes, SegmentIndex], fits: Sequence[Fit] = ()
) -> tuple[Offer, list[int]]:
    """(what a rank can tell the others of its tree, the node at each place in it). `fits`: where each pool of the
    manifest belongs. Ranks may have their parts from different numbers of stored pools."""
    m, out = resolved.manifest, Offer([], [], [], [])
    others = {f.pool: [v for v, fit in enumerate(fits) if fit.pool == f.pool] for f in fits if f.pool}
    place: dict[int, int] = {}
    for i, (node, sound) in enumerate(zip(m.nodes, resolved.sound, strict=True)):
        if not sound:
            continue
        parent = place.get(node.parent, -1)
        above = out.ids[parent] if parent >= 0 else repr(m.spaces[node.space]).encode()
        tokens = node_tokens(m, node, segments).astype("<i8").tobytes()
        # Two nodes of one path that was split are not one of the path as a whole.
        out.ids.append(hashlib.blake2b(above + b"|" + tokens, digest_size=16).digest())
        out.parents.append(parent)
        out.states.append(sum(1 << pool for pool, stored in others.items() if is_whole(m, node, stored)))
        place[i] = len(place)
    if ends is None:
        inner = set(out.parents)
        out.ends.extend(i for i in range(len(place)) if i not in inner)
    else:
        out.ends.extend(place[i] for i in ends if i in place)
    return out, list(place)


def in_common(
    resolved: Resolved, mine: tuple[Offer, Sequence[int]], offers: Collection[Offer], fits: Sequence[Fit] = ()
) -> tuple[Resolved, list[int]]:
    """Of my tree what stands in every offer, in the order of the first of them; and where paths end in it. With `fits`,
    what another pool than the first holds of a node stays where all have it.

    All ranks come to the same tree, node for node, each with its own pieces.
    """
    leader, (own, nodes) = next(iter(offers)), mine
    where = [dict(zip(o.ids, o.states, strict=True)) for o in offers]
    my_place = {node_id: i for i, node_id in enumerate(own.ids)}
    m, new, place, starts, nearest = resolved.manifest, [], {}, [], []
    for i, (node_id, parent) in enumerate(zip(leader.ids, leader.parents, strict=True)):
        kept = all(node_id in ids for ids in where) and (parent < 0 or parent in place)
        nearest.append(i if kept else nearest[parent] if parent >= 0 else -1)
        if not kept or i in place:
            continue
        at = nodes[my_place[node_id]]
        states = where[0][node_id]
        for ids in where:
            states &= ids[node_id]
        pieces = m.nodes[at].pieces
        if fits:
            pieces = tuple(p for p in pieces if not fits[p.pool].pool or states >> fits[p.pool].pool & 1)
        place[i] = len(new)
        new.append(replace(m.nodes[at], parent=place.get(parent, -1), pieces=pieces))
        starts.append(resolved.start[at])
    out = Resolved(replace(m, nodes=tuple(new)), starts, resolved.refused.copy(), [True] * len(new))
    if lost := len(own.ids) - len(new):
        out.refused[ELSEWHERE] += lost
    return out, [place[nearest[i]] for i in leader.ends if nearest[i] >= 0]
