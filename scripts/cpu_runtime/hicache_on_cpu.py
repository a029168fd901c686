"""Lets SGLang's HiCache run without CUDA, as the peer in the benchmarks. On with SGLANG_PERSIST_HICACHE_ON_CPU=1.

Its host pool pins memory for a CUDA device and copies pages with kernels that SGLang binds on CUDA only. Here "device"
and host are the same memory, so nothing is pinned, and pages are copied by plain indexing. For `--hicache-io-backend
direct --hicache-mem-layout page_first_direct` and multi-head attention; nothing else of HiCache is touched.
"""

import functools

import torch

POOL = "sglang.srt.mem_cache.pool_host.mha"


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """One layer from the host (pages by layers by tokens) to the device (tokens). Indices are those of whole pages."""
    src, dst = src_indices[::page_size] // page_size, dst_indices[::page_size] // page_size
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        device.unflatten(0, (-1, page_size))[dst] = host[src, layer_id]


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """All layers from the device to the host. The sources are the K buffers of all layers, then the V buffers."""
    src, dst = src_indices[::page_size] // page_size, dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, device in enumerate(src_ptrs):
        dst_ptrs[i // layers][dst, i % layers] = device.unflatten(0, (-1, page_size))[src]


def change(pool) -> None:
    """To the module POOL, once it is loaded."""
    pool.transfer_kv_per_layer_direct_pf_lf = transfer_kv_per_layer_direct_pf_lf
    pool.transfer_kv_all_layer_direct_lf_pf = transfer_kv_all_layer_direct_lf_pf

    made = pool.MHATokenToKVPoolHost.__init__

    @functools.wraps(made)
    def unpinned(self, *args, **kwargs):
        made(self, *args, **kwargs | {"pin_memory": False})

    pool.MHATokenToKVPoolHost.__init__ = unpinned
    # SGLang asks a stream to synchronize where a copy failed: without it, that error would hide the first one.
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None
