"""The save story: one snapshot, from the live tree to a committed generation.

decide   plan_save: which nodes, which of their pages the store has, which records to write; restrict: what the budget
         has room for
move     a record at a time, newest path first: gather on the scheduler's thread; encode, checksum and write behind a
         bounded queue
settle   the nodes that are whole, prefix-closed
commit   segments durable, then the manifest: its rename is the moment from which the generation counts
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np

from sglang_persist.errors import FormatError, StoreError, StoreFull
from sglang_persist.keeper import TREE_SHARE, Budget, Keeper, SaveRequest
from sglang_persist.plan import (
    RecordPlan,
    SavePlan,
    TreeNode,
    new_sizes,
    plan_save,
    restrict,
    select,
    settle,
    stored_sizes,
)
from sglang_persist.ports import Pages, Tree
from sglang_persist.store.writer import SegmentWriter

#: What a step waits for: called with a timeout in seconds. None: the step did work of its own.
Waiting = Callable[[float], object] | None


@dataclass(frozen=True)
class SaveResult:
    generation: int
    tokens: int
    new_tokens: int
    new_bytes: int
    seconds: float
    left_out_tokens: int = 0
    store_bytes: int | None = None


def save(tree: Tree, pages: Pages, keeper: Keeper, request: SaveRequest) -> Generator[Waiting, None, SaveResult]:
    """Take a snapshot, as a generator of bounded slices on the scheduler's thread.

    Yields None after a slice of work, and something to wait for when only other threads have work left. Returns a
    SaveResult. Closed early, it leaves the store as it was, or, once it is committing, with the new generation. Raises
    StoreError and FormatError.
    """
    began, home, settings = time.monotonic(), keeper.home, keeper.settings
    ready = yield from _finish(home.run(lambda: keeper.prepare(request)))
    request, budget = ready.request, ready.budget
    live = tree.nodes()
    nodes = select(live, settings.hottest, settings.min_tokens)
    plan = _plan(tree, keeper, nodes, budget)
    if not nodes or (not plan.records and ready.complete and home.is_current(plan)):
        # Nothing new, or nothing at all: an emptied tree must not stand above the last one that held something.
        tokens = home.manifest.tokens if home.manifest else 0
        return SaveResult(home.generation, tokens, 0, 0, time.monotonic() - began)
    if sum(new_sizes(plan, keeper.expected_page_bytes())) > budget.room:
        plan = _hottest(plan, keeper, budget)
        if not plan.records and ready.complete and home.is_current(plan):
            return SaveResult(home.generation, home.manifest.tokens, 0, 0, time.monotonic() - began)
        plan, budget = yield from _make_room(tree, keeper, plan, request)
    yield None

    writer = keeper.new_writer(budget)
    try:
        kept = yield from _write(tree, pages, plan, writer, request, max(budget.room, budget.segment_bytes))
        yield from _finish(writer.seal())
        places = iter(writer.placed)
        settled = settle(plan, [(*(next(places) if n else (b"", 0)), n) for n in kept])
        settled.left_out_tokens += _tokens(nodes) - _tokens(plan.nodes)  # nodes for which the budget has no room
        if not settled.nodes:  # everything was evicted, or out of time, before it was read
            yield from _finish(home.run(home.sweep))
            return SaveResult(home.generation, 0, 0, 0, time.monotonic() - began, settled.left_out_tokens)
        written = list(writer.indexes)
        new_bytes, store_bytes = yield from _finish(home.run(lambda: keeper.commit(settled, written, request)))
    except (StoreError, FormatError):
        # Segments that are durable already, but that no manifest will name.
        yield from _finish(home.run(home.sweep))
        raise
    finally:
        writer.abort()
    new_tokens = sum(kept) * tree.page_tokens
    return SaveResult(
        request.generation, settled.tokens, new_tokens, new_bytes, time.monotonic() - began, settled.left_out_tokens,
        store_bytes,
    )  # fmt: skip


def _plan(
    tree: Tree, keeper: Keeper, nodes: list[TreeNode], budget: Budget, pages: list[int] | None = None
) -> SavePlan:
    home = keeper.home
    # A layout that changed without its revision changing must not be mixed with ours.
    segments = {k: index for k, index in home.segments.items() if index.pools == keeper.shape.pools}
    return plan_save(nodes, tree.content, home.known, segments, tree.page_tokens, keeper.record_pages(budget), pages)


def _hottest(plan: SavePlan, keeper: Keeper, budget: Budget) -> SavePlan:
    """What of a plan a tree may take that does not fit: its newest paths, stored or not."""
    stored = stored_sizes((entry[1] if entry else () for entry in plan.stored), keeper.home.segments)
    sizes = [a + b for a, b in zip(stored, new_sizes(plan, keeper.expected_page_bytes()), strict=True)]
    return restrict(plan, sizes, budget.cap * TREE_SHARE) if sum(sizes) > budget.cap * TREE_SHARE else plan


def _make_room(
    tree: Tree, keeper: Keeper, plan: SavePlan, request: SaveRequest
) -> Generator[Waiting, None, tuple[SavePlan, Budget]]:
    """Room for what a plan has to write, and what of it can be written then. Raises StoreFull where nothing can.

    Old generations go first. If that is not enough, what is stored outside of the plan goes: its stored part stands as
    the generation meanwhile, so that segments can be rewritten.
    """
    home = keeper.home
    wanted = sum(new_sizes(plan, keeper.expected_page_bytes()))
    budget = yield from _finish(home.run(lambda: keeper.make_room(wanted)))
    # What a generation that went held alone is not stored any more.
    plan = _plan(tree, keeper, plan.nodes, budget, plan.pages)
    wanted = sum(new_sizes(plan, keeper.expected_page_bytes()))
    stored = settle(plan, [])
    if wanted > budget.room and stored.nodes:
        budget = yield from _finish(home.run(lambda: keeper.shrink(stored, request, wanted)))
        plan = _plan(tree, keeper, plan.nodes, budget, plan.pages)  # the same nodes; what is stored of them has moved
    if wanted > budget.room:
        # One segment may always be written: where all that is stored is colder, it has to make room for what is not.
        room = max(budget.room, budget.segment_bytes)
        plan = restrict(plan, new_sizes(plan, keeper.expected_page_bytes()), room)
    if not plan.nodes:
        raise StoreFull(f"{home.root}: no room for a page of KV: {budget.cap} bytes for this rank")
    return plan, budget


def _write(
    tree: Tree, pages: Pages, plan: SavePlan, writer: SegmentWriter, request: SaveRequest, room: int
) -> Generator[Waiting, None, list[int]]:
    """Hand the records to the writer, in order, until time or room is used up: how many pages of each were there."""
    kept: list[int] = []
    for record in plan.records:
        size = pages.pools[0].bytes(record.key.pages, tree.page_tokens)
        while not writer.ready():
            yield writer.ready
        # What is not coded yet counts as it is: the estimate that the plan was made from may have been too good.
        while writer.due() + size > room and not writer.idle():
            yield writer.idle
        if (request.deadline and time.monotonic() > request.deadline) or (writer.due() + size > room and kept):
            break
        count, raw = _gather(tree, pages, plan.nodes, record)
        kept.append(count)
        if count:
            writer.submit(record.key.first_pages(count, tree.page_tokens), raw)
        yield None
    return kept


def _tokens(nodes: list[TreeNode]) -> int:
    return sum(n.end - n.start for n in nodes)


def _gather(tree: Tree, pages: Pages, nodes, record: RecordPlan) -> tuple[int, np.ndarray | None]:
    """The record's KV as far as its nodes are still there: (pages, bytes)."""
    runs, count = [], 0
    for source in record.sources:
        node = nodes[source.node]
        start = node.start + source.first * tree.page_tokens
        slots = tree.slots(node, start, start + source.pages * tree.page_tokens)
        if slots is None:  # evicted since it was planned, so everything below it is gone as well
            break
        runs.append(slots)
        count += source.pages
    return count, pages.gather(record.key.pool, runs) if runs else None


def _finish(future: Future) -> Generator[Waiting, None, object]:
    """Let the scheduler go on until another thread is done; returns or raises what it did."""
    while not future.done():
        yield lambda timeout: wait([future], timeout)
    return future.result()
