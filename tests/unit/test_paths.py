"""Which paths are chosen: the newest that fit, whatever the tree looks like; and what a restore waits for."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from sglang_persist.plan.loading import _use_order
from sglang_persist.plan.paths import choose_paths
from sglang_persist.store.shard import close_after


@st.composite
def trees(draw):
    """(parents, sizes, usable, where paths end)."""
    count = draw(st.integers(1, 14))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
    sizes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    usable = draw(st.lists(st.booleans(), min_size=count, max_size=count)) if draw(st.booleans()) else None
    inner = [i for i in range(count) if i in parents and draw(st.booleans())]
    ends = draw(st.permutations([*(i for i in range(count) if i not in parents), *inner]))
    return parents, sizes, usable, draw(st.sampled_from([None, ends]))


def path(parents, node: int) -> list[int]:
    return [*path(parents, parents[node]), node] if node >= 0 else []


@given(tree=trees(), budget=st.integers(0, 60), least=st.sampled_from([0, 0, 5, 12]))
def test_chosen_are_the_newest_paths_each_as_far_as_it_fits(tree, budget, least):
    parents, sizes, usable, ends = tree
    expected, short, left = [], set(), budget
    for end in reversed(ends or [i for i in range(len(parents)) if i not in parents]):
        if sum(sizes[i] for i in path(parents, end)) < least:
            short.update(path(parents, end))
            continue
        for node in path(parents, end):
            if node in expected:
                continue
            if (usable and not usable[node]) or sizes[node] > left:
                break
            expected.append(node)
            left -= sizes[node]
    assert choose_paths(parents, sizes, budget, least, usable, ends) == (expected, short - set(expected), {})


@given(tree=trees(), budget=st.integers(0, 60))
def test_of_the_node_in_which_the_budget_ends_a_share_is_chosen_that_uses_it_up(tree, budget):
    parents, sizes, usable, ends = tree
    choice = choose_paths(parents, sizes, budget, 0, usable, ends, partial=True)
    assert not set(choice.cut) & set(choice.nodes)
    assert all(parents[i] < 0 or parents[i] in choice.nodes for i in choice.cut)
    if choice.cut:
        used = sum(sizes[i] for i in choice.nodes) + sum(share * sizes[i] for i, share in choice.cut.items())
        assert abs(used - budget) < 1e-6


@given(tree=trees(), budget=st.integers(0, 60))
def test_order_of_use_has_every_chosen_node_after_its_parent_and_every_end_in_its_turn(tree, budget):
    parents, sizes, usable, ends = tree
    ends = ends or [i for i in range(len(parents)) if i not in parents]
    chosen = set(choose_paths(parents, sizes, budget, 0, usable, ends)[0])
    order = _use_order(parents, ends, chosen)
    assert set(order) == chosen
    for place, node in enumerate(order):
        assert parents[node] < 0 or parents[node] in order[:place]
    last = {node: place for place, node in enumerate(order)}
    turns = [last[end] for end in ends if end in chosen]
    assert turns == sorted(turns)


class Read(Future):
    looks = 0

    def done(self) -> bool:
        Read.looks += 1
        return super().done()


def test_segments_are_closed_once_after_the_last_read_and_no_read_is_looked_at_again_and_again():
    closed: list[int] = []
    segments = [SimpleNamespace(close=lambda i=i: closed.append(i)) for i in range(3)]
    reads = [Read() for _ in range(2000)]
    for read in reads[::2]:
        read.set_result(None)
    Read.looks = 0
    close_after(reads, segments)
    for read in reads[1:-1:2]:
        assert not closed
        read.cancel()
    assert not closed
    reads[-1].set_result(None)
    assert closed == [0, 1, 2]
    assert Read.looks <= len(reads)
    closed.clear()
    close_after([], segments)
    assert closed == [0, 1, 2]
