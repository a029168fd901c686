"""`sglang-persist`: five verbs. Neither torch nor sglang is imported; errors are one line on standard error.

Exit codes: 0; 1 findings of `verify`; 2 usage or setting; others as `errors.py` lists them.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from sglang_persist import __version__, config
from sglang_persist.client import Client
from sglang_persist.errors import EngineOff, PersistError, StoreUnavailable, from_os_error
from sglang_persist.fs import REAL
from sglang_persist.store import prune as pruning
from sglang_persist.store import report
from sglang_persist.store import verify as verifying
from sglang_persist.store.root import readers_root


def _size(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _when(unix: float | None) -> str:
    return "-" if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:,}"


def _table(title: str, columns: list[str], rows: list[list]) -> None:
    """Columns for a person; text on the left, numbers on the right, never cut off: a terminal folds, a file is wide."""
    terminal = Console().is_terminal
    console = Console(width=None if terminal else 1 << 16, markup=False, emoji=False, highlight=False)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(columns):
        numeric = rows and all(str(r[i])[:1].isdigit() or r[i] == "-" for r in rows)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=not terminal, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell).encode(errors="backslashreplace").decode() for cell in row))
    console.print(table)


def _show(as_json: bool, data: dict, text) -> None:
    if as_json:
        click.echo(json.dumps(data))
    else:
        text()


def _store(path: str) -> Path:
    root = Path(path).absolute()
    try:
        found = root.is_dir()
    except OSError as error:
        raise from_os_error(error, root) from None
    if not found:
        raise StoreUnavailable(f"{root}: no such directory")
    REAL.list(root)
    return readers_root(REAL, root)


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of columns.")
url_option = click.option("--url", required=True, help="The server, such as http://127.0.0.1:30000.")
key_option = click.option("--api-key", envvar="SGLANG_API_KEY", help="The server's API key or admin key.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sglang-persist")
def cli() -> None:
    """Snapshots of SGLang's prefix cache: take one, look at a server, look at a store, check it, prune it."""


@cli.command()
@url_option
@key_option
@click.option("--no-wait", is_flag=True, help="Return once the server has taken the request.")
@json_option
def snapshot(url: str, api_key: str | None, no_wait: bool, as_json: bool) -> None:
    """Take a snapshot now; exit 0 once it is durable."""
    client = Client(url, api_key)
    with _spinner("snapshot", not as_json and not no_wait):
        ranks = client.snapshot(wait=not no_wait)

    def text() -> None:
        if no_wait:
            click.echo("requested")
            return
        columns = ["rank", "generation", "tokens", "new tokens", "new bytes", "seconds"]
        _table("snapshot", columns, [
            [r["rank"], r["generation"], _count(r["tokens"]), _count(r["new_tokens"]), _size(r["new_bytes"]),
             f"{r['seconds']:.2f}"] for r in ranks
        ])  # fmt: skip

    _show(as_json, {"ok": True, "ranks": ranks}, text)


@cli.command()
@url_option
@key_option
@json_option
def status(url: str, api_key: str | None, as_json: bool) -> None:
    """What a running server has restored and saved."""
    ranks = Client(url, api_key).status()

    def text() -> None:
        for s in ranks:
            restore, last, store = s["restore"], s["snapshot"], s["store"]
            refused = ", ".join(f"{n} {reason}" for reason, n in restore["nodes_refused"].items())
            rows = [
                ["enabled", "yes" if s["enabled"] else f"no: {s['why_off']}"],
                ["namespace", s["namespace"] or "-"],
                ["restore", f"{restore['state']}, {_count(restore['tokens_restored'])} of "
                 f"{_count(restore['tokens_total'])} tokens in {restore['seconds']:.2f} s"],
                ["cold because", restore["why_cold"] or "-"],
                ["nodes refused", refused or "-"],
                ["snapshot", f"{last['state']}, generation {last['generation']}, last {_when(last['last_success'])}"],
                ["last snapshot", f"{_count(last['last_tokens'])} tokens, {_count(last['last_new_tokens'])} new, "
                 f"{_size(last['last_new_bytes'])}, {last['last_seconds'] or 0:.2f} s"],
                ["failures", f"{last['failures']}" + (f", last: {last['last_error']}" if last["last_error"] else "")],
                ["store", f"{_size(store['bytes'])} of {_size(store['budget_bytes'])}"],
            ]  # fmt: skip
            _table(f"rank {s['rank']}", ["", ""], rows)

    _show(as_json, {"ranks": ranks}, text)
    if off := [f"rank {s['rank']}: why_off={s['why_off']}" for s in ranks if not s["enabled"]]:
        raise EngineOff(f"{url}: persistence is off: {'; '.join(off)}")


@cli.command()
@click.argument("directory")
@json_option
def inspect(directory: str, as_json: bool) -> None:
    """Namespaces and generations of a store."""
    root = _store(directory)
    found, problems = report.inspect(REAL, root)
    for problem in problems:
        click.echo(f"sglang-persist: not readable: {problem}", err=True)

    def text() -> None:
        click.echo(f"{root}: format {found['format']}, {found['files']} files, {_size(found['bytes'])}")
        for ns in found["namespaces"]:
            t = ns["topology"]
            click.echo(
                f"\n{ns['name']}\n  model {ns['model']}  tp {t['tp']} pp {t['pp']} dp {t['dp']} page {t['page']}"
            )
            columns = [
                "generation",
                "created",
                "reason",
                "complete",
                "nodes",
                "tokens",
                "raw",
                "stored",
                "ratio",
                "segments",
            ]
            _table("", columns, [
                [g["id"], _when(g["created"]), g["reason"], "yes" if g["complete"] else "no", _count(g["nodes"]),
                 _count(g["tokens"]), _size(g["raw_bytes"]), _size(g["stored_bytes"]),
                 f"{g['raw_bytes'] / g['stored_bytes']:.3f}" if g["stored_bytes"] else "-", g["segments"]]
                for g in ns["generations"]
            ])  # fmt: skip

    _show(as_json, found, text)


@cli.command()
@click.argument("directory")
@click.option("--deep", is_flag=True, help="Decode every record as well.")
@json_option
def verify(directory: str, deep: bool, as_json: bool) -> None:
    """Check every byte of a store; exit 1 if anything is wrong."""
    root = _store(directory)
    with _bar("verify", verifying.store_bytes(REAL, root)[1], not as_json) as progress:
        found = verifying.verify(REAL, root, deep, progress)
    data = {
        "ok": not found.findings, "segments": found.segments, "frames": found.frames, "bytes": found.bytes,
        "leftovers": found.leftovers, "findings": [asdict(f) for f in found.findings],
    }  # fmt: skip

    def text() -> None:
        verdict = "sound" if data["ok"] else _plural(len(found.findings), "finding")
        click.echo(
            f"{root}: {verdict}; {found.segments} segments, {_count(found.frames)} records, {_size(found.bytes)}, "
            f"{found.leftovers} leftovers"
        )
        if found.findings:
            rows = [[f.kind, f.path, "-" if f.offset is None else f.offset, f.detail] for f in found.findings]
            _table("", ["kind", "path", "offset", "detail"], rows)

    _show(as_json, data, text)
    sys.exit(0 if data["ok"] else 1)


@cli.command()
@click.argument("directory")
@click.option("--keep", type=click.IntRange(1), default=2, show_default=True, help="Complete generations to keep.")
@click.option("--max-bytes", metavar="SIZE", help="Then delete oldest generations until the store is this small.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted.")
@json_option
def prune(directory: str, keep: int, max_bytes: str | None, dry_run: bool, as_json: bool) -> None:
    """Delete old generations, and what interrupted writes left."""
    root = _store(directory)
    limit = None
    if max_bytes is not None:
        try:
            limit = config.parse_size(max_bytes).of(REAL.space(root)[1])
        except (ValueError, OverflowError):
            allowed = config.BY_KEY["max_bytes"].allowed
            raise click.UsageError(f"--max-bytes: {max_bytes!r} cannot be read; allowed: {allowed}") from None
    plan, locks = pruning.plan_store(REAL, root, keep, limit)
    try:
        deleted, errors = ([*plan.manifests, *plan.files], []) if dry_run else pruning.execute(REAL, plan)
    finally:
        for lock in locks:
            lock.release()
    for problem in [*plan.kept, *errors]:
        click.echo(f"sglang-persist: kept: {problem}", err=True)
    freed = sum(plan.bytes[path] for path in deleted)
    names = [str(path.relative_to(root)) for path in deleted]

    def text() -> None:
        for name in names:
            click.echo(name)
        click.echo(f"{'would free' if dry_run else 'freed'} {_size(freed)} in {len(names)} files")

    _show(as_json, {"deleted": names, "freed_bytes": freed}, text)


@contextmanager
def _bar(label: str, total: int, shown: bool):
    """A progress bar on standard error where a person looks; yields a function that takes bytes done."""
    if not shown or not sys.stderr.isatty():
        yield lambda _n: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda n: progress.advance(task, n)


@contextmanager
def _spinner(label: str, shown: bool):
    if not shown or not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(label):
        yield


def main() -> None:
    try:
        cli.main(prog_name="sglang-persist", standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        click.echo(f"sglang-persist: {error.format_message()}", err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except PersistError as error:
        click.echo(f"sglang-persist: {error}", err=True)
        sys.exit(error.exit_code)
