"""What a writer keeps after a commit: the two newest complete generations and the fullest one of the last day."""

from __future__ import annotations

import json
import time

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from store.little import OTHER, SHARD, Little, flip, loads_whole

from sglang_persist.cli import cli
from sglang_persist.fs import REAL
from sglang_persist.store import names, shard, verify
from sglang_persist.store.home import Home

HOUR = 3600.0


@pytest.fixture
def little(tmp_path):
    out = Little(tmp_path / "store").open()
    yield out
    out.close()


def generations(one: Little) -> list[int]:
    return shard.generations(REAL, one.path)


def chosen(one: Little) -> tuple[int, int]:
    """(the generation, the fuller one or 0) that a fresh process restores."""
    home = Home(REAL, one.root, one.identity, one.shard)
    home.find()
    return home.generation, home.fuller.generation if home.fuller else 0


def sound(one: Little) -> None:
    """Everything that is still there is whole, and nothing else is there."""
    for generation in generations(one):
        assert loads_whole(one.path, one.manifests[generation], one.records[generation])
    report = verify.verify(REAL, one.root, deep=True)
    assert (report.findings, report.leftovers) == ([], 1), "the lock"


@pytest.mark.parametrize(
    ("pages", "ages", "kept", "fuller"),
    [
        ([20, 20, 20, 20], [0, 0, 0, 0], [4, 3], 0),
        ([5, 9, 20, 30], [0, 0, 0, 0], [4, 3], 0),
        ([30, 5, 6, 7], [0, 0, 0, 0], [4, 3, 1], 1),
        ([5, 30, 6, 7], [0, 0, 0, 0], [4, 3, 2], 2),
        ([30, 30, 6, 7], [0, 0, 0, 0], [4, 3, 2], 2),  # of equal ones the newer
        ([30, 20, 6, 7], [0, 0, 0, 0], [4, 3, 1], 1),
        ([7, 20, 30, 6], [0, 0, 0, 0], [4, 3], 3),  # the fullest is one of the two newest
        ([30, 20, 6, 7], [25, 23, 1, 0], [4, 3, 2], 2),  # a day later the next is the fullest
        ([30, 20, 6, 7], [50, 25, 24.5, 0], [4, 3], 0),
        ([30], [50], [1], 0),
        ([30, 5], [50, 49], [2, 1], 1),  # age takes none of the two newest
    ],
)
def test_fullest_of_the_last_day_is_kept_beside_the_two_newest(little, pages, ages, kept, fuller):
    for count, age in zip(pages, ages, strict=True):
        little.take(pages=count, created=time.time() - age * HOUR)
    assert generations(little) == kept
    assert chosen(little) == (len(pages), fuller)
    sound(little)


@settings(max_examples=25, derandomize=True)
@given(commits=st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0, 1, 20])), min_size=1, max_size=8))
def test_what_is_kept_follows_from_tokens_and_age_alone(tmp_path_factory, commits):
    one = Little(tmp_path_factory.mktemp("retention") / "store").open()
    now, age, there = time.time(), sum(hours for _, hours in commits), {}
    for number, (pages, hours) in enumerate(commits, 1):
        age -= hours
        assert one.take(pages=pages, created=now - age * HOUR) == number
        there[number] = (one.manifests[number].tokens, age)
        newest = sorted(there)[-2:]
        recent = [g for g, (_, old) in there.items() if old < 24]
        fullest = max(recent, key=lambda g: (there[g][0], g), default=None)
        there = {g: v for g, v in there.items() if g in (*newest, fullest)}
        assert generations(one) == sorted(there, reverse=True)
    sound(one)
    one.close()


def test_fullest_outlives_any_number_of_snapshots_of_an_emptied_tree(little):
    little.take(pages=40)
    for _ in range(12):
        little.take(pages=1)
    assert generations(little) == [13, 12, 1]
    assert chosen(little) == (13, 1)
    sound(little)


def test_fuller_generation_must_be_readable_and_alive(little):
    little.take(pages=40)
    little.take(pages=30)
    little.take(pages=1)
    assert chosen(little) == (3, 1)
    for unique in (b"aaaa", b"bbbb"):  # two processes died of it
        (little.path / names.restoring(1, unique)).touch()
    assert chosen(little) == (3, 2)
    flip(little.manifest_file(2), 70)
    assert chosen(little) == (3, 0)


def test_ranks_choose_the_same_fuller_generation_though_a_deadline_cut_them_differently(tmp_path):
    a, b = (Little(tmp_path / "store", shard=s, shards=(SHARD, OTHER)).open() for s in (SHARD, OTHER))
    for of_a, of_b in ((20, 30), (26, 10), (1, 1), (1, 1), (1, 1)):
        a.take(pages=of_a)
        b.take(pages=of_b)
    assert chosen(a) == chosen(b) == (5, 1)
    assert shard.fullness(REAL, a.path, a.manifests[1]) == a.manifests[1].tokens + b.manifests[1].tokens
    a.take(pages=50)  # the other rank has not committed it
    a.take(pages=1)
    assert chosen(a) == chosen(b) == (5, 1)
    for one in (a, b):
        one.close()


def test_rank_without_its_peers_part_counts_as_nothing(tmp_path):
    a, b = (Little(tmp_path / "store", shard=s, shards=(SHARD, OTHER)).open() for s in (SHARD, OTHER))
    for pages in (40, 1, 1):
        a.take(pages=pages, retire=False)
        b.take(pages=pages, retire=False)
    b.manifest_file(1).unlink()
    assert chosen(a) == chosen(b) == (3, 0)
    assert shard.fullness(REAL, a.path, a.manifests[1]) is None
    for one in (a, b):
        one.close()


def test_prune_keeps_the_newest_complete_ones_and_no_fuller_one(little):
    """As documented: `--keep N` keeps N. Whoever runs it decides that the fuller one may go."""
    little.take(pages=40)
    for _ in range(3):
        little.take(pages=1)
    assert generations(little) == [4, 3, 1]
    little.close()
    out = CliRunner().invoke(cli, ["prune", str(little.root), "--json"])
    assert out.exit_code == 0
    assert any(d.endswith("gen-0000000001.kvm") for d in json.loads(out.output)["deleted"])
    assert generations(little) == [4, 3]
    assert CliRunner().invoke(cli, ["prune", str(little.root), "--keep", "1"]).exit_code == 0
    assert generations(little) == [4]
    assert verify.verify(REAL, little.root, deep=True).findings == []


def test_segment_that_a_replaced_manifest_named_goes_unless_another_names_it(little):
    little.take()
    little.take()
    both = {ref.id for ref in little.manifests[2].segments}
    own = both - {ref.id for ref in little.manifests[1].segments}
    little.home.retire(2, both)
    sound(little)
    assert {names.segment_of(p.name) for p in little.segment_files()} >= both
    little.manifest_file(2).unlink()
    little.home.retire(1, both)
    assert not own & {names.segment_of(p.name) for p in little.segment_files()}
    assert loads_whole(little.path, little.manifests[1], little.records[1])


def test_nothing_is_kept_for_being_full_where_room_is_made(little):
    little.take(pages=40)
    for _ in range(3):
        little.take(pages=1)
    little.home.retire(1)
    assert generations(little) == [4]
    assert chosen(little) == (4, 0)
    sound(little)
