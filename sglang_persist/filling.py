"""What the steps of a restore share, and the first of them: bytes into slots.

Records are read, checked and decoded ahead on other threads, each once, newest path first: straight into their slots
where these lie in a row in memory.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_persist.background import Rest
from sglang_persist.bounded import Gate
from sglang_persist.errors import FormatError, StoreError
from sglang_persist.format.segment import SegmentIndex
from sglang_persist.model import Manifest
from sglang_persist.plan.loading import Fit, LoadPlan, Read, Resolved, Use
from sglang_persist.ports import Pages
from sglang_persist.store.shard import Segment

#: Of what is read ahead: bytes, and records.
AHEAD_BYTES, AHEAD_RECORDS = 96 << 20, 256
TIMEOUT = "timeout"


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


class Layout:
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
class Filling:
    """What the steps of one restore share."""

    resolved: Resolved
    plan: LoadPlan
    fits: Sequence[Fit]
    segments: dict[bytes, SegmentIndex]
    opened: dict[bytes, Segment]
    #: For each pool of the engine, what was allocated and where in it each node lies.
    slots: list[Any]
    layouts: list[Layout]
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


def load(pages: Pages, f: Filling, threads: int, reads: set[Future]) -> None:
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


def _scatter(pages: Pages, f: Filling, index: SegmentIndex, read: Read, raw: np.ndarray, places) -> None:
    page, fit = f.resolved.manifest.page_tokens, f.fits[read.pool]
    tokens = int(index.pages[read.record]) * page
    for use, begin, end in places:
        stored = index.pools[index.pool[read.record]] if fit.slices is not None else None
        pages.scatter(fit.pool, f.slots[fit.pool][begin:end], raw, tokens, use.first * page, stored, fit.slices)
