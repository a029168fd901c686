"""KV rows in and out of SGLang's pools, whatever these consist of (adapters.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sglang_persist.engine.adapters import parts
from sglang_persist.errors import Unsupported
from sglang_persist.model import Pool
from sglang_persist.plan.loading import Slice
from sglang_persist.spare import Spare


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as [rows, elements of 8 bytes (or 1)]: wide elements gather several times faster."""
    if not tensor.is_contiguous():
        raise Unsupported("unsupported_layout", f"a KV buffer with strides {tensor.stride()}")
    flat = tensor.view(torch.uint8).view(tensor.shape[0], -1)
    return flat.view(torch.int64) if flat.shape[1] % 8 == 0 and flat.data_ptr() % 8 == 0 else flat


class KvPages:
    """`ports.Pages` over one allocator and its pools. `drafts`: the pools of draft models, which share its slots;
    `requests`: where states of linear attention are.

    On a device, bytes go through page-locked memory and a stream of our own. `forward` gives the stream on which the
    engine's forward passes run, None where there is none.
    """

    def __init__(
        self, allocator, forward: Callable[[], object] = lambda: None, drafts: Sequence[object] = (), requests=None
    ):
        found = parts(allocator, drafts, requests)
        self._allocator, self.kv = allocator, allocator.get_kvcache()
        self.drafted = bool(drafts)
        self._allocators = [part.allocator for part in found]
        self.pools = tuple(part.pool for part in found)
        self.layout = max(part.layout for part in found)
        #: Whether all ranks of tensor parallelism hold the same.
        self.latent = all(part.latent for part in found)
        self._page = int(self.kv.page_size)
        self._buffers = [[_rows(tensor) for tensor in part.tensors] for part in found]
        device = self._buffers[0][0].device
        self._device = None if device.type == "cpu" else Device(device, forward)
        #: The same memory as [rows, bytes]. A view takes Torch ten times as long as NumPy, and a record has many.
        self._memory = [[] if self._device else [b.view(torch.uint8).numpy() for b in of] for of in self._buffers]
        self._spare = Spare()

    def _unit(self, pool: int) -> int:
        """How many slots have a row together."""
        return self._page if self.pools[pool].unit == "page" else 1

    def _record_rows(self, pool: int, tokens: int) -> int:
        """How many rows so many tokens have in a record: whole pages, but where there is a row for each slot."""
        return tokens if self.pools[pool].unit == "slot" else tokens // self._page

    def _index(self, pool: int, slots: torch.Tensor) -> torch.Tensor:
        """The rows of these slots, which are whole pages where a page has one row."""
        unit = self._unit(pool)
        return slots if unit == 1 else slots[::unit] // unit

    def of_pool(self, pool: int, slots: torch.Tensor) -> torch.Tensor | None:
        if pool == 0:
            return slots
        others = self._allocator.full_to_swa_index_mapping[slots]
        # 0 is the slot of padding: what was there has left the window.
        return None if bool((others <= 0).any()) else others

    def gather(self, pool: int, slots: Sequence[torch.Tensor]) -> Gathered:
        index = self._index(pool, slots[0] if len(slots) == 1 else torch.cat(tuple(slots)))
        size = len(index) * self.pools[pool].row_bytes
        if self._device is not None:
            return self._device.read(self._buffers[pool], index, size)
        out = self._spare.take(size)
        _select(self._buffers[pool], index.to(torch.int64), torch.from_numpy(out))
        return Gathered(out, spare=self._spare)

    def size(self) -> int:
        return int(self._allocators[0].size)

    def capacity(self, pool: int = 0) -> int:
        return int(self._allocators[pool].available_size())

    def allocate(self, count: int, pool: int = 0) -> torch.Tensor | None:
        slots = self._allocators[pool].alloc(count)
        # What the allocator returns is a view of its free list.
        return None if slots is None else slots.clone()

    def free(self, slots: torch.Tensor, pool: int = 0) -> None:
        self._allocators[pool].free(slots)

    def link(self, pool: int, slots: Sequence[torch.Tensor], others: Sequence[torch.Tensor] | None) -> None:
        if others is None:
            self._allocator.clear_full_to_swa_mapping(torch.cat(tuple(slots)))
        else:
            self._allocator.set_full_to_swa_mapping(torch.cat(tuple(slots)), torch.cat(tuple(others)))

    def staging(self, size: int) -> np.ndarray:
        return np.empty(size, np.uint8) if self._device is None else self._device.host(size).numpy()

    def scatter(
        self, pool: int, slots: torch.Tensor, raw: np.ndarray, tokens: int, first: int, stored: Pool | None = None,
        slices: Sequence[Slice] | None = None,
    ) -> None:  # fmt: skip
        index, rows, first = self._index(pool, slots), self._record_rows(pool, tokens), self._record_rows(pool, first)
        if slices is not None:
            self._scatter_slices(pool, index, raw, rows, first, stored, slices)
            return
        rows = (self._buffers[pool], index, raw, rows, first)
        if self._device is not None:
            self._device.write(*rows)
        else:
            _insert(*rows[:2], torch.from_numpy(raw), *rows[3:])

    def _scatter_slices(
        self, pool: int, index: torch.Tensor, raw: np.ndarray, rows: int, first: int, stored: Pool,
        slices: Sequence[Slice],
    ) -> None:  # fmt: skip
        """Through this thread alone: a change of topology is once in a while."""
        if self._device is not None:
            self._device.settle()
        ends = np.cumsum([rows * b.row_bytes for b in stored.buffers])
        for s in slices:
            size, end = stored.buffers[s.source].row_bytes, int(ends[s.source])
            of_buffer = raw[end - rows * size : end].reshape(rows, size)[first : first + len(index), s.low : s.high]
            target = self._buffers[pool][s.target].view(torch.uint8)
            part = torch.from_numpy(np.ascontiguousarray(of_buffer)).to(target.device)
            target[index, s.at : s.at + s.high - s.low] = part

    def slot_numbers(self, slots: torch.Tensor) -> np.ndarray | None:
        return slots.numpy() if self._device is None else None

    def memory(self, pool: int, first: int, count: int) -> list[np.ndarray]:
        unit = self._unit(pool)
        rows = slice(first // unit, (first + count) // unit)
        return [memory[rows].reshape(-1) for memory in self._memory[pool]]

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

    def write(self, buffers: list[torch.Tensor], index: torch.Tensor, raw: np.ndarray, rows: int, first: int) -> None:
        # A slot that is free by now may still be written to by a forward pass that was under way.
        for stream in self._streams():
            self._stream.wait_stream(stream)
        source = torch.from_numpy(raw)
        with self._module.stream(self._stream):
            _insert(buffers, index, source.to(self._device, non_blocking=True), rows, first)
            done = self._module.Event()
            done.record(self._stream)
        self._sources = [entry for entry in self._sources if not entry[0].query()] + [(done, source)]

    def settle(self) -> None:
        self._stream.synchronize()
        self._module.current_stream(self._device).synchronize()  # slices are written there
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


def _insert(buffers: list[torch.Tensor], index: torch.Tensor, raw: torch.Tensor, rows: int, first: int) -> None:
    """Rows [first, first + len(index)) of a record of `rows` rows to these rows of each buffer."""
    at, count = 0, len(index)
    for buffer in buffers:
        size = _row_bytes(buffer)
        low = at + first * size
        source = raw[low : low + count * size]
        source = source.view(buffer.dtype) if low % buffer.element_size() == 0 else source.clone().view(buffer.dtype)
        buffer.index_copy_(0, index, source.view(count, -1))
        at += rows * size


def _row_bytes(buffer: torch.Tensor) -> int:
    return buffer.shape[1] * buffer.element_size()
