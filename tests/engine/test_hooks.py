"""Hooks are called by SGLang's own registry, on its own functions, with whatever arguments it uses."""

from __future__ import annotations

import inspect
import pkgutil

import pytest
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang_persist.engine import hooks, launcher

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


def test_kinds_are_those_that_leave_the_original_in_charge():
    assert {k for _, k, _ in EVERY} <= {HookType.BEFORE, HookType.AFTER, HookType.AROUND}
