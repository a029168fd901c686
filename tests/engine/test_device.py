"""KV on an accelerator: read after the pass that fills it, before the one that reuses it, and written back bit for bit.

Needs a CUDA device; SGLang itself is not needed for this part, only its pools.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_persist.engine.pages import Device, _rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

LAYERS, SLOTS, ROW = 8, 4096, (4, 64)


@pytest.fixture
def pool():
    buffers = [torch.randn(SLOTS, *ROW, device="cuda").to(torch.bfloat16) for _ in range(2 * LAYERS)]
    return [_rows(b) for b in buffers]


@pytest.fixture
def forward():
    return torch.cuda.Stream()


def host(buffers, index) -> np.ndarray:
    parts = [b.index_select(0, index).view(torch.uint8).flatten().cpu().numpy() for b in buffers]
    return np.concatenate(parts)


def busy(stream, buffer: torch.Tensor) -> None:
    """Work that takes its time."""
    with torch.cuda.stream(stream):
        big = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            big = big @ big / 64
        buffer[0, 0] += (big[0, 0] * 0).to(buffer.dtype)


def test_bytes_come_and_go_bit_for_bit(pool, forward):
    device = Device(torch.device("cuda"), lambda: forward)
    index = torch.randperm(SLOTS, device="cuda")[:300]
    size = sum(300 * b.shape[1] * b.element_size() for b in pool)
    found = device.read(pool, index, size)
    found.arrived()
    expected = host(pool, index)
    assert np.array_equal(found.raw, expected)
    target = torch.randperm(SLOTS, device="cuda")[:300]
    raw = device.host(size).numpy()
    raw[:] = expected
    device.write(pool, target, raw, 300, 0)
    device.settle()
    assert np.array_equal(host(pool, target), expected)


def test_a_page_is_read_after_the_pass_that_fills_it(pool, forward):
    device = Device(torch.device("cuda"), lambda: forward)
    index = torch.arange(100, 200, device="cuda")
    value = torch.full((100, pool[0].shape[1]), 7, dtype=pool[0].dtype, device="cuda")
    torch.cuda.synchronize()
    busy(forward, pool[0])
    with torch.cuda.stream(forward):
        pool[0].index_copy_(0, index, value)
    size = sum(100 * b.shape[1] * b.element_size() for b in pool)
    found = device.read(pool, index, size)
    found.arrived()
    assert np.array_equal(found.raw, host(pool, index))
    assert (found.raw[: value.numel() * value.element_size()].view(np.int64) == 7).all()


def test_a_page_that_is_reused_at_once_was_read_before(pool, forward):
    device = Device(torch.device("cuda"), lambda: forward)
    index = torch.arange(100, 200, device="cuda")
    expected = host(pool, index)
    busy(device._stream, torch.zeros(1, 1, device="cuda"))  # our own stream is late
    found = device.read(pool, index, expected.nbytes)
    with torch.cuda.stream(forward):  # what an eviction allows from now on
        for buffer in pool:
            buffer.index_fill_(0, index, 0)
    for buffer in pool:
        buffer.index_fill_(0, index, 0)
    found.arrived()
    assert np.array_equal(found.raw, expected)
    torch.cuda.synchronize()
    assert not host(pool, index).any()
