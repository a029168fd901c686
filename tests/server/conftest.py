"""What several files of server tests start from: a start takes most of a test's time."""

from __future__ import annotations

import pytest
import serving
from checks import persist, serve, snapshot, status


@pytest.fixture(scope="session")
def llama():
    return serving.model("llama")


@pytest.fixture(scope="session")
def prompts():
    return serving.prompts(3, chars=5000, shared=2600)


@pytest.fixture(scope="session")
def killed(llama, prompts, tmp_path_factory):
    """(the store of a server that was killed after a snapshot on demand, the warm pass before it)."""
    store = tmp_path_factory.mktemp("killed") / "store"
    with serving.Server(llama, *persist(store)) as server:
        serve(server, prompts)
        warm = serve(server, prompts)
        assert status(server)["restore"]["why_cold"] == "no_snapshot"
        first = snapshot(server)
        assert first["new_tokens"] == first["tokens"] > warm.asked / 3
        again = snapshot(server)
        assert (again["generation"], again["new_tokens"], again["new_bytes"]) == (first["generation"], 0, 0)
        server.kill()
    return store, warm
