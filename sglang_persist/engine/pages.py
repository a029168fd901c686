"""KV rows in and out of SGLang's pools.

One table, keyed by the exact class of the pool: what buffers it has, each with a row per slot. A class that is not in
the table, or a layout that its row does not describe, is refused by name. `LAYOUT` is the revision of the bytes that
an adapter yields: raise it when a release of SGLang puts other bytes into the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_persist.errors import Unsupported
from sglang_persist.model import Buffer, Pool


@dataclass(frozen=True)
class Adapter:
    layout: int
    buffers: Callable[[object], list[tuple[str, torch.Tensor]]]
    refuse: Callable[[object], str | None]


def _mha_buffers(pool) -> list[tuple[str, torch.Tensor]]:
    keys = [(f"k{i}", t) for i, t in enumerate(pool.k_buffer)]
    return keys + [(f"v{i}", t) for i, t in enumerate(pool.v_buffer)]


def _mha_refuse(pool) -> str | None:
    if pool.use_hnd or pool.kv_cache_layout != "nhd":
        return f"KV layout {pool.kv_cache_layout}"
    if pool.is_quantized_kv_cache or pool.k_scale_buffer is not None:
        return "a KV cache with scale buffers"
    return None


ADAPTERS: dict[str, Adapter] = {
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool": Adapter(1, _mha_buffers, _mha_refuse),
}
ALLOCATORS = {
    "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator",
    "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator",
}


def class_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as [slots, elements of 8 bytes (or 1)]: wide elements gather several times faster."""
    if not tensor.is_contiguous():
        raise Unsupported("unsupported_layout", f"a KV buffer with strides {tensor.stride()}")
    flat = tensor.view(torch.uint8).view(tensor.shape[0], -1)
    return flat.view(torch.int64) if flat.shape[1] % 8 == 0 and flat.data_ptr() % 8 == 0 else flat


class KvPages:
    """`ports.Pages` over one allocator and its pool."""

    def __init__(self, allocator):
        self._allocator = allocator
        self.pool = pool = allocator.get_kvcache()
        adapter = ADAPTERS.get(class_name(pool))
        if adapter is None:
            raise Unsupported("unsupported_pool", f"KV pool {class_name(pool)}")
        if class_name(allocator) not in ALLOCATORS:
            raise Unsupported("unsupported_pool", f"KV allocator {class_name(allocator)}")
        if reason := adapter.refuse(pool):
            raise Unsupported("unsupported_layout", reason)
        self.layout = adapter.layout
        named = adapter.buffers(pool)
        self._buffers = [_rows(tensor) for _, tensor in named]
        self._device = named[0][1].device
        # Stored as bytes where the pool does so (fp8): the logical type says how they compress and what they are.
        dtype = str(pool.dtype).removeprefix("torch.")
        self.pools = (
            Pool("kv", "slot", tuple(
                Buffer(name, dtype, tuple(t.shape[1:]), t[0].numel() * t.element_size()) for name, t in named
            )),
        )  # fmt: skip

    def gather(self, pool: int, slots: Sequence[torch.Tensor]) -> np.ndarray:
        index = slots[0] if len(slots) == 1 else torch.cat(tuple(slots))
        index = index.to(self._device, torch.int64)
        if self._device.type != "cpu":
            # The tree can show a page before the forward that fills it is done, and an evicted page is reused at once.
            torch.get_device_module(self._device).synchronize()
        rows = len(index)
        out = np.empty(self.pools[pool].bytes(rows, 1), np.uint8)
        host, at = torch.from_numpy(out), 0
        for buffer in self._buffers:
            size = rows * buffer.shape[1] * buffer.element_size()
            target = host[at : at + size].view(buffer.dtype).view(rows, -1) if _aligned(at, buffer) else None
            if self._device.type == "cpu" and target is not None:
                torch.index_select(buffer, 0, index, out=target)
            else:
                host[at : at + size] = buffer.index_select(0, index).view(torch.uint8).flatten().to("cpu")
            at += size
        return out

    def size(self) -> int:
        return int(self._allocator.size)

    def capacity(self) -> int:
        return int(self._allocator.available_size())

    def allocate(self, tokens: int) -> torch.Tensor | None:
        slots = self._allocator.alloc(tokens)
        # What the allocator returns is a view of its free list.
        return None if slots is None else slots.clone()

    def free(self, slots: torch.Tensor) -> None:
        self._allocator.free(slots)

    def scatter(self, pool: int, slots: torch.Tensor, raw: np.ndarray, rows: int, first: int) -> None:
        host, at, count = torch.from_numpy(raw), 0, len(slots)
        for buffer in self._buffers:
            row_bytes = buffer.shape[1] * buffer.element_size()
            low = at + first * row_bytes
            source = host[low : low + count * row_bytes]
            source = source.view(buffer.dtype) if _aligned(low, buffer) else source.clone().view(buffer.dtype)
            buffer.index_copy_(0, slots, source.view(count, -1).to(self._device))
            at += rows * row_bytes

    def memory(self, pool: int, slots: torch.Tensor) -> list[np.ndarray] | None:
        first, count = int(slots[0]), len(slots)
        if self._device.type != "cpu" or not torch.equal(slots, torch.arange(first, first + count, dtype=slots.dtype)):
            return None
        return [b[first : first + count].view(torch.uint8).flatten().numpy() for b in self._buffers]

    def settle(self) -> None:
        """Wait until everything that was scattered is there."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()


def _aligned(offset: int, buffer: torch.Tensor) -> bool:
    return offset % buffer.element_size() == 0
