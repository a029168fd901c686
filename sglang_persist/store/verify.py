"""Checks every byte below a store's root, and says what is wrong where. Reads only; safe beside a running server.

Without `deep` every checksum is compared and every tree is resolved against its segments. `deep` decodes each record
as well, which zstd's own content checksums confirm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sglang_persist.errors import FormatError, PersistError, StoreError
from sglang_persist.fs import FileSystem
from sglang_persist.model import Manifest
from sglang_persist.plan.loading import resolve
from sglang_persist.store import names, shard, weights_cache

#: What a file system or a volume puts beside a store.
IGNORED = {"lost+found"}


@dataclass(frozen=True)
class Finding:
    path: str
    offset: int | None
    kind: str
    detail: str


@dataclass
class Report:
    segments: int = 0
    frames: int = 0
    bytes: int = 0
    leftovers: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, root: Path, path: Path, error: PersistError | str, kind: str | None = None) -> None:
        place = str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
        offset = error.offset if isinstance(error, FormatError) else None
        detail = error.detail if isinstance(error, FormatError) else str(error)
        kind = kind or (error.kind if isinstance(error, FormatError) else error.reason)
        self.findings.append(Finding(place, offset, kind, detail))


def verify(fs: FileSystem, root: Path, deep: bool = False, progress: Callable[[int], None] = lambda n: None) -> Report:
    """`progress` is called with the bytes that were checked since the last call."""
    report = Report()
    shards = names.shard_dirs(fs, root)
    _foreign(fs, root, shards, report)
    _root_files(fs, root, report, progress)
    for path in shards:
        _shard(fs, root, path, deep, report, progress)
    return report


def store_bytes(fs: FileSystem, root: Path) -> tuple[int, int]:
    """(files, bytes) below a store's root, files that are not ours included."""
    files = size = 0
    for entry in fs.list(root):
        if entry.is_dir and entry.name not in IGNORED:
            more, bytes_ = store_bytes(fs, root / entry.name)
            files, size = files + more, size + bytes_
        elif not entry.is_dir:
            files, size = files + 1, size + entry.bytes
    return files, size


def _foreign(fs: FileSystem, root: Path, shards: list[Path], report: Report) -> None:
    """Names that nothing of ours has: reported, never touched."""
    ours = set(shards) | {p.parent for p in shards} | {p.parent.parent for p in shards}

    def walk(at: Path) -> None:
        for entry in fs.list(at):
            path = at / entry.name
            if entry.is_dir and path in ours and path not in shards:
                walk(path)
            elif entry.name in IGNORED or path in ours or (entry.is_dir and _new_shard(path, root)):
                continue
            elif entry.is_dir and _could_be_ours(path, root):
                walk(path)
            elif at == root and not entry.is_dir and _is_root_file(entry.name):
                continue
            else:
                report.add(root, path, "not a file of this store", "foreign")

    walk(root)


def _is_root_file(name: str) -> bool:
    return bool(names.WEIGHTS.fullmatch(name) or names.TEMPORARY.fullmatch(name))


def _root_files(fs: FileSystem, root: Path, report: Report, progress) -> None:
    """Weight digests, and what an interrupted write of one left."""
    for entry in fs.list(root):
        if entry.is_dir or not _is_root_file(entry.name):
            continue
        if names.TEMPORARY.fullmatch(entry.name):
            report.leftovers += 1
            continue
        report.bytes += entry.bytes
        try:
            weights_cache.read(fs, root / entry.name)
        except (FormatError, StoreError) as error:
            if fs.exists(root / entry.name):
                report.add(root, root / entry.name, error)
        progress(entry.bytes)


def _new_shard(path: Path, root: Path) -> bool:
    """A shard that a server has made since we listed them."""
    return len(path.relative_to(root).parts) == 3 and bool(names.SHARD.fullmatch(path.name))


def _could_be_ours(path: Path, root: Path) -> bool:
    """A namespace's directory in which no shard was made yet."""
    depth = len(path.relative_to(root).parts)
    pattern = {1: names.MODEL, 2: names.CUT}.get(depth)
    return bool(pattern and pattern.fullmatch(path.name))


def _shard(fs: FileSystem, root: Path, path: Path, deep: bool, report: Report, progress) -> None:
    manifests: list[Manifest] = []
    named: dict[bytes, list[Manifest]] = {}
    entries = fs.list(path)
    for entry in entries:
        place = path / entry.name
        generation = names.generation_of(entry.name)
        if generation is not None:
            report.bytes += entry.bytes
            try:
                found = shard.load_manifest(fs, path, generation)
            except (FormatError, StoreError) as error:
                if fs.exists(place):  # else retired meanwhile
                    report.add(root, place, error)
            else:
                manifests.append(found)
                for ref in found.segments:
                    named.setdefault(ref.id, []).append(found)
            progress(entry.bytes)
        elif names.TEMPORARY.fullmatch(entry.name) or names.is_lock(entry.name):
            report.leftovers += 1
            if names.is_lock(entry.name) and entry.bytes:
                report.add(root, place, f"holds {entry.bytes} bytes; a lock is empty", "malformed")
        elif names.segment_of(entry.name) is None:
            report.add(root, place, "not a file of this store", "foreign")
    indexes = {}
    for entry in entries:
        segment_id = names.segment_of(entry.name)
        if segment_id is not None:
            report.leftovers += segment_id not in named
            index = _segment(fs, root, path, segment_id, named.get(segment_id, []), deep, report, progress)
            if index is not None:
                indexes[segment_id] = index
    for found in manifests:
        _tree(fs, root, path, found, indexes, report)


def _segment(fs, root: Path, path: Path, segment_id: bytes, named: list[Manifest], deep: bool, report, progress):
    place = path / names.segment(segment_id)
    report.segments += 1
    try:
        opened = shard.open_segment(fs, path, segment_id)
    except (FormatError, StoreError) as error:
        if fs.exists(place):
            report.add(root, place, error)
        return None
    index = opened.index
    report.bytes += index.file_bytes
    try:
        for record in range(index.records):
            report.frames += 1
            try:
                opened.load(record) if deep else opened.read(record)
            except FormatError as error:
                report.add(root, place, error)
            progress(int(index.stored[record]))
        progress(index.file_bytes - int(index.stored.sum()))
    except StoreError as error:
        report.add(root, place, error)
        return None
    finally:
        opened.close()
    for manifest in named:
        ref = next(r for r in manifest.segments if r.id == segment_id)
        if (ref.bytes, ref.digest, ref.records) != (index.file_bytes, index.index_digest, index.records):
            report.add(root, place, f"is not the segment that generation {manifest.generation} names", "mismatch")
            return None
    if index.namespace != (expected := names.namespace_id(named[0].identity) if named else index.namespace):
        report.add(root, place, f"belongs to namespace {index.namespace.hex()}, not {expected.hex()}", "mismatch")
        return None
    return index


def _tree(fs, root: Path, path: Path, manifest: Manifest, indexes, report: Report) -> None:
    place = path / names.manifest(manifest.generation)
    if not fs.exists(place):  # retired meanwhile, and its segments with it
        return
    missing = [ref for ref in manifest.segments if not fs.exists(path / names.segment(ref.id))]
    if missing and not fs.exists(place):  # retired between the two looks
        return
    for ref in missing:
        detail = f"generation {manifest.generation} names it, but it is not there"
        report.add(root, path / names.segment(ref.id), detail, "missing")
    refused = resolve(manifest, indexes).refused
    if refused and all(ref.id in indexes for ref in manifest.segments):
        detail = ", ".join(f"{count} nodes {reason}" for reason, count in refused.items())
        report.add(root, place, f"the tree does not fit its segments: {detail}", "mismatch")
