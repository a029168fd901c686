"""Settings: one frozen object from flags, environment and one file, in that order of precedence.

`FLAGS` is the one list of them: the engine's parser, the README's table and the error messages come from it. A flag is
handed to the engine's other processes as its environment variable.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_persist.errors import SettingError

PREFIX = "SGLANG_PERSIST_"
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """So many bytes, or a share of a file system's size."""

    bytes: int | None = None
    share: float | None = None

    def of(self, total: int) -> int:
        return self.bytes if self.bytes is not None else int(self.share * total)


def parse_size(text: str) -> Size:
    """`200GiB`, `512MB`, `1048576` or `50%`. Raises ValueError."""
    text = text.strip()
    if text.endswith("%"):
        share = float(text[:-1])
        if not 0 <= share <= 100:
            raise ValueError(text)
        return Size(share=share / 100)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError(text)
    return Size(bytes=int(float(match[1]) * _UNITS[match[2].lower()]))


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _count(least: int, auto: int | None) -> Callable[[str], int | None]:
    def parse(text: str) -> int | None:
        if text.strip().lower() == "auto":
            return auto
        value = int(text)
        if value < least:
            raise ValueError(text)
        return value

    return parse


def _percent(text: str) -> float:
    value = float(text.strip().removesuffix("%"))
    if not 0 < value <= 100:
        raise ValueError(text)
    return value / 100


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in names:
            raise ValueError(text)
        return text.strip().lower()

    return parse


def _directory(text: str) -> Path:
    if not text.strip() or "\0" in text:
        raise ValueError(text)
    return Path(text).expanduser().absolute()


@dataclass(frozen=True)
class Flag:
    key: str
    metavar: str
    default: str | None
    allowed: str
    meaning: str
    parse: Callable[[str], Any]

    @property
    def name(self) -> str:
        return "--persist-" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()


FLAGS = (
    Flag("dir", "DIR", None, "a path", "The store's root, created 0700. Persistence is off without it.", _directory),
    Flag("interval", "S", "300", "seconds >= 0, fractions too",
         "Seconds between snapshots; 0: only at shutdown and on demand.", _seconds),
    Flag("restore", "MODE", "wait", "wait, background or off",
         "wait: before the first request, up to the timeout; background; off.", _one_of("wait", "background", "off")),
    Flag("restore_timeout", "S", "60", "seconds >= 0", "How long `wait` may hold back the first request.", _seconds),
    Flag("shutdown_timeout", "S", "60", "seconds >= 0",
         "How long the last snapshot may take; what is complete by then counts.", _seconds),
    Flag("max_bytes", "SIZE", "50%", "a size such as 200GiB, or a share such as 50%",
         "Budget of the whole store, all ranks.", parse_size),
    Flag("min_free", "SIZE", "5%", "a size such as 10GiB, or a share such as 5%",
         "Free space of the file system that is never used.", parse_size),
    Flag("compression", "C", "auto", "auto, zstd or raw",
         "auto: lossless, by element type; zstd: plain; raw: none.", _one_of("auto", "zstd", "raw")),
    Flag("threads", "N", "auto", "auto, or a whole number >= 1", "Worker threads per rank.", _count(1, None)),
    Flag("min_tokens", "N", "auto", "auto, or a whole number >= 0",
         "Shortest prefix worth saving and restoring; auto: break-even; 0: everything.", _count(0, None)),
    Flag("hottest", "P%", "100", "a share above 0 and up to 100, such as 25%",
         "Share of the tree to save, most recently used paths first.", _percent),
    Flag("on_flush", "W", "keep", "keep or drop", "What a cache flush means for the store.", _one_of("keep", "drop")),
)  # fmt: skip
CONFIG = Flag("config", "FILE", None, "a TOML or JSON file", "The same keys in one TOML or JSON file.", _directory)
BY_KEY = {flag.key: flag for flag in (*FLAGS, CONFIG)}


@dataclass(frozen=True)
class Settings:
    """What the operator asked for. Durations in seconds."""

    dir: Path | None
    interval: float
    restore: str
    restore_timeout: float
    shutdown_timeout: float
    max_bytes: Size
    min_free: Size
    compression: str
    threads: int
    #: None: those that load faster than they are computed.
    min_tokens: int | None
    hottest: float
    on_flush: str


def auto_threads() -> int:
    """Few: the scheduler spins on one core, and the forward pass wants the others."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings of this process. Raises SettingError, naming the flag or variable, the value and what is allowed."""
    environ = os.environ if environ is None else environ
    file = environ.get(CONFIG.variable)
    given = _read_file(_parse(CONFIG, file, f"{CONFIG.name} ({CONFIG.variable})")) if file else {}
    values = {}
    for flag in FLAGS:
        text, place = flag.default, flag.name
        if flag.key in given:
            text, place = given[flag.key], f"{file}: {flag.key}"
        if environ.get(flag.variable):
            text, place = environ[flag.variable], f"{flag.name} ({flag.variable})"
        values[flag.key] = None if text is None else _parse(flag, text, place)
    values["threads"] = values["threads"] or auto_threads()
    return Settings(**values)


def _parse(flag: Flag, text: str, place: str) -> Any:
    try:
        return flag.parse(text)
    except (ValueError, OverflowError, RuntimeError):  # the last: no home directory for `~name`
        raise SettingError(f"{place}: {text!r} cannot be read; allowed: {flag.allowed}") from None


def _read_file(path: Path) -> dict[str, str]:
    """The file's keys, as the text a flag would have. Keys are written with `-` or `_`, with or without `persist`."""
    place = f"{CONFIG.name} {path}"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingError(f"{place}: {error.strerror or error}") from None
    try:
        found = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except ValueError as error:
        raise SettingError(f"{place}: {error}") from None
    out = {}
    for name, value in found.items() if isinstance(found, dict) else [(None, None)]:
        key = str(name).replace("-", "_").removeprefix("persist_")
        known = BY_KEY.get(key)
        if known is None or known is CONFIG:
            raise SettingError(f"{place}: {name!r} is not a setting; allowed: {', '.join(f.key for f in FLAGS)}")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise SettingError(f"{place}: {name}: {value!r} cannot be read; allowed: {known.allowed}")
        out[key] = str(value)
    return out


def configure(**settings: Any) -> None:
    """Turn persistence on for an `sgl.Engine` that is made afterwards: `configure(dir="/data/kv", interval=60)`.

    Keys are the flags' names without `--persist-`, with underscores. Raises SettingError. `None` takes a key back.
    """
    environ = dict(os.environ)
    for key, value in settings.items():
        if key not in BY_KEY:
            raise SettingError(f"configure: {key!r} is not a setting; allowed: {', '.join(BY_KEY)}")
        if value is None:
            environ.pop(BY_KEY[key].variable, None)
        else:
            environ[BY_KEY[key].variable] = str(value)
    load(environ)
    for key in settings:
        variable = BY_KEY[key].variable
        if variable in environ:
            os.environ[variable] = environ[variable]
        else:
            os.environ.pop(variable, None)
