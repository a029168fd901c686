"""Linear attention: a path comes back with the states of the model after it, and up to the last of them."""

from __future__ import annotations

import churn
import flow
import numpy as np
import pytest
import real
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_persist.errors import Unsupported
from sglang_persist.fs import REAL
from sglang_persist.plan.loading import NO_STATE
from sglang_persist.plan.tree import TreeNode, TreeNodes
from sglang_persist.store import verify

CORES = ("rust", "python")
KIND = {"kind": "linear"}


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def restart(root, core, states: int = real.STATES, held: int = 3, **more):
    """A new engine whose slots are others, of KV and of states."""
    e = real.engine(core=core, **KIND, states=states, **more)
    e.allocator.alloc(held)
    e.requests.mamba_allocator.alloc(held)
    at = flow.home(root)
    return e, at, flow.load(e, at)


def matches(e: real.Engine, keys) -> list[int]:
    return [e.match(key) for key in keys]


@pytest.mark.parametrize("core", CORES)
def test_paths_and_states_survive(tmp_path, rng, core):
    e = real.engine(core=core, **KIND)
    keys = real.populate(e, rng)
    found = matches(e, keys)
    assert found == [len(key) for key in keys]
    saved = flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    kv, states = e.held(), e.states()
    assert len(states) == len(keys)
    again, at, result = restart(tmp_path, core)
    assert (again.held(), again.states()) == (kv, states)
    assert dict(+result.refused) == {}
    assert result.tokens == saved.tokens == len(kv)
    assert matches(again, keys) == found
    assert flow.snapshot(again, at).new_tokens == 0
    again.check(held=3)
    again.check_evictable(held=3)
    assert verify.verify(REAL, tmp_path, deep=True).findings == []


@pytest.mark.parametrize("core", CORES)
def test_what_stands_below_the_last_state_is_left_out(tmp_path, rng, core):
    """States are evicted before the KV that they stand beside."""
    e = real.engine(core=core, **KIND)
    head = real.random_tokens(rng, 200)
    keys = [e.put(head[:100]), e.put(head)]
    keys += [e.put(head + real.random_tokens(rng, 50)) for _ in range(3)]
    e.match(keys[0])
    e.match(keys[-1])
    e.cache.evict(EvictParams(num_tokens=0, mamba_num=2))
    before = matches(e, keys)
    assert len(e.states()) == 3
    kv, states = e.held(), e.states()
    saved = flow.snapshot(e, at := flow.home(tmp_path))
    assert saved.tokens == len(kv)
    at.close()
    again, _, _ = restart(tmp_path, core)
    assert (again.held(), again.states()) == (kv, states)
    assert matches(again, keys) == before
    again.check_evictable(held=3)


@pytest.mark.parametrize("core", CORES)
def test_a_state_that_comes_later_is_added(tmp_path, rng, core):
    """KV is stored once; the node that a branch left without a state gets one when a request ends there."""
    e, at = real.engine(core=core, **KIND), flow.home(tmp_path)
    head = real.random_tokens(rng, 100)
    for _ in range(2):
        e.put(head + real.random_tokens(rng, 30))
    flow.snapshot(e, at)
    key = real.key_of(e, head)
    assert e.match(key) == 0
    e.put(head)
    assert e.match(key) == 100
    taken = flow.snapshot(e, at)
    assert (taken.tokens, taken.new_tokens) == (160, 0)
    assert taken.new_bytes > 0
    assert flow.snapshot(e, at).new_bytes == 0
    at.close()
    kv, states = e.held(), e.states()
    again, _, _ = restart(tmp_path, core)
    assert (again.held(), again.states()) == (kv, states)
    assert again.match(key) == 100


@pytest.mark.parametrize("core", CORES)
def test_with_room_for_few_states_the_newest_paths_come_back(tmp_path, rng, core):
    e = real.engine(core=core, **KIND)
    keys = [e.put(real.random_tokens(rng, 60)) for _ in range(10)]
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    again, _, result = restart(tmp_path, core, states=7)
    assert matches(again, keys) == [0] * 6 + [60] * 4
    assert dict(+result.refused) == {"no_capacity": 6}
    assert all(e.states()[path] == state for path, state in again.states().items())
    again.check_evictable(held=3)


@pytest.mark.parametrize("core", CORES)
def test_with_room_for_one_state_the_end_of_the_newest_path_comes_back(tmp_path, rng, core):
    e = real.engine(core=core, **KIND)
    tokens = real.random_tokens(rng, 300)
    keys = [e.put(tokens[:n]) for n in (100, 200, 300)]
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    again, _, _ = restart(tmp_path, core, states=4)
    assert matches(again, keys) == [0, 0, 300]
    again.check_evictable(held=3)


def saved_with(e: real.Engine, at, monkeypatch, nodes: TreeNodes):
    """A snapshot of what a sliced look at the tree may show: a node before and after it was split, or one twice."""

    def scan(at_once=False):
        yield None
        return nodes

    monkeypatch.setattr(e.tree, "scan", scan)
    return flow.snapshot(e, at)


def shown(e: real.Engine, *more: TreeNode) -> TreeNodes:
    nodes = [*more, *(n._replace(parent=n.parent + len(more) if n.parent >= 0 else -1) for n in e.tree.nodes())]
    out = TreeNodes.of(nodes)
    out.states[:] = [2 * (e.tree.state(n.id) is not None) for n in nodes]
    return out


@pytest.mark.parametrize("core", CORES)
def test_a_node_that_was_split_while_it_was_looked_at_keeps_both_its_paths(tmp_path, rng, core, monkeypatch):
    e = real.engine(core=core, **KIND)
    head = real.random_tokens(rng, 50)
    keys = [e.put(head + real.random_tokens(rng, 50))]
    (before,) = e.tree.nodes()
    keys.append(e.put(head + real.random_tokens(rng, 30)))
    kv, states = e.held(), e.states()
    saved_with(e, at := flow.home(tmp_path), monkeypatch, shown(e, before))
    assert len(at.manifest.nodes) == 4
    at.close()
    again, _, _ = restart(tmp_path, core)
    assert matches(again, keys) == [100, 80]
    assert (again.held(), again.states()) == (kv, states)
    again.check(held=3)
    again.check_evictable(held=3)


@pytest.mark.parametrize("core", CORES)
def test_of_a_node_that_was_seen_twice_one_state_is_taken(tmp_path, rng, core, monkeypatch):
    e = real.engine(core=core, **KIND)
    key = e.put(real.random_tokens(rng, 100))
    (node,) = e.tree.nodes()
    kv, states = e.held(), e.states()
    saved_with(e, at := flow.home(tmp_path), monkeypatch, shown(e, node))
    assert len(at.manifest.nodes) == 2
    at.close()
    again, _, _ = restart(tmp_path, core)
    assert again.match(key) == 100
    assert (again.held(), again.states()) == (kv, states)
    again.check(held=3)
    again.check_evictable(held=3)


@pytest.mark.parametrize("core", CORES)
def test_a_state_that_only_an_older_generation_has_comes_back(tmp_path, rng, core):
    e, at = real.engine(core=core, **KIND), flow.home(tmp_path)
    head = real.random_tokens(rng, 100)
    tails = [real.random_tokens(rng, 50) for _ in range(3)]
    keys = [e.put(head), *(e.put(head + tail) for tail in tails)]
    flow.snapshot(e, at)
    states = e.states()
    e.evict()
    for tail in tails[:2]:
        e.put(head + tail)
    flow.snapshot(e, at)
    at.close()
    again, _, _ = restart(tmp_path, core)
    assert matches(again, keys) == [100, 150, 150, 150]
    (space, path) = next(key for key in states if len(key[1]) == 100)
    assert again.states()[space, path] == states[space, path]
    again.check_evictable(held=3)


@pytest.mark.parametrize("core", CORES)
def test_a_path_that_ends_above_older_ones_is_evicted_after_them(tmp_path, rng, core):
    """What the newest generation ends with is the most recent, whatever only an older one has below it."""
    e, at = real.engine(core=core, **KIND), flow.home(tmp_path)
    head = real.random_tokens(rng, 100)
    keys = [e.put(head), e.put(head + real.random_tokens(rng, 50)), e.put(real.random_tokens(rng, 80))]
    flow.snapshot(e, at)
    e.evict()
    keys.append(e.put(real.random_tokens(rng, 60)))
    e.put(head)
    flow.snapshot(e, at)
    at.close()
    again, _, _ = restart(tmp_path, core)
    assert matches(again, keys) == [100, 150, 80, 60]
    again, _, _ = restart(tmp_path, core)
    again.cache.evict(EvictParams(num_tokens=0, mamba_num=3))
    assert again.match(keys[0]) == 100


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("pool", [0, 1])
def test_a_damaged_record_costs_what_needs_it(tmp_path, rng, core, pool):
    e = real.engine(core=core, **KIND)
    head = real.random_tokens(rng, 100)
    first = e.put(head)
    keys = [e.put(head + real.random_tokens(rng, 100)) for _ in range(3)]
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    (segment,) = tmp_path.rglob("*.kvs")
    index = next(iter(at.segments.values()))
    deepest = max(np.flatnonzero(index.pool == pool), key=lambda r: index.start[r])
    data = bytearray(segment.read_bytes())
    data[int(index.offset[deepest])] ^= 1
    segment.write_bytes(data)
    again, _, result = restart(tmp_path, core)
    found = matches(again, keys)
    assert again.match(first) == 100
    assert sorted(found) == [100, 200, 200]
    assert result.refused[NO_STATE if pool else "damaged"] == 1
    before = e.held()
    assert all(before[page] == kv for page, kv in again.held().items())
    again.check_evictable(held=3)


@pytest.mark.parametrize("core", CORES)
def test_a_budget_cuts_states_with_their_nodes(tmp_path, rng, core):
    e = real.engine(core=core, **KIND)
    keys = [e.put(real.random_tokens(rng, 200)) for _ in range(12)]
    using, at = churn.budget(200_000), flow.home(tmp_path)
    saved = flow.snapshot(e, at, using=using)
    assert saved.left_out_tokens > 0
    assert verify.store_bytes(REAL, tmp_path)[1] <= 200_000
    at.close()
    again, _, result = restart(tmp_path, core)
    found = matches(again, keys)
    assert dict(+result.refused) == {}
    assert found[-1] == 200
    assert found[0] == 0
    assert all(e.states()[path] == state for path, state in again.states().items())


def test_states_with_more_than_is_saved_are_refused():
    for change in ({"mamba_ckpt_pool": object()}, {"mamba_allocator": object()}):
        e = real.engine(**KIND)
        for name, value in change.items():
            setattr(e.requests, name, value)
        with pytest.raises(Unsupported):
            real.KvPages(e.allocator, requests=e.requests)
    e = real.engine(**KIND)
    e.pool.mamba_pool._slot_siblings = [object()]
    with pytest.raises(Unsupported):
        real.KvPages(e.allocator, requests=e.requests)
    with pytest.raises(Unsupported):
        real.KvPages(e.allocator, requests=real.engine().requests)
