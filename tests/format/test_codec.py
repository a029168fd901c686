"""Codecs are lossless, never enlarge, and refuse a frame that is not exactly the one that was written."""

from __future__ import annotations

import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_persist.errors import Malformed
from sglang_persist.format import codec, planes
from sglang_persist.format.codec import Codec

SETTINGS = ("auto", "zstd", "raw")
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int8")


def roundtrip(wanted: Codec, raw: np.ndarray) -> tuple[Codec, int, bytes]:
    """Encode, decode between guard bytes, compare; returns (codec used, frame bytes, stored)."""
    used, frame_bytes, stored = encode(wanted, raw)
    assert len(stored) <= raw.nbytes
    assert frame_bytes == {Codec.RAW: 0, Codec.ZSTD: len(stored)}.get(used, frame_bytes)
    assert decode(used, frame_bytes, stored, raw.nbytes) == raw.tobytes()
    return used, frame_bytes, stored


def encode(wanted: Codec, raw: np.ndarray) -> tuple[Codec, int, bytes]:
    """Into an array that has no room to spare, and whose rest stays as it is."""
    whole = np.full(raw.nbytes + 5, 0xA5, np.uint8)
    used, frame_bytes, size = codec.encode(wanted, raw, whole[: raw.nbytes])
    assert (whole[max(size, raw.nbytes) :] == 0xA5).all()
    return used, frame_bytes, whole[:size].tobytes()


def decode(used: int, frame_bytes: int, stored: bytes, size: int) -> bytes:
    """Into the middle of an array whose rest must stay as it is, also where decoding fails: as one, and in pieces that
    do or do not lie on even addresses."""
    found = b""
    for first, cuts in ((13, []), (14, [0, size // 4 * 2]), (13, [2 if size > 2 else 0])):
        whole = np.full(size + 26, 0xA5, np.uint8)
        try:
            codec.decode(used, frame_bytes, memoryview(stored), np.split(whole[first : first + size], cuts))
        finally:
            assert (whole[:first] == 0xA5).all() and (whole[first + size :] == 0xA5).all()
        if cuts:
            assert whole[first : first + size].tobytes() == found
        found = whole[first : first + size].tobytes()
    return found


def halves(values) -> np.ndarray:
    return np.asarray(values, "<u2").view(np.uint8)


EVERY_PATTERN = halves(np.arange(1 << 16))
NANS = halves([(sign << 15) | 0x7F80 | payload for sign in (0, 1) for payload in range(128)] * 4)


@given(st.integers(0, 1 << 16), st.integers(0, 300))
def test_compiled_and_plain_planes_are_the_same(first, count):
    words = np.roll(EVERY_PATTERN.view("<u2"), first)[:count].copy()
    compiled, plain = planes.kernels(), (planes.split, planes.merge)
    assert compiled[0] is not planes.split
    found = []
    for split, merge in (compiled, plain):
        exponents, rest, again = np.zeros(count, "u1"), np.zeros(count, "u1"), np.zeros(count, "<u2")
        split(words, exponents, rest)
        merge(exponents, rest, np.split(again, sorted((first % (count + 1), count // 2))))
        assert (again == words).all()
        found.append((exponents.tobytes(), rest.tobytes()))
    assert found[0] == found[1]


def test_compiled_planes_write_nowhere_else():
    _, merge = planes.kernels()
    plane, out = np.zeros(8, "u1"), np.zeros(8, "<u2")
    short, read_only = out[:7], np.frombuffer(bytes(16), "<u2")
    shifted = np.zeros(17, "u1")[1:].view("<u2")
    signed, narrow = out.view("<i2"), out.view("u1")
    for outs in ([short], [out, out], [out[::2], out[::2]], [read_only], [shifted], [signed], [narrow], []):
        with pytest.raises(ValueError, match="words"):
            merge(plane, plane, outs)
    with pytest.raises(ValueError, match="words"):
        merge(plane, plane[:7], [out])
    merge(plane[:0], plane[:0], [])


def test_the_codec_works_without_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(planes, "_kernels", planes._kernels.__wrapped__)
    assert planes.kernels() == (planes.split, planes.merge)
    assert roundtrip(Codec.ROT16, EVERY_PATTERN)[0] is Codec.ROT16


@pytest.mark.parametrize("wanted", Codec)
@given(
    data=st.one_of(
        st.binary(max_size=300),
        st.builds(lambda unit, n: unit * n, st.binary(min_size=1, max_size=9), st.integers(1, 400)),
        st.builds(lambda seed, n: np.random.default_rng(seed).bytes(n), st.integers(0, 99), st.integers(0, 5000)),
    )
)
@example(data=b"")
@example(data=b"\0")
@example(data=b"\0" * 65537)
@example(data=EVERY_PATTERN.tobytes())
@example(data=NANS.tobytes())
def test_any_bytes_survive_any_codec(wanted, data):
    roundtrip(wanted, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_dtype_survives_every_setting(setting, dtype):
    rng = np.random.default_rng(1)
    for size in (2, 16, 4096, 4098):
        for raw in (np.zeros(size, np.uint8), rng.integers(0, 256, size).astype(np.uint8)):
            used, _, _ = roundtrip(codec.choose(setting, dtype), raw)
            assert setting != "raw" or used is Codec.RAW


def test_sixteen_bit_floats_get_their_own_codec_and_only_where_asked():
    assert {(s, d) for s in SETTINGS for d in DTYPES if codec.choose(s, d) is Codec.ROT16} == {
        ("auto", "bfloat16"),
        ("auto", "float16"),
    }
    assert all(codec.choose("raw", d) is Codec.RAW and codec.choose("zstd", d) is Codec.ZSTD for d in DTYPES)


def test_every_bit_pattern_of_16_bits_survives_rot16():
    used, _, _ = roundtrip(Codec.ROT16, EVERY_PATTERN)
    assert used is Codec.ROT16


def test_normal_floats_shrink_by_rot16_more_than_by_zstd():
    bits = np.random.default_rng(0).standard_normal(1 << 15).astype("<f4").view("<u4") >> 16
    raw = halves(bits.astype("<u2"))
    sizes = {wanted: len(roundtrip(wanted, raw)[2]) for wanted in (Codec.ROT16, Codec.ZSTD)}
    assert sizes[Codec.ROT16] < sizes[Codec.ZSTD] and sizes[Codec.ROT16] < 0.7 * raw.nbytes


def test_noise_is_stored_as_it_is():
    raw = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
    for wanted in Codec:
        assert roundtrip(wanted, raw) == (Codec.RAW, 0, raw.tobytes())


def test_an_odd_number_of_bytes_is_never_split_into_halves():
    used, _, _ = roundtrip(Codec.ROT16, np.zeros(4097, np.uint8))
    assert used is Codec.ZSTD


# Worked out by hand from FORMAT.md section 4 and RFC 8878. Values: 1.0 = 0x3F80 and -3.140625 = 0xC049 as bfloat16.
#   0x3F80 = 0 01111111 0000000   bits 14-7: 7F   bit 15, bits 6-0: 0 0000000 = 00
#   0xC049 = 1 10000000 1001001   bits 14-7: 80   bit 15, bits 6-0: 1 1001001 = C9
# Frame: magic, descriptor (single segment, checksum), content size 2, last block raw of 2 bytes, 7F 80, then the low
# 32 bits of XXH64 of 7F 80.
GOLDEN_VALUES = bytes.fromhex("803F 49C0")
GOLDEN_FRAME = bytes.fromhex("28B52FFD 24 02 110000 7F80 840E72DE")
GOLDEN_REST = bytes.fromhex("00 C9")


def test_rot16_of_a_vector_made_by_hand():
    stored = GOLDEN_FRAME + GOLDEN_REST
    assert decode(Codec.ROT16, len(GOLDEN_FRAME), stored, 4) == GOLDEN_VALUES
    used, frame_bytes, stored = encode(Codec.ROT16, np.frombuffer(GOLDEN_VALUES * 1000, np.uint8))
    assert used is Codec.ROT16
    assert zstandard.ZstdDecompressor().decompress(stored[:frame_bytes]) == bytes.fromhex("7F80") * 1000
    assert bytes(stored[frame_bytes:]) == GOLDEN_REST * 1000


FRAMES = [
    codec.pack(bytes(range(7)) * 100),
    codec.pack(np.random.default_rng(3).bytes(200)),
    codec.pack(bytes(range(7)) * 40_000),  # several blocks
    codec._compress("huffman", np.random.default_rng(3).integers(100, 110, 600).astype(np.uint8)),
]
CONTENTS = [zstandard.ZstdDecompressor().decompress(f) for f in FRAMES]
PAIRS = list(zip(FRAMES, CONTENTS, strict=True))
CASES = pytest.mark.parametrize(("frame", "content"), PAIRS, ids=["cyclic", "noise", "blocks", "huffman"])


@CASES
def test_frames_are_standard_and_say_their_size_and_checksum(frame, content):
    declared = zstandard.get_frame_parameters(frame)
    assert declared.content_size == len(content) and declared.has_checksum and not declared.dict_id
    assert codec.unpack(frame, len(content)) == content


@CASES
def test_a_flipped_bit_is_refused_or_changes_nothing(frame, content):
    """A bit of a frame's header may be without meaning (a larger window). No flip may yield other bytes."""
    refused = 0
    for bit in range(len(frame) * 8):
        bad = bytearray(frame)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            assert decode(Codec.ZSTD, 0, bytes(bad), len(content)) == content
        except Malformed:
            refused += 1
    assert refused >= len(frame) * 8 - 8


@CASES
def test_every_truncation_is_refused(frame, content):
    for end in range(len(frame)):
        with pytest.raises(Malformed):
            decode(Codec.ZSTD, 0, frame[:end], len(content))


@CASES
def test_anything_beside_one_frame_is_refused(frame, content):
    empty, skippable = codec.pack(b""), bytes.fromhex("502A4D18 04000000 61626364")
    for bad in (frame + b"\0", frame + frame, frame + empty, empty + frame, frame + skippable, skippable + frame):
        for size in (len(content), 2 * len(content)):
            with pytest.raises(Malformed):
                decode(Codec.ZSTD, 0, bad, size)


@CASES
def test_a_wrong_declared_size_is_refused(frame, content):
    for size in (0, 1, len(content) - 1, len(content) + 1, 2 * len(content)):
        with pytest.raises(Malformed):
            decode(Codec.ZSTD, 0, frame, size)
        with pytest.raises(Malformed):
            codec.unpack(frame, size)


def test_a_frame_without_size_or_checksum_is_refused():
    data = bytes(1000)
    for options in ({"write_checksum": False}, {"write_checksum": True, "write_content_size": False}):
        frame = zstandard.ZstdCompressor(**options).compress(data)
        with pytest.raises(Malformed, match="checksum"):
            decode(Codec.ZSTD, 0, frame, len(data))


def test_planes_of_unequal_length_are_refused():
    stored, frame_bytes = GOLDEN_FRAME + GOLDEN_REST, len(GOLDEN_FRAME)
    for bad, frame, size in (
        (stored + b"\0", frame_bytes, 4),
        (stored[:-1], frame_bytes, 4),
        (stored, frame_bytes + 1, 4),
        (stored, frame_bytes - 1, 4),
        (stored, 0, 4),
        (stored, len(stored) + 1, 4),
        (stored, frame_bytes, 6),
        (stored, frame_bytes, 2),
        (stored, frame_bytes, 5),
        (stored, frame_bytes, 0),
        (b"", 0, 4),
    ):
        with pytest.raises(Malformed):
            decode(Codec.ROT16, frame, bad, size)


def test_raw_bytes_of_another_length_are_refused():
    for size in (0, 3, 5):
        with pytest.raises(Malformed, match="raw bytes"):
            decode(Codec.RAW, 0, b"abcd", size)


def test_an_unknown_codec_is_refused():
    for unknown in (3, 255, -1):
        with pytest.raises(Malformed, match="not known"):
            decode(unknown, 0, b"abcd", 4)


@given(st.sampled_from([*Codec, 3]), st.integers(0, 60), st.binary(max_size=60), st.integers(0, 60))
def test_arbitrary_stored_bytes_end_in_malformed_only(used, frame_bytes, stored, size):
    try:
        out = decode(used, frame_bytes, stored, size)
    except Malformed:
        return
    assert used == Codec.RAW and out == stored


def test_a_frame_that_says_a_huge_size_allocates_nothing():
    frame = codec.pack(bytes(64 << 20))
    tracemalloc.start()
    with pytest.raises(Malformed):
        codec.unpack(frame, 1000)
    with pytest.raises(Malformed):
        decode(Codec.ZSTD, 0, frame, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_failure_leaves_the_next_decode_sound_in_every_thread():
    frame, content = FRAMES[2], CONTENTS[2]

    def work(i):
        with pytest.raises(Malformed):
            decode(Codec.ZSTD, 0, frame[: -1 - i % 50], len(content))
        rng = np.random.default_rng(i)
        for wanted in Codec:
            roundtrip(wanted, rng.integers(0, 20, 20_000).astype(np.uint8))
        return codec.unpack(frame, len(content)) == content

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))
