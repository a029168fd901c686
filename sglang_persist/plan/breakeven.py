"""Which prefixes are worth storing: those that load faster than they are computed again.

A path of n tokens loads in `path_seconds + n / load` and is computed in `n / prefill`. Both rates are measured on this
store and this model and stand in its manifests; as long as one is missing, everything is worth it. Paths of LIMIT
tokens and more always are: what a wrong measurement could cost stays small.
"""

from __future__ import annotations

import math

from sglang_persist.model import Rates

LIMIT = 256
#: Tokens below which a measurement says nothing.
LEAST_LOADED, LEAST_PREFILLED = 8192, 2048


def least_tokens(rates: Rates) -> int:
    """The length of the shortest path that is worth storing."""
    if not rates.load or not rates.prefill:
        return 0
    gained = 1 / rates.prefill - 1 / rates.load
    if gained <= 0:
        return LIMIT
    return min(LIMIT, math.ceil(rates.path_seconds / gained))


def loads_slower(rates: Rates) -> bool:
    """Whether the store is so slow that computing is faster, however long a path is."""
    return bool(rates.load and rates.prefill and rates.load <= rates.prefill)
