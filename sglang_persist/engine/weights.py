"""A digest of a checkpoint's weights: by content, not by name or date.

Up to 8 GiB every byte of every weight file counts. Above that, for safetensors: the whole header (names, types, shapes,
offsets) and the first, middle and last 64 KiB of every tensor; for other files 64 KiB at each 16 MiB. What changes only
elsewhere in a checkpoint above 8 GiB is not seen. Safetensors layout: 8 bytes of header length, the header as JSON with
`data_offsets` relative to its end (huggingface/safetensors, README, "Format").

The digest is cached in the store. It is taken from there only where each file is the very one that was read, by path,
inode, size, mtime and ctime: a program can put an mtime back, a ctime it cannot.
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from sglang_persist.bounded import within
from sglang_persist.errors import Unsupported
from sglang_persist.format.weights import WeightDigest, WeightFile
from sglang_persist.fs import FileSystem, ReadFile
from sglang_persist.store import weights_cache

WHOLE_BYTES = 8 << 30
SAMPLE = 64 << 10
STRIDE = 16 << 20
MAX_HEADER = 100 << 20  # what the safetensors library itself accepts
_CHUNK = 16 << 20
_KINDS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
#: Seconds. A file that changed so shortly before it was read may change again within the same tick of its clock.
_SETTLED = 2
_ATTEMPTS = 3
#: Seconds to wait for the cached digest.
CACHE_WAIT = 5.0


def weight_files(fs: FileSystem, path: Path, every_kind: bool = False) -> list[Path]:
    """The files that hold the weights: all of the first kind that is there, as loaders choose by themselves; of every
    kind where the loader was told which to take."""
    if path.is_file():
        return [path]
    names = [e.name for e in fs.list(path) if not e.is_dir]
    found: list[Path] = []
    for kind in _KINDS:
        if every_kind or not found:
            found += [path / n for n in names if n.endswith(kind)]
    if not found:
        raise Unsupported("weights_unknown", f"{path}: no weight files to identify the model by")
    return found


def identify(
    fs: FileSystem, path: Path, root: Path | None = None, every_kind: bool = False, whole_bytes: int = WHOLE_BYTES
) -> str:
    """Hex digest of the weights below `path`: from the cache in the store at `root` where no file has changed since,
    else by reading them. Raises Unsupported, also where the files change while they are read; StoreError."""
    checkpoint = str(path.resolve())
    rule = f"1 {'every' if every_kind else 'first'} {whole_bytes} {SAMPLE} {STRIDE}"
    for _ in range(_ATTEMPTS):
        began = time.time()
        files = _look(fs, path, every_kind)
        if root is not None:
            known = _bounded(partial(weights_cache.load, fs, root, checkpoint))
            if known and (known.rule, known.files) == (rule, files):
                return known.digest
        found = digest(fs, path, whole_bytes, every_kind)
        if _look(fs, path, every_kind) == files:
            settled = (began - _SETTLED) * 1e9
            if root is not None and all(max(f.mtime_ns, f.ctime_ns) < settled for f in files):
                _bounded(partial(weights_cache.save, fs, root, WeightDigest(checkpoint, rule, files, found)))
            return found
    raise Unsupported("weights_unknown", f"{path}: the weight files change while they are read")


def _bounded(work):
    """The store may lie on a file system that does not answer, other than the weights, which were just loaded."""
    try:
        return within(CACHE_WAIT, work)
    except TimeoutError:
        return None


def _look(fs: FileSystem, path: Path, every_kind: bool) -> tuple[WeightFile, ...]:
    out = []
    for file in weight_files(fs, path, every_kind):
        real = file.resolve()
        at = fs.stat(real)
        out.append(WeightFile(str(real), at.inode, at.bytes, at.mtime_ns, at.ctime_ns))
    return tuple(out)


def digest(fs: FileSystem, path: Path, whole_bytes: int = WHOLE_BYTES, every_kind: bool = False) -> str:
    """Hex digest of the weights below `path` (a directory or one file), read now. Raises Unsupported, StoreError."""
    total = hashlib.sha256()
    files = weight_files(fs, path, every_kind)
    opened: list[ReadFile] = []
    try:
        # Hub caches hold links to the files: what they point to is what is read.
        opened += (fs.open(f.resolve()) for f in files)
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
    chunk = np.empty(_CHUNK, np.uint8)
    for at in range(0, file.bytes, _CHUNK):
        state.update(chunk[: file.read_into(at, chunk)])


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
