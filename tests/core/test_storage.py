"""Bytes are counted where they are allocated: always, in every thread, whatever ends a value's life."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest
from checks import c64

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
    before = live()
    with tg.memory_budget(before + 4 * UNIT):
        for _ in range(3):
            with pytest.raises(tg.errors.BudgetError) as caught:
                [value() for _ in range(10)]
            del caught
    gc.collect()
    assert live() == before


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="timers send the interrupts")
def test_no_interrupt_is_lost_while_values_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # what a lost one is told to
    x, sent, raised = c64(np.ones(4)), 0, 0

    def handler(*_: Any) -> None:
        nonlocal sent
        sent += 1
        raise KeyboardInterrupt

    gradient = tg.grad(lambda q: tg.sum(tg.tanh(q) * q))

    def step() -> None:
        tg.exp(gradient(x))

    step()
    gc.collect()
    before, former = live(), signal.signal(signal.SIGALRM, handler)
    try:
        for i in range(200):
            aim = sent + 1
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-4 + i * 2e-6)
                while sent < aim:
                    step()
            except KeyboardInterrupt:
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    gc.collect()
    assert raised == sent == 200
    assert live() == before, "the next block counts anew"
