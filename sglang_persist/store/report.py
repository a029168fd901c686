"""What `inspect` shows: a store's namespaces and generations, as plain dictionaries. Reads manifests only."""

from __future__ import annotations

from pathlib import Path

from sglang_persist.errors import FormatError, StoreError
from sglang_persist.format import manifest as manifest_format
from sglang_persist.fs import FileSystem
from sglang_persist.model import Manifest
from sglang_persist.store import names, shard, verify


def inspect(fs: FileSystem, root: Path) -> tuple[dict, list[str]]:
    """(the contract's `inspect` object, what could not be read)."""
    problems: list[str] = []
    files, size = verify.store_bytes(fs, root)
    groups: dict[Path, dict[tuple, list[Manifest]]] = {}
    for path in names.shard_dirs(fs, root):
        for generation in shard.generations(fs, path):
            try:
                found = shard.load_manifest(fs, path, generation)
            except (FormatError, StoreError) as error:
                if fs.exists(path / names.manifest(generation)):
                    problems.append(str(error))
                continue
            groups.setdefault(path.parent, {}).setdefault((generation, found.shards), []).append(found)
    namespaces = [_namespace(cut, found) for cut, found in sorted(groups.items())]
    store = {"store": str(root), "format": manifest_format.MAJOR, "files": files, "bytes": size}
    return {**store, "namespaces": namespaces}, problems


def _namespace(cut: Path, found: dict[tuple, list[Manifest]]) -> dict:
    newest = max((m for parts in found.values() for m in parts), key=lambda m: m.created)
    identity, topology = newest.identity, newest.identity.cut.get("topology")
    topology = topology if isinstance(topology, dict) else {}
    dp = {names.replica(m.shard) for parts in found.values() for m in parts}
    return {
        "name": f"{cut.parent.name}/{cut.name}",
        "model": identity.soft.get("model_path") or identity.model.get("architecture"),
        "fingerprint": names.digest(identity.model).hex(),
        "layout": {k: v for k, v in identity.cut.items() if k != "topology"},
        "topology": {
            "tp": topology.get("tp"), "pp": topology.get("pp"), "dp": len(dp), "page": newest.page_tokens,
        },
        "written_by": identity.soft,
        "generations": sorted(
            (_generation(parts, shards) for (_, shards), parts in found.items()),
            key=lambda g: (-g["id"], g["shards"]),
        ),
    }  # fmt: skip


def _generation(parts: list[Manifest], shards: tuple[str, ...]) -> dict:
    first = parts[0]
    return {
        "id": first.generation,
        "created": first.created,
        "reason": first.reason,
        "complete": len(parts) == len(shards),
        "nodes": len(first.nodes),
        "tokens": first.tokens,
        "raw_bytes": sum(m.raw_bytes for m in parts),
        "stored_bytes": sum(m.stored_bytes for m in parts),
        "segments": sum(len(m.segments) for m in parts),
        "left_out_tokens": first.left_out_tokens,
        "shards": list(shards),
    }
