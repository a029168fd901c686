"""What a restart must keep, asked of SGLang itself: cached tokens, greedy outputs, log-probabilities."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from serving import Server

NEW_TOKENS = 12


def persist(directory: Path, *more) -> list:
    """Snapshots only on demand and at the end. How full the disk of the machine is that runs the tests is no matter."""
    return ["--persist-dir", directory, "--persist-interval", 0, "--persist-min-free", 0, *more]


@dataclass(frozen=True)
class Pass:
    """One pass over the prompts."""

    cached: int
    asked: int
    ids: list[list[int]]
    logprobs: list[list[float]]


def serve(server: Server, prompts: list, n: int = NEW_TOKENS) -> Pass:
    answers = [server.generate(p, n, return_logprob=True) for p in prompts]
    return Pass(
        sum(a.cached_tokens for a in answers),
        sum(a.prompt_tokens for a in answers),
        [a.ids for a in answers],
        [[t[0] for t in a.meta["output_token_logprobs"]] for a in answers],
    )


def assert_warm(restarted: Pass, before: Pass) -> None:
    """At least 99 % of the cached tokens, and the same outputs down to the log-probabilities."""
    assert restarted.cached >= 0.99 * before.cached > 0
    assert restarted.ids == before.ids
    assert restarted.logprobs == before.logprobs


def cli(*words, code: int = 0):
    """The product's own command: its JSON, or its line of error where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang_persist", *map(str, words)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout) if done.stdout.startswith("{") else done.stderr


def status(server: Server) -> dict:
    (rank,) = cli("status", "--url", server.url, "--json")["ranks"]
    return rank


def snapshot(server: Server) -> dict:
    (rank,) = cli("snapshot", "--url", server.url, "--json")["ranks"]
    return rank


def assert_sound(directory: Path) -> dict:
    found = cli("verify", directory, "--deep", "--json")
    assert found["ok"], found
    return found
