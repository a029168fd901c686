"""Threads that work for a snapshot while the engine serves, and stand back where both want the same core."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

#: On the scale of `nice`: a third of the weight of a thread that was left alone.
NICENESS = 5


def stand_back() -> None:
    """Lower the calling thread's priority. Linux keeps one for each thread; elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def workers(threads: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, threads), thread_name_prefix=name, initializer=stand_back)
