"""Our lines in the engine's log, each marked as ours: its format does not show the logger's name."""

from __future__ import annotations

import logging


class _Marked(logging.LoggerAdapter):
    def process(self, msg, kwargs):
        return f"sglang_persist: {msg}", kwargs


logger = _Marked(logging.getLogger("sglang_persist"), {})
