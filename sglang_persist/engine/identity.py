"""Whose KV this is: the model, the cut of it that this process holds, and what is only worth showing.

The model and the cut are compared, by digest; versions are not. Configuration is taken from the checkpoint's own
config.json and the overrides, not from the library's object, whose defaults differ from release to release.
"""

from __future__ import annotations

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_persist.engine import weights
from sglang_persist.engine.pages import KvPages, class_name
from sglang_persist.engine.tree import LiveTree
from sglang_persist.errors import Unsupported
from sglang_persist.fs import FileSystem
from sglang_persist.model import Identity

#: Written by the tool that saved the checkpoint; says nothing about what a token's KV is.
_VOLATILE = {"_name_or_path", "transformers_version", "_commit_hash"}


def identify(fs: FileSystem, scheduler, parallel, tree: LiveTree, pages: KvPages) -> Identity:
    """Raises Unsupported where something that changes KV cannot be told."""
    args, config = scheduler.server_args, scheduler.model_config
    _refuse(args, parallel, scheduler)
    path = _checkpoint(config)
    model = {
        "architecture": (getattr(config.hf_config, "architectures", None) or ["unknown"])[0],
        "config": _config(fs, path, config),
        "overrides": _canonical(json.loads(args.json_model_override_args or "{}")),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "kv_dtype": pages.pools[0].buffers[0].dtype,
        "kv_scales": _file_digest(fs, getattr(args, "quantization_param_path", None)),
        "weights": weights.digest(fs, path),
    }
    cut = {
        "topology": {
            "tp": parallel.tp_size, "pp": parallel.pp_size, "cp": parallel.attn_cp_size, "adp": parallel.attn_dp_size,
        },
        "page": tree.page_tokens,
        "pool": class_name(pages.pool).rsplit(".", 1)[1],
        "layout": pages.layout,
        "components": [c.name.lower() for c in tree.cache.tree_components],
        "bigram": tree.bigram,
    }  # fmt: skip
    soft = {
        "model_path": str(config.model_path),
        "revision": config.revision,
        "sglang": _version("sglang"),
        "torch": _version("torch"),
        "sglang_persist": _version("sglang-persist"),
        "python": platform.python_version(),
    }
    return Identity(model, cut, soft)


def _refuse(args, parallel, scheduler) -> None:
    """Features whose KV depends on more than is identified yet."""
    if str(getattr(args, "load_format", "")) == "dummy":
        raise Unsupported("dummy_weights", "load format dummy: its weights are random")
    if getattr(args, "enable_lora", False) or getattr(args, "lora_paths", None):
        raise Unsupported("unsupported_lora", "LoRA adapters")
    if getattr(parallel, "dcp_enabled", False):
        raise Unsupported("unsupported_topology", "decode context parallelism")
    if parallel.attn_dp_size > 1:
        raise Unsupported("unsupported_topology", "attention data parallelism")
    if str(getattr(args, "disaggregation_mode", "null") or "null") not in ("null", "None"):
        raise Unsupported("unsupported_topology", f"disaggregation mode {args.disaggregation_mode}")
    if not scheduler.spec_algorithm.is_none():
        raise Unsupported("unsupported_speculation", "speculative decoding keeps draft KV that is not saved yet")
    if scheduler.model_config.is_multimodal:
        raise Unsupported("unsupported_multimodal", "multimodal prompts")


def _checkpoint(config) -> Path:
    """The directory (or file) of the weights: given, or in the hub's local cache."""
    path = Path(config.model_path)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(config.model_path), revision=config.revision, local_files_only=True))
    except Exception as error:
        raise Unsupported("weights_unknown", f"{config.model_path}: its files are not found here: {error}") from error


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


def _file_digest(fs: FileSystem, path: str | None) -> str | None:
    if not path:
        return None
    with fs.open(Path(path).resolve()) as file:
        return hashlib.sha256(file.read(0, file.bytes)).hexdigest()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def shard_name(parallel, dp_rank: int | None) -> str:
    """The directory of this rank's files."""
    ranks = (parallel.attn_dp_rank, parallel.pp_rank, parallel.attn_cp_rank, parallel.attn_tp_rank)
    return _shard(dp_rank or 0, *ranks)


def group_shards(parallel, dp_rank: int | None) -> tuple[str, ...]:
    """All ranks that share this rank's tree: one generation is complete when each of them has it."""
    return tuple(
        _shard(dp_rank or 0, parallel.attn_dp_rank, pp, cp, tp)
        for pp in range(parallel.pp_size)
        for cp in range(parallel.attn_cp_size)
        for tp in range(parallel.attn_tp_size)
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
