"""A server that cannot persist still serves; one that hangs is still stopped in time; off is off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import checks
import psutil
import pytest
import serving
from checks import cli, persist, status

pytestmark = pytest.mark.server


def test_without_a_directory_nothing_of_ours_runs(llama):
    with serving.Server(llama) as server:
        assert "persist" not in server.get("/server_info")["internal_states"][0]
        for verb in ("status", "snapshot"):
            line = cli(verb, "--url", server.url, code=9)
            assert "why_off=no_directory" in line
            assert line.count("\n") == 1
        log = server.log.read_text()
        assert "sglang_persist:" not in log
        assert "Scheduler.run_event_loop" not in log.replace("Applied", "")


@pytest.mark.parametrize(
    ("flags", "variables", "named"),
    [
        (["--persist-interval", "soon"], {}, ["--persist-interval", "'soon'"]),
        ([], {"SGLANG_PERSIST_MAX_BYTES": "much"}, ["--persist-max-bytes", "SGLANG_PERSIST_MAX_BYTES", "'much'"]),
    ],
    ids=["flag", "variable"],
)
def test_bad_setting_stops_the_launch_naming_it(llama, tmp_path, flags, variables, named):
    command = [sys.executable, serving.RUNTIME / "launch.py", "--model-path", llama, "--persist-dir", tmp_path, *flags]
    env = os.environ | variables
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in [*named, "allowed:"])


def test_unusable_directory_is_said_once_and_a_hung_scheduler_is_not_waited_for(llama):
    flags = persist(Path("/proc/nope"), "--persist-shutdown-timeout", 4)
    with serving.Server(llama, *flags) as server:
        assert server.generate("hello world " * 50, 2).prompt_tokens > 50
        found = status(server)
        assert found["restore"]["why_cold"] == "store_unavailable"
        assert "/proc/nope" in found["snapshot"]["last_error"]
        line = cli("snapshot", "--url", server.url, code=10)
        assert "/proc/nope" in line
        assert server.log.read_text().count("no snapshot: store_unavailable") == 1
        assert server.generate("hello world " * 50, 2).cached_tokens > 50
        # Ctrl-C waits for the schedulers, but no longer than the shutdown timeout: `stop` fails if it is still there.
        launcher = psutil.Process(server.process.pid)
        schedulers = [p for p in launcher.children(recursive=True) if p.name().startswith("sglang::sched")]
        assert schedulers
        for process in schedulers:
            process.send_signal(signal.SIGSTOP)
        server.stop(signal.SIGINT, timeout=40)


ENGINE = """
import json, sys
import sglang, sglang_persist

def main():
    sglang_persist.configure(dir=sys.argv[2], interval=0, min_free=0)
    engine = sglang.Engine(model_path=sys.argv[1], device="cpu", max_total_tokens=16384)
    prompts = json.load(open(sys.argv[3]))
    answers = [engine.generate(p, {"temperature": 0, "max_new_tokens": 8}) for _ in range(2) for p in prompts]
    print("OUT", json.dumps([[a["output_ids"], a["meta_info"]["cached_tokens"]] for a in answers]))
    engine.shutdown()

if __name__ == "__main__":
    main()
"""


def test_engine_in_a_program_restarts_warm_after_shutdown(llama, tmp_path):
    (tmp_path / "run.py").write_text(ENGINE)
    (tmp_path / "prompts.json").write_text(json.dumps(serving.prompts(2, chars=4000, shared=2000)))
    command = [sys.executable, tmp_path / "run.py", llama, tmp_path / "store", tmp_path / "prompts.json"]
    env = dict(os.environ, SGLANG_USE_CPU_ENGINE="1", PYTHONPATH=str(serving.RUNTIME))
    runs = []
    for _ in range(2):
        done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-2000:]
        (line,) = (text for text in done.stdout.splitlines() if text.startswith("OUT "))
        runs.append(json.loads(line[4:]))
    first, second = runs
    warm = first[2:]
    assert [ids for ids, _ in second[:2]] == [ids for ids, _ in warm]
    assert sum(n for _, n in second[:2]) >= 0.99 * sum(n for _, n in warm) > 0
    checks.assert_sound(tmp_path / "store")
