"""The restore story: from the newest sound generation to a warm tree.

    decide   resolve: which nodes are sound; union: what a fuller, older generation has beside them; plan_restore: the
             newest paths that fit, closed under parents
    move     slots for all of them at once, record after record; then bytes into them (filling.py)
    insert   oldest path first, so that the engine evicts in the order in which it would have (inserting.py)
Nothing is inserted before all of its bytes were verified; a node that fails takes its descendants, never its siblings.
No file is read on the caller's thread, and nothing is waited for beyond the deadline.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sglang_persist.background import Rest
from sglang_persist.errors import RanksDisagree
from sglang_persist.filling import TIMEOUT, Filling, Layout, RestoreResult, load
from sglang_persist.format.segment import SegmentIndex
from sglang_persist.inserting import Inserting
from sglang_persist.plan.agreement import ELSEWHERE, in_common, offer
from sglang_persist.plan.loading import Fit, LoadPlan, Resolved, plan_restore, resolve
from sglang_persist.plan.topology import Part as TreePart
from sglang_persist.plan.topology import joined, paged
from sglang_persist.plan.union import union
from sglang_persist.ports import ALONE, Pages, Ranks, Tree
from sglang_persist.store.home import Home
from sglang_persist.store.shard import Segment, close_after

T = TypeVar("T")

#: Looking what is stored may take so long, however short the timeout is; so what is left out can be counted.
LOOK_SECONDS = 1.0


@dataclass
class _Found:
    """What is stored: its tree, where paths end in it (None: at its leaves), where each of its pools belongs, and its
    segments."""

    resolved: Resolved
    ends: list[int] | None
    fits: list[Fit]
    segments: dict[bytes, SegmentIndex]
    opened: dict[bytes, Segment]
    #: Whether all of it is this shard's own.
    own: bool


def restore(
    tree: Tree, pages: Pages, home: Home, settings, deadline: float, result: RestoreResult, go_on: bool = False,
    least_tokens: int = 0, ranks: Ranks = ALONE,
) -> None:  # fmt: skip
    """Fill an empty tree from `home.manifest` and `home.fuller`. Past `deadline` (monotonic), what is loaded is
    inserted. The rest is left out, or, with `go_on`, left in `result.rest`. Paths of less than `least_tokens` are not
    worth it.

    Every rank of a tree calls this at the same time. All of them restore the same nodes: those that each of them has
    and could load.

    Fills in `result`; whatever is wrong with the store costs nodes there, never an exception. Raises TimeoutError where
    not even the indexes could be read in time, RanksDisagree where another rank failed.
    """
    # In the background a node comes piece by piece, each rank at its own pace, and no piece with what other pools hold.
    go_on = go_on and ranks.alone and len(pages.pools) == 1
    opening = home.run(lambda: _open(home, result.errors))
    reads: set[Future] = set()
    try:
        look = lambda: _look(tree, home, opening, deadline, result)  # noqa: E731
        found, _ = agreed(ranks, look, tell=lambda _found: None)
        go_on = go_on and found.own
        room = [pages.capacity(pool) for pool in range(len(pages.pools))]
        mine, answers = agreed(
            ranks, lambda: None if ranks.alone else offer(found.resolved, found.ends, found.segments, found.fits),
            tell=lambda mine: (mine and mine[0], room, least_tokens),
        )  # fmt: skip
        (plan, layouts), _ = agreed(
            ranks, lambda: _decide(found, mine, answers, pages, ranks.alone), tell=lambda _plan: None
        )
        result.refused += plan.refused
        resolved = found.resolved
        if plan.nodes and go_on and settings.restore == "background":
            result.rest = Rest(resolved, plan.chosen, dict(home.segments), found.opened, {})
        elif plan.nodes:
            filling = Filling(resolved, plan, found.fits, found.segments, found.opened, [], layouts, deadline, result)
            _fill(tree, pages, home, filling, settings.threads, reads, ranks)
            if filling.late and go_on:
                result.rest = Rest(resolved, filling.late, dict(home.segments), found.opened, filling.inserted)
            elif filling.late:
                result.refused[TIMEOUT] += len(filling.late)
    finally:
        # Not on this thread, and not before the last read of a file that answers slowly or never.
        if result.rest is None:
            opening.add_done_callback(lambda _: opening.exception() or close_after([*reads], opening.result().values()))


def agreed(ranks: Ranks, work: Callable[[], T], tell: Callable[[T], Any] = lambda mine: mine) -> tuple[T, list[Any]]:
    """(what this rank did, what each rank tells of it). Where it failed on one, it fails on all: then and there, so
    that none waits for another that has gone elsewhere."""
    mine, error = None, None
    try:
        mine = work()
    except Exception as found:
        error = found
    answers = ranks.gather((error is None, None if error else tell(mine)))
    if error is not None:
        raise error
    if not all(done for done, _ in answers):
        raise RanksDisagree("another rank of this engine failed")
    return mine, [answer for _, answer in answers]


def _decide(found: _Found, mine, answers: list, pages: Pages, alone: bool) -> tuple[LoadPlan, list[Layout]]:
    """What to load and where, the same on every rank. `answers`: of each rank its offer, its room and the shortest path
    that is worth it."""
    if not alone:
        found.resolved, found.ends = in_common(found.resolved, mine, [o for o, _, _ in answers], found.fits)
    m = found.resolved.manifest
    at_ends = [pool.at_ends for pool in pages.pools]
    slots = [min(of_pool) for of_pool in zip(*(c for _, c, _ in answers), strict=True)]
    room = [count if ends else count // m.page_tokens for count, ends in zip(slots, at_ends, strict=True)]
    plan = plan_restore(found.resolved, found.fits, room, answers[0][2], found.ends)
    by_nodes = not (alone and found.own)
    return plan, [Layout(plan, pool, ends, found.fits, m, by_nodes) for pool, ends in enumerate(at_ends)]


def _open(home: Home, errors: list[str]) -> dict[bytes, Segment]:
    """Every segment that may be read, by its id."""
    opened = {} if home.restores_another_cut else home.open_segments(errors)
    for source in home.sources:
        for part in source.parts:
            opened |= part.open(home.fs, errors)
    return opened


def _look(tree: Tree, home: Home, opening: Future, deadline: float, result: RestoreResult) -> _Found:
    """What is stored. Raises TimeoutError."""
    opened = opening.result(max(LOOK_SECONDS, deadline - time.monotonic()))
    segments = {name: segment.index for name, segment in opened.items()}
    own = () if home.restores_another_cut else (m for m in (home.manifest, home.fuller) if m is not None)
    trees = [(resolve(m, segments), None, [Fit(pool) for pool in range(len(m.pools))]) for m in own]
    for source in home.sources:
        parts = [TreePart(resolve(p.manifest, segments), segments, p.fits) for p in source.parts]
        trees.append(joined(parts))
    resolved, ends, fits = trees[0]
    for older, _, _ in trees[1:]:
        result.refused += resolved.refused
        resolved, ends = union(replace(resolved, refused=Counter()), older, segments, ends)
    if resolved.manifest.page_tokens != tree.page_tokens:
        resolved, ends, segments = paged(resolved, ends, segments, tree.page_tokens)
    m = resolved.manifest
    first = home.sources[0].parts[0].manifest if home.manifest is None or home.restores_another_cut else home.manifest
    result.total_tokens = max(first.tokens, sum(n.pages for n in m.nodes) * m.page_tokens)
    return _Found(resolved, ends, fits, segments, opened, not home.sources)


def _late(f: Filling) -> list[int]:
    """Nodes that were not loaded in time, and those below them, in the order of choice."""
    late: dict[int, None] = {}
    bad: set[int] = set()
    for i in f.plan.chosen:
        parent, reason = f.resolved.manifest.nodes[i].parent, f.failed.get(i)
        if parent in bad or reason not in (None, TIMEOUT):
            bad.add(i)
        elif parent in late or reason == TIMEOUT:
            late[i] = None
    return list(late)


def _fill(
    tree: Tree, pages: Pages, home: Home, filling: Filling, threads: int, reads: set[Future], ranks: Ranks
) -> None:
    """Bytes, then nodes. Whatever ends this, slots of nodes that were not inserted go back to the allocator."""
    result, began = filling.result, time.monotonic()

    def bytes_into_slots() -> tuple[dict[int, str], set[tuple[int, int]]]:
        for pool, layout in enumerate(filling.layouts):
            filling.slots.append(pages.allocate(layout.slots, pool))
        load(pages, filling, threads, reads)
        pages.settle()
        return filling.failed, filling.lacking

    try:
        _, answers = agreed(ranks, bytes_into_slots)
        for failed, lacking in answers:
            filling.failed = {**failed, **filling.failed}
            filling.lacking |= lacking
        loaded = time.monotonic()
        filling.late = _late(filling)
        Inserting(tree, pages, home, filling).all()
        home.known = home.known.in_columns()
        result.load_seconds, result.insert_seconds = loaded - began, time.monotonic() - loaded
        result.nodes = len(filling.inserted)
        lost = filling.failed or filling.lacking or result.errors or result.refused[ELSEWHERE]
        result.whole = not lost
    finally:
        for pool, layout in enumerate(filling.layouts[: len(filling.slots)]):
            for i in layout.runs:
                if i not in filling.inserted or (pool and (pool, i) not in filling.linked):
                    for run in filling.own(pool, i):
                        pages.free(run, pool)
