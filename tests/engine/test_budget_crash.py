"""A snapshot that has to make room is cut short, or refused by the file system, at each of its calls."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path
from types import SimpleNamespace

import churn
import flow
import pytest
import torch
from store.simfs import AFTERMATHS, GROWING, Crash, SimFs

from sglang_persist.errors import FormatError, StoreError, StoreFull, StoreUnavailable
from sglang_persist.fs import REAL
from sglang_persist.store import verify

BUDGET = 60_000
USING = churn.budget(BUDGET)


@pytest.fixture
def pressed(tmp_path, monkeypatch):
    """A full store in each of whose segments one prompt has become cold, and new prompts that need the room: their
    snapshot cuts the generation down, rewrites segments, writes new ones, commits and retires."""
    # Equal attempts write equal bytes under equal names.
    names = [itertools.count()]
    monkeypatch.setattr(
        "sglang_persist.store.writer.secrets.token_bytes", lambda size: next(names[0]).to_bytes(size, "big")
    )
    monkeypatch.setattr("sglang_persist.keeper.time.time", lambda: 1.7e9)
    torch.manual_seed(3)
    c = churn.Churn(3, head=0, length=8, size=512)
    origin = SimFs(tmp_path / "origin")
    origin.root.mkdir()
    at = flow.home(origin.root, origin)
    prompts = [c.serve()]
    flow.snapshot(c.engine, at, using=USING)
    prompts += [c.serve() for _ in range(19)]
    flow.snapshot(c.engine, at, using=USING)
    at.close()
    for tokens in prompts[1::2]:
        c.serve(tokens)
    hottest = c.prompts[-1]
    for _ in range(6):
        c.serve()

    def attempt(root: Path, sim: SimFs | None = None):
        """Another process on a copy of that store: (its file system, its home)."""
        names[0] = itertools.count(1000)
        sim = sim or origin.clone(root)
        return sim, flow.home(sim.root, sim)

    def again(home, using=USING):
        names[0] = itertools.count(2000)
        return flow.snapshot(c.engine, home, using=using)

    return SimpleNamespace(c=c, hottest=hottest, newest=c.prompts[-1], attempt=attempt, again=again, path=tmp_path)


def held(root: Path, p) -> tuple[int, int]:
    """Of the prompt that was the hottest among the stored ones, and of the newest, what a restart restores."""
    e, at, result = flow.restart(root, size=512)
    at.close()
    assert not result.refused
    return e.match(p.c.key(p.hottest)), e.match(p.c.key(p.newest))


def everything(root: Path) -> frozenset:
    return frozenset((p.relative_to(root), p.read_bytes() if p.is_file() else None) for p in root.rglob("*"))


def calls(p) -> list[tuple[str, str]]:
    sim, at = p.attempt(p.path / "count")
    flow.snapshot(p.c.engine, at, using=USING)
    at.close()
    done = [(name, path.name) for name, path in sim.calls]
    # The attempts go through what they are here for.
    manifests = [name for call, name in done if call == "rename" and name.startswith("gen-")]
    assert manifests == ["gen-0000000002.kvm", "gen-0000000002.kvm", "gen-0000000003.kvm"]
    assert ("remove", "gen-0000000001.kvm") in done
    assert sum(call == "remove" for call, _ in done) > 2
    return done


def test_whatever_instant_it_is_cut_at_the_hottest_of_before_can_be_restored(pressed):
    p, checked, found = pressed, set(), set()
    for n, call in enumerate(calls(p)):
        if call[0] in ("open", "list", "lock"):  # as before the call that follows
            continue
        sim, at = p.attempt(p.path / f"{n}")
        sim.crash(n)
        with pytest.raises(Crash):
            flow.snapshot(p.c.engine, at, using=USING)
        at.close()
        for aftermath in AFTERMATHS:
            when = f"{aftermath} at call {n}: {call}"
            root = sim.leave(aftermath, p.path / f"{n}-{aftermath}")
            if (content := everything(root)) in checked:
                continue
            checked.add(content)
            assert verify.verify(REAL, root, deep=True).findings == [], when
            hottest, newest = held(root, p)
            assert hottest == 8, when
            found.add(newest)
            # The next writer goes on from there.
            at = flow.home(root)
            p.again(at)
            at.close()
            report = verify.verify(REAL, root, deep=True)
            assert (report.findings, report.leftovers) == ([], 0), when
            assert verify.store_bytes(REAL, root)[1] <= BUDGET * 11 // 10, when
            assert held(root, p) == (8, 8), when
    assert found == {0, 8}


@pytest.mark.parametrize(("error", "lasting"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_whatever_call_fails_the_next_snapshot_succeeds(pressed, error, lasting):
    p, outcomes = pressed, set()
    done = calls(p)
    for n, call in enumerate(done):
        if (error == errno.ENOSPC and call[0] not in GROWING) or call in done[max(0, n - 1) : n]:
            continue
        sim, at = p.attempt(p.path / f"{n}")
        sim.fail(n, error, short=True, lasting=lasting)
        try:
            flow.snapshot(p.c.engine, at, using=USING)
        except (StoreError, FormatError) as failed:
            outcomes.add(type(failed))
        else:
            outcomes.add(None)
        sim.arm()
        when = f"call {n}: {call}"
        assert verify.verify(REAL, sim.root).findings == [], when
        assert held(sim.root, p)[0] == 8, when
        p.again(at)
        at.close()
        report = verify.verify(REAL, sim.root)
        assert (report.findings, report.leftovers) == ([], 0), when
        assert verify.store_bytes(REAL, sim.root)[1] <= BUDGET * 11 // 10, when
        assert held(sim.root, p) == (8, 8), when
    assert outcomes == ({StoreFull} if error == errno.ENOSPC else {StoreUnavailable, None})
