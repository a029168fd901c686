"""16-bit words to two planes of bytes and back: what `Codec.ROT16` does to words before and after zstd.

A word's bits 14 to 7 go to one plane, its bit 15 and its bits 6 to 0 to the other. Numba, which comes with the engine,
makes one pass over memory of what takes NumPy four to five, and threads wait for each other's interpreter lock between
one pass and the next: with it, coding is 1.2 to 1.7 times as fast. Both give the same bytes.

A record's words belong to as many places as the pool has buffers (60 in a model of 30 layers). They are merged in one
compiled call: with one for each, threads spent a sixth of a restore waiting for the interpreter lock between them.
Merged words go past the caches ("non-temporal" stores): a pool is much larger than these, and a plain store first reads
what it is about to overwrite, so that merging into a pool took twice as long.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np

_one_compiles = threading.Lock()

#: Words that are merged at once: a vector register of AVX2, two of others.
_WIDE = 16


def kernels() -> tuple[Callable, Callable]:
    """`split(words, exponents, rest)` and its inverse `merge(exponents, rest, outs)`, on contiguous and aligned arrays
    of equal length; `outs` (uint16) have it together, one after the other.

    Compiled on first use, in half a second with the import of Numba: whoever must not wait for that calls this early.
    Where that fails, NumPy does it.
    """
    with _one_compiles:
        return _kernels()


@functools.cache
def _kernels() -> tuple[Callable, Callable]:
    try:
        return _compiled()
    except Exception:  # it is not there, or cannot compile here
        return split, merge


def _compiled() -> tuple[Callable, Callable]:
    import numba
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    def array(dtype, readonly: bool):
        return types.Array(dtype, 1, "C", readonly=readonly)

    @numba.njit(types.void(array(types.uint16, True), array(types.uint8, False), array(types.uint8, False)), nogil=True)
    def compiled_split(words, exponents, rest):
        for i in range(words.size):
            word = words[i]
            exponents[i] = (word >> 7) & 0xFF
            rest[i] = (word & 0x7F) | ((word >> 8) & 0x80)

    @intrinsic
    def words_at(typing, address):
        def pointer(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(types.uint16)(address), pointer

    @intrinsic
    def merge_wide(typing, exponents, rest, out):
        """_WIDE bytes at each of two addresses, merged and stored at a third, which they divide."""
        narrow, wide = (ir.VectorType(ir.IntType(bits), _WIDE) for bits in (8, 16))

        def store(context, builder, signature, args):
            def load(address):
                return builder.zext(builder.load(builder.inttoptr(address, narrow.as_pointer()), align=1), wide)

            def all_of(number):
                return ir.Constant(wide, [number] * _WIDE)

            high, low = load(args[0]), load(args[1])
            sign = builder.shl(builder.and_(low, all_of(0x80)), all_of(8))
            words = builder.or_(builder.and_(low, all_of(0x7F)), sign)
            words = builder.or_(words, builder.shl(high, all_of(7)))
            stored = builder.store(words, builder.inttoptr(args[2], wide.as_pointer()), align=2 * _WIDE)
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), store

    @intrinsic
    def stored(typing):
        """Nobody sees what comes after this before all that was stored."""

        def fence(context, builder, signature, args):
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), fence

    @numba.njit(nogil=True)
    def merge_few(exponents, rest, words, first, last):
        for i in range(first, last):
            low = np.uint16(rest[i])
            words[i] = (low & 0x7F) | ((low & 0x80) << 8) | (np.uint16(exponents[i]) << 7)

    numbers = array(types.int64, True)

    @numba.njit(types.void(array(types.uint8, True), array(types.uint8, True), numbers, numbers), nogil=True)
    def merge_to(exponents, rest, addresses, sizes):
        at = 0
        for k in range(addresses.size):
            size, address = sizes[k], addresses[k]
            words = numba.carray(words_at(address), (size,), np.uint16)
            high, lows = exponents[at : at + size], rest[at : at + size]
            first = min(size, -address % (2 * _WIDE) // 2)
            last = first + (size - first) // _WIDE * _WIDE
            merge_few(high, lows, words, 0, first)
            for i in range(first, last, _WIDE):
                merge_wide(high.ctypes.data + i, lows.ctypes.data + i, address + 2 * i)
            merge_few(high, lows, words, last, size)
            at += size
        stored()

    def compiled_merge(exponents, rest, outs):
        sizes = np.array([out.size for out in outs], np.int64)
        # Compiled code is given bare addresses, and would write anywhere.
        for out in outs:
            if out.dtype != np.uint16 or not out.flags.carray:
                raise ValueError("words are merged into aligned, contiguous arrays of 16 bits")
        if not len(exponents) == len(rest) == sizes.sum():
            raise ValueError(f"{len(exponents)} and {len(rest)} bytes for {sizes.sum()} words")
        merge_to(exponents, rest, np.array([out.ctypes.data for out in outs], np.int64), sizes)

    return compiled_split, compiled_merge


def split(words: np.ndarray, exponents: np.ndarray, rest: np.ndarray) -> None:
    exponents[:] = words >> 7 & 0xFF
    rest[:] = words & 0x7F | words >> 8 & 0x80


def merge(exponents: np.ndarray, rest: np.ndarray, outs: Sequence[np.ndarray]) -> None:
    at = 0
    for words in outs:
        end = at + words.size
        # Sign extension puts the sign into bit 15 and the mantissa into bits 0-6 in one step.
        np.copyto(words.view(np.int16), rest[at:end].view(np.int8))
        words &= 0x807F
        words |= np.left_shift(exponents[at:end], 7, dtype=np.uint16)
        at = end
