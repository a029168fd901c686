"""Shows a warm restart: the same prompts on a cold server, a warm one, and one that was stopped and started again."""

import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from serving import Answer, Server, model, prompts  # noqa: E402

PROMPTS = {"n": 4, "chars": 21_400, "shared": 11_300}  # about 4,600 tokens each, the first 2,400 in common
NEW_TOKENS = 12
NOTE = (
    "In every pass alike, the CPU runtime replaces one attention method of stock SGLang, so that a cache hit shows: "
    "it computes the new tokens' rows only."
)

steps = Console(stderr=True)


def persist(*arguments) -> dict:
    """What the package's own command says. Its exit code is no matter here: verify prints its findings with a 1."""
    command = [sys.executable, "-m", "sglang_persist", *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        sys.exit(f"sglang-persist {arguments[0]} ended with {done.returncode}")
    return json.loads(done.stdout)


def first_tokens(server: Server, texts: list[str], name: str) -> list[Answer]:
    """Time to the first token, prompt by prompt."""
    answers = []
    for i, text in enumerate(texts, 1):
        with steps.status(f"{name}: prompt {i} of {len(texts)}"):
            answers.append(server.generate(text, 1))
    seconds = ", ".join(f"{answer.seconds:.2f}" for answer in answers)
    steps.print(f"{name}: first token after {seconds} s, {sum(a.cached_tokens for a in answers):,} tokens cached")
    return answers


def outputs(server: Server, texts: list[str]) -> list[list[int]]:
    with steps.status("greedy outputs"):
        return [server.generate(text, NEW_TOKENS).ids for text in texts]


def start(server: Server, what: str) -> None:
    with steps.status(f"starting {what}"):
        seconds = server.start()
    steps.print(f"{what} is ready after {seconds:.1f} s")


def run(store: Path) -> bool:
    with steps.status("preparing SmolLM2-135M-Instruct (about a minute the first time)"):
        path = model("smol")
    texts = prompts(**PROMPTS)
    # No snapshots in between: what the restart finds is what SIGTERM left.
    server = Server(path, "--persist-dir", store, "--persist-interval", 0, max_tokens=24576)
    try:
        start(server, "the server")
        cold = first_tokens(server, texts, "cold")
        warm = first_tokens(server, texts, "warm")
        expected = outputs(server, texts)
        with steps.status("stopping it with SIGTERM"):
            stopped = server.stop()
        # The last snapshot's own time stands in the log only: the server is gone.
        saving = re.search(r"\(shutdown\): .* in ([0-9.]+) s", server.log.read_text(errors="replace"))
        steps.print(f"stopped after {stopped:.1f} s, the last snapshot included")

        start(server, "the restarted server")
        again = first_tokens(server, texts, "restarted")
        first_tokens(server, texts, "restarted, once more")
        same = sum(ours == theirs for ours, theirs in zip(outputs(server, texts), expected, strict=True))
        status = persist("status", "--url", server.url)
        steps.print("inspecting and verifying what is on disk")
        inspected = persist("inspect", store)
        verified = persist("verify", store, "--deep")
        server.stop()
    finally:
        server.kill()

    passes = {"cold": cold, "warm": warm, "restarted": again}
    cached = {name: sum(answer.cached_tokens for answer in answers) for name, answers in passes.items()}
    asked = sum(answer.prompt_tokens for answer in cold)
    (namespace,) = inspected["namespaces"]
    saved = next(g for g in namespace["generations"] if g["reason"] == "shutdown")
    (rank,) = status["ranks"]

    table = Table(title=f"{len(texts)} prompts of {min(a.prompt_tokens for a in cold):,} tokens and more")
    table.add_column()
    for name in passes:
        table.add_column(name, justify="right")
    median = (statistics.median(answer.seconds for answer in answers) for answers in passes.values())
    table.add_row("time to first token, median", *(f"{seconds:.2f} s" for seconds in median))
    table.add_row("cached tokens", *(f"{tokens:,}" for tokens in cached.values()))
    table.add_row("share of the prompts", *(f"{tokens / asked:.1%}" for tokens in cached.values()), end_section=True)
    for label, value in {
        f"outputs of {NEW_TOKENS} tokens identical to the warm ones": f"{same}/{len(texts)}",
        "on disk": f"{decimal(inspected['bytes'])} in {inspected['files']} files",
        "raw / stored": f"{saved['raw_bytes'] / saved['stored_bytes']:.2f}",
        "verify --deep": "sound" if verified["ok"] else f"{len(verified['findings'])} findings",
        "save": f"{saved['tokens']:,} tokens in {saving[1] if saving else '?'} s",
        "SIGTERM until the server had exited": f"{stopped:.2f} s",
        "restore": f"{rank['restore']['tokens_restored']:,} tokens in {rank['restore']['seconds']:.2f} s",
    }.items():
        table.add_row(label, "", "", value)
    out = Console()
    out.print(table)
    out.print(NOTE)
    return cached["restarted"] >= 0.99 * cached["warm"] and same == len(texts) and verified["ok"]


def main() -> int:
    # Ended from outside, it still ends its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo-", dir=cache) as store:
        if run(Path(store)):
            return 0
    steps.print("[red]the restart was not warm[/red]")
    return 1


if __name__ == "__main__":
    sys.exit(main())
