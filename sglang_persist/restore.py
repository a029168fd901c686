"""The restore story: from the newest sound generation to a warm tree.

    decide   resolve: which nodes are sound; union: what a fuller, older generation has beside them; plan_restore: the
             newest paths that fit, closed under parents
    move     slots for all of them at once, record after record; records read, checked and decoded ahead on other
             threads, each once, newest path first: straight into their slots where these lie in a row in memory
    insert   oldest path first, so that the engine evicts in the order in which it would have
Nothing is inserted before all of its bytes were verified; a node that fails takes its descendants, never its siblings.
No file is read on the caller's thread, and nothing is waited for beyond the deadline.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from sglang_persist.background import Rest
from sglang_persist.bounded import Gate
from sglang_persist.errors import FormatError, RanksDisagree, StoreError
from sglang_persist.format.segment import SegmentIndex
from sglang_persist.model import Manifest, Piece
from sglang_persist.plan.agreement import ELSEWHERE, in_common, offer
from sglang_persist.plan.loading import (
    NO_STATE,
    Fit,
    LoadPlan,
    Read,
    Resolved,
    Use,
    leading,
    node_tokens,
    plan_restore,
    resolve,
)
from sglang_persist.plan.topology import Part as TreePart
from sglang_persist.plan.topology import joined, paged
from sglang_persist.plan.tree import Known
from sglang_persist.plan.union import union
from sglang_persist.ports import ALONE, Pages, Ranks, Tree
from sglang_persist.store.home import Home
from sglang_persist.store.shard import Segment, close_after

T = TypeVar("T")

#: Of what is read ahead: bytes, and records.
AHEAD_BYTES, AHEAD_RECORDS = 96 << 20, 256
TIMEOUT = "timeout"
#: Looking what is stored may take so long, however short the timeout is; so what is left out can be counted.
LOOK_SECONDS = 1.0


@dataclass
class RestoreResult:
    tokens: int = 0
    total_tokens: int = 0
    refused: Counter = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    #: Seconds that bytes took, and nodes; how many of these.
    load_seconds: float = 0.0
    insert_seconds: float = 0.0
    nodes: int = 0
    #: Whether all that was chosen is in the tree.
    whole: bool = False
    #: Over the inserted nodes in order: ranks with equal digests have equal trees.
    digest: Any = field(default_factory=hashlib.sha256)
    #: What was not loaded in time, or not to be waited for, and can go on while the engine serves.
    rest: Rest | None = None


class _Layout:
    """Where in one allocation the slots of each node lie that a pool gets something of.

    By records: what a record holds lies together there, in its order, so that its bytes can be decoded where they
    belong. By nodes: a node lies together, wherever its bytes come from, and in the same place on every rank.
    """

    def __init__(self, plan: LoadPlan, pool: int, at_ends: bool, fits: Sequence[Fit], m: Manifest, by_nodes: bool):
        #: Slots of a page, and in all.
        self._page, self.slots = 1 if at_ends else m.page_tokens, 0
        self._begin: dict[tuple[int, int], int] = {}
        #: node -> its runs in order, (first page of the node, begin, end).
        self.runs: dict[int, list[tuple[int, int, int]]] = {}
        if by_nodes:
            for i in plan.held[pool]:
                pages = m.nodes[i].pages
                self._add(i, *((pages - 1, 1) if at_ends else (0, pages)))
        else:
            for read in plan.reads:
                if fits[read.pool].pool == pool:
                    for use in read.uses:
                        self._add(use.node, use.at, use.pages)
            for runs in self.runs.values():
                runs.sort()

    def _add(self, node: int, at: int, pages: int) -> None:
        begin, self.slots = self.slots, self.slots + pages * self._page
        self.runs.setdefault(node, []).append((at, begin, self.slots))
        self._begin[node, at] = begin

    def places(self, uses: Sequence[Use]) -> list[tuple[Use, int, int]]:
        """Where each use of a record belongs: (use, begin, end)."""
        out = []
        for use in uses:
            own = self._begin.get((use.node, use.at))
            begin = self._begin[use.node, 0] + use.at * self._page if own is None else own
            out.append((use, begin, begin + use.pages * self._page))
        return out


@dataclass
class _Filling:
    """What the steps of one restore share."""

    resolved: Resolved
    plan: LoadPlan
    fits: Sequence[Fit]
    segments: dict[bytes, SegmentIndex]
    opened: dict[bytes, Segment]
    #: For each pool of the engine, what was allocated and where in it each node lies.
    slots: list[Any]
    layouts: list[_Layout]
    deadline: float
    result: RestoreResult
    #: Nodes whose bytes did not come, and why.
    failed: dict[int, str] = field(default_factory=dict)
    #: Of other pools than the first, (pool, node) whose bytes did not come: the node does without them.
    lacking: set[tuple[int, int]] = field(default_factory=set)
    #: Nodes that could still come, in the order of choice.
    late: list[int] = field(default_factory=list)
    #: The live node of each one that was inserted.
    inserted: dict[int, int] = field(default_factory=dict)
    #: Of other pools than the first, (pool, node) that the engine's tree has.
    linked: set[tuple[int, int]] = field(default_factory=set)
    #: The slots of nodes that were there in part: those in the tree, then ours.
    shared: dict[int, list] = field(default_factory=dict)

    def fail(self, read: Read, reason: str) -> None:
        pool = self.fits[read.pool].pool
        if pool:
            self.lacking.update((pool, use.node) for use in read.uses)
        else:
            self.failed.update((use.node, reason) for use in read.uses)

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def path(self, node: int) -> list[int]:
        """A node and its ancestors, from the root."""
        out = []
        while node >= 0:
            out.append(node)
            node = self.resolved.manifest.nodes[node].parent
        return out[::-1]

    def own(self, pool: int, node: int) -> list:
        """A node's slots in a pool."""
        return [self.slots[pool][begin:end] for _, begin, end in self.layouts[pool].runs[node]]

    def slots_of(self, path: list[int]) -> list:
        """The slots of these nodes, in as few runs as they lie in."""
        out: list = []
        runs: list[list[int]] = []
        for i in path:
            if i in self.shared:
                out += [*(self.slots[0][begin:end] for begin, end in runs), *self.shared[i]]
                runs = []
                continue
            for _, begin, end in self.layouts[0].runs[i]:
                if runs and runs[-1][1] == begin:
                    runs[-1][1] = end
                else:
                    runs.append([begin, end])
        return out + [self.slots[0][begin:end] for begin, end in runs]


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
            filling = _Filling(resolved, plan, found.fits, found.segments, found.opened, [], layouts, deadline, result)
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


def _decide(found: _Found, mine, answers: list, pages: Pages, alone: bool) -> tuple[LoadPlan, list[_Layout]]:
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
    return plan, [_Layout(plan, pool, ends, found.fits, m, by_nodes) for pool, ends in enumerate(at_ends)]


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


def _late(f: _Filling) -> list[int]:
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
    tree: Tree, pages: Pages, home: Home, filling: _Filling, threads: int, reads: set[Future], ranks: Ranks
) -> None:
    """Bytes, then nodes. Whatever ends this, slots of nodes that were not inserted go back to the allocator."""
    result, began = filling.result, time.monotonic()

    def load() -> tuple[dict[int, str], set[tuple[int, int]]]:
        for pool, layout in enumerate(filling.layouts):
            filling.slots.append(pages.allocate(layout.slots, pool))
        _load(pages, filling, threads, reads)
        pages.settle()
        return filling.failed, filling.lacking

    try:
        _, answers = agreed(ranks, load)
        for failed, lacking in answers:
            filling.failed = {**failed, **filling.failed}
            filling.lacking |= lacking
        loaded = time.monotonic()
        filling.late = _late(filling)
        _insert(tree, pages, home, filling)
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


def _load(pages: Pages, f: _Filling, threads: int, reads: set[Future]) -> None:
    """Read ahead on worker threads; what cannot be decoded in place is written to the pool on this one."""
    todo, ahead, pending = deque(f.plan.reads), deque(), 0
    readers, gate = ThreadPoolExecutor(threads, thread_name_prefix="persist-read"), Gate()
    numbers = [pages.slot_numbers(slots) for slots in f.slots]
    runs = [None if n is None else _runs(n) for n in numbers]
    try:
        while todo or ahead:
            while todo and pending < AHEAD_BYTES and len(ahead) < AHEAD_RECORDS:
                read = todo.popleft()
                opened, fit = f.opened[read.segment], f.fits[read.pool]
                pool, places, targets = fit.pool, f.layouts[fit.pool].places(read.uses), None
                begin, end = places[0][1], places[-1][2]
                whole = _fills(f.segments[read.segment], read, fit, places)
                if whole and runs[pool] is not None and _in_a_row(runs[pool], begin, end):
                    targets = pages.memory(pool, int(numbers[pool][begin]), end - begin)
                size = opened.index.raw_bytes(read.record)
                raw = pages.staging(size) if targets is None else None
                job = readers.submit(opened.load_into, read.record, targets or [raw], gate)
                ahead.append((job, read, size, places, raw))
                reads.add(job)
                pending += size
            job, read, size, places, raw = ahead.popleft()
            pending -= size
            index = f.segments[read.segment]
            try:
                if not (left := f.left()):
                    raise TimeoutError
                job.result(left)
            except TimeoutError:
                for unread in (read, *(entry[1] for entry in ahead), *todo):
                    f.fail(unread, TIMEOUT)
                break
            except (FormatError, StoreError) as error:
                index.bad.add(read.record)
                f.result.errors.append(str(error))
                f.fail(read, error.reason)
            else:
                if raw is not None:
                    _scatter(pages, f, index, read, raw, places)
            reads.discard(job)
    finally:
        # A read that hangs is left behind. It must not write to slots that are another's by then.
        gate.close()
        readers.shutdown(wait=False, cancel_futures=True)


def _fills(index: SegmentIndex, read: Read, fit: Fit, places: Sequence[tuple[Use, int, int]]) -> bool:
    """Whether all of the record is wanted, as it is, and belongs together."""
    page, at = 0, places[0][1]
    for use, begin, end in places:
        if use.first != page or begin != at:
            return False
        page, at = page + use.pages, end
    return fit.slices is None and page == index.pages[read.record]


def _runs(rows: np.ndarray) -> np.ndarray:
    """Where, after the first, runs of slots begin that follow each other."""
    step = 1 << 20  # so that what lies between stays small
    found = [np.flatnonzero(np.diff(rows[at : at + step + 1]) != 1) + at + 1 for at in range(0, len(rows), step)]
    return np.concatenate([np.empty(0, np.int64), *found])


def _in_a_row(runs: np.ndarray, begin: int, end: int) -> bool:
    after = np.searchsorted(runs, begin, side="right")
    return after == len(runs) or runs[after] >= end


def _scatter(pages: Pages, f: _Filling, index: SegmentIndex, read: Read, raw: np.ndarray, places) -> None:
    page, fit = f.resolved.manifest.page_tokens, f.fits[read.pool]
    tokens = int(index.pages[read.record]) * page
    for use, begin, end in places:
        stored = index.pools[index.pool[read.record]] if fit.slices is not None else None
        pages.scatter(fit.pool, f.slots[fit.pool][begin:end], raw, tokens, use.first * page, stored, fit.slices)


def _insert(tree: Tree, pages: Pages, home: Home, f: _Filling) -> None:
    m, result = f.resolved.manifest, f.result
    own: dict[int, np.ndarray] = {}  # of nodes that are needed again, for what stands below or for their own sake
    again = {m.nodes[i].parent for i in f.plan.nodes} | {i for i, n in Counter(f.plan.nodes).items() if n > 1}
    came, late, others = set(), set(f.late), range(1, len(pages.pools))
    # A tree of states takes a path only together with the state after it: nodes that have none come into it with the
    # next one below them that has.
    states = next((pool for pool in others if pages.pools[pool].at_ends), None)
    stateful = set() if states is None else {i for i in f.layouts[states].runs if (states, i) not in f.lacking}
    leads = None if states is None else leading([n.parent for n in m.nodes], stateful)
    waiting: set[int] = set()

    def tokens_of(i: int) -> np.ndarray:
        extra, path = m.spaces[m.nodes[i].space].extra_tokens, f.path(i)
        return np.concatenate([own[path[0]], *(own[k][extra:] for k in path[1:])])

    def put(i: int, matched: int, absent: Sequence[int], state=None) -> int | None:
        return tree.insert(m.spaces[m.nodes[i].space], tokens_of(i), f.slots_of(f.path(i)), matched, absent, state)

    def put_rest(run: list[int], state) -> int | None:
        """Nodes, one below the other, of which another path brought the beginning: it was split while the generation
        was being saved."""
        i, at = run[-1], f.resolved.start[run[0]]
        space, tokens, end = m.spaces[m.nodes[i].space], tokens_of(i), f.resolved.start[i] + len(own[i])
        there, slots = tree.matched(space, tokens)
        if not at < there <= end:
            return None
        before, ours, shared = [], [], {}
        for k in run:
            shared[k] = [slots[at : at + m.nodes[k].pages * m.page_tokens]]
            for part in f.own(0, k):
                cut = min(max(there - at, 0), len(part))
                before += [part[:cut]] if cut else []
                if cut < len(part):
                    ours.append(part[cut:])
                    shared[k].append(part[cut:])
                at += len(part)
        found = tree.insert(space, tokens, [slots, *ours], there, absent_of(()), state)
        if found is not None:
            f.shared.update(shared)
            for part in before:
                pages.free(part)
        return found

    def absent_of(linked: Collection[int]) -> list[int]:
        return [pool for pool in others if pool != states and pool not in linked]

    def sound(piece: Piece) -> bool:
        return piece.record not in home.segments[piece.segment].bad

    for i in f.plan.nodes:
        if i in late:
            continue
        node, space, start = m.nodes[i], m.spaces[m.nodes[i].space], f.resolved.start[i]
        end = start + node.pages * m.page_tokens
        if i in came:
            if i in f.inserted:  # it was put in as the beginning of another path; here it is used for its own sake
                tree.refresh(space, tokens_of(i), f.inserted[i])
            continue
        came.add(i)
        reason = f.failed.get(i)
        if node.parent >= 0 and node.parent not in f.inserted and node.parent not in waiting:
            reason = reason or "parent_refused"
        if leads is not None and i not in leads:
            reason = reason or NO_STATE
        if reason is None:
            own[i] = node_tokens(m, node, f.segments)
            if states is not None and i not in stateful:
                waiting.add(i)
                continue
            above = []
            while (parent := m.nodes[above[-1] if above else i].parent) in waiting:
                above.append(parent)
            state = f.own(states, i)[0] if states is not None else None
            linked = [p for p in others if p != states and i in f.layouts[p].runs and (p, i) not in f.lacking]
            for pool in linked:
                pages.link(pool, f.own(0, i), f.own(pool, i))
            found = put(i, f.resolved.start[above[-1]] if above else start, absent_of(linked), state)
            if found is not None:
                f.linked.update((pool, i) for pool in linked)
            else:
                for pool in linked:
                    pages.link(pool, f.own(0, i), None)
                found = put_rest([*reversed(above), i], state)
            if found is None:
                reason = "not_taken"
            else:
                # Where another path has brought this very node, it has its state already.
                held = tree.state(found) if states is not None else None
                if held is not None and int(held[0]) == int(state[0]):
                    f.linked.add((states, i))
                for k in (*reversed(above), i):
                    waiting.discard(k)
                    f.inserted[k] = found
                    begin = f.resolved.start[k]
                    result.digest.update(repr((space, begin)).encode() + own[k].astype("<i8").tobytes())
                    result.tokens += m.nodes[k].pages * m.page_tokens
                if all(p.segment in home.segments for p in node.pieces) and m.page_tokens == tree.page_tokens:
                    home.known[found] = Known(start, end, space, tuple(p for p in node.pieces if sound(p)))
            if i not in again:
                del own[i]
        if reason:
            result.refused[reason] += 1
    if waiting:
        result.refused["not_taken"] += len(waiting)
