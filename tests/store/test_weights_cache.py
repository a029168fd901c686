"""The digest of a checkpoint in a store: found again, never believed when damaged, never in the way."""

from __future__ import annotations

import os
import random
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from builders import WEIGHTS
from hypothesis import given
from hypothesis import strategies as st
from store.little import Little, flip

from sglang_persist.errors import FormatError, StoreFull, StoreUnavailable
from sglang_persist.format import envelope, weights
from sglang_persist.fs import REAL, FileSystem
from sglang_persist.store import names, prune, report, verify, weights_cache

NAME = names.weights(WEIGHTS.checkpoint)


@pytest.fixture
def root(tmp_path):
    assert weights_cache.save(REAL, tmp_path / "store", WEIGHTS)
    return tmp_path / "store"


def found(root):
    return [(f.path, f.kind) for f in verify.verify(REAL, root).findings]


def test_what_was_saved_is_loaded_and_the_store_is_sound(root):
    assert weights_cache.load(REAL, root, WEIGHTS.checkpoint) == WEIGHTS
    assert weights_cache.load(REAL, root, "/another") is None
    assert [p.name for p in root.iterdir()] == [NAME]
    assert stat.S_IMODE(root.stat().st_mode) == 0o700 and stat.S_IMODE((root / NAME).stat().st_mode) == 0o600
    checked = verify.verify(REAL, root)
    assert (checked.findings, checked.leftovers, checked.bytes) == ([], 0, (root / NAME).stat().st_size)
    shown, problems = report.inspect(REAL, root)
    assert (shown["files"], shown["bytes"], problems) == (1, checked.bytes, [])


def test_every_flipped_bit_is_found_and_nothing_of_the_file_is_believed(root):
    draw, file = random.Random(5), root / NAME
    for at in range(file.stat().st_size):
        bit = draw.randrange(8)
        flip(file, at, bit)
        assert weights_cache.load(REAL, root, WEIGHTS.checkpoint) is None, at
        assert [path for path, _ in found(root)] == [NAME], at
        flip(file, at, bit)
    assert weights_cache.load(REAL, root, WEIGHTS.checkpoint) == WEIGHTS


def test_every_shorter_file_is_found(root):
    whole = (root / NAME).read_bytes()
    for size in range(len(whole)):
        (root / NAME).write_bytes(whole[:size])
        assert weights_cache.load(REAL, root, WEIGHTS.checkpoint) is None
        assert found(root) == [(NAME, "truncated")]
    (root / NAME).write_bytes(whole + b"\0")
    assert found(root) == [(NAME, "truncated")]


def test_damaged_file_is_replaced(root):
    (root / NAME).write_bytes(b"damage")
    assert weights_cache.save(REAL, root, WEIGHTS)
    assert weights_cache.load(REAL, root, WEIGHTS.checkpoint) == WEIGHTS


def test_file_under_the_name_of_another_checkpoint_is_found(root):
    other = names.weights("/another")
    (root / NAME).rename(root / other)
    assert weights_cache.load(REAL, root, "/another") is None
    assert found(root) == [(other, "malformed")]


@pytest.mark.parametrize("what", ["a directory", "a link", "a pipe"])
def test_something_else_under_its_name_is_as_nothing(root, what):
    (root / NAME).unlink()
    {"a directory": os.mkdir, "a link": lambda p: os.symlink("/dev/zero", p), "a pipe": os.mkfifo}[what](root / NAME)
    assert weights_cache.load(REAL, root, WEIGHTS.checkpoint) is None
    assert [path for path, _ in found(root)] == [NAME]


class Failing(FileSystem):
    """One call on files raises."""

    def __init__(self, name: str, error: Exception):
        def fail(*_args):
            raise error

        setattr(self, name, fail)


@pytest.mark.parametrize("error", [StoreFull("no space"), StoreUnavailable("denied")], ids=["full", "denied"])
@pytest.mark.parametrize("name", ["make_dir", "create", "rename", "sync_dir", "list"])
def test_store_that_cannot_be_written_is_done_without(tmp_path, name, error):
    root = tmp_path / "store"
    if name != "make_dir":
        root.mkdir()
    assert not weights_cache.save(Failing(name, error), root, WEIGHTS)
    left = [] if name == "make_dir" else [p.name for p in root.iterdir()]
    assert left == ([NAME] if name == "sync_dir" else [])


def test_unreadable_store_is_done_without(root):
    assert weights_cache.load(Failing("open", StoreUnavailable("denied")), root, WEIGHTS.checkpoint) is None


def test_leftovers_are_counted_and_old_ones_removed(root):
    recent, old = root / "tmp-weights-0", root / "tmp-weights-1"
    recent.write_bytes(b"half")
    old.write_bytes(b"half")
    os.utime(old, (1, 1))
    checked = verify.verify(REAL, root)
    assert (checked.findings, checked.leftovers) == ([], 2)
    assert weights_cache.save(REAL, root, WEIGHTS)
    assert sorted(p.name for p in root.iterdir()) == sorted([recent.name, NAME])


def test_ranks_may_write_at_the_same_time(root):
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda n: weights_cache.save(REAL, root, replace(WEIGHTS, digest=str(n))), range(64)))
    assert all(done) and [p.name for p in root.iterdir()] == [NAME]
    assert weights_cache.load(REAL, root, WEIGHTS.checkpoint).digest in map(str, range(64))


def test_pruning_leaves_it_alone(root):
    little = Little(root).open()
    little.take()
    little.close()
    plan, locks = prune.plan_store(REAL, root, keep=0, max_bytes=0)
    prune.execute(REAL, plan)
    for lock in locks:
        lock.release()
    assert weights_cache.load(REAL, root, WEIGHTS.checkpoint) == WEIGHTS
    assert found(root) == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=20,
)


@given(st.fixed_dictionaries({n: VALUES for n in ("checkpoint", "rule", "files", "digest")}))
def test_any_body_is_read_or_refused_by_name(body):
    try:
        found = weights.decode(envelope.encode_file(weights.MAGIC, weights.MAJOR, weights.MINOR, body))
    except FormatError:
        return
    assert weights.decode(weights.encode(found)) == found


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    for whole in (data, weights.encode(WEIGHTS)[:48] + data):
        with pytest.raises(FormatError):
            weights.decode(whole)
