"""Real servers, stopped in every way they are stopped in, and started again: warm, and with the same outputs.

Random weights of standard deviation 0.1 make every output depend on the KV; `test_outputs_depend_on_the_stored_kv`
proves it for these prompts.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time

import checks
import pytest
import serving
from checks import assert_sound, assert_warm, cli, persist, serve, snapshot, status
from damage import zero_tokens

pytestmark = pytest.mark.server


def test_every_way_of_stopping_restarts_warm(llama, prompts, killed, tmp_path):
    store, warm = shutil.copytree(killed[0], tmp_path / "store"), killed[1]
    server = serving.Server(llama, *persist(store))
    ways = [
        ("SIGTERM to the launcher", lambda: server.stop()),
        ("SIGTERM to the group, as systemd sends it", lambda: server.stop(group=True)),
        ("Ctrl-C", lambda: server.stop(signal.SIGINT, group=True)),
    ]
    with server:
        for number, (name, stop) in enumerate(ways):
            restored = status(server)["restore"]
            assert restored["state"] == "done", name
            assert restored["tokens_restored"] == restored["tokens_total"] > 0, name
            assert_warm(serve(server, prompts), warm)
            # New in every round, so that every way has something to save.
            extra = serving.prompts(1, chars=1500, shared=0, offset=20_000 + 2_000 * number)
            serve(server, extra)
            extra_warm = serve(server, extra)
            stop()
            assert_sound(store)
            server.start()
            assert_warm(serve(server, extra), extra_warm)
        assert_warm(serve(server, prompts), warm)
        generations = cli("inspect", store, "--json")["namespaces"][0]["generations"]
        assert [g["reason"] for g in generations] == ["shutdown", "shutdown"]
        assert all(g["complete"] for g in generations)


def test_background_restore_serves_at_once_and_ends_warm(llama, prompts, killed, tmp_path):
    store, warm = shutil.copytree(killed[0], tmp_path / "store"), killed[1]
    with serving.Server(llama, *persist(store, "--persist-restore", "background")) as server:
        answer = server.generate(prompts[0], checks.NEW_TOKENS)
        assert answer.ids == warm.ids[0]
        while (found := status(server)["restore"])["state"] == "running":
            time.sleep(0.1)
        assert (found["state"], found["why_cold"]) == ("done", None)
        assert_warm(serve(server, prompts), warm)
        assert snapshot(server)["new_tokens"] <= checks.NEW_TOKENS
        server.stop()
        assert_sound(store)


def test_outputs_depend_on_the_stored_kv(llama, prompts, killed, tmp_path):
    """Without this the others prove nothing: zeroing the KV of 64 tokens in the store changes the outputs."""
    store, warm = shutil.copytree(killed[0], tmp_path / "store"), killed[1]
    assert zero_tokens(store, 64) == 64
    assert_sound(store)
    with serving.Server(llama, *persist(store)) as server:
        broken = serve(server, prompts)
    assert broken.cached >= 0.99 * warm.cached
    assert all(a != b for a, b in zip(broken.logprobs, warm.logprobs, strict=True))
    assert broken.ids != warm.ids


def test_interval_snapshot_while_a_request_runs_has_its_prefix(llama, prompts, tmp_path):
    store = tmp_path / "store"
    flags = ["--persist-dir", store, "--persist-interval", 0.5, "--persist-min-free", 0]
    with serving.Server(llama, *flags) as server:
        serve(server, prompts[:1])
        warm = serve(server, prompts[:1])
        running = threading.Thread(target=lambda: _give_up(server, prompts[1]))
        running.start()
        while not any(load.get("num_running_reqs") for load in server.get("/v1/loads").get("loads", [])):
            time.sleep(0.05)
        seen = time.time()
        while (status(server)["snapshot"]["last_success"] or 0) <= seen + 0.5:
            time.sleep(0.1)
        assert running.is_alive()
        server.kill()  # in the midst of the request
        running.join()
        assert_sound(store)
        server.start()
        assert_warm(serve(server, prompts[:1]), warm)
        answer = server.generate(prompts[1], 1)
        assert answer.cached_tokens >= 0.99 * (answer.prompt_tokens - 1)


def _give_up(server, prompt) -> None:
    with contextlib.suppress(OSError):  # the server is killed meanwhile
        server.generate(prompt, 3000)


def test_python_tree_core_and_larger_pages_restart_warm(llama, prompts, tmp_path):
    store = tmp_path / "store"
    env = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
    with serving.Server(llama, *persist(store), "--page-size", 16, env=env) as server:
        serve(server, prompts)
        warm = serve(server, prompts)
        server.stop()
        assert_sound(store)
        server.start()
        assert "Tree Core: UnifiedTreeCore" in server.log.read_text()
        assert_warm(serve(server, prompts), warm)
        assert cli("inspect", store, "--json")["namespaces"][0]["topology"]["page"] == 16
        # What was restored is stored already.
        assert snapshot(server)["new_tokens"] <= 3 * checks.NEW_TOKENS


def test_real_model_restarts_warm_in_little_space(tmp_path):
    """SmolLM2, prompts longer than the chunks they are prefilled in, and what the store may take."""
    store = tmp_path / "store"
    prompts = serving.prompts(2, chars=2600, shared=1400)
    with serving.Server(serving.model("smol"), *persist(store), "--chunked-prefill-size", 256) as server:
        serve(server, prompts)
        warm = serve(server, prompts)
        first = snapshot(server)
        second = snapshot(server)
        assert (second["generation"], second["new_tokens"], second["new_bytes"]) == (first["generation"], 0, 0)
        one_more = server.generate(serving.prompts(1, chars=600, shared=0, offset=40_000)[0], 1)
        third = snapshot(server)
        assert 0 < third["new_tokens"] <= one_more.prompt_tokens + 1
        per_token = first["new_bytes"] / first["new_tokens"]
        assert third["new_bytes"] <= 1.5 * per_token * third["new_tokens"]
        server.stop()
        found = cli("inspect", store, "--json")
        newest = found["namespaces"][0]["generations"][0]
        raw = newest["tokens"] * 30 * 2 * 3 * 64 * 2  # layers, K and V, heads, elements, bytes
        assert newest["raw_bytes"] == raw
        assert found["bytes"] <= 0.70 * raw
        assert found["files"] <= 16
        assert_sound(store)
        server.start()
        assert_warm(serve(server, prompts), warm)
