"""Real servers and the two promises: nothing stored makes an output wrong, and nothing committed is lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

import pytest
import serving
from checks import assert_sound, assert_warm, cli, persist, serve, snapshot, status

pytestmark = pytest.mark.server

#: The suite runs few rounds of what is random; more of them: ROUNDS=5 scripts/test tests/server/test_never_wrong.py
ROUNDS = int(os.environ.get("ROUNDS", "2"))


def perturb(model: Path, tensor: str) -> None:
    """Change the values of one tensor in place: same names, sizes and times."""
    file = model / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        low, high = json.loads(f.read(length))[tensor]["data_offsets"]
        f.seek(8 + length + low)
        data = bytearray(f.read(high - low))
        data[1::2] = bytes(b ^ 0x80 for b in data[1::2])  # the sign of every bf16
        f.seek(8 + length + low)
        f.write(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_other_weights_under_the_same_name_never_meet_stored_kv(llama, prompts, killed, tmp_path):
    model, store = tmp_path / "model", shutil.copytree(killed[0], tmp_path / "store")
    shutil.copytree(llama, model)
    perturb(model, "model.layers.2.self_attn.v_proj.weight")
    with serving.Server(model, *persist(store)) as server:
        restored = status(server)["restore"]
        assert (restored["why_cold"], restored["tokens_restored"]) == ("model_changed", 0)
        first = server.generate(prompts[0], 12, return_logprob=True)
        assert first.cached_tokens == 0
        # What a cold server of this model says: the same one, emptied.
        server.post("/flush_cache")
        cold = server.generate(prompts[0], 12, return_logprob=True)
        assert (cold.cached_tokens, cold.ids) == (0, first.ids)
        assert cold.meta["output_token_logprobs"] == first.meta["output_token_logprobs"]
        assert cold.ids != killed[1].ids[0]
        assert snapshot(server)["new_tokens"] > 0
        server.kill()
    found = cli("inspect", store, "--json")
    assert len(found["namespaces"]) == 2, "what is stored of the other weights stays"


def test_salts_and_keys_never_see_each_other_and_each_sees_its_own(llama, tmp_path):
    store = tmp_path / "store"
    (prompt,) = serving.prompts(1, chars=3000, shared=0)
    spaces = [
        {}, {"cache_salt": "a"}, {"cache_salt": "ab"}, {"extra_key": "a"}, {"extra_key": "ab", "cache_salt": "c"},
        {"extra_key": "a", "cache_salt": "bc"},
    ]  # fmt: skip
    saved, new = spaces[1:], {"extra_key": "abc"}
    with serving.Server(llama, *persist(store)) as server:
        for space in saved:
            assert server.generate(prompt, 4, **space).cached_tokens == 0
        warm = [server.generate(prompt, 4, **space) for space in saved]
        server.stop()
        server.start()
        assert status(server)["restore"]["tokens_restored"] >= len(saved) * (warm[0].prompt_tokens - 1)
        for space in (new, spaces[0]):
            assert server.generate(prompt, 4, **space).cached_tokens == 0
        for space, before in zip(saved, warm, strict=True):
            answer = server.generate(prompt, 4, **space)
            assert answer.cached_tokens >= 0.99 * before.cached_tokens > 0
            assert answer.ids == before.ids


def test_damage_is_reported_and_never_changes_an_output(llama, prompts, killed, tmp_path):
    for seed in range(ROUNDS):
        store, warm = shutil.copytree(killed[0], tmp_path / f"store-{seed}"), killed[1]
        rng = random.Random(seed)
        files = sorted(p for p in store.rglob("*.kv?"))
        # The manifest as a whole in one round, records and indexes in the others.
        damaged = [files[0]] if seed == 1 else rng.sample(files, 1 + rng.randrange(len(files)))
        for path in damaged:
            data = bytearray(path.read_bytes())
            if rng.random() < 0.3:
                del data[rng.randrange(len(data)) :]
            else:
                for _ in range(3):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        found = cli("verify", store, "--json", code=1)
        reported = {finding["path"] for finding in found["findings"]}
        assert {str(p.relative_to(store)) for p in damaged} <= reported
        with serving.Server(llama, *persist(store)) as server:
            answers = serve(server, prompts)
            assert answers.ids == warm.ids, (seed, damaged)
            assert serve(server, prompts).cached == warm.cached
            assert snapshot(server)["tokens"] > 0


def test_kill_at_any_moment_under_traffic_leaves_a_store_that_is_sound_and_warm(llama, prompts, tmp_path):
    store = tmp_path / "store"
    flags = ["--persist-dir", store, "--persist-interval", 1, "--persist-min-free", 0]
    rng = random.Random(7)
    server = serving.Server(llama, *flags)
    with server:
        serve(server, prompts)
        warm = serve(server, prompts)
        snapshot(server)
        for number in range(ROUNDS):
            stop = threading.Event()
            traffic = threading.Thread(target=_traffic, args=(server, stop, 1000 * number))
            traffic.start()
            begun = status(server)["snapshot"]["generation"]
            while status(server)["snapshot"]["generation"] < begun + 2:
                time.sleep(0.05)
            time.sleep(rng.random())
            server.kill()
            stop.set()
            traffic.join()
            assert_sound(store)
            server.start()
            restored = status(server)["restore"]
            assert restored["tokens_restored"] == restored["tokens_total"] > 0
            assert_warm(serve(server, prompts), warm)


def _traffic(server, stop: threading.Event, offset: int) -> None:
    with contextlib.suppress(OSError):  # the server is killed meanwhile
        while not stop.is_set():
            offset += 700
            server.generate(serving.prose()[offset : offset + 1500], 4)


def test_budget_holds_and_the_hottest_stay(llama, tmp_path):
    _crowd(llama, tmp_path / "store", 2 << 20, "--persist-max-bytes", "2MiB", "--persist-min-free", 0)


def test_a_small_file_system_is_never_filled(llama, tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m,mode=0777", "tmpfs", volume], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        _crowd(llama, volume, 6 << 20)  # the default budget: half of it
    finally:
        subprocess.run(["umount", "--lazy", volume], check=True)


def _crowd(llama, directory: Path, budget: int, *flags) -> None:
    """More prompts than the store has room for, a snapshot after each few; then a restart."""
    largest, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            size = 0
            for path in directory.rglob("*"):
                with contextlib.suppress(OSError):
                    size += path.stat().st_size if path.is_file() else 0
            largest[0] = max(largest[0], size)

    watching = threading.Thread(target=watch)
    watching.start()
    count = 3 + budget // (1 << 20) * 3
    texts = serving.prompts(count, chars=3000, shared=600)
    try:
        with serving.Server(llama, "--persist-dir", directory, "--persist-interval", 0, *flags) as server:
            for i, text in enumerate(texts):
                server.generate(text, 1)
                if i % 3 == 2:
                    snapshot(server)
            warm = server.generate(texts[-1], 8)
            state = status(server)
            assert state["snapshot"]["failures"] == 0
            assert 0 < state["snapshot"]["last_tokens"] < 1000 * count
            server.stop()
            assert_sound(directory)
            server.start()
            again = server.generate(texts[-1], 8)
            assert again.cached_tokens >= 0.99 * warm.cached_tokens > 0
            assert again.ids == warm.ids
            assert server.generate(texts[0], 1).cached_tokens < 600, "the coldest went first, but for what all share"
    finally:
        done.set()
        watching.join()
    assert budget / 3 < largest[0] <= budget * 1.1


def test_weights_that_change_while_serving_close_the_namespace(llama, prompts, tmp_path):
    store, other = tmp_path / "store", serving.model("llama", 1)
    with serving.Server(llama, *persist(store)) as server:
        serve(server, prompts[:2])
        warm = serve(server, prompts[:2])
        # (Releasing KV memory needs a GPU in stock SGLang: tests/engine/test_hooks.py has it.)
        server.post("/flush_cache")
        assert serve(server, prompts[:1]).cached == 0
        assert cli("inspect", store, "--json")["namespaces"] == [], "an emptied tree is not saved by itself"
        serve(server, prompts[:2])
        saved = snapshot(server)
        assert saved["tokens"] > 0
        # The caller keeps the cache: what is in the tree now is of both weights.
        done = server.post("/update_weights_from_disk", {"model_path": str(other), "flush_cache": False})
        assert done["success"], done
        serve(server, prompts)
        assert "why_off=weights_changed" in cli("snapshot", "--url", server.url, code=9)
        assert cli("status", "--url", server.url, "--json", code=9)
        server.stop()
        assert_sound(store)
        (namespace,) = cli("inspect", store, "--json")["namespaces"]
        assert namespace["generations"][0]["id"] == saved["generation"]
        server.start()
        assert_warm(serve(server, prompts[:2]), warm)


def test_a_rolling_upgrade_ends_warm(llama, prompts, killed, tmp_path):
    """The new server starts while the old one still runs; the one exception to one server at a time."""
    store, warm = shutil.copytree(killed[0], tmp_path / "store"), killed[1]
    old = serving.Server(llama, *persist(store))
    with old, serving.Server(llama, *persist(store)) as new:
        restored = status(new)["restore"]
        assert restored["tokens_restored"] == restored["tokens_total"] > 0
        assert_warm(serve(new, prompts), warm)
        assert "another process writes here" in cli("snapshot", "--url", new.url, code=10)
        late = serving.prompts(1, chars=2500, shared=0, offset=30_000)
        serve(old, late)
        last_warm = serve(old, late)
        old.stop()
        written = cli("inspect", store, "--json")["namespaces"][0]["generations"][0]
        serve(new, late)
        mine = snapshot(new)
        assert mine["generation"] > written["id"]
        assert mine["new_tokens"] < 100, "what the old one wrote last is not written again"
        new.kill()
        assert_sound(store)
        new.start()
        assert_warm(serve(new, late), last_warm)
        assert_warm(serve(new, prompts), warm)
