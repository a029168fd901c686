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
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_persist.background import Rest
from sglang_persist.bounded import Gate
from sglang_persist.errors import FormatError, StoreError
from sglang_persist.format.segment import SegmentIndex
from sglang_persist.plan.loading import LoadPlan, Resolved, Use, node_tokens, plan_restore, resolve
from sglang_persist.plan.tree import Known
from sglang_persist.plan.union import union
from sglang_persist.ports import Pages, Tree
from sglang_persist.store.home import Home
from sglang_persist.store.shard import Segment, close_after

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
    #: Over the inserted nodes in order: ranks with equal digests have equal trees.
    digest: Any = field(default_factory=hashlib.sha256)
    #: What was not loaded in time, or not to be waited for, and can go on while the engine serves.
    rest: Rest | None = None


@dataclass
class _Filling:
    """What the steps of one restore share."""

    resolved: Resolved
    plan: LoadPlan
    opened: dict[bytes, Segment]
    slots: Any
    #: Where each node's slots lie in the one allocation: node -> its runs, (first page of the node, begin, end).
    at: dict[int, list[tuple[int, int, int]]]
    deadline: float
    result: RestoreResult
    #: Nodes whose bytes did not come, and why.
    failed: dict[int, str] = field(default_factory=dict)
    #: Nodes that could still come, in the order of choice.
    late: list[int] = field(default_factory=list)
    #: The live node of each one that was inserted.
    inserted: dict[int, int] = field(default_factory=dict)
    #: The slots of nodes that were there in part: those in the tree, then ours.
    shared: dict[int, list] = field(default_factory=dict)

    def fail(self, nodes, reason: str) -> None:
        self.failed.update(dict.fromkeys(nodes, reason))

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def path(self, node: int) -> list[int]:
        """A node and its ancestors, from the root."""
        out = []
        while node >= 0:
            out.append(node)
            node = self.resolved.manifest.nodes[node].parent
        return out[::-1]

    def slots_of(self, path: list[int]) -> list:
        """The slots of these nodes, in as few runs as they lie in."""
        out: list = []
        runs: list[list[int]] = []
        for i in path:
            if i in self.shared:
                out += [*(self.slots[begin:end] for begin, end in runs), *self.shared[i]]
                runs = []
                continue
            for _, begin, end in self.at[i]:
                if runs and runs[-1][1] == begin:
                    runs[-1][1] = end
                else:
                    runs.append([begin, end])
        return out + [self.slots[begin:end] for begin, end in runs]


def restore(
    tree: Tree, pages: Pages, home: Home, settings, deadline: float, result: RestoreResult, go_on: bool = False,
    least_tokens: int = 0,
) -> Iterator[None]:  # fmt: skip
    """Fill an empty tree from `home.manifest` and `home.fuller`, in slices. Past `deadline` (monotonic), what is loaded
    is inserted. The rest is left out, or, with `go_on`, left in `result.rest`. Paths of less than `least_tokens` are
    not worth it.

    Fills in `result`; whatever is wrong with the store costs nodes there, never an exception. Raises TimeoutError where
    not even the indexes could be read in time.
    """
    result.total_tokens = home.manifest.tokens
    opening = home.run(lambda: home.open_segments(result.errors))
    reads: set[Future] = set()
    try:
        opened = opening.result(max(LOOK_SECONDS, deadline - time.monotonic()))
        resolved, ends = resolve(home.manifest, home.segments), None
        if home.fuller is not None:
            result.refused += resolved.refused
            whole, ends = union(home.manifest, home.fuller, home.segments)
            result.total_tokens = max(result.total_tokens, whole.tokens)
            resolved = resolve(whole, home.segments)
        plan = plan_restore(resolved, pages.capacity() // tree.page_tokens, least_tokens, ends)
        result.refused += plan.refused
        if plan.nodes and go_on and settings.restore == "background":
            result.rest = Rest(resolved, plan.chosen, dict(home.segments), opened, {})
        elif plan.nodes:
            slots = pages.allocate(plan.pages * tree.page_tokens)
            filling = _Filling(resolved, plan, opened, slots, _layout(plan, tree.page_tokens), deadline, result)
            yield from _fill(tree, pages, home, filling, settings.threads, reads)
            if filling.late and go_on:
                result.rest = Rest(resolved, filling.late, dict(home.segments), opened, filling.inserted)
            elif filling.late:
                result.refused[TIMEOUT] += len(filling.late)
    finally:
        # Not on this thread, and not before the last read of a file that answers slowly or never.
        if result.rest is None:
            opening.add_done_callback(lambda _: opening.exception() or close_after([*reads], opening.result().values()))


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


def _fill(tree: Tree, pages: Pages, home: Home, filling: _Filling, threads: int, reads: set[Future]) -> Iterator[None]:
    """Bytes, then nodes. Whatever ends this, slots of nodes that were not inserted go back to the allocator."""
    result, began = filling.result, time.monotonic()
    try:
        yield from _load(tree, pages, filling, threads, reads)
        pages.settle()
        loaded = time.monotonic()
        filling.late = _late(filling)
        _insert(tree, pages, home, filling)
        home.known = home.known.in_columns()
        result.load_seconds, result.insert_seconds = loaded - began, time.monotonic() - loaded
        result.nodes = len(filling.inserted)
    finally:
        for i, runs in filling.at.items():
            if i not in filling.inserted:
                for _, begin, end in runs:
                    pages.free(filling.slots[begin:end])


def _layout(plan: LoadPlan, page_tokens: int) -> dict[int, list[tuple[int, int, int]]]:
    """Where each node's slots lie in the one allocation."""
    at, out = 0, {}
    for _, _, uses in plan.records:
        for use, begin, end in _places(uses, at, page_tokens):
            out.setdefault(use.node, []).append((use.at, begin, end))
            at = end
    for runs in out.values():
        runs.sort()
    return out


def _places(uses: list[Use], at: int, page_tokens: int) -> list[tuple[Use, int, int]]:
    """Where in the allocation, from `at` on, each use of a record belongs. What a record holds lies together there, in
    its order, so that its bytes can be decoded where they belong."""
    out = []
    for use in sorted(uses, key=lambda u: u.first):
        out.append((use, at, at + use.pages * page_tokens))
        at = out[-1][2]
    return out


def _load(tree: Tree, pages: Pages, f: _Filling, threads: int, reads: set[Future]) -> Iterator[None]:
    """Read ahead on worker threads; what cannot be decoded in place is written to the pool on this one."""
    todo, ahead, pending, at = deque(f.plan.records), deque(), 0, 0
    readers, gate = ThreadPoolExecutor(threads, thread_name_prefix="persist-read"), Gate()
    rows = pages.rows(f.slots)
    runs = None if rows is None else _runs(rows)
    try:
        while todo or ahead:
            while todo and pending < AHEAD_BYTES and len(ahead) < AHEAD_RECORDS:
                segment, record, uses = todo.popleft()
                opened, places = f.opened[segment], _places(uses, at, tree.page_tokens)
                at = places[-1][2]
                targets = None
                if runs is not None and _is_whole(opened.index, record, places) and _in_a_row(runs, places[0][1], at):
                    targets = pages.memory(int(opened.index.pool[record]), int(rows[places[0][1]]), at - places[0][1])
                size = opened.index.raw_bytes(record)
                raw = pages.staging(size) if targets is None else None
                ahead.append((readers.submit(opened.load_into, record, targets or [raw], gate), opened.index, record,
                              places, raw))  # fmt: skip
                reads.add(ahead[-1][0])
                pending += size
            job, index, record, places, raw = ahead.popleft()
            pending -= index.raw_bytes(record)
            nodes = [use.node for use, _, _ in places]
            try:
                if not (left := f.left()):
                    raise TimeoutError
                job.result(left)
            except TimeoutError:
                f.fail(nodes, TIMEOUT)
                for *_, unread, _ in ahead:
                    f.fail((use.node for use, _, _ in unread), TIMEOUT)
                for *_, unread in todo:
                    f.fail((use.node for use in unread), TIMEOUT)
                break
            except (FormatError, StoreError) as error:
                index.bad.add(record)
                f.result.errors.append(str(error))
                f.fail(nodes, error.reason)
            else:
                if raw is not None:
                    _scatter(pages, f, index, record, raw, places, tree.page_tokens)
            reads.discard(job)
            yield
    finally:
        # A read that hangs is left behind. It must not write to slots that are another's by then.
        gate.close()
        readers.shutdown(wait=False, cancel_futures=True)


def _is_whole(index: SegmentIndex, record: int, places) -> bool:
    """Whether all of the record is wanted."""
    page = 0
    for use, _, _ in places:
        if use.first != page:
            return False
        page += use.pages
    return page == index.pages[record]


def _runs(rows: np.ndarray) -> np.ndarray:
    """Where, after the first, runs of slots begin that follow each other."""
    step = 1 << 20  # so that what lies between stays small
    found = [np.flatnonzero(np.diff(rows[at : at + step + 1]) != 1) + at + 1 for at in range(0, len(rows), step)]
    return np.concatenate(found)


def _in_a_row(runs: np.ndarray, begin: int, end: int) -> bool:
    after = np.searchsorted(runs, begin, side="right")
    return after == len(runs) or runs[after] >= end


def _scatter(pages: Pages, f: _Filling, index: SegmentIndex, record: int, raw: np.ndarray, places, page_tokens) -> None:
    rows = int(index.pages[record]) * page_tokens
    for use, begin, end in places:
        pages.scatter(int(index.pool[record]), f.slots[begin:end], raw, rows, use.first * page_tokens)


def _insert(tree: Tree, pages: Pages, home: Home, f: _Filling) -> None:
    m, result = f.resolved.manifest, f.result
    own: dict[int, np.ndarray] = {}  # of nodes that are needed again, for what stands below or for their own sake
    again = {m.nodes[i].parent for i in f.plan.nodes} | {i for i, n in Counter(f.plan.nodes).items() if n > 1}
    came, late = set(), set(f.late)

    def tokens_of(i: int) -> np.ndarray:
        extra, path = m.spaces[m.nodes[i].space].extra_tokens, f.path(i)
        return np.concatenate([own[path[0]], *(own[k][extra:] for k in path[1:])])

    def put(i: int, matched: int) -> int | None:
        return tree.insert(m.spaces[m.nodes[i].space], tokens_of(i), f.slots_of(f.path(i)), matched)

    def put_rest(i: int, start: int, end: int) -> int | None:
        """A node of which another brought the beginning: it was split while the generation was being saved."""
        space, tokens = m.spaces[m.nodes[i].space], tokens_of(i)
        there, slots = tree.matched(space, tokens)
        if not start < there <= end:
            return None
        before, ours, at = [], [], start
        for _, low, high in f.at[i]:
            cut = min(max(there - at, 0), high - low)
            before += [f.slots[low : low + cut]] if cut else []
            ours += [f.slots[low + cut : high]] if low + cut < high else []
            at += high - low
        found = tree.insert(space, tokens, [slots, *ours], there)
        if found is not None:
            f.shared[i] = [slots[start:], *ours]
            for run in before:
                pages.free(run)
        return found

    for i in f.plan.nodes:
        if i in late:
            continue
        node, space, start = m.nodes[i], m.spaces[m.nodes[i].space], f.resolved.start[i]
        end = start + node.pages * m.page_tokens
        if i in came:
            if i in f.inserted:  # it was put in as the beginning of another path; here it is used for its own sake
                put(i, end)
            continue
        came.add(i)
        reason = f.failed.get(i) or ("parent_refused" if node.parent >= 0 and node.parent not in f.inserted else None)
        if reason is None:
            own[i] = node_tokens(m, node, home.segments)
            found = put(i, start)
            if found is None:
                found = put_rest(i, start, end)
            if found is None:
                reason = "not_taken"
            else:
                f.inserted[i] = found
                result.digest.update(repr((space, start)).encode() + own[i].astype("<i8").tobytes())
                home.known[found] = Known(start, end, space, node.pieces)
                result.tokens += end - start
            if i not in again:
                del own[i]
        if reason:
            result.refused[reason] += 1
