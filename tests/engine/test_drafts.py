"""Which draft models there are, and what of them a store is for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import real
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_persist.engine.drafts import drafts
from sglang_persist.errors import Unsupported
from sglang_persist.plan.topology import unlike


def scheduler(algorithm: str, *pools, **worker):
    e = real.engine()
    runners = tuple(SimpleNamespace(token_to_kv_pool=pool or e.pool, model_config=f"config {i}")
                    for i, pool in enumerate(pools))  # fmt: skip
    worker = SimpleNamespace(_draft_model_runners=lambda: runners) if not worker else SimpleNamespace()
    return SimpleNamespace(
        spec_algorithm=SpeculativeAlgorithm[algorithm], draft_worker=worker, token_to_kv_pool_allocator=e.allocator
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
    for found in (scheduler("EAGLE", None), scheduler("EAGLE"), scheduler("EAGLE", of_another_release=True)):
        with pytest.raises(Unsupported):
            drafts(found)


def test_draft_models_and_their_ranks_are_not_mapped():
    def cut(tp, *found):
        return {"topology": {"tp": tp, "pp": 1}, **({"drafts": list(found)} if found else {})}

    one, other = {"weights": "a"}, {"weights": "b"}
    assert unlike(cut(2), cut(1)) is None
    assert unlike(cut(1, one), cut(1, one)) is None
    assert unlike(cut(2, one), cut(1, one)) == "tp"
    assert unlike(cut(1, one), cut(1, other)) == unlike(cut(1), cut(1, one)) == "drafts"
