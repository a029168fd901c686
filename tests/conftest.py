"""Real SGLang on a machine without a GPU: what `scripts/serve-cpu` sets for servers is set here for this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("", "engine", "format", "server", "store")]
sys.path.insert(0, str(ROOT / "scripts" / "cpu_runtime"))
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
for name in [n for n in os.environ if n.startswith("SGLANG_PERSIST_") and n != "SGLANG_PERSIST_MODELS"]:
    del os.environ[name]

hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=60 * int(os.environ.get("FUZZ", "1")), print_blob=True
)
hypothesis.settings.load_profile("ci")
