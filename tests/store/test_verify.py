"""`verify` finds every damaged bit and says where; `verify` and `inspect` never mistake a running server for damage."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from store.little import IDENTITY, OTHER, SHARD, Little, flip

from sglang_persist.format import segment
from sglang_persist.fs import REAL, FileSystem
from sglang_persist.model import Identity
from sglang_persist.store import names, report, verify


@pytest.fixture
def little(tmp_path):
    out = Little(tmp_path / "store").open()
    out.take()
    out.take()
    out.close()
    return out


def findings(root: Path, deep: bool = False) -> list[verify.Finding]:
    return verify.verify(REAL, root, deep).findings


def test_a_sound_store_has_no_findings_and_is_counted(little):
    for deep in (False, True):
        found = verify.verify(REAL, little.root, deep)
        assert (found.findings, found.leftovers, found.segments, found.frames) == ([], 0, 4, 6)
        assert found.bytes == sum(p.stat().st_size for p in little.path.iterdir())
        assert (len(list(little.path.iterdir())), found.bytes) == verify.store_bytes(REAL, little.root)


def test_progress_adds_up_to_the_bytes_of_the_store(little):
    steps: list[int] = []
    verify.verify(REAL, little.root, True, steps.append)
    assert sum(steps) == verify.store_bytes(REAL, little.root)[1]


def places(size: int) -> list[int]:
    """Every byte of what has a fixed layout at both ends of a file, and a sample of the rest."""
    return [i for i in range(size) if i < 64 or i >= size - 64 or i % 13 == 0]


def test_every_flipped_bit_is_found_in_its_file(tmp_path):
    little = Little(tmp_path / "store").open()
    little.take()
    little.close()
    draw = random.Random(3)
    flipped = 0
    for file in sorted(little.path.iterdir()):
        name = str(file.relative_to(little.root))
        for at in places(file.stat().st_size):
            bit = draw.randrange(8)
            flip(file, at, bit)
            found = findings(little.root)
            assert name in {f.path for f in found}, (file.name, at, bit)
            assert all(f.kind and f.detail for f in found)
            flip(file, at, bit)
            flipped += 1
    assert flipped > 400
    assert findings(little.root) == []


def test_every_truncation_and_extension_is_found_in_its_file(little):
    for file in sorted(little.path.iterdir()):
        data = file.read_bytes()
        cuts = sorted({0, 1, 55, 56, 63, 64, 65, len(data) // 2, len(data) - 65, len(data) - 64, len(data) - 1})
        for changed in [*(data[:n] for n in cuts), data + b"\0", data + data]:
            file.write_bytes(changed)
            assert str(file.relative_to(little.root)) in {f.path for f in findings(little.root)}
        file.write_bytes(data)
    assert findings(little.root) == []


def test_the_offset_of_a_damaged_record_is_said(little):
    file = little.segment_files()[0]
    flip(file, 70)
    (found,) = findings(little.root)
    assert (found.offset, found.kind) == (64, "checksum")
    assert found.path == str(file.relative_to(little.root))


def test_swapped_segments_are_found(little):
    a, b = little.segment_files()[:2]
    a.rename(a.with_suffix(".x"))
    b.rename(a)
    a.with_suffix(".x").rename(b)
    assert {f.path for f in findings(little.root)} >= {str(p.relative_to(little.root)) for p in (a, b)}


def test_a_segment_in_anothers_place_is_found(little):
    a, b = little.segment_files()[:2]
    shutil.copy(a, b)
    assert str(b.relative_to(little.root)) in {f.path for f in findings(little.root)}


def resealed(place: Path, segment_id: bytes, namespace: bytes, records: bytes | None = None) -> bytes:
    """A segment with another header, sound in itself."""
    data = place.read_bytes()
    head, tail = segment.HEADER_BYTES, segment.TRAILER_BYTES
    trailer = segment.decode_trailer(data[:head], data[-tail:], len(data))
    header = segment.encode_header(segment_id, namespace)
    return header + data[head:-tail] + segment.encode_trailer(header, trailer)


def test_a_segment_from_another_namespace_is_found(little):
    ref = little.manifests[2].segments[0]
    place = little.path / names.segment(ref.id)
    place.write_bytes(resealed(place, ref.id, bytes(16)))
    (found,) = findings(little.root)
    assert (found.path, found.kind) == (str(place.relative_to(little.root)), "mismatch")
    assert "namespace" in found.detail


def test_a_sound_segment_that_is_not_the_one_a_manifest_names_is_found(little, tmp_path):
    other = Little(tmp_path / "other").open()
    other.rng.bytes(8)
    other.take()
    other.close()
    ref, wrong = little.manifests[2].segments[0], other.segment_files()[0]
    place = little.path / names.segment(ref.id)
    place.write_bytes(resealed(wrong, ref.id, little.home.namespace))
    assert "mismatch" in {f.kind for f in findings(little.root) if f.path == str(place.relative_to(little.root))}


def test_renamed_files_are_found(little):
    little.manifest_file(2).rename(little.manifest_file(3))
    (found,) = findings(little.root)
    assert found.path.endswith("gen-0000000003.kvm")
    assert "holds generation 2" in found.detail
    little.manifest_file(3).rename(little.manifest_file(2))
    file = little.segment_files()[0]
    moved = little.path / ("seg-" + "00" * 16 + ".kvs")
    file.rename(moved)
    assert {str(p.relative_to(little.root)) for p in (file, moved)} <= {f.path for f in findings(little.root)}


def test_a_shard_that_was_moved_to_another_model_or_rank_is_found(little):
    other = Little(little.root, identity=Identity({"architecture": "Other"}, IDENTITY.cut))
    other.path.parent.mkdir(parents=True)
    shutil.copytree(little.path, other.path)
    shutil.copytree(little.path, little.path.with_name(OTHER))
    found = findings(little.root)
    assert len(found) == 4, "both manifests in both places"
    assert all("belongs to namespace" in f.detail or SHARD in f.detail for f in found)


def test_a_missing_segment_is_found_once_a_generation_and_said(little):
    shared = {r.id for r in little.manifests[1].segments} & {r.id for r in little.manifests[2].segments}
    gone = little.path / names.segment(shared.pop())
    gone.unlink()
    found = findings(little.root)
    assert [(f.path, f.kind) for f in found] == [(str(gone.relative_to(little.root)), "missing")] * 2


def test_foreign_files_are_found_at_every_level_and_left_alone(little):
    foreign = [
        little.root / "notes",
        little.root / "lost",
        little.path.parent.parent / "notes",
        little.path.parent / "notes",
        little.path / "notes",
        little.path / "gen-1.kvm",
        little.path / "sub",
    ]
    for place in foreign:
        place.mkdir() if place.name in ("lost", "sub") else place.write_text("mine")
    (little.root / "lost+found").mkdir()
    found = findings(little.root)
    assert {f.path for f in found} == {str(p.relative_to(little.root)) for p in foreign}
    assert {f.kind for f in found} == {"foreign"}
    assert all(p.exists() for p in foreign)


def test_leftovers_are_counted_and_no_findings(little):
    (little.path / "LOCK").touch()
    (little.path / "tmp-9-seg-x").write_bytes(b"half a segment")
    unnamed = little.path / ("seg-" + "cd" * 16 + ".kvs")
    unnamed.write_bytes(resealed(little.segment_files()[0], bytes.fromhex("cd" * 16), little.home.namespace))
    # Its records are sealed with the other id, so it is a damaged leftover; a sound one is no finding.
    assert {f.path for f in findings(little.root)} == {str(unnamed.relative_to(little.root))}
    unnamed.unlink()
    little.manifest_file(2).unlink()
    found = verify.verify(REAL, little.root)
    only_of_2 = {r.id for r in little.manifests[2].segments} - {r.id for r in little.manifests[1].segments}
    assert (found.findings, found.leftovers) == ([], 2 + len(only_of_2))


def test_a_lock_that_holds_bytes_is_found(little):
    (little.path / "LOCK").write_text("12345")
    (found,) = findings(little.root)
    assert (found.path, found.kind) == (str((little.path / "LOCK").relative_to(little.root)), "malformed")


@pytest.mark.parametrize("kind", ["directory", "link", "dangling link"])
@pytest.mark.parametrize("name", ["gen-0000000009.kvm", "seg-" + "00" * 16 + ".kvs"])
def test_what_is_not_a_file_is_found(little, name, kind):
    place = little.path / name
    if kind == "directory":
        place.mkdir()
    else:
        place.symlink_to("nowhere" if "dangling" in kind else little.manifest_file(1))
    assert str(place.relative_to(little.root)) in {f.path for f in findings(little.root)}


# ---------------------------------------------------------------------------------------- beside a running server


class Meanwhile(FileSystem):
    """Does something just before the n-th look at the store."""

    def __init__(self, at: int, action):
        self.looks, self._at, self._action = 0, at, action

    def _look(self) -> None:
        self.looks += 1
        if self.looks - 1 == self._at:
            self._action()

    def list(self, path):
        self._look()
        return super().list(path)

    def open(self, path):
        self._look()
        return super().open(path)

    def exists(self, path):
        self._look()
        return super().exists(path)


def snapshots(little: Little) -> None:
    little.open()
    little.take()
    little.take()


def a_new_rank(little: Little) -> None:
    Little(little.root, shard=OTHER, shards=(OTHER,)).open().take()


def a_new_model(little: Little) -> None:
    Little(little.root, identity=Identity({"architecture": "New"}, IDENTITY.cut)).open().take()


@pytest.mark.parametrize("action", [snapshots, a_new_rank, a_new_model])
@pytest.mark.parametrize("reader", ["verify", "verify deep", "inspect"])
def test_what_a_server_does_meanwhile_is_no_finding(tmp_path, reader, action):
    def look(n: int) -> tuple[int, list, bool]:
        done = []
        little = Little(tmp_path / str(n)).open()
        little.take()
        little.take()
        little.close()
        fs = Meanwhile(n, lambda: done.append(action(little)))
        if reader == "inspect":
            found = report.inspect(fs, little.root)[1]
        else:
            found = verify.verify(fs, little.root, "deep" in reader).findings
        return fs.looks, found, bool(done)

    looks = look(10**6)[0]
    assert looks > 5
    for n in range(looks):
        _, found, done = look(n)
        assert done
        assert found == [], f"look {n}"
