"""Whatever instant the power is cut or the process is killed at: the new generation is there whole, or the last one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from store.little import Little, loads_whole
from store.simfs import AFTERMATHS, ALL_LOST, KILLED, Crash, SimFs

from sglang_persist.fs import REAL
from sglang_persist.store import shard, verify

#: Generations before the one that is cut short. With two, the cut also falls into the retirement of the first.
BEFORE = (0, 1, 2)


def prepared(root: Path, before: int) -> Little:
    """A store with so many generations, and nobody on it."""
    root.mkdir()
    little = Little(root, SimFs(root))
    for _ in range(before):
        snapshot(little)
        little.close()
    return little


def started(little: Little, root: Path) -> tuple[Little, SimFs]:
    """Another process on a copy of that store."""
    sim = little.fs.clone(root)
    return reopened(root, sim, little), sim


def snapshot(little: Little) -> int:
    little.open()
    return little.take()


def calls_of_a_snapshot(little: Little, root: Path) -> list[tuple[str, Path]]:
    again, sim = started(little, root)
    snapshot(again)
    again.close()
    return sim.calls


def crash(little: Little, sim: SimFs, at: int) -> None:
    sim.crash(at)
    with pytest.raises(Crash):
        snapshot(little)
    little.close()


def left(sim: SimFs, aftermath: str, target: Path) -> tuple[Path, SimFs]:
    return sim.leave(aftermath, target), SimFs(target)


def reopened(root: Path, fs, old: Little) -> Little:
    """Another process on the same directory, which remembers what every generation holds."""
    new = Little(root, fs)
    # The same numbers are drawn every time, so that the calls of every attempt are the same.
    new.manifests, new.records, new.rng = dict(old.manifests), dict(old.records), copy.deepcopy(old.rng)
    return new


def everything(root: Path) -> frozenset:
    return frozenset((p.relative_to(root), p.read_bytes() if p.is_file() else None) for p in root.rglob("*"))


def check_whole(little: Little, before: int, when: str) -> int:
    """The newest generation is the last or the new one, with every byte; nothing is wrong anywhere."""
    newest, passed = shard.newest(REAL, little.path)
    generation = newest.generation if newest else 0
    assert generation in (before, before + 1), when
    assert not passed, when
    if newest:
        assert newest == little.manifests[generation], when
        assert loads_whole(little.path, newest, little.records[generation]), when
    assert verify.verify(REAL, little.root, deep=True).findings == [], when
    return generation


@pytest.mark.parametrize("before", BEFORE)
def test_a_cut_at_any_call_leaves_the_last_or_the_new_generation_whole(tmp_path, before):
    origin = prepared(tmp_path / "origin", before)
    calls = calls_of_a_snapshot(origin, tmp_path / "count")
    assert [name for name, _ in calls].count("remove") == (2 if before == 2 else 0)
    seen: set[tuple[str, int]] = set()
    checked: dict[frozenset, int] = {}
    for n, call in enumerate(calls):
        little, sim = started(origin, tmp_path / f"{n}")
        crash(little, sim, n)
        for aftermath in AFTERMATHS:
            when = f"{aftermath} at call {n}: {call}"
            again = reopened(*left(sim, aftermath, tmp_path / f"{n}-{aftermath}"), little)
            if (content := everything(again.root)) in checked:  # nothing has changed since the call before
                seen.add((aftermath, checked[content]))
                continue
            found = checked[content] = check_whole(again, before, when)
            seen.add((aftermath, found))
            generation = snapshot(again)
            again.close()
            assert generation > found, when
            assert shard.newest(REAL, again.path)[0] == again.manifests[generation], when
            report = verify.verify(REAL, again.root, deep=True)
            assert (report.findings, report.leftovers) == ([], 0), f"{when}: the next writer sweeps"
    assert seen == {(aftermath, g) for aftermath in AFTERMATHS for g in (before, before + 1)}


@pytest.mark.parametrize("before", BEFORE)
def test_a_generation_that_follows_a_kill_survives_a_power_cut(tmp_path, before):
    """What the killed process did and did not sync is still only in memory when the next one commits."""
    origin = prepared(tmp_path / "origin", before)
    for n in range(len(calls_of_a_snapshot(origin, tmp_path / "count"))):
        little, sim = started(origin, tmp_path / f"{n}")
        crash(little, sim, n)
        sim.arm()
        sim.crashed = False
        again = reopened(little.root, sim, little)
        generation = snapshot(again)
        after = reopened(*left(sim, ALL_LOST, tmp_path / f"{n}-left"), again)
        assert check_whole(after, generation, f"call {n}") == generation
        again.close()


def test_a_completed_snapshot_survives_at_once(tmp_path):
    origin = prepared(tmp_path / "origin", 1)
    for aftermath in AFTERMATHS:
        little, sim = started(origin, tmp_path / aftermath)
        generation = snapshot(little)
        after = reopened(*left(sim, aftermath, tmp_path / f"{aftermath}-left"), little)
        assert check_whole(after, generation, aftermath) == generation
        little.close()


def test_the_model_loses_what_was_not_synced(tmp_path):
    """The simulation itself: a store that skips its syncs does not come back."""
    sim = SimFs(tmp_path / "store")
    sim.root.mkdir()
    file = sim.create(sim.root / "a")
    file.write(b"12345678")
    file.close()
    sim.sync_dir(sim.root)
    sim.rename(sim.root / "a", sim.root / "b")
    contents = {}
    for aftermath in AFTERMATHS:
        found = sim.leave(aftermath, tmp_path / aftermath)
        contents[aftermath] = {p.name: p.read_bytes() for p in found.iterdir()}
    assert contents == {
        ALL_LOST: {"a": b""},
        "names-survive": {"b": b""},
        "names-survive-torn": {"b": b"1234"},
        "last-name-survives": {"b": b""},
        KILLED: {"b": b"12345678"},
    }
