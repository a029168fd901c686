"""Whose KV this is: the model, the cut of it that this process holds, and what is only worth showing.

The model and the cut are compared, by digest; versions are not. Configuration is taken from the checkpoint's own
config.json and the overrides, not from the library's object, whose defaults differ from release to release. Settings
count only where they differ from what changes nothing, so that a release that lacks one agrees with one that has it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.overrides import resolution_result

from sglang_persist.engine import weights
from sglang_persist.engine.adapters import class_name
from sglang_persist.engine.drafts import Draft
from sglang_persist.engine.pages import KvPages
from sglang_persist.engine.tree import LiveTree
from sglang_persist.errors import Unsupported
from sglang_persist.fs import FileSystem
from sglang_persist.model import Identity
from sglang_persist.plan.topology import OWN

#: Written by the tool that saved the checkpoint; says nothing about what a token's KV is.
_VOLATILE = {"_name_or_path", "transformers_version", "_commit_hash"}

#: Load formats that read the checkpoint's own files and nothing else. Others take weights from another process or
#: place, or from a copy made of an earlier state of the files, so that reading the files says nothing of the weights.
_LOADED_FROM_FILES = {
    "auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "layered", "mistral", "pt",
    "sharded_state", "gguf", "bitsandbytes", "flash_rl", "jax",
}  # fmt: skip
#: Of these, the ones that take the first kind of weight file that is there; with others every file counts.
_FIRST_KIND = {"auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "layered", "mistral"}
#: Formats that put the same numbers into the model as `auto` does, only faster or from the one place there is.
_SAME_AS_AUTO = {*_FIRST_KIND, "gguf"}

#: Settings that take weights from elsewhere than the checkpoint, and their value when they are off.
_ELSEWHERE = {"weight_cache_mode": "off", "modelopt_checkpoint_restore_path": None, "kt_weight_path": None}

#: Settings that change what is computed or stored, and the value with which they change nothing. Kernels, backends,
#: memory and scheduling are not here: they order the same arithmetic differently.
_SETTINGS = {
    "model_impl": "auto",
    "model_config_parser": "auto",
    "is_embedding": False,
    "context_length": None,  # some models scale their rotary embedding by it
    "modelopt_quant": None,
    "quantize_and_serve": False,
    "torchao_config": "",
    "rl_on_policy_target": None,
    "enable_tf32_matmul": False,
    "enable_quant_communications": False,
    "flashinfer_mxfp4_moe_precision": "default",
    "enable_w4a4_mxfp4_megamoe": False,
    "deepep_dispatcher_output_dtype": "auto",
    "dllm_algorithm": None,
    "enable_hisparse": False,
    "hisparse_config": None,
    "forward_hooks": None,
}
#: Settings that name a file whose content counts.
_FILES = {
    "kv_scales": "quantization_param_path",
    "rl_quant_profile": "rl_quant_profile",
    "config_file": "decrypted_config_file",
    "dllm_config": "dllm_algorithm_config",
}
_READ = (
    "revision", "load_format", "model_loader_extra_config", "trust_remote_code", "json_model_override_args",
    "download_dir", "disaggregation_mode", "enable_streaming_session", "speculative_draft_load_format",
)  # fmt: skip
#: How a loader reads, not what.
_LOADER_SPEED = {"enable_multithread_load", "num_threads", "enable_gds", "concurrency", "memory_limit", "distributed"}
#: What a loader merges into the weights from another place.
_LOADER_ADAPTER = "qlora_adapter_name_or_path"
#: SGLang's variable that says which layers each pipeline stage has.
_STAGES = "SGLANG_PP_LAYER_PARTITION"
#: Beside config.json, what a checkpoint says of its quantization, of itself in other formats, and of which files count.
_SIDE_FILES = re.compile(r".*quant.*\.json|.*\.index\.json|params\.json|sparse_attention_config\.json", re.IGNORECASE)
_CODE = re.compile(r".*\.py")
#: In a model's configuration: image_token_id, video_token_index, vision_start_token_id, boi_token_id, ...
_MEDIA_TOKEN = re.compile(
    r"(?!.*(num|len|size|count|per_|max|min))"
    r".*(image|img|video|vision|audio|sound|speech|media|patch|boi|eoi|boa|eoa)_(.*_)?(token|tokens|index|id|ids)(_.*)?",
    re.IGNORECASE,
)
#: The module of models whose prompts keep their placeholders as they are.
_NOT_PADDED = "sglang.srt.models.transformers"


def identify(
    fs: FileSystem, scheduler, parallel, tree: LiveTree, pages: KvPages, root: Path | None = None,
    drafts: Sequence[Draft] = (),
) -> Identity:  # fmt: skip
    """`root` is the store, where the digest of the weights is kept. Raises Unsupported where something that changes KV
    cannot be told, StoreError where a file cannot be read."""
    config = scheduler.model_config
    settings = _settings(scheduler.server_args)
    _refuse(settings, parallel, scheduler)
    path = _checkpoint(config, settings)
    load_format = _load_format(settings)
    model = {
        "architecture": (getattr(config.hf_config, "architectures", None) or ["unknown"])[0],
        "config": _config(fs, path, config),
        "overrides": _canonical(json.loads(settings.get("json_model_override_args") or "{}")),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "kv_dtype": pages.pools[0].buffers[0].dtype,
        "weights": weights.identify(fs, path, root, every_kind=load_format not in _FIRST_KIND),
    }
    optional = {
        "revision": settings.get("revision"),
        "load_format": None if load_format in _SAME_AS_AUTO else load_format,
        "loader": _loader(settings),
        "side_files": _side_files(fs, path, _SIDE_FILES),
        "code": _side_files(fs, path, _CODE) if settings.get("trust_remote_code") else None,
        **{name: settings[name] for name, off in _SETTINGS.items() if settings.get(name) not in (None, off)},
        **{name: _file_digest(fs, settings.get(setting)) for name, setting in _FILES.items()},
    }
    model |= {name: _plain(value) for name, value in optional.items() if value is not None}
    cut = {
        "topology": {
            "tp": parallel.tp_size, "pp": parallel.pp_size, "cp": parallel.attn_cp_size, "adp": parallel.attn_dp_size,
        },
        "page": tree.page_tokens,
        "pool": class_name(pages.kv).rsplit(".", 1)[1],
        "layout": pages.layout,
        "rows": [list(shape) for shape in sorted({b.row_shape for p in pages.pools for b in p.buffers})],
        "components": [c.name.lower() for c in tree.cache.tree_components],
        "bigram": tree.bigram,
    }  # fmt: skip
    if drafts:
        # Of the target's KV nothing depends on these; of a node that lacks the drafts' part nothing is restored.
        cut["drafts"] = [_draft(fs, draft, path, settings, root) for draft in drafts]
    if any(pool.at_ends for pool in pages.pools):
        cut["states"] = tree.states
    if stages := os.environ.get(_STAGES):
        cut["stages"] = stages
    soft = {
        "model_path": str(config.model_path),
        "revision": config.revision,
        "sglang": _version("sglang"),
        "torch": _version("torch"),
        "sglang_persist": _version("sglang-persist"),
        "python": platform.python_version(),
    }
    return Identity(model, cut, soft)


def _settings(args) -> dict[str, Any]:
    """Of the server's arguments those that matter here, as they were resolved: what stands in `args` is what was
    given. None for one that this release does not have."""
    return {name: resolution_result(args, name) for name in (*_READ, *_SETTINGS, *_ELSEWHERE, *_FILES.values())}


def _load_format(settings: dict[str, Any]) -> str:
    given = settings.get("load_format") or "auto"
    return str(getattr(given, "value", given))


def _refuse(settings: dict[str, Any], parallel, scheduler) -> None:
    """Features whose KV depends on more than is identified yet."""
    load_format = _load_format(settings)
    if load_format == "dummy":
        raise Unsupported("dummy_weights", "load format dummy: its weights are random")
    if load_format not in _LOADED_FROM_FILES:
        raise Unsupported("weights_unknown", f"load format {load_format}: its weights are not the checkpoint's files")
    for name, off in _ELSEWHERE.items():
        if settings.get(name) not in (None, off):
            raise Unsupported("weights_unknown", f"{name} {settings[name]}: weights from elsewhere than the checkpoint")
    if _LOADER_ADAPTER in _loader_config(settings):
        raise Unsupported("weights_unknown", "an adapter that the loader merges into the weights")
    if scheduler.enable_lora and settings.get("enable_streaming_session"):
        # A session keeps the KV of its earlier turns whatever adapter those had, and an aborted turn puts it into the
        # tree under the key of its own.
        raise Unsupported("unsupported_lora", "LoRA adapters together with streaming sessions")
    if getattr(parallel, "dcp_enabled", False):
        raise Unsupported("unsupported_topology", "decode context parallelism")
    if parallel.attn_dp_size > 1 and getattr(parallel, "enable_dp_attention_local_control_broadcast", False):
        # Its groups compute pass by pass together, but would not be told to stop in the same one.
        raise Unsupported("unsupported_topology", "attention data parallelism whose groups are told to stop one by one")
    if getattr(parallel, "ep_join_rank_offset", 0):
        raise Unsupported("unsupported_topology", "ranks that join a running engine")
    mode = str(settings.get("disaggregation_mode") or "null")
    if mode != "null":
        raise Unsupported("unsupported_topology", f"disaggregation mode {mode}")
    draft_format = settings.get("speculative_draft_load_format")
    if draft_format not in (None, settings.get("load_format")) and draft_format not in _SAME_AS_AUTO:
        raise Unsupported("weights_unknown", f"load format {draft_format} of a draft model")


def media_tokens(scheduler) -> set[int] | None:
    """Token ids of the model that stand for pictures, video or sound, or where one begins; None where it has none.
    Raises Unsupported where SGLang puts nothing else into their place."""
    config = scheduler.model_config
    if not config.is_multimodal:
        return None
    pad = getattr(getattr(scheduler, "pad_input_ids_func", None), "__func__", None)
    if pad is None or pad.__module__ == _NOT_PADDED:
        raise Unsupported("unsupported_multimodal", "pictures are not told apart in its prompts")
    return set(_numbers(config.hf_config.to_dict(), False))


def _numbers(value: Any, media: bool) -> Iterable[int]:
    """The whole numbers in a configuration whose names say that they are ids of tokens for media."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, bool(_MEDIA_TOKEN.fullmatch(str(name))))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _numbers(inner, media)
    elif media and isinstance(value, int) and not isinstance(value, bool):
        yield value


def _draft(fs: FileSystem, draft: Draft, target: Path, settings: dict[str, Any], root: Path | None) -> dict[str, Any]:
    """What a draft model's KV depends on, beside the target. One whose weights are in the target's checkpoint is
    identified with it."""
    path = _checkpoint(draft.config, settings)
    out = {"layers": class_name(draft.pool).rsplit(".", 1)[1], "quantization": draft.config.quantization}
    if path.resolve() != target.resolve():
        every_kind = _load_format(settings) not in _FIRST_KIND
        out["weights"] = weights.identify(fs, path, root, every_kind=every_kind)
        out["config"] = _config(fs, path, draft.config)
        out["side_files"] = _side_files(fs, path, _SIDE_FILES)
        if settings.get("trust_remote_code"):
            out["code"] = _side_files(fs, path, _CODE)
    return out


def _checkpoint(config, settings: dict[str, Any]) -> Path:
    """The directory (or file) of the weights: given, or in the hub's local cache."""
    path = Path(config.model_path)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                str(config.model_path),
                revision=config.revision,
                cache_dir=settings.get("download_dir"),
                local_files_only=True,
            )
        )
    except Exception as error:
        raise Unsupported("weights_unknown", f"{config.model_path}: its files are not found here: {error}") from error


def _loader_config(settings: dict[str, Any]) -> dict[str, Any]:
    given = settings.get("model_loader_extra_config") or {}
    return json.loads(given) if isinstance(given, str) else dict(given)


def _loader(settings: dict[str, Any]) -> str | None:
    """What the loader is told, less what only makes it faster."""
    fields = {k: v for k, v in _loader_config(settings).items() if k not in _LOADER_SPEED}
    return _canonical(fields) if fields else None


def _side_files(fs: FileSystem, path: Path, wanted: re.Pattern) -> str | None:
    """One digest over the names and contents of the files in a checkpoint whose names match; None where none do."""
    if not path.is_dir():
        return None
    found = [e.name for e in fs.list(path) if not e.is_dir and wanted.fullmatch(e.name)]
    return _canonical({name: _file_digest(fs, path / name) for name in found}) if found else None


def _plain(value: Any) -> Any:
    """A setting as something that reads the same from a manifest as it was written: text, numbers, truth values."""
    return value if isinstance(value, (str, int, float, bool)) else _canonical({"value": value})


def _config(fs: FileSystem, path: Path, config) -> str:
    fields: Any = None
    if path.is_dir() and (path / "config.json").exists():
        with fs.open((path / "config.json").resolve()) as file:
            fields = json.loads(file.read(0, file.bytes))
    if not isinstance(fields, dict):
        fields = config.hf_config.to_dict()
    return _canonical({k: v for k, v in fields.items() if k not in _VOLATILE})


def _canonical(fields: dict) -> str:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(fs: FileSystem, path: str | Path | None) -> str | None:
    if not path:
        return None
    with fs.open(Path(path).resolve()) as file:
        return hashlib.sha256(file.read(0, file.bytes)).hexdigest()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def heads(config, pages: KvPages) -> tuple[int | None, ...]:
    """As in `topology.Rank`."""
    if pages.drafted:  # draft models are dealt out among ranks in ways of their own
        return (OWN,) * len(pages.pools)
    if pages.latent:
        return (None,) * len(pages.pools)
    of_kind = {"swa": config.get_swa_num_kv_heads(1), "states": OWN}
    return tuple(of_kind.get(pool.name, config.get_num_kv_heads(1)) for pool in pages.pools)


def replicas(parallel) -> tuple[int, int]:
    """(which replica this rank belongs to, how many there are): each has a tree of its own. With attention data
    parallelism, which is never inside of replicas, they are its groups."""
    if parallel.attn_dp_size > 1:
        return parallel.attn_dp_rank, parallel.attn_dp_size
    return parallel.dp_rank or 0, max(1, getattr(parallel, "dp_size", None) or 1)


def shard_name(parallel, latent: bool) -> str:
    """The directory of this rank's files. `latent`: what all ranks of tensor parallelism hold is the same, and is
    stored by the first of them."""
    ranks = (parallel.attn_dp_rank, parallel.pp_rank, parallel.attn_cp_rank, 0 if latent else parallel.attn_tp_rank)
    return _shard(replicas(parallel)[0], *ranks)


def group_shards(parallel, latent: bool) -> tuple[str, ...]:
    """Of all ranks that share this rank's tree: one generation is complete when each of them has it."""
    return tuple(
        _shard(replicas(parallel)[0], parallel.attn_dp_rank, pp, cp, tp)
        for pp in range(parallel.pp_size)
        for cp in range(parallel.attn_cp_size)
        for tp in range(1 if latent else parallel.attn_tp_size)
    )


def _shard(dp: int, adp: int, pp: int, cp: int, tp: int) -> str:
    return f"dp{dp}-adp{adp}-pp{pp}-cp{cp}-tp{tp}"


def why_cold(wanted: Identity, others: list[Identity]) -> str:
    """The documented reason why nothing of what is stored fits: the nearest other identity decides."""
    if not others:
        return "no_snapshot"
    same_model = [o for o in others if o.model == wanted.model]
    for other in same_model:
        if other.cut == wanted.cut:
            return "no_snapshot"
    for reason, ignored in (
        ("topology_changed", "topology"), ("page_size_changed", "page"), ("layout_changed", None),
    ):  # fmt: skip
        for other in same_model:
            if ignored is None or _without(other.cut, ignored) == _without(wanted.cut, ignored):
                return reason
    for other in others:
        if _without(other.model, "kv_dtype") == _without(wanted.model, "kv_dtype"):
            return "dtype_changed"
    return "model_changed"


def _without(fields: dict, key: str) -> dict:
    return {k: v for k, v in fields.items() if k != key}
