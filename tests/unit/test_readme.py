"""What the README says of flags and reasons is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import sglang_persist
from sglang_persist import config

ROOT = Path(sglang_persist.__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_table_of_flags_is_that_of_the_parser():
    table = README.split("<!-- flags: begin")[1].split("<!-- flags: end")[0]
    lines = [line for line in table.splitlines() if "--persist-" in line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows == [
        [f"`{f.name} {f.metavar}`", f"`{f.variable}`", f.default or "-", f.meaning] for f in config.BY_KEY.values()
    ]


def test_every_reason_in_the_code_is_documented():
    code = "".join(p.read_text() for p in (ROOT / "sglang_persist").rglob("*.py"))
    named = set(re.findall(r'Unsupported\(\s*"(\w+)"', code)) | set(re.findall(r'_cold\("(\w+)"', code))
    plans = "".join(p.read_text() for p in (ROOT / "sglang_persist" / "plan").glob("*.py"))
    named |= set(re.findall(r'(?:reason|return|refused\[)\s*=?\s*"(\w+)"', plans))
    assert len(named) > 12
    assert sorted(n for n in named if f"`{n}`" not in README) == []
