"""Whose KV it is: what changes the digest of the weights, and the reason given when nothing fits."""

from __future__ import annotations

import json
import os
import pickle
import time
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import real
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from sglang_persist.engine import identity, weights
from sglang_persist.engine.drafts import Draft
from sglang_persist.errors import StoreUnavailable, Unsupported
from sglang_persist.fs import REAL, FileSystem
from sglang_persist.store import names, verify, weights_cache

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


# ------------------------------------------------------------------------------------------------------ the cache


class Counting(FileSystem):
    """Counts the files that are opened, by suffix; `meddle` is called before a weight file is."""

    def __init__(self, meddle=lambda: None):
        self.opened, self.meddle = [], meddle

    def open(self, path):
        self.opened.append(path.suffix)
        if path.suffix == ".safetensors":
            self.meddle()
        return super().open(path)


@pytest.fixture
def settled(tmp_path, monkeypatch):
    """A checkpoint whose files are old: the clock by which they are judged runs ahead."""
    monkeypatch.setattr(weights, "time", SimpleNamespace(time=lambda: time.time() + 10))
    return checkpoint(tmp_path / "model")


def test_weights_are_read_once(tmp_path, settled):
    root, fs = tmp_path / "store", Counting()
    first = weights.identify(fs, settled, root)
    assert first == weights.digest(REAL, settled) and ".safetensors" in fs.opened
    assert [p.name for p in root.iterdir()] == [names.weights(str(settled.resolve()))]
    fs.opened.clear()
    assert weights.identify(fs, settled, root) == first and fs.opened == [".kvw"]
    assert verify.verify(REAL, root).findings == []


def test_a_hub_cache_of_links_is_read_once(tmp_path, settled):
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(settled / "model.safetensors")
    fs = Counting()
    first = weights.identify(fs, tmp_path / "snapshot", tmp_path / "store")
    fs.opened.clear()
    assert weights.identify(fs, tmp_path / "snapshot", tmp_path / "store") == first and fs.opened == [".kvw"]


@pytest.mark.parametrize("change", [("a", 0), ("b", 250_000), ("c", 9)])
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_perturbed_tensor_of_the_same_size_and_mtime_is_noticed(tmp_path, settled, change, how):
    root, file = tmp_path / "store", settled / "model.safetensors"
    first = weights.identify(REAL, settled, root)
    before = file.stat()
    other = checkpoint(tmp_path / "other", change) / "model.safetensors"
    if how == "in place":
        file.write_bytes(other.read_bytes())
    else:
        other.rename(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second = weights.identify(REAL, settled, root)
    assert second != first and second == weights.digest(REAL, settled)
    assert weights.identify(REAL, settled, root) == second


@pytest.mark.parametrize("field", ["path", "inode", "bytes", "mtime_ns", "ctime_ns"])
def test_any_difference_of_a_file_means_reading_again(tmp_path, settled, field):
    root, checkpoint_path = tmp_path / "store", str(settled.resolve())
    first = weights.identify(REAL, settled, root)
    known = weights_cache.load(REAL, root, checkpoint_path)
    (file,) = known.files
    value = getattr(file, field)
    other = replace(file, **{field: f"{value}x" if field == "path" else value + 1})
    assert weights_cache.save(REAL, root, replace(known, files=(other,), digest="whole:stale"))
    fs = Counting()
    assert weights.identify(fs, settled, root) == first and ".safetensors" in fs.opened
    assert weights_cache.load(REAL, root, checkpoint_path) == known


def test_a_file_more_or_less_or_another_rule_means_reading_again(tmp_path, settled):
    root = tmp_path / "store"
    one = weights.identify(REAL, settled, root)
    (settled / "more.safetensors").write_bytes(bytes(100))
    two = weights.identify(REAL, settled, root)
    assert two == weights.digest(REAL, settled) != one
    assert weights.identify(REAL, settled, root, whole_bytes=1000).startswith("sampled:")
    (settled / "old.bin").write_bytes(bytes(9))
    every = weights.identify(REAL, settled, root, every_kind=True)
    assert every not in (one, two) and weights.identify(REAL, settled, root) == two


def test_damage_of_the_cache_costs_reading_and_nothing_else(tmp_path, settled):
    root = tmp_path / "store"
    first = weights.identify(REAL, settled, root)
    file = root / names.weights(str(settled.resolve()))
    sound = file.read_bytes()
    for at in range(len(sound)):
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :])
        assert [f.path for f in verify.verify(REAL, root).findings] == [file.name]
        assert weights.identify(REAL, settled, root) == first
        assert file.read_bytes() == sound, "and it is put right"
    file.unlink()
    file.mkdir()
    assert weights.identify(REAL, settled, root) == first


def test_weights_that_changed_just_now_are_read_again_the_next_time(tmp_path):
    path, root = checkpoint(tmp_path / "model"), tmp_path / "store"
    first = weights.identify(REAL, path, root)
    assert not root.exists()
    other = checkpoint(tmp_path / "other", ("a", 5)) / "model.safetensors"
    (path / "model.safetensors").write_bytes(other.read_bytes())
    assert weights.identify(REAL, path, root) != first


def test_weights_that_change_while_they_are_read_are_read_again(tmp_path, settled):
    file = settled / "model.safetensors"
    changes = iter([("a", 1), ("a", 2)])

    def meddle():
        if change := next(changes, None):
            file.write_bytes((checkpoint(tmp_path / "other", change) / "model.safetensors").read_bytes())

    fs = Counting(meddle)
    assert weights.identify(fs, settled, tmp_path / "store") == weights.digest(
        REAL, checkpoint(tmp_path / "last", ("a", 2))
    )
    assert fs.opened.count(".safetensors") == 3


def test_weights_that_never_stop_changing_are_unknown(tmp_path, settled):
    file = settled / "model.safetensors"
    fs = Counting(lambda: file.write_bytes(file.read_bytes()))
    with pytest.raises(Unsupported, match="change while they are read") as error:
        weights.identify(fs, settled, tmp_path / "store")
    assert error.value.reason == "weights_unknown" and fs.opened.count(".safetensors") == 3
    assert not (tmp_path / "store").exists()


def test_store_that_cannot_be_made_is_done_without(tmp_path, settled):
    (tmp_path / "file").write_bytes(b"")
    assert weights.identify(REAL, settled, tmp_path / "file" / "store") == weights.digest(REAL, settled)


# -------------------------------------------------------------------------------------------- what changes the name

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "transformers_version": "4.0",
}  # fmt: skip


def put(path, name: str, content) -> None:
    (path / name).write_text(content if isinstance(content, str) else json.dumps(content))


def who(path, given=None, parallel=None, scheduler=None, **kind) -> identity.Identity:
    """The identity of a server over this checkpoint: real arguments, real configuration, real pool and tree."""
    args = ServerArgs(model_path=str(path), **(given or {}))
    return whose(args, parallel, scheduler, **kind)


def whose(args, parallel=None, scheduler=None, drafts=(), **kind) -> identity.Identity:
    """`drafts`: the checkpoints of draft models."""
    config = ModelConfig.from_server_args(args)
    e = real.engine(**kind, drafts=("mha",) * len(drafts))
    widths = {"tp_size": 1, "pp_size": 1, "attn_cp_size": 1, "attn_dp_size": 1, "dcp_enabled": False}
    enable_lora = bool(args.enable_lora)
    stub = SimpleNamespace(server_args=args, model_config=config, enable_lora=enable_lora, **(scheduler or {}))
    parallel = SimpleNamespace(**(widths | (parallel or {})))
    found = [Draft(d, ModelConfig.from_server_args(ServerArgs(model_path=str(path))))
             for d, path in zip(e.drafts, drafts, strict=True)]  # fmt: skip
    return identity.identify(REAL, stub, parallel, e.tree, e.pages, drafts=found)


@pytest.fixture
def model(tmp_path):
    path = checkpoint(tmp_path / "model")
    put(path, "config.json", CONFIG)
    put(path, "hf_quant_config.json", {"group": 128})
    put(path, "scales.json", {"kv": 1.0})
    return path


def rewrite(name, content):
    return lambda path: put(path, name, content)


def override(**fields_):
    return {"json_model_override_args": json.dumps(fields_)}


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}

#: What is changed: in the checkpoint, in the arguments, in the parallel widths, or in pool and tree.
CHANGES = {
    "a tensor": {"files": lambda path: checkpoint(path, ("b", 77))},
    "another weight file": {"files": rewrite("more.safetensors", "x")},
    "configuration": {"files": rewrite("config.json", CONFIG | {"hidden_act": "gelu"})},
    "rope theta": {"files": rewrite("config.json", CONFIG | {"rope_theta": 50000.0})},
    "rope theta by override": {"given": override(rope_theta=50000.0)},
    "rope scaling by override": {"given": override(rope_scaling=YARN)},
    "sliding window by override": {"given": override(sliding_window=128)},
    "revision": {"given": {"revision": "v2"}},
    "quantization file": {"files": rewrite("hf_quant_config.json", {"group": 64})},
    "another quantization file": {"files": rewrite("quantize_config.json", {"bits": 4})},
    "modelslim file": {"files": rewrite("quant_model_description.json", {})},
    "sparse attention": {"files": rewrite("sparse_attention_config.json", {"layers": {}})},
    "index of the weights": {"files": rewrite("model.safetensors.index.json", {"weight_map": {}})},
    "KV scales": {"given": {"quantization_param_path": "scales.json"}},
    "dtype": {"given": {"dtype": "float16"}},
    "KV dtype fp16": {"kind": {"dtype": torch.float16}},
    "KV dtype e4m3": {"kind": {"dtype": torch.float8_e4m3fn}},
    "KV dtype e5m2": {"kind": {"dtype": torch.float8_e5m2}},
    "page size": {"kind": {"page": 16}},
    "heads": {"kind": {"heads": 4}},
    "head size": {"kind": {"dim": 32}},
    "bigram": {"kind": {"bigram": True}},
    "TP": {"parallel": {"tp_size": 2}},
    "PP": {"parallel": {"pp_size": 2}},
    "CP": {"parallel": {"attn_cp_size": 2}},
    "attention DP": {"parallel": {"attn_dp_size": 2}},
    "model implementation": {"given": {"model_impl": "transformers"}},
    "load format": {"given": {"load_format": "bitsandbytes"}},
    "what the loader is told": {"given": {"model_loader_extra_config": '{"pattern": "x"}'}},
    "context length": {"given": {"context_length": 2048}},
    "embedding model": {"given": {"is_embedding": True}},
    "quantization": {"given": {"quantization": "gptq"}},
    "ModelOpt": {"given": {"modelopt_quant": "fp8"}},
    "FlashRL profile": {"given": {"rl_quant_profile": "scales.json"}},
    "on-policy target": {"given": {"rl_on_policy_target": "fsdp"}},
    "quantized communication": {"given": {"enable_quant_communications": True}},
    "precision of MXFP4": {"given": {"flashinfer_mxfp4_moe_precision": "bf16"}},
    "quantized activations": {"given": {"enable_w4a4_mxfp4_megamoe": True}},
    "dispatched activations": {"given": {"deepep_dispatcher_output_dtype": "fp8"}},
    "diffusion": {"given": {"dllm_algorithm": "LowConfidence"}},
    "diffusion settings": {"given": {"dllm_algorithm_config": "scales.json"}},
    "sparse attention setting": {"given": {"enable_hisparse": True}},
    "format of the configuration": {"files": rewrite("params.json", {"dim": 64})},
    "TF32": {"given": {"enable_tf32_matmul": True}},
    "hooks in the model": {"given": {"forward_hooks": [{"name": "x"}]}},
    "code of the model": {"given": {"trust_remote_code": True}, "files": rewrite("modeling_x.py", "pass")},
}


def apply(path, change):
    """The identity of this checkpoint after one change."""
    change.get("files", lambda _: None)(path)
    given = {k: str(path / v) if v == "scales.json" else v for k, v in change.get("given", {}).items()}
    return who(path, given, change.get("parallel"), change.get("scheduler"), **change.get("kind", {}))


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_kv_changes_the_namespace(model, name):
    before = who(model)
    after = apply(model, CHANGES[name])
    assert names.namespace(after) != names.namespace(before)
    assert names.namespace_id(after) != names.namespace_id(before)


def test_no_two_of_these_changes_share_a_namespace(tmp_path, model):
    found = {"none": names.namespace(who(model))}
    for name, change in CHANGES.items():
        path = checkpoint(tmp_path / name.replace(" ", "-"))
        put(path, "config.json", CONFIG)
        put(path, "hf_quant_config.json", {"group": 128})
        put(path, "scales.json", {"kv": 1.0})
        found[name] = names.namespace(apply(path, change))
    assert len(set(found.values())) == len(found)


SAME = {
    "served name": {"served_model_name": "other"},
    "address": {"host": "0.0.0.0", "port": 31000},
    "key": {"api_key": "k"},
    "memory": {"mem_fraction_static": 0.5, "max_total_tokens": 5000},
    "scheduling": {"schedule_policy": "lpm", "chunked_prefill_size": 128, "max_running_requests": 3},
    "eviction": {"radix_eviction_policy": "lfu"},
    "seed": {"random_seed": 7},
    "kernels": {"attention_backend": "torch_native", "disable_cuda_graph": True, "triton_attention_num_kv_splits": 4},
    "templates": {"chat_template": "x", "reasoning_parser": "qwen3"},
    "how weights are read": {"load_format": "safetensors", "weight_loader_disable_mmap": True},
    "threads of the loader": {"model_loader_extra_config": '{"enable_multithread_load": true, "num_threads": 2}'},
    "code without trust": {"trust_remote_code": False},
    "LoRA": {"enable_lora": True},
}


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_change_kv_does_not_change_the_namespace(model, name):
    assert names.namespace(who(model, SAME[name])) == names.namespace(who(model))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json", "README.md", "tokenizer.json"])
def test_files_that_do_not_change_kv_do_not_change_the_namespace(model, file):
    before = who(model)
    put(model, file, "{}")
    put(model, "config.json", CONFIG | {"transformers_version": "5.0", "_name_or_path": "elsewhere"})
    assert names.namespace(who(model)) == names.namespace(before)


def test_copy_of_a_checkpoint_has_the_namespace_of_the_original(tmp_path, model):
    (tmp_path / "moved").symlink_to(model)
    before = who(model)
    assert names.namespace(who(tmp_path / "moved")) == names.namespace(before)
    model.rename(tmp_path / "elsewhere")
    assert names.namespace(who(tmp_path / "elsewhere")) == names.namespace(before)


def test_settings_that_change_nothing_are_not_in_the_name(tmp_path):
    """So a release that does not have one of them agrees with one that has it, whichever the default is written as."""
    path = checkpoint(tmp_path / "plain")
    put(path, "config.json", CONFIG)
    one = who(path)
    assert set(one.model) == {
        "architecture", "config", "overrides", "dtype", "quantization", "kv_dtype", "weights",
    }  # fmt: skip
    # Every release of SGLang and of this package: another name here is a cold start for everybody.
    assert names.namespace(one) == "LlamaForCausalLM-7f7ba7a5e03059ec/07dc790affbf037f"


def test_arguments_count_as_they_were_resolved(tmp_path):
    """SGLang's workers get what was given, and beside it what became of that."""
    path = checkpoint(tmp_path / "plain")
    put(path, "config.json", CONFIG)
    args = ServerArgs(model_path=str(path), device="cpu")
    args.resolve_once()
    args = pickle.loads(pickle.dumps(args))
    assert names.namespace(whose(args)) == names.namespace(who(path))
    args._resolved_overrides.append(("a hook", {"enable_tf32_matmul": True}))
    assert args.enable_tf32_matmul is None or args.enable_tf32_matmul is False
    assert names.namespace(whose(args)) != names.namespace(who(path))


def test_layers_of_the_pipeline_stages_change_the_namespace(model, monkeypatch):
    before = who(model)
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "1,1")
    assert names.namespace(who(model)) != names.namespace(before)


def test_weights_of_the_kind_that_the_loader_was_told_to_take_count(model):
    (model / "model.pt").write_bytes(b"one")
    before, auto = who(model, {"load_format": "pt"}), who(model)
    (model / "model.pt").write_bytes(b"two")
    assert names.namespace(who(model, {"load_format": "pt"})) != names.namespace(before)
    assert names.namespace(who(model)) == names.namespace(auto)


def test_identity_reads_the_same_from_a_manifest(model):
    """A name is derived from what was written: whatever is in it must survive the encoding."""
    every = {k: v for c in CHANGES.values() for k, v in c.get("given", {}).items() if v not in ("scales.json", "gptq")}
    one = who(model, every)
    assert set(one.model) > {"revision", "load_format", "loader", "side_files", "forward_hooks", "context_length"}
    for part in fields(one):
        again = json.loads(json.dumps(getattr(one, part.name)))
        assert again == getattr(one, part.name)


def test_of_a_draft_model_its_own_checkpoint_counts(tmp_path, model):
    draft = checkpoint(tmp_path / "draft")
    put(draft, "config.json", CONFIG)
    alone, inside, beside = who(model), who(model, drafts=[model]), who(model, drafts=[draft])
    assert alone.model == inside.model == beside.model
    assert len({names.namespace(one) for one in (alone, inside, beside, who(model, drafts=[draft, draft]))}) == 4
    checkpoint(draft, ("b", 77))
    other = who(model, drafts=[draft])
    put(draft, "config.json", CONFIG | {"hidden_act": "gelu"})
    assert len({names.namespace(one) for one in (beside, other, who(model, drafts=[draft]))}) == 3


REFUSED = {
    "dummy weights": ({"load_format": "dummy"}, "dummy_weights"),
    "remote weights": ({"load_format": "remote_instance"}, "weights_unknown"),
    "converted weights": ({"load_format": "presharded"}, "weights_unknown"),
    "weights of a daemon": ({"weight_cache_mode": "client"}, "weights_unknown"),
    "restored weights": ({"modelopt_checkpoint_restore_path": "/x"}, "weights_unknown"),
    "weights for the CPU": ({"kt_weight_path": "/x"}, "weights_unknown"),
    "merged adapter": ({"model_loader_extra_config": '{"qlora_adapter_name_or_path": "/x"}'}, "weights_unknown"),
    "weights of a draft": ({"speculative_draft_load_format": "dummy"}, "weights_unknown"),
    "sessions with LoRA": ({"enable_lora": True, "enable_streaming_session": True}, "unsupported_lora"),
    "PD": ({"disaggregation_mode": "prefill"}, "unsupported_topology"),
}


REFUSED_RANKS = {
    "DCP": {"dcp_enabled": True},
    "groups that stop one by one": {"attn_dp_size": 2, "enable_dp_attention_local_control_broadcast": True},
    "joining ranks": {"ep_join_rank_offset": 2},
}


@pytest.mark.parametrize("name", REFUSED_RANKS)
def test_ranks_that_cannot_act_together_are_refused(model, name):
    with pytest.raises(Unsupported) as error:
        who(model, parallel=REFUSED_RANKS[name])
    assert error.value.reason == "unsupported_topology"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_identified_is_refused(model, name):
    given, reason = REFUSED[name]
    with pytest.raises(Unsupported) as error:
        who(model, given)
    assert error.value.reason == reason


def test_scales_file_that_cannot_be_read_is_an_error(model):
    with pytest.raises(StoreUnavailable):
        who(model, {"quantization_param_path": str(model / "none.json")})


# --------------------------------------------------------------------------------------------------------- reasons


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
