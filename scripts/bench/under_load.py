"""What saving and restoring cost the requests that are served meanwhile, under SGLang's own benchmark.

The same load for each variant, each with a server of its own: stock, the plugin idle, saving every second, restoring in
the background, and stock again. Requests share the prompts of their group; each brings tokens of its own. The restore
is held back until the load begins, else it would be over by then (scripts/cpu_runtime/held_reads.py).
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from report import NOTE, ROOT, Unusable, bars, finish, options, panels, ratio, steps
from rich.console import Console
from rich.table import Table

from checks import persist, status  # isort: skip
from serving import Server, model  # isort: skip

#: After this line the client sleeps for a second, then the measured requests begin.
BEGINS = "Starting main benchmark run"
RESTORED = "ended restoring in the background"
SNAPSHOT = re.compile(
    r"generation (?P<generation>\d+) \((?P<reason>\w+)\): (?P<tokens>\d+) tokens, (?P<new_tokens>\d+) new, "
    r"(?P<new_bytes>\d+) bytes in (?P<seconds>[\d.]+) s"
)


@dataclass(frozen=True)
class Sizes:
    model: str
    max_tokens: int
    groups: int
    per_group: int
    shared: int  # tokens of a group's common prompt
    own: int  # tokens of a request's own
    output: int
    rate: float  # requests a second
    concurrency: int  # at most
    fill: int  # prompts of FILL_TOKENS that the background restore has to bring

    @property
    def requests(self) -> int:
        return self.groups * self.per_group


# Two cores are close to overload at 1 request a second, where a small difference becomes a long queue.
FULL = Sizes("smol", 65536, 4, 20, 256, 96, 32, 0.7, 16, 32)
QUICK = Sizes("llama", 16384, 2, 3, 64, 32, 48, 4, 2, 4)
FILL_TOKENS = 1024


def flags(name: str, work: Path) -> list:
    """What the server of a variant is started with. The store that `saving` leaves is the one that is restored."""
    # Whatever it would take to compute it again: short prompts are to be saved as well.
    everything = ("--persist-min-tokens", 0)
    return {
        "idle": persist(work / "idle", *everything),
        # The load is dropped from the store before it is filled for the restore, else that load would find itself.
        "saving": [*persist(work / "store", *everything), "--persist-interval", 1, "--persist-on-flush", "drop"],
        "restoring": [*persist(work / "store", *everything), "--persist-restore", "background"],
    }.get(name, [])


def client(server: Server, sizes: Sizes, work: Path, output: Path) -> subprocess.Popen:
    """SGLang's benchmark, which waits for the server by itself. Its prompts are random text, the same in each run."""
    path = model(sizes.model)
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"),
        *("--host", "127.0.0.1", "--port", server.port, "--ready-check-timeout-sec", 300),
        *("--model", path, "--tokenizer", path, "--dataset-name", "generated-shared-prefix", "--seed", 1),
        *("--gsp-num-groups", sizes.groups, "--gsp-prompts-per-group", sizes.per_group),
        *("--gsp-system-prompt-len", sizes.shared, "--gsp-question-len", sizes.own),
        *("--gsp-output-len", sizes.output, "--max-concurrency", sizes.concurrency),
        # Arrivals at random times, the same in each run. Clients that wait for each other's answers fall into step, and
        # out of it by chance: then a prompt of one is computed between two tokens of another in some variants only.
        *("--request-rate", sizes.rate),
        *("--cache-report", "--disable-tqdm", "--output-details", "--output-file", output),
    ]
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        # It keeps the prompts in the home directory.
        "HOME": str(work),
    }
    # There it flushes the cache before each run.
    env.pop("SGLANG_IS_IN_CI", None)
    with output.with_suffix(".log").open("wb") as log:
        return subprocess.Popen([str(word) for word in command], env=env, stdout=log, stderr=subprocess.STDOUT)


def start_both(server: Server, sizes: Sizes, work: Path, output: Path) -> tuple[subprocess.Popen, float]:
    """The client starts with the server and waits for it, so that the load begins as soon as the server is ready."""
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(server.start)
        while server.process is None and not starting.done():
            time.sleep(0.02)
        load = client(server, sizes, work, output)
        try:
            return load, starting.result()
        except BaseException:
            load.kill()
            server.kill()
            raise


def wait_for(load: subprocess.Popen, log: Path, line: str | None, timeout: float = 900) -> None:
    """Until the client has ended, or has printed that line."""
    began = time.monotonic()
    while load.poll() is None and (line is None or line not in log.read_text(errors="replace")):
        if time.monotonic() - began > timeout:
            raise Unusable(f"the load did not come to {line or 'its end'} within {timeout} s")
        time.sleep(0.05)


def gate(work: Path) -> Path:
    """The restore reads once this file exists."""
    return work / "go"


def watch_restore(server: Server, load: subprocess.Popen) -> float | None:
    """Seconds until the restore has ended, or None if the load ends before."""
    began = time.monotonic()
    while load.poll() is None:
        if RESTORED in server.log.read_text(errors="replace"):
            return time.monotonic() - began
        time.sleep(0.1)
    return None


def run_load(server: Server, name: str, sizes: Sizes, work: Path) -> dict:
    output = work / f"{name}.jsonl".replace(" ", "-")
    log = output.with_suffix(".log")
    load, ready = start_both(server, sizes, work, output)
    plugin = bool(flags(name, work))
    try:
        with steps.status(f"{name}: the load"):
            wait_for(load, log, BEGINS)
            begins = time.monotonic() + 1
            before = status(server) if plugin else None
            saved_before = len(snapshots(server))
            time.sleep(max(0, begins - time.monotonic()))
            gate(work).touch()
            restored_after = watch_restore(server, load) if name == "restoring" else None
            wait_for(load, log, None)
        if load.returncode or not output.exists():
            raise Unusable(f"the load ended with {load.returncode}:\n{log.read_text(errors='replace')[-2000:]}")
    finally:
        load.kill()
        load.wait()
    saved = snapshots(server)[saved_before:]
    after = status(server) if plugin else None
    found = json.loads(output.read_text().splitlines()[-1])
    if found["completed"] != sizes.requests:
        raise Unusable(f"{name}: {found['completed']} of {sizes.requests} requests completed")
    return {
        "name": name,
        "ready": ready,
        "seconds": found["duration"],
        "tokens": {"in": found["total_input_tokens"], "out": found["total_output_tokens"]},
        "cached": found["cache_report"]["total_cached_tokens"],
        "output_tokens_per_second": found["output_throughput"],
        "itls": [itl for one in found["itls"] for itl in one],
        "ttfts": found["ttfts"],
        "snapshots": saved,
        "restored_after": restored_after,
        "status": {"before": before, "after": after} if plugin else None,
    }


def snapshots(server: Server) -> list[dict]:
    """Those which the server's log tells of: only those that wrote something are there."""
    found = SNAPSHOT.finditer(server.log.read_text(errors="replace"))
    return [
        {key: value if key == "reason" else float(value) if key == "seconds" else int(value)
         for key, value in match.groupdict().items()}
        for match in found
    ]  # fmt: skip


def fill(server: Server, sizes: Sizes) -> None:
    """Leave other prompts than the load's in the store."""
    server.post("/flush_cache")
    pick = random.Random(7)
    for i in range(sizes.fill):
        with steps.status(f"filling the store: prompt {i + 1} of {sizes.fill}"):
            server.generate(pick.choices(range(1000, 40_000), k=FILL_TOKENS), 1)


def measure(name: str, sizes: Sizes, work: Path) -> dict:
    gate(work).unlink(missing_ok=True)
    env = {"SGLANG_PERSIST_HOLD_READS": str(gate(work))} if name == "restoring" else {}
    server = Server(model(sizes.model), *flags(name, work), env=env, max_tokens=sizes.max_tokens)
    try:
        found = run_load(server, name, sizes, work)
        if name == "saving":
            fill(server, sizes)
        server.stop()
    finally:
        server.kill()
    itls, ttfts = found.pop("itls"), found.pop("ttfts")
    found["itl"] = {"p50": quantile(itls, 50), "p99": quantile(itls, 99), "max": max(itls), "n": len(itls)}
    found["ttft"] = {"p50": quantile(ttfts, 50), "p99": quantile(ttfts, 99)}
    # For the picture: the inter-token latency at each percentile.
    found["itl_percentiles"] = [quantile(itls, p) for p in range(101)]
    steps.print(
        f"{name}: {found['output_tokens_per_second']:.0f} tokens/s, inter-token latency {milli(found['itl']['p50'])} "
        f"(p50), {milli(found['itl']['p99'])} (p99), {len(found['snapshots'])} snapshots"
    )
    return found


def quantile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def milli(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def check(measured: list[dict], sizes: Sizes) -> None:
    """That each variant did what its name says, under the same load."""
    by_name = {m["name"]: m for m in measured}
    if len({m["tokens"]["in"] for m in measured}) > 1:
        raise Unusable("the variants had different prompts")
    if "idle" in by_name and by_name["idle"]["snapshots"]:
        raise Unusable("idle: a snapshot was taken")
    saving = by_name["saving"]
    generation = {when: saving["status"][when]["snapshot"]["generation"] for when in ("before", "after")}
    with_new = [s for s in saving["snapshots"] if s["new_tokens"] > 0]
    if generation["after"] <= generation["before"] or not with_new:
        raise Unusable(f"saving: no snapshot with new KV during the load, generations {generation}")
    stored = sizes.fill * FILL_TOKENS
    before, after = (by_name["restoring"]["status"][w]["restore"]["tokens_restored"] for w in ("before", "after"))
    if before > stored / 2 or after < 0.99 * stored:
        raise Unusable(f"restoring: of {stored} tokens {before} were restored before the load, {after} after it")


def ratios(measured: list[dict]) -> list[dict]:
    stocks = [m for m in measured if m["name"].startswith("stock")]
    slower = {p: max(m["itl"][p] for m in stocks) for p in ("p50", "p99")}
    goals = {("saving", "p50"): 1.10, ("saving", "p99"): 1.25, ("idle", "p50"): 1.05}
    against = "the slower stock run" if len(stocks) > 1 else "stock"
    found = [
        ratio(f"inter-token latency {p}: {m['name']} / {against}", m["itl"][p] / slower[p], goals.get((m["name"], p)))
        for m in sorted(measured, key=lambda m: m["name"] != "saving")
        if m not in stocks
        for p in ("p50", "p99")
    ]
    if len(stocks) > 1:
        for p in ("p50", "p99"):
            noise = slower[p] / min(m["itl"][p] for m in stocks)
            found.append(ratio(f"inter-token latency {p}: the slower stock run / the other", noise))
    return found


def show(result: dict, out: Console) -> None:
    s = result["sizes"]
    title = f"{s['groups'] * s['per_group']} requests, {s['rate']} a second, {s['output']} tokens out"
    table = Table(title=title)
    table.add_column("")
    for m in result["variants"]:
        table.add_column(m["name"], justify="right")

    def row(label, of, **style) -> None:
        table.add_row(label, *(of(m) for m in result["variants"]), **style)

    row("inter-token latency, p50", lambda m: milli(m["itl"]["p50"]))
    row("p99", lambda m: milli(m["itl"]["p99"]))
    row("max", lambda m: milli(m["itl"]["max"]), end_section=True)
    row("time to first token, p50", lambda m: milli(m["ttft"]["p50"]))
    row("p99", lambda m: milli(m["ttft"]["p99"]), end_section=True)
    row("output tokens/s", lambda m: f"{m['output_tokens_per_second']:.1f}")
    row("prompt tokens", lambda m: f"{m['tokens']['in']:,}")
    row("of them cached", lambda m: f"{m['cached']:,}")
    row("seconds of load", lambda m: f"{m['seconds']:.0f}", end_section=True)
    row("snapshots with new KV", lambda m: str(len(m["snapshots"])))
    row("tokens saved in them", lambda m: f"{sum(s['new_tokens'] for s in m['snapshots']):,}")
    row("tokens restored", restored)
    row("restored after", lambda m: "-" if m["restored_after"] is None else f"{m['restored_after']:.1f} s")
    out.print(table)


def restored(m: dict) -> str:
    """Tokens that the restore brought while the load ran."""
    if m["status"] is None:
        return "-"
    before, after = (m["status"][when]["restore"]["tokens_restored"] for when in ("before", "after"))
    return f"{after - before:,}"


def draw(result: dict):
    variants = result["variants"]
    figure, (left, right) = panels(
        f"SGLang {result['machine']['sglang']} under load, {result['model']}", result["machine"]
    )
    series = {p: [m["itl"][p] * 1000 for m in variants] for p in ("p50", "p99")}
    bars(left, [m["name"] for m in variants], series, "%.1f")
    left.set_ylabel("ms")
    left.set_title("Inter-token latency", fontsize=10)
    for m in variants:
        right.plot(range(101), [seconds * 1000 for seconds in m["itl_percentiles"]], label=m["name"])
    right.set_yscale("log")
    right.set_xlabel("percentile")
    right.set_ylabel("ms, log scale")
    right.set_title("Inter-token latency at each percentile", fontsize=10)
    right.legend(fontsize=8)
    return figure


def main() -> int:
    # Ended from outside, it still ends its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    given = options("serving", __doc__.splitlines()[0])
    sizes = QUICK if given.quick else FULL
    names = ["stock", "saving", "restoring"] if given.quick else ["stock", "idle", "saving", "restoring", "stock again"]
    with steps.status(f"preparing the model {sizes.model}"):
        model(sizes.model)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-serving-", dir=ROOT / ".cache") as work:
            measured = [measure(name, sizes, Path(work)) for name in names]
        check(measured, sizes)
    except Unusable as error:
        steps.print(f"[red]{error}[/red]")
        return 1
    facts = {"note": NOTE, "model": sizes.model, "sizes": asdict(sizes), "variants": measured}
    finish(given, "serving", ratios(measured), draw, show, **facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
