"""A manifest reads back to what was written, and one that differs from that by a bit is refused."""

from __future__ import annotations

import json
import struct
import tracemalloc
from dataclasses import replace

import builders
import numpy as np
import pytest
from builders import edit_manifest, flip, manifest_body, manifest_raw, put, set_cell, sign_header, with_body_bytes
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
from sglang_persist.format import codec, limits, manifest
from sglang_persist.model import Buffer, Identity, Manifest, Node, Piece, Pool, Rates, SegmentRef, Space
from sglang_persist.plan.loading import Fit, node_tokens, plan_restore, resolve
from sglang_persist.store import names

STORE = builders.little_store()
INDEXES = STORE.indexes
DATA = manifest.encode(STORE.manifest)
SMALL = manifest.encode(builders.small_manifest())

SPACE = st.builds(Space, st.none() | TEXT, st.none() | TEXT, st.booleans())
COUNT = st.integers(0, 2**63)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
MAP = st.dictionaries(TEXT, JSON, max_size=3)


@st.composite
def nodes(draw, spaces: int, pools: int, segments: tuple[SegmentRef, ...]):
    """Trees of nodes: pieces of pool 0 tile each node, pieces of other pools stand anywhere in it."""
    out: list[Node] = []
    piece = lambda pool, at, count: Piece(  # noqa: E731
        pool, at, (ref := draw(st.sampled_from(segments))).id, draw(st.integers(0, ref.records - 1)),
        draw(st.integers(0, limits.MAX_RECORD_PAGES - count)), count,
    )  # fmt: skip
    for i in range(draw(st.integers(0, 6))):
        parent = draw(st.integers(-1, i - 1))
        pages = draw(st.integers(1, 9))
        cuts = sorted(draw(st.sets(st.integers(1, pages - 1), max_size=3))) if pages > 1 else []
        pieces = [piece(0, a, b - a) for a, b in zip([0, *cuts], [*cuts, pages], strict=True)]
        for pool in range(1, pools):
            ends = sorted(draw(st.sets(st.integers(0, pages), max_size=4)))
            pieces += [piece(pool, a, b - a) for a, b in zip(ends[::2], ends[1::2], strict=False)]
        space = out[parent].space if parent >= 0 else draw(st.integers(0, spaces - 1))
        out.append(Node(parent, space, pages, tuple(pieces)))
    return tuple(out)


@st.composite
def manifests(draw):
    spaces = tuple(draw(st.lists(SPACE, min_size=1, max_size=4)))
    pool = st.builds(
        lambda name, unit, row: Pool(name, unit, (Buffer(name, "uint8", (row,), row), Buffer("b", "bfloat16", (), 2))),
        TEXT, st.sampled_from(["slot", "page"]), st.integers(1, limits.MAX_RECORD_BYTES),
    )  # fmt: skip
    pools = tuple(draw(st.lists(pool, min_size=1, max_size=3)))
    ids = draw(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=3, unique=True))
    records = st.integers(1, limits.MAX_RECORDS)
    segments = tuple(SegmentRef(i, draw(COUNT), draw(st.binary(min_size=16, max_size=16)), draw(records)) for i in ids)
    shards = tuple(draw(st.lists(TEXT, min_size=1, max_size=3)))
    page_tokens, tree = draw(st.integers(1, 65536)), draw(nodes(len(spaces), len(pools), segments))
    created = draw(st.floats(allow_nan=False, allow_infinity=False))
    return Manifest(
        draw(COUNT), created, draw(TEXT), draw(st.sampled_from(shards)), shards,
        page_tokens, Identity(draw(MAP), draw(MAP), draw(MAP)), pools, spaces, segments, tree,
        sum(n.pages for n in tree) * page_tokens, draw(COUNT), draw(COUNT), draw(COUNT),
    )  # fmt: skip


@examples(80)
@given(manifests())
def test_what_is_written_is_what_is_read(m):
    assert manifest.decode(manifest.encode(m)) == m


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_a_little_store_resolves_to_its_tokens(page_tokens):
    store = builders.little_store(page_tokens)
    m, indexes = manifest.decode(manifest.encode(store.manifest)), store.indexes
    assert m == store.manifest
    resolved = resolve(m, indexes)
    assert not resolved.refused and resolved.start == [n.start for n in store.nodes]
    for stored, node in zip(m.nodes, store.nodes, strict=True):
        assert m.spaces[stored.space] == node.space
        assert np.array_equal(node_tokens(m, stored, indexes), node.tokens)


def test_minor_version_and_unknown_members_are_ignored():
    data = edit_manifest(DATA, lambda body: body.update(added_later=[{"x": 1}]))
    data = sign_header(put(data[: manifest.HEADER_BYTES], 10, b"\7\0")) + data[manifest.HEADER_BYTES :]
    assert manifest.decode(data) == STORE.manifest


# ------------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("data", [SMALL, DATA], ids=["small", "little"])
def test_every_flipped_bit_is_refused(data):
    for bit in range(len(data) * 8):
        with pytest.raises(FormatError):
            manifest.decode(flip(data, bit))


def test_every_truncation_is_refused():
    for end in range(len(DATA)):
        with pytest.raises(Truncated):
            manifest.decode(DATA[:end])


def test_anything_appended_is_refused():
    for junk in (b"\0", b"\n", bytes(64), SMALL, SMALL[manifest.HEADER_BYTES :]):
        with pytest.raises(Truncated) as caught:
            manifest.decode(SMALL + junk)
        assert caught.value.offset == len(SMALL) + len(junk)


# ------------------------------------------------------------------------------------------------ refusals


def fixed(offset: int, new: bytes):
    """Other bytes in the header, its checksum made right."""
    return lambda d: sign_header(put(d[: manifest.HEADER_BYTES], offset, new)) + d[manifest.HEADER_BYTES :]


FIXED = {
    "empty": (lambda d: b"", Truncated, "header", 0),
    "short": (lambda d: d[: manifest.HEADER_BYTES - 1], Truncated, "header", 0),
    "magic": (fixed(0, b"\x89PNG"), NotOurs, "not a manifest", 0),
    "a segment": (lambda d: builders.small_segment(), NotOurs, "not a manifest", 0),
    "checksum": (lambda d: flip(d, 8 * 40), ChecksumMismatch, "header", 0),
    "major": (fixed(8, b"\2\0"), NewerFormat, "format 2", 8),
    "major 0": (fixed(8, b"\0\0"), NewerFormat, "format 0", 8),
    "features": (fixed(12, struct.pack("<I", 1 << 31)), NewerFormat, "0x80000000", 12),
    "body bytes": (fixed(16, struct.pack("<Q", 1)), Truncated, "declared", len(SMALL)),
    "raw bytes huge": (fixed(24, struct.pack("<Q", limits.MAX_INDEX_BYTES + 1)), LimitExceeded, "declare", None),
    "raw bytes ratio": (fixed(24, struct.pack("<Q", 4096 * 400)), LimitExceeded, "declare", None),
    "raw bytes other": (fixed(24, struct.pack("<Q", 333)), Malformed, "zstd", None),
    "digest": (fixed(32, b"\0\0"), ChecksumMismatch, "digest", None),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_header_that_is_wrong_in_one_field_is_refused_by_name_and_place(name):
    edit, kind, text, offset = FIXED[name]
    with pytest.raises(kind, match=text) as caught:
        manifest.decode(edit(SMALL))
    assert type(caught.value) is kind
    assert caught.value.offset == offset


def cell(name: str, at: int, value: int, dtype: str = "<u4"):
    return lambda body: set_cell(body, name, dtype, at, value)


def member(name: str, value):
    return lambda body: body.update({name: value})


def ref(at: int, value):
    return lambda body: body["segments"][0].__setitem__(at, value)


def both(*edits):
    return lambda body: [edit(body) for edit in edits]


def drop_pieces(body):
    for name in list(body):
        if name.startswith("piece_"):
            body[name] = b""


def swap_pieces(body):
    """The pieces of the two nodes exchanged in order."""
    for name in list(body):
        if name.startswith("piece_"):
            half = len(body[name]) // 2
            body[name] = body[name][half:] + body[name][:half]


def add_piece(**values):
    """One more piece of node 1, for pool 0 unless said otherwise."""
    row = {"node": 1, "pool": 0, "at": 0, "segment": 0, "record": 0, "first": 2, "pages": 1} | values

    def edit(body):
        for name, value in row.items():
            body[f"piece_{name}"] += struct.pack("<B" if name == "pool" else "<I", value)

    return edit


def second_pool(body):
    body["pools"] = body["pools"] * 2


COLUMNS = ("node_parent", "node_space", "node_pages", "piece_node", "piece_pool", "piece_at", "piece_segment",
           "piece_record", "piece_first", "piece_pages")  # fmt: skip
NUMBERS = ("generation", "page_tokens", "tokens", "raw_bytes", "stored_bytes", "left_out_tokens")
# The small manifest: node 0 of 2 pages at the root, node 1 of 1 page below it, one piece each, of one segment.
BODY = {
    "shard not among shards": (member("shard", "dp1-tp0"), Malformed, "among"),
    "shards not texts": (member("shards", ["dp0-tp0", 1]), LimitExceeded, "shards"),
    "too many shards": (member("shards", ["dp0-tp0"] * (limits.MAX_SHARDS + 1)), LimitExceeded, "shards"),
    "page tokens zero": (member("page_tokens", 0), LimitExceeded, "pages of 0"),
    "page tokens huge": (member("page_tokens", 65537), LimitExceeded, "pages of 65537"),
    "generation negative": (member("generation", -1), Malformed, "negative"),
    "raw bytes negative": (member("raw_bytes", -1), Malformed, "negative"),
    "created never": (member("created", float("nan")), Malformed, "negative, or the time"),
    "tokens of another tree": (member("tokens", 4), Malformed, "not that of the nodes"),
    "identity a list": (member("identity", []), Malformed, "'identity'"),
    "identity without model": (member("identity", {"cut": {}, "soft": {}}), Malformed, "'model'"),
    "identity without cut": (member("identity", {"model": {}, "soft": {}}), Malformed, "'cut'"),
    "identity without soft": (member("identity", {"model": {}, "cut": {}}), Malformed, "'soft'"),
    "identity of bytes": (member("identity", {"model": {"a": [b"x"]}, "cut": {}, "soft": {}}), Malformed, "plain"),
    "identity keyed by bytes": (member("identity", {"model": {}, "cut": {b"x": 1}, "soft": {}}), Malformed, "plain"),
    "no pools": (member("pools", []), LimitExceeded, "0 pools"),
    "pool unit": (lambda b: b["pools"][0].update(unit="row"), Malformed, "unit"),
    "space short": (member("spaces", [[None, None]]), Malformed, "a space"),
    "segment short": (member("segments", [[bytes(16), 1, bytes(16)]]), Malformed, "a segment is not"),
    "segment a number": (member("segments", [7]), Malformed, "a segment is not"),
    "segment id text": (ref(0, "x" * 16), Malformed, "a segment is not"),
    "segment id short": (ref(0, bytes(15)), Malformed, "16 bytes"),
    "segment digest long": (ref(2, bytes(17)), Malformed, "16 bytes"),
    "segment bytes negative": (ref(1, -1), Malformed, "16 bytes"),
    "segment records negative": (ref(3, -1), Malformed, "16 bytes"),
    "segment records huge": (ref(3, limits.MAX_RECORDS + 1), LimitExceeded, "records in a segment"),
    "segment records beyond 63 bits": (ref(3, 2**64 - 1), LimitExceeded, "records in a segment"),
    "segment twice": (lambda b: member("segments", b["segments"] * 2)(b), Malformed, "named twice"),
    "too many segments": (
        lambda b: member("segments", b["segments"] * (limits.MAX_SEGMENTS + 1))(b), LimitExceeded, "segments",
    ),
    "node columns unequal": (member("node_space", bytes(4)), Malformed, "differ in length"),
    "piece columns unequal": (member("piece_at", bytes(4)), Malformed, "differ in length"),
    "own parent": (cell("node_parent", 1, 1, "<i4"), Malformed, "impossible"),
    "root is its own parent": (cell("node_parent", 0, 0, "<i4"), Malformed, "impossible"),
    "cycle": (cell("node_parent", 0, 1, "<i4"), Malformed, "impossible"),
    "parent not there": (cell("node_parent", 1, 2, "<i4"), Malformed, "impossible"),
    "parent below -1": (cell("node_parent", 1, -2, "<i4"), Malformed, "impossible"),
    "parent least": (cell("node_parent", 1, -(2**31), "<i4"), Malformed, "impossible"),
    "space not there": (both(cell("node_space", 0, 1), cell("node_space", 1, 1)), Malformed, "impossible"),
    "no spaces": (member("spaces", []), Malformed, "impossible"),
    "node without pages": (cell("node_pages", 1, 0), Malformed, "impossible"),
    "space of another parent": (
        both(member("spaces", [[None, None, False]] * 2), cell("node_space", 1, 1)), Malformed, "another space",
    ),
    "piece node not there": (cell("piece_node", 1, 2), Malformed, "not there"),
    "piece pool not there": (cell("piece_pool", 1, 1, "<u1"), Malformed, "not there"),
    "piece segment not there": (cell("piece_segment", 1, 1), Malformed, "not there"),
    "no segments": (member("segments", []), Malformed, "not there"),
    "pieces out of order": (swap_pieces, Malformed, "not there"),
    "piece record not there": (cell("piece_record", 1, 1), Malformed, "outside"),
    "piece without pages": (cell("piece_pages", 1, 0), Malformed, "outside"),
    "piece longer than its node": (cell("piece_pages", 0, 3), Malformed, "outside"),
    "piece beyond its node": (cell("piece_at", 1, 1), Malformed, "outside"),
    "piece at the end of numbers": (cell("piece_at", 1, 2**32 - 1), Malformed, "outside"),
    "piece of pages past any record": (cell("piece_first", 1, limits.MAX_RECORD_PAGES), LimitExceeded, "longer"),
    "node half covered": (cell("piece_pages", 0, 1), Malformed, "not covered"),
    "node covered by another pool": (both(second_pool, cell("piece_pool", 1, 1, "<u1")), Malformed, "not covered"),
    "pages covered twice": (add_piece(), Malformed, "overlap"),
    "pages of another pool covered twice": (
        both(second_pool, add_piece(pool=1), add_piece(pool=1)), Malformed, "overlap",
    ),
    "pools out of order": (
        both(second_pool, add_piece(pool=1), lambda b: set_cell(b, "piece_pool", "<u1", 1, 1),
             lambda b: set_cell(b, "piece_pool", "<u1", 2, 0)), Malformed, "not ordered",
    ),
    "no pieces": (drop_pieces, Malformed, "without pieces"),
    "pieces without nodes": (
        both(*(member(n, b"") for n in ("node_parent", "node_space", "node_pages"))), Malformed, "not there",
    ),
    **{f"{name} missing": (lambda b, n=name: b.pop(n), Malformed, f"'{name}'") for name in manifest_body(SMALL)
       if name != "rates"},
    **{f"{name} a text": (member(name, "x"), Malformed, f"'{name}'") for name in (*COLUMNS, *NUMBERS, "created")},
    **{f"{name} a bool": (member(name, True), Malformed, f"'{name}'") for name in NUMBERS},
    **{f"{name} torn": (lambda b, n=name: b.update({n: b[n] + b"\0"}), Malformed, f"'{name}'")
       for name in COLUMNS if name != "piece_pool"},
    **{f"{name} a number": (member(name, 1), Malformed, f"'{name}'") for name in ("reason", "shard", "shards")},
}  # fmt: skip


@pytest.mark.parametrize("name", BODY)
def test_a_body_that_is_wrong_in_one_member_is_refused_by_name(name):
    edit, kind, text = BODY[name]
    with pytest.raises(kind, match=text) as caught:
        manifest.decode(edit_manifest(SMALL, edit))
    assert type(caught.value) is kind


def test_a_body_as_written_is_read():
    """The edits above start from something sound."""
    assert manifest.decode(edit_manifest(SMALL, lambda body: None)) == builders.small_manifest()


@pytest.mark.parametrize(("name", "text"), [("MAX_NODES", "8 nodes"), ("MAX_SPACES", "5 spaces")])
def test_more_than_a_limit_is_refused_and_as_much_is_read(monkeypatch, name, text):
    count = len(STORE.manifest.spaces) if name == "MAX_SPACES" else sum(len(n.pieces) for n in STORE.manifest.nodes)
    monkeypatch.setattr(limits, name, count)
    manifest.decode(DATA)
    monkeypatch.setattr(limits, name, count - 1)
    with pytest.raises(LimitExceeded, match=text):
        manifest.decode(DATA)


# ------------------------------------------------------------------------------------------------ bodies


def with_raw(raw: bytes) -> bytes:
    return with_body_bytes(SMALL, codec.pack(raw), len(raw))


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"\x90", Malformed),
        (b"\xc0", Malformed),
        (b"\x80\x80", Malformed),
        (b"\x81\x01\x01", Malformed),
        (b"\x81\xa1a" + b"\x91" * 100_000 + b"\x90", LimitExceeded),
        (b"\x81\xa1a" * 100_000 + b"\x90", LimitExceeded),
        (b"\x81\xa1a\xdd\xff\xff\xff\xff", LimitExceeded),
        (b"\x81\xa8identity" + b"\x81\xa1a" * 5000 + b"\x01", LimitExceeded),
    ],
)
def test_a_body_that_is_no_map_or_too_deep_is_refused(raw, kind):
    with pytest.raises(kind) as caught:
        manifest.decode(with_raw(raw))
    assert type(caught.value) is kind


def test_bombs_are_refused_before_they_are_allocated():
    zeros = bytes(64 << 20)
    frame = codec.pack(zeros)
    noise = np.random.default_rng(0).bytes(200_000)
    lists = b"\x81\xa1a" + (b"\xdd" + struct.pack(">I", 150_000)) * 500 + noise
    bombs = [
        with_body_bytes(SMALL, frame, len(zeros)),
        with_body_bytes(SMALL, frame, 1000),
        with_body_bytes(SMALL, codec.pack(bytes(5)), 50_000),
        with_body_bytes(SMALL, bytes(64), limits.MAX_INDEX_BYTES),
        with_raw(lists),
    ]
    del zeros
    for data in bombs:
        tracemalloc.start()
        with pytest.raises((LimitExceeded, Malformed)):
            manifest.decode(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < len(data) + len(lists) + (1 << 20)


# ------------------------------------------------------------------------------------------------ fuzz


def refuses_or_reads(data: bytes) -> None:
    """Whatever the bytes are, nothing but a FormatError comes out; what is read can be resolved and named."""
    try:
        m = manifest.decode(data)
    except FormatError as error:
        assert type(error) is not FormatError
        return
    resolved = resolve(m, INDEXES)
    for node, sound in zip(m.nodes, resolved.sound, strict=True):
        if sound:
            tokens = node_tokens(m, node, INDEXES)
            assert len(tokens) == node.pages * m.page_tokens + m.spaces[node.space].extra_tokens
    fits = [Fit(0)] * len(resolved.manifest.pools)
    plan_restore(resolved, fits, [5])
    names.namespace(m.identity)
    names.namespace_id(m.identity)
    json.dumps(m.identity.soft)


@examples(150)
@given(st.data())
def test_only_format_errors_escape_from_mutated_msgpack(data):
    raw = mutate(data.draw, manifest_raw(DATA))
    refuses_or_reads(with_body_bytes(DATA, codec.pack(raw), len(raw)))


@given(st.data())
def test_only_format_errors_escape_from_a_mutated_frame(data):
    refuses_or_reads(with_body_bytes(DATA, mutate(data.draw, DATA[manifest.HEADER_BYTES :]), len(manifest_raw(DATA))))


@examples(200)
@given(st.lists(st.tuples(st.sampled_from(COLUMNS), st.integers(0, 999), EXTREMES), min_size=1, max_size=3))
def test_only_format_errors_escape_from_changed_numbers(changes):
    def edit(body):
        for name, at, value in changes:
            width = 1 if name == "piece_pool" else 4
            at = at % (len(body[name]) // width) * width
            body[name] = put(body[name], at, value.to_bytes(8, "little")[:width])

    refuses_or_reads(edit_manifest(DATA, edit))


@examples(200)
@given(st.sampled_from([*sorted(manifest_body(DATA)), "other"]), ANY)
def test_only_format_errors_escape_from_members_of_other_types(name, value):
    refuses_or_reads(edit_manifest(DATA, member(name, value)))


NESTED = ("pools", "spaces", "segments", "identity", "shards")


@examples(150)
@given(st.data())
def test_only_format_errors_escape_from_nested_members_of_other_types(data):
    def edit(body):
        replace_inside(data.draw, body[data.draw(st.sampled_from(NESTED))])

    refuses_or_reads(edit_manifest(DATA, edit))


@examples(150)
@given(st.integers(0, 47), st.integers(0, 2**64 - 1) | EXTREMES, st.sampled_from([1, 2, 4, 8]))
def test_only_format_errors_escape_from_a_changed_header(at, value, width):
    new = (value & (2 ** (8 * width) - 1)).to_bytes(width, "little")[: 48 - at]
    refuses_or_reads(fixed(at, new)(DATA))


@given(st.binary(max_size=300))
def test_only_format_errors_escape_from_arbitrary_bytes(data):
    for bad in (data, SMALL[: manifest.HEADER_BYTES] + data, with_body_bytes(SMALL, data, len(data) * 3)):
        with pytest.raises(FormatError):
            manifest.decode(bad)


@pytest.mark.parametrize("rates", [{}, {"load": -1.0}, {"load": float("inf")}, {"prefill": float("nan")}, {"load": ""}])
def test_rates_that_are_absent_or_senseless_count_as_not_measured(rates):
    assert manifest.decode(edit_manifest(SMALL, member("rates", rates))).rates == Rates()
    assert manifest.decode(edit_manifest(SMALL, lambda b: b.pop("rates"))).rates == Rates()


@pytest.mark.parametrize(("at", "pages"), [(0, 1), (1, 2), (0, 3)])
def test_a_state_stands_at_the_end_of_its_node_alone(at, pages):
    """One that stood elsewhere would be taken for the state after the whole node."""
    m = builders.small_manifest()
    states = Pool("states", "state", (Buffer("state0", "float32", (1,), 4),))
    (first, *others) = m.nodes

    def having(*pieces):
        node = replace(first, pages=3, pieces=(replace_piece(first), *pieces))
        return replace(m, pools=(*m.pools, states), nodes=(node, *others), tokens=4)

    def replace_piece(node):
        return node.pieces[0]._replace(pages=3)

    end = Piece(1, 2, m.segments[0].id, 0, 0, 1)
    assert manifest.decode(manifest.encode(having(end))).nodes[0].pieces[1] == end
    with pytest.raises(Malformed, match="state"):
        manifest.decode(manifest.encode(having(end._replace(at=at, pages=pages))))


@pytest.mark.parametrize("taken", [{}, {"dp1-adp0": -1}, {"dp1-adp0": True}, {"dp1-adp0": "1"}])
def test_what_was_taken_may_be_absent_or_senseless(taken):
    assert manifest.decode(edit_manifest(SMALL, member("taken", taken))).taken == {}
    assert manifest.decode(SMALL).taken == {}


def test_what_was_taken_comes_back():
    m = replace(builders.small_manifest(), taken={"dp1-adp0": 7, "dp2-adp0": 1 << 40})
    assert manifest.decode(manifest.encode(m)).taken == m.taken


def test_rates_come_back():
    m = replace(builders.small_manifest(), rates=Rates(1e6, 0.25e-3, 4000.0))
    assert manifest.decode(manifest.encode(m)).rates == m.rates
