"""Several ranks of one tree, each with its own pool, tree and shard: what they restore they restore alike."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import flow
import numpy as np
import pytest
import real
import torch

from sglang_persist.engine import identity
from sglang_persist.errors import RanksDisagree
from sglang_persist.filling import RestoreResult
from sglang_persist.fs import REAL
from sglang_persist.keeper import Keeper, SaveRequest, Shape
from sglang_persist.model import Buffer, Pool
from sglang_persist.plan.topology import OWN, Rank, fits, head_range, needed
from sglang_persist.restore import restore
from sglang_persist.store import names, shard
from sglang_persist.store.home import Home

TIMEOUT = 60


class Together:
    """`ports.Ranks` among threads."""

    def __init__(self, count: int):
        self._values: list = [None] * count
        self._barrier = threading.Barrier(count)
        self.count = count

    def rank(self, number: int):
        return _Rank(self, number)

    def gather(self, number: int, value) -> list:
        self._values[number] = value
        self._barrier.wait(TIMEOUT)
        out = list(self._values)
        self._barrier.wait(TIMEOUT)
        return out


@dataclass
class _Rank:
    group: Together
    number: int

    @property
    def alone(self) -> bool:
        return self.group.count == 1

    def gather(self, value) -> list:
        return self.group.gather(self.number, value)


@dataclass
class Model:
    """A model cut for (tp, pp) ranks. Its KV is a function of layer, token position and head, so that each rank's part
    is known."""

    tp: int = 1
    pp: int = 1
    page: int = 1
    kind: str = "mha"
    heads: int = 4
    layers: int = 4
    dim: int = 16
    dp: int = 0
    #: Groups of attention data parallelism, of which this one is number `dp`.
    adp: int = 1
    size: int = 4096
    core: str = "rust"
    engines: list[real.Engine] = field(default_factory=list)

    @property
    def latent(self) -> bool:
        return self.kind.startswith("mla")

    @property
    def shards(self) -> tuple[str, ...]:
        tps = range(1 if self.latent else self.tp)
        return tuple(self.shard(pp, tp) for pp in range(self.pp) for tp in tps)

    def shard(self, pp: int, tp: int) -> str:
        adp = self.dp if self.adp > 1 else 0
        return f"dp{self.dp}-adp{adp}-pp{pp}-cp0-tp{0 if self.latent else tp}"

    @property
    def identity(self):
        topology = {"tp": self.tp * self.adp, "pp": self.pp, "cp": 1, "adp": self.adp}
        cut = {"topology": topology, "page": self.page, "pool": self.kind, "layout": 1}
        if self.kind == "linear":
            cut["states"] = {"chunk": 64}
        return replace(real.IDENTITY, cut=cut)

    def stage(self, pp: int) -> int:
        """Layers of a stage: the first ones have one more where they do not divide."""
        return self.layers // self.pp + (pp < self.layers % self.pp)

    def start(self, held: int = 0) -> Model:
        """New processes."""
        a, b = head_range(self.heads, self.tp, 0)
        self.engines, self.held = [], held
        for pp in range(self.pp):
            first = sum(self.stage(i) for i in range(pp))
            for _ in range(self.tp):
                e = real.engine(
                    kind=self.kind, page=self.page, size=self.size, layers=self.stage(pp), heads=b - a, dim=self.dim,
                    core=self.core, first_layer=first,
                )  # fmt: skip
                if held:
                    e.allocate(held)
                self.engines.append(e)
        return self

    def put(self, tokens) -> None:
        """The KV of a path: the same function of the whole model's layers and heads on every rank."""
        for number, e in enumerate(self.engines):
            key = e.put(tokens)
            slots = real.path_slots(e, key)
            for name, buffer, pick in real.named(e):
                rows = buffer[pick(slots)]
                buffer[pick(slots)] = self.values(name, key.raw_token_ids(), number % self.tp, rows)

    def values(self, name: str, tokens, tp: int, like: torch.Tensor) -> torch.Tensor:
        """Small whole numbers, which every type of element holds."""
        seed = torch.from_numpy(np.cumsum(np.array(tokens, np.int64)))[:, None, None]
        heads = torch.tensor([0]) if self.latent else torch.arange(*head_range(self.heads, self.tp, tp))
        element = torch.arange(like.shape[1:].numel() // len(heads))
        salt = sum(map(ord, name)) + 31 * int("".join(c for c in name if c.isdigit()))
        out = (seed * 7 + 41 * heads[None, :, None] + 13 * element[None, None] + salt) % 251
        return out.view(like.shape).to(like.dtype)

    def check(self, prompts) -> list[int]:
        """What each prompt finds; whatever is there is what the model would compute. The same on each rank."""
        found = []
        for number, e in enumerate(self.engines):
            lengths = []
            for tokens in prompts:
                key = real.key_of(e, tokens)
                slots = real.path_slots(e, key)
                lengths.append(len(slots))
                there = np.array(tokens[: len(slots)], np.int64)
                for name, buffer, pick in real.named(e):
                    rows = buffer[pick(slots)]
                    assert real.same_bits(rows, self.values(name, there, number % self.tp, rows)), name
            found.append(lengths)
            e.check(self.held)
        assert all(lengths == found[0] for lengths in found)
        return found[0]


@dataclass
class Group:
    """The homes of a model's ranks, below one root."""

    root: object
    model: Model
    replicas: int = 1

    def __post_init__(self):
        m = self.model
        self.homes, self.keepers = [], []
        for number, e in enumerate(m.engines):
            pp, tp = divmod(number, m.tp)
            home = Home(REAL, self.root, m.identity, m.shard(pp, tp))
            self.homes.append(home)
            shape = Shape(m.identity, e.pages.pools, m.page, m.shards, self.replicas)
            self.keepers.append(Keeper(home, shape, flow.SETTINGS))

    def save(self, leads: bool = True):
        m, results = self.model, []
        generation = max(home.run(home.next_generation).result() for home in self.homes)
        writers = [i for i in range(len(self.homes)) if not m.latent or i % m.tp == 0]
        with ThreadPoolExecutor(len(writers)) as pool:
            for i in writers:
                request = SaveRequest(generation, "manual", leads=leads and i == 0)
                work = flow.save(m.engines[i].tree, m.engines[i].pages, self.keepers[i], request)
                results.append(pool.submit(flow.finish, work))
        return [r.result() for r in results]

    def load(self) -> list[RestoreResult]:
        m, together = self.model, Together(len(self.homes))

        def one(i: int) -> RestoreResult:
            e, home, result = m.engines[i], self.homes[i], RestoreResult()
            heads = tuple(None if m.latent else OWN if pool.at_ends else m.heads for pool in e.pages.pools)
            home.find()
            home.look_around(Rank(home.path.name, m.identity.cut, e.pages.pools, m.page, heads), self.replicas)
            if home.manifest is None and not home.sources:
                return result
            deadline = flow.time.monotonic() + TIMEOUT
            restore(e.tree, e.pages, home, flow.SETTINGS, deadline, result, ranks=together.rank(i))
            home.took(self.replicas)
            return result

        with ThreadPoolExecutor(len(self.homes)) as pool:
            return [f.result() for f in [pool.submit(one, i) for i in range(len(self.homes))]]

    def close(self) -> None:
        for home in self.homes:
            home.close()


def saved(root, model: Model, prompts) -> Group:
    model.start()
    for tokens in prompts:
        model.put(tokens)
    group = Group(root, model)
    group.save()
    group.close()
    return group


def restarted(root, model: Model, replicas: int = 1) -> tuple[Model, list[RestoreResult]]:
    group = Group(root, model.start(held=3 * model.page), replicas)
    results = group.load()
    group.close()
    return model, results


@pytest.fixture
def prompts():
    rng = np.random.default_rng(11)
    head = real.random_tokens(rng, 128)
    return [head + real.random_tokens(rng, 64 + 32 * i) for i in range(4)]


CUTS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize(("tp", "pp"), CUTS)
def test_ranks_restore_what_they_saved(tmp_path, prompts, tp, pp):
    saved(tmp_path, Model(tp, pp), prompts)
    model, results = restarted(tmp_path, Model(tp, pp))
    assert model.check(prompts) == [len(p) for p in prompts]
    assert len({r.digest.hexdigest() for r in results}) == 1


@pytest.mark.parametrize(("tp", "pp"), CUTS)
@pytest.mark.parametrize(("to_tp", "to_pp"), CUTS)
def test_any_cut_restores_into_any_other(tmp_path, prompts, tp, pp, to_tp, to_pp):
    saved(tmp_path, Model(tp, pp), prompts)
    model, results = restarted(tmp_path, Model(to_tp, to_pp))
    assert model.check(prompts) == [len(p) for p in prompts]
    assert all(dict(r.refused) == {} for r in results)


@pytest.mark.parametrize("kind", ["mha", "hnd", "fp4", "swa", "mla", "mla-fp4"])
@pytest.mark.parametrize(("tp", "to_tp"), [(2, 1), (1, 2)])
def test_every_kind_changes_its_topology(tmp_path, prompts, kind, tp, to_tp):
    page = 16 if kind == "hnd" else 1
    saved(tmp_path, Model(tp, kind=kind, page=page), prompts)
    model, _ = restarted(tmp_path, Model(to_tp, kind=kind, page=page))
    assert model.check(prompts) == [len(p) // page * page for p in prompts]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("page", "to_page"), [(16, 1), (64, 16), (1, 16), (16, 64), (1, 64), (16, 24)])
def test_any_page_size_restores_into_any_other(tmp_path, prompts, page, to_page, tp):
    """Up to the last whole page of both."""
    saved(tmp_path, Model(tp, page=page), prompts)
    model, _ = restarted(tmp_path, Model(1, page=to_page, size=64 * 24 * 4))
    expected = [len(p) // page * page // to_page * to_page for p in prompts]
    assert model.check(prompts) == expected


def test_latent_kv_is_stored_once(tmp_path, prompts):
    saved(tmp_path, Model(2, 1, kind="mla"), prompts)
    assert [p.name for p in names.shard_dirs(REAL, tmp_path)] == ["dp0-adp0-pp0-cp0-tp0"]
    model, _ = restarted(tmp_path, Model(2, 1, kind="mla"))
    assert model.check(prompts) == [len(p) for p in prompts]


@pytest.mark.parametrize("room", [4, 2])
def test_ranks_restore_the_same_states(tmp_path, prompts, room):
    """Each rank its own part of them; what one has no room for, none has."""
    before = Model(2, kind="linear")
    saved(tmp_path, before, prompts)
    model = Model(2, kind="linear").start(held=3)
    allocators = [e.requests.mamba_allocator for e in model.engines]
    for allocator in allocators:
        allocator.alloc(model.held)
    away = allocators[1].alloc(allocators[1].available_size() - room).clone()
    group = Group(tmp_path, model)
    group.load()
    group.close()
    allocators[1].free(away)
    assert model.check(prompts)[-room:] == [len(p) for p in prompts[-room:]]
    for old, new in zip(before.engines, model.engines, strict=True):
        assert new.states() == {path: state for path, state in old.states().items() if path in new.states()}
        assert len(new.states()) == room


@pytest.mark.parametrize("heads", [4, 1])
def test_a_new_replica_takes_of_each_rank_its_own_states(tmp_path, prompts, heads):
    """They are of one shape on all ranks, also where these hold the same KV heads."""
    before = Model(2, kind="linear", heads=heads)
    saved(tmp_path, before, prompts)
    model, _ = restarted(tmp_path, Model(2, kind="linear", heads=heads, dp=1), replicas=2)
    for old, new in zip(before.engines, model.engines, strict=True):
        assert new.states() == old.states()
        assert len(new.states()) == 4


def test_a_damaged_record_of_one_rank_costs_its_nodes_on_all(tmp_path, prompts):
    group = saved(tmp_path, Model(2), prompts)
    path = group.homes[1].path
    (segment,) = path.glob("*.kvs")
    data = bytearray(segment.read_bytes())
    index = next(iter(group.homes[1].segments.values()))
    data[int(index.offset[index.records - 1])] ^= 1
    segment.write_bytes(data)
    model, results = restarted(tmp_path, Model(2))
    lengths = model.check(prompts)
    assert sum(lengths) < sum(map(len, prompts))
    assert max(lengths) > 0
    assert len({r.tokens for r in results}) == 1


def test_a_lost_segment_of_one_rank_leaves_all_cold(tmp_path, prompts):
    group = saved(tmp_path, Model(2), prompts)
    for segment in group.homes[1].path.glob("*.kvs"):
        segment.unlink()
    model, _ = restarted(tmp_path, Model(2))
    assert model.check(prompts) == [0] * len(prompts)


def test_a_rank_that_fails_ends_it_for_all(tmp_path, prompts):
    saved(tmp_path, Model(2), prompts)
    group = Group(tmp_path, Model(2).start())
    group.homes[0].open_segments = lambda _errors: 1 / 0
    with pytest.raises((RanksDisagree, ZeroDivisionError)):
        group.load()
    assert [e.cache.total_size()[0] for e in group.model.engines] == [0, 0]
    group.close()


def test_a_leader_answers_for_all(tmp_path, prompts):
    model = Model(2, 2).start()
    for tokens in prompts:
        model.put(tokens)
    group = Group(tmp_path, model)
    first = group.save()
    files = [p for p in tmp_path.rglob("*") if p.is_file() and p.name != names.LOCK]
    assert first[0].new_bytes == sum(p.stat().st_size for p in files)
    assert first[0].tokens == first[1].tokens
    again = group.save()
    assert [r.new_bytes for r in again] == [0, 0, 0, 0]
    group.close()


def test_one_replica_more_finds_what_the_others_left(tmp_path, prompts):
    saved(tmp_path, Model(dp=0), prompts[:2])
    saved(tmp_path, Model(dp=1), prompts[2:])
    model, _ = restarted(tmp_path, Model(dp=2), replicas=3)
    assert model.check(prompts) == [len(p) for p in prompts]
    model, _ = restarted(tmp_path, Model(dp=0), replicas=2)
    assert model.check(prompts[:2]) == [len(p) for p in prompts[:2]]
    model, _ = restarted(tmp_path, Model(dp=0), replicas=1)
    assert model.check(prompts) == [len(p) for p in prompts]


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("tp", [1, 2])
def test_groups_of_attention_dp_are_replicas(tmp_path, prompts, kind, tp):
    """Each is warm for what it served; one tree takes over from two groups; two groups each take over one tree."""
    groups = [Model(tp, kind=kind, dp=i, adp=2) for i in range(2)]
    own = [prompts[:2], prompts[2:]]
    for group, served in zip(groups, own, strict=True):
        saved(tmp_path, group, served)
    assert len({names.cut_dir(g.identity) for g in groups}) == 1
    for group, served in zip(groups, own, strict=True):
        model, _ = restarted(tmp_path, group, replicas=2)
        assert model.check(served) == [len(p) for p in served]
    one = Model(2 * tp, kind=kind)
    model, _ = restarted(tmp_path, one)
    assert model.check(prompts) == [len(p) for p in prompts]
    saved(tmp_path, one, prompts)
    for group in groups:
        model, _ = restarted(tmp_path, group, replicas=2)
        assert model.check(prompts) == [len(p) for p in prompts]


def test_what_a_replica_left_is_taken_once(tmp_path, prompts):
    saved(tmp_path, Model(dp=0), prompts[:2])
    saved(tmp_path, Model(dp=1), prompts[2:3])
    group = Group(tmp_path, Model(dp=0).start())
    group.load()
    (home,) = group.homes
    assert [source.replica for source in home.sources] == [1]
    group.save()
    assert home.manifest.taken == {"dp1-adp0": 1}
    group.load()
    assert home.sources == []
    group.close()
    # It was there again in between, and has left more.
    saved(tmp_path, Model(dp=1), prompts[3:])
    model, _ = restarted(tmp_path, Model(dp=0))
    assert model.check(prompts) == [len(p) for p in prompts]


def test_that_a_replica_was_taken_is_remembered_though_it_brought_nothing(tmp_path, prompts):
    saved(tmp_path, Model(dp=0), prompts)
    saved(tmp_path, Model(dp=1), prompts[:1])
    group = Group(tmp_path, Model(dp=0).start())
    group.load()
    (result,) = group.save()
    assert (result.generation, result.new_tokens) == (2, 0)
    (result,) = group.save()
    assert result.generation == 2
    group.close()


def test_ranks_that_hold_different_generations_of_one_tree_come_together(tmp_path, prompts):
    group = saved(tmp_path, Model(2), prompts)
    for segment in group.homes[1].path.glob("*.kvs"):
        segment.unlink()
    for _ in range(3):
        group.save(leads=False)
    newest = {shard.newest(REAL, home.path)[0].generation for home in group.homes}
    assert len(newest) == 1
    generations = [home.generation for home in group.homes]
    group.save()
    assert [home.generation for home in group.homes] == generations
    group.close()
    model, _ = restarted(tmp_path, Model(2))
    assert model.check(prompts) == [len(p) for p in prompts]


def test_of_two_cuts_the_newest_counts(tmp_path, prompts):
    saved(tmp_path, Model(1), prompts[:2])
    saved(tmp_path, Model(2), prompts[2:])
    model, _ = restarted(tmp_path, Model(1))
    assert model.check(prompts[2:]) == [len(p) for p in prompts[2:]]


def test_a_cut_that_does_not_divide_is_refused(tmp_path, prompts):
    saved(tmp_path, Model(2, heads=6), prompts)
    group = Group(tmp_path, Model(4, heads=6).start())
    group.load()
    assert all(home.sources == [] for home in group.homes)
    wanted = group.model.identity
    assert identity.why_cold(wanted, [Model(2, heads=6).identity]) == "topology_changed"
    group.close()


@pytest.mark.parametrize(("pp", "to_pp"), [(4, 3), (3, 2), (2, 3)])
def test_ranks_that_need_different_numbers_of_shards(tmp_path, prompts, pp, to_pp):
    """Stages of unequal length: one rank has its layers from one stored shard, another from two or three."""
    saved(tmp_path, Model(2, pp, layers=4), prompts)
    model, results = restarted(tmp_path, Model(1, to_pp, layers=4))
    assert model.check(prompts) == [len(p) for p in prompts]
    assert all(dict(r.refused) == {} for r in results)


def test_windows_of_every_rank_are_there_or_of_none(tmp_path, prompts):
    group = saved(tmp_path, Model(2, kind="swa"), prompts)
    (segment,) = group.homes[1].path.glob("*.kvs")
    index = next(iter(group.homes[1].segments.values()))
    data = bytearray(segment.read_bytes())
    data[int(index.offset[int(np.flatnonzero(index.pool == 1)[0])])] ^= 1
    segment.write_bytes(data)
    model, _ = restarted(tmp_path, Model(2, kind="swa"))
    resident = [
        [window is not None for _, (_, window) in sorted(e.held().items(), key=lambda item: item[0][1])]
        for e in model.engines
    ]
    assert resident[0] == resident[1]
    assert not all(resident[0])


def test_pools_that_are_replicated_otherwise_change_their_topology_together():
    """Four ranks had a head of the full layers each and all the one of the windows; two ranks take what they need."""

    def pools(full, window):
        return tuple(
            Pool(name, "slot", (Buffer("k0", "bfloat16", (heads, 8), 16 * heads),))
            for name, heads in (("full", full), ("swa", window))
        )

    rank = Rank("dp0-adp0-pp0-cp0-tp1", {"topology": {"tp": 2}}, pools(2, 1), 1, (4, 1))
    shards = [f"dp0-adp0-pp0-cp0-tp{i}" for i in range(4)]
    chosen = needed(rank, [(name, fits(rank, {"topology": {"tp": 4}}, name, pools(1, 1))) for name in shards])
    taken = [(name[-3:], fit.pool) for name, of_shard in chosen.items() for fit in of_shard if fit is not None]
    assert sorted(taken) == [("tp1", 1), ("tp2", 0), ("tp3", 0)]
