"""SGLang's radix tree and KV cache, kept across restarts.

The server is configured with `--persist-dir` and its siblings; `configure` does the same before `sgl.Engine(...)`.
"""

__all__ = ["__version__", "configure"]
__version__ = "0.1.0"


def configure(**settings) -> None:
    """Turn persistence on for an `sgl.Engine` that is made afterwards. See `sglang_persist.config.configure`."""
    from sglang_persist import config

    config.configure(**settings)
