"""Waiting that ends."""

from __future__ import annotations

import threading

import pytest

from sglang_persist.bounded import Gate, within


def test_within_returns_raises_and_gives_up():
    assert within(5, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0)
    done = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, done.wait)
    done.set()


def test_closed_gate_lets_nobody_in():
    gate = Gate()
    with gate:
        pass
    gate.close()
    with pytest.raises(TimeoutError), gate:
        pass


def test_closing_waits_for_whoever_is_inside():
    gate, inside, go, closed = Gate(), threading.Event(), threading.Event(), threading.Event()

    def work():
        with gate:
            inside.set()
            assert go.wait(30)

    def close():
        gate.close()
        closed.set()

    threads = [threading.Thread(target=work), threading.Thread(target=close)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    assert not closed.wait(0.05)
    go.set()
    assert closed.wait(30)
    for thread in threads:
        thread.join()
