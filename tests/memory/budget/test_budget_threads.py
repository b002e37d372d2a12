"""Budgets and threads: one limit for all of them, right bits, no deadlock, nothing left by those that ended."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from budget_cases import SIDE, UNIT, live
from checks import c64

import tapegrad as tg
from tapegrad.core import account
from tapegrad.device.pool import HostPool
from tapegrad.engine import region
from tapegrad.memory.budget.budget import MANAGER
from tapegrad.memory.ledger.ledger import LEDGER

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
    assert account.current is account.NOBODY and MANAGER._present() is None
    assert len(MANAGER._storages.candidates) == 0 and not LEDGER.promised_bytes


def data(seed: int) -> tg.Tensor:
    return c64(np.random.default_rng(seed).normal(size=(SIDE, SIDE)))


def loss(x: Any, count: int) -> Any:
    h = x
    for _ in range(count):
        h = tg.tanh(tg.softmax(h)) * 1.1
    return tg.sum(h)


def gradient(x: Any, count: int = 15, recorded: Callable[[], object] = bool) -> np.ndarray:
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = loss(x, count)
    recorded()
    return tape.gradient(y, x).numpy()


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
    all_recorded = threading.Barrier(count)  # else they may take turns by chance, and what each needs fits

    def work(x: tg.Tensor, w: np.ndarray) -> Callable[[], None]:
        def steps() -> None:
            for _ in range(6):
                assert np.array_equal(gradient(x, recorded=lambda: all_recorded.wait(PATIENCE)), w)

        return steps

    with tg.memory_budget(limit) as m:
        together(*[work(x, w) for x, w in zip(xs, wanted, strict=True)])
        assert m.peak_bytes <= limit and m.evictions > 0 and m.live_bytes == base


def test_what_is_taken_is_never_told_as_less_while_promised_bytes_become_live() -> None:
    over, held = threading.Event(), []

    def fill() -> None:
        try:
            for _ in range(400):
                MANAGER.in_room((aval,), ("a test",), lambda: held.append(data(0)))
        finally:
            over.set()

    def look() -> None:
        last = 0
        while not over.is_set():
            now = MANAGER._taken()
            assert now >= last
            last = now

    aval = data(0)._buffer.node.aval
    with tg.memory_budget("1GiB"):
        together(fill, look)
        held.clear()


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
        assert LEDGER.promised_bytes == 0
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_keeps_its_own_budgets_alone() -> None:
    """Those of the parent's other threads would never end; and it offloads to a place of its own."""
    code = """
import os, threading
import numpy as np
import tapegrad as tg
from tapegrad.core import account
from tapegrad.memory.budget.budget import MANAGER

x = tg.asarray(np.ones((64, 64)))

def gradient():
    with tg.GradientTape() as tape:
        tape.watch(x)
        h = x
        for _ in range(8):
            h = tg.name(tg.softmax(h), "h")
        y = tg.sum(h)
        del h
    return tape.gradient(y, x)

offload = tg.policies.offload_names("h")
entered, over = threading.Event(), threading.Event()
def other():
    with tg.memory_budget(2**16, offload):
        entered.set()
        over.wait()
with tg.memory_budget(2**18, offload) as m:
    gradient()
    assert m.offloads
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        try:
            assert MANAGER.limit == 2**18
            gradient()
        except BaseException as e:
            print(repr(e), flush=True)
            os._exit(1)
    else:
        assert MANAGER.limit == 2**16
        over.set()
        thread.join()
assert account.current is not MANAGER
if child == 0:
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_one_budget_object_serves_several_threads() -> None:
    x = data(0)
    base = live()
    budget = tg.memory_budget(base + 60 * UNIT)
    entered, left = threading.Barrier(2), threading.Barrier(2)
    found: dict[str, Any] = {}

    def first() -> None:
        with budget as m:
            entered.wait(PATIENCE)
            found["first"] = m
        assert m.now is None and found["second"].now is not None, "each closes its own"
        left.wait(PATIENCE)

    def second() -> None:
        with budget as m:
            found["second"] = m
            entered.wait(PATIENCE)
            left.wait(PATIENCE)
            held = tg.softmax(x)
            assert m.live_bytes == base + UNIT and account.current is MANAGER
            del held

    together(first, second)


def test_a_budget_may_be_left_in_another_thread() -> None:
    budget = tg.memory_budget("1GiB")
    together(lambda: budget.__enter__() and None)
    assert account.current is MANAGER
    budget.__exit__(None, None, None)


def test_a_budget_that_an_interrupt_kept_from_being_left_ends_with_its_object() -> None:
    budget = tg.memory_budget("1GiB")
    budget.__enter__()
    del budget
    assert account.current is account.NOBODY
