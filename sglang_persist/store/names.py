"""The names below a store's root. FORMAT.md section 1. No name is ever taken from inside a file.

<root>/<architecture>-<16 hex of the model digest>/<16 hex of the cut digest>/<shard>/
    gen-<generation>.kvm   seg-<segment id>.kvs   tmp-*   LOCK   restoring-<generation>-<8 hex>
<root>/weights-<16 hex of the checkpoint's path>.kvw   tmp-*
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from sglang_persist.format.weights import path_digest
from sglang_persist.model import Identity

MODEL = re.compile(r"[A-Za-z0-9._-]{1,64}-[0-9a-f]{16}")
CUT = re.compile(r"[0-9a-f]{16}")
SHARD = re.compile(r"dp[0-9]+(?:-[a-z]+[0-9]+)+")
MANIFEST = re.compile(r"gen-([0-9]{10})\.kvm")
SEGMENT = re.compile(r"seg-([0-9a-f]{32})\.kvs")
WEIGHTS = re.compile(r"weights-[0-9a-f]{16}\.kvw")
TEMPORARY = re.compile(r"tmp-.+")
RESTORING = re.compile(r"restoring-([0-9]{10})-[0-9a-f]{8}")
LOCK = "LOCK"


def digest(fields: dict) -> bytes:
    """SHA-256 of the fields as JSON with sorted keys and no spaces."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()


def namespace_id(identity: Identity) -> bytes:
    """The 16 bytes that every segment header carries."""
    return hashlib.sha256(digest(identity.model) + digest(identity.cut)).digest()[:16]


def model_dir(identity: Identity) -> str:
    """The architecture makes the name readable; it is part of the digest, so it never makes two names for one model."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", str(identity.model.get("architecture", "model")))[:64] or "model"
    return f"{slug}-{digest(identity.model).hex()[:16]}"


def cut_dir(identity: Identity) -> str:
    return digest(identity.cut).hex()[:16]


def namespace(identity: Identity) -> str:
    return f"{model_dir(identity)}/{cut_dir(identity)}"


def manifest(generation: int) -> str:
    return f"gen-{generation:010d}.kvm"


def segment(segment_id: bytes) -> str:
    return f"seg-{segment_id.hex()}.kvs"


def restoring(generation: int, unique: bytes) -> str:
    """An empty file that is there, and locked, while a process restores a generation."""
    return f"restoring-{generation:010d}-{unique.hex()}"


def restoring_of(name: str) -> int | None:
    match = RESTORING.fullmatch(name)
    return int(match[1]) if match else None


def is_lock(name: str) -> bool:
    """Files that are empty: their names say everything."""
    return name == LOCK or bool(RESTORING.fullmatch(name))


def weights(checkpoint: str) -> str:
    """The file that holds the weight digest of a checkpoint, by the checkpoint's resolved path."""
    return f"weights-{path_digest(checkpoint)}.kvw"


def generation_of(name: str) -> int | None:
    match = MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


def segment_of(name: str) -> bytes | None:
    match = SEGMENT.fullmatch(name)
    return bytes.fromhex(match[1]) if match else None


def replica(shard: str) -> int:
    """The DP replica that the name of a shard, or of a group of them, begins with."""
    return int(shard.split("-", 1)[0].removeprefix("dp"))


def heir(shard: str, replicas: int) -> int:
    """The replica that looks after a shard where there are so many: its own, or, where that is no more, another."""
    return replica(shard) % replicas


def group(shard: str) -> str:
    """What the shards of ranks that share a tree have in common in their names."""
    return "-".join(shard.split("-")[:2])


def shard_dirs(fs, root: Path) -> list[Path]:
    """Every <model>/<cut>/<shard> directory below a root. Other names are left alone."""
    found = []
    for model in fs.list(root):
        if model.is_dir and MODEL.fullmatch(model.name):
            for cut in fs.list(root / model.name):
                if cut.is_dir and CUT.fullmatch(cut.name):
                    at = root / model.name / cut.name
                    found += [at / s.name for s in fs.list(at) if s.is_dir and SHARD.fullmatch(s.name)]
    return found
