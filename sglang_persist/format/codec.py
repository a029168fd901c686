"""Lossless codecs of KV bytes: bytes in, bytes out. FORMAT.md section 4.

`ROT16` is the codec for 16-bit floats. Rotated left by one bit, a bfloat16 is its exponent byte followed by mantissa
and sign. Exponents carry about 2.7 bits of entropy and no repeats, so they go through zstd with parameters that find
next to no matches and leave Huffman coding to do the work (smaller and faster than any level); mantissas are noise and
stay as they are. For float16 the same cut takes five exponent and three mantissa bits. Figures: README, "Numbers".
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import zstandard

from sglang_persist.errors import Malformed
from sglang_persist.format import planes


class Codec(IntEnum):
    RAW = 0
    ZSTD = 1
    ROT16 = 2


_HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=1, hash_log=6, chain_log=6, search_log=1, min_match=7, window_log=17, target_length=0,
    write_content_size=1, write_checksum=1,
)  # fmt: skip
_PLAIN = zstandard.ZstdCompressionParameters.from_level(1, write_content_size=1, write_checksum=1)

# A compressor is not promised to be safe in two threads at once, and making one costs more than a small part does.
_local = threading.local()


def _tool(name: str, make):
    tool = getattr(_local, name, None)
    if tool is None:
        tool = make()
        setattr(_local, name, tool)
    return tool


def _compress(params_name: str, data) -> bytes:
    params = _HUFFMAN if params_name == "huffman" else _PLAIN
    return _tool(params_name, lambda: zstandard.ZstdCompressor(compression_params=params)).compress(data)


def choose(setting: str, dtype: str) -> Codec:
    """The codec for elements of `dtype` under the setting `auto`, `zstd` or `raw`."""
    if setting == "raw":
        return Codec.RAW
    if setting == "auto" and dtype in ("bfloat16", "float16"):
        return Codec.ROT16
    return Codec.ZSTD


def _scratch(name: str, dtype: str, size: int) -> np.ndarray:
    """Memory of this thread for what lies between, which is the same again and again: fresh memory is paid for page by
    page when it is first written to."""
    found = getattr(_local, name, None)
    if found is None or len(found) < size:
        found = np.empty(size, dtype)
        setattr(_local, name, found)
    return found[:size]


def encode(codec: Codec, raw: np.ndarray, out: np.ndarray) -> tuple[Codec, int, int]:
    """`raw` (uint8, contiguous) into the beginning of `out` (uint8, at least as long): (codec used, bytes of the
    leading zstd frame, bytes in all).

    Bytes that do not shrink stay raw, so that a store is never larger than what it holds.
    """
    if codec is Codec.ROT16 and raw.nbytes % 2 == 0:
        words = raw.view("<u2")
        exponents, rest = _scratch("exponents", "u1", words.size), _scratch("rest", "u1", words.size)
        split, _ = planes.kernels()
        split(words if words.flags.aligned else words.copy(), exponents, rest)
        frame = _compress("huffman", exponents)
        if len(frame) < exponents.nbytes:
            size = len(frame) + words.size
            out[: len(frame)] = np.frombuffer(frame, np.uint8)
            out[len(frame) : size] = rest
            return Codec.ROT16, len(frame), size
    elif codec is not Codec.RAW:
        frame = _compress("plain", raw)
        if len(frame) < raw.nbytes:
            out[: len(frame)] = np.frombuffer(frame, np.uint8)
            return Codec.ZSTD, len(frame), len(frame)
    out[: raw.nbytes] = raw
    return Codec.RAW, 0, raw.nbytes


def _inflate(frame, size: int) -> bytes:
    """The `size` bytes of one whole zstd frame. In one call, because only that tells a frame that ends before its
    content checksum, or bytes after it; its size is compared before anything is allocated."""
    decoder = _tool("decoder", zstandard.ZstdDecompressor)
    try:
        declared = zstandard.get_frame_parameters(frame)
        if declared.content_size != size or not declared.has_checksum:
            raise Malformed(f"a zstd frame does not declare the {size} bytes that its index does, and a checksum")
        return decoder.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Malformed(f"a zstd frame does not decode: {error}") from None


def decode(codec: int, frame_bytes: int, stored: memoryview, outs: Sequence[np.ndarray]) -> None:
    """`stored` into `outs` (uint8, contiguous, together of the declared size), one after the other. Raises Malformed;
    never writes past them."""
    size = sum(out.nbytes for out in outs)
    if codec == Codec.RAW:
        if len(stored) != size:
            raise Malformed(f"{len(stored)} raw bytes stand where {size} are declared")
        _spread(np.frombuffer(stored, np.uint8), outs)
    elif codec == Codec.ZSTD:
        _spread(np.frombuffer(_inflate(stored, size), np.uint8), outs)
    elif codec == Codec.ROT16:
        odd = any(out.nbytes % 2 for out in outs)
        if odd or frame_bytes > len(stored) or len(stored) - frame_bytes != size // 2:
            raise Malformed("the planes of a 16-bit part do not have equal length")
        exponents = np.frombuffer(_inflate(stored[:frame_bytes], size // 2), np.uint8)
        _, merge = planes.kernels()
        words = [out.view("<u2") for out in outs]
        targets = [w if w.flags.aligned else np.empty_like(w) for w in words]
        merge(exponents, np.frombuffer(stored[frame_bytes:], np.uint8), targets)
        for word, target in zip(words, targets, strict=True):
            if target is not word:
                word[:] = target
    else:
        raise Malformed(f"codec {codec} is not known")


def _spread(data: np.ndarray, outs: Sequence[np.ndarray]) -> None:
    at = 0
    for out in outs:
        out[:] = data[at : at + out.nbytes]
        at += out.nbytes


def pack(data: bytes) -> bytes:
    """An index or a manifest body as one standard zstd frame with its size and checksum inside."""
    return _compress("plain", data)


def unpack(frame: bytes, raw_bytes: int) -> bytes:
    """The inverse of `pack`; `raw_bytes` was bounded by the caller before anything is allocated here."""
    return _inflate(frame, raw_bytes)
