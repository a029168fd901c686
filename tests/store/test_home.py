"""Which generation a start chooses, who may write, and what lies where with which rights."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from store.little import IDENTITY, OTHER, SHARD, Little, flip, loads_whole
from store.simfs import SimFs

from sglang_persist.errors import ChecksumMismatch, Malformed, StoreBusy, StoreUnavailable, Truncated
from sglang_persist.format import manifest, segment
from sglang_persist.fs import REAL
from sglang_persist.model import Identity
from sglang_persist.store import names, shard
from sglang_persist.store.home import Home


@pytest.fixture
def little(tmp_path):
    out = Little(tmp_path / "store").open()
    yield out
    out.close()


def found(little: Little) -> tuple[int, list[Exception]]:
    """What a fresh process chooses."""
    home = Home(REAL, little.root, little.identity, little.shard)
    passed = home.find()
    return home.generation, passed


# ------------------------------------------------------------------------------------------------------- choice


def test_an_empty_or_missing_store_is_no_generation(tmp_path):
    assert found(Little(tmp_path / "nowhere")) == (0, [])
    assert not (tmp_path / "nowhere").exists(), "looking makes nothing"


def test_the_newest_generation_is_chosen(little):
    for expected in (1, 2, 3):
        assert little.take() == expected
        assert found(little) == (expected, [])


@pytest.mark.parametrize("damage", ["flipped", "cut", "emptied", "removed"])
def test_a_damaged_newest_manifest_falls_back_to_the_one_before(little, damage):
    little.take()
    little.take()
    newest = little.manifest_file(2)
    if damage == "flipped":
        flip(newest, newest.stat().st_size - 5)
    elif damage == "removed":
        newest.unlink()
    else:
        newest.write_bytes(newest.read_bytes()[: 0 if damage == "emptied" else 100])
    generation, passed = found(little)
    assert generation == 1
    assert [type(e) for e in passed] == {"flipped": [ChecksumMismatch], "removed": []}.get(damage, [Truncated])
    assert all(str(newest) in str(e) for e in passed)
    assert loads_whole(little.path, little.manifests[1], little.records[1])


def test_all_manifests_damaged_is_a_cold_start_that_says_why(little):
    for generation in (1, 2):
        little.take()
        flip(little.manifest_file(generation), 60)
    generation, passed = found(little)
    assert (generation, len(passed)) == (0, 2)


def test_a_missing_segment_costs_its_records_only(little):
    little.take()
    little.take()
    gone = little.manifests[2].segments[-1]
    (little.path / names.segment(gone.id)).unlink()
    home = Home(REAL, little.root, little.identity, little.shard)
    assert home.find() == []
    errors: list[str] = []
    opened = home.open_segments(errors)
    try:
        assert set(opened) == {ref.id for ref in little.manifests[2].segments} - {gone.id}
        assert len(errors) == 1
        assert names.segment(gone.id) in errors[0]
        for stored in little.records[2]:
            if stored.place[0] != gone.id:
                assert opened[stored.place[0]].load(stored.place[1]).tobytes() == stored.raw
    finally:
        for segment in opened.values():
            segment.close()


def two_ranks(tmp_path) -> tuple[Little, Little]:
    group = (SHARD, OTHER)
    return tuple(Little(tmp_path / "store", shard=s, shards=group).open() for s in group)


def test_a_generation_counts_only_when_all_ranks_have_it(tmp_path):
    a, b = two_ranks(tmp_path)
    a.take()
    generation, passed = found(a)
    assert (generation, [type(e) for e in passed]) == (0, [Malformed])
    assert "not every rank" in str(passed[0])
    b.take()
    assert (found(a), found(b)) == ((1, []), (1, []))
    a.take()
    assert (found(a)[0], found(b)[0]) == (1, 1)
    b.take()
    assert (found(a)[0], found(b)[0]) == (2, 2)
    a.close()
    b.close()


@pytest.mark.parametrize("damage", ["missing", "flipped", "of another group"])
def test_another_ranks_broken_manifest_takes_the_generation_from_all(tmp_path, damage):
    a, b = two_ranks(tmp_path)
    for _ in range(2):
        a.take()
        b.take()
    if damage == "missing":
        b.manifest_file(2).unlink()
    elif damage == "flipped":
        flip(b.manifest_file(2), 70)
    else:
        other = replace(b.manifests[2], shards=(OTHER, SHARD))
        b.manifest_file(2).write_bytes(manifest.encode(other))
    assert found(a)[0] == 1
    assert found(b)[0] == 1
    a.close()
    b.close()


def test_retirement_waits_for_the_other_ranks(tmp_path):
    a, b = two_ranks(tmp_path)
    a.take()
    b.take()
    for _ in range(3):
        a.take()
    assert shard.generations(REAL, a.path) == [4, 3, 2, 1], "only generation 1 is complete"
    assert found(b)[0] == 1
    for _ in range(3):
        b.take()
    a.take()
    assert shard.generations(REAL, a.path) == [5, 4, 3]
    a.close()
    b.close()


def test_a_name_is_never_used_twice(tmp_path):
    a, b = two_ranks(tmp_path)
    a.take()
    a.take()
    flip(a.manifest_file(2), 9)
    home = Home(REAL, a.root, a.identity, a.shard)
    home.find()
    assert home.generation == 0, "1 is not complete, 2 is damaged"
    assert home.next_generation() == 3
    a.close()
    b.close()


def test_what_belongs_to_another_model_is_not_taken_whatever_it_is_called(little):
    """A directory that was moved to another model's place would restore KV that is wrong, bit for bit."""
    little.take()
    little.close()
    other = Little(little.root, identity=Identity({"architecture": "LittleModel", "weights": "v"}, IDENTITY.cut))
    other.path.parent.mkdir(parents=True)
    shutil.copytree(little.path, other.path)
    generation, passed = found(other)
    assert generation == 0
    assert "belongs to namespace" in str(passed[0])
    other.home.become_writer()
    assert {p.name for p in other.path.glob("*.kv?")} == {p.name for p in little.path.glob("*.kv?")}, "and all is kept"
    other.close()


def test_a_segment_of_another_namespace_is_not_opened(little):
    little.take()
    ref = little.manifests[1].segments[0]
    place = little.path / names.segment(ref.id)
    data = place.read_bytes()
    header = segment.encode_header(ref.id, bytes(16))
    tail = data[-segment.TRAILER_BYTES :]
    trailer = segment.decode_trailer(data[: segment.HEADER_BYTES], tail, len(data))
    place.write_bytes(header + data[len(header) : -len(tail)] + segment.encode_trailer(header, trailer))
    home = Home(REAL, little.root, little.identity, little.shard)
    home.find()
    errors: list[str] = []
    opened = home.open_segments(errors)
    for one in opened.values():
        one.close()
    assert ref.id not in opened
    assert "belongs to namespace" in errors[0]


@pytest.mark.parametrize("name", ["gen-0000000009.kvm", "seg-" + "00" * 16 + ".kvs", "tmp-1-x"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "link", "dangling link"])
def test_what_is_not_a_file_holds_up_nothing(little, name, kind):
    little.take()
    place = little.path / name
    {
        "pipe": lambda: os.mkfifo(place),
        "directory": lambda: place.mkdir(),
        "link": lambda: place.symlink_to(little.manifest_file(1)),
        "dangling link": lambda: place.symlink_to("nowhere"),
    }[kind]()
    assert found(little)[0] == 1
    little.close()
    little.open()
    generation = little.take()
    assert found(little)[0] == generation


# ------------------------------------------------------------------------------------------------------ writing


def test_a_writer_builds_on_what_another_wrote_meanwhile(tmp_path):
    first = Little(tmp_path / "store").open()
    first.take()
    second = Home(REAL, first.root, first.identity, first.shard)
    second.find()
    first.take()
    first.close()
    assert second.generation == 1
    second.become_writer()
    assert second.generation == 2
    assert set(second.segments) == {ref.id for ref in first.manifests[2].segments}
    second.close()


def test_a_writer_names_nothing_that_the_one_before_it_has_deleted_from_the_same_generation(tmp_path):
    first = Little(tmp_path / "store").open()
    first.take()
    second = Home(REAL, first.root, first.identity, first.shard)
    second.find()
    for opened in second.open_segments([]).values():
        opened.close()
    gone = first.manifests[1].segments[0].id
    (first.path / names.segment(gone)).unlink()  # as after a cut in place: the generation keeps its number
    first.close()
    second.become_writer()
    assert second.generation == 1
    assert set(second.segments) == {ref.id for ref in first.manifests[1].segments} - {gone}
    second.close()


def test_two_writers_exclude_each_other(little):
    other = Home(REAL, little.root, little.identity, little.shard)
    with pytest.raises(StoreBusy) as caught:
        other.become_writer()
    assert str(little.path / "LOCK") in str(caught.value)
    little.close()
    other.become_writer()
    other.become_writer()
    with pytest.raises(StoreBusy):
        little.home.become_writer()
    other.close()
    other.close()


def test_reading_needs_no_lock(little):
    little.take()
    assert found(little)[0] == 1


def test_the_lock_is_removed_when_it_is_released(little):
    assert (little.path / "LOCK").stat().st_size == 0
    little.close()
    assert not (little.path / "LOCK").exists()


HOLD = """
import json, sys
from pathlib import Path
from sglang_persist.fs import REAL
from sglang_persist.model import Identity
from sglang_persist.store.home import Home
home = Home(REAL, Path(sys.argv[1]), Identity(*json.loads(sys.argv[2])), sys.argv[3])
home.become_writer()
(home.path / "tmp-1-left").write_bytes(b"x")
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_killed_process_does_not_block(tmp_path):
    little = Little(tmp_path / "store")
    identity = json.dumps([IDENTITY.model, IDENTITY.cut, IDENTITY.soft])
    command = [sys.executable, "-c", HOLD, str(little.root), identity, SHARD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(StoreBusy):
                little.open()
        finally:
            holder.send_signal(signal.SIGKILL)
    assert holder.returncode == -signal.SIGKILL
    assert (little.path / "LOCK").exists()
    little.open()
    assert not (little.path / "tmp-1-left").exists()
    assert little.take() == 1
    little.close()
    assert not (little.path / "LOCK").exists()


def test_who_cannot_become_a_writer_holds_no_lock_and_may_try_again(tmp_path):
    sim = SimFs(tmp_path / "store")
    little = Little(tmp_path / "store", sim).open()
    little.take()
    little.close()
    sim.arm()
    recorded = Little(tmp_path / "store", sim).open()
    calls = [name for name, _ in sim.calls]
    recorded.close()
    for n in range(calls.index("lock"), len(calls)):
        sim.fail(n, errno.EIO)
        again = Little(tmp_path / "store", sim)
        try:
            again.open()
        except StoreUnavailable:
            other = Home(REAL, again.root, again.identity, again.shard)
            other.become_writer()
            other.close()
            again.home.become_writer()
        else:
            assert calls[n] == "open", "a file that cannot be read is passed over; nothing else is"
        sim.arm()
        again.close()


# ------------------------------------------------------------------------------------------------------- rights


@pytest.fixture(params=[0o000, 0o077, 0o777], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_directories_are_0700_and_files_0600_whatever_the_umask(tmp_path, umask):
    root = tmp_path / "made" / "store"
    little = Little(root).open()
    little.take()
    little.take()
    modes = {}
    for at, directories, files in os.walk(root):
        modes |= {os.path.join(at, d): 0o700 for d in directories} | {os.path.join(at, f): 0o600 for f in files}
    modes[root] = 0o700
    assert len(modes) > 8
    assert {p: oct(os.stat(p).st_mode & 0o7777) for p in modes} == {p: oct(m) for p, m in modes.items()}
    little.close()


def test_the_rights_of_a_directory_that_was_there_are_left_alone(tmp_path):
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(0o750)
    Little(root).open().close()
    assert root.stat().st_mode & 0o777 == 0o750


def test_a_root_that_is_a_file_is_refused_with_its_path(tmp_path):
    root = tmp_path / "store"
    root.write_text("mine")
    with pytest.raises(StoreUnavailable, match=str(root)):
        Little(root).open()
    assert root.read_text() == "mine"


def test_drop_removes_everything_that_is_stored(little):
    little.take()
    little.take()
    little.home.drop()
    assert [p.name for p in little.path.iterdir()] == ["LOCK"]
    assert found(little) == (0, [])
    assert little.take() == 1
