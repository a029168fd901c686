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
from sglang_persist.model import Manifest, Node
from sglang_persist.plan.paths import choose_paths
from sglang_persist.plan.tree import NO_PARENT


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
    m = replace(m, nodes=tuple(m.nodes))  # each is looked at many times
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
