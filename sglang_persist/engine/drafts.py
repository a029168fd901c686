"""Speculative decoding: the KV of draft models, which stands in the same slots as the target's.

Restored without it, a prefix gives the right tokens, but the draft model guesses from what it has not seen: of 0.98
accepted tokens a step 0.10 were left (sgl-project/sglang#31600). So it is saved with the target's, or nothing is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_persist.errors import Unsupported


class Draft(NamedTuple):
    """A draft model: its KV pool, and the configuration that says which checkpoint it is."""

    pool: Any
    config: Any


def drafts(scheduler) -> tuple[Draft, ...]:
    """The draft models whose KV belongs to each prefix. Raises Unsupported."""
    algorithm = scheduler.spec_algorithm
    if algorithm.is_none() or algorithm.is_ngram():
        return ()
    if algorithm.is_frozen_kv_mtp() or not (algorithm.is_eagle() or algorithm.is_standalone()):
        raise Unsupported("unsupported_speculation", f"speculative algorithm {algorithm}: its KV is not known")
    runners = getattr(scheduler.draft_worker, "_draft_model_runners", None)
    if runners is None:
        raise Unsupported("unsupported_speculation", "this release does not tell which pools its draft models use")
    target = scheduler.token_to_kv_pool_allocator.get_kvcache()
    found = tuple(Draft(runner.token_to_kv_pool, runner.model_config) for runner in runners())
    if not found or any(draft.pool is None or draft.pool is target for draft in found):
        raise Unsupported("unsupported_speculation", f"speculative algorithm {algorithm}: no KV pool of its own")
    return found
