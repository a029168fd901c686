"""Every kind of KV pool: all its bytes survive, in other slots, in trees of both cores."""

from __future__ import annotations

import flow
import numpy as np
import pytest
import real
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_persist.engine.pages import KvPages
from sglang_persist.errors import Unsupported
from sglang_persist.fs import REAL
from sglang_persist.store import names, verify

CORES = ("rust", "python")
KINDS = [
    ("mha", 1), ("mha", 16), ("mha", 64), ("mha", 128), ("hnd", 16), ("hnd", 64), ("fp4", 1), ("fp4", 64), ("mxfp8", 1),
    ("mxfp8", 128), ("mla", 1), ("mla", 64), ("mla-fp4", 64), ("dsa", 64),
]  # fmt: skip


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(("kind", "page"), KINDS)
def test_every_buffer_survives(tmp_path, rng, kind, page, core):
    size = 256 * max(16, page)
    e = real.engine(kind=kind, page=page, core=core, size=size)
    real.populate(e, rng, unit=max(16, page), count=8)
    saved = flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    before = e.held()
    again, _, result = flow.restart(tmp_path, held=3 * page, kind=kind, page=page, core=core, size=size)
    assert again.held() == before
    assert len(before) * page == result.tokens == saved.tokens > 0
    again.check(held=3 * page)
    again.check_evictable(held=3 * page)
    assert verify.verify(REAL, tmp_path, deep=True).findings == []


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    ("kind", "page", "drafts"),
    [("mha", 1, ("mha",)), ("mha", 16, ("mha", "mha")), ("mla", 64, ("mla",)), ("mla", 1, ("mha",)),
     ("hnd", 16, ("mha",)), ("dsa", 64, ("mla",)), ("mha", 64, ("hnd",))],
)  # fmt: skip
def test_draft_models_are_saved_with_the_target(tmp_path, rng, kind, page, drafts, core):
    """In trees of bigrams, whose tokens are one more than their slots."""
    given = {"kind": kind, "page": page, "core": core, "drafts": drafts, "bigram": True, "size": 256 * max(16, page)}
    e = real.engine(**given)
    assert len(e.pages.pools[0].buffers) == len(e.buffers()[0])
    real.populate(e, rng, unit=max(16, page), count=8)
    saved = flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    before = e.held()
    again, _, result = flow.restart(tmp_path, held=3 * page, **given)
    assert again.held() == before
    assert len(before) * page == result.tokens == saved.tokens > 0
    again.check_evictable(held=3 * page)


def test_draft_models_beside_windows_have_the_slots_of_the_full_layers(tmp_path, rng):
    e = real.engine(kind="swa", drafts=("mha",))
    real.populate(e, rng)
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    before = e.held()
    again, _, _ = flow.restart(tmp_path, kind="swa", drafts=("mha",))
    assert again.held() == before


def test_a_draft_model_that_is_not_known_is_refused():
    with pytest.raises(Unsupported, match="SWAKVPool"):
        real.engine(drafts=("swa",))
    e = real.engine(page=16)
    with pytest.raises(Unsupported, match="pages of 1 "):
        KvPages(e.allocator, drafts=[real.engine(page=1).pool])
    with pytest.raises(Unsupported, match="rows for"):
        KvPages(e.allocator, drafts=[real.engine(page=16, size=1024).pool])


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("page", [1, 16])
def test_windows_survive_where_they_are(tmp_path, rng, core, page):
    """A path matches as far as the live tree's did: of what has left the window, only the full layers' KV is there."""
    kind = {"kind": "swa", "page": page, "core": core}
    e = real.engine(**kind)
    keys = real.populate(e, rng)
    e.cache.evict(EvictParams(swa_num_tokens=400))
    before = e.held()
    assert 0 < sum(window is None for _, window in before.values()) < len(before)
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    again, _, result = flow.restart(tmp_path, held=0, **kind)
    assert again.held() == before
    assert dict(result.refused) == {}
    assert [again.match(key) for key in keys] == [e.match(key) for key in keys]
    again.check()
    again.check_evictable()
    assert verify.verify(REAL, tmp_path, deep=True).findings == []


@pytest.mark.parametrize("core", CORES)
def test_a_window_that_comes_back_is_saved(tmp_path, rng, core):
    """What had left the window when its node was saved, and was computed again since."""
    e = real.engine(kind="swa", core=core)
    head = real.random_tokens(rng, 200)
    for _ in range(2):
        e.put(head + real.random_tokens(rng, 40))
    e.cache.evict(EvictParams(swa_num_tokens=210))
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    before = e.held()
    gone = [page for page, (_, window) in before.items() if window is None]
    tokens = head + real.random_tokens(rng, 40)
    assert e.match(real.key_of(e, tokens)) == 0
    e.put_again(tokens)
    after = e.held()
    assert any(after[page][1] is not None for page in gone)
    second = flow.snapshot(e, at)
    assert second.new_tokens == 40
    assert flow.snapshot(e, at).new_bytes == 0
    at.close()
    again, _, _ = flow.restart(tmp_path, kind="swa", core=core)
    assert all(again.held()[page] == held for page, held in after.items())
    assert again.match(real.key_of(e, tokens)) == 240


@pytest.mark.parametrize("core", CORES)
def test_what_has_no_room_in_the_window_pool_is_restored_without(tmp_path, rng, core):
    e = real.engine(kind="swa", core=core)
    keys = real.populate(e, rng)
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    small = real.engine(kind="swa", core=core, window_size=160)
    result = flow.load(small, flow.home(tmp_path))
    assert result.tokens == e.cache.total_size()[0]
    before = e.held()
    for page, (full, window) in small.held().items():
        assert full == before[page][0]
        assert window in (None, before[page][1])
    assert small.match(keys[-1]) == len(keys[-1])  # the newest first
    small.cache.sanity_check()


@pytest.mark.parametrize("core", CORES)
def test_a_damaged_window_costs_the_window_alone(tmp_path, rng, core):
    e = real.engine(kind="swa", core=core)
    real.populate(e, rng, 4)
    flow.snapshot(e, at := flow.home(tmp_path))
    index = next(iter(at.segments.values()))
    at.close()
    record = int(np.flatnonzero(index.pool == 1)[0])
    (path,) = tmp_path.rglob(names.segment(index.id))
    data = bytearray(path.read_bytes())
    data[int(index.offset[record])] ^= 1
    path.write_bytes(data)
    again, _, result = flow.restart(tmp_path, kind="swa", core=core)
    assert result.tokens == e.cache.total_size()[0]
    assert result.errors
    before, after = e.held(), again.held()
    assert {page: full for page, (full, _) in after.items()} == {page: full for page, (full, _) in before.items()}
    lost = [page for page in after if after[page][1] != before[page][1]]
    assert lost
    assert all(after[page][1] is None for page in lost)
    again.check()
    again.check_evictable()
