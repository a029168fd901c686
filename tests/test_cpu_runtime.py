"""The CPU runtime computes what stock SGLang computes."""

import os
import subprocess
import sys

from serving import RUNTIME

# In a process of its own: `common_ops` registers an op for the whole process and changes how a module is imported.
PRELUDE = f"""
import sys
sys.path.insert(0, {str(RUNTIME)!r})
import torch
import common_ops
"""

ATTENTION = """
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

replaced = Backend._run_sdpa_forward_extend
stock = next(cell.cell_contents for cell in replaced.__closure__)
assert stock.__module__ == common_ops.BACKEND and replaced.__module__ == "common_ops"

torch.manual_seed(0)
cases = 0
for heads, kv_heads in ((4, 4), (6, 2)):
    for size, v_size in ((64, 64), (48, 32)):
        for window in (None, 0, 5, 32):
            for causal in (True, False) if window is None else (True,):
                for dtype, kv_dtype in ((torch.float32, torch.float32), (torch.float32, torch.bfloat16)):
                    prefixes, news = torch.tensor([0, 1, 40, 63]), torch.tensor([17, 1, 9, 64])
                    totals = prefixes + news
                    table = torch.randperm(4 * 128).reshape(4, 128)
                    rows = torch.tensor([2, 0, 3, 1])
                    k = torch.randn(512, kv_heads, size).to(kv_dtype)
                    v = torch.randn(512, kv_heads, v_size).to(kv_dtype)
                    q = torch.randn(int(news.sum()), heads, size, dtype=dtype)
                    results = [torch.zeros(q.shape[0], heads, v_size, dtype=dtype) for _ in range(2)]
                    for method, out in zip((stock, replaced), results):
                        # Called on the class: the stock method needs no more of self than the mask it makes.
                        method(Backend, q, out, k, v, table, rows, totals, prefixes, news, scaling=0.1,
                               enable_gqa=heads != kv_heads, causal=causal, sliding_window_size=window)
                    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
                    assert results[0].abs().min() > 0
                    cases += 1
print(cases)
"""

TABLE = """
table = torch.zeros(3, 8, dtype=torch.int32)
torch.ops.sgl_kernel.assign_req_to_token_pool_cpu(
    torch.tensor([2, 0]), table, torch.tensor([1, 3]), torch.tensor([4, 5]), torch.tensor([10, 11, 12, 13, 14]), 8)
print(table.tolist())
"""


def run(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"} | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_attention_of_the_new_rows_equals_stock():
    assert run(ATTENTION) == "40"


def test_stock_attention_on_request():
    whose = """
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
print(Backend._run_sdpa_forward_extend.__module__ == common_ops.BACKEND)
"""
    assert run(whose, SGLANG_PERSIST_STOCK_ATTENTION="1") == "True"
    assert run(whose) == "False"


def test_slots_are_dealt_to_the_requests():
    assert run(TABLE) == str([[0, 0, 0, 13, 14, 0, 0, 0], [0] * 8, [0, 10, 11, 12, 0, 0, 0, 0]])
