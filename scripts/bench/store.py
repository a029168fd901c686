"""Save and restore against what the machine can do, through real SGLang pools and a real radix tree, without a server.

Each case runs in a process of its own, so that its peak of memory is its own. All rates are of KV bytes as the pool
holds them, in one run, in turn; a ratio compares two of the same case.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from report import ROOT, bars, finish, options, panels, ratio, steps
from rich.console import Console
from rich.table import Table

sys.path.append(str(ROOT / "tests" / "engine"))
# What the CPU runtime sets for servers, for this process.
sys.path.insert(0, str(ROOT / "scripts" / "cpu_runtime"))
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import flow
import numpy as np
import real
import serving
import torch
import zstandard

from sglang_persist.engine.runtime import BUSY_SLICE
from sglang_persist.format import planes
from sglang_persist.store import names, shard
from sglang_persist.store.writer import encode_record

SMOL = {"layers": 30, "heads": 3, "dim": 64}  # SmolLM2-135M: 23,040 bytes of KV a token
FOUR_KIB = {"layers": 4, "heads": 4, "dim": 64}  # 4,096 bytes a token
TINY = {"layers": 1, "heads": 1, "dim": 16}  # 64 bytes a token
RECORD = 256  # tokens
TURNS = 4  # of the codec, in each timing: with few records, who comes last counts too much


class Bed:
    """A real engine whose pool is full of KV, and prompts in its tree."""

    def __init__(self, tokens: int, shape: dict, kv: np.ndarray | None = None, page: int = 1, fill: bool = True):
        size = -(-tokens // page) * page + 8 * page
        self.engine = real.engine(size=size, page=page, **shape)
        self.engine.tree.watch()
        self.rng = np.random.default_rng(0)
        pool = self.engine.pool
        for i, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
            if not fill:
                buffer.fill_(0)  # its memory is there, and counts for neither side
            elif kv is None:
                block = torch.randn(4096, *buffer.shape[1:]).to(buffer.dtype)
                for at in range(0, len(buffer), len(block)):
                    part = buffer[at : at + len(block)]
                    part.copy_(block[: len(part)])
            else:
                source = torch.from_numpy(kv[i % len(kv)]).view(torch.bfloat16).view(-1, *buffer.shape[1:])
                for at in range(0, len(buffer), len(source)):
                    part = buffer[at : at + len(source)]
                    part.copy_(source[: len(part)])

    def add(self, tokens: list[int], matched: int = 0, hashed: bool = True) -> None:
        """A path whose first `matched` tokens are there."""
        e = self.engine
        key = real.RadixKey(real.array("q", tokens), None)
        value = e.allocator.alloc(len(tokens) - matched).clone()
        if matched:
            _, last, _ = e.cache.tree_core.match_full_device_prefix(key)
            prefix = e.cache.tree_core.collect_full_device_indices(last, e.cache.root_node_handle())[:matched]
            value = torch.cat([prefix, value])
        params = real.InsertParams(key=key, value=value, prev_prefix_len=matched, inserted_len=matched)
        e.inserted(params)
        if hashed:
            e.tree.keep_current()  # as the runtime does between two passes

    def random(self, count: int) -> list[int]:
        return self.rng.integers(1, 49000, count).tolist()

    def prompts(self, tokens: int, each: int, hashed: bool = True) -> None:
        for _ in range(tokens // each):
            self.add(self.random(each), hashed=hashed)

    @property
    def token_bytes(self) -> int:
        return self.engine.pages.pools[0].bytes(1, 1)


class Peak:
    """The most resident memory above that at the beginning, sampled."""

    def __enter__(self) -> Peak:
        self._stop, self._first = threading.Event(), _resident()
        self.bytes = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.bytes = max(self.bytes, _resident() - self._first)

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _scratch() -> Path:
    path = ROOT / ".cache" / "bench"
    path.mkdir(parents=True, exist_ok=True)
    return path


def seconds(work, times: int = 1) -> float:
    """Median."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def real_kv(tokens: int) -> np.ndarray:
    """KV of the small model for text of its kind, [buffers: K of each layer, then V][tokens, heads * size] of bfloat16
    as u16. Computed once, by the model itself."""
    cached = ROOT / ".cache" / "bench" / f"smol-kv-{tokens}.npy"
    if cached.exists():
        return np.load(cached)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = serving.model("smol")
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "\n".join(serving.prompts(n=4, chars=8 * tokens, shared=0))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        cache = model(ids, use_cache=True).past_key_values
    layers = [[layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]]
    rows = [t[0].transpose(0, 1).reshape(ids.shape[1], -1).contiguous() for half in layers for t in half]
    kv = torch.stack(rows).view(torch.uint16).numpy()
    cached.parent.mkdir(parents=True, exist_ok=True)
    np.save(cached, kv)
    return kv


# ------------------------------------------------------------------------------------------------------- cases


def codec_case(tokens: int, real_data: bool, times: int) -> dict:
    """The codec against plain zstd level 1 and the entropy of the values, on records of 256 tokens."""
    kv = real_kv(tokens) if real_data else None
    bed = Bed(tokens, SMOL, kv)
    pool = bed.engine.pages.pools[0]
    slots = torch.arange(1, tokens + 1)
    records = [bed.engine.pages.gather(0, [slots[at : at + RECORD]]).raw for at in range(0, tokens, RECORD)]
    size = sum(r.nbytes for r in records)
    encoded = [encode_record("auto", pool, RECORD, r) for r in records]
    packed = [zstandard.ZstdCompressor(level=1).compress(r) for r in records]
    files = [e.data.tobytes() for e in encoded]

    # Memory and tools of each thread, used again as the product does, for both sides.
    local = threading.local()

    def tools() -> threading.local:
        if not hasattr(local, "out"):
            local.out = np.empty_like(records[0])
            local.pack, local.unpack = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        return local

    def rates(threads: int, **works) -> dict:
        """Of each work its rate, all of them in turn: what the machine does beside them does not last as long."""
        took = {name: [] for name in works}
        turns = [*range(len(records))] * TURNS
        with ThreadPoolExecutor(threads) as workers:

            def run(work) -> None:
                def one(i: int) -> None:  # what a work returns is not kept: it would be new memory each time
                    work(i, tools())

                list(workers.map(one, turns))

            for _ in range(1 + times):
                for name, work in works.items():
                    took[name].append(seconds(lambda work=work: run(work)))
        # The first time they make their tools.
        return {name: TURNS * size / statistics.median(all_of[1:]) / 1e9 for name, all_of in took.items()}

    def decode(i: int, by: threading.local) -> None:
        shard.decode_record(pool, RECORD, encoded[i].parts, memoryview(files[i]), [by.out])

    out = {"bytes": size, "ratio": size / sum(map(len, files)), "ratio_zstd": size / sum(map(len, packed)),
           "ratio_bound": 16 / _entropy(records, pool)}  # fmt: skip
    for threads in (1, 2):
        out[f"threads_{threads}"] = rates(
            threads,
            encode=lambda i, by: encode_record("auto", pool, RECORD, records[i], by.out),
            zstd_encode=lambda i, by: by.pack.compress(records[i]),
            decode=decode,
            zstd_decode=lambda i, by: by.unpack.decompress(packed[i]),
            memcpy=lambda i, by: by.out.__setitem__(slice(None), records[i]),
        )
    for i, record in enumerate(records):
        decode(i, tools())
        assert np.array_equal(tools().out, record)
    return out


def _entropy(records: list[np.ndarray], pool) -> float:
    """Bits a value, of order 0, with a table for each buffer."""
    bits = at = 0
    for buffer in pool.buffers:
        step = buffer.row_bytes * RECORD
        counts = np.bincount(np.concatenate([r[at : at + step].view("<u2") for r in records]), minlength=65536)
        share = counts[counts > 0] / counts.sum()
        bits += -(share * np.log2(share)).sum()
        at += step
    return bits / len(pool.buffers)


def rates_case(tokens: int, real_data: bool, threads: int, times: int) -> dict:
    """Save and restore, end to end, against copies of the same bytes."""
    bed = Bed(tokens, SMOL, real_kv(2048) if real_data else None)
    bed.prompts(tokens, min(4096, tokens // 2))
    size = bed.engine.cache.total_size()[0] * bed.token_bytes
    settings = flow.settings(threads=threads)
    out: dict = {"tokens": tokens, "bytes": size, "threads": threads}
    with tempfile.TemporaryDirectory(dir=_scratch()) as root:
        # The peak is watched in a turn of its own: a thread that looks every 5 ms costs the others some of their time.
        saves = []
        for i in range(times):
            place = Path(root) / f"save-{i}"
            saves.append(seconds(lambda p=place: flow.snapshot(bed.engine, flow.home(p), using=settings)))
        with Peak() as peak:
            flow.snapshot(bed.engine, flow.home(Path(root) / f"save-{times}"), using=settings)
        out["save_peak"] = peak.bytes
        store = Path(root) / "save-0"
        for i in range(1, times + 1):
            shutil.rmtree(Path(root) / f"save-{i}")
        files = [p for p in store.rglob("*") if p.is_file()]
        stored = sum(p.stat().st_size for p in files)
        raw = bytes(64 << 20)

        def write(total: int) -> None:
            with (Path(root) / "copy").open("wb", buffering=0) as file:
                for at in range(0, total, len(raw)):
                    file.write(raw[: min(len(raw), total - at)])
                os.fsync(file.fileno())

        out |= {"stored": stored, "files": len(files), "save": size / statistics.median(saves) / 1e9,
                "disk_write_raw": size / seconds(lambda: write(size), times) / 1e9,
                "disk_write_stored": size / seconds(lambda: write(stored), times) / 1e9}  # fmt: skip
        (Path(root) / "copy").unlink()

        def restore() -> float:
            fresh = Bed(tokens, SMOL, fill=False)
            at = flow.home(store)
            took = seconds(lambda: flow.load(fresh.engine, at, using=settings))
            assert fresh.engine.cache.total_size()[0] == bed.engine.cache.total_size()[0]
            at.close()
            return took

        fresh = Bed(tokens, SMOL, fill=False)
        with Peak() as peak:
            flow.load(fresh.engine, flow.home(store), using=settings)
        out["restore_peak"] = peak.bytes
        del fresh

        def drop() -> None:
            for path in files:
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def read() -> None:
            for path in files:
                with path.open("rb", buffering=0) as file:
                    while file.read(4 << 20):
                        pass

        def decode_all() -> float:
            """Read, check and decode every record into memory that is there: nothing of a tree or a pool."""
            (path,) = names.shard_dirs(flow.REAL, store)
            segments = [shard.open_segment(flow.REAL, path, names.segment_of(p.name)) for p in path.glob("*.kvs")]
            buffers = threading.local()

            def one(job) -> None:
                segment, record = job
                size = segment.index.raw_bytes(record)
                if len(getattr(buffers, "out", ())) < size:
                    buffers.out = np.empty(size, np.uint8)
                segment.load_into(record, [buffers.out[:size]])

            def run() -> None:
                with ThreadPoolExecutor(threads) as workers:
                    list(workers.map(one, [(s, r) for s in segments for r in range(s.index.records)]))

            took = seconds(run)
            for segment in segments:
                segment.close()
            return took

        def memory() -> None:
            source, target = np.ones(32 << 20, np.uint8), np.empty(32 << 20, np.uint8)
            for _ in range(max(1, size // len(source))):
                target[:] = source

        warm = [(restore(), decode_all()) for _ in range(times)]
        cold = []
        for _ in range(times):
            drop()
            cold.append(restore())
            drop()
        out |= {
            "restore_warm": size / statistics.median(r for r, _ in warm) / 1e9,
            "decode_warm": size / statistics.median(d for _, d in warm) / 1e9,
            "restore_cold": size / statistics.median(cold) / 1e9,
            "disk_read_cold_stored": size / seconds(lambda: (drop(), read()), times) / 1e9,
            "memcpy": size / seconds(memory, times) / 1e9,
        }
    out["restore_over_decode"] = out["restore_warm"] / out["decode_warm"]
    return out


def growth_case(tokens: int, share: float) -> dict:
    """A snapshot of little that is new against the full one."""
    more = int(tokens * share)
    bed = Bed(tokens + 3 * more + 4096, FOUR_KIB)
    bed.prompts(tokens, 2000)
    out: dict = {"tokens": tokens, "more": more, "token_bytes": bed.token_bytes}
    with tempfile.TemporaryDirectory(dir=_scratch()) as root:
        home = flow.home(Path(root) / "store")
        with Peak() as peak:
            out["full"] = seconds(lambda: flow.snapshot(bed.engine, home))
        out["full_peak"] = peak.bytes
        deltas = []
        for _ in range(3):
            bed.prompts(more, 2000)
            with Peak() as peak:
                deltas.append(seconds(lambda: flow.snapshot(bed.engine, home)))
        out |= {"delta": statistics.median(deltas), "delta_peak": peak.bytes}
        out["unchanged"] = seconds(lambda: flow.snapshot(bed.engine, home))
        out["delta_share"] = out["delta"] / out["full"]
        home.close()
    return out


def tokens_case(tokens: int, page: int, each: int) -> dict:
    """How a restore grows with the number of tokens; memory beside the pool's; and SGLang's own tree."""
    first = _resident()
    planes.kernels()
    out: dict = {"page": page, "compiler": _resident() - first}
    bed = Bed(tokens, TINY, page=page)
    first = _resident()
    bed.prompts(tokens, each, hashed=False)
    then = _resident()
    bed.engine.tree.leaves()  # hashes what is not
    out["tokens"] = tokens = bed.engine.cache.total_size()[0]
    out |= {"tree_bytes_per_token": (then - first) / tokens, "hash_bytes_per_token": (_resident() - then) / tokens}
    with tempfile.TemporaryDirectory(dir=_scratch()) as root:
        home = flow.home(Path(root) / "store")
        with Peak() as peak:
            out["save"] = seconds(lambda: flow.snapshot(bed.engine, home))
        out["save_peak"] = peak.bytes
        home.close()
        fresh = Bed(tokens, TINY, page=page, fill=False)
        with Peak() as peak:
            out["restore"] = seconds(lambda: flow.load(fresh.engine, flow.home(Path(root) / "store")))
        out["restore_peak"] = peak.bytes - int(out["tree_bytes_per_token"] * tokens)
        assert fresh.engine.cache.total_size()[0] == tokens
    out["save_peak"] += out["compiler"]
    out["restore_peak"] += out["compiler"]
    out["restore_ns_per_token"] = out["restore"] / tokens * 1e9
    return out


def pauses_case(nodes: int, tokens: int) -> dict:
    """How long the scheduler's thread is held by one pass of its loop while requests run. Half of the nodes are leaves
    below a prefix of their own, and between two snapshots one in a hundred is new."""
    planes.kernels()  # as at the start of a server
    bed = Bed(int(nodes * tokens * 1.2), TINY)
    heads = [bed.random(tokens) for _ in range(max(1, nodes // 10))]
    for head in heads:
        bed.add(head)
    for i in range(nodes - len(heads)):
        bed.add(heads[i % len(heads)] + bed.random(tokens), tokens)
    out: dict = {"nodes": nodes, "tokens": bed.engine.cache.total_size()[0]}
    with tempfile.TemporaryDirectory(dir=_scratch()) as root:
        home = flow.home(Path(root) / "store")
        out["first"] = _passes(bed.engine, home)
        for _ in range(nodes // 100):
            bed.add(bed.random(tokens))
        out["next"] = _passes(bed.engine, home)
        out["unchanged"] = _passes(bed.engine, home)
        home.close()
    return out


def _passes(engine, home) -> dict:
    """One snapshot in passes like the runtime's while requests run: seconds of work in each pass."""
    job, took, done = flow.begin(engine, home), [], False
    while not done:
        began = time.perf_counter()
        waiting = None
        while time.perf_counter() - began < BUSY_SLICE and waiting is None:
            try:
                waiting = next(job)
            except StopIteration:
                done = True
                break
        took.append(time.perf_counter() - began)
        time.sleep(0.005)  # the forward pass, during which other threads work
    took.sort()
    return {"passes": len(took), "longest": took[-1], "second": took[-2] if len(took) > 1 else 0, "sum": sum(took)}


CASES = {"codec": codec_case, "rates": rates_case, "growth": growth_case, "tokens": tokens_case, "pauses": pauses_case}


def plan(quick: bool) -> list[tuple[str, str, dict]]:
    """(label, case, arguments) of each run."""
    if quick:
        return [
            ("codec", "codec", {"tokens": 512, "real_data": False, "times": 1}),
            ("rates, 1 thread", "rates", {"tokens": 2048, "real_data": False, "threads": 1, "times": 1}),
            ("growth", "growth", {"tokens": 8000, "share": 0.25}),
            ("tokens 20000", "tokens", {"tokens": 20_000, "page": 1, "each": 1000}),
            ("pauses 500", "pauses", {"nodes": 500, "tokens": 8}),
        ]
    return [
        ("codec", "codec", {"tokens": 4096, "real_data": True, "times": 9}),
        ("rates, 1 thread", "rates", {"tokens": 49_152, "real_data": True, "threads": 1, "times": 3}),
        ("rates, 2 threads", "rates", {"tokens": 49_152, "real_data": True, "threads": 2, "times": 3}),
        ("growth", "growth", {"tokens": 1_000_000, "share": 0.01}),
        *((f"tokens {n}", "tokens", {"tokens": n, "page": 1, "each": 2000}) for n in (10**4, 10**5, 10**6, 10**7)),
        *((f"pauses {n}", "pauses", {"nodes": n, "tokens": 16}) for n in (10**4, 10**5)),
    ]


def run_case(case: str, arguments: dict) -> dict:
    """In a process of its own, so that its peak of memory is its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--case", case, "--arguments", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"case {case} {arguments} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def ratios(cases: dict[str, dict]) -> list[dict]:
    found = []

    def add(what: str, value: float, goal: float | None = None, **kind) -> None:
        found.append(ratio(what, value, goal, **kind))

    more = {"at_least": True}
    for label, c in cases.items():
        if label.startswith("rates"):
            add(f"restore / bare decode, page cache, {c['threads']} threads", c["restore_over_decode"], 0.7, **more)
            add(f"restore / reading the disk, both cold, {c['threads']} threads",
                c["restore_cold"] / (c["disk_read_cold_stored"] * c["bytes"] / c["stored"]))  # fmt: skip
            add(f"save / writing the raw bytes, {c['threads']} threads", c["save"] / c["disk_write_raw"])
    if c := cases.get("codec"):
        for threads in (1, 2):
            t = c[f"threads_{threads}"]
            add(f"decode / plain zstd 1, {threads} threads", t["decode"] / t["zstd_decode"], 1.7, **more)
            add(f"encode / plain zstd 1, {threads} threads", t["encode"] / t["zstd_encode"], 1.2, **more)
        add("raw bytes / stored, 16-bit KV", c["ratio"], 1.47, **more)
        add("the same, of plain zstd 1", c["ratio_zstd"])
        add("the same, at the entropy bound", c["ratio_bound"])
    if c := cases.get("growth"):
        add(f"snapshot of {c['more']:,} new tokens / the full one of {c['tokens']:,}", c["delta_share"],
            3 * c["more"] / c["tokens"], unit="%")  # fmt: skip
        add("its peak of memory, MiB", max(c["full_peak"], c["delta_peak"]) / 2**20,
            256 + 32 * c["tokens"] / 2**20, unit="MiB")  # fmt: skip
    of_tokens = [c for label, c in cases.items() if label.startswith("tokens") and c["tokens"] > 50_000]
    for c in of_tokens[1:]:
        per_token = c["restore_ns_per_token"] / of_tokens[0]["restore_ns_per_token"]
        add(f"restore, time a token: {c['tokens']:,} / {of_tokens[0]['tokens']:,}", per_token, 1.3)
    for c in of_tokens[-1:]:
        for what in ("tree", "hash"):
            name = {"tree": "SGLang's own tree", "hash": "its page hashes, which a snapshot asks for"}[what]
            add(f"{name}, bytes a token", c[f"{what}_bytes_per_token"], unit="B")
        add("of the peaks: the compiler of the codec's two loops, MiB", c["compiler"] / 2**20, unit="MiB")
        for what in ("save", "restore"):
            add(f"peak of memory, {what} of {c['tokens']:,} tokens", c[f"{what}_peak"] / 2**20,
                256 + 32 * c["tokens"] / 2**20, unit="MiB")  # fmt: skip
    for label, c in cases.items():
        if label.startswith("pauses"):
            goal = 10 if c["nodes"] <= 10_000 else 50
            for which in ("first", "next"):
                add(f"longest pause of the scheduler's thread, {which} snapshot of {c['nodes']:,} nodes",
                    c[which]["longest"] * 1000, goal, unit="ms")  # fmt: skip
    return found


def show(result: dict, out: Console) -> None:
    for label, case in result["cases"].items():
        table = Table(title=label, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for key, value in case.items():
            for name, number in value.items() if isinstance(value, dict) else [("", value)]:
                shown = f"{number:,.4g}" if isinstance(number, float) else f"{number:,}"
                table.add_row(f"{key} {name}".strip(), shown)
        out.print(table)
    out.print("Rates are GB/s of KV bytes as the pool holds them; durations are seconds, memory and sizes bytes.")


def draw(result: dict):
    cases = result["cases"]
    figure, (left, right) = panels("The store", result["machine"])
    shown = ("save", "disk_write_raw", "restore_cold", "restore_warm", "decode_warm", "memcpy")
    series = {label: [c[n] for n in shown] for label, c in cases.items() if label.startswith("rates")}
    bars(left, [name.replace("_", "\n") for name in shown], series, "%.2f")
    left.set_ylabel("GB/s of KV")
    left.set_title("Save and restore, end to end, and what bounds them", fontsize=10)
    by_tokens = [c for label, c in cases.items() if label.startswith("tokens")]
    for what in ("save", "restore"):
        right.plot([c["tokens"] for c in by_tokens], [c[what] for c in by_tokens], marker="o", label=what)
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("tokens, 64 bytes of KV each")
    right.set_ylabel("seconds")
    right.set_title("How both grow", fontsize=10)
    right.legend(fontsize=8)
    return figure


def main() -> int:
    if "--case" in sys.argv:
        print(json.dumps(CASES[sys.argv[2]](**json.loads(sys.argv[4]))))
        return 0
    given = options("store", __doc__.splitlines()[0])
    cases = {}
    for label, case, arguments in plan(given.quick):
        with steps.status(label):
            # The smallest sizes in one process: most of a case's time would be that of its imports.
            cases[label] = CASES[case](**arguments) if given.quick else run_case(case, arguments)
        steps.print(f"{label}: done")
    finish(given, "store", ratios(cases), draw, show, cases=cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
