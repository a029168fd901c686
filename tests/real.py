"""Real SGLang pools, allocators and radix trees on the CPU, and ways to fill and compare them. Nothing is mocked."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.rust_tree_core import adapter
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import mamba
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel

from sglang_persist.engine.pages import KvPages
from sglang_persist.engine.tree import LiveTree
from sglang_persist.model import Identity

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
COMPONENTS = {"swa": (FULL, SWA), "linear": (FULL, MAMBA)}
#: Of sliding-window pools.
WINDOW = 32
IDENTITY = Identity(
    {"architecture": "TestModel", "weights": "w", "kv_dtype": "bfloat16"},
    {"topology": {"tp": 1, "pp": 1}, "page": 1, "layout": 1},
    {"sglang": "test"},
)


@dataclass
class Engine:
    """One process's worth of cache: tree, allocator, pool, and our view of them."""

    cache: UnifiedRadixCache
    allocator: object
    pool: memory_pool.KVCache
    tree: LiveTree
    pages: KvPages
    size: int
    requests: ReqToTokenPool
    #: Pools of draft models, which have rows in the first pool's slots.
    drafts: tuple = ()
    #: KV as models make it, which compresses; else every bit is random.
    normal: bool = False

    def put(self, tokens, extra_key=None, salt=None) -> RadixKey:
        """What a finished request leaves: random KV in new slots, the path in the tree."""
        key = RadixKey(array("q", tokens), extra_key, is_bigram=self.tree.bigram, cache_salt=salt)
        key = key.page_aligned(self.cache.page_size)
        matched, last, _ = self.cache.tree_core.match_full_device_prefix(key)
        prefix = self.cache.tree_core.collect_full_device_indices(last, self.cache.root_node_handle())[:matched]
        new, state = self.allocate(len(key) - matched), None
        for number, pool in enumerate(self.pages.pools):
            if pool.at_ends:
                state = self.requests.mamba_allocator.alloc(1).clone()
            self.fill(number, state if pool.at_ends else self.pages.of_pool(number, new))
        value = torch.cat([prefix, new])
        self.inserted(
            InsertParams(key=key, value=value, prev_prefix_len=matched, inserted_len=matched, mamba_value=state)
        )
        return key

    def put_again(self, tokens) -> None:
        """What a request leaves that had to compute a prefix again whose window was gone: the same KV of the full
        layers, in other slots."""
        key = RadixKey(array("q", tokens), is_bigram=self.tree.bigram).page_aligned(self.cache.page_size)
        _, last, _ = self.cache.tree_core.match_full_device_prefix(key)
        old = self.cache.tree_core.collect_full_device_indices(last, self.cache.root_node_handle())
        new = self.allocate(len(key))
        self.fill(0, new)
        for buffer, per_page in self.buffers()[0]:
            rows, page = buffer.view(torch.uint8), self.cache.page_size
            rows[_rows(new[: len(old)], per_page, page)] = rows[_rows(old, per_page, page)]
        self.fill(1, self.pages.of_pool(1, new))
        self.inserted(InsertParams(key=key, value=new))

    def allocate(self, count: int) -> torch.Tensor:
        if not isinstance(self.allocator, SWATokenToKVPoolAllocator):
            return self.allocator.alloc(count).clone()
        full = self.allocator.full_attn_allocator.alloc(count).clone()
        self.allocator.set_full_to_swa_mapping(full, self.allocator.swa_attn_allocator.alloc(count))
        return full

    def buffers(self) -> list[list[tuple[torch.Tensor, bool]]]:
        first, *others = buffers(self.pool)
        if isinstance(self.pool, HybridLinearKVPool):
            held = self.pool.mamba_pool.mamba_cache
            others = [[(layer, False) for tensor in (*held.conv, held.temporal) for layer in tensor]]
        return [first + [b for draft in self.drafts for b in buffers(draft)[0]], *others]

    def states(self) -> dict[tuple, bytes]:
        """What the model has after paths that end with a node that has a state, read past our own code."""
        nodes, out, tokens = list(self.tree.nodes()), {}, []
        for node in nodes:
            content = self.tree.content(node)
            above = tokens[node.parent] if node.parent >= 0 else ()
            tokens.append((*above, *content.tokens.tolist()))
            slot = self.cache.tree_core.get_component_device_value(node.id, MAMBA)
            if slot is not None:
                out[content.space, tokens[-1]] = b"".join(_bytes(b, slot) for b, _ in self.buffers()[1])
        return out

    def fill(self, pool: int, slots: torch.Tensor) -> None:
        """Random KV in every buffer of a pool."""
        for buffer, per_page in self.buffers()[pool]:
            rows, where = buffer.view(torch.uint8), _rows(slots, per_page, self.cache.page_size)
            if self.normal:
                buffer[where] = torch.randn(buffer[where].shape).to(buffer.dtype)
            else:
                rows[where] = torch.randint(0, 256, rows[where].shape, dtype=torch.uint8)

    def inserted(self, params: InsertParams) -> None:
        """An insertion as the plugin's hook would tell of it."""
        done = self.cache.insert(params)
        self.tree.inserted(int(done.last_device_node), len(params.key) - done.prefix_len)

    def match(self, key: RadixKey) -> int:
        again = RadixKey(
            array("q", key.raw_token_ids()), key.extra_key, is_bigram=key.is_bigram, cache_salt=key.cache_salt
        )
        return self.cache.match_prefix(MatchPrefixParams(key=again)).device_prefix_len

    def evict(self, tokens: int = 1 << 40) -> None:
        self.cache.evict(EvictParams(num_tokens=tokens, swa_num_tokens=tokens))

    def paths(self) -> list[tuple]:
        """Each leaf path in eviction order: (space, tokens, node boundaries, KV bytes of every buffer)."""
        nodes = self.tree.nodes()
        parents = {n.parent for n in nodes}
        out = []
        for i, leaf in enumerate(nodes):
            if i in parents:
                continue
            chain, at = [], i
            while at >= 0:
                chain.append(nodes[at])
                at = nodes[at].parent
            chain.reverse()
            space = self.tree.content(leaf).space
            tokens: list[int] = []
            for node in chain:
                own = self.tree.content(node).tokens.tolist()
                tokens += own if not tokens else own[space.extra_tokens :]
            slots = self.tree.slots(leaf, 0, leaf.end)
            kv = self.pages.gather(0, [slots]).raw.tobytes()
            out.append((space, tuple(tokens), tuple(n.end for n in chain), kv))
        return out

    def held(self) -> dict[tuple, tuple[bytes | None, ...]]:
        """What every buffer holds of every page, read past our own code: (space, tokens of the path up to the end of a
        page) -> bytes, a pool after the other; None of a pool that holds nothing of it."""
        out, page = {}, self.cache.page_size
        for space, tokens, ends, _ in self.paths():
            key = RadixKey(array("q", tokens), space.extra_key, is_bigram=space.bigram, cache_salt=space.cache_salt)
            _, last, _ = self.cache.tree_core.match_full_device_prefix(key)
            path = self.cache.tree_core.collect_full_device_indices(last, self.cache.root_node_handle())
            for at in range(0, ends[-1], page):
                slots = [path[at : at + page]]
                if isinstance(self.pool, SWAKVPool):
                    slots.append(self.allocator.full_to_swa_index_mapping[slots[0]])
                out[space, tokens[: at + page + space.extra_tokens]] = tuple(
                    b"".join(_bytes(b, _rows(own, per_page, page)) for b, per_page in of_pool) if own.all() else None
                    for of_pool, own in zip(self.buffers()[: len(slots)], slots, strict=True)
                )
        return out

    def check(self, held: int = 0) -> None:
        """SGLang's own invariants, and that every slot is either free or in the tree."""
        self.cache.sanity_check()
        for pool, used in zip(self._pools(), self.cache.total_size(), strict=False):
            assert pool.available_size() + used == pool.size - held

    def _pools(self) -> list:
        """An allocator for each pool."""
        if isinstance(self.allocator, SWATokenToKVPoolAllocator):
            return [self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator]
        if isinstance(self.pool, HybridLinearKVPool):
            return [self.allocator, self.requests.mamba_allocator]
        return [self.allocator]

    def check_evictable(self, held: int = 0) -> None:
        """Evicting everything returns every slot exactly once."""
        self.evict()
        assert self.cache.total_size()[0] == 0
        self.cache.sanity_check()
        for pool in self._pools():
            assert pool.available_size() == pool.size - held
            slots = pool.alloc(pool.size - held)
            assert len(torch.unique(slots)) == pool.size - held
            pool.free(slots.clone())


def buffers(pool) -> list[list[tuple[torch.Tensor, bool]]]:
    """Every tensor of every pool, found by looking and not by our table: what of KV memory is not named is not saved.
    With each, whether it has a row for a page and not for a slot."""
    if isinstance(pool, SWAKVPool):
        return [*buffers(pool.full_kv_pool), *buffers(pool.swa_kv_pool)]
    if isinstance(pool, HybridLinearKVPool):
        return buffers(pool.full_kv_pool)
    names = ("k_buffer", "v_buffer", "kv_buffer", "k_scale_buffer", "v_scale_buffer", "kv_scale_buffer",
             "index_k_with_scale_buffer")  # fmt: skip
    return [[(t, t.shape[0] < pool.size) for name in names for t in getattr(pool, name, None) or () if t.numel()]]


def named(e: Engine, pool=None) -> list[tuple[str, torch.Tensor, Callable]]:
    """Every buffer that can be looked at token by token: a name with the layer's number in the whole model, the tensor,
    and what picks of it the [tokens, heads, ...] that stand in slots of the first pool."""
    pool, page = pool or e.pool, e.cache.page_size
    if isinstance(pool, SWAKVPool):
        mapping = e.allocator.full_to_swa_index_mapping
        window = named(e, pool.swa_kv_pool)
        window = [(name, b, lambda slots, pick=pick: pick(mapping[slots])) for name, b, pick in window]
        return named(e, pool.full_kv_pool) + window
    if isinstance(pool, HybridLinearKVPool):
        return named(e, pool.full_kv_pool)

    def pick(slots):
        return (slots // page, slice(None), slots % page) if getattr(pool, "use_hnd", False) else slots

    kinds = {"k": "k_buffer", "v": "v_buffer", "kv": "kv_buffer", "ks": "k_scale_buffer", "vs": "v_scale_buffer"}
    return [
        (f"{kind}{layer}", buffer, pick)
        for kind, attribute in kinds.items()
        for layer, buffer in zip(pool.model_layer_ids, getattr(pool, attribute, None) or (), strict=False)
    ]


def key_of(e: Engine, tokens) -> RadixKey:
    return RadixKey(array("q", tokens), is_bigram=e.tree.bigram).page_aligned(e.cache.page_size)


def path_slots(e: Engine, key: RadixKey) -> torch.Tensor:
    """The slots of as much of a path as is there."""
    count, last, _ = e.cache.tree_core.match_full_device_prefix(key)
    return e.cache.tree_core.collect_full_device_indices(last, e.cache.root_node_handle())[:count]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _bytes(buffer: torch.Tensor, rows: torch.Tensor) -> bytes:
    return buffer.view(torch.uint8)[rows].numpy().tobytes()


def _rows(slots: torch.Tensor, per_page: bool, page: int) -> torch.Tensor:
    return slots[::page] // page if per_page else slots


def make_pool(
    kind: str, size: int, page: int, layers: int, heads: int, dim: int, dtype, window_size: int, first_layer: int
) -> memory_pool.KVCache:
    common = {
        "size": size, "page_size": page, "layer_num": layers, "device": "cpu", "enable_memory_saver": False,
        "start_layer": first_layer, "end_layer": first_layer + layers - 1,
    }  # fmt: skip
    mha = {**common, "head_num": heads, "head_dim": dim}
    mla = {**common, "kv_lora_rank": 128, "qk_rope_head_dim": 64}
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0), pytest.MonkeyPatch.context() as patch:
        match kind:
            case "hnd":
                patch.setenv("SGLANG_USE_HND_KVCACHE", "1")
                return memory_pool.MHATokenToKVPool(dtype=dtype, **mha)
            case "fp4":
                return memory_pool.MHATokenToKVPoolFP4(dtype=torch.float4_e2m1fn_x2, **mha)
            case "mxfp8":
                return memory_pool.MHATokenToKVPoolMXFP8(dtype=torch.float8_e4m3fn, **{**mha, "head_dim": 32})
            case "mla":
                return memory_pool.MLATokenToKVPool(dtype=dtype, **mla)
            case "mla-fp4":
                return memory_pool.MLATokenToKVPoolFP4(dtype=torch.float4_e2m1fn_x2, **mla)
            case "dsa":
                return memory_pool.DSATokenToKVPool(
                    dtype=dtype, index_head_dim=128, kv_cache_dim=192, index_buf_size=size,
                    skip_topk_layers=[False, True], **mla,
                )  # fmt: skip
            case "swa":
                return SWAKVPool(
                    size=size, size_swa=window_size, page_size=page, dtype=dtype, head_num=heads, head_dim=dim,
                    swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1, 3], device="cpu",
                )  # fmt: skip
        return memory_pool.MHATokenToKVPool(dtype=dtype, **mha)


#: Of linear attention: layers, and states that there is room for.
LINEAR_LAYERS, STATES = [0, 2, 3], 64


def make_requests(kind: str, states: int) -> ReqToTokenPool:
    common = {"size": 8, "max_context_len": 2048, "device": "cpu", "enable_memory_saver": False}
    if kind != "linear":
        return ReqToTokenPool(**common)
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=4, head_dim=8, state_size=16, conv_kernel=4
    )
    params = Mamba2CacheParams(
        shape=shape, layers=LINEAR_LAYERS, dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    )
    return HybridReqToTokenPool(
        **common, mamba_size=states, mamba_spec_state_size=8, cache_params=params, mamba_layer_ids=LINEAR_LAYERS,
        enable_mamba_extra_buffer=False,
    )  # fmt: skip


@contextlib.contextmanager
def linear_settings():
    """What the tree's component for states asks of the server's settings."""
    with pytest.MonkeyPatch.context() as patch:
        settings = SimpleNamespace(mamba=SimpleNamespace(mamba_max_states_per_path=-1))
        for module in (mamba, adapter):
            patch.setattr(module, "mamba_cache_chunk_size", lambda: 64)
            patch.setattr(module, "get_exec", lambda: settings, raising=False)
        patch.setattr(mamba, "mamba_checkpoint_grid", lambda _page: 64, raising=False)
        yield


def make_allocator(pool, size: int, page: int, dtype):
    if isinstance(pool, SWAKVPool):
        return SWATokenToKVPoolAllocator(size, pool.size_swa, page, dtype, "cpu", pool, need_sort=False)
    if page == 1:
        return TokenToKVPoolAllocator(size, dtype, "cpu", pool, need_sort=False)
    return PagedTokenToKVPoolAllocator(size, page, dtype, "cpu", pool, need_sort=False)


def engine(
    core="rust", page=1, bigram=False, size=4096, layers=2, heads=2, dim=16, dtype=torch.bfloat16, policy="lru",
    locked=(), keyed=True, normal=False, kind="mha", window_size=2048, first_layer=0, drafts=(), media=None,
    states=STATES,
) -> Engine:
    requests = make_requests(kind, states)
    if kind == "linear":
        pool = HybridLinearKVPool(
            size=size, dtype=dtype, page_size=page, head_num=heads, head_dim=dim, full_attention_layer_ids=[1, 4],
            device="cpu", mamba_pool=requests.mamba_pool,
        )  # fmt: skip
    else:
        pool = make_pool(kind, size, page, layers, heads, dim, dtype, window_size, first_layer)
    if kind in COMPONENTS and metadata.version("sglang").startswith("0.5.22"):
        pytest.skip("SGLang 0.5.22 does not tell which layers the parts of a pool are of: refused there")
    allocator = make_allocator(pool, size, page, dtype)
    with linear_settings() if kind == "linear" else contextlib.nullcontext():
        cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=allocator, page_size=page,
                is_eagle=bigram, eviction_policy=policy, tree_components=COMPONENTS.get(kind, (FULL,)),
                tree_core_backend=core, sliding_window_size=WINDOW if kind == "swa" else None,
            )
        )  # fmt: skip
    tree = LiveTree(cache, policy, lambda: list(locked), keyed, media)
    drafts = tuple(make_pool(draft, size, page, 1, 2 * heads, dim, dtype, window_size, layers) for draft in drafts)
    pages = KvPages(allocator, drafts=drafts, requests=requests)
    return Engine(cache, allocator, pool, tree, pages, size, requests, drafts, normal)


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(1, 49000, count).tolist()


def populate(e: Engine, rng: np.random.Generator, count: int = 12, unit: int = 16) -> list[RadixKey]:
    """Paths that share prefixes of several lengths, in four spaces."""
    head = random_tokens(rng, 4 * unit)
    middles = [random_tokens(rng, 2 * unit) for _ in range(3)]
    spaces = [(None, None), (None, None), ("lora-a", None), (None, "salt"), ("", None)]
    keys = []
    for i in range(count):
        tail = random_tokens(rng, unit + unit * (i % 5))
        keys.append(e.put(head + middles[i % 3] + tail, *spaces[i % len(spaces)]))
    return keys


def stored_paths_are_part_of(whole, part) -> bool:
    """Every restored path is, token by token and byte by byte, the beginning of a path that was there."""
    for space, tokens, _, kv in part:
        rows = len(tokens) - space.extra_tokens
        if not any(
            space == other and tokens == there[: len(tokens)] and kv == _first_rows(kv_there, len(there), rows)
            for other, there, _, kv_there in whole
        ):
            return False
    return True


def _first_rows(kv: bytes, rows: int, wanted: int, buffers: int = 4) -> bytes:
    size = len(kv) // buffers // rows
    cut = [kv[i * rows * size : (i * rows + wanted) * size] for i in range(buffers)]
    return b"".join(cut)
