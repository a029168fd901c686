"""The last step of a restore: nodes into the engine's tree, oldest path first, once their bytes are in their slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from sglang_persist.filling import Filling
from sglang_persist.plan.loading import NO_STATE, leading, node_tokens
from sglang_persist.plan.tree import Known
from sglang_persist.ports import Pages, Tree
from sglang_persist.store.home import Home

NOT_TAKEN = "not_taken"


class Inserting:
    """`all` inserts every node whose bytes came, and counts why others were not. A node that fails takes its
    descendants, never its siblings.

    A tree of states takes a path only together with the state after it: nodes that have none wait, and come into it
    with the next one below them that has.
    """

    def __init__(self, tree: Tree, pages: Pages, home: Home, filling: Filling):
        self._tree, self._pages, self._home, self._f = tree, pages, home, filling
        self._m = m = filling.resolved.manifest
        nodes = filling.plan.nodes
        #: Token ids of nodes that are needed again, for what stands below or for their own sake.
        self._own: dict[int, np.ndarray] = {}
        self._again = {m.nodes[i].parent for i in nodes} | {i for i, n in Counter(nodes).items() if n > 1}
        others = range(1, len(pages.pools))
        self._states = next((pool for pool in others if pages.pools[pool].at_ends), None)
        #: Pools, beside the first, whose slots go with those of the first.
        self._linked = [pool for pool in others if pool != self._states]
        self._waiting: set[int] = set()
        if self._states is not None:
            held, lacking = filling.layouts[self._states].runs, filling.lacking
            self._stateful = {i for i in held if (self._states, i) not in lacking}
            self._leads = leading([n.parent for n in m.nodes], self._stateful)

    def all(self) -> None:
        f, seen, late = self._f, set(), set(self._f.late)
        for i in f.plan.nodes:
            if i in late:
                continue
            if i not in seen:
                seen.add(i)
                if reason := self._why_not(i) or self._put(i):
                    f.result.refused[reason] += 1
            elif i in f.inserted:  # it was put in as the beginning of another path; here it is used for its own sake
                self._tree.refresh(self._space(i), self._tokens(i), f.inserted[i])
        if self._waiting:
            f.result.refused[NOT_TAKEN] += len(self._waiting)

    def _why_not(self, i: int) -> str | None:
        parent = self._m.nodes[i].parent
        if reason := self._f.failed.get(i):
            return reason
        if parent >= 0 and parent not in self._f.inserted and parent not in self._waiting:
            return "parent_refused"
        return NO_STATE if self._states is not None and i not in self._leads else None

    def _put(self, i: int) -> str | None:
        """One node, and those above that have waited for it. Returns why it was not taken."""
        self._own[i] = node_tokens(self._m, self._m.nodes[i], self._f.segments)
        if self._states is not None and i not in self._stateful:
            self._waiting.add(i)
            return None
        run = [i]
        while (parent := self._m.nodes[run[0]].parent) in self._waiting:
            run.insert(0, parent)
        found = self._link_and_insert(run)
        if found is not None:
            self._count(run, found)
        if i not in self._again:
            del self._own[i]
        return NOT_TAKEN if found is None else None

    def _link_and_insert(self, run: list[int]) -> int | None:
        """Nodes, one below the other, the last with what other pools hold of it. Returns the live node of that."""
        f, i = self._f, run[-1]
        state = None if self._states is None else f.own(self._states, i)[0]
        linked = [p for p in self._linked if i in f.layouts[p].runs and (p, i) not in f.lacking]
        for pool in linked:
            self._pages.link(pool, f.own(0, i), f.own(pool, i))
        slots, matched = f.slots_of(f.path(i)), f.resolved.start[run[0]]
        found = self._tree.insert(self._space(i), self._tokens(i), slots, matched, self._absent(linked), state)
        if found is not None:
            f.linked.update((pool, i) for pool in linked)
        else:
            for pool in linked:
                self._pages.link(pool, f.own(0, i), None)
            found = self._insert_rest(run, state)
        if found is not None and self._states is not None:
            # Where another path has brought this very node, it has its state already.
            held = self._tree.state(found)
            if held is not None and int(held[0]) == int(state[0]):
                f.linked.add((self._states, i))
        return found

    def _insert_rest(self, run: list[int], state) -> int | None:
        """Nodes of which another path brought the beginning: it was split while the generation was being saved."""
        f, m, i, at = self._f, self._m, run[-1], self._f.resolved.start[run[0]]
        space, tokens, end = self._space(i), self._tokens(i), f.resolved.start[i] + len(self._own[i])
        there, slots = self._tree.matched(space, tokens)
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
        found = self._tree.insert(space, tokens, [slots, *ours], there, self._absent(()), state)
        if found is not None:
            f.shared.update(shared)
            for part in before:
                self._pages.free(part)
        return found

    def _count(self, run: Sequence[int], found: int) -> None:
        f, m, home, i = self._f, self._m, self._home, run[-1]
        space = self._space(i)
        for k in run:
            self._waiting.discard(k)
            f.inserted[k] = found
            begin = f.resolved.start[k]
            f.result.digest.update(repr((space, begin)).encode() + self._own[k].astype("<i8").tobytes())
            f.result.tokens += m.nodes[k].pages * m.page_tokens
        pieces, start = m.nodes[i].pieces, f.resolved.start[i]
        # What came from elsewhere, or in other pages, is not stored here as it is: the next snapshot writes it.
        if all(p.segment in home.segments for p in pieces) and m.page_tokens == self._tree.page_tokens:
            sound = tuple(p for p in pieces if p.record not in home.segments[p.segment].bad)
            home.known[found] = Known(start, start + m.nodes[i].pages * m.page_tokens, space, sound)

    def _space(self, i: int):
        return self._m.spaces[self._m.nodes[i].space]

    def _tokens(self, i: int) -> np.ndarray:
        """Token ids of the path that ends with a node."""
        extra, path = self._space(i).extra_tokens, self._f.path(i)
        return np.concatenate([self._own[path[0]], *(self._own[k][extra:] for k in path[1:])])

    def _absent(self, linked: Collection[int]) -> list[int]:
        return [pool for pool in self._linked if pool not in linked]
