"""Which prefixes are worth storing is decided by what was measured, within narrow limits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_persist.model import Rates
from sglang_persist.plan.breakeven import LIMIT, least_tokens, loads_slower

RATE = st.floats(1e-3, 1e12)


@pytest.mark.parametrize("rates", [Rates(), Rates(load=1e5), Rates(prefill=1e4), Rates(path_seconds=9)])
def test_nothing_is_left_out_as_long_as_a_rate_is_not_known(rates):
    assert least_tokens(rates) == 0 and not loads_slower(rates)


@given(RATE, st.floats(0, 1e3), RATE)
def test_the_shortest_path_kept_is_the_first_that_loads_faster(load, path, prefill):
    rates = Rates(load, path, prefill)
    n = least_tokens(rates)
    assert 0 <= n <= LIMIT
    if 0 < n < LIMIT:
        assert path + n / load <= n / prefill * (1 + 1e-9)
        assert path + (n - 1) / load > (n - 1) / prefill * (1 - 1e-9)


def test_a_store_that_loads_slower_than_the_engine_computes():
    rates = Rates(load=1000, path_seconds=1e-4, prefill=2000)
    assert loads_slower(rates)
    assert least_tokens(rates) == LIMIT, "what is longer is kept all the same"


def batch(tokens: int):
    mode = SimpleNamespace(is_extend=lambda: tokens > 0)
    return SimpleNamespace(forward_mode=mode, extend_num_tokens=tokens)


@pytest.mark.parametrize(("overlap", "seconds"), [(False, 3.0), (True, 4.0)])
def test_the_engines_rate_is_learned_from_runs_of_prefills(overlap, seconds):
    from sglang_persist.engine.prefill import PrefillRate

    found = PrefillRate(overlap)
    assert found.rate == 0
    for ran in [None, batch(0), batch(500), batch(400), batch(300), batch(0), batch(0), None]:
        found.seen(ran, 1.0)
    assert (found.tokens, found.seconds) == (1200, seconds)
    assert found.rate == 1200 / seconds
    for tokens in (0, 0, 20, 0, 0):  # decoding, idling and a prompt that is too short say nothing
        found.seen(batch(tokens), 1.0)
    assert found.tokens == 1200
