"""Ctrl-C anywhere in a derivative, a measurement or a budget: the next step is as if there had been none.

It has the right bits, no lock is held, no tape or budget is in force, and its bytes are counted right.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from budget_cases import in_a_thread
from checks import c64
from programs.interrupts import interrupted
from programs.laws import (
    WrongError,
    arrays,
    check_bits,
    check_figures,
    check_left,
    check_parts,
    figures,
    settled,
)

import tapegrad as tg

SIDE = 16
UNIT = SIDE * SIDE * 8
LARGE = 20_480
"""Elements of a lazy value."""


def f(x: Any) -> Any:
    return tg.sum(tg.tanh(x) * x)


def own(x: Any) -> Any:
    return tg.custom_gradient(lambda q: (tg.tanh(q), lambda ct: ct * (1 - tg.tanh(q) ** 2)))(x)


def step(x: Any) -> Any:
    with tg.GradientTape() as tape:
        tape.watch(x)
        h = x
        for _ in range(4):
            h = tg.softmax(h) * 1.5
        y = tg.sum(h)
        del h
    return tape.gradient(y, x)


def tapes(x: Any) -> Any:
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        with tape.stop_recording():
            tg.exp(x)
        y = x * x
    return tape.gradient(y, x), tape.gradient(y, x)


def measured(x: Any) -> Any:
    with tg.measure(timeline=True) as m:
        g = step(x)
        assert m.peak_by_category
    return g


def within(x: Any) -> Any:
    """One value is dropped: two fit less than a step takes."""
    with tg.measure() as m:
        limit = m.live_bytes + 6 * UNIT
    with tg.memory_budget(limit) as m:
        g = step(x)
        assert m.evictions and m.peak_bytes <= limit
    return g


def updated(x: Any) -> Any:
    v = tg.Variable(x)
    tg.optim.SGD(0.5, momentum=0.9).apply([v * 2.0], [v])
    return v.assign_add(x)


SMALL: dict[str, Callable[[Any], Any]] = {
    "tapes": tapes,
    "gradient": tg.grad(f),
    "jvp": lambda x: tg.jvp(f, (x,), (x,)),
    "vmap of a gradient": tg.vmap(tg.grad(f)),
    "jacobian": lambda x: tg.jacobian(lambda q: tg.cumulative_sum(q * q))(x[0]),
    "hvp": lambda x: tg.hvp(f, x, x),
    "recompute_grad": tg.grad(tg.recompute_grad(f)),
    "recompute_grad with a policy": tg.grad(tg.recompute_grad(f, policy=tg.policies.save_matmuls)),
    "checkpointed_loop": tg.grad(lambda q: tg.sum(tg.checkpointed_loop(tg.tanh, q, 3, snapshots=1))),
    "reversible": tg.grad(lambda q: tg.sum(tg.reversible(tg.tanh, tg.tanh)(q, q)[0])),
    "custom_gradient": tg.grad(lambda q: tg.sum(own(q))),
    "custom_gradient forward": lambda x: tg.jvp(own, (x,), (x,)),
    "variable": updated,
}
SQUARE: dict[str, Callable[[Any], Any]] = {"measured": measured, "within a budget": within}
OPERANDS = {
    **{name: (work, [[0.5, 0.25], [1.0, 2.0]]) for name, work in SMALL.items()},
    **{name: (work, np.random.default_rng(1).normal(size=(SIDE, SIDE))) for name, work in SQUARE.items()},
    "lazy": (tg.grad(f), np.linspace(-1.0, 1.0, LARGE)),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_after_an_interrupt_anywhere_the_next_step_is_as_if_there_had_been_none(name: str) -> None:
    work, operand = OPERANDS[name][0], c64(OPERANDS[name][1])
    run = lambda: arrays(work(operand))
    with tg.measure():
        run()  # constants are made once
    expected = run()
    gc.freeze()  # what modules are made of need not be looked at each time
    before = settled()
    with tg.measure() as m:
        run()
    figures_of_one, count = figures(m, before), 0
    times = 100 if name in SQUARE else 25
    for where in interrupted(run, times):
        count += 1
        try:
            check_left(before)
            with tg.measure() as m:
                check_bits(run(), expected)
            check_parts(m)
            if not m.evictions:
                check_figures(figures(m, before), figures_of_one)
            check_bits(in_a_thread(run)[0], expected)
            check_left(before)
        except WrongError as e:
            raise WrongError(f"after an interrupt at {where}: {e}") from None
    assert count == times


def test_the_search_finds_a_lock_that_an_interrupt_leaves_held() -> None:
    """The twin: a block whose beginning and end are written in Python."""

    class Naive:
        lock = threading.Lock()

        def __enter__(self) -> None:
            self.lock.acquire()
            abs(1)

        def __exit__(self, *exc: object) -> None:
            self.lock.release()

    naive, held = Naive(), 0

    def work() -> None:
        with naive:
            pass

    for _ in interrupted(work, 10, files=__file__):
        held += naive.lock.locked()
        if naive.lock.locked():
            naive.lock.release()
    assert held
