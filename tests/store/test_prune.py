"""Pruning takes what is old and nobody names, keeps what it cannot judge or delete, and is held up by neither."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from pathlib import Path

import pytest
from store.little import IDENTITY, OTHER, SHARD, Little, flip, loads_whole, snapshot_of
from store.simfs import SimFs

from sglang_persist.format import envelope, manifest
from sglang_persist.fs import REAL
from sglang_persist.model import Identity
from sglang_persist.store import names, prune, shard, verify


def run(root: Path, keep: int = 2, max_bytes: int | None = None, fs=REAL):
    """(names deleted, the plan, why others were not)."""
    plan, locks = prune.plan_store(fs, root, keep, max_bytes)
    try:
        deleted, errors = prune.execute(fs, plan)
    finally:
        for lock in locks:
            lock.release()
    return {str(p.relative_to(root)) for p in deleted}, plan, errors


def generations(little: Little) -> list[int]:
    return shard.generations(REAL, little.path)


def sound(little: Little) -> None:
    """Everything that is still there is whole."""
    for generation in generations(little):
        assert loads_whole(little.path, little.manifests[generation], little.records[generation])
    assert verify.verify(REAL, little.root, deep=True).findings == []


def filled(tmp_path: Path, count: int = 4, **kind) -> Little:
    little = Little(tmp_path / "store", **kind).open()
    for i in range(count):
        little.take(retire=False, created=1000.0 + i)
    return little


@pytest.fixture
def little(tmp_path):
    out = filled(tmp_path)
    out.close()
    yield out
    out.close()


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 9])
def test_the_newest_generations_stay_with_all_that_they_name(little, keep):
    before = snapshot_of(little.path)
    deleted, plan, errors = run(little.root, keep)
    after = snapshot_of(little.path)
    assert (errors, plan.kept) == ([], [])
    assert generations(little) == [4, 3, 2, 1][:keep]
    assert deleted == {str((little.path / n).relative_to(little.root)) for n in before.keys() - after.keys()}
    assert plan.freed_bytes == sum(len(before[n]) for n in before.keys() - after.keys())
    named = {names.segment(ref.id) for g in generations(little) for ref in little.manifests[g].segments}
    assert {n for n in after if n.startswith("seg-")} == named
    sound(little)


def test_planning_deletes_nothing(little):
    before = snapshot_of(little.path)
    plan, locks = prune.plan_store(REAL, little.root, 1)
    for lock in locks:
        lock.release()
    assert plan.manifests
    assert plan.files
    assert snapshot_of(little.path) == before


def test_oldest_generations_go_until_the_store_is_small_enough(little):
    total = sum(map(len, snapshot_of(little.path).values()))
    sizes = []
    for limit in (total, total - 1, total // 2, 0):
        run(little.root, 9, limit)
        sizes.append(len(generations(little)))
        assert sum(map(len, snapshot_of(little.path).values())) <= limit
        sound(little)
    assert sizes[:2] == [4, 3]
    assert sizes[2] in (1, 2)
    assert snapshot_of(little.path) == {}


def test_the_oldest_of_all_models_goes_first(tmp_path):
    old = filled(tmp_path, 1)
    new = Little(tmp_path / "store", identity=Identity({"architecture": "Other"}, IDENTITY.cut)).open()
    new.take(retire=False, created=2000.0)
    for one in (old, new):
        one.close()
    run(old.root, 9, sum(map(len, snapshot_of(new.path).values())))
    assert (generations(old), generations(new)) == ([], [1])


def test_leftovers_go_and_foreign_files_stay(little):
    (little.path / "tmp-7-seg").write_bytes(b"half")
    unnamed = little.path / ("seg-" + "ab" * 16 + ".kvs")
    shutil.copy(little.segment_files()[0], unnamed)
    (little.path / "notes.txt").write_text("mine")
    (little.root / "README").write_text("mine")
    (little.path / "LOCK").touch()
    deleted, _, _ = run(little.root, 9)
    assert deleted == {str(p.relative_to(little.root)) for p in (little.path / "tmp-7-seg", unnamed)}
    assert (little.path / "notes.txt").exists()
    assert (little.root / "README").exists()
    assert not (little.path / "LOCK").exists(), "a lock that nobody holds is a leftover, too"
    assert generations(little) == [4, 3, 2, 1]


def test_where_a_server_writes_its_newest_generation_and_unnamed_segments_stay(tmp_path):
    little = filled(tmp_path)
    (little.path / "tmp-7-seg").write_bytes(b"half")
    about_to_be_named = little.path / ("seg-" + "ab" * 16 + ".kvs")
    shutil.copy(little.segment_files()[0], about_to_be_named)
    run(little.root, 1, 0)
    assert generations(little) == [4]
    assert (little.path / "tmp-7-seg").exists()
    assert about_to_be_named.exists()
    assert (little.path / "LOCK").exists(), "its lock is not ours to remove"
    little.take()
    assert generations(little) == [5, 4]
    assert loads_whole(little.path, little.manifests[4], little.records[4])
    little.close()
    run(little.root, 9)
    sound(little)
    assert not about_to_be_named.exists()


def test_a_generation_that_another_rank_has_not_committed_yet_does_not_make_the_last_one_old(tmp_path):
    a, b = (Little(tmp_path / "store", shard=s, shards=(SHARD, OTHER)).open() for s in (SHARD, OTHER))
    for one in (a, b):
        one.take(retire=False)
    a.take(retire=False)
    run(a.root, 1, 0)
    assert (generations(a), generations(b)) == ([2, 1], [1])
    a.close()
    b.close()


def test_a_generation_goes_as_a_whole_on_all_its_ranks(tmp_path):
    a, b = (Little(tmp_path / "store", shard=s, shards=(SHARD, OTHER)).open() for s in (SHARD, OTHER))
    for i in range(3):
        for one in (a, b):
            one.take(retire=False, created=1000.0 + i)
    for one in (a, b):
        one.close()
    run(a.root, 9, sum(len(f) for one in (a, b) for f in snapshot_of(one.path).values()) - 1)
    assert generations(a) == generations(b) == [3, 2]
    run(a.root, 1)
    assert generations(a) == generations(b) == [3]


# --------------------------------------------------------------------------------- what cannot be read or deleted


def test_what_cannot_be_deleted_is_reported_and_its_segments_stay(tmp_path):
    sim = SimFs(tmp_path / "store")
    little = filled(tmp_path, fs=sim)
    little.close()
    sim.fail_on(("remove",), "gen-0000000001", errno.EPERM)
    deleted, _, errors = run(little.root, 1, fs=sim)
    assert len(errors) == 1
    assert "gen-0000000001.kvm: Operation not permitted" in errors[0]
    assert generations(little) == [4, 1]
    assert any("gen-0000000002" in d for d in deleted), "and nothing else is held up"
    sound(little)
    sim.arm()
    run(little.root, 1, fs=sim)
    assert generations(little) == [4]
    sound(little)


def test_a_segment_that_cannot_be_deleted_is_reported_and_goes_next_time(tmp_path):
    sim = SimFs(tmp_path / "store")
    little = filled(tmp_path, fs=sim)
    stuck = names.segment(little.manifests[1].segments[0].id)
    sim.fail_on(("remove",), stuck)
    little.home.retire()
    assert generations(little) == [4, 3]
    assert (little.path / stuck).exists()
    sim.arm()
    little.home.retire()
    assert not (little.path / stuck).exists()
    sound(little)
    little.close()


def test_segments_outlive_manifests_whose_removal_is_not_durable(tmp_path):
    sim = SimFs(tmp_path / "store")
    little = filled(tmp_path, fs=sim)
    sim.fail_on(("sync_dir",), "store")
    segments = little.segment_files()
    little.home.retire()
    assert generations(little) == [4, 3]
    assert little.segment_files() == segments
    sim.arm()
    little.close()
    left = Little(sim.leave("all-lost", tmp_path / "left"))
    left.manifests, left.records = little.manifests, little.records
    assert generations(left) == [4, 3, 2, 1]
    sound(left)


def test_a_damaged_manifest_is_kept_and_reported_and_holds_up_nothing(little):
    flip(little.manifest_file(3), 80)
    deleted, plan, errors = run(little.root, 1)
    assert errors == []
    assert [str(little.manifest_file(3)) in k for k in plan.kept] == [True]
    assert generations(little) == [4, 3]
    assert len(deleted) > 2
    assert loads_whole(little.path, little.manifests[4], little.records[4])


def test_a_manifest_that_cannot_be_read_just_now_keeps_its_segments(tmp_path):
    sim = SimFs(tmp_path / "store")
    little = filled(tmp_path, 2, fs=sim)
    little.close()
    sim.fail_on(("open",), "gen-0000000002")
    (little.path / "tmp-7-x").write_bytes(b"x")
    again = Little(little.root, sim)
    again.open()
    assert again.home.generation == 1
    assert not (little.path / "tmp-7-x").exists()
    again.close()
    _, plan, _ = run(little.root, 1, fs=sim)
    assert "gen-0000000002.kvm: Input/output error" in plan.kept[0]
    sim.arm()
    assert generations(little) == [2, 1]
    sound(little)


def test_the_manifest_of_a_newer_version_keeps_its_segments(little):
    """An older version that is started on the store for an hour must not cost what the newer one wrote."""
    place = little.manifest_file(4)
    data = bytearray(place.read_bytes())
    struct.pack_into("<H", data, 8, 2)
    size = manifest.HEADER.size
    data[size : size + 8] = manifest.CHECKSUM.pack(envelope.digest64(bytes(data[:size])))
    place.write_bytes(data)
    again = Little(little.root).open()
    assert again.home.generation == 3
    again.take()
    again.close()
    _, plan, _ = run(little.root)
    assert "manifest format 2" in plan.kept[0]
    assert loads_whole(little.path, little.manifests[4], little.records[4])


def test_a_shard_that_cannot_be_locked_or_listed_holds_up_no_other(tmp_path):
    sim = SimFs(tmp_path / "store")
    little = filled(tmp_path, fs=sim)
    other = Little(tmp_path / "store", sim, identity=Identity({"architecture": "Another"}, IDENTITY.cut)).open()
    other.take(retire=False)
    other.take(retire=False)
    for one in (little, other):
        one.close()
    for call in ("lock", "list"):
        sim.fail_on((call,), str(other.path), errno.EROFS)
        _, plan, _ = run(little.root, {"lock": 3, "list": 1}[call], fs=sim)
        assert any(str(other.path) in k for k in plan.kept)
    sim.arm()
    assert (generations(little), generations(other)) == ([4], [2, 1])
    assert not list(tmp_path.rglob("LOCK"))


def test_links_are_never_followed(little, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "gen-0000000001.kvm").write_text("mine")
    (little.root / "Linked-0123456789abcdef").symlink_to(outside)
    os.symlink(outside / "gen-0000000001.kvm", little.path / "tmp-link")
    run(little.root, 1, 0)
    assert (outside / "gen-0000000001.kvm").read_text() == "mine"
    assert not (little.path / "tmp-link").is_symlink()
