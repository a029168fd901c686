"""The benchmarks run and measure what they say: their smallest sizes, never a time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import serving

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]
SCRIPTS = {"restart": "restart", "serving": "under_load", "store": "store"}
PNG = b"\x89PNG\r\n\x1a\n"


def bench(name: str, at) -> dict:
    result, picture = at / f"{name}.json", at / f"{name}.png"
    # Not by its script: that would set up and take the environment of the pinned engine, whatever this one is.
    script = serving.ROOT / "scripts" / "bench" / f"{SCRIPTS[name]}.py"
    command = [sys.executable, script, "--quick", "--json", result, "--png", picture]
    pipe = subprocess.PIPE
    with subprocess.Popen(list(map(str, command)), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            shown, steps = process.communicate()
        except BaseException:
            process.terminate()  # killed, it would leave its server behind
            raise
    assert process.returncode == 0, steps[-3000:]
    assert shown.lstrip().startswith("Ratios")
    assert picture.read_bytes().startswith(PNG)
    found = json.loads(result.read_text())
    assert found["benchmark"] == name and found["quick"]
    assert found["machine"]["cores"] > 0
    for ratio in found["ratios"]:
        assert ratio["value"] > 0 or ratio["unit"] == "MiB"  # what was freed before may be enough
        value, goal = ratio["value"], ratio["goal"]
        met = None if goal is None else value >= goal if ratio["at_least"] else value <= goal
        assert ratio["met"] is met
    return found


def test_restart_is_warm_with_the_plugin_and_with_the_peer(tmp_path):
    found = bench("restart", tmp_path)
    variants = {v["name"]: v for v in found["variants"]}
    assert set(variants) == {"plugin, page 1", "HiCache, page 64"}
    for v in variants.values():
        (cold,), (warm,), (first,) = (v["passes"][which] for which in ("cold", "warm", "restarted"))
        assert cold["cached"] < 0.6 * cold["asked"]
        assert first["cached"] >= 0.99 * warm["cached"] > 0.9 * warm["asked"]
        assert v["outputs"]["same"] == v["outputs"]["of"]
        assert v["bytes"] > 0
    assert variants["plugin, page 1"]["files"] <= 16
    # One file for each page of the peer's.
    assert variants["HiCache, page 64"]["files"] > 16
    assert len(found["ratios"]) == 4


def test_serving_saves_and_restores_under_load(tmp_path):
    found = bench("serving", tmp_path)
    variants = {v["name"]: v for v in found["variants"]}
    assert list(variants) == ["stock", "saving", "restoring"]
    for v in variants.values():
        assert v["itl"]["n"] > 100
        assert v["tokens"] == variants["stock"]["tokens"]
        assert v["cached"] == variants["stock"]["cached"]
    saving, restoring = variants["saving"], variants["restoring"]
    assert sum(s["new_tokens"] for s in saving["snapshots"]) > 0
    snapshot = {when: saving["status"][when]["snapshot"] for when in ("before", "after")}
    assert snapshot["after"]["generation"] > snapshot["before"]["generation"]
    restore = restoring["status"]["after"]["restore"]
    assert restoring["status"]["before"]["restore"]["tokens_restored"] < restore["tokens_total"]
    assert restore["state"] == "done"
    assert restore["tokens_restored"] == restore["tokens_total"] > 0


def test_store_is_measured_against_the_machine(tmp_path):
    found = bench("store", tmp_path)
    cases = found["cases"]
    assert [label.split()[0].strip(",") for label in cases] == ["codec", "rates", "growth", "tokens", "pauses"]
    codec, rates = cases["codec"], cases["rates, 1 thread"]
    assert 1 < codec["ratio_zstd"] < codec["ratio"] < codec["ratio_bound"] < 2
    assert rates["stored"] < 0.75 * rates["bytes"]
    for name in ("save", "restore_warm", "restore_cold", "decode_warm", "memcpy", "disk_write_raw"):
        assert rates[name] > 0
    assert cases["pauses 500"]["first"]["passes"] > 1
