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
from budget_cases import PATIENCE, SIDE, UNIT, X, in_a_thread, limited, live
from checks import c64

import tapegrad as tg
from tapegrad.errors import BudgetError


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


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


@pytest.mark.parametrize("count", [2, 4])
def test_threads_share_one_limit(count: int, small: None) -> None:
    xs = [data(i) for i in range(count)]
    required = [gradient(x) for x in xs]
    base = live()
    limit = base + count * 12 * UNIT
    all_recorded = threading.Barrier(count)  # else they may take turns by chance, and what each needs fits

    def work(x: tg.Tensor, w: np.ndarray) -> Callable[[], None]:
        def steps() -> None:
            for _ in range(6):
                assert np.array_equal(gradient(x, recorded=lambda: all_recorded.wait(PATIENCE)), w)

        return steps

    with tg.memory_budget(limit) as m:
        in_a_thread(*[work(x, w) for x, w in zip(xs, required, strict=True)])
        assert m.peak_bytes <= limit and m.evictions > 0 and m.live_bytes == base


def test_no_thread_is_refused_what_another_has_just_freed() -> None:
    refused = []

    def fill() -> None:
        held = []
        for i in range(150):
            try:
                held.append(data(i) if i % 2 else tg.exp(held[-1] if held else x))
            except BudgetError as e:
                refused.append(e.needed_bytes)
                held.clear()

    x = data(0)
    for _ in range(20):
        with tg.memory_budget(limit := live() + 50 * UNIT) as m:
            in_a_thread(fill, fill, fill)
            assert m.peak_bytes <= limit and all(needed > limit for needed in refused)
        refused.clear()


def test_threads_ask_one_tape_at_once() -> None:
    x = data(0)
    required, base = gradient(x), live()
    limit = base + 24 * UNIT
    with tg.memory_budget(limit) as m:
        with tg.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = loss(x, 15)

        def ask() -> None:
            for _ in range(4):
                assert np.array_equal(tape.gradient(y, x).numpy(), required)

        in_a_thread(ask, ask, ask)
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
                for _ in range(600):
                    h = tg.sin(h)
            assert tape.gradient(y, s).numpy() == np.cos(0.5)

    with tg.memory_budget("64MiB"):
        in_a_thread(work, work, work, work)


def test_threads_begin_recordings_at_once() -> None:
    x = data(0)
    with tg.memory_budget(live() + 36 * UNIT):
        required = gradient(x)  # constants are made once
    base, barrier = live(), threading.Barrier(3)

    def work() -> None:
        for _ in range(10):
            barrier.wait(PATIENCE)
            assert np.array_equal(gradient(x), required)

    with tg.memory_budget(base + 36 * UNIT) as m:
        in_a_thread(work, work, work)
        assert m.live_bytes == base


def test_what_failed_threads_had_asked_for_is_free_again() -> None:
    """Nine at once, so that no thread gets the number of one that has ended."""
    x, together = data(0), threading.Barrier(9)

    @tg.primitive
    def fails(a: Any) -> Any:
        raise ArithmeticError

    def fail() -> None:
        with pytest.raises(ArithmeticError):
            fails(x)
        together.wait(PATIENCE)

    required, base = gradient(x), live()
    with tg.memory_budget(limit := base + 12 * UNIT) as m:
        in_a_thread(*[fail] * 9)
        gc.collect()
        held = [c64(X) for _ in range((limit - m.live_bytes) // UNIT)]
        assert m.live_bytes > limit - UNIT
        held.clear()
        assert np.array_equal(gradient(x), required) and m.peak_bytes <= limit


def test_budgets_come_and_go_in_other_threads() -> None:
    x = data(0)
    required, base = gradient(x), live()

    def budgets() -> None:
        for i in range(8):
            with tg.memory_budget(base + (60 + i) * UNIT):
                assert np.array_equal(gradient(x, 15), required)

    in_a_thread(budgets, budgets, budgets)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_keeps_its_own_budgets_alone() -> None:
    """Those of the parent's other threads would never end; and it offloads to a place of its own."""
    code = """
import os, threading
import numpy as np
import tapegrad as tg

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

def fits(nbytes):
    try:
        tg.asarray(np.ones(nbytes // 8))
    except tg.errors.BudgetError:
        return False
    return True

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
            assert fits(2**17) and not fits(2**18)
            before = m.offloads
            gradient()
            assert m.offloads > before
        except BaseException as e:
            print(repr(e), flush=True)
            os._exit(1)
    else:
        assert fits(2**14) and not fits(2**16)
        over.set()
        thread.join()
        assert fits(2**17)
assert fits(2**20)
if child == 0:
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_one_budget_object_serves_several_threads() -> None:
    base = live()
    budget = tg.memory_budget(base + 60 * UNIT)
    entered, left = threading.Barrier(2), threading.Barrier(2)
    measures: dict[str, Any] = {}

    def first() -> None:
        with budget as measures["first"]:
            entered.wait(PATIENCE)
        left.wait(PATIENCE)

    def second() -> None:
        with budget as measures["second"]:
            entered.wait(PATIENCE)
            left.wait(PATIENCE)
            held = data(0)
            assert measures["second"].live_bytes == base + UNIT and limited()
            assert measures["first"].peak_bytes == base, "each closes its own"
            del held

    in_a_thread(first, second)


def test_a_budget_may_be_left_in_another_thread() -> None:
    budget = tg.memory_budget("1GiB")
    in_a_thread(lambda: budget.__enter__() and None)
    assert limited()
    budget.__exit__(None, None, None)
    assert not limited()
