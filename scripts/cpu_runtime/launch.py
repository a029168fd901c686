"""Become `python -m sglang.launch_server ...` with the environment and the flags that a machine without a GPU needs.

Everything acts through the environment of that one process, so the installed packages stay as they are.
"""

import math
import os
import sys
from pathlib import Path

import models


def given(args: list[str], *flags: str) -> str | None:
    """The last value of a flag under any of its names, in both spellings; empty for a flag without a value."""
    value = None
    for i, arg in enumerate(args):
        name, equals, inline = arg.partition("=")
        if name in flags:
            value = inline if equals else "".join(args[i + 1 : i + 2])
    return value


def ranks(args: list[str]) -> int:
    sizes = [
        given(args, "--tp-size", "--tensor-parallel-size", "--tp"),
        given(args, "--pp-size", "--pipeline-parallel-size", "--pp"),
        # Groups of attention data parallelism, in its older spelling, are ranks of tensor parallelism.
        None if "--enable-dp-attention" in args else given(args, "--dp-size", "--data-parallel-size", "--dp"),
    ]
    return math.prod(int(size) for size in sizes if size and size.isdigit())


def bindings(n: int) -> str:
    """Cores for each of n ranks: equal shares, or one each in turn when there are more ranks than cores."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // n)
    groups = ([cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(n))
    return "|".join(",".join(map(str, group)) for group in groups)


def main(args: list[str]) -> None:
    env = os.environ
    env["SGLANG_USE_CPU_ENGINE"] = "1"
    # Without compiled modules each of the engine's processes spends a minute on its imports.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), env.get("PYTHONPATH")]))
    if (n := ranks(args)) > 1:
        env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bindings(n))
        # With a NCCL library to load, the engine's wrapper of it insists on a CUDA device.
        env.setdefault("SGLANG_NCCL_SO_PATH", "/nonexistent.so")
    if given(args, "--model-path", "--model", "--config", "--help", "-h") is None:
        args = ["--model-path", str(models.prepare("smol")), *args]
    if given(args, "--device") is None:
        args = ["--device", "cpu", *args]
    if given(args, "--max-total-tokens") is None:
        args = ["--max-total-tokens", "24576", *args]
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", "--enable-cache-report", *args])


if __name__ == "__main__":
    main(sys.argv[1:])
