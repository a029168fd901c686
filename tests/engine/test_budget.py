"""The budget holds for the whole store at every moment; the coldest prefixes go first, the hottest are always there.

Every file system in here weighs the whole store, temporary files included, after each change.
"""

from __future__ import annotations

import errno

import churn
import flow
import pytest
import real
import torch
from store.little import flip
from store.simfs import SimFs

from sglang_persist import config
from sglang_persist.errors import StoreFull
from sglang_persist.format import envelope, manifest
from sglang_persist.fs import REAL
from sglang_persist.model import Identity
from sglang_persist.store import names, shard, verify
from sglang_persist.store.home import Home

BUDGET = 300_000
SEGMENT = BUDGET // 10
OTHER_SHARD = "dp0-adp0-pp0-cp0-tp1"


@pytest.fixture(autouse=True)
def same_kv():
    torch.manual_seed(5)


def sound(root) -> None:
    assert verify.verify(REAL, root, deep=True).findings == []


def within(fs: churn.WeighingFs, total: int, segments: int = 1) -> None:
    """Never more than the budget and one segment a rank, and no segment larger than a tenth of it."""
    assert fs.most <= total + segments * (total // 10)
    assert fs.largest <= total // 10


def restored(root, c: churn.Churn, **kind) -> list[int]:
    """Of each prompt, what a restart gets from the newest generation alone."""
    e, at = real.engine(size=c.engine.size, page=c.engine.tree.page_tokens, **kind), flow.home(root)
    at.find()
    at.fuller = None
    flow.restore(e.tree, e.pages, at, flow.SETTINGS, flow.time.monotonic() + 60, flow.RestoreResult())
    at.close()
    return c.held(e)


def whole(root, c: churn.Churn, **kind) -> list[bool]:
    return [n == len(c.key(p)) for n, p in zip(restored(root, c, **kind), c.prompts, strict=True)]


def newest_only(found: list[bool], waiting: int = 0) -> bool:
    """Whether what is there is the end of the list, and not nothing. `waiting`: so many may be missing in it."""
    return found[-1] and found[found.index(True) :].count(False) <= waiting


# ------------------------------------------------------------------------------------------------- every snapshot


@pytest.mark.parametrize(
    ("core", "page", "normal", "compression", "length"),
    [
        ("rust", 1, False, "auto", 112),  # random bits do not compress: every size is underestimated
        ("python", 1, True, "auto", 112),
        ("rust", 16, True, "raw", 80),
        ("python", 16, False, "zstd", 112),
    ],
)
def test_over_many_snapshots_the_newest_prompts_are_kept_within_the_budget(
    tmp_path, core, page, normal, compression, length
):
    c = churn.Churn(3, length=length, core=core, page=page, normal=normal, size=4096)
    fs = churn.WeighingFs(tmp_path)
    at, using = flow.home(tmp_path, fs), churn.budget(BUDGET, compression=compression)
    for i in range(16):
        for _ in range(5 if i else 25):  # the first one is larger than the budget
            c.serve()
        saved = flow.snapshot(c.engine, at, using=using)
        assert saved.left_out_tokens > 0
        assert verify.store_bytes(REAL, tmp_path)[1] > BUDGET // 2, "the store is put to use"
        if i % 5 == 0:
            # What pages will take is an estimate: the coldest of what is new may have to wait for the next snapshot.
            assert newest_only(whole(tmp_path, c, core=core), waiting=1)
            sound(tmp_path)
    within(fs, BUDGET)
    at.close()


@pytest.mark.parametrize("seed", range(2))
def test_with_prompts_of_all_kinds_the_newest_is_always_there_whole(tmp_path, seed):
    """Long and short ones, some used again, some that leave another in the middle."""
    c = churn.Churn(seed, core=("rust", "python")[seed % 2], size=2048)
    fs = churn.WeighingFs(tmp_path)
    at, using = flow.home(tmp_path, fs), churn.budget(150_000)
    for _ in range(12):
        for _ in range(int(c.rng.integers(1, 8))):
            old = c.prompts[c.rng.integers(len(c.prompts))] if c.prompts else c.head
            kind = c.rng.integers(4)
            if kind == 0:
                c.serve(list(old))
            elif kind == 1:
                c.serve(old[: c.rng.integers(1, len(old) + 1)] + real.random_tokens(c.rng, c.rng.integers(1, 9)))
            else:
                c.serve(c.head[: kind * 12] + real.random_tokens(c.rng, c.rng.integers(1, 40)))
        flow.snapshot(c.engine, at, using=using)
        assert whole(tmp_path, c)[-1]
        sound(tmp_path)
    within(fs, 150_000)
    at.close()


def test_hot_prefixes_in_records_that_are_else_dead_do_not_lift_the_store_over_the_budget(tmp_path):
    """A record stays for as long as one page of it is used: here eight prefixes hold on to most of the budget."""
    c = churn.Churn(1, size=2048)
    fs = churn.WeighingFs(tmp_path)
    at, using = flow.home(tmp_path, fs), churn.budget(BUDGET)
    stems = [real.random_tokens(c.rng, 4) for _ in range(8)]
    for stem in stems:
        c.serve(stem + real.random_tokens(c.rng, 106))
    answers = [stem + real.random_tokens(c.rng, 4) for stem in stems]
    for _ in range(8):
        flow.snapshot(c.engine, at, using=using)
        for _ in range(6):
            c.serve()
        for answer in answers:
            c.serve(answer)
    flow.snapshot(c.engine, at, using=using)
    found = restored(tmp_path, c)
    assert found[-1] == 8
    assert verify.store_bytes(REAL, tmp_path)[1] <= BUDGET
    within(fs, BUDGET)
    sound(tmp_path)
    at.close()


def test_unchanged_tree_beyond_the_budget_is_not_written_again_and_again(tmp_path):
    c = churn.Churn(3, size=8192)
    for _ in range(40):
        c.serve()
    at, using = flow.home(tmp_path), churn.budget(BUDGET)
    first = flow.snapshot(c.engine, at, using=using)
    for _ in range(3):  # it settles once the real sizes are known
        last = flow.snapshot(c.engine, at, using=using)
    files = churn.weigh(tmp_path)
    again = flow.snapshot(c.engine, at, using=using)
    assert churn.weigh(tmp_path) == files
    assert (again.generation, again.tokens, again.new_tokens, again.new_bytes) == (last.generation, last.tokens, 0, 0)
    assert again.left_out_tokens == c.engine.cache.total_size()[0] - again.tokens
    assert first.generation <= again.generation <= 3
    at.close()


@pytest.mark.parametrize("core", ["rust", "python"])
def test_of_one_prompt_larger_than_the_budget_the_beginning_is_kept(tmp_path, core):
    c = churn.Churn(4, size=8192, length=3000, core=core)
    prompt = c.serve()
    fs = churn.WeighingFs(tmp_path)
    at, using = flow.home(tmp_path, fs), churn.budget(BUDGET)
    first = flow.snapshot(c.engine, at, using=using)
    assert verify.store_bytes(REAL, tmp_path)[1] > 0.5 * BUDGET
    assert first.tokens + first.left_out_tokens == len(prompt)
    assert restored(tmp_path, c) == [first.tokens]
    for _ in range(3):
        last = flow.snapshot(c.engine, at, using=using)
    files = churn.weigh(tmp_path)
    assert flow.snapshot(c.engine, at, using=using).new_bytes == 0
    assert churn.weigh(tmp_path) == files
    # The node is split within what is kept of it: what is stored is found again.
    for share in (0.5, 0.8):
        c.serve(prompt[: int(share * last.tokens)] + real.random_tokens(c.rng, 8))
        assert flow.snapshot(c.engine, at, using=using).new_tokens <= 0.1 * last.tokens
        assert restored(tmp_path, c)[-1] == len(c.prompts[-1])
    within(fs, BUDGET)
    sound(tmp_path)
    at.close()


def test_deadline_keeps_the_hottest(tmp_path, monkeypatch):
    c = churn.Churn(3, head=0, length=160, size=8192)
    for _ in range(40):
        c.serve()
    at = flow.home(tmp_path)
    clock = [0.0]
    monkeypatch.setattr("sglang_persist.save.time.monotonic", lambda: clock[0])
    job = flow.begin(c.engine, at, deadline=10)
    flow.advance(job, 7)
    clock[0] = 11
    saved = flow.finish(job)
    monkeypatch.undo()
    assert 0 < saved.tokens < saved.left_out_tokens
    at.close()
    assert newest_only(whole(tmp_path, c))


# ------------------------------------------------------------------------------------------ limits that are lowered


def test_lower_limit_is_held_before_a_restarted_server_serves(tmp_path):
    c = churn.Churn(4, size=4096)
    for _ in range(20):
        c.serve()
    at = flow.home(tmp_path)
    flow.snapshot(c.engine, at)
    c.serve()
    flow.snapshot(c.engine, at)
    at.close()
    before = verify.store_bytes(REAL, tmp_path)[1]
    fs, limit = churn.WeighingFs(tmp_path), before // 3
    e, at = real.engine(size=4096), flow.home(tmp_path, fs)
    flow.load(e, at)
    flow.keeper(e, at, churn.budget(limit)).start()
    assert limit // 2 < verify.store_bytes(REAL, tmp_path)[1] <= limit
    assert fs.most <= before + limit, "what stays is copied before the large segments of old go"
    assert verify.verify(REAL, tmp_path, deep=True).leftovers == 1, "the lock"
    sound(tmp_path)
    assert newest_only(whole(tmp_path, c))
    # The tree was restored as a whole, and goes on being saved as far as there is room.
    assert all(n == len(p) for n, p in zip(c.held(e), c.prompts, strict=True))
    fs.forget()
    for _ in range(3):
        e.put(tokens := real.random_tokens(c.rng, 20))
        flow.snapshot(e, at, using=churn.budget(limit))
    at.close()
    assert fs.most <= limit + limit // 10
    assert flow.restart(tmp_path)[0].match(c.key(tokens)) == 20


def test_limit_of_nothing_removes_everything_at_the_start_and_refuses_snapshots(tmp_path):
    c = churn.Churn(4, size=4096)
    c.serve()
    at = flow.home(tmp_path)
    flow.snapshot(c.engine, at)
    none = churn.budget(0)
    with pytest.raises(StoreFull):
        flow.snapshot(c.engine, at, using=none)
    at.close()
    at = flow.home(tmp_path)
    at.find()
    flow.keeper(c.engine, at, none).start()
    assert sum(churn.weigh(tmp_path).values()) == 0
    with pytest.raises(StoreFull):
        flow.snapshot(c.engine, at, using=none)
    assert sum(churn.weigh(tmp_path).values()) == 0
    assert flow.snapshot(c.engine, at).tokens == 160
    at.close()
    sound(tmp_path)


@pytest.mark.parametrize("size", [100, 5_000, 20_000, 150_000])
def test_limit_below_ten_pages_is_refused_by_its_reason(tmp_path, size):
    """A segment is never larger than a tenth of the budget, so it must be able to hold a page (here of 16 kB)."""
    c = churn.Churn(4, page=64, size=4096)
    c.serve(real.random_tokens(c.rng, 64))
    fs = churn.WeighingFs(tmp_path)
    at = flow.home(tmp_path, fs)
    with pytest.raises(StoreFull, match="holds no page"):
        flow.snapshot(c.engine, at, using=churn.budget(size))
    assert fs.most == 0
    assert flow.snapshot(c.engine, at, using=churn.budget(250_000)).tokens == 64
    within(fs, 250_000)
    at.close()


# ---------------------------------------------------------------------------------------------------- free space


def test_reserve_of_the_disk_holds_while_other_programs_fill_it(tmp_path):
    disk, reserve = 2_000_000, 400_000
    fs = churn.WeighingFs(tmp_path, disk)
    using = flow.settings(max_bytes=config.Size(share=1.0), min_free=config.Size(bytes=reserve))
    c = churn.Churn(6, size=4096)
    at = flow.home(tmp_path, fs)
    for others in (0, 800_000, 1_200_000, 1_300_000, 1_300_000, 0):
        for _ in range(8):
            c.serve()
        fs.others = others
        flow.snapshot(c.engine, at, using=using)
        fs.forget()
        free = fs.space(tmp_path)[0]
        assert free >= reserve - (disk - reserve - others) // 10
        sound(tmp_path)
        assert newest_only(whole(tmp_path, c))
    at.close()


def test_reserve_is_given_back_though_the_tree_is_the_same_or_empty(tmp_path):
    disk, reserve = 2_000_000, 400_000
    fs = churn.WeighingFs(tmp_path, disk)
    using = flow.settings(max_bytes=config.Size(share=1.0), min_free=config.Size(bytes=reserve))
    c = churn.Churn(6, size=4096)
    for _ in range(20):
        c.serve()
    at = flow.home(tmp_path, fs)
    flow.snapshot(c.engine, at, using=using)
    fs.others = 1_000_000
    for _ in range(2):
        flow.snapshot(c.engine, at, using=using)
        assert fs.space(tmp_path)[0] >= reserve
        assert newest_only(whole(tmp_path, c))
        c.engine.evict()
        fs.others = 1_300_000
    # Where others have taken it all, nothing is written, and what is there is not given up for that.
    before = churn.weigh(tmp_path)
    fs.others = 1_990_000
    for _ in range(2):
        with pytest.raises(StoreFull):
            flow.snapshot(c.engine, at, using=using)
        c.serve(c.prompts[-1])
    assert churn.weigh(tmp_path) == before
    at.close()


# ------------------------------------------------------------------------------------- what else is in the store


def ranks(root, fs, c: churn.Churn, using):
    """Two ranks of one engine: (home, keeper) of each."""
    shards = (flow.SHARD, OTHER_SHARD)
    homes = [Home(fs, root, real.IDENTITY, s) for s in shards]
    return [(at, flow.keeper(c.engine, at, using, shards)) for at in homes]


def test_each_rank_stays_within_its_part(tmp_path):
    fs = churn.WeighingFs(tmp_path)
    c = churn.Churn(7, size=4096)
    total = 2 * BUDGET
    both = ranks(tmp_path, fs, c, churn.budget(total))
    for i in range(10):
        for _ in range(6 if i else 25):
            c.serve()
        number = max(at.next_generation() for at, _ in both)
        for at, keeper in both:
            request = flow.SaveRequest(number, "interval")
            assert flow.finish(flow.save(c.engine.tree, c.engine.pages, keeper, request)).generation == number
            assert verify.store_bytes(REAL, at.path)[1] <= BUDGET + total // 10
    within(fs, total, segments=2)
    sound(tmp_path)
    for at, _ in both:
        newest, passed = shard.newest(REAL, at.path)
        assert (newest.generation, passed) == (number, [])
        assert verify.store_bytes(REAL, at.path)[1] > BUDGET // 2
        at.close()


def test_rank_whose_peers_stopped_keeps_the_last_complete_generation_within_its_part(tmp_path):
    fs = churn.WeighingFs(tmp_path)
    c = churn.Churn(7, size=4096)
    for _ in range(20):
        c.serve()
    (a, first), (b, second) = ranks(tmp_path, fs, c, churn.budget(2 * BUDGET))
    for keeper in (first, second):
        flow.finish(flow.save(c.engine.tree, c.engine.pages, keeper, flow.SaveRequest(1, "interval")))
    before = [verify.store_bytes(REAL, b.path)[1], restored(tmp_path, c)]
    for number in range(2, 12):
        for _ in range(6):
            c.serve()
        try:
            flow.finish(flow.save(c.engine.tree, c.engine.pages, first, flow.SaveRequest(number, "interval")))
        except StoreFull:
            continue
    within(fs, 2 * BUDGET, segments=2)
    assert verify.store_bytes(REAL, b.path)[1] == before[0]
    assert shard.newest(REAL, a.path)[0].generation == 1
    sound(tmp_path)
    for at in (a, b):
        at.close()


def test_rank_that_makes_room_at_its_start_leaves_its_peers_alone(tmp_path):
    """The other rank has not taken its lock yet: it must get it, and find its newest generation."""
    c = churn.Churn(7, size=4096)
    for _ in range(20):
        c.serve()
    for at, keeper in ranks(tmp_path, REAL, c, flow.SETTINGS):
        flow.finish(flow.save(c.engine.tree, c.engine.pages, keeper, flow.SaveRequest(1, "interval")))
        at.close()

    class Watching(churn.WeighingFs):
        def lock(self, path):
            assert OTHER_SHARD not in str(path)
            return super().lock(path)

    (a, first), (b, _) = ranks(tmp_path, Watching(tmp_path), c, churn.budget(400_000))
    other = churn.weigh(b.path)
    a.find()
    first.start()
    assert churn.weigh(b.path) == other
    assert verify.store_bytes(REAL, a.path)[1] <= 200_000
    a.close()
    sound(tmp_path)


def another(root, fs, generations: int, weights: str = "other", shard=flow.SHARD) -> tuple[Home, churn.Churn]:
    """Another model's generations in the same store, or another replica's."""
    c = churn.Churn(8, size=4096)
    at = Home(fs, root, Identity({**real.IDENTITY.model, "weights": weights}, real.IDENTITY.cut), shard)
    keeper = flow.Keeper(at, flow.Shape(at.identity, c.engine.pages.pools, 1, (shard,), 2), flow.SETTINGS)
    for _ in range(generations):
        c.engine.evict()  # each of them holds prompts of its own
        for _ in range(4):
            c.serve()
        request = flow.SaveRequest(at.next_generation(), "interval")
        flow.finish(flow.save(c.engine.tree, c.engine.pages, keeper, request))
    return at, c


def test_another_namespaces_oldest_generation_goes_before_our_tree_is_cut(tmp_path):
    other, _ = another(tmp_path, REAL, 2)
    other.close()
    fs = churn.WeighingFs(tmp_path)
    c, at, using = churn.Churn(9, size=4096), flow.home(tmp_path, fs), churn.budget(BUDGET)
    for _ in range(3):
        c.serve()
    assert flow.snapshot(c.engine, at, using=using).left_out_tokens == 0
    assert shard.generations(REAL, other.path) == [2]
    for _ in range(3):
        c.serve()
    assert flow.snapshot(c.engine, at, using=using).left_out_tokens == 0
    assert shard.generations(REAL, other.path) == []
    assert max(churn.weigh(at.path).values()) <= SEGMENT
    sound(tmp_path)
    at.close()


def test_what_replicas_left_that_are_no_more_counts_and_goes_when_room_is_needed(tmp_path):
    gone, _ = another(tmp_path, REAL, 2, real.IDENTITY.model["weights"], flow.SHARD.replace("dp0", "dp1"))
    gone.close()
    fs = churn.WeighingFs(tmp_path)
    c, at, using = churn.Churn(9, size=4096), flow.home(tmp_path, fs), churn.budget(BUDGET)
    assert gone.path.parent == at.path.parent
    c.serve()
    flow.snapshot(c.engine, at, using=using)
    held = verify.store_bytes(REAL, gone.path)[1]
    assert flow.keeper(c.engine, at, using).budget().cap == BUDGET - held
    for _ in range(6):
        for _ in range(4):
            c.serve()
        flow.snapshot(c.engine, at, using=using)
    assert shard.generations(REAL, gone.path) == []
    assert verify.store_bytes(REAL, tmp_path)[1] <= BUDGET
    assert max(churn.weigh(at.path).values()) <= SEGMENT
    sound(tmp_path)
    at.close()


def test_namespace_that_a_server_writes_keeps_its_newest_generation(tmp_path):
    other, theirs = another(tmp_path, REAL, 3)
    fs = churn.WeighingFs(tmp_path)
    c, at, using = churn.Churn(9, size=4096), flow.home(tmp_path, fs), churn.budget(BUDGET)
    for _ in range(6):
        for _ in range(4):
            c.serve()
        flow.snapshot(c.engine, at, using=using)
        assert newest_only(whole(tmp_path, c))
    assert shard.generations(REAL, other.path) == [3]
    assert sum(churn.weigh(tmp_path).values()) <= BUDGET + SEGMENT
    assert theirs.engine.cache.total_size()[0] == other.manifest.tokens
    sound(tmp_path)
    for one in (at, other):
        one.close()


@pytest.mark.parametrize("kind", ["newer", "damaged"])
def test_manifest_that_cannot_be_read_neither_wedges_the_budget_nor_breaks_it(tmp_path, kind):
    c = churn.Churn(2, size=4096)
    fs = churn.WeighingFs(tmp_path)
    at, using = flow.home(tmp_path, fs), churn.budget(BUDGET)
    for _ in range(3):
        c.serve()
    flow.snapshot(c.engine, at, using=using)
    at.close()
    unreadable = at.path / names.manifest(2)
    data = bytearray((at.path / names.manifest(1)).read_bytes())
    if kind == "newer":
        data[8] = 2
        size = manifest.HEADER.size
        data[size : size + 8] = manifest.CHECKSUM.pack(envelope.digest64(bytes(data[:size])))
    unreadable.write_bytes(data)
    if kind == "damaged":
        flip(unreadable, 9)
    at = flow.home(tmp_path, fs)
    at.find()
    for _ in range(10):
        for _ in range(4):
            c.serve()
        flow.snapshot(c.engine, at, using=using)
    assert newest_only(whole(tmp_path, c))
    assert unreadable.read_bytes() == bytes(data) or kind == "damaged"
    assert unreadable.exists()
    within(fs, BUDGET)
    at.close()


def test_what_a_failed_rewrite_left_is_not_counted_for_ever(tmp_path):
    c = churn.Churn(2, size=4096)
    sim = SimFs(tmp_path)
    at, using = flow.home(tmp_path, sim), churn.budget(BUDGET)
    for i in range(12):
        for _ in range(4):
            c.serve()
        if i % 2:
            sim.fail_on(("rename",), ".kvm", errno.ENOSPC)
            with pytest.raises(StoreFull):
                flow.snapshot(c.engine, at, using=using)
            sim.arm()
        else:
            flow.snapshot(c.engine, at, using=using)
            assert newest_only(whole(tmp_path, c))
        report = verify.verify(REAL, tmp_path)
        assert (report.findings, report.leftovers) == ([], 1)
    at.close()


def test_segments_of_a_fuller_generation_that_made_room_are_never_named_again(tmp_path):
    """Restored from two generations; then the older one goes, and with it segments that live nodes were stored in."""
    c = churn.Churn(2, size=4096)
    at = flow.home(tmp_path)
    for _ in range(6):
        c.serve()
    flow.snapshot(c.engine, at)
    c.engine.evict()
    c.serve()
    flow.snapshot(c.engine, at)
    at.close()
    limit = verify.store_bytes(REAL, tmp_path)[1] + 30_000
    e, at, result = flow.restart(tmp_path)
    assert result.tokens == 48 + 7 * 112
    c.engine = e
    for _ in range(6):
        for _ in range(2):
            c.serve()
        flow.snapshot(c.engine, at, using=churn.budget(limit))
        sound(tmp_path)
        assert newest_only(whole(tmp_path, c))
    at.close()
