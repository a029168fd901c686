"""A scheduler process without its scheduler: the plugin's own runtime over a real tree, real pools and a real store.

Real servers run in tests/server. Here are the faults that cannot be injected into them.
"""

from __future__ import annotations

import time
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import real
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_persist import config
from sglang_persist.engine import identity, runtime
from sglang_persist.fs import REAL, FileSystem

PARALLEL = SimpleNamespace(
    tp_size=1, pp_size=1, dp_size=1, dp_rank=None, attn_dp_rank=0, attn_dp_size=1, pp_rank=0, attn_cp_rank=0,
    attn_cp_size=1, attn_tp_rank=0, attn_tp_size=1,
)  # fmt: skip


class Process:
    """One start of a server on a directory. `put` and `match` are those of its cache."""

    def __init__(self, monkeypatch, directory: Path, fs: FileSystem = REAL, core="rust", **settings):
        self.parallel = copy(PARALLEL)
        monkeypatch.setattr(runtime, "get_parallel", lambda: self.parallel)
        monkeypatch.setattr(runtime, "get_memory", lambda: SimpleNamespace(radix_eviction_policy="lru"))
        monkeypatch.setattr(identity, "identify", lambda *_args: real.IDENTITY)
        monkeypatch.setattr(identity, "heads", lambda *_args: (2,))
        variables = {"dir": directory, "interval": 0, "min_free": 0, **settings}
        loaded = config.load({config.BY_KEY[k].variable: str(v) for k, v in variables.items()})
        self.engine = real.engine(core)
        scheduler = SimpleNamespace(
            tree_cache=self.engine.cache,
            token_to_kv_pool_allocator=self.engine.allocator,
            req_to_token_pool=self.engine.requests,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            enable_lora=False,
            collect_inflight_reqs=list,
            chunked_req=None,
            last_batch=None,
            model_config=SimpleNamespace(is_multimodal=False),
            is_fully_idle=lambda: True,
            idle_sleeper=True,  # a pass waits inside its slice instead of being called again at once
        )
        self.persistence = runtime.Persistence(scheduler, loaded, fs)

    def start(self) -> Process:
        self.persistence.start()
        return self

    @property
    def status(self) -> dict:
        return self.persistence.status()

    def passes(self, until) -> None:
        """Passes of the scheduler's loop, until something is so."""
        end = time.monotonic() + 60
        while not until():
            assert time.monotonic() < end, self.status
            self.one_pass()

    def one_pass(self) -> None:
        received: list = []
        self.persistence.poll(received)
        for command in received:
            self.persistence.on_command(command)
        self.persistence.tick()

    def snapshot(self) -> dict:
        """One on demand; the status afterwards."""
        self.persistence.request_snapshot()
        wanted = self.status["snapshot"]["requested"]
        self.passes(lambda: self.status["snapshot"]["last_request"] >= wanted)
        return self.status["snapshot"]

    def stop(self) -> None:
        self.persistence.shutdown()
