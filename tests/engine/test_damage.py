"""Whatever happens to a store's bytes, `verify` finds it, and a restart holds nothing but what was saved."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import flow
import numpy as np
import pytest
import real
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_persist.fs import REAL
from sglang_persist.store import verify


@dataclass
class Saved:
    root: Path
    paths: list = field(repr=False)  # megabytes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A store of three generations."""
    root = tmp_path_factory.mktemp("saved") / "store"
    rng = np.random.default_rng(3)
    e, at = real.engine(size=2048), flow.home(root)
    for _ in range(3):
        real.populate(e, rng, 4)
        flow.snapshot(e, at)
    at.close()
    return Saved(root, e.paths())


#: (which file, what happens to it, where as a share of its length, bits or bytes)
EDITS = st.tuples(
    st.integers(0, 99),
    st.sampled_from(["flip", "set", "insert", "cut", "truncate", "extend", "double", "zeros", "other file"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 255),
)


def edited(files: dict[str, bytes], name: str, kind: str, share: float, value: int) -> bytes:
    data = bytearray(files[name])
    at = int(share * len(data))
    if kind == "flip":
        data[at] ^= value
    elif kind == "set":
        data[at] = value
    elif kind == "insert":
        data[at:at] = bytes([value])
    elif kind == "cut":
        del data[at : at + value]
    elif kind == "truncate":
        del data[at:]
    elif kind == "extend":
        data += data[at : at + value]
    elif kind == "double":
        data[at:at] = data[at : at + value]
    elif kind == "zeros":
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    else:
        data = files[sorted(files)[value % len(files)]]
    return bytes(data)


@given(st.lists(EDITS, min_size=1, max_size=3))
def test_changed_bytes_are_found_and_never_restored(saved, tmp_path_factory, edits):
    sound = {str(p.relative_to(saved.root)): p.read_bytes() for p in sorted(saved.root.rglob("*.kv?"))}
    changed = {}
    for which, *edit in edits:
        name = list(sound)[which % len(sound)]
        now = edited(sound, name, *edit)
        if now != sound[name]:
            changed[name] = now
    root = tmp_path_factory.mktemp("damaged") / "store"
    shutil.copytree(saved.root, root)
    for name, now in changed.items():
        (root / name).write_bytes(now)
    found = {finding.path for finding in verify.verify(REAL, root).findings}
    assert set(changed) <= found
    again, at, _ = flow.restart(root, size=2048)
    assert real.stored_paths_are_part_of(saved.paths, again.paths())
    again.check()
    at.close()
    shutil.rmtree(root)


def test_the_judge_sees_one_wrong_byte(saved):
    e, at, _ = flow.restart(saved.root, size=2048)
    at.close()
    assert real.stored_paths_are_part_of(saved.paths, e.paths())
    leaf = e.tree.nodes()[-1]
    e.pool.v_buffer[1].view(torch.uint8)[int(e.tree.slots(leaf, 0, leaf.end)[-1]), 0, 0] ^= 1
    assert not real.stored_paths_are_part_of(saved.paths, e.paths())
