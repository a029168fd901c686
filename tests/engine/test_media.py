"""Prompts with pictures or sound: their text is saved up to the first of these, and nothing after it."""

from __future__ import annotations

from types import SimpleNamespace

import flow
import numpy as np
import pytest
import real
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE
from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration
from sglang.srt.models.transformers import MultiModalMixin

from sglang_persist.engine import identity
from sglang_persist.engine.tree import MEDIA
from sglang_persist.errors import Unsupported
from sglang_persist.fs import REAL
from sglang_persist.store import verify

CORES = ("rust", "python")
PICTURE = [MM_PAD_SHIFT_VALUE + 7, MM_PAD_SHIFT_VALUE + (1 << 29)] * 20


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def matched(e: real.Engine, tokens) -> int:
    return e.match(real.key_of(e, tokens))


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_text_in_front_of_a_picture_comes_back(tmp_path, rng, core, page, bigram):
    kind = {"core": core, "page": page, "bigram": bigram, "media": {5}}
    e = real.engine(**kind)
    head = real.random_tokens(rng, 70)
    tails = [real.random_tokens(rng, n) for n in (40, 50, 60)]
    text = head + tails[0]
    shown = head + PICTURE + tails[1]
    for tokens in (text, shown, head + PICTURE + tails[2], PICTURE + tails[0]):
        e.put(tokens)
    before = e.held()
    saved = flow.snapshot(e, at := flow.home(tmp_path))
    at.close()
    again, _, result = flow.restart(tmp_path, held=3 * page, **kind)
    whole = (len(head) - bigram) // page * page
    assert matched(again, text) == matched(e, text) > 0
    assert matched(again, shown) == whole
    assert matched(again, PICTURE + tails[0]) == 0
    after = again.held()
    assert all(before[key] == kv for key, kv in after.items())
    assert len(after) * page == saved.tokens == result.tokens
    assert e.tree.not_saved[MEDIA] == e.cache.total_size()[0] - saved.tokens > 0
    again.check(held=3 * page)
    assert verify.verify(REAL, tmp_path, deep=True).findings == []


@pytest.mark.parametrize("core", CORES)
def test_what_follows_is_saved_as_it_comes(tmp_path, rng, core):
    """A node that was cut is split later, and text is added to it."""
    e, at = real.engine(core=core, media={5}), flow.home(tmp_path)
    head = real.random_tokens(rng, 3000)
    e.put(head + PICTURE)
    assert flow.snapshot(e, at).tokens == 3000
    assert flow.snapshot(e, at).new_tokens == 0
    e.put(head[:1000] + real.random_tokens(rng, 100))
    assert flow.snapshot(e, at).new_tokens == 100
    e.put(head + real.random_tokens(rng, 50))
    assert flow.snapshot(e, at).new_tokens == 50
    e.put(head + PICTURE + real.random_tokens(rng, 50))
    assert flow.snapshot(e, at).new_tokens == 0
    at.close()
    before = e.held()
    again, _, result = flow.restart(tmp_path, core=core, media={5})
    after = again.held()
    assert len(after) == result.tokens == 3150
    assert all(before[key] == kv for key, kv in after.items())


@pytest.mark.parametrize("core", CORES)
def test_a_node_that_is_split_while_it_is_saved_keeps_its_text(tmp_path, rng, core):
    e, at = real.engine(core=core, media={5}), flow.home(tmp_path)
    head = real.random_tokens(rng, 3000)
    e.put(head + PICTURE)
    job = flow.begin(e, at)
    flow.advance(job, 1)
    e.put(head[:1000] + real.random_tokens(rng, 100))
    flow.finish(job)
    at.close()
    again, _, _ = flow.restart(tmp_path, core=core, media={5})
    assert matched(again, head) == 3000
    before = e.held()
    assert all(before[key] == kv for key, kv in again.held().items())


@pytest.mark.parametrize("core", CORES)
def test_a_placeholder_of_the_model_counts_as_a_picture(tmp_path, rng, core):
    """SGLang leaves it where it finds no picture for it, or not which."""
    e = real.engine(core=core, media={49001, 49002})
    tokens = real.random_tokens(rng, 60)
    e.put(tokens + [49001] * 10 + tokens)
    assert flow.snapshot(e, flow.home(tmp_path)).tokens == 60


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"image_token_id": 7, "text_config": {"vision_start_token_id": 8, "eos_token_id": 1}}, {7, 8}),
        ({"image_token_index": 7, "boi_token_index": 8, "eoi_token_index": 9, "vocab_size": 100}, {7, 8, 9}),
        ({"audio_token_id": [7, 8], "use_image_id": True, "video_token_id": None}, {7, 8}),
        ({"image_size": 224, "image_width": 9, "num_image_tokens": 9, "vision_config": {"token_id": 9}}, set()),
        ({"hidden_size": 64}, set()),
    ],
)
def test_placeholders_are_found_in_the_models_configuration(names, expected):
    def scheduler(pad, multimodal=True):
        config = SimpleNamespace(is_multimodal=multimodal, hf_config=SimpleNamespace(to_dict=lambda: names))
        return SimpleNamespace(model_config=config, pad_input_ids_func=pad)

    assert identity.media_tokens(scheduler(Gemma3ForConditionalGeneration.pad_input_ids.__get__(object()))) == expected
    assert identity.media_tokens(scheduler(None, multimodal=False)) is None
    for pad in (None, MultiModalMixin.pad_input_ids.__get__(object())):
        with pytest.raises(Unsupported):
            identity.media_tokens(scheduler(pad))


def test_prompts_of_a_model_without_media_are_not_looked_at(tmp_path, rng):
    e = real.engine()
    e.put(real.random_tokens(rng, 50) + PICTURE)
    assert flow.snapshot(e, flow.home(tmp_path)).tokens == 50 + len(PICTURE)
    assert not e.tree.not_saved
