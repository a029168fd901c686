"""Bytes and values that no encoder makes."""

from __future__ import annotations

import os

import hypothesis
from hypothesis import strategies as st

#: How many times more is tried than the suite does: `scripts/fuzz 50`.
SCALE = int(os.environ.get("FUZZ", "1"))


def examples(count: int):
    return hypothesis.settings(max_examples=count * SCALE)


TEXT = st.text(st.characters(), max_size=5)  # lone surrogates too
KEY = st.text(max_size=3) | st.binary(max_size=3)

#: Whatever msgpack can say.
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=40) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=5,
)

EXTREMES = st.sampled_from(
    [0, 1, 2, 3, 7, 8, 255, 65535, 65536, 65537, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
)

#: First bytes of msgpack objects of every family.
TAGS = (0, 1, 0x7F, 0x80, 0x81, 0x90, 0x91, 0xA0, 0xC0, 0xC1, 0xC3, 0xC6, 0xC7, 0xCB, 0xCF, 0xD4, 0xDB, 0xDD, 0xFF)


def mutate(draw, data: bytes) -> bytes:
    """A few edits that keep most of the bytes."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(out) - 1)))
        kind = draw(st.sampled_from(["flip", "set", "cut", "insert", "double"]))
        if kind == "flip" and out:
            out[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            out[at : at + 1] = bytes([draw(st.sampled_from(TAGS))])
        elif kind == "cut":
            del out[at : at + draw(st.integers(1, 9))]
        elif kind == "insert":
            out[at:at] = draw(st.binary(min_size=1, max_size=9))
        else:
            out[at:at] = out[at : at + draw(st.integers(1, 99))]
    return bytes(out)


def replace_inside(draw, at: list | dict) -> None:
    """Another value in place of one somewhere in nested lists and maps."""
    while at:
        key = draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
        if not isinstance(at[key], list | dict) or draw(st.integers(0, 3)) == 0:
            at[key] = draw(ANY | EXTREMES)
            return
        at = at[key]
