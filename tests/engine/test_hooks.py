"""Hooks are called by SGLang's own registry, on its own functions, with whatever arguments it uses."""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from types import SimpleNamespace

import flow
import numpy as np
import pytest
import real
from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, FlushCacheReqInput
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from sglang.srt.utils.weight_checker import WeightChecker

from sglang_persist import config
from sglang_persist.engine import hooks, launcher
from sglang_persist.engine.runtime import PersistCommand, Persistence
from sglang_persist.fs import REAL
from sglang_persist.store import verify

EVERY = (*hooks.SCHEDULER, *launcher.LAUNCHER, *launcher.BAD_SETTING)


class Recorder:
    """Stands for the persistence of this process; notes what it is told, or fails at it."""

    def __init__(self, error: Exception | None = None):
        self.told, self.error = [], error

    def __getattr__(self, name):
        def tell(*_args):
            self.told.append(name)
            if self.error:
                raise self.error

        return tell


@pytest.mark.parametrize("target", [t for t, _, _ in EVERY])
def test_every_target_is_a_function_of_this_release(target):
    assert callable(pkgutil.resolve_name(target))


def call(target: str, result=None, **keywords):
    """The hook of a target around a stand-in of the same name, called as SGLang calls it."""
    kind, function = next((k, f) for t, k, f in hooks.SCHEDULER if t.endswith(target))
    return _wrap_fn(lambda *_a, **_k: result, function, kind)("self", **keywords)


def test_flush_with_a_keyword_is_heard(monkeypatch):
    """A weight update flushes with `empty_cache=...`: an exception here would end the scheduler."""
    monkeypatch.setattr(hooks, "_current", recorder := Recorder())
    assert "empty_cache" in inspect.signature(pkgutil.resolve_name(hooks._SCHEDULER + "flush_cache")).parameters
    assert call("flush_cache", True, empty_cache=True) is True
    assert call("flush_cache", False, empty_cache=True) is False
    assert recorder.told == ["flushed"]


@pytest.mark.parametrize("keywords", [{}, {"recv_req": None}, {"anything": 1, "else_": 2}])
@pytest.mark.parametrize(
    "target",
    [t.rsplit(".", 1)[1] for t, k, f in hooks.SCHEDULER if f.__name__ not in ("_run_event_loop", "_after_dispatcher")],
)
@pytest.mark.parametrize("current", [None, Recorder(RuntimeError("defect"))], ids=["not started", "failing"])
def test_no_hook_raises_into_the_engine(monkeypatch, target, keywords, current):
    monkeypatch.setattr(hooks, "_current", current)
    call(target, [], **keywords)


def test_a_command_travels_with_the_requests_of_the_group_whose_leader_gave_it(monkeypatch):
    """With attention data parallelism control messages are those of the first rank for all."""
    split = "request_receiver.SchedulerRequestReceiver._split_work_and_control_reqs"
    work, flush = BatchTokenizedGenerateReqInput(batch=[]), FlushCacheReqInput()
    command = PersistCommand(2, "interval", 0, 0)
    received = [command, work, flush]
    kind, function = next((k, f) for t, k, f in hooks.SCHEDULER if t.endswith(split))
    wrapped = _wrap_fn(SchedulerRequestReceiver._split_work_and_control_reqs, function, kind)
    requests, control = wrapped(None, received)
    assert [id(r) for r in requests] == [id(work)]
    assert [id(r) for r in control] == [id(command), id(flush)]
    monkeypatch.setattr(hooks, "_current", Recorder())
    requests, control = wrapped(None, received)
    assert [id(r) for r in requests] == [id(work), id(command)]
    assert [id(r) for r in control] == [id(flush)]


def test_kinds_are_those_that_leave_the_original_in_charge():
    assert {k for _, k, _ in EVERY} <= {HookType.BEFORE, HookType.AFTER, HookType.AROUND}


# ---------------------------------------------------------------------------------------------------- weights

UPDATES = [
    "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor",
    "update_weights_from_ipc", "begin_weight_update", "end_weight_update",
]  # fmt: skip
#: Methods of SGLang's weight updater that leave the weights as they are.
HARMLESS = {
    "init_weights_update_group", "destroy_weights_update_group", "get_weights_by_name", "save_remote_model",
    "save_sharded_model", "flush_cache_after_weight_update", "record_weight_version_after_update",
}  # fmt: skip
#: They write to the weights under some conditions, which have tests of their own.
SOMETIMES = {"check_weights", "release_memory_occupation", "resume_memory_occupation"}


def test_every_way_of_changing_weights_that_this_release_has_is_known():
    """A method that a new release adds to the updater must be looked at, and put into one of the three lists."""
    public = {n for n, f in vars(SchedulerWeightUpdaterManager).items() if inspect.isfunction(f) and n[0] != "_"}
    assert public == {*UPDATES, *HARMLESS, *SOMETIMES}
    assert {t.rsplit(".", 1)[1] for t, _, _ in hooks.SCHEDULER if t.startswith(hooks._WEIGHTS)} == {
        *UPDATES, *SOMETIMES,
    }  # fmt: skip


def around(target: str, original, request):
    """SGLang's call of a method of the weight updater, with our hooks around a stand-in."""
    for at, kind, function in hooks.SCHEDULER:
        if at == hooks._WEIGHTS + target:
            original = _wrap_fn(original, function, kind)
    return original(SimpleNamespace(offload_tags=set()), request)


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """A persistence in the middle of its second snapshot, over a real tree and store."""
    e = real.engine(size=8192)
    rng = np.random.default_rng(2)
    e.put(real.random_tokens(rng, 600))
    at = flow.home(tmp_path)
    flow.snapshot(e, at)
    e.put(real.random_tokens(rng, 2000))
    args = SimpleNamespace(enable_memory_saver=True, enable_weights_cpu_backup=False)
    scheduler = SimpleNamespace(server_args=args, is_fully_idle=lambda: True, idle_sleeper=None)
    p = Persistence(scheduler, config.load({"SGLANG_PERSIST_DIR": str(tmp_path)}))
    p.tree, p.pages, p.home, p.keeper = e.tree, e.pages, at, flow.keeper(e, at)
    p.identity, p.shards = real.IDENTITY, (flow.SHARD,)
    p.why_off, p.leader, p.writes = None, True, True
    p.on_command(PersistCommand(2, "interval", 0, 0))
    p._begin(p._queue.pop(0))
    for _ in range(3):
        p._step()
    assert p._job is not None
    monkeypatch.setattr(hooks, "_current", p)
    return p


def is_closed(p: Persistence) -> bool:
    """Nothing runs, nothing is begun any more, and the store is as it was before the snapshot."""
    p.on_command(PersistCommand(3, "interval", 0, 0))
    p.tick()
    p.request_snapshot()
    p.poll(received := [])
    p.shutdown()
    p.home.run(lambda: None).result()  # what was under way on the store's thread
    other = flow.home(p.settings.dir)
    other.become_writer()  # the lock is free: another server may write here
    found = other.find() or other.generation
    other.close()
    assert verify.verify(REAL, p.settings.dir, deep=True).findings == []
    return (p.why_off, p._job, received, found) == ("weights_changed", None, [], 1)


@pytest.mark.parametrize("ends", ["well", "badly", "with an error"])
@pytest.mark.parametrize("target", UPDATES)
def test_update_of_weights_ends_snapshots_before_it_begins(serving, target, ends):
    def original(_manager, _request):
        assert (serving.why_off, serving._job) == ("weights_changed", None), "nothing is saved from here on"
        if ends == "with an error":
            raise RuntimeError("half of the weights are new")
        return ends

    if ends == "with an error":
        with pytest.raises(RuntimeError, match="half"):
            around(target, original, None)
    else:
        assert around(target, original, None) == ends
    assert is_closed(serving)


@pytest.mark.parametrize("action", ["snapshot", "compare", "checksum", "reset_tensors", "something new"])
def test_check_of_weights_counts_where_it_writes_to_them(serving, action):
    around("check_weights", lambda *_: None, SimpleNamespace(action=action))
    assert (serving.why_off is None) == (action in hooks._READS_WEIGHTS)
    serving._drop_job("end of the test")
    serving.home.close()


def test_actions_that_only_read_weights_are_those_of_this_release():
    known = set(re.findall(r'action == "(\w+)"', inspect.getsource(WeightChecker.handle)))
    assert known == {*hooks._READS_WEIGHTS, "reset_tensors"}


@pytest.mark.parametrize("tags", [None, [], ["weights"], ["kv_cache"], ["kv_cache", "weights"]], ids=str)
@pytest.mark.parametrize(("saver", "backup"), [(True, False), (True, True), (False, False)])
def test_weights_whose_memory_was_given_away_count_as_changed(serving, tags, saver, backup):
    serving.scheduler.server_args = SimpleNamespace(enable_memory_saver=saver, enable_weights_cpu_backup=backup)
    around("release_memory_occupation", lambda *_: None, SimpleNamespace(tags=tags))
    lost = saver and not backup and (not tags or "weights" in tags)
    assert serving.why_off == ("weights_changed" if lost else None)
    assert (serving.why_no_snapshot() is None) == (tags == ["weights"] and not lost)
    serving._drop_job("end of the test")
    serving.home.close()


def test_tags_of_memory_are_those_of_this_release():
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS

    assert (hooks.KV_MEMORY, hooks.WEIGHTS_MEMORY) == (GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS)


@pytest.mark.parametrize("broken", ["sglang_persist.engine.runtime", "sglang_persist.engine.identity"])
def test_an_engine_that_the_plugin_does_not_fit_serves_without_it(monkeypatch, caplog, broken):
    """A release that lacks what a module of ours imports must not be kept from starting."""
    for name in ("runtime", "identity"):
        monkeypatch.delitem(sys.modules, f"sglang_persist.engine.{name}", raising=False)
    monkeypatch.setitem(sys.modules, broken, None)
    monkeypatch.setattr(hooks, "_current", None)
    monkeypatch.setattr(hooks, "_dispatching", False)
    monkeypatch.setattr(hooks.HookRegistry, "_patched", {target for target, _, _ in hooks.SCHEDULER})
    call("init_request_dispatcher")
    assert call("run_event_loop", "served") == "served"
    assert hooks._current is None
    assert any("hook_missing" in r.message for r in caplog.records)


def test_a_grace_that_cannot_be_raised_stops_nothing(monkeypatch):
    from sglang.srt.managers import tokenizer_manager

    monkeypatch.delattr(tokenizer_manager, "_SCHEDULER_EXIT_TIMEOUT_SECS")
    launcher._raise_grace(30)
