"""A server's life in short: prompts that share a beginning come in, old ones are evicted, snapshots are taken.

And a file system that weighs the whole store after every change."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import flow
import numpy as np
import real

from sglang_persist import config
from sglang_persist.fs import FileSystem, NewFile


def weigh(root: Path) -> dict[str, int]:
    """Every file below a directory, temporary ones as well, and its bytes."""
    found = {}
    for at, _, files in os.walk(root):
        for name in files:
            try:
                found[os.path.join(at, name)] = os.lstat(os.path.join(at, name)).st_size
            except FileNotFoundError:  # another thread has just moved it
                continue
    return found


class _WeighedFile(NewFile):
    def __init__(self, fs: WeighingFs, path: Path):
        super().__init__(path)
        self._fs = fs

    def write(self, data) -> None:
        super().write(data)
        self._fs.weigh()


class WeighingFs(FileSystem):
    """`most`: the largest that the store ever was; `largest`: the largest that any segment ever was."""

    def __init__(self, root: Path, disk: int | None = None, reserve: int = 0):
        self.root, self.disk, self.reserve = root, disk, reserve
        #: Bytes that other programs have on the disk.
        self.others = 0
        self.most = self.largest = 0
        self._lock = threading.Lock()

    def weigh(self) -> None:
        with self._lock:
            found = weigh(self.root)
            self.most = max(self.most, sum(found.values()))
            self.largest = max([self.largest, *(size for name, size in found.items() if "seg-" in name)])

    def forget(self) -> None:
        self.most = self.largest = 0
        self.weigh()

    def create(self, path: Path) -> NewFile:
        file = _WeighedFile(self, path)
        self.weigh()
        return file

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.weigh()

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.weigh()

    def space(self, path: Path) -> tuple[int, int]:
        if self.disk is None:
            return super().space(path)
        return max(0, self.disk - self.others - sum(weigh(self.root).values())), self.disk


def budget(size: int, **changes):
    return flow.settings(max_bytes=config.Size(bytes=size), **changes)


class Churn:
    """An engine that is served prompts: `prompts` are all of them, the most recently used last."""

    def __init__(self, seed: int, head: int = 48, length: int = 112, **kind):
        self.rng = np.random.default_rng(seed)
        self.engine = real.engine(**kind)
        self.head = real.random_tokens(self.rng, head)
        self.length = length
        self.prompts: list[list[int]] = []

    def serve(self, tokens: list[int] | None = None) -> list[int]:
        """A request: room is made as the engine does, then its path is in the tree."""
        if tokens is None:
            tokens = self.head + real.random_tokens(self.rng, self.length)
        e = self.engine
        if (missing := len(tokens) - e.allocator.available_size()) > 0:
            e.evict(missing)
        e.put(tokens)
        self.prompts = [p for p in self.prompts if p != tokens] + [tokens]
        return tokens

    def key(self, tokens: list[int], e: real.Engine | None = None):
        e = e or self.engine
        return real.RadixKey(real.array("q", tokens), None, is_bigram=e.tree.bigram).page_aligned(e.cache.page_size)

    def held(self, e: real.Engine) -> list[int]:
        """Of each prompt, how much of it an engine has."""
        keys = [self.key(p, e) for p in self.prompts]
        return [e.match(k) for k in keys]
