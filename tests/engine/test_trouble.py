"""What goes wrong while saving and restoring costs exactly the nodes it touches, never a wrong byte or a lost slot."""

from __future__ import annotations

import itertools
import shutil

import flow
import numpy as np
import pytest
import real

from sglang_persist import config
from sglang_persist.errors import StoreBusy, StoreFull
from sglang_persist.fs import REAL
from sglang_persist.store import names, shard, verify
from sglang_persist.store.writer import commit


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.mark.parametrize("core", ["rust", "python"])
def test_nodes_split_while_they_are_saved_are_saved_whole(tmp_path, rng, core):
    e = real.engine(core, size=8192)
    head = real.random_tokens(rng, 1500)
    e.put(head)
    e.put(head[:700] + real.random_tokens(rng, 600))
    before = e.paths()
    at = flow.home(tmp_path)
    job = flow.begin(e, at)
    flow.advance(job, 3)
    for cut in (100, 650, 720, 1100, 1490):  # nodes that are read, are being read and will be read
        e.put(head[:cut] + real.random_tokens(rng, 10))
    saved = flow.finish(job)
    assert (saved.tokens, saved.left_out_tokens) == (2100, 0)
    at.close()
    again, _, _ = flow.restart(tmp_path, core=core, size=8192)
    assert [p[1:] for p in again.paths()] == [p[1:] for p in before]


@pytest.mark.parametrize("records", [1, 2, 4, 6])
def test_eviction_while_saving_leaves_a_prefix_closed_generation(tmp_path, rng, records):
    e = real.engine(size=8192)
    keys = real.populate(e, rng, 30)
    before = e.paths()
    at = flow.home(tmp_path)
    job = flow.begin(e, at)
    flow.advance(job, records)
    e.match(keys[-1])
    e.evict(e.cache.total_size()[0] - 160)
    # Their slots are taken by others at once.
    other = e.put(real.random_tokens(rng, 1500))
    saved = flow.finish(job)
    assert saved.left_out_tokens > 0
    at.close()
    again, _, result = flow.restart(tmp_path, size=8192)
    assert result.tokens == saved.tokens > 0
    assert real.stored_paths_are_part_of(before, again.paths())
    assert again.match(other) == 0
    again.check()
    assert verify.verify(REAL, tmp_path, deep=True).findings == []


def test_deadline_commits_what_is_complete(tmp_path, rng, monkeypatch):
    e = real.engine(size=8192)
    real.populate(e, rng, 30)
    at = flow.home(tmp_path)
    before = e.paths()
    clock = [0.0]
    monkeypatch.setattr("sglang_persist.save.time.monotonic", lambda: clock[0])
    job = flow.begin(e, at, deadline=10)
    flow.advance(job, 5)
    clock[0] = 11
    saved = flow.finish(job)
    at.close()
    monkeypatch.undo()
    assert 0 < saved.tokens < e.cache.total_size()[0]
    assert saved.tokens + saved.left_out_tokens == e.cache.total_size()[0]
    again, _, result = flow.restart(tmp_path, size=8192)
    assert result.tokens == saved.tokens
    assert real.stored_paths_are_part_of(before, again.paths())


def test_closed_snapshot_leaves_the_store_as_it_was(tmp_path, rng):
    e = real.engine()
    real.populate(e, rng)
    at = flow.home(tmp_path)
    job = flow.begin(e, at)
    flow.advance(job, 3)
    job.close()
    assert at.generation == 0
    assert flow.snapshot(e, at).tokens == e.cache.total_size()[0]
    at.close()
    assert verify.verify(REAL, tmp_path).leftovers == 0


def damage(path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("record", range(6))
def test_damaged_record_costs_its_nodes_and_their_descendants_only(tmp_path, rng, record):
    e = real.engine()
    keys = real.populate(e, rng, 8)
    before = e.paths()
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    index = next(iter(at.segments.values()))
    place = at.path / names.segment(index.id)
    at.close()
    damage(place, int(index.offset[record]) + 17)
    users = [i for i, n in enumerate(at.manifest.nodes) if any(p.record == record for p in n.pieces)]
    lost = set(users)
    for i, node in enumerate(at.manifest.nodes):
        if node.parent in lost:
            lost.add(i)
    again, home, result = flow.restart(tmp_path)
    assert sum(result.refused.values()) == len(lost)
    assert result.tokens == sum(n.pages for i, n in enumerate(at.manifest.nodes) if i not in lost)
    assert any(place.name in line for line in result.errors)
    assert real.stored_paths_are_part_of(before, again.paths())
    again.check()
    # Computed again, these pages are written anew: a record known to be damaged is never referred to again.
    for key in keys:
        again.put(list(key.raw_token_ids()), key.extra_key, key.cache_salt)
    assert flow.snapshot(again, home).new_tokens >= int(index.pages[record])
    home.close()
    third, _, result = flow.restart(tmp_path)
    assert [p[:3] for p in third.paths()] == [p[:3] for p in again.paths()]
    assert not result.refused


def test_missing_segment_costs_what_it_held(tmp_path, rng):
    e = real.engine()
    first = e.put(real.random_tokens(rng, 100))
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    (gone,) = at.segments
    second = e.put(real.random_tokens(rng, 100))
    flow.snapshot(e, at)
    at.close()
    (at.path / names.segment(gone)).unlink()
    again, _, result = flow.restart(tmp_path)
    assert (again.match(first), again.match(second)) == (0, 100)
    assert dict(result.refused) == {"damaged": 1}
    again.check()


def test_newest_paths_are_restored_when_the_pool_is_smaller(tmp_path, rng):
    e = real.engine(size=4096)
    keys = [e.put([5] * 10 + real.random_tokens(rng, 90)) for _ in range(10)]
    e.match(keys[0])
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    small, _, result = flow.restart(tmp_path, size=300)
    # The shared beginning and three tails: the touched one and the two written last.
    assert small.paths() == e.paths()[-3:]
    assert result.tokens == 10 + 3 * 90
    assert dict(result.refused) == {"no_capacity": 7}
    assert [small.match(k) for k in (keys[0], keys[9], keys[8], keys[7])] == [100, 100, 100, 10]
    small.check()
    small.check_evictable()


def test_timeout_leaves_out_what_did_not_come_in_time(tmp_path, rng, monkeypatch):
    e = real.engine()
    real.populate(e, rng)
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    clock = itertools.chain([0.0, 0.0], itertools.repeat(61.0))  # once the indexes are read, the time is up
    monkeypatch.setattr("sglang_persist.restore.time.monotonic", lambda: next(clock))
    again, home, result = flow.restart(tmp_path, timeout=60)
    monkeypatch.undo()
    assert result.tokens == 0
    assert set(result.refused) <= {"timeout", "parent_refused"}
    again.check()
    # What was not restored is still stored, and can be restored by the next start.
    home.close()
    again, _, result = flow.restart(tmp_path)
    assert again.paths() == e.paths()


def test_emptied_tree_does_not_replace_a_full_one(tmp_path, rng):
    e = real.engine()
    key = e.put(real.random_tokens(rng, 80))
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    e.evict()
    result = flow.snapshot(e, at)
    assert (result.generation, result.new_bytes) == (1, 0)
    at.close()
    again, _, _ = flow.restart(tmp_path)
    assert again.match(key) == 80


def test_many_rounds_leave_the_allocator_as_it_was(tmp_path, rng):
    e = real.engine(size=512)
    e.put(real.random_tokens(rng, 60))
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    again = real.engine(size=512)
    for _ in range(200):
        assert flow.load(again, flow.home(tmp_path)).tokens == 60
        again.evict()
    again.check()


@pytest.mark.parametrize("limit", ["max_bytes", "min_free"])
def test_budget_without_room_for_a_page_refuses_the_snapshot_and_keeps_the_store(tmp_path, rng, limit):
    e = real.engine()
    e.put(real.random_tokens(rng, 100))
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    used = verify.store_bytes(REAL, tmp_path)[1]
    e.put(real.random_tokens(rng, 1000))
    sizes = {"max_bytes": config.Size(bytes=100), "min_free": config.Size(share=1.0)}
    with pytest.raises(StoreFull):
        flow.snapshot(e, at, using=flow.settings(**{limit: sizes[limit]}))
    assert verify.store_bytes(REAL, tmp_path)[1] == used
    assert flow.snapshot(e, at).new_tokens == 1000


def test_writer_that_takes_over_numbers_above_the_other_server(tmp_path, rng):
    """A rolling restart: the new server starts while the old one still writes."""
    old, a = real.engine(), flow.home(tmp_path)
    old.put(real.random_tokens(rng, 100))
    flow.snapshot(old, a)
    new, b, _ = flow.restart(tmp_path)
    stale = flow.SaveRequest(b.next_generation(), "interval")
    with pytest.raises(StoreBusy):
        flow.finish(flow.save(new.tree, new.pages, flow.keeper(new, b), stale))
    for _ in range(3):
        old.put(real.random_tokens(rng, 100))
        flow.snapshot(old, a)
    a.close()
    key = new.put(real.random_tokens(rng, 100))
    saved = flow.finish(flow.save(new.tree, new.pages, flow.keeper(new, b), stale))
    assert saved.generation == 5
    b.close()
    assert verify.verify(REAL, tmp_path, deep=True).findings == []
    third, _, _ = flow.restart(tmp_path)
    assert third.match(key) == 100


def test_committed_generation_is_never_written_over(tmp_path, rng):
    e = real.engine()
    e.put(real.random_tokens(rng, 100))
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    before = (at.path / names.manifest(1)).read_bytes()
    with pytest.raises(StoreBusy):
        commit(REAL, at.path, at.manifest)
    assert (at.path / names.manifest(1)).read_bytes() == before


@pytest.mark.parametrize("where", ["Segment.load_into", "KvPages.memory", "KvPages.scatter"])
def test_unexpected_error_while_restoring_loses_no_slot(tmp_path, rng, monkeypatch, where):
    e = real.engine()
    real.populate(e, rng)
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    name = where.split(".")[1]
    owner = shard.Segment if name == "load_into" else real.KvPages
    original, calls = getattr(owner, name), []
    if name == "scatter":  # as on a device: nothing can be decoded in place
        monkeypatch.setattr(real.KvPages, "memory", lambda *_: None)

    def fails_later(*args):
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("no more")
        return original(*args)

    monkeypatch.setattr(owner, name, fails_later)
    again = real.engine()
    with pytest.raises(MemoryError):
        flow.load(again, flow.home(tmp_path))
    again.check()


def test_snapshot_that_could_read_nothing_does_not_replace_a_full_one(tmp_path, rng):
    e = real.engine()
    key = e.put(real.random_tokens(rng, 80))
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    e.evict()
    e.put(real.random_tokens(rng, 80))
    result = flow.snapshot(e, at, deadline=0.5)  # long past
    assert (result.generation, result.left_out_tokens) == (1, 80)
    at.close()
    assert verify.verify(REAL, tmp_path).leftovers == 0
    again, _, _ = flow.restart(tmp_path)
    assert again.match(key) == 80


def test_dropping_leaves_alone_what_another_server_writes(tmp_path, rng):
    e = real.engine()
    e.put(real.random_tokens(rng, 100))
    a, b = flow.home(tmp_path), flow.home(tmp_path)
    flow.snapshot(e, a)
    with pytest.raises(StoreBusy):
        b.drop()
    assert shard.generations(REAL, a.path) == [1]
    a.close()
    b.drop()
    assert shard.generations(REAL, a.path) == []


@pytest.mark.parametrize("gone", ["everything", "the shard", "a segment", "a cut segment", "all segments", "manifests"])
@pytest.mark.parametrize("limited", [False, True])
def test_what_is_deleted_behind_our_back_is_written_again_by_the_next_snapshot(tmp_path, rng, gone, limited):
    using = flow.settings(max_bytes=config.Size(bytes=200_000)) if limited else flow.SETTINGS
    e, root = real.engine(), tmp_path / "store"
    keys = [e.put(real.random_tokens(rng, 60)) for _ in range(12)]
    at = flow.home(root)
    flow.snapshot(e, at, using=using)
    keys.append(e.put(real.random_tokens(rng, 60)))
    flow.snapshot(e, at, using=using)
    segments = sorted(at.path.glob("seg-*"))
    if gone in ("everything", "the shard"):
        shutil.rmtree(root if gone == "everything" else at.path)
    elif gone == "a cut segment":
        segments[0].write_bytes(segments[0].read_bytes()[:-1])
    else:
        for path in {"a segment": segments[:1], "all segments": segments, "manifests": at.path.glob("gen-*")}[gone]:
            path.unlink()
    keys.append(e.put(real.random_tokens(rng, 60)))
    saved = flow.snapshot(e, at, using=using)
    at.close()
    assert verify.store_bytes(REAL, root)[1] <= 220_000 or not limited
    again, _, result = flow.restart(root)
    # More, where the generation before is fuller and has lost only a part of it.
    assert result.tokens >= saved.tokens
    assert not result.refused
    held = [again.match(k) == 60 for k in keys]
    assert held[-1]
    assert all(held) or limited
