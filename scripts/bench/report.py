"""What the benchmarks have in common: their options, the machine they ran on, ratios with goals, where results go."""

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "server")]
# matplotlib keeps an index of the fonts, by default in the home directory.
os.environ.setdefault("MPLCONFIGDIR", str(ROOT / ".cache" / "matplotlib"))

import matplotlib  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

NOTE = (
    "In every variant alike, the CPU runtime replaces one attention method of stock SGLang, so that a cache hit shows: "
    "it computes the new tokens' rows only."
)

steps = Console(stderr=True)


class Unusable(Exception):
    """What was measured does not show what it was meant to show."""


def options(name: str, about: str) -> argparse.Namespace:
    into = ROOT / ".cache" / "bench"
    parser = argparse.ArgumentParser(prog=f"scripts/bench-{name}", description=about)
    parser.add_argument("--quick", action="store_true", help="tiny model, smallest sizes: shows that it runs")
    parser.add_argument("--json", type=Path, default=into / f"{name}.json", metavar="FILE")
    parser.add_argument("--png", type=Path, default=into / f"{name}.png", metavar="FILE")
    given = parser.parse_args()
    for path in (given.json, given.png):
        path.parent.mkdir(parents=True, exist_ok=True)
    return given


def machine() -> dict:
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
        cpu = next(names, cpu)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("sglang", "torch", "sglang-persist")},
    }


def ratio(what: str, value: float, goal: float | None = None, unit: str = "x", at_least: bool = False) -> dict:
    met = None if goal is None else value >= goal if at_least else value <= goal
    return {"what": what, "value": value, "goal": goal, "unit": unit, "at_least": at_least, "met": met}


def print_ratios(out: Console, ratios: list[dict]) -> None:
    table = Table(title="Ratios")
    table.add_column("")
    for name in ("measured", "goal", ""):
        table.add_column(name, justify="right")
    for r in ratios:
        form = {"x": "{:,.2f}x", "%": "{:.2%}"}.get(r["unit"], "{:,.0f} " + r["unit"])
        goal = "" if r["goal"] is None else (">= " if r["at_least"] else "<= ") + form.format(r["goal"])
        met = {None: "", True: "[green]met[/green]", False: "[red]missed[/red]"}[r["met"]]
        table.add_row(r["what"], form.format(r["value"]), goal, met)
    out.print(table)


def print_machine(out: Console, m: dict) -> None:
    out.print(f"{m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB, no GPU, {m['system']}")
    versions = ("sglang", "torch", "python", "sglang-persist")
    out.print(", ".join(f"{name} {m[name]}" for name in versions), highlight=False)


def panels(what: str, m: dict, **kind):
    """A figure of two panels, side by side: (figure, their axes)."""
    figure, axes = plt.subplots(1, 2, figsize=(13, 4.8), layout="constrained", **kind)
    figure.suptitle(f"{what}: {m['cpu']}, {m['cores']} cores", fontsize=11)
    return figure, axes


def bars(axes, names: list[str], series: dict[str, list[float]], form: str) -> None:
    """For each name a group of bars, one of each series."""
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        at = [x + (i - (len(series) - 1) / 2) * width for x in range(len(names))]
        axes.bar_label(axes.bar(at, values, width, label=label), fmt=form, fontsize=8)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.legend(fontsize=8)


def finish(given: argparse.Namespace, name: str, ratios: list[dict], draw, show, **facts) -> None:
    """Everything that was measured, in its three forms."""
    result = {"benchmark": name, "quick": given.quick, "ratios": ratios, "machine": machine(), **facts}
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    draw(result).savefig(given.png, dpi=120, format="png")
    for path in (given.json, given.png):
        steps.print(f"written: {path}", soft_wrap=True)
    out = Console()
    print_ratios(out, ratios)
    show(result, out)
    print_machine(out, result["machine"])
    if note := facts.get("note"):
        out.print(note)
