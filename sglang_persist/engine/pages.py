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
from sglang_persist.spare import Spare


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
    """`ports.Pages` over one allocator and its pool.

    On a device, bytes go through page-locked memory and a stream of our own. `forward` gives the stream on which the
    engine's forward passes run, None where there is none.
    """

    def __init__(self, allocator, forward: Callable[[], object] = lambda: None):
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
        device = named[0][1].device
        self._device = None if device.type == "cpu" else Device(device, forward)
        #: The same memory as [slots, bytes]. A view takes Torch ten times as long as NumPy, and a record has many.
        self._memory = [] if self._device else [b.view(torch.uint8).numpy() for b in self._buffers]
        self._spare = Spare()
        # Stored as bytes where the pool does so (fp8): the logical type says how they compress and what they are.
        dtype = str(pool.dtype).removeprefix("torch.")
        self.pools = (
            Pool("kv", "slot", tuple(
                Buffer(name, dtype, tuple(t.shape[1:]), t[0].numel() * t.element_size()) for name, t in named
            )),
        )  # fmt: skip

    def gather(self, pool: int, slots: Sequence[torch.Tensor]) -> Gathered:
        index = slots[0] if len(slots) == 1 else torch.cat(tuple(slots))
        size = self.pools[pool].bytes(len(index), 1)
        if self._device is not None:
            return self._device.read(self._buffers, index, size)
        out = self._spare.take(size)
        _select(self._buffers, index.to(torch.int64), torch.from_numpy(out))
        return Gathered(out, spare=self._spare)

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

    def staging(self, size: int) -> np.ndarray:
        return np.empty(size, np.uint8) if self._device is None else self._device.host(size).numpy()

    def scatter(self, pool: int, slots: torch.Tensor, raw: np.ndarray, rows: int, first: int) -> None:
        if self._device is not None:
            self._device.write(self._buffers, slots, raw, rows, first)
        else:
            _insert(self._buffers, slots, torch.from_numpy(raw), rows, first)

    def rows(self, slots: torch.Tensor) -> np.ndarray | None:
        return slots.numpy() if self._device is None else None

    def memory(self, pool: int, first: int, count: int) -> list[np.ndarray]:
        return [memory[first : first + count].reshape(-1) for memory in self._memory]

    def settle(self) -> None:
        """Wait until everything that was scattered is there."""
        if self._device is not None:
            self._device.settle()


class Gathered:
    """`ports.Gathered`."""

    def __init__(self, raw: np.ndarray, event=None, spare: Spare | None = None):
        self.raw, self._event, self._spare = raw, event, spare

    def arrived(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def done(self) -> None:
        if self._spare is not None:
            self._spare.give(self.raw)


class Device:
    """Copies between KV buffers on a device and page-locked memory, in an order in which no page is read before the
    forward pass that fills it is done, nor written to before it was read (sglang_internals, section 5).

    The tree can show a page before its forward pass has run, and an evicted page is reused at once. So our stream waits
    for what the engine's streams have been given so far; and they, before anything that they are given from now on, for
    our reading the pages into memory of ours on the device: not for the way from there to the host.
    """

    def __init__(self, device: torch.device, forward: Callable[[], object]):
        self._module = torch.get_device_module(device)
        self._device, self._forward = device, forward
        self._stream = self._module.Stream(device=device)
        #: Page-locked memory that copies to the device still read from, with what tells that they are done.
        self._sources: list[tuple[object, torch.Tensor]] = []

    def _streams(self) -> list:
        forward = self._forward()
        return [self._module.current_stream(self._device), *([forward] if forward is not None else [])]

    def host(self, size: int) -> torch.Tensor:
        """Page-locked memory. Torch keeps what is given back and hands it out again."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def read(self, buffers: list[torch.Tensor], index: torch.Tensor, size: int) -> Gathered:
        streams = self._streams()
        for stream in streams:
            self._stream.wait_stream(stream)
        with self._module.stream(self._stream):
            index = index.to(self._device, torch.int64)
            ours = torch.empty(size, dtype=torch.uint8, device=self._device)
            _select(buffers, index, ours)
            for stream in streams:
                stream.wait_stream(self._stream)
            out = self.host(size)
            out.copy_(ours, non_blocking=True)
            arrived = self._module.Event()
            arrived.record(self._stream)
        return Gathered(out.numpy(), arrived)

    def write(self, buffers: list[torch.Tensor], slots: torch.Tensor, raw: np.ndarray, rows: int, first: int) -> None:
        # A slot that is free by now may still be written to by a forward pass that was under way.
        for stream in self._streams():
            self._stream.wait_stream(stream)
        source = torch.from_numpy(raw)
        with self._module.stream(self._stream):
            _insert(buffers, slots, source.to(self._device, non_blocking=True), rows, first)
            done = self._module.Event()
            done.record(self._stream)
        self._sources = [entry for entry in self._sources if not entry[0].query()] + [(done, source)]

    def settle(self) -> None:
        self._stream.synchronize()
        self._sources.clear()


def _select(buffers: list[torch.Tensor], index: torch.Tensor, out: torch.Tensor) -> None:
    """Rows of each buffer, one buffer after the other."""
    at, rows = 0, len(index)
    for buffer in buffers:
        size = rows * _row_bytes(buffer)
        target = out[at : at + size]
        if at % buffer.element_size() == 0:
            torch.index_select(buffer, 0, index, out=target.view(buffer.dtype).view(rows, -1))
        else:
            target.copy_(buffer.index_select(0, index).view(torch.uint8).flatten())
        at += size


def _insert(buffers: list[torch.Tensor], slots: torch.Tensor, raw: torch.Tensor, rows: int, first: int) -> None:
    """Rows [first, first + len(slots)) of a record of `rows` rows to these slots of each buffer."""
    at, count = 0, len(slots)
    for buffer in buffers:
        size = _row_bytes(buffer)
        low = at + first * size
        source = raw[low : low + count * size]
        source = source.view(buffer.dtype) if low % buffer.element_size() == 0 else source.clone().view(buffer.dtype)
        buffer.index_copy_(0, slots, source.view(count, -1))
        at += rows * size


def _row_bytes(buffer: torch.Tensor) -> int:
    return buffer.shape[1] * buffer.element_size()
