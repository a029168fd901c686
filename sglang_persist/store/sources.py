"""Where what a rank restores may come from: its own shard, other replicas, and other cuts of the same model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sglang_persist.errors import FormatError, StoreError
from sglang_persist.fs import FileSystem
from sglang_persist.model import Manifest
from sglang_persist.plan.loading import Fit
from sglang_persist.plan.topology import Rank, coordinates, fits, needed, unlike
from sglang_persist.store import attempts, names, shard
from sglang_persist.store.shard import Segment


@dataclass(frozen=True)
class Part:
    """One shard of a generation, and what of it a rank takes."""

    path: Path
    manifest: Manifest
    fits: tuple[Fit | None, ...]

    def open(self, fs: FileSystem, errors: list[str]) -> dict[bytes, Segment]:
        """Its segments; what cannot be opened is in `errors`."""
        namespace = names.namespace_id(self.manifest.identity)
        return shard.open_segments(fs, self.path, self.manifest.segments, namespace, errors)


@dataclass(frozen=True)
class Source:
    """A complete generation of another replica or cut: the shards that a rank takes its part from."""

    parts: tuple[Part, ...]

    @property
    def created(self) -> float:
        return max(part.manifest.created for part in self.parts)

    @property
    def replica(self) -> int:
        return names.replica(self.group)

    @property
    def group(self) -> str:
        return names.group(self.parts[0].path.name)

    @property
    def generation(self) -> int:
        return self.parts[0].manifest.generation

    @property
    def cut(self) -> Path:
        return self.parts[0].path.parent


def find(fs: FileSystem, own: Path, rank: Rank, replicas: int, alone: bool) -> list[Source]:
    """The newest complete generation of each replica of each cut that can be mapped, this rank's own apart; the newest
    one first. `own`: its shard's directory. Not `alone`, it has a generation of its own, and the other replicas of its
    cut are not looked at."""
    found = []
    for cut in fs.list(own.parent.parent):
        if not cut.is_dir or not names.CUT.fullmatch(cut.name):
            continue
        path = own.parent.parent / cut.name
        try:
            shards = [e.name for e in fs.list(path) if e.is_dir and names.SHARD.fullmatch(e.name)]
        except StoreError:
            continue
        for lead in _leads(shards):
            number = names.replica(lead)
            if path == own.parent and (names.group(lead) == names.group(own.name) or (number < replicas and not alone)):
                continue
            if source := _source(fs, path / lead, rank):
                found.append(source)
    return sorted(found, key=lambda s: s.created, reverse=True)


def _leads(shards: Iterable[str]) -> list[str]:
    """The first shard of each group that shares a tree."""
    leads: dict[str, str] = {}
    for name in sorted(shards, key=lambda s: tuple(coordinates(s).values())):
        leads.setdefault(names.group(name), name)
    return list(leads.values())


def _source(fs: FileSystem, lead: Path, rank: Rank) -> Source | None:
    try:
        newest, _ = shard.newest(fs, lead, deadly=attempts.deadly(fs, lead))
        if newest is None or unlike(rank.cut, newest.identity.cut):
            return None
        if newest.page_tokens != rank.page_tokens and any(pool.unit != "slot" for pool in newest.pools):
            return None
        parts = {}
        for name in newest.shards:
            m = newest if name == lead.name else shard.load_manifest(
                fs, lead.parent / name, newest.generation, nodes=False
            )  # fmt: skip
            parts[name] = fits(rank, m.identity.cut, name, m.pools)
        chosen = needed(rank, list(parts.items()))
        if chosen is None:
            return None
        manifests = {
            name: newest if name == lead.name else shard.load_manifest(fs, lead.parent / name, newest.generation)
            for name in chosen
        }
        return Source(tuple(Part(lead.parent / name, m, chosen[name]) for name, m in manifests.items()))
    except (FormatError, StoreError):
        return None


def choose(own: Manifest | None, own_cut: Path, rank: Rank, replicas: int, found: list[Source]) -> list[Source]:
    """What to restore beside `own`, or, where the first of it is of another cut, instead: the newest cut decides.

    Of a cut, a replica takes what the replica of its number left, and what those left that are no more; one that finds
    nothing so takes what the others have. What those left that are no more is taken once: it is in `own` then, as far
    as there was room for it.
    """
    if own is not None:
        found = [s for s in found if s.cut != own_cut or own.taken.get(s.group, -1) < s.generation]
    newest = {s.cut: s.created for s in reversed(found)}
    if own is not None:
        newest[own_cut] = own.created
    if not newest:
        return []
    cut = max(newest, key=lambda c: (newest[c], c == own_cut))
    of_cut = [s for s in found if s.cut == cut]
    mine = [s for s in of_cut if names.heir(s.group, replicas) == names.replica(rank.shard)]
    if cut == own_cut and own is not None:
        return mine
    return mine or of_cut
