"""What a server does when its store misbehaves: it starts, serves, says why, and saves again as soon as it can."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import real
from process import Process
from simfs import ALL_LOST, GROWING, KILLED, Crash, SimFs

from sglang_persist.engine import runtime
from sglang_persist.fs import REAL, FileSystem
from sglang_persist.model import Rates
from sglang_persist.store import attempts, names, shard, verify
from sglang_persist.store.root import SUBDIRECTORY


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def stored(monkeypatch, store: Path, rng, rounds: int = 1) -> list[tuple]:
    """The paths of a server that was stopped after so many snapshots, each of them fuller than the one before."""
    process = Process(monkeypatch, store).start()
    for _ in range(rounds):
        real.populate(process.engine, rng, 4)
        assert process.snapshot()["last_request_error"] is None
    process.persistence.home.close()
    return process.engine.paths()


class Stalled(FileSystem):
    """Calls that match wait until `answer` is set, as on a network mount whose server is gone."""

    def __init__(self, *calls: str, matching: str = ""):
        self.calls, self.matching = calls, matching
        self.answer, self.waited = threading.Event(), threading.Event()

    def _wait(self, call: str, path: Path) -> None:
        if call in self.calls and self.matching in str(path):
            self.waited.set()
            assert self.answer.wait(60)

    def list(self, path):
        self._wait("list", path)
        return super().list(path)

    def open(self, path):
        self._wait("open", path)
        return super().open(path)

    def create(self, path):
        self._wait("create", path)
        return super().create(path)

    def rights(self, path, follow=True):
        self._wait("rights", path)
        return super().rights(path, follow)


@pytest.mark.parametrize(("calls", "matching"), [(("list",), "dp0"), (("open",), ".kvm"), (("open",), ".kvs")])
def test_a_file_system_that_does_not_answer_at_the_start_holds_up_neither_start_nor_serving(
    monkeypatch, tmp_path, rng, calls, matching
):
    paths = stored(monkeypatch, tmp_path / "store", rng)
    monkeypatch.setattr("sglang_persist.engine.runtime.START_WAIT", 0.1)
    for place in ("restore", "engine.runtime"):
        monkeypatch.setattr(f"sglang_persist.{place}.LOOK_SECONDS", 0.1)
    fs = Stalled(*calls, matching=matching)
    process = Process(monkeypatch, tmp_path / "store", fs, restore_timeout=0.3).start()
    try:
        assert fs.waited.is_set()
        assert process.status["enabled"]
        assert process.status["restore"]["why_cold"] == "timeout"
        assert process.status["restore"]["tokens_restored"] == 0
        process.engine.check()
        process.persistence.request_snapshot()
        for _ in range(20):  # a pass never waits for the store's thread
            process.one_pass()
        assert process.status["snapshot"]["state"] == "running"
    finally:
        fs.answer.set()
    real.populate(process.engine, rng, 2)
    assert process.snapshot()["last_request_error"] is None
    process.stop()
    again = Process(monkeypatch, tmp_path / "store").start()
    assert set(again.engine.paths()) >= set(process.engine.paths())
    assert set(again.engine.paths()) >= set(paths), "what was stored before is the fuller generation"


def test_a_file_system_that_does_not_even_show_the_directory_turns_persistence_off(monkeypatch, tmp_path):
    monkeypatch.setattr("sglang_persist.engine.runtime.START_WAIT", 0.1)
    fs = Stalled("rights")
    process = Process(monkeypatch, tmp_path / "store", fs).start()
    assert process.status["why_off"] == process.status["restore"]["why_cold"] == "timeout"
    fs.answer.set()
    process.stop()


def test_a_file_system_that_stalls_while_saving_stalls_neither_serving_nor_the_end(monkeypatch, tmp_path, rng):
    fs = Stalled("create")
    process = Process(monkeypatch, tmp_path / "store", fs, shutdown_timeout=1).start()
    real.populate(process.engine, rng, 3)
    process.persistence.request_snapshot()
    process.passes(fs.waited.is_set)
    for _ in range(20):
        process.persistence.tick()
    assert process.status["snapshot"]["state"] == "running"
    process.stop()
    assert "within the shutdown timeout" in process.status["snapshot"]["last_error"]
    fs.answer.set()
    process.persistence.home.close()
    assert verify.verify(REAL, tmp_path / "store").findings == []


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_a_failed_snapshot_is_said_counted_cleaned_up_and_tried_again(monkeypatch, tmp_path, rng, caplog, error):
    fs = SimFs(tmp_path / "store")
    process = Process(monkeypatch, tmp_path / "store", fs).start()
    real.populate(process.engine, rng, 3)
    fs.fail_on(GROWING, ".kv", error)
    caplog.clear()
    for attempt in (1, 2):
        found = process.snapshot()
        assert os.strerror(error) in found["last_request_error"]
        assert found["failures"] == attempt
    assert len([r for r in caplog.records if "no snapshot" in r.message]) <= 2
    assert not list((tmp_path / "store").rglob("tmp-*"))
    fs.arm()
    found = process.snapshot()
    assert (found["last_request_error"], found["last_error"]) == (None, None)
    assert verify.verify(REAL, tmp_path / "store").findings == []
    process.persistence.home.close()
    assert Process(monkeypatch, tmp_path / "store").start().engine.paths() == process.engine.paths()


@pytest.mark.parametrize("what", ["the store", "the shard", "a segment", "all segments", "the manifest"])
def test_what_is_deleted_underneath_is_written_again(monkeypatch, tmp_path, rng, what):
    store = tmp_path / "store"
    process = Process(monkeypatch, store).start()
    for _ in range(2):
        real.populate(process.engine, rng, 3)
        process.snapshot()
    path = process.persistence.home.path
    segments = sorted(path.glob("*.kvs"))
    assert len(segments) == 2
    if what == "the store":
        shutil.rmtree(store)
    elif what == "the shard":
        shutil.rmtree(path)
    else:
        going = {"a segment": segments[:1], "all segments": segments, "the manifest": sorted(path.glob("*.kvm"))}
        for file in going[what]:
            file.unlink()
    real.populate(process.engine, rng, 1)
    found = process.snapshot()
    assert found["last_request_error"] is None
    assert verify.verify(REAL, store, deep=True).findings == [] or what in ("a segment", "all segments")
    process.snapshot()
    process.persistence.home.close()
    again = Process(monkeypatch, store).start()
    assert again.engine.paths() == process.engine.paths()
    assert (again.persistence.home.path / names.LOCK).exists()


# ------------------------------------------------------------------------------------------ died while restoring


def die_while_restoring(path: Path, generation: int) -> None:
    """What the kernel leaves of a process that was killed in the midst of a restore."""
    attempts.begin(REAL, path, generation).release(remove=False)


def test_one_death_while_restoring_costs_nothing(monkeypatch, tmp_path, rng):
    paths = stored(monkeypatch, tmp_path / "store", rng, rounds=2)
    (path,) = names.shard_dirs(REAL, tmp_path / "store")
    die_while_restoring(path, 2)
    process = Process(monkeypatch, tmp_path / "store").start()
    assert process.engine.paths() == paths
    process.persistence.home.close()
    assert not list(path.glob("restoring-*")), "a completed restore clears the count"
    die_while_restoring(path, 2)
    assert Process(monkeypatch, tmp_path / "store").start().engine.paths() == paths


def test_after_two_deaths_the_generation_before_is_restored_and_it_is_said(monkeypatch, tmp_path, rng, caplog):
    paths = stored(monkeypatch, tmp_path / "store", rng, rounds=2)
    (path,) = names.shard_dirs(REAL, tmp_path / "store")
    for _ in range(2):
        die_while_restoring(path, 2)
    for _ in range(2):  # the count of the one is not cleared by a restore of the other
        caplog.clear()
        process = Process(monkeypatch, tmp_path / "store").start()
        assert 0 < process.status["restore"]["tokens_restored"] < sum(p[2][-1] for p in paths)
        assert process.persistence.home.generation == 1
        assert any("died while they restored it" in r.message for r in caplog.records)
        process.persistence.home.close()
    process = Process(monkeypatch, tmp_path / "store").start()
    real.populate(process.engine, rng, 1)
    assert process.snapshot()["generation"] == 3
    process.snapshot()
    assert shard.newest(REAL, path, deadly=attempts.deadly(REAL, path))[0].generation == 3
    process.persistence.home.close()
    assert verify.verify(REAL, tmp_path / "store").findings == []


def test_when_every_generation_is_deadly_the_start_is_cold_and_says_so(monkeypatch, tmp_path, rng):
    stored(monkeypatch, tmp_path / "store", rng)
    (path,) = names.shard_dirs(REAL, tmp_path / "store")
    for _ in range(2):
        die_while_restoring(path, 1)
    process = Process(monkeypatch, tmp_path / "store").start()
    assert process.status["restore"]["why_cold"] == "unusable"
    real.populate(process.engine, rng, 1)
    assert process.snapshot()["generation"] == 2


def test_a_restore_that_still_runs_is_no_death(tmp_path, monkeypatch, rng):
    paths = stored(monkeypatch, tmp_path / "store", rng)
    (path,) = names.shard_dirs(REAL, tmp_path / "store")
    running = [attempts.begin(REAL, path, 1) for _ in range(3)]
    process = Process(monkeypatch, tmp_path / "store").start()
    assert process.engine.paths() == paths
    assert len(list(path.glob("restoring-*"))) == 3
    for one in running:
        attempts.end(REAL, path, 1, one, completed=False)
    assert not list(path.glob("restoring-*"))


def test_marks_of_generations_that_are_gone_are_swept(monkeypatch, tmp_path, rng):
    stored(monkeypatch, tmp_path / "store", rng)
    (path,) = names.shard_dirs(REAL, tmp_path / "store")
    for generation in (7, 7, 1):
        die_while_restoring(path, generation)
    Process(monkeypatch, tmp_path / "store", restore="off").start()
    assert [names.restoring_of(p.name) for p in path.glob("restoring-*")] == [1]


# ------------------------------------------------------------------------------------------------------ whose it is


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2775, 0o2700, 0o770])
def test_a_directory_that_is_not_ours_alone_gets_one_that_is(monkeypatch, tmp_path, rng, mode):
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(mode)
    (volume / "lost+found").mkdir()
    paths = stored(monkeypatch, volume, rng)
    store = volume / SUBDIRECTORY
    assert store.stat().st_mode & 0o7777 == 0o700
    assert {p.name for p in volume.iterdir()} == {"lost+found", SUBDIRECTORY}
    assert Process(monkeypatch, volume).start().engine.paths() == paths


def test_a_directory_of_ours_is_the_store(monkeypatch, tmp_path, rng):
    for mode in (0o700, 0o755):
        store = tmp_path / f"{mode:o}"
        store.mkdir()
        store.chmod(mode)
        stored(monkeypatch, store, rng)
        assert names.shard_dirs(REAL, store)


@pytest.mark.parametrize("kind", ["open to others", "open to the group", "a link", "a file"])
def test_a_store_directory_that_others_may_change_is_refused_with_the_reason(monkeypatch, tmp_path, kind):
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o1777)
    store = volume / SUBDIRECTORY
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        store.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        store.touch(mode=0o600)
    else:
        store.mkdir()
        store.chmod(0o707 if kind == "open to others" else 0o770)
    process = Process(monkeypatch, volume).start()
    assert process.status["why_off"] == process.status["restore"]["why_cold"] == "store_unavailable"
    if store.is_dir():
        assert not list(store.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_store_directory_of_another_user_is_refused(monkeypatch, tmp_path):
    volume = tmp_path / "volume"
    (volume / SUBDIRECTORY).mkdir(parents=True, mode=0o700)
    volume.chmod(0o777)
    os.chown(volume / SUBDIRECTORY, 12345, 12345)
    process = Process(monkeypatch, volume).start()
    assert process.status["why_off"] == "store_unavailable"


# ------------------------------------------------------------------------------------------- killed while starting


@pytest.mark.parametrize("aftermath", [KILLED, ALL_LOST])
def test_a_start_that_is_killed_at_any_step_costs_the_next_one_nothing(monkeypatch, tmp_path, rng, aftermath):
    first = SimFs(tmp_path / "store")
    process = Process(monkeypatch, tmp_path / "store", first).start()
    for _ in range(2):
        real.populate(process.engine, rng, 3)
        process.snapshot()
    process.persistence.home.close()
    paths = process.engine.paths()
    whole = first.clone(tmp_path / "whole")
    Process(monkeypatch, tmp_path / "whole", whole).start().persistence.home.close()
    assert len(whole.calls) > 10
    for n in range(len(whole.calls)):
        fs = first.clone(tmp_path / f"run-{n}")
        fs.crash(n)
        started = Process(monkeypatch, tmp_path / f"run-{n}", fs)
        with contextlib.suppress(Crash):
            started.start()
        started.persistence.home.close()
        left = fs.leave(aftermath, tmp_path / f"left-{n}")
        again = Process(monkeypatch, left).start()
        assert again.engine.paths() == paths, whole.calls[n]
        again.persistence.home.close()
        assert verify.verify(REAL, left).findings == []
        shutil.rmtree(tmp_path / f"run-{n}")
        shutil.rmtree(left)


def test_when_the_server_begins_to_drain_what_is_new_is_saved_and_the_end_finds_little_left(monkeypatch, tmp_path, rng):
    process = Process(monkeypatch, tmp_path / "store").start()
    real.populate(process.engine, rng, 4)
    there = process.engine.cache.total_size()[0]
    process.persistence.request_drain()
    process.passes(lambda: process.status["snapshot"]["last_tokens"] == there)
    process.engine.put(real.random_tokens(rng, 30))  # the last request of all
    process.stop()
    found = process.status["snapshot"]
    assert (found["generation"], found["last_new_tokens"]) == (2, 30)
    assert [m.reason for m in manifests(tmp_path / "store")] == ["shutdown", "shutdown"]


def test_paths_that_are_computed_faster_than_they_load_are_left_out_of_both(monkeypatch, tmp_path, rng):
    def keep(process, least):
        rates = Rates(load=100.0, path_seconds=0.0, prefill=1000.0) if least else Rates()
        process.persistence.keeper.rates = rates

    process = Process(monkeypatch, tmp_path / "store").start()
    long, short = (process.engine.put(real.random_tokens(rng, n)) for n in (300, 200))
    keep(process, least=True)
    assert process.snapshot()["last_tokens"] == 300
    assert process.status["break_even"]["least_tokens"] == 256
    keep(process, least=False)
    assert process.snapshot()["last_tokens"] == 500
    keep(process, least=True)
    process.engine.put(real.random_tokens(rng, 300))
    process.snapshot()
    keep(process, least=False)  # what the last manifest says stands in it, not in this process
    process.persistence.home.close()
    again = Process(monkeypatch, tmp_path / "store").start()
    assert again.status["break_even"]["least_tokens"] == 256
    assert (again.engine.match(long), again.engine.match(short)) == (300, 0)
    overruled = Process(monkeypatch, tmp_path / "store", min_tokens=0).start()
    assert overruled.status["break_even"]["least_tokens"] == 0


@pytest.mark.parametrize(("groups", "sleeps", "short"), [(1, None, False), (2, None, True), (2, True, False)])
def test_an_idle_group_of_attention_dp_takes_short_steps_because_the_others_wait_for_it(
    monkeypatch, tmp_path, rng, groups, sleeps, short
):
    process = Process(monkeypatch, tmp_path / "store").start()
    process.parallel.attn_dp_size = groups
    persistence, step = process.persistence, process.persistence._step
    persistence.scheduler.idle_sleeper = sleeps
    real.populate(process.engine, rng, 30)
    passes = [0]
    # By a clock in which each step takes a millisecond and nothing else takes any time.
    clock = SimpleNamespace(monotonic=lambda: sum(passes) / 1000, time=time.time)
    monkeypatch.setattr(runtime, "time", clock)

    def counted():
        passes[-1] += 1
        return step()

    monkeypatch.setattr(persistence, "_step", counted)
    persistence.request_snapshot()
    while not process.status["snapshot"]["last_request"]:
        passes.append(0)
        process.one_pass()
    assert (max(passes) <= 1000 * runtime.BUSY_SLICE) is short
    assert sum(passes) > 1000 * runtime.IDLE_SLICE


def manifests(store: Path) -> list:
    (path,) = names.shard_dirs(REAL, store)
    return [shard.load_manifest(REAL, path, g) for g in shard.generations(REAL, path)]
