"""Which paths of a tree: the newest within a budget, whatever it is counted in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sglang_persist.plan.tree import TreeNodes


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


def highest_below(parents: np.ndarray, values: Iterable[int]) -> list[int]:
    """Of each node (parents first), the highest value of it and of all that stands below it."""
    out, above = list(values), parents.tolist()
    for i in range(len(out) - 1, -1, -1):
        parent = above[i]
        if parent >= 0 and out[parent] < out[i]:
            out[parent] = out[i]
    return out


def select(nodes: TreeNodes, share: float, min_tokens: int) -> TreeNodes:
    """The part of a live tree that is worth saving: the most recently used paths up to `share` of its tokens."""
    if share < 1:
        sizes = (nodes.end - nodes.start).tolist()
        wanted = choose_paths(nodes.parent.tolist(), sizes, share * sum(sizes), min_tokens).nodes
        return nodes.take(np.array(sorted(wanted), np.int64))
    if min_tokens > 0:
        return nodes.take(np.flatnonzero(np.array(highest_below(nodes.parent, nodes.end.tolist())) >= min_tokens))
    return nodes
