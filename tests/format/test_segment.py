"""A segment reads back to what was written, and one that differs from that by a bit is refused."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import builders
import numpy as np
import pytest
from builders import (
    edit_index,
    flip,
    index_body,
    load_records,
    put,
    read_segment,
    segment_parts,
    set_cell,
    with_header,
    with_index_bytes,
    with_trailer,
)
from fuzz import ANY, EXTREMES, TEXT, examples, mutate, replace_inside
from hypothesis import given
from hypothesis import strategies as st

from sglang_persist.errors import (
    ChecksumMismatch,
    FormatError,
    LimitExceeded,
    Malformed,
    NewerFormat,
    NotOurs,
    Truncated,
)
from sglang_persist.format import codec, envelope, limits, segment
from sglang_persist.format.codec import Codec
from sglang_persist.format.segment import RecordKey
from sglang_persist.model import HASH_BYTES, Buffer, Pool, Space
from sglang_persist.store import shard

STORE = builders.little_store()
#: Seven records of two pools in five spaces, wide tokens.
SEGMENT = list(STORE.segments.values())[1]
SMALL = builders.small_segment()
END = len(SMALL) - segment.TRAILER_BYTES

SPACE = st.builds(Space, st.none() | TEXT, st.none() | TEXT, st.booleans())
DTYPE = st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"])


@st.composite
def pools(draw):
    def pool(i):
        buffers = draw(st.lists(st.tuples(DTYPE, st.integers(1, 24)), min_size=1, max_size=4))
        unit = draw(st.sampled_from(["slot", "page"]))
        return Pool(f"p{i}", unit, tuple(Buffer(f"b{j}", d, (w,), w) for j, (d, w) in enumerate(buffers)))

    return tuple(pool(i) for i in range(draw(st.integers(1, 3))))


@st.composite
def segments(draw):
    """(pools, page tokens, [(key, KV)], codec setting)."""
    of, page_tokens = draw(pools()), draw(st.sampled_from([1, 3, 16]))
    spaces = draw(st.lists(SPACE, min_size=1, max_size=4))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    bound = draw(st.sampled_from([100, 2**31, 2**63]))
    records = []
    for _ in range(draw(st.integers(0, 5))):
        pool, space, pages = draw(st.integers(0, len(of) - 1)), draw(st.sampled_from(spaces)), draw(st.integers(1, 5))
        tokens = rng.integers(-bound, bound, pages * page_tokens + space.extra_tokens)
        start = draw(st.integers(0, 2**32 - 1))
        raw = rng.integers(0, draw(st.sampled_from([1, 5, 256])), of[pool].bytes(pages, page_tokens)).astype(np.uint8)
        key = RecordKey(pool, space, start, rng.bytes(HASH_BYTES), tokens, rng.bytes(pages * HASH_BYTES))
        records.append((key, raw))
    return of, page_tokens, records, draw(st.sampled_from(["auto", "zstd", "raw"]))


def prefix(hashes: bytes) -> bytes:
    """Of each page's hash what the index keeps."""
    return b"".join(hashes[i : i + segment.KEY_BYTES] for i in range(0, len(hashes), HASH_BYTES))


@given(segments())
def test_what_is_written_is_what_is_read(drawn):
    of, page_tokens, records, setting = drawn
    data = builders.build_segment(of, page_tokens, records, b"s" * 16, b"n" * 16, setting)
    index = read_segment(data)
    assert (index.id, index.namespace, index.file_bytes) == (b"s" * 16, b"n" * 16, len(data))
    assert (index.pools, index.page_tokens, index.records) == (of, page_tokens, len(records))
    loaded = load_records(data)
    for i, (key, raw) in enumerate(records):
        assert loaded[i] == raw.tobytes()
        assert (index.pool[i], index.start[i], index.pages[i]) == (key.pool, key.start, key.pages)
        assert index.spaces[index.space[i]] == key.space
        assert index.parent[i].tobytes() == key.parent_hash
        assert np.array_equal(index.page_tokens_of(i, 0, key.pages), key.tokens)
        low, high = index.first_page[i], index.first_page[i + 1]
        assert index.page_hash[low:high].tobytes() == prefix(key.hashes)
        assert index.raw_bytes(i) == raw.nbytes >= index.stored[i]


@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("setting", ["auto", "zstd", "raw"])
def test_a_little_store_holds_the_kv_of_every_node(page_tokens, setting):
    store = builders.little_store(page_tokens, setting)
    loaded = {k: load_records(data) for k, data in store.segments.items()}
    indexes = store.indexes
    seen = set()
    for stored, node in zip(store.manifest.nodes, store.nodes, strict=True):
        for p in stored.pieces:
            kv = builders.piece_kv(indexes[p.segment], p, loaded[p.segment][p.record])
            assert kv == node.kv(store.pools, p.pool, p.at, p.pages, page_tokens)
            seen.add((p.segment, p.record))
    assert len(seen) == sum(map(len, builders.RECORDS))


def test_copied_records_keep_everything_but_their_place():
    """As in a rewrite: every other record, into a segment of another id, without decoding."""
    old, data, header = read_segment(SEGMENT), b"", segment.encode_header(b"c" * 16, bytes(16))
    index, kept = segment.IndexBuilder(old.pools, old.page_tokens), range(0, old.records, 2)
    for ordinal, record in enumerate(kept):
        payload = shard.Segment(builders.BytesFile(SEGMENT), old).read(record)
        checksum = segment.record_checksum(b"c" * 16, ordinal, [payload])
        assert index.copy(old, record, len(header) + len(data), len(payload), checksum) == ordinal
        data += payload.tobytes()
    stored, raw_bytes, digest = envelope.seal(index.body())
    trailer = segment.Trailer(len(header) + len(data), len(stored), raw_bytes, index.records, digest)
    copied = header + data + stored + segment.encode_trailer(header, trailer)
    new, loaded = read_segment(copied), load_records(SEGMENT)
    assert load_records(copied) == [loaded[r] for r in kept]
    for ordinal, record in enumerate(kept):
        for name in ("pool", "start", "pages", "stored", "parent"):
            assert np.array_equal(getattr(new, name)[ordinal], getattr(old, name)[record]), name
        assert new.spaces[new.space[ordinal]] == old.spaces[old.space[record]]
        pages = int(old.pages[record])
        assert np.array_equal(new.page_tokens_of(ordinal, 0, pages), old.page_tokens_of(record, 0, pages))
        ours, theirs = int(new.first_page[ordinal]), int(old.first_page[record])
        assert np.array_equal(new.page_hash[ours : ours + pages], old.page_hash[theirs : theirs + pages])


def test_a_page_is_found_by_its_hash_with_its_record():
    index = read_segment(SEGMENT)
    of_page = np.repeat(index.pool, index.pages)
    for pool in range(len(index.pools)):
        hashes = index.page_hash[of_page == pool]
        found = index.find(hashes, pool)
        assert len(found)
        assert (index.page_hash[found] == hashes).all()
        assert (of_page[found] == pool).all()
    other = index.page_hash.copy()
    other[:, 1] ^= np.uint64(1)  # equal in its first half only
    assert (index.find(other) == -1).all()
    assert index.find(np.empty((0, 2), "<u8")).tolist() == []
    places = [index.record_of(page) for page in range(int(index.first_page[-1]))]
    assert places == [(r, i) for r in range(index.records) for i in range(int(index.pages[r]))]


def test_a_segment_without_records_reads_and_finds_nothing():
    index = read_segment(builders.build_segment(STORE.pools, 1, [], b"e" * 16))
    assert index.records == 0
    assert index.find(np.ones((3, 2), "<u8")).tolist() == [-1, -1, -1]


def test_narrow_tokens_take_four_bytes_and_wide_ones_eight():
    edges = {4: (-(2**31), 2**31 - 1), 8: (-(2**31) - 1, 2**31)}
    of = (Pool("kv", "slot", (Buffer("k", "uint8", (1,), 1),)),)
    for width, values in edges.items():
        for value in values:
            key = RecordKey(0, Space(), 0, bytes(32), np.array([value]), bytes(32))
            data = builders.build_segment(of, 1, [(key, np.zeros(1, np.uint8))], b"w" * 16)
            assert index_body(data)["token_width"] == width
            assert read_segment(data).tokens.tolist() == [value]


def test_minor_version_optional_features_and_unknown_members_are_ignored():
    data = with_header(SEGMENT, 10, struct.pack("<H", 9))
    data = with_header(data, 20, b"\xff\xff\xff\xff")
    data = edit_index(data, lambda body: body.update(added_later={"x": [1, 2.5, None]}))
    assert load_records(data) == load_records(SEGMENT)


# ------------------------------------------------------------------------------------------------ damage


def test_every_flipped_bit_is_refused():
    """Fixed parts and index refuse to open; a payload refuses to be read."""
    payload = range(segment.HEADER_BYTES * 8, segment_parts(SMALL)[3].index_offset * 8)
    assert len(payload) == 12 * 8
    for bit in range(len(SMALL) * 8):
        bad = flip(SMALL, bit)
        with pytest.raises(FormatError) as caught:
            read_segment(bad)
            assert bit in payload
            load_records(bad)
        assert bit not in payload or type(caught.value) is ChecksumMismatch


def test_every_truncation_is_refused():
    for end in range(len(SMALL)):
        with pytest.raises(FormatError):
            read_segment(SMALL[:end])


def test_anything_appended_is_refused():
    tail = SMALL[END:]
    for junk in (*(bytes(n) for n in range(1, 70)), b"\n", tail, SMALL, SMALL[segment.HEADER_BYTES :]):
        with pytest.raises(FormatError):
            read_segment(SMALL + junk)


def test_a_sound_trailer_of_another_file_is_refused():
    other = with_header(SMALL, 24, b"o" * 16)  # a segment of another id, equal otherwise
    assert load_records(SMALL) and read_segment(edit_index(other, lambda body: None)).id == b"o" * 16
    with pytest.raises(ChecksumMismatch) as caught:
        read_segment(SMALL[:END] + other[END:])
    assert caught.value.offset == END


def two_equal_records(first: bytes, segment_id: bytes) -> bytes:
    of = (Pool("kv", "slot", (Buffer("k", "uint8", (4,), 4),)),)
    key = RecordKey(0, Space(), 0, bytes(32), np.array([1]), bytes(32))
    other = np.frombuffer(b"wxyz", np.uint8)
    return builders.build_segment(of, 1, [(key, np.frombuffer(first, np.uint8)), (key, other)], segment_id)


def test_a_sound_record_in_another_place_or_file_is_refused():
    a, b = two_equal_records(b"abcd", b"a" * 16), two_equal_records(b"abcd", b"b" * 16)
    assert load_records(a) == [b"abcd", b"wxyz"]

    def checksum_of(data, record):
        return int(read_segment(data).checksum[record])

    def move(body):  # both payloads and their checksums exchanged, nothing else
        body["record_checksum"] = struct.pack("<QQ", checksum_of(a, 1), checksum_of(a, 0))

    swapped = edit_index(put(a, segment.HEADER_BYTES, b"wxyzabcd"), move)
    foreign = edit_index(a, lambda body: set_cell(body, "record_checksum", "<u8", 0, checksum_of(b, 0)))
    for bad in (swapped, foreign):
        opened = shard.Segment(builders.BytesFile(bad), read_segment(bad))
        with pytest.raises(ChecksumMismatch) as caught:
            opened.read(0)
        assert caught.value.offset == segment.HEADER_BYTES


# ------------------------------------------------------------------------------------------------ refusals

FIXED = {
    "short": (lambda d: d[: segment.HEADER_BYTES - 1], Truncated, "header", 0),
    "empty": (lambda d: b"", Truncated, "header", 0),
    "magic": (lambda d: with_header(d, 0, b"\x89PNG"), NotOurs, "not a segment", 0),
    "checksum": (lambda d: flip(d, 8 * 30), ChecksumMismatch, "header", 0),
    "major": (lambda d: with_header(d, 8, struct.pack("<H", 2)), NewerFormat, "format 2", 8),
    "major 0": (lambda d: with_header(d, 8, struct.pack("<H", 0)), NewerFormat, "format 0", 8),
    "features": (lambda d: with_header(d, 16, struct.pack("<I", 1 << 31)), NewerFormat, "0x80000000", 16),
    "header bytes": (lambda d: with_header(d, 12, struct.pack("<I", 72)), Malformed, "72", 12),
    "no trailer": (lambda d: d[: segment.HEADER_BYTES + 63], Truncated, "before a trailer", 127),
    "trailer magic": (lambda d: with_trailer(d, 0, b"kvsegend"), Truncated, "no trailer", END),
    "trailer checksum": (lambda d: flip(d, 8 * (END + 40)), ChecksumMismatch, "trailer", END),
    "reserved": (lambda d: with_trailer(d, 36, b"\1"), Malformed, "between", END),
    "index in header": (lambda d: with_trailer(d, 8, struct.pack("<QQ", 63, END - 63)), Malformed, "between", END),
    "index too short": (lambda d: with_trailer(d, 16, struct.pack("<Q", 1)), Malformed, "between", END),
    "index beyond": (lambda d: with_trailer(d, 8, struct.pack("<QQ", 2**64 - 1, 0)), Malformed, "between", END),
    "records": (lambda d: with_trailer(d, 32, struct.pack("<I", (1 << 24) + 1)), LimitExceeded, "records", END),
    "index bytes": (lambda d: with_trailer(d, 24, struct.pack("<Q", (4 << 30) + 1)), LimitExceeded, "declare", None),
    "ratio": (lambda d: with_trailer(d, 24, struct.pack("<Q", 4096 * 400)), LimitExceeded, "declare", None),
    "index digest": (lambda d: with_trailer(d, 40, b"\0"), ChecksumMismatch, "digest", None),
    "raw bytes": (lambda d: with_trailer(d, 24, struct.pack("<Q", 300)), Malformed, "zstd", None),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_part_that_is_wrong_in_one_field_is_refused_by_name_and_place(name):
    edit, kind, text, offset = FIXED[name]
    with pytest.raises(kind, match=text) as caught:
        read_segment(edit(SMALL))
    assert type(caught.value) is kind
    assert caught.value.offset == offset


def test_stored_bytes_have_the_same_limit_as_decoded_ones():
    """No file of this size is made: only its size is declared."""
    header, size = SMALL[: segment.HEADER_BYTES], limits.MAX_INDEX_BYTES + 1
    tail = segment.encode_trailer(header, segment.Trailer(64, size, 100, 1, bytes(16)))
    with pytest.raises(LimitExceeded, match="stored"):
        segment.decode_trailer(header, tail, 64 + size + 64)
    tail = segment.encode_trailer(header, segment.Trailer(64, size - 1, 100, 1, bytes(16)))
    assert segment.decode_trailer(header, tail, 64 + size - 1 + 64).index_bytes == size - 1


def cell(name: str, dtype: str, at: int, value: int):
    return lambda body: set_cell(body, name, dtype, at, value)


def member(name: str, value):
    return lambda body: body.update({name: value})


def pool_with(**changes):
    return lambda body: body["pools"][0].update(changes)


def buffer_with(at: int, value):
    return lambda body: body["pools"][0]["buffers"][0].__setitem__(at, value)


PAGES = "<u4"
INDEX = {
    "pools missing": (lambda b: b.pop("pools"), Malformed, "'pools'"),
    "no pools": (member("pools", []), LimitExceeded, "0 pools"),
    "17 pools": (lambda b: member("pools", b["pools"][:1] * 17)(b), LimitExceeded, "17 pools"),
    "pool not a map": (member("pools", [1]), Malformed, "unit"),
    "pool unit": (pool_with(unit="block"), Malformed, "unit"),
    "pool unit a list": (pool_with(unit=[]), Malformed, "unit"),
    "pool name": (pool_with(name=1), Malformed, "'name'"),
    "pool buffers": (pool_with(buffers=None), Malformed, "'buffers'"),
    "no buffers": (pool_with(buffers=[]), LimitExceeded, "0 buffers"),
    "4097 buffers": (pool_with(buffers=[["b", "uint8", [1], 1]] * 4097), LimitExceeded, "4097 buffers"),
    "buffer short": (pool_with(buffers=[["b", "uint8", [1]]]), Malformed, "a buffer"),
    "buffer a number": (pool_with(buffers=[7]), Malformed, "a buffer"),
    "buffer name": (buffer_with(0, 1), Malformed, "a buffer"),
    "buffer dtype": (buffer_with(1, None), Malformed, "a buffer"),
    "buffer shape": (buffer_with(2, "1"), Malformed, "a buffer"),
    "buffer shape negative": (buffer_with(2, [-1]), Malformed, "a buffer"),
    "buffer row zero": (buffer_with(3, 0), Malformed, "a buffer"),
    "buffer row huge": (buffer_with(3, limits.MAX_RECORD_BYTES + 1), Malformed, "a buffer"),
    "buffer row float": (buffer_with(3, 4.0), Malformed, "a buffer"),
    "spaces missing": (lambda b: b.pop("spaces"), Malformed, "'spaces'"),
    "space short": (member("spaces", [[None, None]]), Malformed, "a space"),
    "space not a list": (member("spaces", ["abc"]), Malformed, "a space"),
    "space key bytes": (member("spaces", [[b"a", None, False]]), Malformed, "a space"),
    "space bigram int": (member("spaces", [[None, None, 0]]), Malformed, "a space"),
    "page tokens missing": (lambda b: b.pop("page_tokens"), Malformed, "'page_tokens'"),
    "page tokens bool": (member("page_tokens", True), Malformed, "'page_tokens'"),
    "page tokens zero": (member("page_tokens", 0), LimitExceeded, "pages of 0"),
    "page tokens huge": (member("page_tokens", 65537), LimitExceeded, "pages of 65537"),
    "pool not there": (cell("record_pool", "<u1", 0, 1), Malformed, "not there"),
    "space not there": (cell("record_space", "<u4", 0, 1), Malformed, "not there"),
    "no spaces": (member("spaces", []), Malformed, "not there"),
    "no pages": (cell("record_pages", "<u4", 0, 0), LimitExceeded, "without pages"),
    "too many pages": (cell("record_pages", "<u4", 0, 65537), LimitExceeded, "without pages"),
    "no parts": (cell("record_parts", "<u2", 0, 0), LimitExceeded, "without pages or parts"),
    "offset": (cell("record_offset", "<u8", 0, 65), Malformed, "do not fill"),
    "size short": (cell("record_bytes", "<u8", 0, 11), Malformed, "do not fill"),
    "size long": (cell("record_bytes", "<u8", 0, 13), Malformed, "do not fill"),
    "size huge": (cell("record_bytes", "<u8", 0, 2**64 - 1), Malformed, "do not fill"),
    "more parts than there are": (cell("record_parts", "<u2", 0, 2), Malformed, "differ in number"),
    "parts of unequal columns": (member("part_codec", b"\0\0"), Malformed, "differ in length"),
    "part first buffer": (cell("part_first_buffer", "<u2", 0, 1), Malformed, "do not follow"),
    "part without buffers": (cell("part_buffers", "<u2", 0, 0), Malformed, "do not follow"),
    "part frame longer": (cell("part_frame_bytes", "<u8", 0, 13), Malformed, "do not follow"),
    "part codec": (cell("part_codec", "<u1", 0, 3), NewerFormat, "codec 3"),
    "part beyond the pool": (cell("part_buffers", "<u2", 0, 2), Malformed, "do not cover"),
    "part size": (cell("part_bytes", "<u8", 0, 11), Malformed, "do not cover"),
    "part size huge": (cell("part_bytes", "<u8", 0, 2**64 - 1), Malformed, "do not cover"),
    "record huge": (buffer_with(3, limits.MAX_RECORD_BYTES // 3 + 1), LimitExceeded, "a record of"),
    "stored more than it holds": (buffer_with(3, 3), LimitExceeded, "12 stored"),
    "token width": (member("token_width", 2), Malformed, "tokens of 2"),
    "token width bool": (member("token_width", True), Malformed, "'token_width'"),
    "tokens short": (lambda b: member("tokens", b["tokens"][:-4])(b), Malformed, "'tokens'"),
    "tokens of a bigram": (member("spaces", [["k", None, True]]), Malformed, "'tokens'"),
    "hashes short": (lambda b: member("page_hash", b["page_hash"][:-16])(b), Malformed, "'page_hash'"),
    **{
        f"{name} {what}": (member(name, value), Malformed, f"'{name}'")
        for name in ("record_pool", "record_space", "record_start", "record_pages", "record_offset", "record_bytes",
                     "record_checksum", "record_parts", "record_parent", "part_codec", "part_bytes", "page_hash",
                     "tokens")
        for what, value in (("text", "x"), ("null", None), ("longer", bytes(8 * 33 + 1)))
        if (name, what) != ("part_codec", "longer")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", INDEX)
def test_an_index_that_is_wrong_in_one_member_is_refused_by_name(name):
    edit, kind, text = INDEX[name]
    with pytest.raises(kind, match=text) as caught:
        read_segment(edit_index(SMALL, edit))
    assert type(caught.value) is kind


def test_an_index_of_another_number_of_records_is_refused():
    for records in (0, 2):
        with pytest.raises(Malformed, match="record_pool"):
            read_segment(edit_index(SMALL, lambda body: None, records))


def test_more_spaces_than_the_limit_are_refused(monkeypatch):
    monkeypatch.setattr(limits, "MAX_SPACES", 3)
    with pytest.raises(LimitExceeded, match="5 spaces"):
        read_segment(edit_index(SEGMENT, lambda body: member("spaces", [[None, None, False]] * 5)(body)))


def test_more_objects_than_the_limit_are_refused(monkeypatch):
    """A list counts with what it declares, before it is made."""
    monkeypatch.setattr(limits, "MAX_OBJECTS", 1000)
    assert read_segment(edit_index(SMALL, member("other", [0] * 900)))
    with pytest.raises(LimitExceeded, match="objects"):
        read_segment(edit_index(SMALL, member("other", [0] * 1001)))
    with pytest.raises(LimitExceeded, match="objects"):
        read_segment(edit_index(SMALL, member("other", {str(i): [0] * 90 for i in range(11)})))


def test_overlapping_and_exchanged_payloads_are_refused():
    data = two_equal_records(b"abcd", b"a" * 16)
    for offsets in ((64, 64), (68, 64), (68, 72), (64, 69)):
        edit = member("record_offset", struct.pack("<QQ", *offsets))
        with pytest.raises(Malformed, match="do not fill"):
            read_segment(edit_index(data, edit))


# ------------------------------------------------------------------------------------------------ bodies


def with_raw(data: bytes, raw: bytes) -> bytes:
    return with_index_bytes(data, codec.pack(raw), len(raw))


BODIES = {
    "not a map": (b"\x90", Malformed, "not a map"),
    "nothing": (b"", Malformed, "ends early"),
    "two objects": (b"\x80\x80", Malformed, "ExtraData"),
    "number keys": (b"\x81\x01\x01", Malformed, "not msgpack"),
    "list key": (b"\x81\x90\x01", Malformed, "not msgpack"),
    "not UTF-8": (b"\x81\xa1\xff\x01", Malformed, "not msgpack"),
    "reserved byte": (b"\x81\xa1a\xc1", Malformed, "not msgpack"),
    "ends in a text": (b"\x81\xa5ab", Malformed, "not msgpack|ends early"),
    "ends in a length": (b"\x81\xa1a\xc6\x00", Malformed, "not msgpack|ends early"),
    "ext": (b"\x81\xa1a\xc7\x00\x05", Malformed, "extension"),
    "fixext": (b"\x81\xa1a\xd4\x05\x00", Malformed, "extension"),
    "timestamp": (b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", Malformed, "extension"),
    "deep lists": (b"\x81\xa1a" + b"\x91" * 100_000 + b"\x90", LimitExceeded, "deep"),
    "deep maps": (b"\x81\xa1a" * 3000 + b"\x90", LimitExceeded, "deep"),
    "list of 2^32 - 1": (b"\x81\xa1a\xdd\xff\xff\xff\xff" + bytes(100), LimitExceeded, "objects"),
    "map of 2^32 - 1": (b"\xdf\xff\xff\xff\xff" + bytes(100), LimitExceeded, "objects"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_not_plain_msgpack_is_refused(name):
    raw, kind, text = BODIES[name]
    with pytest.raises(kind, match=text) as caught:
        read_segment(with_raw(SMALL, raw))
    assert type(caught.value) is kind


def test_lists_as_deep_as_the_limit_are_read():
    def body(lists):
        raw = b"\x81\xa1a" + b"\x91" * (lists - 1) + b"\x90"
        stored = codec.pack(raw)
        return envelope.unseal(stored, len(raw), envelope.digest128(stored))

    assert list(body(limits.MAX_DEPTH - 1)) == ["a"]
    with pytest.raises(LimitExceeded):
        body(limits.MAX_DEPTH + 1)


def peak_of(read) -> int:
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_bombs_are_refused_before_they_are_allocated():
    zeros = bytes(64 << 20)
    frame = codec.pack(zeros)
    # Each of many lists says that it has as many elements as the body has bytes; noise keeps the ratio honest.
    noise = np.random.default_rng(0).bytes(200_000)
    lists = b"\x81\xa1a" + (b"\xdd" + struct.pack(">I", 150_000)) * 500 + noise
    bombs = {
        "ratio": with_index_bytes(SMALL, frame, len(zeros)),
        "frame says more than the trailer": with_index_bytes(SMALL, frame, 1000),
        "trailer says more than the frame": with_index_bytes(SMALL, codec.pack(bytes(5)), 50_000),
        "largest index": with_index_bytes(SMALL, bytes(64), limits.MAX_INDEX_BYTES),
        "lists": with_raw(SMALL, lists),
    }
    for name, data in bombs.items():

        def read(data=data):
            with pytest.raises((LimitExceeded, Malformed)):
                read_segment(data)

        assert peak_of(read) < len(data) + len(lists) + (1 << 20), name


def test_a_record_is_decoded_to_no_more_than_its_declared_size():
    """Its frame is larger than the index says: nothing of the frame's size is allocated."""
    frame = codec.pack(bytes(64 << 20))
    of = (Pool("kv", "slot", (Buffer("k", "uint8", (40_000,), 40_000),)),)
    key = RecordKey(0, Space(), 0, bytes(32), np.array([1]), bytes(32))
    data = builders.build_segment(of, 1, [(key, np.arange(40_000, dtype=np.uint32).astype(np.uint8))], bytes(16))
    bad = with_payload(data, frame, Codec.ZSTD, len(frame))

    def read():
        with pytest.raises(Malformed):
            load_records(bad)

    assert peak_of(read) < 1 << 20


def with_payload(data: bytes, payload: bytes, used: int, frame_bytes: int) -> bytes:
    """A segment of one record in one part with another payload; all checksums right."""
    header, _, stored, trailer = segment_parts(data)
    moved = header + payload + stored
    moved += segment.encode_trailer(
        header,
        segment.Trailer(len(header) + len(payload), len(stored), trailer.index_raw_bytes, 1, trailer.index_digest),
    )

    def edit(body):
        set_cell(body, "record_bytes", "<u8", 0, len(payload))
        set_cell(body, "record_checksum", "<u8", 0, segment.record_checksum(header[24:40], 0, [payload]))
        set_cell(body, "part_bytes", "<u8", 0, len(payload))
        set_cell(body, "part_frame_bytes", "<u8", 0, frame_bytes)
        set_cell(body, "part_codec", "<u1", 0, used)

    return edit_index(moved, edit)


# ------------------------------------------------------------------------------------------------ fuzz

COLUMNS = {
    "record_pool": "<u1", "record_space": "<u4", "record_start": "<u4", "record_pages": "<u4", "record_offset": "<u8",
    "record_bytes": "<u8", "record_checksum": "<u8", "record_parts": "<u2", "record_parent": "<u1", "part_codec": "<u1",
    "part_first_buffer": "<u2", "part_buffers": "<u2", "part_bytes": "<u8", "part_frame_bytes": "<u8",
    "page_hash": "<u8", "tokens": "<i8",
}  # fmt: skip

def use(data: bytes) -> None:
    """Everything that a reader does with a segment."""
    index = read_segment(data)
    index.find(index.page_hash)
    opened = shard.Segment(builders.BytesFile(data), index)
    for record in range(index.records):
        index.page_tokens_of(record, 0, int(index.pages[record]))
        opened.load(record)


def refuses_or_reads(data: bytes) -> None:
    """Whatever the bytes are, nothing but a FormatError comes out."""
    try:
        use(data)
    except FormatError as error:
        assert type(error) is not FormatError


@examples(150)
@given(st.data())
def test_only_format_errors_escape_from_mutated_msgpack(data):
    refuses_or_reads(with_raw(SEGMENT, mutate(data.draw, builders.index_raw(SEGMENT))))


@given(st.data())
def test_only_format_errors_escape_from_a_mutated_frame(data):
    _, _, stored, trailer = segment_parts(SEGMENT)
    refuses_or_reads(with_index_bytes(SEGMENT, mutate(data.draw, stored), trailer.index_raw_bytes))


@examples(150)
@given(st.lists(st.tuples(st.sampled_from(sorted(COLUMNS)), st.integers(0, 1 << 20), EXTREMES), min_size=1, max_size=3))
def test_only_format_errors_escape_from_changed_numbers(changes):
    def edit(body):
        for name, at, value in changes:
            cells = np.frombuffer(body[name], COLUMNS[name]).copy()
            bits = cells.view(f"<u{cells.itemsize}")
            bits[at % len(bits)] = value & (2 ** (8 * cells.itemsize) - 1)
            body[name] = cells.tobytes()

    refuses_or_reads(edit_index(SEGMENT, edit))


@examples(150)
@given(st.sampled_from([*sorted(index_body(SEGMENT)), "other"]), ANY)
def test_only_format_errors_escape_from_members_of_other_types(name, value):
    refuses_or_reads(edit_index(SEGMENT, member(name, value)))


@examples(200)
@given(st.data())
def test_only_format_errors_escape_from_nested_members_of_other_types(data):
    def edit(body):
        replace_inside(data.draw, body[data.draw(st.sampled_from(["pools", "spaces"]))])

    refuses_or_reads(edit_index(SEGMENT, edit))


@examples(200)
@given(st.integers(0, 55), EXTREMES, st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_only_format_errors_escape_from_changed_fixed_parts(at, value, width, in_header):
    new = (value & (2 ** (8 * width) - 1)).to_bytes(width, "little")[: 56 - at]
    refuses_or_reads((with_header if in_header else with_trailer)(SEGMENT, at, new))


@examples(200)
@given(st.data())
def test_only_format_errors_escape_from_a_mutated_payload(data):
    """Of each codec, with a right record checksum: what comes out has the declared size or is refused."""
    wanted = data.draw(st.sampled_from(list(Codec)))
    of = (Pool("kv", "slot", (Buffer("k", "bfloat16", (400,), 800),)),)
    raw = np.repeat(np.arange(25, dtype=np.uint8), 32)
    key = RecordKey(0, Space(), 0, bytes(32), np.array([1]), bytes(32))
    sound = builders.build_segment(of, 1, [(key, raw)], bytes(16))
    used, frame_bytes, size = codec.encode(wanted, raw, out := np.empty_like(raw))
    payload = mutate(data.draw, out[:size].tobytes())
    frame_bytes = data.draw(st.sampled_from([frame_bytes, 0, len(payload)]) | st.integers(0, len(payload)))
    with contextlib.suppress(FormatError):
        assert len(load_records(with_payload(sound, payload, used, frame_bytes))[0]) == raw.nbytes


@given(st.binary(max_size=400))
def test_only_format_errors_escape_from_arbitrary_bytes(data):
    for bad in (data, SMALL[: segment.HEADER_BYTES] + data, SMALL[:-64] + data):
        with pytest.raises(FormatError):
            read_segment(bad)
