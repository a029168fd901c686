"""A digest of a checkpoint's weights: by content, not by name or date.

Up to 8 GiB every byte of every weight file counts. Above that, for safetensors: the whole header (names, types, shapes,
offsets) and the first, middle and last 64 KiB of every tensor; for other files 64 KiB at each 16 MiB. What changes only
elsewhere in a checkpoint above 8 GiB is not seen. Safetensors layout: 8 bytes of header length, the header as JSON with
`data_offsets` relative to its end (huggingface/safetensors, README, "Format").
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import xxhash

from sglang_persist.errors import Unsupported
from sglang_persist.fs import FileSystem, ReadFile

WHOLE_BYTES = 8 << 30
SAMPLE = 64 << 10
STRIDE = 16 << 20
MAX_HEADER = 100 << 20  # what the safetensors library itself accepts
_CHUNK = 16 << 20
_KINDS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weight_files(fs: FileSystem, path: Path) -> list[Path]:
    """The files that hold the weights: all of the first kind that is there, as loaders choose."""
    if path.is_file():
        return [path]
    names = [e.name for e in fs.list(path) if not e.is_dir]
    for kind in _KINDS:
        found = [path / n for n in names if n.endswith(kind)]
        if found:
            return found
    raise Unsupported("weights_unknown", f"{path}: no weight files to identify the model by")


def digest(fs: FileSystem, path: Path, whole_bytes: int = WHOLE_BYTES) -> str:
    """Hex digest of the weights below `path` (a directory or one file). Raises Unsupported, StoreError."""
    total = hashlib.sha256()
    files = weight_files(fs, path)
    # Hub caches hold links to the files: what they point to is what is read.
    opened = [fs.open(f.resolve()) for f in files]
    try:
        whole = sum(f.bytes for f in opened) <= whole_bytes
        for name, file in zip(files, opened, strict=True):
            state = xxhash.xxh3_128()
            if whole:
                _all(file, state)
            elif name.suffix == ".safetensors":
                _tensors(file, state)
            else:
                _strides(file, state)
            total.update(f"{file.bytes}:{state.hexdigest()};".encode())
    finally:
        for file in opened:
            file.close()
    return f"{'whole' if whole else 'sampled'}:{total.hexdigest()}"


def _all(file: ReadFile, state) -> None:
    for at in range(0, file.bytes, _CHUNK):
        state.update(file.read(at, _CHUNK))


def _strides(file: ReadFile, state) -> None:
    for at in range(0, file.bytes, STRIDE):
        state.update(file.read(at, SAMPLE))
    state.update(file.read(max(0, file.bytes - SAMPLE), SAMPLE))


def _tensors(file: ReadFile, state) -> None:
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(MAX_HEADER, file.bytes):
        _strides(file, state)
        return
    header = file.read(8, length)
    state.update(header)
    try:
        spans = sorted(t["data_offsets"] for name, t in json.loads(header).items() if name != "__metadata__")
        spans = [(8 + length + int(low), 8 + length + int(high)) for low, high in spans]
    except (ValueError, TypeError, KeyError, AttributeError):
        _strides(file, state)
        return
    for low, high in spans:
        for at in (low, max(low, (low + high - SAMPLE) // 2), max(low, high - SAMPLE)):
            state.update(file.read(at, min(SAMPLE, high - at)))
