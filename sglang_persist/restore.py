"""The restore story: from the newest sound generation to a warm tree.

    decide   resolve: which nodes are sound; plan_restore: the newest paths that fit, closed under parents
    move     slots for all of them at once; records read, checked and decoded ahead on other threads, each once,
             newest path first, and written to the slots of every node that has a part of them
    insert   oldest path first, so that the engine evicts in the order in which it would have
Nothing is inserted before all of its bytes were verified; a node that fails takes its descendants, never its siblings.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_persist.errors import FormatError, StoreError
from sglang_persist.plan import Known, LoadPlan, Resolved, node_tokens, plan_restore, resolve
from sglang_persist.ports import Pages, Tree
from sglang_persist.store.home import Home
from sglang_persist.store.shard import Segment

AHEAD_BYTES = 96 << 20


@dataclass
class RestoreResult:
    tokens: int = 0
    total_tokens: int = 0
    refused: Counter = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    #: Over the inserted nodes in order: ranks with equal digests have equal trees.
    digest: Any = field(default_factory=hashlib.sha256)


def restore(tree: Tree, pages: Pages, home: Home, settings, deadline: float, result: RestoreResult) -> Iterator[None]:
    """Fill an empty tree from `home.manifest`, in slices. Past `deadline` (monotonic), what is loaded is inserted.

    Fills in `result`; whatever is wrong with the store costs nodes there, never an exception.
    """
    result.total_tokens = home.manifest.tokens
    opened = home.open_segments(result.errors)
    try:
        resolved = resolve(home.manifest, home.segments)
        plan = plan_restore(resolved, pages.capacity() // tree.page_tokens, settings.min_tokens)
        result.refused += plan.refused
        if plan.nodes:
            yield from _fill(tree, pages, home, resolved, plan, opened, settings, deadline, result)
    finally:
        for segment in opened.values():
            segment.close()


def _fill(tree, pages, home, resolved: Resolved, plan: LoadPlan, opened, settings, deadline, result) -> Iterator[None]:
    """Slots, bytes, nodes. Whatever ends this, slots of nodes that were not inserted go back to the allocator."""
    at = _layout(plan, resolved, tree.page_tokens)
    failed: dict[int, str] = {}
    inserted: dict[int, int] = {}
    slots = pages.allocate(plan.pages * tree.page_tokens)
    try:
        yield from _load(tree, pages, plan, opened, slots, at, settings, deadline, failed, result)
        _insert(tree, home, resolved, plan, slots, at, failed, inserted, result)
    finally:
        for i, (begin, end) in at.items():
            if i not in inserted:
                pages.free(slots[begin:end])


def _layout(plan: LoadPlan, resolved: Resolved, page_tokens: int) -> dict[int, tuple[int, int]]:
    """Where each node's slots lie in the one allocation: node -> (begin, end)."""
    at, out = 0, {}
    for i in plan.nodes:
        end = at + resolved.manifest.nodes[i].pages * page_tokens
        out[i] = (at, end)
        at = end
    return out


def _load(tree, pages, plan: LoadPlan, opened: dict[bytes, Segment], slots, at, settings, deadline, failed, result):
    """Read ahead on worker threads, write to the pool on this one. Nodes whose bytes did not come are in `failed`."""
    todo = deque(plan.records)
    ahead: deque = deque()
    pending = 0
    with ThreadPoolExecutor(settings.threads, thread_name_prefix="persist-read") as readers:
        while todo or ahead:
            while todo and pending < AHEAD_BYTES:
                segment, record, uses = todo.popleft()
                size = opened[segment].index.raw_bytes(record)
                pending += size
                ahead.append((readers.submit(opened[segment].load, record), opened[segment].index, record, uses, size))
            job, index, record, uses, size = ahead.popleft()
            if time.monotonic() > deadline:
                job.cancel()
                for _, _, unread in todo:
                    failed.update(dict.fromkeys((u.node for u in unread), "timeout"))
                todo.clear()
                failed.update(dict.fromkeys((u.node for u in uses), "timeout"))
                continue
            try:
                raw = job.result()
            except (FormatError, StoreError) as error:
                index.bad.add(record)
                result.errors.append(str(error))
                failed.update(dict.fromkeys((u.node for u in uses), error.reason))
            else:
                _scatter(pages, index, record, raw, uses, slots, at, tree.page_tokens)
            pending -= size
            yield


def _scatter(pages: Pages, index, record: int, raw: np.ndarray, uses, slots, at, page_tokens: int) -> None:
    rows = int(index.pages[record]) * page_tokens
    for use in uses:
        begin = at[use.node][0] + use.at * page_tokens
        target = slots[begin : begin + use.pages * page_tokens]
        pages.scatter(int(index.pool[record]), target, raw, rows, use.first * page_tokens)


def _insert(tree, home: Home, resolved: Resolved, plan: LoadPlan, slots, at, failed, ids, result) -> None:
    m = resolved.manifest
    path_tokens: dict[int, np.ndarray] = {}
    for i in plan.nodes:
        node, space = m.nodes[i], m.spaces[m.nodes[i].space]
        reason = failed.get(i) or ("parent_refused" if node.parent >= 0 and node.parent not in ids else None)
        if reason is None:
            own = node_tokens(m, node, home.segments)
            path = np.concatenate([path_tokens[node.parent], own[space.extra_tokens :]]) if node.parent >= 0 else own
            path_tokens[i] = path
            chain, up = [], i
            while up >= 0:
                chain.append(slots[at[up][0] : at[up][1]])
                up = m.nodes[up].parent
            start = resolved.start[i]
            found = tree.insert(space, path, chain[::-1], start)
            if found is None:
                reason = "not_taken"
            else:
                ids[i] = found
                result.digest.update(repr((space, start)).encode() + own.astype("<i8").tobytes())
                home.known[found] = Known(start, start + node.pages * m.page_tokens, space, node.pieces)
                result.tokens += node.pages * m.page_tokens
        if reason:
            result.refused[reason] += 1
