"""A few blocks of memory that are used again: of a fresh one each page is paid for when it is first written to."""

from __future__ import annotations

import threading

import numpy as np

MOST = 4


class Spare:
    """From any thread. Who takes a block may keep it; who gives one back must not look at it any more."""

    def __init__(self):
        self._blocks: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """`size` bytes, uint8."""
        with self._lock:
            for i, block in enumerate(self._blocks):
                if len(block) >= size:
                    return self._blocks.pop(i)[:size]
        return np.empty(size, np.uint8)

    def give(self, block: np.ndarray) -> None:
        whole = block if block.base is None else block.base
        with self._lock:
            self._blocks = [whole, *self._blocks[: MOST - 1]]
