"""Records that were handed to a writer come back bit for bit, or an error says why and nothing has changed."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest
from store.little import IDENTITY, PAGE, SHARD, Little, error_of, key, loads_whole, payload, snapshot_of, writer
from store.simfs import SimFs

from sglang_persist import fs as fs_module
from sglang_persist.errors import StoreError, StoreFull, StoreUnavailable
from sglang_persist.format import segment
from sglang_persist.format.codec import Codec
from sglang_persist.fs import REAL
from sglang_persist.model import Buffer, Pool, Space
from sglang_persist.plan.rewriting import MAX_SEGMENTS, plan_merge
from sglang_persist.store import shard, verify
from sglang_persist.store.home import Home
from sglang_persist.store.writer import SEGMENT_BYTES

ERRORS = {
    errno.ENOSPC: StoreFull,
    errno.EDQUOT: StoreFull,
    errno.EIO: StoreUnavailable,
    errno.EROFS: StoreUnavailable,
}


@pytest.fixture
def rng():
    return np.random.default_rng(23)


@pytest.fixture
def home(tmp_path):
    at = Home(REAL, tmp_path / "store", IDENTITY, SHARD)
    at.become_writer()
    yield at
    at.close()


def pool_of(*buffers: tuple[str, int]) -> tuple[Pool, ...]:
    return (Pool("kv", "slot", tuple(Buffer(f"b{i}", d, (size,), size) for i, (d, size) in enumerate(buffers))),)


POOLS = {
    "bfloat16": pool_of(*[("bfloat16", 32)] * 4),
    "uint8": pool_of(*[("uint8", 5)] * 3),
    "float32": pool_of(*[("float32", 12)] * 2),
    "mixed": pool_of(("bfloat16", 32), ("uint8", 3), ("float32", 8), ("bfloat16", 2)),
    # A buffer alone fills a part, the next ones share one.
    "several parts": pool_of(("bfloat16", 70_000), ("bfloat16", 20_000), ("bfloat16", 2), ("uint8", 70_000)),
}


def write(home: Home, setting: str, pools, keys, raws, **limits):
    out = writer(home.fs, home, setting, pools, **limits)
    for one, raw in zip(keys, raws, strict=True):
        out.submit(one, raw)
    indexes = out.seal().result(30)
    out.join(30)
    return out, indexes


@pytest.mark.parametrize("kind", ["values", "noise", "zeros"])
@pytest.mark.parametrize("pools", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("setting", ["raw", "zstd", "auto"])
def test_records_come_back_bit_for_bit(home, rng, setting, pools, kind):
    spaces = (Space(), Space("lora"), Space("", "salt"), Space(bigram=True))
    keys = [key(rng, pages, space) for pages, space in zip((1, 3, 2, 5), spaces, strict=True)]
    if kind == "values":
        raws = [payload(rng, k.pages, pools) for k in keys]
    else:
        sizes = [pools[0].bytes(k.pages, PAGE) for k in keys]
        raws = [rng.integers(0, 256 if kind == "noise" else 1, size, dtype=np.uint8) for size in sizes]
    out, indexes = write(home, setting, pools, keys, raws)
    (index,) = indexes
    with_file = shard.open_segment(REAL, home.path, index.id)
    try:
        assert list(out.placed) == [(index.id, i) for i in range(4)]
        for i, (one, raw) in enumerate(zip(keys, raws, strict=True)):
            assert with_file.load(i).tobytes() == raw.tobytes()
            found = with_file.index
            assert found.page_tokens_of(i, 0, one.pages).tolist() == one.tokens.tolist()
            assert found.spaces[found.space[i]] == one.space
            assert found.parent[i].tobytes() == one.parent_hash
            assert int(found.start[i]) == one.start
    finally:
        with_file.close()
    used = {Codec(c) for c in index.parts["codec"].tolist()}
    if setting == "raw" or kind == "noise":
        assert used == {Codec.RAW}
    elif kind == "zeros":
        assert used != {Codec.RAW}
    assert index.stored.sum() <= sum(r.nbytes for r in raws), "a store is never larger than what it holds"


def test_sixteen_bit_floats_get_their_codec_only_when_asked(home, rng):
    one = key(rng, 40)
    raw = payload(rng, 40, POOLS["bfloat16"])
    codecs = {}
    for setting in ("raw", "zstd", "auto"):
        _, (index,) = write(home, setting, POOLS["bfloat16"], [one], [raw])
        codecs[setting] = {Codec(c) for c in index.parts["codec"].tolist()}
    assert codecs["raw"] == {Codec.RAW}
    assert codecs["auto"] == {Codec.ROT16}
    assert Codec.ROT16 not in codecs["zstd"]


def test_records_stand_in_the_order_of_submission_across_segments(home, rng):
    pools = POOLS["bfloat16"]
    keys = [key(rng, 1 + i % 4) for i in range(40)]
    raws = [payload(rng, k.pages, pools) for k in keys]
    out = writer(REAL, home, pools=pools, segment_bytes=1500)
    for one, raw in zip(keys, raws, strict=True):
        out.submit(one, raw)
    indexes = out.seal().result(30)
    assert len(indexes) > 5
    assert [s for s, _ in out.placed] == [i.id for i in indexes for _ in range(i.records)]
    opened = {i.id: shard.open_segment(REAL, home.path, i.id) for i in indexes}
    try:
        for (segment, ordinal), raw in zip(out.placed, raws, strict=True):
            assert opened[segment].load(ordinal).tobytes() == raw.tobytes()
    finally:
        for segment in opened.values():
            segment.close()
    assert all(i.file_bytes < 1500 + 4096 for i in indexes)


def test_a_large_index_ends_a_segment_which_is_not_joined_again(home, rng, monkeypatch):
    monkeypatch.setattr(segment, "INDEX_BYTES", 8 << 10)
    pools = POOLS["bfloat16"]
    keys = [key(rng, 40) for _ in range(60)]
    _, indexes = write(home, "auto", pools, keys, [payload(rng, k.pages, pools) for k in keys])
    assert len(indexes) > MAX_SEGMENTS + 1
    *full, _ = indexes
    assert all(i.is_full for i in full) and sum(i.records for i in indexes) == len(keys)
    used = [(i.id, r) for i in indexes for r in range(i.records)]
    assert plan_merge(indexes, used, SEGMENT_BYTES) == []
    # Were they not full, they would be joined each time.
    monkeypatch.setattr(segment, "INDEX_BYTES", 8 << 20)
    assert len(plan_merge(indexes, used, SEGMENT_BYTES)) > 1


def test_a_writer_without_records_makes_no_file(home):
    out, indexes = write(home, "auto", POOLS["bfloat16"], [], [])
    assert (indexes, list(out.placed), list(home.path.glob("[!L]*"))) == ([], [], [])


def test_short_writes_of_the_system_lose_nothing(home, rng, monkeypatch):
    real_write = os.write
    monkeypatch.setattr(fs_module.os, "write", lambda fd, data: real_write(fd, bytes(data[:7])))
    one = key(rng, 3)
    raw = payload(rng, 3, POOLS["mixed"])
    _, (index,) = write(home, "raw", POOLS["mixed"], [one], [raw])
    monkeypatch.undo()
    with_file = shard.open_segment(REAL, home.path, index.id)
    assert with_file.load(0).tobytes() == raw.tobytes()
    with_file.close()


def test_memory_waits_behind_a_slow_disk(tmp_path, rng):
    sim = SimFs(tmp_path)
    home = Home(sim, tmp_path / "store", IDENTITY, SHARD)
    home.become_writer()
    gate = threading.Event()
    sim.arm(lambda _n, name, *_: name == "write" and gate.wait(30))
    pools, size = POOLS["bfloat16"], 128 * PAGE
    limit = 10 * size
    out = writer(sim, home, pools=pools, pending_bytes=limit)
    taken = 0
    while out.ready() and taken < 1000:
        out.submit(key(rng, 1), payload(rng, 1, pools))
        taken += 1
    assert taken == 10
    assert not out.ready(0.01)
    gate.set()
    assert out.ready(30), "room is announced once something was written"
    assert sum(i.records for i in out.seal().result(30)) == taken
    home.close()


def test_a_writer_that_failed_is_ready_and_says_why(tmp_path, rng):
    sim = SimFs(tmp_path)
    home = Home(sim, tmp_path / "store", IDENTITY, SHARD)
    home.become_writer()
    sim.fail(0, errno.ENOSPC, lasting=True)
    pools = POOLS["bfloat16"]
    out = writer(sim, home, pools=pools, pending_bytes=1)
    out.submit(key(rng, 1), payload(rng, 1, pools))
    assert out.ready(30), "nobody waits for room in a writer that has stopped"
    assert isinstance(error_of(out.sealed), StoreFull)
    with pytest.raises(StoreFull):
        out.submit(key(rng, 1), payload(rng, 1, pools))
    out.abort()
    home.close()


def prepared(tmp_path) -> tuple[Little, SimFs]:
    """Generation 1 is committed; the next snapshot will not retire anything."""
    sim = SimFs(tmp_path / "store")
    little = Little(tmp_path / "store", sim).open()
    little.take(retire=False)
    sim.arm()
    return little, sim


def calls_of_a_snapshot(tmp_path) -> list[str]:
    little, sim = prepared(tmp_path / "count")
    little.take(retire=False)
    little.close()
    return [name for name, _ in sim.calls]


@pytest.mark.parametrize(
    ("code", "lasting"), [(errno.ENOSPC, True), (errno.EDQUOT, False), (errno.EIO, False), (errno.EROFS, True)]
)
def test_an_error_at_any_call_is_reported_and_changes_nothing(tmp_path, code, lasting):
    calls = calls_of_a_snapshot(tmp_path)
    assert {"create", "write", "sync", "close", "rename", "sync_dir"} <= set(calls)
    committed = len(calls) - 1 - calls[::-1].index("rename")
    for n, name in enumerate(calls):
        little, sim = prepared(tmp_path / str(n))
        before = snapshot_of(little.path)
        sim.fail(n, code, short=True, lasting=lasting)
        with pytest.raises(StoreError) as caught:
            little.take(retire=False)
        sim.arm()
        assert isinstance(caught.value, ERRORS[code]), (n, name)
        assert str(little.path) in str(caught.value), "the line names the path"
        assert os.strerror(code) in str(caught.value), "and the system's reason"
        after = snapshot_of(little.path)
        assert {k: after.get(k) for k in before} == before, (n, name)
        assert not [k for k in after if k.startswith("tmp-")], (n, name)
        newest, _ = shard.newest(REAL, little.path)
        # Once renamed, the manifest is there; only whether it would survive a power cut is unknown.
        assert newest.generation == (1 if n <= committed else 2), (n, name)
        assert loads_whole(little.path, newest, little.records[newest.generation])
        generation = little.take()
        assert generation > newest.generation, "and the next snapshot is not held up"
        assert loads_whole(little.path, little.manifests[generation], little.records[generation])
        little.close()
        report = verify.verify(REAL, little.root, deep=True)
        assert (report.findings, report.leftovers) == ([], 0), (n, name)


def test_abort_leaves_nothing_that_counts(tmp_path, rng):
    sim = SimFs(tmp_path / "store")
    little = Little(tmp_path / "store", sim).open()
    little.take()
    before = snapshot_of(little.path)
    out = writer(sim, little.home)
    for _ in range(5):
        out.submit(key(rng, 2), payload(rng, 2))
    out.abort()
    out.join(30)
    assert error_of(out.sealed) is not None
    assert snapshot_of(little.path) == before
    little.close()


def test_abort_in_the_middle_of_a_write_takes_its_temporary_file_along(tmp_path, rng):
    sim = SimFs(tmp_path / "store")
    little = Little(tmp_path / "store", sim).open()
    before = snapshot_of(little.path)
    writing, gate = threading.Event(), threading.Event()

    def block(_n, name, *_):
        if name == "write":
            writing.set()
            gate.wait(30)

    sim.arm(block)
    out = writer(sim, little.home)
    for _ in range(5):
        out.submit(key(rng, 2), payload(rng, 2))
    assert writing.wait(30)
    assert [k for k in snapshot_of(little.path) if k.startswith("tmp-")]
    out.abort()
    gate.set()
    out.join(30)
    assert error_of(out.sealed) is not None
    assert snapshot_of(little.path) == before
    little.close()


def test_abort_after_the_end_changes_nothing(home, rng):
    out, indexes = write(home, "auto", POOLS["mixed"], [key(rng, 2)], [payload(rng, 2, POOLS["mixed"])])
    out.abort()
    out.join(30)
    assert out.sealed.result() == indexes
    shard.open_segment(REAL, home.path, indexes[0].id).close()
