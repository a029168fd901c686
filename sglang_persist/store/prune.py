"""What may go: chosen first, then deleted, manifests before the segments they name.

A generation goes as a whole, on all its ranks. A file that cannot be read, or deleted, is reported and kept, and holds
up nothing else. Where a server writes (its lock is held) its newest generation and whatever it may be about to name
stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sglang_persist.errors import ChecksumMismatch, FormatError, NotOurs, StoreBusy, StoreError, Truncated
from sglang_persist.fs import FileSystem, Lock
from sglang_persist.model import Manifest
from sglang_persist.store import names, shard

#: Nobody will ever read a manifest with one of these, so the segments that only it names are of no use.
DAMAGED = (ChecksumMismatch, NotOurs, Truncated)


@dataclass
class PrunePlan:
    """Files to delete, in this order; `kept` says what could not be judged."""

    manifests: list[Path] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    bytes: dict[Path, int] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    #: Of a file, the manifests that name it and must be gone first.
    after: dict[Path, list[Path]] = field(default_factory=dict)

    @property
    def freed_bytes(self) -> int:
        return sum(self.bytes[p] for p in [*self.manifests, *self.files])


@dataclass
class _Shard:
    path: Path
    busy: bool
    sizes: dict[str, int]
    manifests: dict[int, Manifest]
    unreadable: list[str]
    #: There is a manifest that cannot be read now, here or by this version, though it may be sound: its segments stay.
    unsure: bool = False
    #: Generations that the file system did not let us read: it may yet.
    unread: set[int] = field(default_factory=set)

    def drop(
        self, generations: Iterable[int], plan: PrunePlan, leftovers: bool, unnamed: Collection[bytes] = ()
    ) -> None:
        """Add to the plan: these generations' manifests, and the segments that only they name."""
        going = {g for g in generations if g in self.manifests}
        kept = {ref.id for g, m in self.manifests.items() if g not in going for ref in m.segments}
        named = {ref.id for g in going for ref in self.manifests[g].segments}.union(unnamed)
        # One that cannot be read for a moment keeps its segments, unless it is older than all that stay: then it would
        # go as well, and one that cannot be read for ever must not hold on to everybody's.
        stay = [g for g in self.manifests if g not in going]
        waiting = bool(stay) and any(g > min(stay) for g in self.unread)
        for generation in sorted(going):
            plan.manifests.append(self.path / names.manifest(generation))
            for ref in self.manifests[generation].segments:
                plan.after.setdefault(self.path / names.segment(ref.id), []).append(plan.manifests[-1])
        for name in self.sizes:
            segment = names.segment_of(name)
            gone = not waiting and (segment in named or (leftovers and not self.unsure))
            attempt = names.restoring_of(name)
            left = names.TEMPORARY.fullmatch(name) or (attempt is not None and attempt not in self.manifests)
            if (segment is not None and segment not in kept and gone) or (leftovers and left):
                plan.files.append(self.path / name)
        plan.kept += self.unreadable
        plan.bytes.update({self.path / n: size for n, size in self.sizes.items()})


def _read(fs: FileSystem, path: Path, busy: bool) -> _Shard:
    found = _Shard(path, busy, {e.name: e.bytes for e in fs.list(path) if not e.is_dir}, {}, [])
    for generation in shard.generations(fs, path):
        try:
            found.manifests[generation] = _load(fs, path, generation)
        except (FormatError, StoreError) as error:
            if fs.exists(path / names.manifest(generation)):
                found.unreadable.append(str(error))
                found.unsure |= not isinstance(error, DAMAGED)
                if isinstance(error, StoreError):
                    found.unread.add(generation)
    return found


def _load(fs: FileSystem, path: Path, generation: int) -> Manifest:
    try:
        return shard.load_manifest(fs, path, generation, nodes=False)
    except StoreError:  # once more: what it names must not go for a moment's failure
        return shard.load_manifest(fs, path, generation, nodes=False)


def _surplus(fs: FileSystem, one: _Shard, keep: int, fullest_since: float = math.inf) -> list[int]:
    """Generations older than the `keep` newest complete ones, but for the fullest one made since then.

    The last is what a restart goes back to after the tree was emptied, flushed or restored in part.
    """
    if keep == 0:
        return list(one.manifests)
    tokens = {g: shard.fullness(fs, one.path, m) for g, m in one.manifests.items()}
    complete = [g for g in sorted(tokens, reverse=True) if tokens[g] is not None]
    if len(complete) < keep:
        return []
    recent = [g for g in complete if one.manifests[g].created >= fullest_since]
    fullest = max(recent, key=lambda g: (tokens[g], g), default=None)
    return [g for g in one.manifests if g < complete[keep - 1] and g != fullest]


def plan_shard(
    fs: FileSystem, path: Path, keep: int, fullest_since: float = math.inf, unnamed: Collection[bytes] = ()
) -> PrunePlan:
    """What the writer of a shard (the holder of its lock) retires after a commit. `unnamed`: segments that were named
    by a manifest which was replaced since."""
    plan = PrunePlan()
    one = _read(fs, path, busy=False)
    one.drop(_surplus(fs, one, keep, fullest_since), plan, True, unnamed)
    return plan


def named(fs: FileSystem, path: Path, but: int) -> set[bytes]:
    """The segments that any generation names, this one excepted."""
    return {ref.id for g, m in _read(fs, path, busy=True).manifests.items() if g != but for ref in m.segments}


def plan_leftovers(fs: FileSystem, path: Path) -> PrunePlan:
    """Temporary files and segments that no manifest names, for the holder of the lock."""
    plan = PrunePlan()
    _read(fs, path, busy=False).drop((), plan, leftovers=True)
    return plan


def plan_store(
    fs: FileSystem, root: Path, keep: int, max_bytes: int | None = None, free_bytes: int = 0,
    fullest_since: float = math.inf, ours: Callable[[Path], bool] = lambda _path: False,
) -> tuple[PrunePlan, list[Lock]]:  # fmt: skip
    """Keep the newest complete generations of every shard; beyond that, oldest first until `max_bytes` are left and
    `free_bytes` are gained.

    `ours`: whether a shard is one of the server that asks. All its ranks count as writing: one that has not begun to
    must find its lock free and its newest generation there. Returns the locks of all shards that no server holds, to be
    released once the plan was executed.
    """
    locks: list[Lock] = []
    shards: list[_Shard] = []
    problems: list[str] = []
    for path in names.shard_dirs(fs, root):
        try:
            shards.append(_read(fs, path, ours(path) or _busy(fs, path, locks)))
        except StoreError as error:
            problems.append(str(error))
    going = {s.path: set(_surplus(fs, s, keep, fullest_since)) for s in shards}
    current = {s.path: _newest(fs, s) for s in shards if s.busy}

    def build() -> PrunePlan:
        plan = PrunePlan(kept=list(problems))
        for s in shards:
            s.drop(going[s.path], plan, leftovers=not s.busy)
        return plan

    plan = build()
    if max_bytes is None and not free_bytes:
        return plan, locks
    total = sum(sum(s.sizes.values()) for s in shards)
    order = sorted(
        {
            (m.created, s.path.parent, names.group(s.path.name), g)
            for s in shards
            for g, m in s.manifests.items()
            if g not in current.get(s.path, ())
        },
        key=lambda entry: (entry[0], str(entry[1]), *entry[2:]),
    )
    for _, cut, group, generation in order:
        if plan.freed_bytes >= free_bytes and (max_bytes is None or total - plan.freed_bytes <= max_bytes):
            break
        for s in shards:
            same = s.path.parent == cut and names.group(s.path.name) == group
            if same and generation in s.manifests and generation not in current.get(s.path, ()):
                going[s.path].add(generation)
        plan = build()
    return plan, locks


def _newest(fs: FileSystem, one: _Shard) -> set[int]:
    """The newest complete generation and those above it, which other ranks may be about to complete."""
    out: set[int] = set()
    for generation in sorted(one.manifests, reverse=True):
        out.add(generation)
        if shard.is_complete(fs, one.path, one.manifests[generation]):
            break
    return out


def _busy(fs: FileSystem, path: Path, locks: list[Lock]) -> bool:
    try:
        locks.append(fs.lock(path / names.LOCK))
    except StoreBusy:
        return True
    return False


def execute(fs: FileSystem, plan: PrunePlan) -> tuple[list[Path], list[str]]:
    """Delete what the plan names: (deleted, why others were not)."""
    deleted: list[Path] = []
    errors: list[str] = []
    held: set[Path] = set()  # manifests that may still be there after a power cut
    for batch in (plan.manifests, plan.files):
        for path in batch:
            if held.intersection(plan.after.get(path, ())):
                continue
            try:
                fs.remove(path)
            except StoreError as error:
                errors.append(str(error))
                held.add(path)
            else:
                deleted.append(path)
        for directory in dict.fromkeys(p.parent for p in batch):
            try:
                fs.sync_dir(directory)
            except StoreError as error:
                errors.append(str(error))
                held.update(p for p in batch if p.parent == directory)
    return deleted, errors
