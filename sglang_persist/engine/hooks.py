"""Where SGLang calls us: two lists of (target, kind, function), each function one step into the runtime or launcher.

Targets are resolved before any is registered, and checked again when the first hook fires: SGLang logs a hook that it
could not apply and goes on without it, but half a plugin would be wrong.
"""

from __future__ import annotations

import functools
import pkgutil

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_persist.config import Settings
from sglang_persist.log import logger

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_PARTS = "sglang.srt.managers.scheduler_components."
_WEIGHTS = _PARTS + "weight_updater.SchedulerWeightUpdaterManager."

#: SGLang's tags for KV memory and for the weights when memory is released and resumed in parts.
KV_MEMORY, WEIGHTS_MEMORY = "kv_cache", "weights"
#: What `check_weights` can do without writing to them.
_READS_WEIGHTS = {"snapshot", "compare", "checksum"}
#: The one persistence of this scheduler process, once its loop is about to start.
_current = None
#: Whether its command reaches it.
_dispatching = False
_settings: Settings | None = None
#: The scheduler, once it was asked to stop.
_leaving = None


class LoopEnds(BaseException):
    """Leaves a loop of SGLang's that does not look whether it is to end (pipeline parallelism's)."""


def _guarded(function):
    """A failure of ours is logged and forgotten: the engine goes on."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        if _current is not None:
            try:
                return function(_current, *args, **kwargs)
            except Exception:
                logger.exception("persistence: %s failed", function.__name__)
        return None

    return run


def _run_event_loop(original, scheduler):
    try:
        _start(scheduler)
    except Exception:
        logger.exception("persistence is off: internal_error")
    try:
        return original(scheduler)
    except LoopEnds:
        return None


def _start(scheduler) -> None:
    global _current
    missing = [target for target, _, _ in SCHEDULER if target not in HookRegistry._patched]
    if missing or not _dispatching:
        logger.warning("persistence is off: hook_missing (%s did not take)", ", ".join(missing) or "the dispatcher's")
        return
    from sglang_persist.engine.runtime import Persistence, handle_signals

    persistence = Persistence(scheduler, _settings)
    persistence.start()
    _current = persistence
    handle_signals(persistence)


@_guarded
def _after_intake(persistence, *_args, **_kwargs):
    persistence.tick()


@_guarded
def _after_pull(persistence, received, *_args, **_kwargs):
    if received is not None:
        persistence.poll(received)


@_guarded
def _after_split(_persistence, work_and_control, *_args, **_kwargs):
    """With attention data parallelism the first rank's control messages go to all, but a command of ours to those that
    share a tree, as requests do."""
    from sglang_persist.engine.runtime import PersistCommand

    work, control = work_and_control
    work += [message for message in control if isinstance(message, PersistCommand)]
    control[:] = [message for message in control if not isinstance(message, PersistCommand)]


@_guarded
def _after_insert(persistence, result, _cache, params, *_args, **_kwargs):
    persistence.inserted(result, len(params.key))


@_guarded
def _after_shutdown(persistence, _result, scheduler, *_args, **_kwargs):
    if not _is_pipeline(scheduler):
        persistence.shutdown()


@_guarded
def _shutdown(persistence):
    persistence.shutdown()


def _is_pipeline(scheduler) -> bool:
    return getattr(getattr(scheduler, "pp_group", None), "world_size", 1) > 1


def _then_leave(_result, scheduler, *_args, **_kwargs):
    global _leaving
    _leaving = scheduler


def _before_pull(*_args, **_kwargs):
    """The loop went on past its end. By now the next stage of a pipeline has been sent the word to stop. Once it has
    taken it, all stages save at the same time, and leave."""
    if _leaving is not None:
        try:
            if work := getattr(_leaving, "send_req_work", None):
                _leaving._pp_commit_comm_work(work)
        except Exception:
            logger.exception("the next stage of the pipeline did not take the word to stop")
        if _is_pipeline(_leaving):
            _shutdown()
        raise LoopEnds


@_guarded
def _after_flush(persistence, flushed, *_args, **_kwargs):
    if flushed:
        persistence.flushed()


@_guarded
def _before_weights(persistence, *_args, **_kwargs):
    """Before, because an update that fails or raises may have changed half of them."""
    persistence.weights_changed()


@_guarded
def _before_check(persistence, _manager, recv_req, **_kwargs):
    if recv_req.action not in _READS_WEIGHTS:
        persistence.weights_changed()


@_guarded
def _before_release(persistence, _manager, recv_req, **_kwargs):
    if not recv_req.tags or KV_MEMORY in recv_req.tags:
        persistence.pause()
    # Weights whose memory is given away come back as anything, unless SGLang keeps a copy.
    args = persistence.scheduler.server_args
    lost = args.enable_memory_saver and not args.enable_weights_cpu_backup
    if lost and (not recv_req.tags or WEIGHTS_MEMORY in recv_req.tags):
        persistence.weights_changed()


@_guarded
def _after_resume(persistence, _result, manager, *_args, **_kwargs):
    if KV_MEMORY not in manager.offload_tags:
        persistence.resume()


@_guarded
def _after_state(persistence, output, *_args, **_kwargs):
    output.internal_state["persist"] = persistence.status()


def _after_dispatcher(_result, scheduler, *_args, **_kwargs):
    global _dispatching
    try:
        from sglang.utils import TypeBasedDispatcher

        from sglang_persist.engine.runtime import PersistCommand

        scheduler._request_dispatcher += TypeBasedDispatcher([(PersistCommand, _act)])
        _dispatching = True
    except Exception:
        logger.exception("persistence cannot start")


def _act(command):
    if _current is not None:
        _current.on_command(command)


@_guarded
def _after_handlers(persistence, handlers, *_args, **_kwargs):
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

    def validate(_key, _value):
        if reason := persistence.why_no_snapshot():
            raise UpdateRejected(f"persistence is off: {reason}")

    handlers["persist_snapshot"] = _UpdateHandler(validate, lambda _key, _value: persistence.request_snapshot())


SCHEDULER = (
    (_SCHEDULER + "run_event_loop", HookType.AROUND, _run_event_loop),
    (_SCHEDULER + "init_request_dispatcher", HookType.AFTER, _after_dispatcher),
    (_SCHEDULER + "process_input_requests", HookType.AFTER, _after_intake),
    (_SCHEDULER + "handle_shutdown", HookType.AFTER, _after_shutdown),
    (_SCHEDULER + "handle_shutdown", HookType.AFTER, _then_leave),
    (_SCHEDULER + "flush_cache", HookType.AFTER, _after_flush),
    ("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert", HookType.AFTER, _after_insert),
    (_PARTS + "request_receiver.SchedulerRequestReceiver._pull_raw_reqs", HookType.BEFORE, _before_pull),
    (_PARTS + "request_receiver.SchedulerRequestReceiver._pull_raw_reqs", HookType.AFTER, _after_pull),
    (_PARTS + "request_receiver.SchedulerRequestReceiver._split_work_and_control_reqs", HookType.AFTER, _after_split),
    (_PARTS + "internal_state.SchedulerInternalStateController.get_internal_state", HookType.AFTER, _after_state),
    (_PARTS + "internal_state.SchedulerInternalStateController._update_handlers", HookType.AFTER, _after_handlers),
    (_WEIGHTS + "update_weights_from_disk", HookType.BEFORE, _before_weights),
    (_WEIGHTS + "update_weights_from_distributed", HookType.BEFORE, _before_weights),
    (_WEIGHTS + "update_weights_from_tensor", HookType.BEFORE, _before_weights),
    (_WEIGHTS + "update_weights_from_ipc", HookType.BEFORE, _before_weights),
    # Between these two, weights may be written past SGLang, by remote memory access.
    (_WEIGHTS + "begin_weight_update", HookType.BEFORE, _before_weights),
    (_WEIGHTS + "end_weight_update", HookType.BEFORE, _before_weights),
    (_WEIGHTS + "check_weights", HookType.BEFORE, _before_check),
    (_WEIGHTS + "release_memory_occupation", HookType.BEFORE, _before_release),
    (_WEIGHTS + "resume_memory_occupation", HookType.AFTER, _after_resume),
)


def install(hooks, settings: Settings | None) -> bool:
    """Register a list of hooks, all or none. False, after one line, where a target is not there."""
    global _settings
    _settings = settings
    for target, _, _ in hooks:
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError, ValueError) as error:
            logger.warning("persistence is off: hook_missing (%s: %s)", target, error)
            return False
    for target, kind, function in hooks:
        HookRegistry.register(target, function, kind)
    return True
