"""Stores that an earlier version wrote are read to exactly what was put into them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import builders
import numpy as np
import pytest

from sglang_persist.format.codec import Codec
from sglang_persist.fs import REAL
from sglang_persist.plan.loading import node_tokens, resolve
from sglang_persist.store import shard, verify, weights_cache

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = sorted(p.name for p in (ROOT / "tests" / "golden").iterdir())
GOLDEN = {v: ROOT / "tests" / "golden" / v for v in VERSIONS}


def expectation(version: str) -> dict:
    return json.loads((GOLDEN[version] / "expected.json").read_text(encoding="ascii"))


def newest(version: str, place: str):
    m, passed = shard.newest(REAL, GOLDEN[version] / "store" / place)
    assert m and not passed
    return m


SHARDS = [(v, s) for v in VERSIONS for s in expectation(v)["shards"]]


def test_there_are_versions_to_read():
    assert "v1.0" in VERSIONS and len(SHARDS) >= 2


@pytest.mark.parametrize(("version", "place"), SHARDS)
def test_a_stored_shard_reads_to_what_was_put_into_it(version, place):
    expected, path = expectation(version)["shards"][place], GOLDEN[version] / "store" / place
    m = newest(version, place)
    assert (m.generation, m.page_tokens, m.taken, len(m.nodes)) == (
        expected["generation"],
        expected["page_tokens"],
        expected["taken"],
        len(expected["nodes"]),
    )
    opened = {ref.id: shard.open_segment(REAL, path, ref.id, ref) for ref in m.segments}
    indexes = {k: s.index for k, s in opened.items()}
    resolved = resolve(m, indexes)
    assert not resolved.refused
    for i, (node, want) in enumerate(zip(m.nodes, expected["nodes"], strict=True)):
        space = m.spaces[node.space]
        assert [space.extra_key, space.cache_salt, space.bigram] == want["space"]
        assert (node.parent, resolved.start[i], node.pages) == (want["parent"], want["start"], want["pages"])
        assert node_tokens(m, node, indexes).tolist() == want["tokens"]
        kv = []
        for p in node.pieces:
            raw = opened[p.segment].load(p.record).tobytes()
            digest = hashlib.sha256(builders.piece_kv(indexes[p.segment], p, raw)).hexdigest()
            kv.append([m.pools[p.pool].name, p.at, p.pages, digest])
        assert kv == want["kv"]
    for segment in opened.values():
        segment.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stored_weight_digest_reads_to_what_was_put_into_it(version):
    expected = expectation(version)["weights"]
    found = weights_cache.load(REAL, GOLDEN[version] / "store", expected["checkpoint"])
    assert json.loads(json.dumps(asdict(found))) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_a_stored_version_verifies_without_findings(version):
    report = verify.verify(REAL, GOLDEN[version] / "store", deep=True)
    assert not report.findings
    assert report.leftovers == 0
    refs = [ref for v, s in SHARDS if v == version for ref in newest(v, s).segments]
    assert refs and (report.segments, report.frames) == (len(refs), sum(ref.records for ref in refs))


def test_verification_would_find_damage_in_it(tmp_path):
    shutil.copytree(GOLDEN["v1.0"] / "store", tmp_path / "store")
    victim = sorted((tmp_path / "store").rglob("*.kvs"))[0]
    victim.write_bytes(builders.flip(victim.read_bytes(), 8 * 70))
    kinds = [(f.path, f.kind) for f in verify.verify(REAL, tmp_path / "store", deep=True).findings]
    assert (str(victim.relative_to(tmp_path / "store")), "checksum") in kinds


def test_the_first_version_shows_every_part_of_the_format():
    """Codecs, both widths of token ids, several spaces, a bigram space, partly covered nodes, records across nodes."""
    codecs, widths, spaces, partial, shared = set(), set(), set(), 0, 0
    for version, place in SHARDS:
        if version == "v1.0":
            m = newest(version, place)
            spaces |= set(m.spaces)
            uses = [(p.segment, p.record) for n in m.nodes for p in n.pieces]
            shared += len(uses) - len(set(uses))
            partial += any(sum(p.pages for p in n.pieces if p.pool == 1) not in (0, n.pages) for n in m.nodes)
            for ref in m.segments:
                opened = shard.open_segment(REAL, GOLDEN[version] / "store" / place, ref.id, ref)
                codecs |= set(opened.index.parts["codec"].tolist())
                widths.add(opened.index.tokens.dtype)
                opened.close()
    assert codecs == set(Codec) and widths == {np.dtype("<i4"), np.dtype("<i8")}
    assert spaces == set(builders.SPACES)
    assert partial and shared


def test_what_is_stored_stays_small():
    assert verify.store_bytes(REAL, ROOT / "tests" / "golden")[1] < 64 << 10


def test_the_script_never_overwrites_a_version():
    before = {p: p.read_bytes() for p in sorted(GOLDEN["v1.0"].rglob("*")) if p.is_file()}
    done = subprocess.run([sys.executable, ROOT / "scripts" / "golden"], capture_output=True, text=True)
    assert done.returncode == 1 and "exists" in done.stderr
    assert {p: p.read_bytes() for p in sorted(GOLDEN["v1.0"].rglob("*")) if p.is_file()} == before
