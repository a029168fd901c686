"""What SGLang's KV pools and allocators consist of.

One table of pools, keyed by exact class: what buffers a pool has, by name, each with a row for a slot or for a page. A
class that is not in the table, or a layout that its row does not describe, is refused by name. `layout` is the revision
of the bytes that an adapter yields: raise it when a release of SGLang puts other bytes into the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_persist.errors import Unsupported
from sglang_persist.model import Buffer, Pool

_POOLS = "sglang.srt.mem_cache.memory_pool."
_ALLOCATORS = "sglang.srt.mem_cache.allocator."


class Named(NamedTuple):
    """A buffer. `dtype` says what its elements are, where the tensor's type does not (fp8 is stored as bytes)."""

    name: str
    dtype: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Adapter:
    """`unit` of a pool: "slot" where each buffer has a row for each slot; "page" where some have one for each page.
    `latent`: ranks of tensor parallelism all hold the same."""

    layout: int
    buffers: Callable[[object], list[Named]]
    unit: Callable[[object], str] = lambda _pool: "slot"
    refuse: Callable[[object], str | None] = lambda _pool: None
    latent: bool = False


def class_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layers(pool, prefix: str, tensors: Sequence[torch.Tensor] | None, dtype: torch.dtype | None = None) -> list[Named]:
    """A buffer for each layer, named by the layer's number in the whole model."""
    # 0.5.22 does not tell them, and numbers a pool's layers without a gap.
    layers = getattr(pool, "model_layer_ids", None) or range(pool.start_layer, pool.start_layer + pool.layer_num)
    return [
        Named(f"{prefix}{layer}", _dtype(dtype or tensor.dtype), tensor)
        for layer, tensor in zip(layers, tensors or (), strict=False)
        if tensor.shape[0]  # a layer that shares another's index has none of its own
    ]


def _mha(pool) -> list[Named]:
    return _layers(pool, "k", pool.k_buffer, pool.dtype) + _layers(pool, "v", pool.v_buffer, pool.dtype)


def _mha_scaled(pool) -> list[Named]:
    return _mha(pool) + _layers(pool, "ks", pool.k_scale_buffer) + _layers(pool, "vs", pool.v_scale_buffer)


def _mha_refuse(pool) -> str | None:
    if pool.kv_cache_layout not in ("nhd", "hnd"):
        return f"KV layout {pool.kv_cache_layout}"
    if pool.is_quantized_kv_cache or pool.k_scale_buffer is not None:
        return "a KV cache with scale buffers"
    return None


def _scaled_refuse(pool) -> str | None:
    return None if pool.kv_cache_layout == "nhd" and not pool.is_quantized_kv_cache else "a KV cache with scale buffers"


def _mla(pool) -> list[Named]:
    return _layers(pool, "kv", pool.kv_buffer, pool.dtype)


def _mla_scaled(pool) -> list[Named]:
    return _mla(pool) + _layers(pool, "kvs", pool.kv_scale_buffer)


def _dsa(pool) -> list[Named]:
    return _mla(pool) + _layers(pool, "index", pool.index_k_with_scale_buffer)


def _mla_refuse(pool) -> str | None:
    if getattr(pool, "layer_shard_enabled", False):
        return "layers that are shared out among ranks"
    return None


def _mla_plain_refuse(pool) -> str | None:
    scaled = getattr(pool, "kv_scale_buffer", None) is not None
    return "a KV cache with scale buffers" if scaled else _mla_refuse(pool)


def _dsa_refuse(pool) -> str | None:
    if pool.index_kpool != 1 or pool.kpool_use_compress or pool.index_page_size != pool.page_size:
        return "an index of pooled keys"
    return _mla_plain_refuse(pool)


ADAPTERS: dict[str, Adapter] = {
    _POOLS + "MHATokenToKVPool": Adapter(
        1, _mha, lambda pool: "page" if pool.kv_cache_layout == "hnd" else "slot", _mha_refuse
    ),
    _POOLS + "MHATokenToKVPoolFP4": Adapter(1, _mha_scaled, refuse=_scaled_refuse),
    _POOLS + "MHATokenToKVPoolMXFP8": Adapter(
        1, _mha_scaled, lambda pool: "page" if pool.mxfp8_sf_interleaved else "slot", _scaled_refuse
    ),
    _POOLS + "MLATokenToKVPool": Adapter(1, _mla, refuse=_mla_plain_refuse, latent=True),
    _POOLS + "MLATokenToKVPoolFP4": Adapter(1, _mla_scaled, refuse=_mla_refuse, latent=True),
    _POOLS + "DSATokenToKVPool": Adapter(1, _dsa, lambda _pool: "page", _dsa_refuse, latent=True),
}  # fmt: skip
#: Pools that consist of others.
SWA_POOL = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"
LINEAR_POOL, LINEAR_REQUESTS = _POOLS + "HybridLinearKVPool", _POOLS + "HybridReqToTokenPool"
STATE_POOL, STATE_ALLOCATOR = _POOLS + "MambaPool", _ALLOCATORS + "mamba.MambaSlotAllocator"
#: Allocators of one pool.
ALLOCATORS = {_ALLOCATORS + "token.TokenToKVPoolAllocator", _ALLOCATORS + "paged.PagedTokenToKVPoolAllocator"}
SWA_ALLOCATOR = _ALLOCATORS + "swa.SWATokenToKVPoolAllocator"


class Part(NamedTuple):
    """One pool of a model: what is stored of it, and the allocator of its slots. `layout` and `latent` as in `Adapter`,
    of all classes that it consists of."""

    pool: Pool
    tensors: list[torch.Tensor]
    allocator: object
    layout: int
    latent: bool


def parts(allocator, drafts: Sequence[object] = (), requests: object = None) -> list[Part]:
    """The pools behind an allocator, the one first that has something of every page. `drafts`: the pools of draft
    models, whose rows belong to the same slots and are buffers of that first one. `requests`: the engine's pool of
    requests, which has the states of linear attention. Raises Unsupported."""
    kv = allocator.get_kvcache()
    if class_name(kv) == LINEAR_POOL:
        if drafts:
            raise Unsupported("unsupported_speculation", "draft models beside states of linear attention")
        if not _knows_its_layers(kv.full_kv_pool):
            raise Unsupported("unsupported_pool", f"linear attention beside {class_name(kv.full_kv_pool)}")
        return [_part("full", kv.full_kv_pool, allocator), _states(requests)]
    if class_name(kv) == SWA_POOL:
        if class_name(allocator) != SWA_ALLOCATOR:
            raise Unsupported("unsupported_pool", f"KV allocator {class_name(allocator)}")
        if allocator.swa_req_ring:
            raise Unsupported("unsupported_pool", "a sliding window that is a ring for each request")
        for sub_pool in (kv.full_kv_pool, kv.swa_kv_pool):
            if not _knows_its_layers(sub_pool):
                raise Unsupported("unsupported_pool", f"sliding windows over {class_name(sub_pool)}")
        return [
            _part("full", kv.full_kv_pool, allocator.full_attn_allocator, drafts),
            _part("swa", kv.swa_kv_pool, allocator.swa_attn_allocator),
        ]
    return [_part("kv", kv, allocator, drafts)]


def _knows_its_layers(sub_pool) -> bool:
    """Whether a pool that has some of the model's layers tells which: only those of keys and values do."""
    adapter = ADAPTERS.get(class_name(sub_pool))
    return adapter is not None and not adapter.latent and getattr(sub_pool, "model_layer_ids", None) is not None


def _states(requests) -> Part:
    """Recurrent states: of each layer its convolutions' and its own, with a row for each state.

    What speculation and replay keep beside them belongs to running requests (memory_pool.py, MambaPool).
    """
    if class_name(requests) != LINEAR_REQUESTS or class_name(requests.mamba_pool) != STATE_POOL:
        raise Unsupported("unsupported_pool", f"states of {class_name(requests)}")
    pool, allocator = requests.mamba_pool, requests.mamba_allocator
    if class_name(allocator) != STATE_ALLOCATOR:
        raise Unsupported("unsupported_pool", f"state allocator {class_name(allocator)}")
    if requests.mamba_ckpt_pool is not None:
        raise Unsupported("unsupported_pool", "states that are cached in 8 bits")
    if pool._slot_siblings or pool.replayssm_write_pos is not None or pool.mamba_cache.replayssm_g is not None:
        raise Unsupported("unsupported_pool", "states with more beside them than convolutions")
    kinds = [(f"conv{i}.", tensor) for i, tensor in enumerate(pool.mamba_cache.conv)]
    buffers, tensors = [], []
    for kind, tensor in (*kinds, ("state", pool.mamba_cache.temporal)):
        for layer, own in zip(pool.mamba_layer_ids, tensor, strict=True):
            if own.numel():
                row = tuple(own.shape[1:])
                buffers.append(Buffer(f"{kind}{layer}", _dtype(own.dtype), row, own[0].numel() * own.element_size()))
                tensors.append(own)
    if not buffers or any(len(tensor) != int(pool.size) + 1 for tensor in tensors):
        raise Unsupported("unsupported_layout", f"{class_name(pool)} without a row for each state")
    return Part(Pool("states", "state", tuple(buffers)), tensors, allocator, 1, False)


def _adapter(kv) -> Adapter:
    adapter = ADAPTERS.get(class_name(kv))
    if adapter is None:
        raise Unsupported("unsupported_pool", f"KV pool {class_name(kv)}")
    if reason := adapter.refuse(kv):
        raise Unsupported("unsupported_layout", reason)
    return adapter


def _part(name: str, kv, allocator, drafts: Sequence[object] = ()) -> Part:
    adapters, page = [_adapter(kv), *map(_adapter, drafts)], int(kv.page_size)
    if class_name(allocator) not in ALLOCATORS:
        raise Unsupported("unsupported_pool", f"KV allocator {class_name(allocator)}")
    named = adapters[0].buffers(kv)
    if not named:
        raise Unsupported("unsupported_layout", f"a KV pool without buffers: {class_name(kv)}")
    for number, (draft, adapter) in enumerate(zip(drafts, adapters[1:], strict=True)):
        if int(draft.page_size) != page:
            raise Unsupported("unsupported_layout", f"a draft model with pages of {draft.page_size} tokens")
        named += [b._replace(name=f"draft{number}.{b.name}") for b in adapter.buffers(draft)]
    unit = "page" if any(a.unit(p) == "page" for a, p in zip(adapters, (kv, *drafts), strict=True)) else "slot"
    slots = int(kv.size) + page
    buffers, tensors = [], []
    for buffer in named:
        rows = buffer.tensor.shape[0]
        per_page = unit == "page" and (rows < slots or page == 1)
        if rows < (slots // page if per_page else slots):
            raise Unsupported(
                "unsupported_layout", f"{class_name(kv)}: {buffer.name} has {rows} rows for {slots} slots"
            )
        row = tuple(buffer.tensor.shape[1:])
        tensor = buffer.tensor
        if unit == "page" and not per_page:
            row = (page, *row)
            tensor = tensor[: slots // page * page].view(slots // page, *row)
        buffers.append(Buffer(buffer.name, buffer.dtype, row, tensor[0].numel() * tensor.element_size()))
        tensors.append(tensor)
    latent = all(adapter.latent for adapter in adapters)
    return Part(Pool(name, unit, tuple(buffers)), tensors, allocator, max(a.layout for a in adapters), latent)
