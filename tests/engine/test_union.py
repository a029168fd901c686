"""A restart restores the newest generation, and beside it what only a fuller older one holds."""

from __future__ import annotations

import flow
import numpy as np
import pytest
import real
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_persist.fs import REAL
from sglang_persist.store import verify

SPACES = [(None, None), ("lora", None), (None, "salt")]


def pages_of(paths: list[tuple], page: int, rows: int = 4) -> dict[tuple, bytes]:
    """Every page of these paths, as (space, tokens up to its end): its KV."""
    out = {}
    for space, tokens, ends, kv in paths:
        length = ends[-1]
        whole = np.frombuffer(kv, np.uint8).reshape(rows, length, -1)
        for end in range(page, length + 1, page):
            out[space, tokens[: end + space.extra_tokens]] = whole[:, end - page : end].tobytes()
    return out


def borders(paths: list[tuple]) -> set[tuple]:
    return {(space, tokens[: end + space.extra_tokens]) for space, tokens, ends, _ in paths for end in ends}


def branches(pages: dict[tuple, bytes], page: int) -> set[tuple]:
    """Where more than one path goes on."""
    seen, out = set(), set()
    for space, tokens in pages:
        above = (space, tokens[:-page])
        out |= {above} & seen
        seen.add(above)
    return out


chunks = st.lists(st.tuples(st.integers(0, 2), st.integers(2, 9)), min_size=1, max_size=5)


def prompts(least: int, most: int):
    return st.lists(st.tuples(st.integers(0, len(SPACES) - 1), chunks), min_size=least, max_size=most)


def tokens_of(path: list[tuple[int, int]]) -> list[int]:
    """Equal beginnings are likely: a chunk's tokens follow from which one it is and from what stands before it."""
    out: list[int] = []
    for which, length in path:
        start = 1000 * which + sum(out) % 7
        out += range(start + 1, start + 1 + length)
    return out


def fill(e: real.Engine, paths) -> None:
    for space, path in paths:
        if len(tokens := tokens_of(path)) > e.tree.page_tokens + 1:
            e.put(tokens, *SPACES[space])


@settings(max_examples=40, derandomize=True)
@given(
    first=prompts(3, 8),
    second=prompts(1, 4),
    evicted=st.sampled_from([1, 10, 30, 1 << 40]),
    core=st.sampled_from(["rust", "python"]),
    page=st.sampled_from([1, 1, 4]),
    bigram=st.booleans(),
)
def test_both_trees_are_restored_bit_by_bit_in_the_order_of_their_age(
    tmp_path_factory, first, second, evicted, core, page, bigram
):
    root = tmp_path_factory.mktemp("store")
    kind = {"core": core, "page": page, "bigram": bigram}
    e = real.engine(**kind)
    fill(e, first)
    at = flow.home(root)
    if not flow.snapshot(e, at).tokens:
        return
    old = e.paths()
    e.evict(evicted)
    fill(e, second)
    saved = flow.snapshot(e, at)
    at.close()
    new = e.paths()
    stored, newest = pages_of(old, page), pages_of(new, page)
    if len(newest) >= len(stored) or saved.generation == 1:
        return
    # What was stored counts, also where it was computed anew since.
    expected = {**newest, **stored}
    again, at, result = flow.restart(root, held=3 * page, **kind)
    found = again.paths()
    assert pages_of(found, page) == expected
    assert (result.tokens, dict(result.refused), result.errors) == (len(expected) * page, {}, [])
    assert borders(new) <= borders(found) <= borders(new) | borders(old) | branches(expected, page)
    again.check(held=3 * page)

    # All of it is known as stored, and makes one generation.
    saved = flow.snapshot(again, at)
    assert (saved.tokens, saved.new_tokens) == (result.tokens, 0)
    at.close()
    assert verify.verify(REAL, root, deep=True).findings == []
    assert flow.restart(root, **kind)[0].paths() == found

    # What only the older one held goes first, and leaves the newer one in its order.
    again.evict((len(expected) - len(newest)) * page)
    left = again.paths()
    assert pages_of(left, page) == {p: expected[p] for p in newest}
    assert [p[:2] for p in left] == [p[:2] for p in new]
    again.check_evictable(held=3 * page)


@settings(max_examples=30, derandomize=True)
@given(
    first=prompts(3, 8),
    second=prompts(1, 4),
    evicted=st.sampled_from([10, 30, 1 << 40]),
    more=st.integers(-30, 30),
)
def test_what_the_capacity_has_no_room_for_is_the_oldest(tmp_path_factory, first, second, evicted, more):
    root = tmp_path_factory.mktemp("store")
    e = real.engine()
    fill(e, first)
    at = flow.home(root)
    old = pages_of(e.paths(), 1) if flow.snapshot(e, at).tokens else {}
    e.evict(evicted)
    fill(e, second)
    flow.snapshot(e, at)
    at.close()
    newest = pages_of(e.paths(), 1)
    if not newest or len(newest) >= len(old):
        return
    size = max(1, len(newest) + more)
    again, _, result = flow.restart(root, size=size)
    found = pages_of(again.paths(), 1)
    assert len(found) == result.tokens <= size
    if more >= 0:
        assert newest.keys() <= found.keys()
    for space, tokens in borders(e.paths()):
        there = sum((space, tokens[:n]) in found for n in range(1, len(tokens) + 1))
        assert there == len(tokens) or len(tokens) - there > size - len(found), "it would have had room"
    last = e.paths()[-1]
    assert len(last[1]) > size or last[:2] in found
    again.check()
    again.check_evictable()


def stored_twice(root, core: str = "rust"):
    """An older, fuller generation: a conversation of two turns and another prompt. A newer one: of the conversation its
    first turn, used last, and a prompt of its own."""
    rng, e, at = np.random.default_rng(3), real.engine(core), flow.home(root)
    turn = real.random_tokens(rng, 60)
    keys = {"turns": e.put(turn + real.random_tokens(rng, 90)), "gone": e.put(real.random_tokens(rng, 50))}
    flow.snapshot(e, at)
    e.evict()
    at.forget_tree()
    keys |= {"own": e.put(real.random_tokens(rng, 70)), "turn": e.put(turn)}
    flow.snapshot(e, at)
    at.close()
    return e, keys


@pytest.mark.parametrize("core", ["rust", "python"])
def test_path_that_goes_on_in_the_older_tree_is_as_new_as_it_was(tmp_path, core):
    e, keys = stored_twice(tmp_path, core)
    for size, turn, turns, own in ((60, 60, 60, 0), (130, 60, 60, 70), (180, 60, 60, 70), (280, 60, 150, 70)):
        small, _, _ = flow.restart(tmp_path, size=size, core=core)
        assert [small.match(keys[k]) for k in ("turn", "turns", "own")] == [turn, turns, own]
        small.check()
    again, _, _ = flow.restart(tmp_path, core=core)
    again.evict(50 + 90)
    assert [p[:2] for p in again.paths()] == [p[:2] for p in e.paths()]
    again.evict(70)
    assert [again.match(keys[k]) for k in ("turn", "own")] == [60, 0]


def test_what_the_newer_tree_has_lost_by_damage_comes_from_the_older_one(tmp_path):
    _, keys = stored_twice(tmp_path)
    at = flow.home(tmp_path)
    at.find()
    own = {ref.id for ref in at.manifest.segments} - {ref.id for ref in at.fuller.segments}
    assert len(own) == 1
    (at.path / f"seg-{own.pop().hex()}.kvs").unlink()
    again, _, result = flow.restart(tmp_path)
    assert [again.match(keys[k]) for k in ("turn", "turns", "gone", "own")] == [60, 150, 50, 0]
    assert result.refused["damaged"] == 1
    again.check()


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "slru", "priority", "mru", "filo"])
@pytest.mark.parametrize("core", ["rust", "python"])
def test_under_every_policy_all_of_it_is_restored(tmp_path, core, policy):
    _, keys = stored_twice(tmp_path)
    again, at, result = flow.restart(tmp_path, core=core, policy=policy)
    assert result.tokens == 150 + 50 + 70
    assert [again.match(keys[k]) for k in ("turn", "turns", "gone", "own")] == [60, 150, 50, 70]
    assert flow.snapshot(again, at).new_tokens == 0
    at.close()
    again.check()
    again.check_evictable()
