"""The tree of a large server is read in steps, between which it serves: nothing is missed, and order is kept."""

from __future__ import annotations

import flow
import numpy as np
import pytest
import real

from sglang_persist.engine import tree as live
from sglang_persist.fs import REAL
from sglang_persist.store import verify


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture(autouse=True, params=["long nodes", "short nodes"])
def in_small_steps(monkeypatch, request):
    """Every tree counts as a large one, every node as long or as short, and a step looks up one path."""
    monkeypatch.setattr(live, "LONG_NODE", {"long nodes": 0, "short nodes": 1 << 30}[request.param])
    monkeypatch.setattr(live, "EXACT_LEAVES", 0)
    monkeypatch.setattr(live, "STEP_PATHS", 1)


def watched(**kind) -> real.Engine:
    e = real.engine(**kind)
    e.tree.watch()
    return e


def scan(e: real.Engine, between=lambda: None) -> list:
    work = e.tree.scan()
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value
        between()


def shape(nodes) -> list[tuple]:
    """Each leaf's path as node ids and where they end, in order."""
    parents = {n.parent for n in nodes}
    out = []
    for i in range(len(nodes)):
        path, at = [], i if i not in parents else -1
        while at >= 0:
            path.append((nodes[at].id, nodes[at].start, nodes[at].end))
            at = nodes[at].parent
        if path:
            out.append(tuple(path[::-1]))
    return out


@pytest.mark.parametrize("core", ["rust", "python"])
def test_scan_in_steps_finds_what_the_engine_would_evict_in_that_order(core, rng):
    e = watched(core=core)
    heads = [real.random_tokens(rng, 40) for _ in range(3)]
    for head in heads:
        e.put(head)
    tails = [heads[i % 3] + real.random_tokens(rng, 20 + i) for i in range(12)]
    for tokens in tails:
        e.put(tokens)
    assert shape(scan(e)) == shape(e.tree.nodes())
    # What was found is remembered, also once some of it is gone, was used again, and more has come.
    e.evict(100)
    for tokens in (tails[7], tails[5], heads[0] + real.random_tokens(rng, 9)):
        e.put(tokens)
    assert shape(scan(e)) == shape(e.tree.nodes())


@pytest.mark.parametrize("core", ["rust", "python"])
def test_scan_in_steps_finds_nodes_that_were_split_in_all_spaces(core, rng):
    e = watched(core=core)
    real.populate(e, rng, 30)
    assert sorted(shape(scan(e))) == sorted(shape(e.tree.nodes()))


@pytest.mark.parametrize("seed", range(6))
def test_scans_of_a_tree_that_lives_show_only_what_is_there_and_miss_next_to_nothing(seed):
    rng = np.random.default_rng(seed)
    e = watched(size=3000)
    heads = [real.random_tokens(rng, 40) for _ in range(3)]
    prompts: list[list[int]] = []
    for turn in range(12):
        for _ in range(int(rng.integers(1, 12))):
            old = prompts[rng.integers(len(prompts))] if prompts and rng.random() < 0.4 else heads[rng.integers(3)]
            cut = int(rng.integers(1, len(old) + 1))
            tokens = old[:cut] + real.random_tokens(rng, int(rng.integers(1, 90)))
            if (missing := len(tokens) - e.allocator.available_size()) > 0:
                e.evict(missing)
            e.put(tokens)
            prompts.append(tokens)
        if rng.random() < 0.3:
            e.evict(int(rng.integers(1, 600)))
        found, exact = scan(e), e.tree.nodes() if turn % 3 == 2 else None
        if exact is not None:
            # A beginning that lost all that was below it between two scans may be missing until it is used again.
            there = {n.id for n in found}
            assert sum(n.end - n.start for n in exact if n.id not in there) <= 0.05 * e.cache.total_size()[0]
            assert there <= {n.id for n in exact}


def test_beginning_of_evicted_paths_is_still_found(rng):
    e = watched()
    head = real.random_tokens(rng, 100)
    old = [e.put(head + real.random_tokens(rng, 50)) for _ in range(3)]
    other = e.put(real.random_tokens(rng, 60))
    scan(e)
    e.match(other)
    e.evict(150)
    assert [e.match(key) for key in old] == [100] * 3
    assert sorted(shape(scan(e))) == sorted(shape(e.tree.nodes()))
    assert sum(n.end - n.start for n in scan(e)) == 160


def test_paths_that_are_split_between_two_steps_come_back_whole(tmp_path, rng):
    e = watched(size=8192)
    prompts = [real.random_tokens(rng, 200) for _ in range(6)]
    for p in prompts:
        e.put(p)
    more: list[list[int]] = []
    cuts = iter([150, 20, 110, 60, 190, 5])

    def split():
        if (cut := next(cuts, None)) is not None:
            more.append(prompts[len(more)][:cut] + real.random_tokens(rng, 30))
            e.put(more[-1])

    at = flow.home(tmp_path)
    job = flow.begin(e, at)
    scanned = e.tree.scan

    def scan_and_split(at_once=False):
        work = scanned(at_once)
        while True:
            try:
                next(work)
            except StopIteration as done:
                return done.value
            split()
            yield None

    e.tree.scan = scan_and_split
    flow.finish(job)
    assert len(more) == 6
    at.close()
    assert verify.verify(REAL, tmp_path).findings == []
    again, there, result = flow.restart(tmp_path, size=8192)
    assert not result.refused
    key = lambda p: real.RadixKey(real.array("q", p), None)  # noqa: E731
    assert [again.match(key(p)) for p in prompts] == [200] * 6
    again.check()
    # Bit for bit, and what was there twice was put in once.
    whole = {(space, tokens): kv for space, tokens, _, kv in e.paths()}
    for space, tokens, _, kv in again.paths():
        assert any(
            other[: len(tokens)] == tokens and real._first_rows(stored, len(other), len(tokens)) == kv
            for (s, other), stored in whole.items()
            if s == space
        )
    # And what is put back counts as stored.
    there.become_writer()
    assert flow.snapshot(again, there).new_tokens == 0
    again.check_evictable()


def test_too_many_to_remember_falls_back_to_the_engines_order(monkeypatch, rng):
    monkeypatch.setattr(live, "REMEMBERED", 5)
    e = watched()
    real.populate(e, rng, 20)
    assert shape(scan(e)) == shape(e.tree.nodes())


def test_new_pages_are_hashed_before_they_are_many(monkeypatch, rng):
    monkeypatch.setattr(live, "HASHED_PAGES", 100)
    e = watched()
    calls = []
    core = e.tree.core

    class Watched:
        def __getattr__(self, name):
            return getattr(core, name)

        def backfill_missing_hash_values(self):
            calls.append(1)
            return core.backfill_missing_hash_values()

    e.tree.core = Watched()
    for _ in range(5):
        e.put(real.random_tokens(rng, 30))
        e.tree.keep_current()
    assert len(calls) == 1
    assert e.tree.content(e.tree.nodes()[0]) is not None
