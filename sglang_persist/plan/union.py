"""Two stored trees as one: what a fuller, older generation holds beside the newest. A decision, without effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import numpy as np

from sglang_persist.format.segment import SegmentIndex
from sglang_persist.model import Manifest, Node, Piece, SegmentRef, Space
from sglang_persist.plan.loading import Resolved, node_tokens


class _Branch:
    """A node of a union in the making."""

    __slots__ = ("keys", "parent", "pieces", "space", "tokens")

    def __init__(self, parent: int, space: Space, keys: np.ndarray, tokens: np.ndarray, pieces: Sequence[Piece]):
        self.parent, self.space, self.keys, self.tokens, self.pieces = parent, space, keys, tokens, pieces

    def cut(self, start: int, stop: int, page_tokens: int) -> _Branch:
        """Pages [start, stop) of it."""
        tokens = self.tokens[start * page_tokens : stop * page_tokens + self.space.extra_tokens]
        pieces = [c for p in self.pieces if (c := p.cut(start, stop))]
        return _Branch(self.parent, self.space, self.keys[start:stop], tokens, pieces)


class _Union:
    """Trees grown into one: a path that is there in part is split where the new one leaves it. `at_ends`: pools of
    states."""

    def __init__(self, page_tokens: int, at_ends: Set[int] = frozenset()):
        self.page_tokens, self._at_ends = page_tokens, at_ends
        self.branches: list[_Branch] = []
        self._children: dict[tuple, int] = {}

    def grow(self, resolved: Resolved, segments: Mapping[bytes, SegmentIndex]) -> tuple[list[int], list[int]]:
        """Add a tree's sound nodes: (the branch that ends where each of them ends or -1, the branches that are new)."""
        m, ends, new = resolved.manifest, [], []
        for node, sound in zip(m.nodes, resolved.sound, strict=True):
            above = ends[node.parent] if node.parent >= 0 else -1
            if not sound or (node.parent >= 0 and above < 0):
                ends.append(-1)
                continue
            own = _Branch(
                above, m.spaces[node.space], node_keys(node, segments), node_tokens(m, node, segments), node.pieces
            )
            ends.append(self._follow(own, node.pages, new))
        return ends, new

    def _follow(self, own: _Branch, pages: int, new: list[int]) -> int:
        """Walk down from `own.parent` as far as the pages are the same; what is left becomes a branch."""
        at, done = own.parent, 0
        while done < pages:
            rest = own.cut(done, pages, self.page_tokens)
            child = self._children.get((at, own.space, rest.keys[0].tobytes()))
            if child is None:
                rest.parent = at
                self.branches.append(rest)
                new.append(self._enter(len(self.branches) - 1))
                return new[-1]
            same = self._same_pages(self.branches[child], rest)
            if not same:  # two pages of one hash: the tokens decide, and the first has the place
                return -1
            at = child if same == len(self.branches[child].keys) else self._split(child, same)
            done += same
        self._add_states(self.branches[at], own)
        return at

    def _add_states(self, branch: _Branch, own: _Branch) -> None:
        """Of a branch that ends where another node does: the state there, if only that one has it."""
        have = {p.pool for p in branch.pieces}
        new = [p._replace(at=len(branch.keys) - 1) for p in own.pieces if p.pool in self._at_ends - have]
        branch.pieces = sorted([*branch.pieces, *new], key=lambda p: (p.pool, p.at)) if new else branch.pieces

    def _same_pages(self, a: _Branch, b: _Branch) -> int:
        most = min(len(a.keys), len(b.keys))
        tokens = most * self.page_tokens + a.space.extra_tokens
        other = np.flatnonzero(a.tokens[:tokens] != b.tokens[:tokens])
        same = most if not len(other) else max(0, int(other[0]) - a.space.extra_tokens) // self.page_tokens
        other = np.flatnonzero((a.keys[:same] != b.keys[:same]).any(axis=1))
        return int(other[0]) if len(other) else same

    def _split(self, child: int, pages: int) -> int:
        """The upper part becomes a branch of its own; the lower part keeps its number, as its end stays."""
        whole = self.branches[child]
        self.branches.append(whole.cut(0, pages, self.page_tokens))
        upper = self._enter(len(self.branches) - 1)
        self.branches[child] = whole.cut(pages, len(whole.keys), self.page_tokens)
        self.branches[child].parent = upper
        self._enter(child)
        return upper

    def _enter(self, i: int) -> int:
        branch = self.branches[i]
        self._children[branch.parent, branch.space, branch.keys[0].tobytes()] = i
        return i

    def manifest(self, m: Manifest, more: Sequence[SegmentRef], order: Sequence[int]) -> tuple[Manifest, list[int]]:
        """`m` with these branches for nodes, in this order, but ancestors first; and what node each of them is."""
        place: dict[int, int] = {}
        spaces: dict[Space, int] = {space: i for i, space in enumerate(m.spaces)}
        nodes: list[Node] = []
        for end in order:
            path, at = [], end
            while at >= 0 and at not in place:
                path.append(at)
                at = self.branches[at].parent
            for i in reversed(path):
                b = self.branches[i]
                place[i] = len(nodes)
                space = spaces.setdefault(b.space, len(spaces))
                nodes.append(Node(place.get(b.parent, -1), space, len(b.keys), tuple(b.pieces)))
        whole = replace(
            m,
            nodes=tuple(nodes),
            spaces=tuple(spaces),
            segments=tuple({ref.id: ref for ref in (*m.segments, *more)}.values()),
            tokens=sum(n.pages for n in nodes) * m.page_tokens,
        )
        return whole, [place[i] for i in order]


def union(
    newer: Resolved, older: Resolved, segments: Mapping[bytes, SegmentIndex], ends: Sequence[int] | None = None
) -> tuple[Resolved, list[int]]:
    """The tree of `newer` and, older than all of it, what only `older` holds. Nodes that are not sound fall away.

    Second: where paths end, oldest first. A path of `newer` may end above what only `older` holds, and is as new as it
    was all the same. `ends`: where those of `newer` end, if not at its leaves. Both have the same pools and pages.
    """
    m = newer.manifest
    grown = _Union(m.page_tokens, {number for number, pool in enumerate(m.pools) if pool.at_ends})
    of_newer, _ = grown.grow(newer, segments)
    if ends is None:
        inner = {n.parent for n, end in zip(m.nodes, of_newer, strict=True) if end >= 0}
        ends = [i for i in range(len(m.nodes)) if i not in inner]
    _, new = grown.grow(older, segments)
    order = [*new, *(of_newer[i] for i in ends if of_newer[i] >= 0)]
    whole, found = grown.manifest(m, older.manifest.segments, order)
    starts: list[int] = []
    for node in whole.nodes:
        above = whole.nodes[node.parent] if node.parent >= 0 else None
        starts.append(starts[node.parent] + above.pages * whole.page_tokens if above else 0)
    return Resolved(whole, starts, newer.refused.copy(), [True] * len(starts)), found


def node_keys(node: Node, segments: Mapping[bytes, SegmentIndex]) -> np.ndarray:
    """What is stored of each page's hash, [pages, 2] u64."""
    runs = []
    for p in node.pieces:
        if p.pool == 0:
            page = int(segments[p.segment].first_page[p.record]) + p.first
            runs.append(segments[p.segment].page_hash[page : page + p.pages])
    return np.concatenate(runs)
