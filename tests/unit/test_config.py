"""Settings: flag beats environment beats file, and what cannot be read is refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_persist
from sglang_persist import config
from sglang_persist.config import Size
from sglang_persist.errors import SettingError

HALF, TWENTIETH = Size(share=0.5), Size(share=0.05)
DEFAULTS = {
    "dir": None, "interval": 300.0, "restore": "wait", "restore_timeout": 60.0, "shutdown_timeout": 60.0,
    "max_bytes": HALF, "min_free": TWENTIETH, "compression": "auto", "hottest": 1.0, "on_flush": "keep",
}  # fmt: skip

GOOD = [
    ("dir", "/data/kv", Path("/data/kv")),
    ("dir", "relative/kv", Path.cwd() / "relative/kv"),
    ("dir", "~/kv", Path.home() / "kv"),
    ("dir", "/with space/ü", Path("/with space/ü")),
    ("interval", "0", 0.0),
    ("interval", "0.25", 0.25),
    ("interval", " 7 ", 7.0),
    ("interval", "1e3", 1000.0),
    ("restore", "background", "background"),
    ("restore", "OFF", "off"),
    ("restore_timeout", "0", 0.0),
    ("shutdown_timeout", "1.5", 1.5),
    ("max_bytes", "200GiB", Size(bytes=200 << 30)),
    ("max_bytes", "512MiB", Size(bytes=512 << 20)),
    ("max_bytes", "12.5%", Size(share=0.125)),
    ("min_free", "0", Size(bytes=0)),
    ("min_free", "0%", Size(share=0.0)),
    ("compression", "zstd", "zstd"),
    ("compression", "raw", "raw"),
    ("threads", "3", 3),
    ("min_tokens", "0", 0),
    ("min_tokens", "512", 512),
    ("hottest", "25%", 0.25),
    ("hottest", "25", 0.25),
    ("hottest", "0.5", 0.005),
    ("on_flush", "drop", "drop"),
]

NO_SIZES = ("", "-1", "many", "12 parsecs", "101%", "-5%", "nan%", "inf", "1e9", "%", "GiB", "1.5.5GiB")
BAD = [
    ("dir", " "),
    ("dir", "a\0b"),
    ("dir", "~nobody-of-this-name/kv"),
    *[(k, v) for k in ("interval", "restore_timeout", "shutdown_timeout") for v in ("-1", "soon", "nan", "inf", "5s")],
    *[("restore", v) for v in ("yes", "wait,off", "backgroun")],
    *[(k, v) for k in ("max_bytes", "min_free") for v in NO_SIZES if v],
    ("max_bytes", "9" * 400),
    *[("compression", v) for v in ("gzip", "zstd:3", "none")],
    *[("threads", v) for v in ("0", "-1", "2.5", "all")],
    *[("min_tokens", v) for v in ("-1", "1.5", "some")],
    *[("hottest", v) for v in ("0", "0%", "101", "-3%", "nan", "half")],
    *[("on_flush", v) for v in ("delete", "yes")],
]


def variable(key: str) -> str:
    return "SGLANG_PERSIST_" + key.upper()


def test_everything_has_a_default_and_persistence_is_off():
    found = config.load({})
    assert {k: getattr(found, k) for k in DEFAULTS} == DEFAULTS
    assert found.threads == config.auto_threads() >= 1


def test_the_contract_names_every_flag():
    expected = {
        "dir", "interval", "restore", "restore_timeout", "shutdown_timeout", "max_bytes", "min_free", "compression",
        "threads", "min_tokens", "hottest", "on_flush", "config",
    }  # fmt: skip
    assert set(config.BY_KEY) == expected
    assert {f.name for f in config.BY_KEY.values()} == {"--persist-" + k.replace("_", "-") for k in expected}
    assert {f.variable for f in config.BY_KEY.values()} == {variable(k) for k in expected}


@pytest.mark.parametrize(("key", "text", "value"), GOOD, ids=lambda v: repr(v)[:24])
def test_good_values_are_read(key, text, value):
    assert getattr(config.load({variable(key): text}), key) == value


@pytest.mark.parametrize(("key", "text"), BAD, ids=lambda v: repr(v)[:24])
def test_a_bad_value_is_refused_in_one_line_with_flag_value_and_what_is_allowed(key, text):
    with pytest.raises(SettingError) as caught:
        config.load({variable(key): text})
    line = str(caught.value)
    assert "--persist-" + key.replace("_", "-") in line
    assert variable(key) in line
    assert repr(text) in line
    assert config.BY_KEY[key].allowed in line
    assert "\n" not in line
    assert caught.value.exit_code == 2


def test_auto_is_what_it_says():
    found = config.load({variable("threads"): "auto", variable("min_tokens"): "AUTO"})
    assert found == config.load({})


def test_an_empty_variable_is_an_unset_one():
    assert config.load({variable(k): "" for k in config.BY_KEY}) == config.load({})


# ------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("1048576", 1 << 20), ("7b", 7), ("1kB", 1000), ("1KiB", 1024), ("1.5MiB", 3 << 19),
        ("2MB", 2 * 10**6), ("3 gib", 3 << 30), ("1GB", 10**9), ("1TiB", 1 << 40), ("1tb", 10**12), (" 5 ", 5),
    ],
)  # fmt: skip
def test_sizes_are_read(text, count):
    assert config.parse_size(text) == Size(bytes=count)
    assert config.parse_size(text).of(10**15) == count


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r".*"):
        config.parse_size(text)


def test_a_share_is_of_the_file_systems_size():
    assert config.parse_size("50%").of(1001) == 500
    assert config.parse_size("0%").of(1000) == 0
    assert config.parse_size("100%").of(1000) == 1000


@given(st.text(max_size=12))
def test_a_size_is_read_or_refused_never_anything_else(text):
    try:
        found = config.parse_size(text)
    except ValueError:
        return
    assert found.of(1 << 40) >= 0


# ------------------------------------------------------------------------------------------------------- a file


def write(path: Path, **content) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        path.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in content.items()))
    return path


@pytest.fixture(params=[".toml", ".json"])
def file(request, tmp_path):
    return tmp_path / f"persist{request.param}"


def test_a_file_sets_every_key(file):
    write(file, dir="/data/kv", interval=2.5, restore="off", restore_timeout=1, shutdown_timeout="9", max_bytes="1GiB",
          min_free="1%", compression="raw", threads=2, min_tokens=7, hottest="30%", on_flush="drop")  # fmt: skip
    found = config.load({variable("config"): str(file)})
    assert found == config.Settings(
        dir=Path("/data/kv"), interval=2.5, restore="off", restore_timeout=1.0, shutdown_timeout=9.0,
        max_bytes=Size(bytes=1 << 30), min_free=Size(share=0.01), compression="raw", threads=2, min_tokens=7,
        hottest=0.3, on_flush="drop",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["restore_timeout", "restore-timeout", "persist-restore-timeout"])
def test_keys_of_a_file_may_be_written_like_the_flag(file, name):
    write(file, **{name: 5})
    assert config.load({variable("config"): str(file)}).restore_timeout == 5.0


def test_the_environment_beats_the_file_and_the_file_the_default(file):
    write(file, interval=5, threads=1)
    found = config.load({variable("config"): str(file), variable("interval"): "6"})
    assert (found.interval, found.threads, found.restore) == (6.0, 1, "wait")


@pytest.mark.parametrize(("name", "value"), [("intervall", 5), ("config", "x.toml"), ("", 1), ("persist_", 1)])
def test_an_unknown_key_of_a_file_is_refused_with_the_known_ones(file, name, value):
    json_text, toml_text = json.dumps({name: value}), f"{json.dumps(name)} = {json.dumps(value)}"
    file.write_text(json_text if file.suffix == ".json" else toml_text)
    with pytest.raises(SettingError, match="is not a setting; allowed: dir, interval, restore") as caught:
        config.load({variable("config"): str(file)})
    assert repr(name) in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("interval", "soon"), ("interval", True), ("dir", ["a"]), ("threads", 0)])
def test_a_bad_value_in_a_file_is_refused_with_file_key_value_and_what_is_allowed(file, key, value):
    write(file, **{key: value})
    with pytest.raises(SettingError) as caught:
        config.load({variable("config"): str(file)})
    line = str(caught.value)
    shown = str(value) if isinstance(value, (int, str)) else repr(value)
    assert all(part in line for part in (str(file), key, shown, config.BY_KEY[key].allowed))
    assert "\n" not in line


@pytest.mark.parametrize("content", [b"{", b"interval == 5", b"\xff\xfe", b"[1, 2]", b"interval = 2020-01-01"])
def test_a_file_that_cannot_be_read_is_refused_with_its_name(file, content):
    file.write_bytes(content)
    with pytest.raises(SettingError) as caught:
        config.load({variable("config"): str(file)})
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_with_its_name(tmp_path):
    with pytest.raises(SettingError, match=r"--persist-config .*nowhere\.toml: No such file"):
        config.load({variable("config"): str(tmp_path / "nowhere.toml")})


# --------------------------------------------------------------------------------------------------- configure


@pytest.fixture
def environment(monkeypatch):
    """What of os.environ is ours, put back afterwards."""
    for key in config.BY_KEY:
        monkeypatch.setenv(variable(key), "")
        monkeypatch.delenv(variable(key))
    return lambda: {k: v for k, v in os.environ.items() if k.startswith(config.PREFIX)}


def test_configure_is_what_later_processes_read(environment):
    sglang_persist.configure(dir="/data/kv", interval=2.5, threads=3, max_bytes="1GiB", on_flush="drop")
    found = config.load()
    assert (found.dir, found.interval, found.threads) == (Path("/data/kv"), 2.5, 3)
    assert (found.max_bytes, found.on_flush) == (Size(bytes=1 << 30), "drop")
    assert set(environment()) == {variable(k) for k in ("dir", "interval", "threads", "max_bytes", "on_flush")}


def test_configure_takes_a_path(environment, tmp_path):
    sglang_persist.configure(dir=tmp_path)
    assert config.load().dir == tmp_path


def test_none_takes_a_key_back(environment):
    sglang_persist.configure(dir="/data/kv", interval=5)
    sglang_persist.configure(dir=None, threads=None)
    assert environment() == {variable("interval"): "5"}


@pytest.mark.parametrize(
    "bad", [{"interval": "soon"}, {"directory": "/x"}, {"threads": 0}, {"dir": "a\0b"}, {"config": "/nowhere.toml"}]
)
def test_a_bad_call_raises_and_leaves_the_environment_as_it_was(environment, bad):
    sglang_persist.configure(dir="/data/kv")
    before = environment()
    with pytest.raises(SettingError):
        sglang_persist.configure(restore="off", **bad)
    assert environment() == before
