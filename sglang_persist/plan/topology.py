"""How KV that was stored under one cut of a model lies in another: by layer, by head, by page. Decisions alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sglang_persist.format.segment import SegmentIndex
from sglang_persist.model import Buffer, Node, Piece, Pool
from sglang_persist.nodes import prefix_sum
from sglang_persist.plan.agreement import in_common, offer
from sglang_persist.plan.loading import Fit, Resolved, Slice

#: Of a cut, what may differ between what is stored and who restores it.
_MAY_DIFFER = ("page", "rows", "stages")
#: Of its topology, what may not: which part of a context its ranks hold is not known.
_OF_TOPOLOGY = ("cp",)
OWN = 0
_COORDINATE = re.compile(r"([a-z]+)([0-9]+)")


def coordinates(shard: str) -> dict[str, int]:
    """Where a rank stands, by the name of its shard: dp, adp, pp, cp, tp."""
    return {name: int(number) for name, number in _COORDINATE.findall(shard)}


@dataclass(frozen=True)
class Rank:
    """Who restores. `heads`: for each pool, KV heads of the whole model, None where all ranks of tensor parallelism
    hold the same, or OWN where each has a part that is not told apart here."""

    shard: str
    cut: Mapping[str, Any]
    pools: tuple[Pool, ...]
    page_tokens: int
    heads: tuple[int | None, ...]


def unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """What of two cuts differs that cannot be mapped; None where nothing does."""
    for key in sorted({*ours, *theirs}.difference(_MAY_DIFFER, ("topology",))):
        if ours.get(key) != theirs.get(key):
            return key
    a, b = ours.get("topology", {}), theirs.get("topology", {})
    return next((key for key in _OF_TOPOLOGY if a.get(key, 1) != b.get(key, 1)), None)


def head_range(heads: int, size: int, rank: int) -> tuple[int, int]:
    """The KV heads that a rank of tensor parallelism holds, as SGLang deals them out: an equal share, or, where there
    are more ranks than heads, one head for several ranks in a row."""
    if size <= heads:
        share = heads // size
        return rank * share, (rank + 1) * share
    return rank * heads // size, rank * heads // size + 1


def _size(cut: Mapping[str, Any]) -> int:
    """Ranks of tensor parallelism that share out the heads of one tree."""
    topology = cut.get("topology", {})
    return max(1, topology.get("tp", 1) // topology.get("cp", 1) // topology.get("adp", 1))


def divides(heads: int, size: int) -> bool:
    return heads % size == 0 or size % heads == 0


def fits(rank: Rank, cut: Mapping[str, Any], shard: str, pools: Sequence[Pool]) -> tuple[Fit | None, ...]:
    """For each pool of a stored shard, what of it this rank needs and where it belongs. None: nothing."""
    ours, theirs = _size(rank.cut), _size(cut)
    mine, at = coordinates(rank.shard).get("tp", 0), coordinates(shard).get("tp", 0)
    number = {pool.name: i for i, pool in enumerate(rank.pools)}
    out: list[Fit | None] = []
    for pool in pools:
        target = number.get(pool.name)
        found = (
            () if target is None else _slices(pool, rank.pools[target], rank.heads[target], (ours, mine), (theirs, at))
        )
        if not found:
            out.append(None)
        elif pool == rank.pools[target] and found == _whole(pool):
            out.append(Fit(target))
        else:
            out.append(Fit(target, found))
    return tuple(out)


def _whole(pool: Pool) -> tuple[Slice, ...]:
    return tuple(Slice(i, 0, b.row_bytes, i, 0) for i, b in enumerate(pool.buffers))


def _slices(
    theirs: Pool, ours: Pool, heads: int | None, we: tuple[int, int], they: tuple[int, int]
) -> tuple[Slice, ...]:
    """`we`, `they`: (ranks of tensor parallelism, which of them)."""
    place = {b.name: i for i, b in enumerate(ours.buffers)}
    out = []
    for i, buffer in enumerate(theirs.buffers):
        target = place.get(buffer.name)
        if target is None or buffer.dtype != ours.buffers[target].dtype or theirs.unit != ours.unit:
            continue
        if heads is None or we == they:
            cut = (0, buffer.row_bytes, 0) if buffer == ours.buffers[target] else None
        else:
            cut = _of_heads(theirs, buffer, ours.buffers[target], heads, we, they)
        if cut:
            out.append(Slice(i, cut[0], cut[1], target, cut[2]))
    return tuple(out)


def _of_heads(
    pool: Pool, theirs: Buffer, ours: Buffer, heads: int, we: tuple[int, int], they: tuple[int, int]
) -> tuple[int, int, int] | None:
    """(low, high, at) of a row whose bytes stand head after head."""
    if heads == OWN or not (divides(heads, we[0]) and divides(heads, they[0])):
        return None
    (a, b), (c, d) = head_range(heads, *we), head_range(heads, *they)
    size = theirs.row_bytes // (d - c)
    by_heads = theirs.row_shape[0] % (d - c) == 0 and ours.row_shape[0] % (b - a) == 0
    low, high = max(a, c), min(b, d)
    if not by_heads or size * (d - c) != theirs.row_bytes or size * (b - a) != ours.row_bytes or low >= high:
        return None
    if pool.unit == "page" and theirs.row_shape[0] != d - c:  # a page whose rows are tokens
        return None
    return (low - c) * size, (high - c) * size, (low - a) * size


def needed(rank: Rank, parts: Sequence[tuple[str, tuple[Fit | None, ...]]]) -> dict[str, tuple[Fit | None, ...]] | None:
    """Of the shards of a generation, with what each has for this rank, those that it takes and what of them; None where
    together they have not all of it. Where several have the same, that of the rank of its own number, or the first."""
    filled = [[0] * len(pool.buffers) for pool in rank.pools]
    taken: set[tuple[int, int, int]] = set()
    out: dict[str, tuple[Fit | None, ...]] = {}
    own = coordinates(rank.shard).get("tp", 0)
    for shard, of_pools in sorted(parts, key=lambda part: coordinates(part[0]).get("tp", 0) != own):
        kept: list[Fit | None] = []
        for fit in of_pools:
            slices = () if fit is None else fit.slices or _whole(rank.pools[fit.pool])
            if any((fit.pool, s.target, s.at) in taken for s in slices):
                fit, slices = None, ()
            kept.append(fit)
            for s in slices:
                taken.add((fit.pool, s.target, s.at))
                filled[fit.pool][s.target] += s.high - s.low
        if any(fit is not None for fit in kept):
            out[shard] = tuple(kept)
    whole = all(
        got == buffer.row_bytes
        for pool, of_pool in zip(rank.pools, filled, strict=True)
        for buffer, got in zip(pool.buffers, of_pool, strict=True)
    )
    return out if whole else None


@dataclass(frozen=True)
class Part:
    """One shard's tree."""

    resolved: Resolved
    segments: Mapping[bytes, SegmentIndex]
    fits: tuple[Fit | None, ...]


def joined(parts: Sequence[Part]) -> tuple[Resolved, list[int] | None, list[Fit]]:
    """The trees of several shards as one: nodes that each of them has, with pieces of the pools of all of them, those
    of one shard after those of the other. With it where paths end, and where each of these pools belongs."""
    # The first of all pools must be one that has something of every page.
    parts = sorted(parts, key=lambda part: part.fits[0] is None)
    if len(parts) == 1 and None not in parts[0].fits:
        return parts[0].resolved, None, list(parts[0].fits)
    offers = [offer(p.resolved, None, p.segments) for p in parts]
    trees = [in_common(p.resolved, mine, [o for o, _ in offers]) for p, mine in zip(parts, offers, strict=True)]
    fits = [fit for part in parts for fit in part.fits]
    kept = [i for i, fit in enumerate(fits) if fit is not None]
    place = {i: n for n, i in enumerate(kept)}
    first = np.cumsum([0, *(len(p.fits) for p in parts)]).tolist()
    lead = trees[0][0]
    nodes = []
    for i, node in enumerate(lead.manifest.nodes):
        pieces = [
            p._replace(pool=place[low + p.pool])
            for (tree, _), low in zip(trees, first, strict=False)
            for p in tree.manifest.nodes[i].pieces
            if low + p.pool in place
        ]
        nodes.append(replace(node, pieces=tuple(pieces)))
    pools = [pool for p in parts for pool in p.resolved.manifest.pools]
    m = replace(lead.manifest, nodes=tuple(nodes), pools=tuple(pools[i] for i in kept))
    return replace(lead, manifest=m), trees[0][1], [fits[i] for i in kept]


def paged(
    resolved: Resolved, ends: list[int] | None, segments: Mapping[bytes, SegmentIndex], page_tokens: int
) -> tuple[Resolved, list[int] | None, dict[bytes, SegmentIndex]]:
    """The same tree counted in pages of `page_tokens`, or, where those are larger, in the largest that divide both:
    nodes then begin and end at whole pages of `page_tokens`, and of a path what is less than one is left out. For pools
    with a row for each slot."""
    m = resolved.manifest
    unit = math.gcd(m.page_tokens, page_tokens)
    factor = m.page_tokens // unit
    if factor > 1:
        nodes = tuple(
            replace(
                n, pages=n.pages * factor,
                pieces=tuple(
                    p._replace(at=p.at * factor, first=p.first * factor, pages=p.pages * factor) for p in n.pieces
                ),
            )
            for n in m.nodes
        )  # fmt: skip
        resolved = replace(resolved, manifest=replace(m, nodes=nodes, page_tokens=unit))
    if page_tokens > unit:
        resolved, ends = _aligned(resolved, ends, page_tokens // unit)
    return resolved, ends, {name: _in_units(index, factor) for name, index in segments.items()}


def _aligned(resolved: Resolved, ends: list[int] | None, step: int) -> tuple[Resolved, list[int]]:
    """The tree whose nodes begin and end at multiples of `step` pages. Paths that part within such a step part at its
    beginning, so that what they share of it stands in each of them."""
    m = resolved.manifest
    if ends is None:
        inner = {n.parent for n, sound in zip(m.nodes, resolved.sound, strict=True) if sound}
        ends = [i for i, sound in enumerate(resolved.sound) if sound and i not in inner]
    nodes: list[Node] = []
    starts: list[int] = []
    place: list[int] = []  # of each node, the new one that ends with it or is the nearest above
    for i, (node, sound) in enumerate(zip(m.nodes, resolved.sound, strict=True)):
        above = place[node.parent] if node.parent >= 0 else -1
        place.append(above)
        if not sound:
            continue
        begin = resolved.start[i] // m.page_tokens
        low, high = begin // step * step, (begin + node.pages) // step * step
        if low < high:
            place[i] = len(nodes)
            nodes.append(Node(above, node.space, high - low, tuple(_collect(resolved, i, low, high))))
            starts.append(low * m.page_tokens)
    out = Resolved(replace(m, nodes=tuple(nodes)), starts, resolved.refused, [True] * len(nodes))
    return out, [place[i] for i in ends if place[i] >= 0]


def _collect(resolved: Resolved, i: int, low: int, high: int) -> list[Piece]:
    """The pieces of pages [low, high) of the path that ends with a node, in order of pool and page."""
    m, out = resolved.manifest, []
    while i >= 0:
        begin = resolved.start[i] // m.page_tokens
        # A piece that is cut counts from `low - begin`, which lies before the node where `low` does.
        out += [cut for piece in m.nodes[i].pieces if (cut := piece.cut(low - begin, high - begin))]
        if begin <= low:
            break
        i = m.nodes[i].parent
    return sorted(out, key=lambda p: (p.pool, p.at))


def _in_units(index: SegmentIndex, factor: int) -> SegmentIndex:
    pages = index.pages.astype(np.int64) * factor
    return replace(
        index, page_tokens=index.page_tokens // factor, pages=pages, first_page=prefix_sum(pages), _sorted=None
    )
