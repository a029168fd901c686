"""What keeps equal tokens apart stays apart: extra keys, cache salts, and the adapters that SGLang puts into keys."""

from __future__ import annotations

from dataclasses import replace

import builders
import flow
import numpy as np
import pytest
import real
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_persist.format import envelope, manifest
from sglang_persist.format.segment import RecordKey
from sglang_persist.fs import REAL
from sglang_persist.model import Space
from sglang_persist.store import verify

CORES = ("rust", "python")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]

#: Texts of which one could be taken for two others, or for none.
PART = st.sampled_from([None, "", "a", "b", "ab", "abc", "bc", "c", "a\0", "\0", "None", "nil", "é", "e\u0301", "鍵"])
TEXT = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
PAIR = st.tuples(PART | TEXT, PART | TEXT)
#: SGLang itself takes the empty salt for none, in the keys of its tree.
LIVE = PAIR.map(lambda pair: (pair[0], pair[1] or None))
#: What Python's strings can hold and UTF-8 cannot.
ANY = st.none() | st.text(max_size=6) | st.sampled_from(["\ud800", "\udfff\ud800", "\udcff"])


@given(st.lists(st.builds(Space, PART | ANY, PART | ANY, st.booleans()), min_size=1, max_size=20, unique=True))
def test_no_space_is_another_in_a_file(spaces):
    body = envelope.unseal(*envelope.seal({"spaces": [envelope.encode_space(s) for s in spaces]}))
    assert envelope.decode_spaces(body) == tuple(spaces)
    m = replace(builders.small_manifest(), spaces=tuple(spaces))
    assert manifest.decode(manifest.encode(m)).spaces == tuple(spaces)
    tokens = {s: np.arange(3 + s.extra_tokens) for s in spaces}
    records = [
        (RecordKey(0, s, 0, bytes(32), t, builders.chain(bytes(32), t, 1, s.extra_tokens)), np.zeros(12, np.uint8))
        for s, t in tokens.items()
    ]
    index = builders.read_segment(builders.build_segment(m.pools, 1, records, bytes(16)))
    assert [index.spaces[at] for at in index.space] == spaces


@pytest.mark.parametrize("core", CORES)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(LIVE, min_size=2, max_size=8, unique=True), st.booleans())
def test_no_pair_of_key_and_salt_is_ever_another(tmp_path_factory, core, pairs, bigram):
    """The same tokens in every space, each with KV of its own: after a restart each space has its own again."""
    root = tmp_path_factory.mktemp("store")
    e = real.engine(core, size=256, bigram=bigram)
    keys = [e.put(TOKENS, *pair) for pair in pairs]
    before = {p[0]: p[3] for p in e.paths()}
    assert set(before) == {Space(*pair, bigram) for pair in pairs} and len(set(before.values())) == len(pairs)
    saved = flow.snapshot(e, at := flow.home(root))
    assert saved.new_tokens == len(pairs) * (len(TOKENS) - bigram), "nothing was taken for stored under another key"
    assert {s for s in at.manifest.spaces} == set(before)
    at.close()
    again, _, _ = flow.restart(root, core=core, size=256, bigram=bigram)
    assert {p[0]: p[3] for p in again.paths()} == before
    assert [again.match(k) for k in keys] == [len(k) for k in keys]
    again.check()
    assert verify.verify(REAL, root, deep=True).findings == []


@pytest.mark.parametrize("core", CORES)
@settings(max_examples=30)
@given(LIVE, LIVE)
def test_what_one_space_has_another_does_not_get(tmp_path_factory, core, stored, asked):
    root = tmp_path_factory.mktemp("store")
    e = real.engine(core, size=64)
    e.put(TOKENS, *stored)
    flow.snapshot(e, at := flow.home(root))
    at.close()
    again, _, _ = flow.restart(root, core=core, size=64)
    asked_key = real.engine(core, size=64).put(TOKENS, *asked)
    assert again.match(asked_key) == (len(TOKENS) if asked == stored else 0)


# ------------------------------------------------------------------------------------------------------------ LoRA

ADAPTER, OTHER = "6f1a0b4e9d2c4f5e8a7b6c5d4e3f2a1b", "0c9e8d7f6a5b4c3d2e1f0a9b8c7d6e5f"
#: Keys that a request can have with LoRA: the adapter's id stands at the end of the user's own key.
KEYED = [(ADAPTER, None), ("user" + ADAPTER, None), ("user", None), ("", None), (OTHER, "salt")]
BASE = [(None, None), (None, "salt")]


def fill(e: real.Engine, rng) -> dict:
    head = real.random_tokens(rng, 40)
    return {s: e.put(head + real.random_tokens(rng, 30), *s) for s in (*KEYED, *BASE)}


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("page", [1, 16])
def test_with_lora_only_paths_without_an_extra_key_are_saved(tmp_path, core, page):
    kind = {"core": core, "page": page, "keyed": False}
    e = real.engine(**kind)
    fill(e, np.random.default_rng(3))
    e.tree._keyed = True
    everything = e.paths()
    e.tree._keyed = False
    base = [p for p in everything if p[0].extra_key is None]
    assert e.paths() == base and len(base) == len(BASE) < len(everything)
    saved = flow.snapshot(e, at := flow.home(tmp_path))
    assert {s.extra_key for s in at.manifest.spaces} == {None}
    assert saved.tokens < e.cache.total_size()[0]
    at.close()
    stored = b"".join(p.read_bytes() for p in tmp_path.rglob("*.kv?"))
    assert ADAPTER.encode() not in stored
    again, _, _ = flow.restart(tmp_path, **kind)
    assert again.paths() == base
    again.check()
    assert verify.verify(REAL, tmp_path, deep=True).findings == []


@pytest.mark.parametrize("core", CORES)
def test_with_lora_an_unchanged_tree_counts_as_unchanged(tmp_path, core):
    e = real.engine(core, keyed=False)
    rng = np.random.default_rng(4)
    keys = fill(e, rng)
    at = flow.home(tmp_path)
    first = flow.snapshot(e, at)
    files = verify.store_bytes(REAL, tmp_path)
    e.put(list(keys[KEYED[0]].raw_token_ids()) + real.random_tokens(rng, 20), *KEYED[0])  # an adapter's request
    second = flow.snapshot(e, at)
    assert (second.generation, second.tokens, second.new_bytes) == (1, first.tokens, 0)
    assert verify.store_bytes(REAL, tmp_path) == files


@pytest.mark.parametrize("core", CORES)
def test_with_lora_what_was_saved_with_a_key_before_is_not_restored(tmp_path, core):
    """A server without LoRA has saved it, and the key may by now be that of an adapter."""
    e = real.engine(core)
    keys = fill(e, np.random.default_rng(5))
    base = [p for p in e.paths() if p[0].extra_key is None]
    flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    again, _, result = flow.restart(tmp_path, core=core, keyed=False)
    assert again.paths() == base and result.refused["not_taken"] >= len(KEYED)
    for space in KEYED:
        assert again.match(keys[space]) == 0
    again.check()
    again.check_evictable()


@pytest.mark.parametrize("core", CORES)
def test_with_lora_running_requests_of_an_adapter_are_left_out(tmp_path, core):
    locked: list[int] = []
    e = real.engine(core, locked=locked, keyed=False)
    rng = np.random.default_rng(6)
    locks = []
    for space in ((ADAPTER, None), (None, None)):
        key = e.put(real.random_tokens(rng, 50), *space)
        node = e.cache.tree_core.match_full_device_prefix(key)[1]
        locks.append(e.cache.lock(node))
        locked.append(node)
    at = flow.home(tmp_path)
    assert flow.snapshot(e, at).tokens == 50
    assert at.manifest.spaces == (Space(),)
    at.close()
    for lock in locks:
        e.cache.unlock(lock)


def test_every_request_of_an_adapter_has_an_extra_key():
    """What the rule rests on: SGLang appends the adapter's id, whatever it is, before anything else sees the key."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    def key(lora_id, extra_key):
        return Req("r", "", [1, 2], SamplingParams(), lora_id=lora_id, extra_key=extra_key).extra_key

    assert key(None, None) is None
    assert [key(i, k) for i in ("", ADAPTER) for k in (None, "", "u")] == [
        "", "", "u", ADAPTER, ADAPTER, "u" + ADAPTER,
    ]  # fmt: skip
