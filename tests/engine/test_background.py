"""What is not restored before the first request goes on while the engine serves, and never gets in its way."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import real
from process import Process

from sglang_persist.fs import REAL, FileSystem, ReadFile
from sglang_persist.store import names, verify


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def stored(monkeypatch, tmp_path, rng):
    """(a store, the engine that it was saved from)."""
    process = Process(monkeypatch, tmp_path / "store").start()
    real.populate(process.engine, rng, 14)
    process.engine.put(real.random_tokens(rng, 900))
    process.snapshot()
    process.persistence.home.close()
    return tmp_path / "store", process.engine


def background(monkeypatch, store: Path, fs: FileSystem = REAL, **settings) -> Process:
    return Process(monkeypatch, store, fs, restore="background", **settings)


def content(e: real.Engine) -> list[tuple]:
    """Paths in the order of eviction; where nodes end is left out."""
    return [(space, tokens, kv) for space, tokens, _, kv in e.paths()]


def finish(process: Process) -> None:
    """Pass after pass; after each, every slot is free or in the tree, as SGLang checks when it is idle."""

    def done() -> bool:
        process.engine.check()
        return process.status["restore"]["state"] != "running"

    process.passes(done)


class Gated(FileSystem):
    """Records can be read once `open_gate` was called."""

    def __init__(self):
        self.gate = threading.Event()

    def open(self, path):
        return _GatedFile(path, self.gate) if path.suffix == ".kvs" else super().open(path)


class _GatedFile(ReadFile):
    def __init__(self, path: Path, gate: threading.Event):
        self.gate = gate
        super().__init__(path)

    def read_into(self, offset: int, out: np.ndarray) -> int:
        if threading.current_thread().name.startswith("persist-read"):
            assert self.gate.wait(60)
        return super().read_into(offset, out)


@pytest.mark.parametrize("core", ["rust", "python"])
def test_background_holds_nothing_back_and_ends_with_the_same_tree(monkeypatch, stored, core):
    store, before = stored
    process = background(monkeypatch, store, core=core).start()
    found = process.status["restore"]
    assert (found["state"], found["tokens_restored"], found["why_cold"]) == ("running", 0, None)
    finish(process)
    found = process.status["restore"]
    assert found["state"] == "done"
    assert found["tokens_restored"] == found["tokens_total"] == before.cache.total_size()[0]
    assert content(process.engine) == content(before), "eviction order included"
    # What was restored is stored already.
    assert process.snapshot()["last_new_tokens"] == 0
    process.engine.check_evictable()
    process.persistence.home.close()
    assert not list(store.rglob("restoring-*"))


def test_hottest_paths_come_first(monkeypatch, stored):
    store, before = stored
    process = background(monkeypatch, store).start()
    job = process.persistence._background
    while not job.tokens:  # less than a pass of an idle loop does
        if waiting := job.step():
            waiting(5)
    there = {(space, tokens) for space, tokens, _, _ in process.engine.paths()}
    hottest = before.paths()[-1]
    assert all(space == hottest[0] and hottest[1][: len(tokens)] == tokens for space, tokens in there)
    finish(process)


def test_what_does_not_come_within_the_timeout_goes_on_in_the_background(monkeypatch, stored):
    store, before = stored
    fs = Gated()
    process = Process(monkeypatch, store, fs, restore_timeout=0.2).start()
    assert process.status["restore"]["state"] == "running"
    assert process.status["restore"]["tokens_restored"] == 0
    for _ in range(20):  # reading waits, serving does not
        process.persistence.tick()
    fs.gate.set()
    finish(process)
    assert process.status["restore"]["state"] == "done"
    assert content(process.engine) == content(before)


def test_a_read_that_comes_too_late_does_not_write_to_slots_that_others_have_by_then(monkeypatch, stored, rng):
    store, _ = stored
    fs = Gated()
    process = Process(monkeypatch, store, fs, restore_timeout=0.2).start()
    late = [t for t in threading.enumerate() if t.name.startswith("persist-read")]
    assert late
    process.persistence.pause()  # what would go on in the background is given up
    free = process.engine.allocator.available_size()
    for _ in range(8):
        process.engine.put(real.random_tokens(rng, free // 8))
    assert process.engine.allocator.available_size() < 8
    before = content(process.engine)
    fs.gate.set()
    for thread in late:
        thread.join(60)
    assert content(process.engine) == before


def test_what_the_engine_computes_meanwhile_stays_and_is_newer(monkeypatch, stored, rng):
    store, before = stored
    fs = Gated()
    process = background(monkeypatch, store, fs).start()
    whole = {(space, tokens) for space, tokens, _, _ in before.paths()}
    some = sorted(whole, key=lambda p: p[1])[::3]
    for space, tokens in some:  # one as a whole, one in part, one that is new
        process.engine.put(list(tokens), space.extra_key, space.cache_salt)
    space, tokens = before.paths()[0][:2]
    process.engine.put(list(tokens[: len(tokens) // 2]), space.extra_key, space.cache_salt)
    mine = process.engine.put(real.random_tokens(rng, 40))
    computed = {(s, t): kv for s, t, _, kv in process.engine.paths()}
    fs.gate.set()
    finish(process)
    now = {(s, t): kv for s, t, _, kv in process.engine.paths()}
    assert whole <= set(now)
    assert all(now[path] == kv for path, kv in computed.items() if path in now), "not a byte of it was changed"
    assert process.engine.match(mine) == 40
    order = [(s, t) for s, t, _, _ in process.engine.paths()]
    newest = order[-len(some) - 1 :]
    assert set(some) <= set(newest)
    assert process.snapshot()["last_request_error"] is None
    process.engine.check_evictable()


def test_live_data_is_never_evicted_for_it(monkeypatch, stored, rng):
    store, _ = stored
    process = background(monkeypatch, store)
    live = [process.engine.put(real.random_tokens(rng, 800)) for _ in range(4)]
    process.start()
    finish(process)
    assert all(process.engine.match(key) == 800 for key in live)
    found = process.status["restore"]
    assert 0 < found["tokens_restored"] < found["tokens_total"]
    assert found["nodes_refused"]["no_capacity"] > 0
    assert process.engine.allocator.available_size() > 0
    process.engine.check_evictable()


@pytest.mark.parametrize("how", ["flushed", "weights_changed", "pause", "shutdown"])
def test_it_is_given_up_where_going_on_would_be_wrong(monkeypatch, stored, how):
    store, _ = stored
    fs = Gated()
    process = background(monkeypatch, store, fs).start()
    process.persistence.tick()
    if how == "flushed":
        process.engine.cache.reset()
        process.engine.allocator.clear()
    getattr(process.persistence, how)()
    assert process.status["restore"]["state"] == "aborted"
    fs.gate.set()
    for _ in range(20):
        process.persistence.tick()
    assert process.status["restore"]["tokens_restored"] == 0
    process.engine.check()
    process.persistence.home.close()
    again = Process(monkeypatch, store).start()
    assert again.status["restore"]["tokens_restored"] == again.status["restore"]["tokens_total"] > 0


def test_a_file_system_that_answers_no_more_does_not_hold_up_snapshots_for_ever(monkeypatch, stored, rng):
    store, before = stored
    monkeypatch.setattr("sglang_persist.engine.runtime.STALLED", 0.1)
    fs = Gated()
    process = background(monkeypatch, store, fs, interval=0.1).start()
    process.passes(lambda: process.status["restore"]["state"] == "aborted")
    process.engine.put(real.random_tokens(rng, 40))
    process.passes(lambda: process.status["snapshot"]["last_new_tokens"] == 40)
    fs.gate.set()
    process.persistence.home.close()
    again = Process(monkeypatch, store).start()
    assert {c[1] for c in content(before)} < {c[1] for c in content(again.engine)}


def test_a_snapshot_on_demand_comes_between_and_nothing_is_lost(monkeypatch, stored, rng):
    store, before = stored
    fs = Gated()
    process = background(monkeypatch, store, fs).start()
    process.engine.put(real.random_tokens(rng, 70))
    assert process.snapshot()["last_new_tokens"] == 70
    fs.gate.set()
    finish(process)
    assert process.snapshot()["last_new_tokens"] == 0
    assert {c[1] for c in content(before)} < {c[1] for c in content(process.engine)}
    process.persistence.home.close()
    assert verify.verify(REAL, store).findings == []
    again = Process(monkeypatch, store).start()
    assert {c[1:] for c in content(again.engine)} == {c[1:] for c in content(process.engine)}


def test_damage_costs_its_nodes_and_their_descendants_only(monkeypatch, stored):
    store, before = stored
    (path,) = names.shard_dirs(REAL, store)
    (segment,) = path.glob("*.kvs")
    data = bytearray(segment.read_bytes())
    data[len(data) // 3] ^= 1
    segment.write_bytes(data)
    process = background(monkeypatch, store).start()
    finish(process)
    found = process.status["restore"]
    assert found["nodes_refused"]["damaged"] >= 1
    assert 0 < found["tokens_restored"] < found["tokens_total"]
    assert real.stored_paths_are_part_of(before.paths(), process.engine.paths())
    process.engine.check_evictable()


def test_a_death_while_it_goes_on_counts_as_one_while_restoring(monkeypatch, stored):
    store, _ = stored
    fs = Gated()
    process = background(monkeypatch, store, fs).start()
    assert len(list(store.rglob("restoring-*"))) == 1
    fs.gate.set()
    finish(process)
    process.persistence.home.close()
    assert not list(store.rglob("restoring-*"))
