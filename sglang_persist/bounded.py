"""Waiting for what a file system may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises on a thread of its own. TimeoutError after so many seconds; the thread is left."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="persist-wait")
    try:
        return thread.submit(work).result(seconds)
    finally:
        thread.shutdown(wait=False)


class Gate:
    """Work on other threads that writes to memory of ours goes through it, as a context. Once `close` has returned,
    none is at it, and none will be: what was entered later ends with TimeoutError. Only what ends by itself may be done
    inside, never a read of a file."""

    def __init__(self):
        self._state = threading.Condition()
        self._open, self._inside = True, 0

    def __enter__(self) -> None:
        with self._state:
            if not self._open:
                raise TimeoutError("too late")
            self._inside += 1

    def __exit__(self, *_) -> None:
        with self._state:
            self._inside -= 1
            self._state.notify_all()

    def close(self) -> None:
        with self._state:
            self._open = False
            self._state.wait_for(lambda: not self._inside)
