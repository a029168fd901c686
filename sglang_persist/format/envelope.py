"""Checked msgpack bodies, shared by segment indexes, manifests and weight digests: a zstd frame with length and digest
outside it. Also the files that are one such body behind one fixed header."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import xxhash

from sglang_persist.errors import ChecksumMismatch, LimitExceeded, Malformed, NewerFormat, NotOurs, Truncated
from sglang_persist.format import codec, limits
from sglang_persist.model import Buffer, Pool, Space

# Of a file that is one body: magic, major, minor, required features, body stored bytes, body decoded bytes, body
# digest; then the checksum.
HEADER = struct.Struct("<8sHHIQQ16s")
CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = HEADER.size + CHECKSUM.size


def digest64(*chunks, seed: int = 0) -> int:
    state = xxhash.xxh3_64(seed=seed)
    for chunk in chunks:
        state.update(chunk)
    return state.intdigest()


def digest128(data) -> bytes:
    return xxhash.xxh3_128_digest(data)


def seal(body: dict[str, Any]) -> tuple[bytes, int, bytes]:
    """A body as (stored bytes, decoded size, xxh3-128 of the stored bytes)."""
    raw = msgpack.packb(body, use_bin_type=True, unicode_errors="surrogatepass")
    stored = codec.pack(raw)
    return stored, len(raw), digest128(stored)


def check_sizes(stored_bytes: int, raw_bytes: int) -> None:
    if max(stored_bytes, raw_bytes) > limits.MAX_INDEX_BYTES or raw_bytes > stored_bytes * limits.MAX_RATIO:
        raise LimitExceeded(f"{stored_bytes} stored bytes declare {raw_bytes} decoded ones")


def unseal(stored: bytes, raw_bytes: int, digest: bytes) -> dict[str, Any]:
    """The body. Raises FormatError; sizes are bounded here before anything of that size is allocated."""
    check_sizes(len(stored), raw_bytes)
    if digest128(stored) != digest:
        raise ChecksumMismatch("the body does not match its digest")
    raw = codec.unpack(stored, raw_bytes)
    _check_objects(raw)
    try:
        body = msgpack.unpackb(raw, raw=False, strict_map_key=True, max_ext_len=0, unicode_errors="surrogatepass")
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise Malformed(f"the body is not msgpack: {type(error).__name__}") from None
    if not isinstance(body, dict):
        raise Malformed("the body is not a map")
    return body


def encode_file(magic: bytes, major: int, minor: int, body: dict[str, Any]) -> bytes:
    """A whole file: header and body."""
    stored, raw_bytes, digest = seal(body)
    head = HEADER.pack(magic, major, minor, 0, len(stored), raw_bytes, digest)
    return head + CHECKSUM.pack(digest64(head)) + stored


def decode_file(data: bytes, magic: bytes, major: int, kind: str) -> dict[str, Any]:
    """The body of a whole file; `kind` names it in errors. Raises FormatError."""
    if len(data) < HEADER_BYTES:
        raise Truncated(f"shorter than a {kind} header", offset=0)
    found_magic, found_major, _minor, required, stored, raw, digest = HEADER.unpack_from(data)
    if found_magic != magic:
        raise NotOurs(f"not a {kind}", offset=0)
    if CHECKSUM.unpack_from(data, HEADER.size)[0] != digest64(data[: HEADER.size]):
        raise ChecksumMismatch("the header does not match its checksum", offset=0)
    if found_major != major:
        raise NewerFormat(f"{kind} format {found_major}; this reader knows {major}", offset=8)
    if required:
        raise NewerFormat(f"required features {required:#x} are not known", offset=12)
    if len(data) != HEADER_BYTES + stored:
        raise Truncated(f"{len(data)} bytes, {HEADER_BYTES + stored} declared", offset=len(data))
    return unseal(data[HEADER_BYTES:], raw, digest)


#: By msgpack's first byte: bytes of the length that follows it; bytes of a number.
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_FIXED = {0xCA: 4, 0xCB: 8, **{tag: 1 << (tag & 3) for tag in range(0xCC, 0xD4)}}


def _check_objects(raw: bytes) -> None:
    """Refuse a body of more objects, or deeper ones, than any real body has. The msgpack library allocates what a list
    declares before it sees whether the elements are there, for each level, and 8 to 80 bytes for a byte of `raw`."""
    at, objects, open_ = 0, 1, [1]  # open_: elements to come on each level
    while open_:
        if not open_[-1]:
            open_.pop()
            continue
        open_[-1] -= 1
        if at >= len(raw):
            raise Malformed("the body ends early")
        tag = raw[at]
        at += 1
        children = length = 0
        if tag in _LENGTHS:
            width = _LENGTHS[tag]
            count = int.from_bytes(raw[at : at + width], "big")
            at += width
            if tag >= 0xDC:
                children = count * (2 if tag >= 0xDE else 1)
            else:
                length = count
        elif 0x80 <= tag < 0xA0:
            children = (tag & 15) * (2 if tag < 0x90 else 1)
        elif 0xA0 <= tag < 0xC0:
            length = tag & 31
        elif 0xC7 <= tag <= 0xC9 or 0xD4 <= tag <= 0xD8:
            raise Malformed("the body has an extension type")
        else:
            length = _FIXED.get(tag, 0)
        at += length
        objects += children
        if objects > limits.MAX_OBJECTS or len(open_) > limits.MAX_DEPTH:
            raise LimitExceeded(f"a body of {objects} or more objects, {len(open_)} deep")
        if children:
            open_.append(children)


def field(body: dict, name: str, kind):
    """A member of a map that must be there and of this type (a type, or a tuple of them)."""
    value = body.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise Malformed(f"field {name!r} is missing or of a wrong type")
    return value


def column(body: dict, name: str, dtype: str, count: int | None = None) -> np.ndarray:
    """A column: little-endian numbers in one msgpack bin, of exactly `count` elements where that is known."""
    data = field(body, name, bytes)
    width = np.dtype(dtype).itemsize
    if len(data) % width or (count is not None and len(data) != count * width):
        raise Malformed(f"column {name!r} has {len(data)} bytes")
    return np.frombuffer(data, dtype)


def same_length(*columns: np.ndarray) -> int:
    lengths = {len(c) for c in columns}
    if len(lengths) != 1:
        raise Malformed("columns of one table differ in length")
    return lengths.pop()


def encode_space(space) -> list:
    return [space.extra_key, space.cache_salt, space.bigram]


def decode_spaces(body: dict):
    out = []
    for entry in field(body, "spaces", list):
        if (
            not isinstance(entry, list)
            or len(entry) != 3
            or not all(e is None or isinstance(e, str) for e in entry[:2])
            or not isinstance(entry[2], bool)
        ):
            raise Malformed("a space is not [text or nil, text or nil, bool]")
        out.append(Space(*entry))
    if len(out) > limits.MAX_SPACES:
        raise LimitExceeded(f"{len(out)} spaces")
    return tuple(out)


def encode_pools(pools) -> list:
    return [
        {
            "name": p.name,
            "unit": p.unit,
            "buffers": [[b.name, b.dtype, list(b.row_shape), b.row_bytes] for b in p.buffers],
        }
        for p in pools
    ]


def decode_pools(body: dict):
    out = []
    entries = field(body, "pools", list)
    if not 1 <= len(entries) <= limits.MAX_POOLS:
        raise LimitExceeded(f"{len(entries)} pools")
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("unit") not in ("slot", "page", "state"):
            raise Malformed("a pool has no known unit")
        buffers = []
        for b in field(entry, "buffers", list):
            if (
                not isinstance(b, list)
                or len(b) != 4
                or not isinstance(b[0], str)
                or not isinstance(b[1], str)
                or not isinstance(b[2], list)
                or not all(isinstance(n, int) and n >= 0 for n in b[2])
                or not isinstance(b[3], int)
                or not 0 < b[3] <= limits.MAX_RECORD_BYTES
            ):
                raise Malformed("a buffer is not [name, dtype, shape, bytes]")
            buffers.append(Buffer(b[0], b[1], tuple(b[2]), b[3]))
        if not 1 <= len(buffers) <= limits.MAX_BUFFERS:
            raise LimitExceeded(f"{len(buffers)} buffers in a pool")
        out.append(Pool(field(entry, "name", str), entry["unit"], tuple(buffers)))
    return tuple(out)
