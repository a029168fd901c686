"""Runs save and restore over real trees and pools, as the runtime does, to their end."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import real

from sglang_persist import config
from sglang_persist.filling import RestoreResult
from sglang_persist.fs import REAL
from sglang_persist.keeper import Keeper, SaveRequest, Shape
from sglang_persist.restore import restore
from sglang_persist.save import SaveResult, save
from sglang_persist.store.home import Home

SHARD = "dp0-adp0-pp0-cp0-tp0"
# How full the machine is that runs the tests is not their subject.
SETTINGS = config.load({"SGLANG_PERSIST_MIN_FREE": "0"})


def settings(**changes):
    return replace(SETTINGS, **changes)


def home(root: Path, fs=REAL) -> Home:
    return Home(fs, root, real.IDENTITY, SHARD)


def keeper(e: real.Engine, at: Home, using=SETTINGS, shards=(SHARD,)) -> Keeper:
    return Keeper(at, Shape(real.IDENTITY, e.pages.pools, e.tree.page_tokens, shards), using)


class Counted:
    """An engine's pages, and how many records were read from them."""

    def __init__(self, pages):
        self._pages, self.records = pages, 0

    def __getattr__(self, name):
        return getattr(self._pages, name)

    def gather(self, pool, slots):
        self.records += 1
        return self._pages.gather(pool, slots)


class Job:
    """A snapshot under way."""

    def __init__(self, e: real.Engine, keeper: Keeper, request: SaveRequest):
        self.pages = Counted(e.pages)
        self._work = save(e.tree, self.pages, keeper, request)
        self.close = self._work.close

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._work)


def begin(e: real.Engine, at: Home, deadline=None, using=SETTINGS) -> Job:
    return Job(e, keeper(e, at, using), SaveRequest(at.next_generation(), "manual", deadline))


def advance(job: Job, records: int) -> None:
    """Run until so many records were read."""
    while job.pages.records < records:
        if waiting := next(job):
            waiting(5)


def finish(job) -> SaveResult:
    try:
        while True:
            waiting = next(job)
            if waiting is not None:
                waiting(5)
    except StopIteration as done:
        return done.value


def snapshot(e: real.Engine, at: Home, deadline=None, using=SETTINGS) -> SaveResult:
    return finish(begin(e, at, deadline, using))


def load(e: real.Engine, at: Home, timeout: float = 60, using=SETTINGS) -> RestoreResult:
    """What a start does: choose a generation and restore it. Leaves `at` as a writer would find it."""
    at.find()
    result = RestoreResult()
    if at.manifest is None:
        return result
    deadline = time.monotonic() + timeout
    restore(e.tree, e.pages, at, using, deadline, result, least_tokens=using.min_tokens or 0)
    return result


def restart(root: Path, held: int = 0, timeout: float = 60, using=SETTINGS, **kind):
    """(a new engine, its home, the result of restoring into it). `held` slots are taken first, to shift numbering."""
    e = real.engine(**kind)
    if held:
        e.allocator.alloc(held)
    at = home(root)
    return e, at, load(e, at, timeout, using)
