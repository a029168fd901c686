"""The rest of a restore, while the engine serves: hottest paths first, into free slots only.

A node comes in pieces, each as large as a record. A piece's bytes are read and decoded ahead on other threads; slots,
bytes and the tree's node follow in one go, so that between two passes of the scheduler's loop no slot is nobody's: the
engine counts them. Where it has computed a path meanwhile, only what is missing is added; nothing that is there is
evicted for it. Paths that were put in hottest first would be evicted hottest first: in the end each is used once, the
oldest first, and after them what the engine has used meanwhile.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np

from sglang_persist.errors import FormatError, StoreError
from sglang_persist.format.segment import SegmentIndex
from sglang_persist.model import Piece
from sglang_persist.plan.loading import Resolved, node_tokens
from sglang_persist.plan.tree import Known
from sglang_persist.ports import Pages, Tree, Waiting
from sglang_persist.store.home import Home
from sglang_persist.store.shard import Segment, close_after
from sglang_persist.workers import workers

AHEAD_BYTES = 48 << 20
#: Of the pool: what is left free for requests that come meanwhile.
RESERVE_SHARE = 0.05
NO_CAPACITY = "no_capacity"


@dataclass
class Rest:
    """What a restore has left to do: nodes in the order of choice, hottest path first, parents before children."""

    resolved: Resolved
    nodes: list[int]
    segments: dict[bytes, SegmentIndex]
    opened: dict[bytes, Segment]
    #: The leaf of each path that is there already, by its place in the stored order.
    leaves: dict[int, int]

    @property
    def tokens(self) -> int:
        m = self.resolved.manifest
        return sum(m.nodes[i].pages for i in self.nodes) * m.page_tokens


class Background:
    """`step` until it is done; `abort` at any time between two steps. `tokens`: restored; `left`: still to come."""

    def __init__(self, tree: Tree, pages: Pages, home: Home, rest: Rest, threads: int):
        self._tree, self._pages, self._home, self._rest = tree, pages, home, rest
        self._m = rest.resolved.manifest
        self.tokens, self.left = 0, rest.tokens
        self.refused: Counter = Counter()
        self.errors: list[str] = []
        self._gone: set[int] = set()
        self._path: tuple[int, np.ndarray] | None = None
        self._reads: list[Future] = []
        self._readers = workers(threads, "persist-read")
        self._work = self._run()

    def step(self) -> Waiting:
        """A slice of work. Raises StopIteration at the end."""
        return next(self._work)

    def abort(self) -> None:
        self._work.close()

    def _run(self) -> Generator[Waiting, None, None]:
        try:
            yield from self._load()
            self._home.known = self._home.known.in_columns()
            yield from self._use_in_order()
        finally:
            self._readers.shutdown(wait=False, cancel_futures=True)
            close_after(self._reads, self._rest.opened.values())

    def _load(self) -> Generator[Waiting, None, None]:
        todo = deque((i, piece) for i in self._rest.nodes for piece in self._m.nodes[i].pieces)
        ahead: deque[tuple[int, Piece, Future]] = deque()
        pending = 0
        while todo or ahead:
            while todo and pending < AHEAD_BYTES:
                i, piece = todo.popleft()
                if ahead and (ahead[-1][1].segment, ahead[-1][1].record) == (piece.segment, piece.record):
                    job = ahead[-1][2]  # a record of several nodes of one path is read once
                else:
                    job = self._readers.submit(self._rest.opened[piece.segment].load, piece.record)
                    self._reads = [read for read in self._reads if not read.done()] + [job]
                ahead.append((i, piece, job))
                pending += self._size(piece)
            i, piece, job = ahead[0]
            if i not in self._gone and not job.done():
                yield lambda timeout, job=job: wait([job], timeout)
                continue
            ahead.popleft()
            pending -= self._size(piece)
            self.left -= piece.pages * self._m.page_tokens
            if self._m.nodes[i].parent in self._gone:
                self._refuse(i, "parent_refused")
            if i not in self._gone and (reason := self._put(i, piece, job)):
                self._refuse(i, reason)
                if reason == NO_CAPACITY:  # what is left is colder: it is not even read
                    for node, *_ in (*ahead, *todo):
                        self._refuse(node, reason)
                    self.left = 0
                    return
            yield None

    def _refuse(self, i: int, reason: str) -> None:
        if i not in self._gone:
            self._gone.add(i)
            self.refused[reason] += 1

    def _size(self, piece: Piece) -> int:
        return self._rest.segments[piece.segment].raw_bytes(piece.record)

    def _put(self, i: int, piece: Piece, job: Future) -> str | None:
        """One piece into the pool and the tree, or why not."""
        index, page = self._rest.segments[piece.segment], self._m.page_tokens
        try:
            raw = job.result()
        except (FormatError, StoreError) as error:
            index.bad.add(piece.record)
            self.errors.append(str(error))
            return error.reason
        space = self._m.spaces[self._m.nodes[i].space]
        start = self._rest.resolved.start[i] + piece.at * page
        end = start + piece.pages * page
        path = self._tokens(i)[: end + space.extra_tokens]
        there, prefix = self._tree.matched(space, path)
        if there >= end:
            return None  # the engine has computed it meanwhile
        if there < start:
            return "evicted"
        free = self._pages.capacity() - (end - there)
        if free < self._pages.size() * RESERVE_SHARE:
            return NO_CAPACITY
        slots = self._pages.allocate(end - there)
        found = None
        try:
            first = piece.first * page + there - start
            self._pages.scatter(piece.pool, slots, raw, int(index.pages[piece.record]) * page, first)
            self._pages.settle()
            found = self._tree.insert(space, path, [prefix, slots], there)
        finally:
            if found is None:
                self._pages.free(slots)
        if found is None:
            return "not_taken"
        # A snapshot that was taken meanwhile may have left this segment out of what it knows.
        self._home.segments.setdefault(index.id, index)
        cut = piece.cut(piece.at + (there - start) // page, piece.at + piece.pages)
        self._home.known[found] = Known(there, end, space, (cut,))
        self._rest.leaves[i] = found
        self.tokens += end - there
        return None

    def _tokens(self, i: int) -> np.ndarray:
        """Token ids of the path that ends with a node."""
        if self._path is None or self._path[0] != i:
            runs, at = [], i
            while at >= 0:
                node = self._m.nodes[at]
                own = node_tokens(self._m, node, self._rest.segments)
                runs.append(own[self._m.spaces[node.space].extra_tokens :] if node.parent >= 0 else own)
                at = node.parent
            self._path = i, np.concatenate(runs[::-1])
        return self._path[1]

    def _use_in_order(self) -> Generator[Waiting, None, None]:
        """Each restored path once, oldest first; then what was used since, in the order in which it was."""
        stored = {node: i for i, node in self._rest.leaves.items()}
        place = {i: n for n, i in enumerate(self._rest.leaves)}
        latest, ours, since = -1, [], []
        for leaf in self._tree.leaves():
            i = stored.get(leaf)
            if i is None or place[i] < latest:  # not ours, or used again after others were put in
                since.append(leaf)
            else:
                latest = place[i]
                ours.append((i, leaf))
        yield None
        for leaf in (*(leaf for _, leaf in sorted(ours)), *since):
            self._tree.use(leaf)
            yield None
