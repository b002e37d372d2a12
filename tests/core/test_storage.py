"""Bytes are counted where they are allocated: always, in every thread, whatever ends a value's life."""

from __future__ import annotations

import gc
import signal
import threading
import traceback
from typing import Any

import numpy as np
import pytest
from checks import c64
from programs.interrupts import by_timer, interrupted
from programs.laws import check_parts

import tapegrad as tg

UNIT = 1024
"""Bytes that 100 numbers of float64 take."""


def live() -> int:
    with tg.measure() as m:
        return m.live_bytes


def value() -> tg.Tensor:
    return tg.exp(c64(np.ones(100)))


def test_values_made_outside_of_blocks_count_in_every_thread() -> None:
    value()  # makes what is made once
    gc.collect()
    before, held = live(), list[list[Any]]()
    threads = [threading.Thread(target=lambda: held.append([value() for _ in range(200)])) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert live() - before == 800 * UNIT
    held.clear()
    assert live() == before


def test_a_value_in_a_garbage_cycle_counts_until_it_is_collected() -> None:
    class Owner:
        pass

    gc.collect()
    gc.disable()
    try:
        before, owner = live(), Owner()
        owner.itself, owner.value = owner, value()
        del owner
        assert live() - before == UNIT
        gc.collect()
        assert live() == before
    finally:
        gc.enable()


def test_what_a_budget_refuses_does_not_count() -> None:
    """Whatever goes first, the buffer or what counts it: here the frames that hold them end from the outside in."""
    value()
    before = live()
    with tg.memory_budget(before + 4 * UNIT) as m:
        for _ in range(3):
            try:
                [value() for _ in range(10)]
            except tg.errors.BudgetError as e:
                traceback.clear_frames(e.__traceback__)
        gc.collect()
        assert m.live_bytes == before


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="timers call the handler")
def test_a_signal_handler_may_make_values_while_bytes_are_added_up() -> None:
    """As a finalizer may, which newer interpreters call between any two lines."""
    value()
    calls, before = 0, live()

    def handler(*_: Any) -> None:
        nonlocal calls
        calls += 1
        kept.append(value())
        del kept[:-3]
        assert m.live_bytes >= 0

    kept, former = list[Any](), signal.signal(signal.SIGALRM, handler)
    try:
        with tg.measure() as m:
            signal.setitimer(signal.ITIMER_REAL, 1e-3, 7e-4)
            while calls < 400:
                del [value() for _ in range(100)][:]
                check_parts(m, ("peak_by_category", "peak_by_line"))
            signal.setitimer(signal.ITIMER_REAL, 0)
            kept.clear()
        check_parts(m)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert m.live_bytes == before == live()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="timers send the interrupts")
def test_no_interrupt_is_lost_while_values_come_and_go() -> None:
    x, gradient = c64(np.ones(4)), tg.grad(lambda q: tg.sum(tg.tanh(q) * q))
    gradient(x)
    gc.collect()
    before = live()
    assert by_timer(lambda: tg.exp(gradient(x)), 200) == (200, 200)
    gc.collect()
    assert live() == before, "the next block counts anew"


def test_a_lazy_value_whose_evaluation_was_interrupted_counts_once() -> None:
    """It outlives the interrupt, and gets its bytes when it is asked for again."""
    x = c64(np.ones(20_000))
    tg.exp(x).numpy()
    values = list[Any]()

    def work() -> None:
        values.append(tg.exp(x))
        values[-1].numpy()

    before = live()
    for where in interrupted(work, 60):
        for value in values:
            value.numpy()
        gc.collect()
        assert live() - before == len(values) * 160_256, where
        value = None
        values.clear()
    assert live() == before
