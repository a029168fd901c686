"""The entry point that SGLang loads in each of its processes. Cheap to import; idle until a directory is set.

Without a directory only two hooks are installed, in the launcher: one adds the flags, one reads them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading

from sglang_persist import config
from sglang_persist.errors import SettingError
from sglang_persist.log import logger


def register() -> None:
    from setproctitle import getproctitle

    title = getproctitle()
    if title.startswith(("sglang::detokenizer", "sglang::data_parallel_controller")):
        if _directory_given():
            # Signals to the whole group are for the launcher: were one of these to die, it would kill the schedulers.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    if multiprocessing.parent_process() is not None:
        # A scheduler; or a process of the user's, who makes an Engine in it.
        if "sglang.srt.entrypoints.engine" in sys.modules:
            _install_launcher()
        if _directory_given():
            _install_scheduler()
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    arguments = "sglang.srt.server_args.ServerArgs."
    HookRegistry.register(arguments + "add_cli_args", _add_flags, HookType.AFTER)
    HookRegistry.register(arguments + "from_cli_args", _read_flags, HookType.AROUND)
    _install_launcher()


def _directory_given() -> bool:
    try:
        return config.load().dir is not None
    except SettingError as error:
        logger.warning("persistence is off: %s", error)
        return False


def _install_scheduler() -> None:
    from sglang_persist.engine import hooks

    installed = hooks.install(hooks.SCHEDULER, config.load())
    main = threading.current_thread() is threading.main_thread()
    if installed and main and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        # The launcher's word that it drains means nothing before the loop begins, and must not end this process.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _install_launcher() -> bool:
    """Hooks of the launching process, if persistence is on. A bad setting is raised when the engine is launched."""
    if not any(flag.variable in os.environ for flag in config.BY_KEY.values()):
        return False
    from sglang_persist.engine import hooks, launcher

    try:
        settings = config.load()
    except SettingError:
        return hooks.install(launcher.BAD_SETTING, None)
    return settings.dir is not None and hooks.install(launcher.LAUNCHER, settings)


def _add_flags(_result, parser) -> None:
    group = parser.add_argument_group("persistence (sglang-persist)")
    for flag in config.BY_KEY.values():
        default = f" Default: {flag.default}." if flag.default else ""
        text = f"{flag.meaning}{default} ({flag.variable})".replace("%", "%%")
        group.add_argument(flag.name, metavar=flag.metavar.replace("%", ""), type=str, default=None, help=text)


def _read_flags(original, cls, args):
    """Flags become environment variables, which the engine's other processes inherit."""
    for key, flag in config.BY_KEY.items():
        value = getattr(args, f"persist_{key}", None)
        if value is not None:
            os.environ[flag.variable] = value
    try:
        settings = config.load()
    except SettingError as error:
        print(f"{os.path.basename(sys.argv[0])}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    if settings.dir is not None:
        from sglang.srt.plugins.hook_registry import HookRegistry

        from sglang_persist.engine import hooks, launcher

        if launcher.LAUNCHER[0][0] not in HookRegistry._hooks:
            hooks.install(launcher.LAUNCHER, settings)
            HookRegistry.apply_hooks()
    return original(cls, args)
