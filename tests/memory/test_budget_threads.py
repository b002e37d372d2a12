"""Budgets and threads: one limit for all of them, right bits, no deadlock, nothing left by those that ended."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from checks import c64

import tapegrad as tg
from tapegrad import buffer as _buffer
from tapegrad.device.pool import HostPool
from tapegrad.fusion import region
from tapegrad.memory.budget import MANAGER

SIDE = 16
UNIT = SIDE * SIDE * 8
PATIENCE = 60


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads take turns as often as they can."""
    gc.collect()
    interval, small = sys.getswitchinterval(), region.SMALL
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
    region.set_small(small)
    assert _buffer.keeper is None and MANAGER._present() is None
    assert len(MANAGER._storages.candidates) == 0 and not MANAGER._promised


def data(seed: int) -> tg.Tensor:
    return c64(np.random.default_rng(seed).normal(size=(SIDE, SIDE)))


def loss(x: Any, count: int) -> Any:
    h = x
    for _ in range(count):
        h = tg.tanh(tg.softmax(h)) * 1.1
    return tg.sum(h)


def gradient(x: Any, count: int = 15) -> np.ndarray:
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = loss(x, count)
    return tape.gradient(y, x).numpy()


def live() -> int:
    with tg.measure() as m:
        return m.live_bytes


def together(*works: Callable[[], None]) -> None:
    """Run them in threads at once; raises what the first of them raised, and fails if they do not end."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            start.wait(PATIENCE)
            work()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE)
    assert not any(t.is_alive() for t in threads), "deadlock"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("small", [1, 10**9], ids=["lazy", "eager"])
@pytest.mark.parametrize("count", [2, 4])
def test_threads_share_one_limit(count: int, small: int) -> None:
    region.set_small(small)
    xs = [data(i) for i in range(count)]
    wanted = [gradient(x) for x in xs]
    base = live()
    limit = base + count * 12 * UNIT

    def work(x: tg.Tensor, w: np.ndarray) -> Callable[[], None]:
        def steps() -> None:
            for _ in range(6):
                assert np.array_equal(gradient(x), w)

        return steps

    with tg.memory_budget(limit) as m:
        together(*[work(x, w) for x, w in zip(xs, wanted, strict=True)])
        assert m.peak_bytes <= limit and m.evictions > 0 and m.live_bytes == base


def test_threads_ask_one_tape_at_once() -> None:
    x = data(0)
    wanted, base = gradient(x), live()
    limit = base + 24 * UNIT
    with tg.memory_budget(limit) as m:
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = loss(x, 15)

        def ask() -> None:
            for _ in range(4):
                assert np.array_equal(tape.gradient(y, x).numpy(), wanted)

        together(ask, ask, ask)
        assert m.peak_bytes <= limit and m.evictions > 0
        tape = y = None


def test_threads_record_while_recipes_are_forgotten() -> None:
    s = c64(0.5)

    def work() -> None:
        for _ in range(3):
            with tg.GradientTape() as tape:
                tape.watch(s)
                y = tg.sin(s)
                h = y
                for _ in range(1500):
                    h = tg.sin(h)
            assert tape.gradient(y, s).numpy() == np.cos(0.5)

    with tg.memory_budget("64MiB"):
        together(work, work, work, work)


def test_threads_begin_recordings_at_once() -> None:
    x = data(0)
    wanted, base = gradient(x), live()
    barrier = threading.Barrier(3)

    def work() -> None:
        for _ in range(10):
            barrier.wait(PATIENCE)
            assert np.array_equal(gradient(x), wanted)

    with tg.memory_budget(base + 36 * UNIT) as m:
        together(work, work, work)
        assert m.live_bytes == base


def test_what_a_failed_thread_had_asked_for_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = data(0)
    wanted, base = gradient(x), live()
    empty, fails = HostPool.empty, [True]

    def refused(pool: HostPool, shape: Any, dtype: Any) -> Any:
        if fails[0] and threading.current_thread() is not threading.main_thread():
            raise MemoryError
        return empty(pool, shape, dtype)

    monkeypatch.setattr(HostPool, "empty", refused)

    together_in = threading.Barrier(9)

    def fail() -> None:
        with pytest.raises(MemoryError):
            tg.softmax(x)
        together_in.wait(PATIENCE)  # so that no thread gets the number of one that has ended

    with tg.memory_budget(limit := base + 12 * UNIT) as m:
        together(*[fail] * 9)
        gc.collect()
        assert len(MANAGER._promised) == 9
        assert np.array_equal(gradient(x), wanted)
        assert m.peak_bytes <= limit


def test_budgets_come_and_go_in_other_threads() -> None:
    x = data(0)
    wanted, base = gradient(x), live()

    def budgets() -> None:
        for i in range(20):
            with tg.memory_budget(base + (60 + i) * UNIT):
                assert np.array_equal(gradient(x, 15), wanted)

    together(budgets, budgets, budgets)
