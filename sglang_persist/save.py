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
from array import array
from collections.abc import Generator
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np

from sglang_persist.errors import FormatError, StoreError, StoreFull
from sglang_persist.format.segment import RecordKey
from sglang_persist.keeper import TREE_SHARE, Budget, Keeper, SaveRequest
from sglang_persist.model import HASH_BYTES
from sglang_persist.plan.fitting import fit, new_sizes, restrict, up_to_states
from sglang_persist.plan.paths import select
from sglang_persist.plan.saving import SavePlan, plan_save, settle
from sglang_persist.plan.tree import Content, TreeNodes
from sglang_persist.ports import Gathered, Pages, Tree, Waiting
from sglang_persist.store.writer import SegmentWriter

#: For so long, or three times as long as its own part took, a leader waits for the other ranks' parts.
OTHERS_SECONDS = 15.0


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
    live = yield from tree.scan(at_once=request.last)
    yield None
    least = keeper.least_tokens() if request.least_tokens is None else request.least_tokens
    nodes = select(live, settings.hottest, least)
    yield None
    plan = yield from _plan(tree, keeper, nodes, budget)
    room = budget.room_for_one
    # An emptied tree must not stand above the last one that held something.
    if len(nodes) and (budget.room < 0 or sum(new_sizes(plan, keeper.expected_page_bytes())) > budget.room):
        try:
            plan, room = yield from _within_budget(tree, keeper, plan)
        except (StoreError, FormatError):
            yield from _finish(home.run(home.sweep))
            raise
    elif budget.room < 0:
        yield from _finish(home.run(keeper.hold))
    unchanged = not len(plan.records) and ready.complete and home.is_current((yield from settle(plan)))
    if not len(nodes) or unchanged:
        tokens, left_out = (home.manifest.tokens, home.manifest.left_out_tokens) if home.manifest else (0, 0)
        return SaveResult(home.generation, tokens, 0, 0, time.monotonic() - began, left_out)
    yield None

    writer = yield from _new_writer(keeper, budget)
    try:
        kept = yield from _write(tree, pages, plan, writer, request, room)
        yield from _finish(writer.seal())
        settled = yield from settle(plan, kept, writer.placed)
        settled.left_out_tokens += nodes.tokens - plan.nodes.tokens  # nodes for which the budget has no room
        if not len(settled.nodes):  # everything was evicted, or out of time, before it was read
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
    if request.leads and len(keeper.shape.shards) > 1:
        timeout = max(OTHERS_SECONDS, 3 * (time.monotonic() - began))
        added, store_bytes = yield from _finish(home.run(lambda: keeper.others(request.generation, timeout)))
        new_bytes += added
    new_tokens = int(np.array(kept)[plan.records.pool[: len(kept)] == 0].sum()) * tree.page_tokens
    return SaveResult(
        request.generation, settled.tokens, new_tokens, new_bytes, time.monotonic() - began, settled.left_out_tokens,
        store_bytes,
    )  # fmt: skip


def _new_writer(keeper: Keeper, budget: Budget) -> Generator[Waiting, None, SegmentWriter]:
    """Not on this thread: it waits for the threads that it starts."""
    future = keeper.home.run(lambda: keeper.new_writer(budget))
    try:
        return (yield from _finish(future))
    except GeneratorExit:
        future.add_done_callback(lambda done: done.exception() or done.result().abort())
        raise


def _plan(
    tree: Tree, keeper: Keeper, nodes: TreeNodes, budget: Budget, pages: np.ndarray | None = None
) -> Generator[Waiting, None, SavePlan]:
    home = keeper.home
    # A layout that changed without its revision changing must not be mixed with ours.
    segments = {k: index for k, index in home.segments.items() if index.pools == keeper.shape.pools}
    return (
        yield from plan_save(
            nodes,
            tree.content,
            home.known,
            segments,
            tree.page_tokens,
            keeper.record_pages(budget),
            pages,
            keeper.at_ends,
        )
    )


def _within_budget(tree: Tree, keeper: Keeper, plan: SavePlan) -> Generator[Waiting, None, tuple[SavePlan, int]]:
    """What of a plan has room, and the room that was made for it. Raises StoreFull where nothing has.

    Old generations go first. If that is not enough, the coldest paths go: those that are stored, and those that are to
    be. The stored part of the rest stands as the newest generation meanwhile, so that segments can be rewritten.
    """
    home, page_bytes = keeper.home, keeper.expected_page_bytes()
    wanted = sum(new_sizes(plan, page_bytes))
    budget = yield from _finish(home.run(lambda: keeper.make_room(wanted)))
    # What a generation that went held alone is not stored any more.
    plan = yield from _plan(tree, keeper, plan.nodes, budget)
    if sum(new_sizes(plan, page_bytes)) <= budget.room:
        return plan, budget.room_for_one
    for smaller in fit(plan, home.segments, page_bytes, budget.cap * TREE_SHARE):
        plan = smaller
        yield None
    plan = up_to_states(plan, keeper.at_ends)
    wanted, stored = sum(new_sizes(plan, page_bytes)), (yield from settle(plan))
    # Where all that is stored is colder, and so is to go, one segment may be written before it does.
    room = budget.room_for_one
    if wanted > budget.room and len(stored.nodes):
        budget = yield from _finish(home.run(lambda: keeper.shrink(stored, wanted)))
        # What is stored of the nodes has moved.
        plan, room = (yield from _plan(tree, keeper, plan.nodes, budget, plan.pages)), budget.room
    plan = up_to_states(restrict(plan, new_sizes(plan, page_bytes), max(0, room), of_new=True), keeper.at_ends)
    if not len(plan.nodes):
        yield from _finish(home.run(keeper.hold))
        raise StoreFull(f"{home.root}: no room for a page of KV: {budget.cap} bytes for this rank")
    return plan, room


def _write(
    tree: Tree, pages: Pages, plan: SavePlan, writer: SegmentWriter, request: SaveRequest, room: int
) -> Generator[Waiting, None, array]:
    """Hand the records to the writer, in order, until time or room is used up: how many pages of each were there."""
    kept = array("q")
    reader = _Reader(tree, pages, plan)
    counts = plan.records.record_pages().tolist()
    for i, (pool, count) in enumerate(zip(plan.records.pool.tolist(), counts, strict=True)):
        size = writer.cost(pool, count)
        while not writer.ready():
            yield writer.ready
        # What is not coded yet counts as it is: the estimate that the plan was made from may have been too good.
        while writer.due() + size > room and not writer.idle():
            yield writer.idle
        if (request.deadline and time.monotonic() > request.deadline) or writer.due() + size > room:
            break
        key, found = reader.read(i)
        kept.append(key.pages if key else 0)
        if key:
            writer.submit(key, found.raw, found.arrived, found.done)
        yield None
    return kept


class _Reader:
    """Reads the records of a plan from the tree and the pool, as far as their nodes are still there."""

    def __init__(self, tree: Tree, pages: Pages, plan: SavePlan):
        self._tree, self._pages, self._plan = tree, pages, plan
        self._last: tuple[int, Content | None] = (-1, None)

    def read(self, record: int) -> tuple[RecordKey, Gathered] | tuple[None, None]:
        tree, parts, runs, pool = self._tree, [], [], int(self._plan.records.pool[record])
        for node, first, pages in self._plan.records.sources(record):
            live = self._plan.nodes[node]
            start = live.start + first * tree.page_tokens
            found = self._content(node)
            if self._pages.pools[pool].at_ends:
                slots = found and tree.state(live.id)
            else:
                slots = found and tree.slots(live, start, start + pages * tree.page_tokens)
                slots = slots if slots is None else self._pages.of_pool(pool, slots)
            if slots is None:  # evicted since it was planned, so everything below it is gone as well
                break
            parts.append((found, start, first, pages))
            runs.append(slots)
        if not parts:
            return None, None
        return _key(pool, parts, tree.page_tokens), self._pages.gather(pool, runs)

    def _content(self, node: int) -> Content | None:
        # A long node is in many records, one after the other.
        if self._last[0] != node:
            self._last = node, self._tree.content(self._plan.nodes[node])
        return self._last[1]


def _key(pool: int, parts: list[tuple[Content, int, int, int]], page_tokens: int) -> RecordKey:
    """What a record is about: pages [first, first + pages) of these contents, the first of them at `start`."""
    top, start, first, _ = parts[0]
    extra = top.space.extra_tokens
    # Neighbouring bigram runs share their boundary token.
    tokens = [c.tokens[low * page_tokens : (low + n) * page_tokens + extra] for c, _, low, n in parts]
    return RecordKey(
        pool, top.space, start, top.hashes[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else top.parent_hash,
        np.concatenate([tokens[0], *(run[extra:] for run in tokens[1:])]),
        b"".join(c.hashes[low * HASH_BYTES : (low + n) * HASH_BYTES] for c, _, low, n in parts),
    )  # fmt: skip


def _finish(future: Future) -> Generator[Waiting, None, object]:
    """Let the scheduler go on until another thread is done; returns or raises what it did."""
    while not future.done():
        yield lambda timeout: wait([future], timeout)
    return future.result()
