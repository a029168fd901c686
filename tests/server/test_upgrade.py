"""A store written under one supported release of SGLang restarts another, in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest
import serving
from checks import assert_sound, persist, serve, status

pytestmark = pytest.mark.server
PYTHONS = {"0.5.23": serving.ROOT / ".venv/bin/python", "0.5.22": serving.ROOT / ".venv-0.5.22/bin/python"}


@pytest.mark.skipif(
    not all(p.exists() for p in PYTHONS.values()), reason="needs both: scripts/test, and scripts/test --sglang 0.5.22"
)
@pytest.mark.parametrize(("old", "new"), [("0.5.22", "0.5.23"), ("0.5.23", "0.5.22")])
def test_upgrade_and_downgrade_restart_warm(tmp_path: Path, old, new):
    llama, store = serving.model("llama"), tmp_path / "store"
    prompts = serving.prompts(3, chars=5000, shared=2600)
    with serving.Server(llama, *persist(store), python=PYTHONS[old]) as server:
        serve(server, prompts)
        warm = serve(server, prompts)
        server.stop()
    assert_sound(store)
    with serving.Server(llama, *persist(store), python=PYTHONS[new]) as server:
        restored = status(server)["restore"]
        assert restored["tokens_restored"] == restored["tokens_total"]
        first = serve(server, prompts)
    assert first.cached >= 0.99 * warm.cached > 0
    assert first.ids == warm.ids
