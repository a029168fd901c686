"""Ranks in processes of their own, as SGLang starts them, and who of them speaks with whom."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed

from sglang_persist.engine.ranks import Group

TIMEOUT = 120


def rank(number: int, shards: list, store: str, answers) -> None:
    limit = timedelta(seconds=TIMEOUT)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=number, world_size=len(shards), timeout=limit
    )
    world = SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
    group = Group(SimpleNamespace(tp_size=len(shards), pp_size=1, world_group=world), shards[number])
    # Groups go their own ways: one speaks more often than another.
    told = [group.gather((number, turn)) for turn in range(1 + number // 2)]
    answers.put((number, group.alone, told))
    torch.distributed.destroy_process_group()


def ranks(shards: list, store) -> list[tuple]:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.SimpleQueue()
    processes = [spawn.Process(target=rank, args=(i, shards, str(store), answers)) for i in range(len(shards))]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
    assert [process.exitcode for process in processes] == [0] * len(shards)
    return [found[1:] for found in sorted(answers.get() for _ in shards)]


def test_groups_of_attention_dp_speak_among_themselves(tmp_path):
    a, b = ("dp0-tp0", "dp0-tp1"), ("dp1-tp0", "dp1-tp1")
    found = ranks([a, a, b, b], tmp_path / "store")
    first, second = [[(0, 0), (1, 0)]], [[(2, 0), (3, 0)], [(2, 1), (3, 1)]]
    assert found == [(False, first), (False, first), (False, second), (False, second)]


@pytest.mark.parametrize("shards", [[("dp0",), ("dp1",)], [("dp0",), None]], ids=["each its own", "one unknown"])
def test_a_rank_speaks_with_all_where_one_is_unknown_and_with_none_where_it_has_a_tree_alone(tmp_path, shards):
    told = [[(0, 0), (1, 0)]] if None in shards else None
    assert ranks(shards, tmp_path / "store") == [
        (told is None, told or [[(number, 0)]]) for number in range(2)
    ]
