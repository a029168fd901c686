"""Other models than plain ones, and more ranks than one, on real servers."""

from __future__ import annotations

import signal

import pytest
import serving
from checks import NEW_TOKENS, assert_sound, assert_warm, cli, persist, serve, snapshot, status

pytestmark = pytest.mark.server

#: What stopping a server of the small model may take, its last snapshot included.
STOP_SECONDS = 20


def warm_pass(server: serving.Server, prompts: list[str]):
    serve(server, prompts)
    return serve(server, prompts)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("gemma3", ()), ("deepseek", ("--page-size", 16)), ("qwen3", ()), ("llama", ("--chunked-prefill-size", 512)),
        ("llama", ("--tp-size", 2, "--attn-cp-size", 2)),
    ],
    ids=["windows", "latent", "qwen3", "chunks", "CP"],
)
def test_every_kind_of_model_restarts_warm(prompts, tmp_path, kind, flags):
    with serving.Server(serving.model(kind), *persist(tmp_path / "store", *flags)) as server:
        warm = warm_pass(server, prompts)
        server.stop()
        assert_sound(tmp_path / "store")
        server.start()
        assert_warm(serve(server, prompts), warm)
        assert status(server)["restore"]["nodes_refused"] == {}


def test_tensor_parallelism_survives_damage_and_another_size(llama, prompts, tmp_path):
    """TP2, restarted, with a lost segment of one rank, as TP1, and as TP2 again."""
    store = tmp_path / "store"
    # Two ranks add in another order than one, and in 16 bits that alone changes outputs of a random model.
    exact = ("--dtype", "float32")
    two = serving.Server(llama, *persist(store, "--tp-size", 2, *exact))
    with two:
        warm = warm_pass(two, prompts)
        taken = snapshot(two)
        assert taken["new_bytes"] == sum(p.stat().st_size for p in store.rglob("*.kv[ms]"))
        two.stop(group=True)
        two.start()
        assert_warm(serve(two, prompts), warm)
        assert two.stop() < STOP_SECONDS
    with serving.Server(llama, *persist(store, *exact)) as one:
        found = status(one)["restore"]
        assert found["tokens_restored"] > 0.9 * found["tokens_total"] > 0, found
        again = serve(one, prompts)
        assert again.cached >= 0.99 * warm.cached
        one.post("/flush_cache")
        cold = serve(one, prompts)
        assert again.ids == cold.ids == warm.ids
        one.stop()
    with two:
        again = serve(two, prompts)
        assert again.cached >= 0.99 * warm.cached
        assert again.ids == warm.ids
        two.stop()
        newest = max(store.rglob("*-tp1/*.kvs"), key=lambda p: p.stat().st_size)
        newest.unlink()
        two.start(timeout=120)  # the ranks agree within their time, and do not wait for what is gone
        assert serve(two, prompts).ids == warm.ids
        two.stop()


def test_pipeline_parallelism_ends_in_time_and_restores_into_one(llama, prompts, tmp_path):
    store = tmp_path / "store"
    with serving.Server(llama, *persist(store, "--pp-size", 2)) as server:
        warm = warm_pass(server, prompts)
        assert server.stop() < STOP_SECONDS
        assert "Schedulers still alive" not in server.tail(100_000)
        server.start()
        assert_warm(serve(server, prompts), warm)
        extra = warm_pass(server, serving.prompts(1, chars=1500, shared=0, offset=30_000))
        assert server.stop(signal.SIGINT, group=True) < STOP_SECONDS
        assert_sound(store)
    with serving.Server(llama, *persist(store)) as server:
        assert_warm(serve(server, prompts), warm)
        assert_warm(serve(server, serving.prompts(1, chars=1500, shared=0, offset=30_000)), extra)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("llama", ("--dp-size", 2)), ("deepseek", ("--tp-size", 2, "--attn-dp-size", 2))],
    ids=["DP", "attention DP"],
)
def test_each_replica_is_warm_and_one_takes_over_from_two(prompts, tmp_path, kind, flags):
    store, model = tmp_path / "store", serving.model(kind)
    own = [prompts[:2], prompts[2:]]
    exact = ("--dtype", "float32")  # one rank adds in another order than two

    def serve_each(server):
        return [
            [server.generate(p, NEW_TOKENS, routed_dp_rank=rank) for p in of_rank] for rank, of_rank in enumerate(own)
        ]

    def cached(answers):
        return [sum(a.cached_tokens for a in of_rank) for of_rank in answers]

    with serving.Server(model, *persist(store, *flags, *exact)) as server:
        serve_each(server)
        warm = serve_each(server)
        assert len(cli("snapshot", "--url", server.url, "--json")["ranks"]) == 2
        assert server.stop(group=True) < STOP_SECONDS
        server.start()
        again = serve_each(server)
        assert all(a >= 0.99 * b > 0 for a, b in zip(cached(again), cached(warm), strict=True))
        assert [[a.ids for a in of] for of in again] == [[a.ids for a in of] for of in warm]
        server.stop()
    with serving.Server(model, *persist(store, *exact)) as server:
        found = serve(server, prompts)
        assert found.cached >= 0.99 * sum(cached(warm))
        assert found.ids == [a.ids for of in warm for a in of]


def test_what_hicache_has_in_host_memory_alone_is_counted(llama, tmp_path):
    """Nodes that it has in both places are saved and restored like all others."""
    hicache = (
        *("--enable-hierarchical-cache", "--hicache-ratio", 4, "--hicache-io-backend", "direct"),
        *("--hicache-mem-layout", "page_first_direct", "--page-size", 16),
    )
    env = {"SGLANG_PERSIST_HICACHE_ON_CPU": "1"}
    first, last = serving.prompts(4, chars=5000, shared=0), serving.prompts(1, chars=5000, shared=0, offset=40_000)
    with serving.Server(llama, *persist(tmp_path / "store", *hicache), env=env, max_tokens=4096) as server:
        assert status(server)["snapshot"]["not_saved"] == {}
        serve(server, first)
        warm = warm_pass(server, last)
        taken = snapshot(server)
        found = status(server)["snapshot"]["not_saved"]
        assert found["host_memory"] > 1000
        assert taken["tokens"] <= 4096
        server.stop()
        server.start()
        assert_warm(serve(server, last), warm)


def test_several_tokenizer_workers_save_at_the_end(llama, prompts, tmp_path):
    with serving.Server(llama, *persist(tmp_path / "store", "--tokenizer-worker-num", 2)) as server:
        warm = warm_pass(server, prompts)
        # The server is ready with its first worker. One that gets SIGTERM while it is starting does not end.
        server.wait_for("Application startup complete", 2)
        assert server.stop() < STOP_SECONDS
        server.start()
        assert_warm(serve(server, prompts), warm)
