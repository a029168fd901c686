"""The first requests after a restart: with the plugin, without it, and with HiCache's file backend.

Each variant has a server, which is stopped and started again, and a store of its own; one after the other, in one run.
A pass sends the prompts one by one, for one token each. Cold, then warm; after the restart: first, then later.
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from report import (
    NOTE,
    ROOT,
    Unusable,
    machine,
    options,
    print_machine,
    print_ratios,
    ratio,
    steps,
    write_json,
    write_png,
)
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from checks import persist  # isort: skip
from serving import Server, model, prompts  # isort: skip

NEW_TOKENS = 12
#: Seconds without a change after which HiCache is taken to have written all that it is going to write.
SETTLED = 2.0


@dataclass(frozen=True)
class Sizes:
    model: str
    max_tokens: int
    prompts: dict
    passes: int


FULL = Sizes("smol", 24576, {"n": 4, "chars": 21_400, "shared": 11_300}, 2)
QUICK = Sizes("llama", 8192, {"n": 2, "chars": 5000, "shared": 2600}, 1)


@dataclass(frozen=True)
class Variant:
    name: str
    kind: str  # plugin, none, hicache
    page: int
    quick: bool = False

    def flags(self, store: Path) -> list:
        page = ["--page-size", self.page]
        if self.kind == "plugin":
            return [*persist(store), *page]
        if self.kind == "hicache":
            return [
                *("--enable-hierarchical-cache", "--hicache-ratio", 2, "--hicache-io-backend", "direct"),
                *("--hicache-mem-layout", "page_first_direct", "--hicache-storage-backend", "file", *page),
            ]
        return page

    def env(self, store: Path) -> dict:
        if self.kind != "hicache":
            return {}
        return {"SGLANG_PERSIST_HICACHE_ON_CPU": "1", "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store)}


VARIANTS = [
    Variant("plugin, page 1", "plugin", 1, quick=True),
    Variant("HiCache, page 64", "hicache", 64, quick=True),
    Variant("plugin, page 64", "plugin", 64),
    Variant("HiCache, page 1", "hicache", 1),
    Variant("no plugin", "none", 1),
]


def on_disk(store: Path) -> dict:
    """Bytes and number of the files, whatever they are for."""
    files = [Path(at) / name for at, _, names in os.walk(store) for name in names]
    return {"bytes": sum(path.stat().st_size for path in files), "files": len(files)}


def settle(store: Path) -> float:
    """Wait until HiCache has written what it was asked to write: nothing tells, so until no more files come."""
    began = changed = time.monotonic()
    before = on_disk(store)
    while time.monotonic() - changed < SETTLED:
        time.sleep(0.2)
        if (now := on_disk(store)) != before:
            before, changed = now, time.monotonic()
    return changed - began


def one_pass(server: Server, texts: list[str], name: str) -> dict:
    answers = []
    for i, text in enumerate(texts, 1):
        with steps.status(f"{name}: prompt {i} of {len(texts)}"):
            answers.append(server.generate(text, 1))
    seconds = [answer.seconds for answer in answers]
    cached = sum(answer.cached_tokens for answer in answers)
    asked = sum(answer.prompt_tokens for answer in answers)
    shown = ", ".join(f"{s:.2f}" for s in seconds)
    steps.print(f"{name}: first token after {shown} s, {cached:,} tokens cached")
    return {
        "seconds": seconds,
        "median": statistics.median(seconds),
        "cached": cached,
        "asked": asked,
        "share": cached / asked,
    }


def outputs(server: Server, texts: list[str]) -> list[list[int]]:
    return [server.generate(text, NEW_TOKENS).ids for text in texts]


def measure(variant: Variant, sizes: Sizes, texts: list[str], store: Path) -> dict:
    name = variant.name
    store.mkdir(mode=0o700)
    server = Server(
        model(sizes.model), *variant.flags(store), env=variant.env(store), max_tokens=sizes.max_tokens
    )
    try:
        ready = server.start()
        cold = one_pass(server, texts, f"{name}, cold")
        warm = [one_pass(server, texts, f"{name}, warm") for _ in range(sizes.passes)]
        expected = outputs(server, texts)
        settled = settle(store) if variant.kind == "hicache" else 0.0
        stopped = server.stop()
        disk = on_disk(store)

        ready_again = server.start()
        first = one_pass(server, texts, f"{name}, restarted")
        later = [one_pass(server, texts, f"{name}, restarted, later") for _ in range(sizes.passes)]
        same = sum(ours == theirs for ours, theirs in zip(outputs(server, texts), expected, strict=True))
        stopped_again = server.stop()
    finally:
        server.kill()
    return {
        "name": name,
        "kind": variant.kind,
        "page": variant.page,
        "passes": {"cold": cold, "warm": warm, "restarted": first, "later": later},
        "outputs": {"same": same, "of": len(texts)},
        **disk,
        "ready": {"cold": ready, "restarted": ready_again},
        "stop": {"cold": stopped, "restarted": stopped_again},
        "settled": settled,
    }


def check(measured: dict) -> None:
    """A restart with the plugin that is not warm is no measurement of a warm restart."""
    if measured["kind"] != "plugin":
        return
    passes, same = measured["passes"], measured["outputs"]
    if passes["restarted"]["cached"] < 0.99 * passes["warm"][0]["cached"]:
        raise Unusable(f"{measured['name']}: the restart was not warm")
    if same["same"] != same["of"]:
        raise Unusable(f"{measured['name']}: {same['of'] - same['same']} outputs differ after the restart")


def typical(passes: list[dict]) -> float:
    return statistics.median(s for one in passes for s in one["seconds"])


def ratios(variants: list[dict]) -> list[dict]:
    by_name = {v["name"]: v for v in variants}
    found = []
    for v in variants:
        if v["kind"] == "plugin":
            p = v["passes"]
            warm = max(typical(p["later"]), typical(p["warm"]))
            what = f"{v['name']}: first pass after the restart / later or warm passes, the slower"
            found.append(ratio(what, p["restarted"]["median"] / warm, 1.1))
    peer = by_name["HiCache, page 64"]
    for name, goal in (("plugin, page 1", 0.7), ("plugin, page 64", 1.0)):
        if name in by_name:
            time_to = by_name[name]["passes"]["restarted"]["median"] / peer["passes"]["restarted"]["median"]
            found.append(ratio(f"{name} / {peer['name']}: first pass after the restart", time_to, goal))
    ours = by_name["plugin, page 1"]
    found.append(ratio(f"{ours['name']} / {peer['name']}: bytes on disk", ours["bytes"] / peer["bytes"], 0.72))
    found.append(ratio(f"{ours['name']}: files on disk", ours["files"], 16, "files"))
    return found


def show(result: dict) -> None:
    out = Console()
    print_ratios(out, result["ratios"])
    table = Table(title="Time to the first token, one request at a time")
    table.add_column("")
    for v in result["variants"]:
        table.add_column(v["name"], justify="right")

    def row(label, of, **style) -> None:
        table.add_row(label, *(of(v) for v in result["variants"]), **style)

    row("cold, median", lambda v: f"{v['passes']['cold']['median']:.2f} s")
    row("warm", lambda v: f"{typical(v['passes']['warm']):.2f} s")
    row("restarted, first pass", lambda v: f"{v['passes']['restarted']['median']:.2f} s")
    row("restarted, later passes", lambda v: f"{typical(v['passes']['later']):.2f} s", end_section=True)
    row("cached: warm", lambda v: f"{v['passes']['warm'][0]['cached']:,}")
    row("cached: restarted, first", lambda v: f"{v['passes']['restarted']['cached']:,}")
    row("share of the prompts", lambda v: f"{v['passes']['restarted']['share']:.1%}")
    row("outputs as before", lambda v: f"{v['outputs']['same']} of {v['outputs']['of']}", end_section=True)
    row("on disk", lambda v: decimal(v["bytes"]) if v["files"] else "-")
    row("files", lambda v: f"{v['files']:,}" if v["files"] else "-", end_section=True)
    row("ready, empty", lambda v: f"{v['ready']['cold']:.1f} s")
    row("ready, restarted", lambda v: f"{v['ready']['restarted']:.1f} s")
    row("stopped, full", lambda v: f"{v['stop']['cold']:.1f} s")
    out.print(table)
    print_machine(out, result["machine"])


def draw(result: dict, path: Path) -> None:
    import matplotlib.pyplot as plt

    variants = result["variants"]
    bars = {
        "cold": lambda p: p["cold"]["median"],
        "warm": lambda p: typical(p["warm"]),
        "restarted, first pass": lambda p: p["restarted"]["median"],
        "restarted, later": lambda p: typical(p["later"]),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.8), width_ratios=(3, 1), layout="constrained")
    width = 0.8 / len(bars)
    for i, (label, of) in enumerate(bars.items()):
        at = [x + (i - (len(bars) - 1) / 2) * width for x in range(len(variants))]
        drawn = left.bar(at, [of(v["passes"]) for v in variants], width, label=label)
        left.bar_label(drawn, fmt="%.2f", fontsize=7)
    left.set_yscale("log")
    left.set_xticks(range(len(variants)), [v["name"] for v in variants])
    left.set_ylabel("seconds, log scale")
    left.set_title("Time to the first token, median", fontsize=10)
    left.legend(fontsize=8)
    stored = [v for v in variants if v["files"]]
    drawn = right.barh([v["name"] for v in stored], [v["bytes"] / 1e6 for v in stored], color="tab:gray")
    right.bar_label(drawn, [f"{v['bytes'] / 1e6:.0f} MB, {v['files']:,} files" for v in stored], padding=3, fontsize=8)
    right.margins(x=0.9)
    right.invert_yaxis()
    right.set_title("On disk", fontsize=10)
    m = result["machine"]
    title = f"Restart of SGLang {m['sglang']} with {result['model']}: {m['cpu']}, {m['cores']} cores"
    figure.suptitle(title, fontsize=11)
    write_png(path, figure)


def main() -> int:
    # Ended from outside, it still ends its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    given = options("restart", __doc__.splitlines()[0])
    sizes = QUICK if given.quick else FULL
    texts = prompts(**sizes.prompts)
    with steps.status(f"preparing the model {sizes.model}"):
        model(sizes.model)
    measured = []
    with tempfile.TemporaryDirectory(prefix="bench-restart-", dir=ROOT / ".cache") as work:
        for i, variant in enumerate(VARIANTS):
            if variant.quick or not given.quick:
                measured.append(measure(variant, sizes, texts, Path(work) / str(i)))
    result = {
        "benchmark": "restart",
        "quick": given.quick,
        "ratios": ratios(measured),
        "machine": machine(),
        "note": NOTE,
        "model": sizes.model,
        "prompts": sizes.prompts,
        "variants": measured,
    }
    write_json(given.json, result)
    draw(result, given.png)
    show(result)
    try:
        for variant in measured:
            check(variant)
    except Unusable as error:
        steps.print(f"[red]{error}[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
