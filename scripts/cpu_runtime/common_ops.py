"""Lets unmodified SGLang serve where there is neither CUDA nor AMX. Found through PYTHONPATH.

`sgl_kernel` imports a module of this name once none of its CUDA builds loads; it has to provide the one custom op that
the plain CPU path calls. Being imported that early, it also gets to replace one method of the torch_native backend:
stock computes attention for the cached prefix and throws it away, so that a cache hit costs almost what a miss costs.
SGLANG_PERSIST_STOCK_ATTENTION=1 keeps the stock method. And to add one that is missing there. For the benchmarks:
hicache_on_cpu.py and held_reads.py.
"""

import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader

import torch
from torch.nn.functional import scaled_dot_product_attention

BACKEND = "sglang.srt.layers.attention.torch_native_backend"

_library = torch.library.Library("sgl_kernel", "DEF")
_library.define(
    "assign_req_to_token_pool_cpu(Tensor req_pool_indices, Tensor(a!) req_to_token, Tensor start_offset, "
    "Tensor end_offset, Tensor out_cache_loc, int pool_len) -> ()"
)


def assign_req_to_token_pool(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Deal out_cache_loc to the requests: each gets as many as its row of the table is to grow by, in order."""
    starts, ends = start_offset.tolist(), end_offset.tolist()
    shares = out_cache_loc.split([end - start for start, end in zip(starts, ends, strict=True)])
    for row, start, end, share in zip(req_pool_indices.tolist(), starts, ends, shares, strict=True):
        req_to_token[row, start:end] = share.to(req_to_token.dtype)


_library.impl("assign_req_to_token_pool_cpu", assign_req_to_token_pool, "CPU")


def only_new_rows(stock):
    """The extend attention that asks for the new tokens' rows alone. Encoders stay with the stock method."""

    def extend(
        self,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_prefix_lens,
        extend_seq_lens,
        encoder_lens=None,
        scaling=None,
        enable_gqa=False,
        causal=False,
        is_cross_attn=False,
        sliding_window_size=None,
    ):
        if encoder_lens is not None:
            return stock(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        queries = query.split(extend_seq_lens.tolist())
        outputs = output.split(extend_seq_lens.tolist())
        for i, (prefix, total) in enumerate(zip(extend_prefix_lens.tolist(), seq_lens.tolist(), strict=True)):
            slots = req_to_token[req_pool_indices[i], :total]
            # Tokens by heads by size -> one batch of heads by tokens by size.
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (queries[i], k_cache[slots], v_cache[slots]))
            windowed = sliding_window_size is not None and sliding_window_size > -1
            mask = None
            if windowed or (causal and prefix):
                distance = torch.arange(prefix, total).unsqueeze(1) - torch.arange(total)
                mask = distance >= 0
                if windowed:
                    mask &= distance <= sliding_window_size
            attended = scaled_dot_product_attention(
                q,
                k.to(q.dtype),
                v.to(q.dtype),
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=scaling,
                enable_gqa=enable_gqa,
            )
            outputs[i].copy_(attended.squeeze(0).transpose(0, 1))
        return output

    return extend


def change_backend(module) -> None:
    """In BACKEND, once it is loaded."""
    backend = module.TorchNativeAttnBackend
    if os.environ.get("SGLANG_PERSIST_STOCK_ATTENTION") != "1":
        backend._run_sdpa_forward_extend = only_new_rows(backend._run_sdpa_forward_extend)
    # Attention data parallelism asks for it on a CPU, and only the AMX backend has it.
    if not hasattr(backend, "get_cpu_graph_seq_len_fill_value"):
        backend.get_cpu_graph_seq_len_fill_value = lambda self: 1


_changes = {BACKEND: change_backend}  # by the name of a module: what to do with it once it is loaded


class _Changed(SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        _changes[module.__name__](module)


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _changes:
            return None
        spec = PathFinder.find_spec(name, path)
        spec.loader = _Changed(name, spec.origin)
        return spec


if os.environ.get("SGLANG_PERSIST_HICACHE_ON_CPU") == "1":
    import hicache_on_cpu

    _changes[hicache_on_cpu.POOL] = hicache_on_cpu.change
if os.environ.get("SGLANG_PERSIST_HOLD_READS"):
    import held_reads

    # The plugin may have been loaded before.
    if held_reads.SHARD in sys.modules:
        held_reads.change(sys.modules[held_reads.SHARD])
    else:
        _changes[held_reads.SHARD] = held_reads.change
if _changes:
    sys.meta_path.insert(0, _Finder)
