"""In the process that starts the others: give the schedulers time for their last snapshot, however it is stopped.

Stock SGLang kills schedulers 15 s after it asked them to stop, and at once on Ctrl-C and in `Engine.shutdown`. Here
they are asked first (SIGUSR2) and waited for, never longer than the shutdown timeout, whatever state they are in. On
SIGTERM they are told at once (SIGUSR1), so that little is left to be saved once the last request is done.
"""

from __future__ import annotations

import contextlib
import signal

import psutil
from sglang.srt.plugins.hook_registry import HookType

from sglang_persist import config
from sglang_persist.log import logger


def _run_http_server(original, *args, **kwargs):
    timeout = config.load().shutdown_timeout
    _raise_grace(timeout)
    try:
        return original(*args, **kwargs)
    finally:
        manager = kwargs.get("tokenizer_manager") or (args[1] if len(args) > 1 else None)
        _stop_schedulers(timeout, manager)


def _raise_grace(timeout: float) -> None:
    """How long SGLang waits for schedulers that it has asked to stop."""
    try:
        from sglang.srt.managers import tokenizer_manager

        stock = tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS
        tokenizer_manager._SCHEDULER_EXIT_TIMEOUT_SECS = max(stock, timeout)
    except Exception:
        logger.exception("persistence: the time that schedulers are given to stop could not be raised")


def _before_drain(*_args, **_kwargs):
    """SIGTERM: requests that run are waited for, and meanwhile what is new can be saved."""
    try:
        _tell(_schedulers(), signal.SIGUSR1)
    except Exception:
        logger.exception("persistence: the schedulers were not told that the server stops")


def _schedulers() -> list[psutil.Process]:
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    return collect_scheduler_processes()


def _tell(schedulers: list[psutil.Process], what: signal.Signals) -> None:
    for process in schedulers:
        with contextlib.suppress(psutil.Error):  # gone since
            process.send_signal(what)


def _engine_shutdown(original, engine):
    if not getattr(engine, "_attached", False):
        _stop_schedulers(config.load().shutdown_timeout, getattr(engine, "tokenizer_manager", None))
    return original(engine)


def _stop_schedulers(timeout: float, tokenizer_manager) -> None:
    try:
        schedulers = _schedulers()
        if not schedulers:
            return
        # From here on their end is expected, not a crash to be reported.
        watchdog = getattr(tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        _tell(schedulers, signal.SIGUSR2)
        _, alive = psutil.wait_procs(schedulers, timeout)
        if alive:
            logger.warning("schedulers %s did not end within %s s", [p.pid for p in alive], timeout)
    except Exception:
        logger.exception("persistence: the schedulers could not be asked to stop")


def _launch_subprocesses(original, *args, **kwargs):
    config.load()  # raises SettingError: `register` may not, its exceptions are swallowed
    return original(*args, **kwargs)


LAUNCHER = (
    ("sglang.srt.entrypoints.http_server._setup_and_run_http_server", HookType.AROUND, _run_http_server),
    ("sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler", HookType.BEFORE, _before_drain),
    ("sglang.srt.entrypoints.engine.Engine.shutdown", HookType.AROUND, _engine_shutdown),
)
BAD_SETTING = (("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", HookType.AROUND, _launch_subprocesses),)
