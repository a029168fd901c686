"""Real SGLang pools, allocators and radix trees on the CPU, and ways to fill and compare them. Nothing is mocked."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_persist.engine.pages import KvPages
from sglang_persist.engine.tree import LiveTree
from sglang_persist.model import Identity

FULL = ComponentType.FULL
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
    pool: MHATokenToKVPool
    tree: LiveTree
    pages: KvPages
    size: int
    #: KV as models make it, which compresses; else every bit is random.
    normal: bool = False

    def put(self, tokens, extra_key=None, salt=None) -> RadixKey:
        """What a finished request leaves: random KV in new slots, the path in the tree."""
        key = RadixKey(array("q", tokens), extra_key, is_bigram=self.tree.bigram, cache_salt=salt)
        key = key.page_aligned(self.cache.page_size)
        matched, last, _ = self.cache.tree_core.match_full_device_prefix(key)
        prefix = self.cache.tree_core.collect_full_device_indices(last, self.cache.root_node_handle())[:matched]
        new = self.allocator.alloc(len(key) - matched).clone()
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            if self.normal:
                buffer[new] = torch.randn(buffer[new].shape).to(buffer.dtype)
                continue
            rows = buffer.view(torch.uint8)
            rows[new] = torch.randint(0, 256, rows[new].shape, dtype=torch.uint8)
        value = torch.cat([prefix, new])
        self.inserted(InsertParams(key=key, value=value, prev_prefix_len=matched, inserted_len=matched))
        return key

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
        self.cache.evict(EvictParams(num_tokens=tokens))

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

    def check(self, held: int = 0) -> None:
        """SGLang's own invariants, and that every slot is either free or in the tree."""
        self.cache.sanity_check()
        assert self.allocator.available_size() + self.cache.total_size()[0] == self.size - held

    def check_evictable(self, held: int = 0) -> None:
        """Evicting everything returns every slot exactly once."""
        self.evict()
        assert self.cache.total_size()[0] == 0
        assert self.allocator.available_size() == self.size - held
        self.cache.sanity_check()
        slots = self.allocator.alloc(self.size - held)
        assert len(torch.unique(slots)) == self.size - held
        self.allocator.free(slots.clone())


def engine(
    core="rust", page=1, bigram=False, size=4096, layers=2, heads=2, dim=16, dtype=torch.bfloat16, policy="lru",
    locked=(), keyed=True, normal=False,
) -> Engine:
    pool = MHATokenToKVPool(
        size=size, page_size=page, dtype=dtype, head_num=heads, head_dim=dim, layer_num=layers, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    if page == 1:
        allocator = TokenToKVPoolAllocator(size, dtype, "cpu", pool, need_sort=False)
    else:
        allocator = PagedTokenToKVPoolAllocator(size, page, dtype, "cpu", pool, need_sort=False)
    requests = ReqToTokenPool(size=8, max_context_len=2048, device="cpu", enable_memory_saver=False)
    cache = UnifiedRadixCache(
        CacheInitParams(
            disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=allocator, page_size=page,
            is_eagle=bigram, eviction_policy=policy, tree_components=(FULL,), tree_core_backend=core,
        )
    )  # fmt: skip
    tree = LiveTree(cache, policy, lambda: list(locked), keyed)
    return Engine(cache, allocator, pool, tree, KvPages(allocator), size, normal)


def random_tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(1, 49000, count).tolist()


def populate(e: Engine, rng: np.random.Generator, count: int = 12) -> list[RadixKey]:
    """Paths that share prefixes of several lengths, in four spaces."""
    head = random_tokens(rng, 64)
    middles = [random_tokens(rng, 32) for _ in range(3)]
    spaces = [(None, None), (None, None), ("lora-a", None), (None, "salt"), ("", None)]
    keys = []
    for i in range(count):
        tail = random_tokens(rng, 16 + 16 * (i % 5))
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
