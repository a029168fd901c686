"""Waiting for what a file system may never answer."""

from __future__ import annotations

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
