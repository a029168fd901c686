"""Whose KV it is: what changes the digest of the weights, and the reason given when nothing fits."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import real

from sglang_persist.engine import identity, weights
from sglang_persist.errors import Unsupported
from sglang_persist.fs import REAL

TENSORS = {"a": 100_000, "b": 500_000, "c": 10}


def checkpoint(path, change=None):
    """A safetensors file of three tensors of bytes; `change` is (tensor, offset) of one byte that differs."""
    header, data, at = {"__metadata__": {"format": "pt"}}, [], 0
    for i, (name, size) in enumerate(TENSORS.items()):
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        values = np.random.default_rng(i).integers(0, 256, size, dtype=np.uint8)
        if change and change[0] == name:
            values[change[1]] ^= 1
        data.append(values.tobytes())
        at += size
    text = json.dumps(header).encode()
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
    return path


@pytest.mark.parametrize("change", [("a", 0), ("a", 99_999), ("b", 123_456), ("b", 250_000), ("c", 5)])
def test_any_byte_of_a_checkpoint_changes_its_digest(tmp_path, change):
    same = weights.digest(REAL, checkpoint(tmp_path / "one"))
    assert weights.digest(REAL, checkpoint(tmp_path / "renamed")) == same
    assert weights.digest(REAL, checkpoint(tmp_path / "other", change)) != same


@pytest.mark.parametrize("change", [("a", 0), ("b", 0), ("b", 250_000), ("b", 499_999), ("c", 9)])
def test_ends_and_middle_of_every_tensor_of_a_large_checkpoint_change_its_digest(tmp_path, change):
    same = weights.digest(REAL, checkpoint(tmp_path / "one"), whole_bytes=1000)
    assert same.startswith("sampled:")
    assert weights.digest(REAL, checkpoint(tmp_path / "other", change), whole_bytes=1000) != same


def test_what_is_not_seen_in_a_large_checkpoint_is_what_the_readme_says(tmp_path):
    same = weights.digest(REAL, checkpoint(tmp_path / "one"), whole_bytes=1000)
    assert weights.digest(REAL, checkpoint(tmp_path / "other", ("b", 100_000)), whole_bytes=1000) == same


def test_damaged_header_of_a_large_checkpoint_is_sampled_as_bytes(tmp_path):
    path = checkpoint(tmp_path / "one")
    file = path / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    assert weights.digest(REAL, path, whole_bytes=1000).startswith("sampled:")


def test_model_without_weights_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="no weight files"):
        weights.digest(REAL, tmp_path)


def changed(part: str, **fields):
    return replace(real.IDENTITY, **{part: {**getattr(real.IDENTITY, part), **fields}})


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ([], "no_snapshot"),
        ([changed("cut", topology={"tp": 2, "pp": 1})], "topology_changed"),
        ([changed("cut", page=16)], "page_size_changed"),
        ([changed("cut", layout=2)], "layout_changed"),
        ([changed("cut", layout=2, page=16)], "layout_changed"),
        ([changed("model", kv_dtype="float8_e5m2")], "dtype_changed"),
        ([changed("model", weights="v")], "model_changed"),
        ([changed("model", weights="v"), changed("cut", page=16)], "page_size_changed"),
        ([real.IDENTITY], "no_snapshot"),
    ],
)
def test_reason_of_a_cold_start_is_the_nearest_difference(stored, reason):
    assert identity.why_cold(real.IDENTITY, stored) == reason
