"""Save, restart, restore: the same tree, the same bytes, the same order, over real pools and both tree cores."""

from __future__ import annotations

import flow
import numpy as np
import pytest
import real
import torch

from sglang_persist.errors import Unsupported
from sglang_persist.fs import REAL
from sglang_persist.store import shard, verify

CORES = ("rust", "python")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("bigram", [False, True])
def test_tree_bytes_and_order_survive(tmp_path, rng, core, page, bigram):
    kind = {"core": core, "page": page, "bigram": bigram}
    e = real.engine(**kind)
    keys = real.populate(e, rng)
    e.match(keys[2])  # a touch: the third path is now the youngest
    before = e.paths()
    saved = flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    assert saved.tokens == saved.new_tokens == e.cache.total_size()[0]
    again, _, result = flow.restart(tmp_path, held=5 * page, **kind)
    assert again.paths() == before
    assert (result.tokens, dict(result.refused), result.errors) == (saved.tokens, {}, [])
    assert all(again.match(k) == len(k) for k in keys)
    again.check(held=5 * page)
    again.check_evictable(held=5 * page)
    assert verify.verify(REAL, tmp_path, deep=True).findings == []


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
@pytest.mark.parametrize("compression", ["auto", "zstd", "raw"])
def test_every_dtype_and_codec_is_bit_exact(tmp_path, rng, dtype, compression):
    # Random bits: every exponent, NaN payloads and negative zeros included.
    e = real.engine(dtype=dtype)
    real.populate(e, rng, 4)
    flow.snapshot(e, at := flow.home(tmp_path), using=flow.settings(compression=compression))
    at.close()
    again, _, _ = flow.restart(tmp_path, held=3, dtype=dtype)
    assert again.paths() == e.paths()


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "slru", "priority", "mru", "filo"])
@pytest.mark.parametrize("core", CORES)
def test_eviction_order_survives_under_every_policy(tmp_path, rng, core, policy):
    e = real.engine(core, policy=policy)
    keys = [e.put([1] * 8 + real.random_tokens(rng, 8)) for _ in range(10)]
    for i in (2, 5, 2, 7):
        e.put(list(keys[i].raw_token_ids()))
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    again, _, _ = flow.restart(tmp_path, core=core, policy=policy)
    leaves = [tuple(p[1]) for p in e.paths()]
    assert [tuple(p[1]) for p in again.paths()] == leaves
    # And it is the order in which they really go.
    e.evict(24)
    again.evict(24)
    assert [p[1] for p in again.paths()] == [p[1] for p in e.paths()]


def test_node_boundary_without_a_branch_survives(tmp_path, rng):
    e = real.engine()
    prompt = real.random_tokens(rng, 40)
    e.put(prompt)
    e.put(prompt + real.random_tokens(rng, 12))  # the boundary between prompt and answer
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    again, _, _ = flow.restart(tmp_path)
    assert [p[2] for p in again.paths()] == [(40, 52)]


def test_spaces_never_see_each_other(tmp_path, rng):
    e = real.engine()
    tokens = real.random_tokens(rng, 50)
    spaces = [(None, None), ("a", None), (None, "a"), ("ab", "c"), ("a", "bc"), ("", None), (None, "s")]
    for space in spaces:
        e.put(tokens, *space)
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    again, _, _ = flow.restart(tmp_path)
    assert again.paths() == e.paths()
    assert len({p[3] for p in again.paths()}) == len(again.paths())  # each has its own random KV
    fresh = real.engine()
    key = fresh.put(tokens, "other", None)
    assert again.match(key) == 0


def test_page_of_a_running_request_is_saved(tmp_path, rng):
    locked: list[int] = []
    e = real.engine(locked=locked)
    real.populate(e, rng, 3)
    key = e.put(real.random_tokens(rng, 70))
    node = e.cache.tree_core.match_full_device_prefix(key)[1]
    lock = e.cache.lock(node)
    locked.append(node)
    saved = flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    e.cache.unlock(lock)
    assert saved.tokens == e.cache.total_size()[0]
    again, _, _ = flow.restart(tmp_path)
    assert again.match(key) == 70


def test_second_snapshot_of_an_unchanged_tree_writes_nothing(tmp_path, rng):
    e = real.engine()
    real.populate(e, rng)
    at = flow.home(tmp_path)
    first = flow.snapshot(e, at)
    files = verify.store_bytes(REAL, tmp_path)
    second = flow.snapshot(e, at)
    assert (second.generation, second.tokens, second.new_tokens, second.new_bytes) == (1, first.tokens, 0, 0)
    assert verify.store_bytes(REAL, tmp_path) == files


def test_only_new_pages_are_written_also_after_a_split(tmp_path, rng):
    e = real.engine()
    head = real.random_tokens(rng, 300)
    e.put(head)
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    e.put(head[:100] + real.random_tokens(rng, 20))  # splits the stored node
    assert flow.snapshot(e, at).new_tokens == 20
    assert flow.snapshot(e, at).new_tokens == 0
    at.close()
    again, _, _ = flow.restart(tmp_path)
    assert again.paths() == e.paths()


def test_page_that_is_stored_is_not_written_again_after_eviction_or_restart(tmp_path, rng):
    e = real.engine()
    prompt = real.random_tokens(rng, 200)
    e.put(prompt)
    keep = e.put(real.random_tokens(rng, 200))
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    e.match(keep)
    e.evict(200)
    assert e.cache.total_size()[0] == 200
    # The same prefix computed again: another node, the same pages. Its KV may differ in bits; what is stored counts.
    e.put(prompt)
    assert flow.snapshot(e, at).new_tokens == 0
    at.close()
    again, at, _ = flow.restart(tmp_path)
    assert flow.snapshot(again, at).new_tokens == 0
    again.put(prompt[:50] + real.random_tokens(rng, 30))
    assert flow.snapshot(again, at).new_tokens == 30


def test_many_short_nodes_of_a_path_share_records(tmp_path, rng):
    e = real.engine()
    path: list[int] = []
    for _ in range(100):
        path += real.random_tokens(rng, 3)
        e.put(path)
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    assert len(e.tree.nodes()) == 100
    assert sum(index.records for index in at.segments.values()) == 2  # 300 tokens
    at.close()
    again, _, _ = flow.restart(tmp_path)
    assert again.paths() == e.paths()


def test_restored_tree_goes_on_growing(tmp_path, rng):
    kind = {"size": 2048}
    e = real.engine(**kind)
    keys = real.populate(e, rng, 6)
    for round_ in range(4):
        at = flow.home(tmp_path)
        at.find()
        flow.snapshot(e, at)
        before = e.paths()
        at.close()
        e, at, _ = flow.restart(tmp_path, held=round_, **kind)
        assert e.paths() == before
        keys.append(e.put(real.random_tokens(rng, 40)))
        flow.snapshot(e, at)
        at.close()
        e, at, _ = flow.restart(tmp_path, **kind)
        e.check()
        at.close()
    assert all(e.match(k) == len(k) for k in keys)


def test_unknown_pool_layout_and_tree_are_refused_by_name(monkeypatch):
    e = real.engine()

    class OtherPool(type(e.pool)):
        pass

    e.pool.__class__ = OtherPool
    with pytest.raises(Unsupported, match="OtherPool"):
        real.KvPages(e.allocator)
    e.pool.__class__ = OtherPool.__mro__[1]
    e.pool.kv_cache_layout = "vectorized_5d"
    with pytest.raises(Unsupported, match="vectorized_5d"):
        real.KvPages(e.allocator)

    class OtherTree(type(e.cache)):
        pass

    e.cache.__class__ = OtherTree
    with pytest.raises(Unsupported, match="OtherTree"):
        real.LiveTree(e.cache, "lru")


def test_generation_names_its_shards_and_counts_when_all_have_it(tmp_path, rng):
    e = real.engine()
    real.populate(e, rng, 3)
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    two = flow.SaveRequest(2, "manual")
    e.put(real.random_tokens(rng, 30))
    shards = (flow.SHARD, "dp0-adp0-pp0-cp0-tp1")
    flow.finish(flow.save(e.tree, e.pages, flow.keeper(e, at, shards=shards), two))
    found, passed = shard.newest(REAL, at.path)
    assert found.generation == 1
    assert "not every rank" in str(passed[0])


def test_segments_stay_few_and_nothing_is_lost_over_many_snapshots(tmp_path, rng):
    e = real.engine(size=8192)
    at = flow.home(tmp_path)
    for _ in range(60):
        e.put(real.random_tokens(rng, 60))
        assert flow.snapshot(e, at).new_tokens == 60
    assert verify.store_bytes(REAL, tmp_path)[0] <= 16
    assert verify.verify(REAL, tmp_path, deep=True).findings == []
    at.close()
    again, at, _ = flow.restart(tmp_path, size=8192)
    assert again.paths() == e.paths()
    assert flow.snapshot(again, at).new_bytes == 0


def test_space_of_dead_records_comes_back(tmp_path, rng, monkeypatch):
    monkeypatch.setattr("sglang_persist.store.home.RECENT", -3600)  # no fuller generation is kept
    e = real.engine()
    at = flow.home(tmp_path)
    e.put(real.random_tokens(rng, 3000))
    kept = e.put(real.random_tokens(rng, 200))
    flow.snapshot(e, at)
    full = verify.store_bytes(REAL, tmp_path)[1]
    e.evict(3000)
    for _ in range(3):  # the generation before is kept as well
        e.put(real.random_tokens(rng, 20))
        flow.snapshot(e, at)
    assert verify.store_bytes(REAL, tmp_path)[1] < full / 4
    at.close()
    again, _, _ = flow.restart(tmp_path)
    assert again.match(kept) == 200


@pytest.mark.parametrize(("share", "least", "expected"), [(0.5, 0, [4, 3]), (1.0, 60, [4, 2, 0]), (0.3, 60, [4])])
def test_hottest_and_shortest_choose_whole_paths(tmp_path, rng, share, least, expected):
    e = real.engine()
    keys = [e.put(real.random_tokens(rng, n)) for n in (100, 50, 100, 50, 100)]
    using = flow.settings(hottest=share, min_tokens=least)
    flow.snapshot(e, at := flow.home(tmp_path), using=using)
    at.close()
    again, _, _ = flow.restart(tmp_path)
    expected_lengths = [len(keys[i]) if i in expected else again.match(keys[i]) for i in range(5)]
    assert [again.match(k) for k in keys] == expected_lengths
    assert all(again.match(keys[i]) == len(keys[i]) for i in expected)
