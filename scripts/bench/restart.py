"""The first requests after a restart: with the plugin, without it, and with HiCache's file backend.

Each variant has a store of its own and a server, which is stopped and then started again, all variants in turn, in one
run. A pass sends the prompts one by one, for one token each: cold, then warm; after a restart: first, then later.
"""

import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from report import NOTE, ROOT, Unusable, bars, finish, options, panels, ratio, steps
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
    passes: int  # warm ones before a restart, later ones after it
    restarts: int


FULL = Sizes("smol", 24576, {"n": 4, "chars": 21_400, "shared": 11_300}, 2, 2)
QUICK = Sizes("llama", 8192, {"n": 2, "chars": 5000, "shared": 2600}, 1, 1)


@dataclass(frozen=True)
class Variant:
    name: str
    kind: str  # plugin, none, hicache
    page: int
    quick: bool = False

    def flags(self, store: Path) -> list:
        page = ["--page-size", self.page]
        if self.kind == "plugin":
            # Everything: the tiny model's prompts are computed faster than they are read.
            return [*persist(store, "--persist-min-tokens", 0), *page]
        if self.kind == "hicache":
            return [
                *("--enable-hierarchical-cache", "--hicache-ratio", 2, "--hicache-io-backend", "direct"),
                *("--hicache-mem-layout", "page_first_direct", "--hicache-storage-backend", "file", *page),
                # The default gives up what has not come after a second or so: on a busy machine, all of it.
                *("--hicache-storage-prefetch-policy", "wait_complete"),
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
    sizes = []
    for at, _, names in os.walk(store):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a temporary file that got its name meanwhile
                sizes.append((Path(at) / name).stat().st_size)
    return {"bytes": sum(sizes), "files": len(sizes)}


def settle(store: Path) -> None:
    """Wait until HiCache has written what it was asked to write: nothing tells, so until no more files come."""
    changed = time.monotonic()
    before = on_disk(store)
    while time.monotonic() - changed < SETTLED:
        time.sleep(0.2)
        if (now := on_disk(store)) != before:
            before, changed = now, time.monotonic()


def one_pass(server: Server, texts: list[str], name: str) -> dict:
    answers = []
    for i, text in enumerate(texts, 1):
        with steps.status(f"{name}: prompt {i} of {len(texts)}"):
            answers.append(server.generate(text, 1))
    seconds = [answer.seconds for answer in answers]
    cached = sum(answer.cached_tokens for answer in answers)
    asked = sum(answer.prompt_tokens for answer in answers)
    shown = ", ".join(f"{s:.2f}" for s in seconds)
    steps.print(f"{name}: first token after {shown} s, {cached:,} of {asked:,} tokens cached", soft_wrap=True)
    return {"seconds": seconds, "cached": cached, "asked": asked}


def outputs(server: Server, texts: list[str]) -> list[list[int]]:
    return [server.generate(text, NEW_TOKENS).ids for text in texts]


class Bench:
    """One variant: what it is started with, and what was measured of it."""

    def __init__(self, variant: Variant, sizes: Sizes, texts: list[str], store: Path):
        self.variant, self.texts, self.store, self.passes = variant, texts, store, sizes.passes
        store.mkdir(mode=0o700)
        self.server = Server(
            model(sizes.model), *variant.flags(store), env=variant.env(store), max_tokens=sizes.max_tokens
        )
        self.found = {
            "name": variant.name,
            "kind": variant.kind,
            "page": variant.page,
            "flags": [str(flag).replace(str(store), "DIR") for flag in variant.flags(store)],
            "passes": {"cold": [], "warm": [], "restarted": [], "later": []},
            "outputs": {"same": 0, "of": 0},
            "ready": {"cold": [], "restarted": []},
            "stop": {"cold": [], "restarted": []},
        }

    def serve(self, first: str, then: str, when: str) -> list[list[int]]:
        """Start it, send the prompts, ask for outputs, stop it."""
        name, found = self.variant.name, self.found
        try:
            with steps.status(f"{name}: starting"):
                found["ready"][when].append(self.server.start())
            found["passes"][first].append(one_pass(self.server, self.texts, f"{name}, {first}"))
            for _ in range(self.passes):
                found["passes"][then].append(one_pass(self.server, self.texts, f"{name}, {then}"))
            ids = outputs(self.server, self.texts)
            if self.variant.kind == "hicache":
                settle(self.store)
            found["stop"][when].append(self.server.stop())
        finally:
            self.server.kill()
        return ids

    def fill(self) -> None:
        self.expected = self.serve("cold", "warm", "cold")
        self.found |= on_disk(self.store)

    def restart(self) -> None:
        ids = self.serve("restarted", "later", "restarted")
        self.found["outputs"]["same"] += sum(a == b for a, b in zip(ids, self.expected, strict=True))
        self.found["outputs"]["of"] += len(ids)


def check(measured: dict) -> None:
    """A restart with the plugin that is not warm is no measurement of a warm restart."""
    if measured["kind"] != "plugin":
        return
    passes, same = measured["passes"], measured["outputs"]
    if min(p["cached"] for p in passes["restarted"]) < 0.99 * passes["warm"][0]["cached"]:
        raise Unusable(f"{measured['name']}: the restart was not warm")
    if same["same"] != same["of"]:
        raise Unusable(f"{measured['name']}: {same['of'] - same['same']} outputs differ after the restart")


def typical(passes: list[dict]) -> float:
    return statistics.median(s for one in passes for s in one["seconds"])


def first_of_warm(passes: dict[str, list[dict]]) -> float:
    """Each prompt against itself, because with large pages some have more tokens left to compute than others."""

    def by_prompt(which: str) -> list[float]:
        return [statistics.median(times) for times in zip(*(one["seconds"] for one in passes[which]), strict=True)]

    warm = [max(pair) for pair in zip(by_prompt("later"), by_prompt("warm"), strict=True)]
    return statistics.median(s / warm[i] for one in passes["restarted"] for i, s in enumerate(one["seconds"]))


def ratios(variants: list[dict]) -> list[dict]:
    by_name = {v["name"]: v for v in variants}
    found = []
    for v in variants:
        if v["kind"] == "plugin":
            what = f"{v['name']}: first pass after the restart / later or warm passes, the slower"
            found.append(ratio(what, first_of_warm(v["passes"]), 1.1))
    peer = by_name["HiCache, page 64"]
    for name, goal in (("plugin, page 1", 0.7), ("plugin, page 64", 1.0)):
        if name in by_name:
            first = typical(by_name[name]["passes"]["restarted"]) / typical(peer["passes"]["restarted"])
            found.append(ratio(f"{name} / {peer['name']}: first pass after the restart", first, goal))
    ours = by_name["plugin, page 1"]
    found.append(ratio(f"{ours['name']} / {peer['name']}: bytes on disk", ours["bytes"] / peer["bytes"], 0.72))
    found.append(ratio(f"{ours['name']}: files on disk", ours["files"], 16, "files"))
    return found


def show(result: dict, out: Console) -> None:
    table = Table(title="Time to the first token, median, one request at a time")
    table.add_column("")
    for v in result["variants"]:
        table.add_column(v["name"], justify="right")

    def row(label, of, **style) -> None:
        table.add_row(label, *(of(v) for v in result["variants"]), **style)

    row("cold", lambda v: f"{typical(v['passes']['cold']):.2f} s")
    row("warm", lambda v: f"{typical(v['passes']['warm']):.2f} s")
    row("restarted, first pass", lambda v: f"{typical(v['passes']['restarted']):.2f} s")
    row("restarted, later", lambda v: f"{typical(v['passes']['later']):.2f} s", end_section=True)
    row("cached tokens: warm", lambda v: f"{v['passes']['warm'][0]['cached']:,}")
    row("restarted, first pass", lambda v: f"{cached(v)['cached']:,}")
    row("share of the prompts", lambda v: f"{cached(v)['cached'] / cached(v)['asked']:.1%}")
    row("outputs as before", lambda v: f"{v['outputs']['same']} of {v['outputs']['of']}", end_section=True)
    row("on disk", lambda v: decimal(v["bytes"]) if v["files"] else "-")
    row("files", lambda v: f"{v['files']:,}" if v["files"] else "-", end_section=True)
    row("ready, empty", lambda v: f"{statistics.median(v['ready']['cold']):.1f} s")
    row("ready, restarted", lambda v: f"{statistics.median(v['ready']['restarted']):.1f} s")
    row("stopped", lambda v: f"{statistics.median(v['stop']['cold']):.1f} s")
    out.print(table)


def cached(v: dict) -> dict:
    """Of several restarts, the one with the fewest tokens cached."""
    return min(v["passes"]["restarted"], key=lambda one: one["cached"])


def draw(result: dict):
    variants = result["variants"]
    figure, (left, right) = panels(
        f"Restart of SGLang {result['machine']['sglang']} with {result['model']}",
        result["machine"],
        width_ratios=(3, 1),
    )
    shown = {"cold": "cold", "warm": "warm", "restarted, first pass": "restarted", "restarted, later": "later"}
    series = {label: [typical(v["passes"][which]) for v in variants] for label, which in shown.items()}
    bars(left, [v["name"] for v in variants], series, "%.2f")
    left.set_yscale("log")
    left.set_ylabel("seconds, log scale")
    left.set_title("Time to the first token, median", fontsize=10)
    stored = [v for v in variants if v["files"]]
    drawn = right.barh([v["name"] for v in stored], [v["bytes"] / 1e6 for v in stored], color="tab:gray")
    right.bar_label(drawn, [f"{v['bytes'] / 1e6:.0f} MB, {v['files']:,} files" for v in stored], padding=3, fontsize=8)
    right.margins(x=0.9)
    right.invert_yaxis()
    right.set_title("On disk", fontsize=10)
    return figure


def main() -> int:
    # Ended from outside, it still ends its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    given = options("restart", __doc__.splitlines()[0])
    sizes = QUICK if given.quick else FULL
    texts = prompts(**sizes.prompts)
    with steps.status(f"preparing the model {sizes.model}"):
        model(sizes.model)
    variants = [variant for variant in VARIANTS if variant.quick or not given.quick]
    with tempfile.TemporaryDirectory(prefix="bench-restart-", dir=ROOT / ".cache") as work:
        benches = [Bench(variant, sizes, texts, Path(work) / str(i)) for i, variant in enumerate(variants)]
        for bench in benches:
            bench.fill()
        for _ in range(sizes.restarts):
            for bench in benches:
                bench.restart()
    measured = [bench.found for bench in benches]
    facts = {"note": NOTE, "model": sizes.model, "prompts": sizes.prompts, "variants": measured}
    finish(given, "restart", ratios(measured), draw, show, **facts)
    try:
        for variant in measured:
            check(variant)
    except Unusable as error:
        steps.print(f"[red]{error}[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
