"""FORMAT.md is the code in tables: every offset, size, name, type, number and version in it is compared."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import builders
import numpy as np
import pytest
from builders import index_body, manifest_body, segment_parts

from sglang_persist.format import codec, envelope, limits, manifest, segment, weights
from sglang_persist.format.segment import Trailer
from sglang_persist.model import HASH_BYTES
from sglang_persist.store import names

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "sglang_persist" / "format" / "FORMAT.md").read_text(encoding="utf-8")

STORE = builders.little_store()
SEGMENT = list(STORE.segments.values())[1]
MANIFEST = manifest.encode(STORE.manifest)
WEIGHTS = weights.encode(builders.WEIGHTS)


def section(number: str) -> str:
    """The text under a heading, up to the next heading of any level."""
    match = re.search(rf"^#+ {re.escape(number)}\.? .*?\n(.*?)(?=^#+ |\Z)", TEXT, re.S | re.M)
    assert match, f"section {number} is not there"
    return match[1]


def tables(number: str) -> list[list[list[str]]]:
    """Each table of a section as its rows, without the heading and the rule below it."""
    found = re.findall(r"((?:^\|.*\|$\n?)+)", section(number), re.M)
    out = []
    for head, rule, *rows in (table.strip().splitlines() for table in found):
        split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (head, *rows)]
        assert set(rule) == set("|-") and {len(row) for row in split} == {rule.count("|") - 1}
        out.append(split[1:])
    return out


def fields(number: str, at: int = 0) -> list[tuple[int, int, str, str]]:
    return [(int(offset), int(size), name, meaning) for offset, size, name, meaning in tables(number)[at]]


FIXED = {
    "2.1": (segment.HEADER, segment.HEADER_BYTES, segment.HEADER_MAGIC),
    "2.4": (segment.TRAILER, segment.TRAILER_BYTES, segment.TRAILER_MAGIC),
    "3": (manifest.HEADER, manifest.HEADER_BYTES, manifest.MAGIC),
    "10": (envelope.HEADER, envelope.HEADER_BYTES, weights.MAGIC),
}


@pytest.mark.parametrize("number", FIXED)
def test_offsets_and_sizes_are_those_of_the_structs(number):
    packed, total, magic = FIXED[number]
    items = re.findall(r"\d*[a-zA-Z]", packed.format.lstrip("<"))
    assert packed.format.startswith("<")
    offsets = [struct.calcsize("<" + "".join(items[:i])) for i in range(len(items) + 1)]
    assert [row[0] for row in fields(number)] == offsets
    assert [row[1] for row in fields(number)] == [struct.calcsize("<" + i) for i in items] + [8]
    assert fields(number)[-1][2] == "checksum" and sum(row[1] for row in fields(number)) == total
    assert bytes.fromhex(re.fullmatch(r"`([0-9A-F ]+)`", fields(number)[0][3])[1]) == magic


def read_fields(number: str, data: bytes) -> dict[str, bytes]:
    return {name: data[offset : offset + size] for offset, size, name, _ in fields(number)}


def numbers(found: dict[str, bytes], *wanted: str) -> list[int]:
    return [int.from_bytes(found[name], "little") for name in wanted]


def test_the_segment_header_holds_what_is_said_where_it_is_said():
    header = segment.encode_header(bytes(range(16)), bytes(range(100, 116)))
    found = read_fields("2.1", header)
    assert found["segment_id"] == bytes(range(16)) and found["namespace"] == bytes(range(100, 116))
    assert numbers(found, "major", "minor", "header_bytes", "required_features", "optional_features", "checksum") == [
        segment.MAJOR, segment.MINOR, segment.HEADER_BYTES, 0, 0, envelope.digest64(header[:56]),
    ]  # fmt: skip
    said = {name: meaning for _, _, name, meaning in fields("2.1")}
    assert said["header_bytes"] == str(segment.HEADER_BYTES) and said["checksum"] == "xxh3-64 of bytes 0-55"
    assert said["major"].startswith(f"{segment.MAJOR};") and said["minor"].startswith(f"{segment.MINOR};")
    assert names.namespace_id(builders.identity())[:16] == read_fields("2.1", SEGMENT)["namespace"]


def test_the_trailer_holds_what_is_said_where_it_is_said():
    header, trailer = bytes(range(64)), Trailer(101, 102, 103, 104, bytes(range(16)))
    tail = segment.encode_trailer(header, trailer)
    found = read_fields("2.4", tail)
    assert numbers(found, "index_offset", "index_bytes", "index_raw_bytes", "records", "reserved") == [
        101, 102, 103, 104, 0,
    ]  # fmt: skip
    assert found["index_digest"] == bytes(range(16))
    assert numbers(found, "checksum") == [envelope.digest64(header, tail[:56])]
    _, _, stored, real = segment_parts(SEGMENT)
    assert real.index_digest == envelope.digest128(stored) and real.index_bytes == len(stored)


@pytest.mark.parametrize(("number", "data", "module"), [("3", MANIFEST, manifest), ("10", WEIGHTS, weights)])
def test_the_header_of_a_file_that_is_one_body_holds_what_is_said_where_it_is_said(number, data, module):
    found, body = read_fields(number, data), data[envelope.HEADER_BYTES :]
    raw = codec.unpack(body, numbers(found, "body_raw_bytes")[0])
    assert numbers(found, "major", "minor", "required_features", "body_bytes", "body_raw_bytes", "checksum") == [
        module.MAJOR, module.MINOR, 0, len(body), len(raw), envelope.digest64(data[:48]),
    ]  # fmt: skip
    assert found["body_digest"] == envelope.digest128(body)


TYPES = {"list": list, "int": int, "float": float, "str": str, "map": dict}


def members(number: str, at: int) -> dict[str, str]:
    return {name: kind for name, kind, _ in tables(number)[at]}


def check_members(body: dict, said: dict[str, str], counts: dict[str, int]) -> None:
    """Names in order, and of each the type or the bytes of a column of that many numbers."""
    assert list(body) == list(said)
    for name, kind in said.items():
        column = re.fullmatch(r"([iu])(\d)\[(\w+)(?: x (\d+))?\]", kind)
        if column:
            _, width, of, times = column.groups()
            assert type(body[name]) is bytes, name
            assert len(body[name]) == int(width) * counts[of] * int(times or 1), name
        elif kind in TYPES:
            assert type(body[name]) is TYPES[kind], name
        else:
            assert (name, kind) == ("tokens", "i4 or i8")
            assert len(body[name]) == body["token_width"] * counts["tokens"]


def column(body: dict, said: dict[str, str], name: str) -> list[int]:
    """A column as the document says that it is to be read."""
    return np.frombuffer(body[name], "<" + said[name].split("[")[0]).tolist()


def test_the_index_has_the_members_that_are_said():
    index, body, said = builders.read_segment(SEGMENT), index_body(SEGMENT), members("2.3", 0)
    pages, parts = int(index.pages.sum()), len(index.parts)
    assert len({index.records, pages, parts, len(index.tokens)}) == 4, "counts that differ tell columns apart"
    counts = {"records": index.records, "parts": parts, "pages": pages, "tokens": len(index.tokens)}
    check_members(body, said, counts)
    for name in ("pool", "space", "start", "pages", "offset", "bytes", "checksum"):
        read = getattr(index, "stored" if name == "bytes" else name)
        assert column(body, said, f"record_{name}") == read.tolist(), name
        assert read.dtype == "<" + said[f"record_{name}"].split("[")[0], name
    assert max(column(body, said, "record_checksum")) >= 2**63, "tells u8 from i8"
    assert column(body, said, "record_parts") == [len(index.record_parts(r)) for r in range(index.records)]
    for name in ("codec", "first_buffer", "buffers", "bytes", "frame_bytes"):
        read = index.parts["stored_bytes" if name == "bytes" else name].tolist()
        assert column(body, said, f"part_{name}") == read, name
    assert said["record_parent"] == f"u1[records x {HASH_BYTES}]"
    assert body["page_hash"] == index.page_hash.tobytes()
    assert segment.KEY_BYTES == 16 and "first 16 bytes of each page's hash" in section("2.3")


def test_the_manifest_has_the_members_that_are_said():
    m, body, said = STORE.manifest, manifest_body(MANIFEST), members("3", 1)
    pieces = [(i, p) for i, n in enumerate(m.nodes) for p in n.pieces]
    assert len(pieces) != len(m.nodes)
    check_members(body, said, {"nodes": len(m.nodes), "pieces": len(pieces)})
    for name in ("parent", "space", "pages"):
        assert column(body, said, f"node_{name}") == [getattr(n, name) for n in m.nodes]
    assert -1 in column(body, said, "node_parent"), "tells i4 from u4"
    assert column(body, said, "piece_node") == [i for i, _ in pieces]
    for name in ("pool", "at", "record", "first", "pages"):
        assert column(body, said, f"piece_{name}") == [getattr(p, name) for _, p in pieces]
    assert [m.segments[s].id for s in column(body, said, "piece_segment")] == [p.segment for _, p in pieces]
    assert body["segments"] == [[s.id, s.bytes, s.digest, s.records] for s in m.segments]
    assert list(body["identity"]) == ["model", "cut", "soft"]


def test_a_weight_digest_has_the_members_that_are_said():
    body, said = envelope.decode_file(WEIGHTS, weights.MAGIC, weights.MAJOR, "weight digest"), members("10", 1)
    check_members(body, said, {})
    w = builders.WEIGHTS
    assert body["files"] == [[f.path, f.inode, f.bytes, f.mtime_ns, f.ctime_ns] for f in w.files]
    assert (body["checkpoint"], body["rule"], body["digest"]) == (w.checkpoint, w.rule, w.digest)


def test_pools_and_spaces_have_the_shape_that_is_said():
    rows = {name: meaning for name, _, meaning in tables("2.3")[0]}
    form = "`{name, unit, buffers: [[name, dtype, row shape, row bytes], ...]}`; unit `slot`, `page` or `state`: "
    assert rows["pools"].startswith(form)
    assert rows["spaces"] == "`[extra key or nil, cache salt or nil, bigram]`"
    for body in (index_body(SEGMENT), manifest_body(MANIFEST)):
        for stored, pool in zip(body["pools"], STORE.pools, strict=True):
            buffers = [[b.name, b.dtype, list(b.row_shape), b.row_bytes] for b in pool.buffers]
            assert list(stored.items()) == [("name", pool.name), ("unit", pool.unit), ("buffers", buffers)]
    assert manifest_body(MANIFEST)["spaces"] == [[s.extra_key, s.cache_salt, s.bigram] for s in builders.SPACES]


def test_the_record_checksum_is_seeded_as_said():
    """First 8 bytes of the id as a little-endian number, XOR the ordinal."""
    index = builders.read_segment(SEGMENT)
    for record in range(index.records):
        low = int(index.offset[record])
        payload = SEGMENT[low : low + int(index.stored[record])]
        seed = struct.unpack("<Q", index.id[:8])[0] ^ record
        assert envelope.digest64(payload, seed=seed) == int(index.checksum[record])


def test_codecs_are_those_of_the_table():
    assert {int(number): name for number, name, _ in tables("4")[0]} == {int(c): c.name for c in codec.Codec}


def test_limits_are_those_of_the_table():
    said = {name: int(value) for name, value, _ in tables("6")[0]}
    assert said == {name: value for name, value in vars(limits).items() if name.isupper()}


def test_names_are_those_of_the_directory_listing():
    said = section("1")
    of = builders.identity()
    for pattern, made in (
        (r"<architecture>-<16 hex>", names.model_dir(of)),
        (r"<16 hex>", names.cut_dir(of)),
        (r"gen-<10 digits>.kvm", names.manifest(STORE.manifest.generation)),
        (r"seg-<32 hex>.kvs", names.segment(bytes(16))),
        (r"weights-<16 hex>.kvw", names.weights(builders.WEIGHTS.checkpoint)),
    ):
        assert pattern in said
        expression = re.escape(pattern).replace("<architecture>", r"\w+").replace(r"<10\ digits>", r"\d{10}")
        expression = re.sub(r"<(\d+)\\ hex>", r"[0-9a-f]{\1}", expression)
        assert re.fullmatch(expression, made), (expression, made)
    shard = re.search(r"dp<n>[\w<>-]+", said)[0]
    assert shard.replace("<n>", "0") == builders.SHARD and names.SHARD.fullmatch(builders.SHARD)
    assert names.TEMPORARY.fullmatch("tmp-x") and "tmp-*" in said and names.LOCK in said


def test_the_newest_version_is_the_one_that_is_written_and_each_has_golden_files():
    versions = tables("9")[0]
    assert versions[-1][0] == f"{segment.MAJOR}.{segment.MINOR}" == f"{manifest.MAJOR}.{manifest.MINOR}"
    for version, _, place in versions:
        assert place == f"`tests/golden/v{version}`"
        assert (ROOT / place.strip("`") / "expected.json").is_file()
    golden = {p.name for p in (ROOT / "tests" / "golden").iterdir()}
    assert golden == {f"v{version}" for version, _, _ in versions}
    assert TEXT.splitlines()[0].endswith(f"version {segment.MAJOR}")
