"""One rank's place in the store while the server runs: what is stored, what is known of the tree, who may write."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from pathlib import Path

from sglang_persist.format.segment import SegmentIndex
from sglang_persist.fs import FileSystem, Lock
from sglang_persist.log import logger
from sglang_persist.model import Identity, Manifest
from sglang_persist.plan.saving import Settled
from sglang_persist.plan.topology import Rank
from sglang_persist.plan.tree import KnownNodes
from sglang_persist.store import attempts, names, prune, shard, sources
from sglang_persist.store.shard import Segment
from sglang_persist.store.sources import Source
from sglang_persist.workers import workers

KEEP = 2
#: Seconds for which a generation that is fuller than the newest ones is kept.
RECENT = 24 * 3600


class Home:
    """What changes the store runs on one thread, through `run`, one after the other: also when the snapshot that asked
    for it was given up meanwhile. The scheduler's thread reads the rest between the steps of its own snapshot."""

    def __init__(self, fs: FileSystem, root: Path, identity: Identity, shard_name: str):
        self.fs, self.root, self.identity = fs, root, identity
        self.path = root / names.model_dir(identity) / names.cut_dir(identity) / shard_name
        self.namespace = names.namespace_id(identity)
        self.manifest: Manifest | None = None
        #: A complete generation with more in it than the newest one, if there is one.
        self.fuller: Manifest | None = None
        #: What is restored beside it: other replicas' generations, or, instead of it, another cut's.
        self.sources: list[Source] = []
        #: What of other replicas the tree was restored from, as a manifest says it.
        self.taken: Mapping[str, int] = {}
        self.segments: dict[bytes, SegmentIndex] = {}
        self.known = KnownNodes()
        self._lock: Lock | None = None
        self._thread = workers(1, "persist-store")

    def run(self, work: Callable[[], object]) -> Future:
        """Do this after everything that was asked for before."""
        return self._thread.submit(work)

    @property
    def generation(self) -> int:
        return self.manifest.generation if self.manifest else 0

    def find(self, at_most: float = math.inf) -> list[Exception]:
        """Choose the newest complete generation that verifies, and a fuller one beside it; returns why newer ones were
        passed over. Passed over is also what processes died of while they restored it, twice."""
        deadly = attempts.deadly(self.fs, self.path)
        self.manifest, passed = shard.newest(self.fs, self.path, at_most, deadly)
        self.fuller = shard.fullest(self.fs, self.path, self.manifest, deadly)
        return passed

    def look_around(self, rank: Rank, replicas: int) -> None:
        """Choose what to restore of what other replicas and other cuts of the model have left."""
        found = sources.find(self.fs, self.path, rank, replicas, self.manifest is None)
        self.sources = sources.choose(self.manifest, self.path.parent, rank, replicas, found)

    def took(self, replicas: int) -> None:
        """What was chosen has been restored, all of it that there was room for."""
        found = {s.group: s.generation for s in self.sources if s.cut == self.path.parent}
        if self.manifest is not None and not self.restores_another_cut:
            found = {**self.manifest.taken, **found}
        # Of one that is there again, generations may count from the beginning.
        self.taken = {group: number for group, number in found.items() if names.replica(group) >= replicas}

    @property
    def restores_another_cut(self) -> bool:
        return bool(self.sources) and self.sources[0].cut != self.path.parent

    def next_generation(self) -> int:
        """Above every generation that has a file here, readable or not: a name is never used twice."""
        return max([self.generation, *shard.generations(self.fs, self.path)]) + 1

    def become_writer(self) -> None:
        """Make the directory, take the lock, know all stored segments. Raises StoreBusy, StoreUnavailable."""
        if self._lock is not None:
            if self._lock.held():
                self.forget_missing()
                return
            # The directory was deleted underneath. Everything that is in the tree will be written again.
            self._release()
            self.manifest, self.fuller, self.segments, self.known = None, None, {}, KnownNodes()
        self.fs.make_dir(self.path)
        # A process that was killed may have made these names without making them durable.
        for directory in (self.root, self.path.parent.parent, self.path.parent):
            self.fs.sync_dir(directory)
        self.fs.writable(self.path)
        self._lock = self.fs.lock(self.path / names.LOCK)
        try:
            newest, _ = shard.newest(self.fs, self.path, deadly=attempts.deadly(self.fs, self.path))
            if newest and newest.generation != self.generation:
                # Another writer was here since we looked: build on what it wrote.
                self.manifest, self.fuller, self.segments, self.known = newest, None, {}, KnownNodes()
            # The other may also have cut that generation down in its place.
            self.forget_missing()
            # What a restore has just opened is known already.
            for segment in self.open_segments([], only_unknown=True).values():
                segment.close()
            self.sweep()
        except BaseException:
            self._release()  # whoever tries again starts from the beginning
            raise

    def forget_missing(self) -> None:
        """Segments that were deleted behind our back: what they held counts as not stored, and is written again."""
        there = {names.segment_of(entry.name): entry.bytes for entry in self.fs.list(self.path)}
        missing = {i for i, index in self.segments.items() if there.get(i) != index.file_bytes}
        if missing:
            logger.warning("%s: %d segments are gone", self.path, len(missing))
            self.segments = {i: index for i, index in self.segments.items() if i not in missing}
            self.known = self.known.without(missing)

    def open_segments(self, errors: list[str], only_unknown: bool = False) -> dict[bytes, Segment]:
        """Open the segments of the chosen generations and learn their indexes; what cannot be opened is in `errors`."""
        refs = {ref.id: ref for m in (self.fuller, self.manifest) if m is not None for ref in m.segments}
        wanted = [ref for ref in refs.values() if not (only_unknown and ref.id in self.segments)]
        opened = shard.open_segments(self.fs, self.path, wanted, self.namespace, errors)
        for name, found in opened.items():
            found.index.bad |= self.segments[name].bad if name in self.segments else set()
            self.segments[name] = found.index
        return opened

    def is_complete(self) -> bool:
        """Whether every rank has the newest generation: reads the other ranks' files."""
        return self.manifest is not None and shard.is_complete(self.fs, self.path, self.manifest)

    def is_behind(self) -> bool:
        """Whether another rank has a newer generation than this one's newest."""
        m, own = self.manifest, self.path
        others = [own.parent / name for name in m.shards if name != own.name] if m else []
        return any(shard.generations(self.fs, path)[:1] > [m.generation] for path in others if self.fs.exists(path))

    def is_current(self, settled: Settled) -> bool:
        """Whether the newest generation already says exactly this."""
        m = self.manifest
        if m is None or m.taken != self.taken:
            return False
        return list(m.spaces) == settled.spaces and settled.nodes == m.nodes

    def adopt(self, m: Manifest, known: KnownNodes, written: list[SegmentIndex]) -> None:
        """A generation was committed: it is what the next snapshot builds on."""
        everything = {**self.segments, **{i.id: i for i in written}}
        self.manifest, self.known, self.fuller = m, known, None
        self.segments = {ref.id: everything[ref.id] for ref in m.segments}

    def forget_tree(self) -> None:
        """The live tree was emptied: no node of it is known any more."""
        self.known, self.taken = KnownNodes(), {}

    def sweep(self) -> None:
        """Remove what interrupted writes left, as only the holder of the lock may."""
        prune.execute(self.fs, prune.plan_leftovers(self.fs, self.path))

    def retire(self, keep: int = KEEP, unnamed: Collection[bytes] = ()) -> None:
        """Remove generations beyond the newest complete ones and, beside at least two, the fullest recent one; then
        segments that none of those kept names: also those of `unnamed`, which a replaced manifest named."""
        since = time.time() - RECENT if keep >= KEEP else math.inf
        prune.execute(self.fs, prune.plan_shard(self.fs, self.path, keep, since, unnamed))

    def drop(self) -> None:
        """Remove everything that is stored here. Raises StoreBusy where another server writes."""
        self.become_writer()
        self.manifest, self.fuller, self.segments, self.known = None, None, {}, KnownNodes()
        prune.execute(self.fs, prune.plan_shard(self.fs, self.path, 0))

    def close(self, timeout: float | None = None) -> None:
        """Let go of the lock once what is under way is done; past the timeout the end of the process does that."""
        wait([self.run(self._release)], timeout)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
