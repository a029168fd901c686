"""The command line: what it prints, how it ends, and that it needs neither torch nor sglang."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from store.little import IDENTITY, OTHER, SHARD, Little, flip, loads_whole, snapshot_of

from sglang_persist import cli, client
from sglang_persist.model import Identity
from sglang_persist.store import names

#: Ends the process at once where something is imported that the command line must not need.
ALONE = """
import os, runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "sglang", "psutil", "setproctitle"} or name in {
            "sglang_persist.engine", "sglang_persist.plugin", "sglang_persist.save", "sglang_persist.restore"}:
            os.write(2, f"imported {name}".encode())
            os._exit(97)
sys.meta_path.insert(0, Refuse())
runpy.run_module("sglang_persist", run_name="__main__", alter_sys=True)
"""


def alone(*words, **environ) -> subprocess.CompletedProcess:
    """In a process of its own, as it would be on a machine without an engine, 80 columns wide."""
    env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "TTY_COMPATIBLE")} | {"COLUMNS": "80"}
    command = [sys.executable, "-c", ALONE, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=env | environ, timeout=60)


@pytest.fixture
def run(monkeypatch, capsys):
    """In this process: (exit code, standard output, standard error)."""
    monkeypatch.setattr(client, "POLL_S", 0.0)
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["sglang-persist", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert err == "" or code or err.startswith("sglang-persist: "), err
        return code, out, err

    return call


@pytest.fixture
def little(tmp_path):
    out = Little(tmp_path / "store").open()
    for i in range(3):
        out.take(retire=False, created=1_700_000_000.0 + i)
    out.close()
    return out


def one_line(err: str, *parts) -> bool:
    return err.startswith("sglang-persist: ") and err.count("\n") == 1 and all(str(p) in err for p in parts)


# ------------------------------------------------------------------------------------------------------ in general


def test_it_runs_alone():
    done = alone("--version")
    assert (done.returncode, done.stdout) == (0, f"sglang-persist, version {cli.__version__}\n")
    done = alone("--help")
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in ("snapshot", "status", "inspect", "verify", "prune"))


@pytest.mark.parametrize(
    "words",
    [
        ("frobnicate",), ("verify",), ("verify", "a", "b"), ("inspect", "--deep", "x"), ("snapshot",), ("status",),
        ("prune", "x", "--keep", "0"), ("prune", "x", "--keep", "many"),
    ],
)  # fmt: skip
def test_wrong_usage_is_exit_2_and_one_line(run, words):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert one_line(err)


@pytest.mark.parametrize("verb", ["inspect", "verify", "prune"])
def test_a_store_that_is_not_there_is_exit_5_with_the_path(run, tmp_path, verb):
    (tmp_path / "file").touch()
    for place in ("nowhere", "file"):
        code, out, err = run(verb, tmp_path / place)
        assert (code, out) == (5, "")
        assert one_line(err, tmp_path / place)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("verb", ["inspect", "verify", "prune"])
def test_an_empty_directory_is_an_empty_store(run, tmp_path, verb):
    code, out, err = run(verb, tmp_path, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found.get("namespaces", found.get("findings", found.get("deleted"))) == []


# --------------------------------------------------------------------------------------------------------- inspect

GENERATION = {"id", "created", "reason", "complete", "nodes", "tokens", "raw_bytes", "stored_bytes", "segments"}
NAMESPACE = {"name", "model", "fingerprint", "layout", "topology", "generations"}
#: Told beyond the contract.
MORE = {"namespace": {"written_by"}, "generation": {"left_out_tokens", "shards"}}


def test_inspect_json(little):
    done = alone("inspect", little.root, "--json")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    found = json.loads(done.stdout)
    assert found.keys() == {"store", "format", "files", "bytes", "namespaces"}
    files = list(little.path.iterdir())
    assert (found["store"], found["format"]) == (str(little.root), 1)
    assert (found["files"], found["bytes"]) == (len(files), sum(p.stat().st_size for p in files))
    (ns,) = found["namespaces"]
    assert ns.keys() == NAMESPACE | MORE["namespace"]
    assert ns["name"] == names.namespace(IDENTITY)
    assert ns["model"] == IDENTITY.soft["model_path"]
    assert ns["fingerprint"] == names.digest(IDENTITY.model).hex()
    assert ns["layout"] == {"page": 2, "layout": 1}
    assert ns["topology"] == {"tp": 1, "pp": 1, "dp": 1, "page": 2}
    assert [g["id"] for g in ns["generations"]] == [3, 2, 1]
    for shown in ns["generations"]:
        m = little.manifests[shown["id"]]
        assert shown.keys() == GENERATION | MORE["generation"]
        assert {k: shown[k] for k in GENERATION} == {
            "id": m.generation, "created": m.created, "reason": "manual", "complete": True, "nodes": len(m.nodes),
            "tokens": m.tokens, "raw_bytes": m.raw_bytes, "stored_bytes": m.stored_bytes, "segments": len(m.segments),
        }  # fmt: skip


def test_inspect_sums_bytes_over_ranks_and_counts_tokens_once(run, tmp_path):
    a, b = (Little(tmp_path / "store", shard=s, shards=(SHARD, OTHER)).open() for s in (SHARD, OTHER))
    a.take()
    b.take()
    a.take()
    replica = "dp1-adp0-pp0-cp0-tp0"
    Little(tmp_path / "store", shard=replica, shards=(replica,)).open().take()
    code, out, _ = run("inspect", tmp_path / "store", "--json")
    (ns,) = json.loads(out)["namespaces"]
    assert code == 0
    assert ns["topology"]["dp"] == 2
    shown = [(g["id"], g["complete"], g["tokens"], g["raw_bytes"], g["segments"]) for g in ns["generations"]]
    one, two = a.manifests[1], a.manifests[2]
    assert shown == [
        (2, False, two.tokens, two.raw_bytes, 3),
        (1, True, one.tokens, 2 * one.raw_bytes, 4),
        (1, True, one.tokens, one.raw_bytes, 2),
    ]


def test_inspect_says_what_it_cannot_read_and_shows_the_rest(run, little):
    flip(little.manifest_file(2), 90)
    code, out, err = run("inspect", little.root, "--json")
    assert code == 0
    assert one_line(err, "not readable", little.manifest_file(2))
    assert [g["id"] for g in json.loads(out)["namespaces"][0]["generations"]] == [3, 1]


def test_inspect_for_a_person(little):
    done = alone("inspect", little.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert names.namespace(IDENTITY) in done.stdout
    header = next(line for line in done.stdout.splitlines() if line.startswith("generation"))
    assert header.split() == [
        "generation", "created", "reason", "complete", "nodes", "tokens", "raw", "stored", "ratio", "segments"
    ]  # fmt: skip
    rows = [line.split() for line in done.stdout.splitlines() if line[:10].strip().isdigit()]
    assert [r[0] for r in rows] == ["3", "2", "1"]
    assert all(len(r) == 13 for r in rows), "a date is two words, a size is two words"
    assert "…" not in done.stdout


# ---------------------------------------------------------------------------------------------------------- verify


def test_verify_json(little):
    for deep in ((), ("--deep",)):
        done = alone("verify", little.root, "--json", *deep)
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
        found = json.loads(done.stdout)
        assert found == {
            "ok": True, "segments": 6, "frames": 9, "leftovers": 0, "findings": [],
            "bytes": sum(p.stat().st_size for p in little.path.iterdir()),
        }  # fmt: skip


def test_verify_with_findings_is_exit_1_and_still_json(run, little):
    flip(little.segment_files()[0], 64)
    (little.path / "tmp-1-x").touch()
    code, out, err = run("verify", little.root, "--json")
    found = json.loads(out)
    assert (code, err, found["ok"], found["leftovers"]) == (1, "", False, 1)
    (finding,) = found["findings"]
    assert finding.keys() == {"path", "offset", "kind", "detail"}
    assert finding["path"] == str(little.segment_files()[0].relative_to(little.root))
    assert (finding["offset"], finding["kind"]) == (64, "checksum")


def test_findings_are_shown_to_a_person_in_full(little):
    flip(little.segment_files()[0], 64)
    long = little.path / ("x" * 200)
    long.touch()
    done = alone("verify", little.root)
    assert (done.returncode, done.stderr) == (1, "")
    for place in (little.segment_files()[0], long):
        assert str(place.relative_to(little.root)) in done.stdout
    assert "record 0 does not match its checksum" in done.stdout
    assert "2 findings" in done.stdout
    assert "…" not in done.stdout
    assert all(line == line.rstrip() or len(line) < 600 for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", [b"[bold]x", b":smile:", b"\xff\xfe", "ü".encode()])
def test_names_of_files_are_shown_as_they_are(run, little, name):
    with open(os.path.join(os.fsencode(little.path), name), "wb"):
        pass
    code, out, _ = run("verify", little.root)
    assert code == 1
    assert name.decode(errors="surrogateescape").encode(errors="backslashreplace").decode() in out


def test_on_a_terminal_nothing_is_cut_off(little):
    flip(little.segment_files()[0], 64)
    leader, follower = pty.openpty()
    env = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-m", "sglang_persist", "verify", str(little.root)]
    with subprocess.Popen(command, stdout=follower, stderr=subprocess.PIPE, env=env) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                more = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            if not more:
                break
            shown += more
        os.close(leader)
        assert process.stderr.read() == b""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()
    assert process.returncode == 1
    at = next(i for i, line in enumerate(lines) if line.startswith("kind"))
    assert max(map(len, lines[at:])) <= 80
    begin, end = lines[at].index("path"), lines[at].index("offset")
    path = "".join(line[begin:end].strip() for line in lines[at + 1 :])
    assert path == str(little.segment_files()[0].relative_to(little.root)), "folded, not cut"


# ----------------------------------------------------------------------------------------------------------- prune


def test_prune_json(little):
    before = snapshot_of(little.path)
    done = alone("prune", little.root, "--json", "--keep", "1")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    found = json.loads(done.stdout)
    after = snapshot_of(little.path)
    assert found.keys() == {"deleted", "freed_bytes"}
    assert set(found["deleted"]) == {
        str((little.path / n).relative_to(little.root)) for n in before.keys() - after.keys()
    }
    assert found["freed_bytes"] == sum(len(before[n]) for n in before.keys() - after.keys()) > 0
    assert loads_whole(little.path, little.manifests[3], little.records[3])


def test_a_dry_run_says_the_same_and_deletes_nothing(run, little):
    before = snapshot_of(little.path)
    code, out, _ = run("prune", little.root, "--dry-run", "--json")
    assert (code, snapshot_of(little.path)) == (0, before)
    assert json.loads(run("prune", little.root, "--json")[1]) == json.loads(out)
    assert json.loads(run("prune", little.root, "--json")[1]) == {"deleted": [], "freed_bytes": 0}


@pytest.mark.parametrize("size", ["many", "-1", "101%", "9" * 400])
def test_a_bad_size_is_exit_2_and_says_what_is_allowed(run, little, size):
    before = snapshot_of(little.path)
    code, out, err = run("prune", little.root, "--max-bytes", size)
    assert (code, out, snapshot_of(little.path)) == (2, "", before)
    assert one_line(err, "--max-bytes", size, "a size such as 200GiB")


def test_prune_to_a_size(run, little):
    limit = sum(map(len, snapshot_of(little.path).values())) - 1
    code, out, _ = run("prune", little.root, "--keep", "9", "--max-bytes", limit)
    assert (code, out.splitlines()[-1].startswith("freed ")) == (0, True)
    assert sum(map(len, snapshot_of(little.path).values())) <= limit
    assert loads_whole(little.path, little.manifests[3], little.records[3])


def test_prune_says_what_it_keeps_and_why(run, little):
    flip(little.manifest_file(2), 90)
    code, _, err = run("prune", little.root, "--keep", "1")
    assert code == 0
    assert one_line(err, "kept: ", little.manifest_file(2))


# ------------------------------------------------------------------------------------------------ a running server


def status(rank: int = 0, **snapshot) -> dict:
    """STATUS as the contract has it, of a server that has taken one snapshot."""
    return {
        "enabled": True, "why_off": None, "rank": rank, "namespace": "Little-0123456789abcdef/0123456789abcdef",
        "restore": {"state": "done", "why_cold": None, "tokens_restored": 1200, "tokens_total": 1300,
                    "nodes_refused": {"damaged": 2}, "seconds": 0.5},
        "snapshot": {"state": "idle", "generation": 3, "last_success": 1_700_000_000.0, "last_tokens": 5000,
                     "last_new_tokens": 70, "last_new_bytes": 4096, "last_seconds": 0.25, "requested": 1,
                     "last_request": 1, "last_request_error": None, "failures": 0, "last_error": None} | snapshot,
        "store": {"bytes": 1 << 20, "budget_bytes": 1 << 30},
    }  # fmt: skip


class Server:
    """Speaks like SGLang: states of all DP ranks, and requests that every rank answers with whether it took them."""

    def __init__(self, *states: dict | None):
        self.states = [{"version": "x"} | ({} if s is None else {"persist": s}) for s in states]
        self.accepts = [True] * len(states)
        #: How often a rank is looked at until a snapshot that was asked for is done, and what it then says.
        self.looks = [2 + 3 * i for i in range(len(states))]
        self.outcome = {"generation": 4, "last_tokens": 6000, "last_new_tokens": 1000, "last_new_bytes": 12345,
                        "last_seconds": 1.5}  # fmt: skip
        self.requests: list[tuple[str, str | None, object]] = []
        self.reply: tuple[int, bytes] | None = None

    def answer(self, method: str, path: str, body) -> object:
        if (method, path) == ("POST", "/set_internal_state"):
            for state, accepted in zip(self.states, self.accepts, strict=True):
                if accepted and state.get("persist"):
                    state["persist"]["snapshot"]["requested"] += 1
            return self.accepts
        assert (method, path) == ("GET", "/server_info")
        for i, state in enumerate(self.states):
            s = state.get("persist")
            if s and s["snapshot"]["requested"] > s["snapshot"]["last_request"]:
                self.looks[i] -= 1
                if not self.looks[i]:
                    last = 0 if "requested" in self.outcome else s["snapshot"]["requested"]
                    s["snapshot"] |= {**self.outcome, "last_request": last}
        return {"model_path": "x", "internal_states": self.states}

    def __enter__(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(body) if body else None
                outer.requests.append((self.path, self.headers.get("Authorization"), body))
                code, data = outer.reply or (200, json.dumps(outer.answer(self.command, self.path, body)).encode())
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


RANK = {"rank", "generation", "tokens", "new_tokens", "new_bytes", "seconds"}


def test_snapshot_json(run):
    with Server(status()) as server:
        done = alone("snapshot", "--url", server.url, "--json")
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
        assert json.loads(done.stdout) == {
            "ok": True,
            "ranks": [
                {"rank": 0, "generation": 4, "tokens": 6000, "new_tokens": 1000, "new_bytes": 12345, "seconds": 1.5}
            ],
        }
        asked = [body for path, _, body in server.requests if path == "/set_internal_state"]
        assert asked == [{"server_args": {"persist_snapshot": 1}}]


def test_status_json(run):
    with Server(status()) as server:
        done = alone("status", "--url", server.url, "--json")
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
        assert json.loads(done.stdout) == {"ranks": [status()]}


def test_snapshot_waits_for_every_replica(run):
    with Server(status(0), status(1)) as server:
        code, out, err = run("snapshot", "--url", server.url, "--json")
        ranks = json.loads(out)["ranks"]
        assert (code, err, [r["rank"] for r in ranks]) == (0, "", [0, 1])
        assert all(r.keys() == RANK and r["generation"] == 4 for r in ranks)
        assert len([1 for path, *_ in server.requests if path == "/server_info"]) >= 5


def test_snapshot_without_waiting_returns_once_it_is_taken(run):
    with Server(status(0), status(1)) as server:
        server.looks = [10**6] * 2
        code, out, err = run("snapshot", "--url", server.url, "--no-wait", "--json")
        found = json.loads(out)
        assert (code, err, found["ok"], len(found["ranks"])) == (0, "", True, 2)
        assert all(s["persist"]["snapshot"]["requested"] == 2 for s in server.states)
        assert run("snapshot", "--url", server.url, "--no-wait") == (0, "requested\n", "")


def test_the_api_key_is_sent_and_only_when_given(run, monkeypatch):
    with Server(status()) as server:
        run("status", "--url", server.url)
        run("snapshot", "--url", server.url, "--api-key", "secret")
        monkeypatch.setenv("SGLANG_API_KEY", "from-environment")
        run("status", "--url", server.url)
        sent = [(path, key) for path, key, _ in server.requests]
        assert sent[0] == ("/server_info", None)
        assert {key for _, key in sent[1:-1]} == {"Bearer secret"}
        assert sent[-1] == ("/server_info", "Bearer from-environment")


@pytest.mark.parametrize("verb", ["snapshot", "status"])
def test_a_server_without_the_plugin_is_exit_9_with_why(run, verb):
    with Server(None) as server:
        code, out, err = run(verb, "--url", server.url, "--json")
        assert (code, out) == (9, "")
        assert one_line(err, server.url, "why_off=no_directory")
        assert [path for path, *_ in server.requests] == ["/server_info"], "nothing was asked of it"


@pytest.mark.parametrize("verb", ["snapshot", "status"])
def test_a_server_where_it_is_off_is_exit_9_with_why(run, verb):
    with Server(status(0), status(1) | {"enabled": False, "why_off": "unsupported_lora"}) as server:
        code, out, err = run(verb, "--url", server.url, "--json")
        assert code == 9
        assert one_line(err, server.url, "rank 1: why_off=unsupported_lora")
        if verb == "status":
            assert [s["enabled"] for s in json.loads(out)["ranks"]] == [True, False], "the rest is told as well"
        else:
            assert out == ""
            assert [path for path, *_ in server.requests] == ["/server_info"]


def test_a_server_that_turns_it_off_while_we_wait_is_exit_9(run):
    with Server(status()) as server:
        server.looks = [10**6]
        answer = server.answer

        def turn_off(method, path, body):
            if len(server.requests) > 4:
                server.states[0]["persist"] |= {"enabled": False, "why_off": "weights_changed"}
            return answer(method, path, body)

        server.answer = turn_off
        code, out, err = run("snapshot", "--url", server.url)
        assert (code, out) == (9, "")
        assert one_line(err, "why_off=weights_changed")


@pytest.mark.parametrize("accepts", [[False, False], [True, False]])
def test_a_refused_request_is_exit_10(run, accepts):
    with Server(status(0), status(1)) as server:
        server.accepts = accepts
        code, out, err = run("snapshot", "--url", server.url, "--json")
        assert (code, out) == (10, "")
        assert one_line(err, server.url, "did not accept")


def test_a_failed_snapshot_is_exit_10_with_the_reason(run):
    with Server(status(0), status(1)) as server:
        server.outcome = {"failures": 1, "last_request_error": "store_full: /data: No space left on device"}
        code, out, err = run("snapshot", "--url", server.url, "--json")
        assert (code, out) == (10, "")
        assert one_line(err, server.url, "rank 1: store_full: /data: No space left on device")


def test_an_error_of_an_earlier_snapshot_is_not_ours(run):
    with Server(status(last_error="store_full: x", failures=1)) as server:
        assert run("snapshot", "--url", server.url)[0] == 0


def test_a_server_that_was_restarted_meanwhile_is_exit_10(run):
    with Server(status(requested=5, last_request=5)) as server:
        server.looks, server.outcome = [3], {"requested": 0}
        code, _, err = run("snapshot", "--url", server.url)
        assert code == 10
        assert one_line(err, "restarted")


@pytest.mark.parametrize("verb", ["snapshot", "status"])
def test_no_server_is_exit_8(run, verb):
    with Server(status()) as server:
        url = server.url
    code, out, err = run(verb, "--url", url)
    assert (code, out) == (8, "")
    assert one_line(err, url, "Connection refused")


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://", "gopher://x", "http://no host", "::"])
def test_what_is_no_address_is_exit_8(run, url):
    code, out, err = run("status", "--url", url)
    assert (code, out) == (8, "")
    assert one_line(err)


@pytest.mark.parametrize(
    "reply",
    [
        (401, b'{"error": "Unauthorized"}'), (404, b""), (500, b"oops\n\nmore"), (200, b"<html>"),
        (200, b"[]"), (200, b"{}"),
        (200, b'{"internal_states": 5}'), (200, b'{"internal_states": [{"persist": {"enabled": true}}]}'),
        (200, b'{"internal_states": [{"persist": "yes"}]}'),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_exit_8(run, reply):
    with Server(status()) as server:
        server.reply = reply
        code, out, err = run("status", "--url", server.url)
        assert (code, out) == (8, "")
        assert one_line(err, server.url)


def test_whatever_speaks_no_http_is_exit_8(run):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        code, out, err = run("status", "--url", f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert (code, out) == (8, "")
    assert one_line(err)


def test_status_and_snapshot_for_a_person(run):
    before_the_first = status(1, generation=0, last_success=None, last_tokens=None, last_new_tokens=None,
                              last_new_bytes=None, last_seconds=None)  # fmt: skip
    before_the_first["restore"]["why_cold"] = "no_snapshot"
    with Server(status(0, failures=2, last_error="store_full: [/data]: x"), before_the_first) as server:
        code, out, err = run("status", "--url", server.url)
        assert (code, err) == (0, "")
        for part in ("rank 0", "rank 1", "1,200 of 1,300 tokens", "2 damaged", "no_snapshot", "1.0 MiB of 1.0 GiB",
                     "4.0 KiB", "2, last: store_full: [/data]: x"):  # fmt: skip
            assert part in out
        code, out, err = run("snapshot", "--url", server.url)
        assert (code, err) == (0, "")
        assert [line.split() for line in out.splitlines()[-2:]] == [
            [str(rank), "4", "6,000", "1,000", "12.1", "KiB", "1.50"] for rank in (0, 1)
        ]


def test_two_models_in_one_store(run, little):
    other = Little(little.root, identity=Identity({"architecture": "Another"}, IDENTITY.cut)).open()
    other.take()
    other.close()
    _, out, _ = run("inspect", little.root, "--json")
    found = json.loads(out)["namespaces"]
    assert [ns["name"].split("-")[0] for ns in found] == ["Another", "LittleModel"]
    assert found[0]["model"] == "Another", "where no path is known, the architecture"
    shutil.rmtree(other.path)
    assert len(json.loads(run("inspect", little.root, "--json")[1])["namespaces"]) == 1
