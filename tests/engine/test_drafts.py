"""Which draft models there are, and what of them a store is for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import real
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_persist.engine import identity
from sglang_persist.engine.drafts import drafts
from sglang_persist.errors import Unsupported
from sglang_persist.plan.topology import Rank, fits, needed, unlike


def scheduler(algorithm: str, *pools):
    """SGLang's own choice of runners, over runners without a model: speculation does not run without a GPU."""
    e, algorithm = real.engine(), SpeculativeAlgorithm[algorithm]
    runners = [SimpleNamespace(token_to_kv_pool=pool or e.pool, model_config=f"config {i}")
               for i, pool in enumerate(pools)]  # fmt: skip
    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(spec_algorithm=algorithm)),
        draft_worker=SimpleNamespace(draft_runners=runners, model_runner=runners[0] if runners else None),
    )
    worker._draft_model_runners = lambda: BaseSpecWorker._draft_model_runners(worker)
    return SimpleNamespace(
        spec_algorithm=algorithm, draft_worker=worker, token_to_kv_pool_allocator=e.allocator
    )


@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_where_no_model_drafts_there_is_no_kv_of_one(algorithm):
    assert drafts(scheduler(algorithm)) == ()


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_every_draft_model_counts(algorithm):
    pools = [real.engine(layers=1).pool, real.engine(layers=1).pool]
    assert [tuple(d) for d in drafts(scheduler(algorithm, *pools))] == [(pools[0], "config 0"), (pools[1], "config 1")]


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP"])
def test_algorithms_that_are_not_known_are_refused(algorithm):
    with pytest.raises(Unsupported, match=algorithm):
        drafts(scheduler(algorithm, real.engine().pool))


def test_a_draft_whose_pool_is_not_its_own_is_refused():
    other = scheduler("EAGLE", real.engine().pool)
    del other.draft_worker._draft_model_runners  # a release that names it otherwise
    for found in (scheduler("EAGLE", None), scheduler("EAGLE"), other):
        with pytest.raises(Unsupported):
            drafts(found)


def test_another_draft_model_is_another_cut():
    def cut(*found):
        return {"topology": {"tp": 1, "pp": 1}, **({"drafts": list(found)} if found else {})}

    one, other = {"weights": "a"}, {"weights": "b"}
    assert unlike(cut(one), cut(one)) is None
    assert unlike(cut(one), cut(other)) == unlike(cut(), cut(one)) == "drafts"


@pytest.mark.parametrize(("tp", "shard", "taken"), [(2, "tp1", True), (2, "tp0", False), (1, "tp0", False)])
def test_a_rank_takes_draft_kv_of_its_own_number_alone(tp, shard, taken):
    """Draft models are dealt out in ways of their own, and two ranks may hold the same heads of the target."""
    e = real.engine(drafts=("mha",))
    config = SimpleNamespace(get_num_kv_heads=lambda _tp: 1, get_swa_num_kv_heads=lambda _tp: 1)
    heads, pools = identity.heads(config, e.pages), e.pages.pools
    rank = Rank("dp0-adp0-pp0-cp0-tp1", {"topology": {"tp": 2}}, pools, 1, heads)
    parts = [(shard, fits(rank, {"topology": {"tp": tp}}, f"dp1-adp0-pp0-cp0-{shard}", pools))]
    assert (needed(rank, parts) is not None) == taken
