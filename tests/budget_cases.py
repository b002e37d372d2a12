"""What tests of budgets share: arrays of one size, bytes alive, evictions on demand, and a check that all is sound."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from checks import c64

import tapegrad as tg
from tapegrad.engine import region
from tapegrad.errors import BudgetError

SIDE = 16
UNIT = SIDE * SIDE * 8
X = np.random.default_rng(1).normal(size=(SIDE, SIDE))
PATIENCE = 60.0
"""Seconds after which a thread that has not ended never will."""
LAZY, EAGER = 1, 10**9
"""Elements from which on elementwise results wait for their readers: all of them, none of them."""


def live() -> int:
    """Return the bytes that are alive."""
    with tg.measure() as m:
        return m.live_bytes


def objects() -> int:
    """Return how many objects of tapegrad's classes there are."""
    gc.collect()
    return sum((type(o).__module__ or "").startswith("tapegrad") for o in gc.get_objects())


def evict(nbytes: int) -> None:
    """Have the budget around drop values of so many bytes; raises BudgetError where only others are left."""
    with tg.memory_budget(live() - nbytes):
        pass


def wanting(h: Any) -> Callable[[], float]:
    """Return the gradient of a tape that saves ``h`` alone; called, it returns the sum of ``h``."""
    s = c64(1.0)
    with tg.GradientTape(persistent=True) as tape:
        tape.watch(s)
        y = tg.sum(h * s)
    return lambda: tape.gradient(y, s).item()


def layers(h: Any, count: int) -> Any:
    """Return ``count`` layers whose results their rules read."""
    for _ in range(count):
        h = tg.softmax(h)
    return h


def gradient(x: Any, count: int = 20) -> np.ndarray:
    """Return the gradient of the sum of ``count`` layers."""
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(layers(x, count))
    return tape.gradient(y, x).numpy()


@contextmanager
def small_from(elements: int) -> Iterator[None]:
    """Elementwise results of so many elements, or more, wait for their readers in the block."""
    before = region.SMALL
    region.set_small(elements)
    try:
        yield
    finally:
        region.set_small(before)


# What must hold whatever happened -----------------------------------------------------------------------------------


@tg.primitive
def _vast(x: Any) -> Any:
    """2 GiB that no page is ever mapped for."""
    return np.empty(1 << 28)


def limited() -> bool:
    """Return whether a budget of less than 2 GiB is in force."""
    x = c64(1.0)
    try:
        _vast(x)
    except BudgetError:
        return True
    return False


def recorded() -> bool:
    """Return whether a tape that was left records in this thread."""
    weight = tg.Variable(X)
    with tg.measure() as m:
        base, h = m.live_bytes, tg.softmax(weight)
        del h
        return m.live_bytes != base


def in_a_thread(*works: Callable[[], Any]) -> list[Any]:
    """Return the results of functions that run in threads at once; raises the first error, and where one hangs."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(place: int) -> None:
        try:
            start.wait(PATIENCE)
            results[place] = works[place]()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE)
    assert not any(t.is_alive() for t in threads), "a lock is held"
    if errors:
        raise errors[0]
    return results


def _counts_right() -> None:
    """A block counts each byte, has all its room, and gives the right gradient."""
    x = c64(X)
    with tg.memory_budget(live() + UNIT) as m:
        base, held = m.live_bytes, c64(X)
        assert m.live_bytes == m.peak_bytes == base + UNIT
        try:
            c64(X)
        except BudgetError as e:
            assert e.needed_bytes == base + 2 * UNIT
        else:
            raise AssertionError("more than the limit was allocated")
        del held
        assert m.live_bytes == base
    with tg.memory_budget(live() + 12 * UNIT) as m:
        result = gradient(x, 12)
    assert m.evictions > 0 and np.allclose(result, 0.0)  # rows of a softmax sum to one


def check_sound() -> None:
    """Assert that no budget is in force and nothing recorded, and that a block is right in this and another thread."""
    gc.collect()
    with tg.device("cpu"):
        assert not limited(), "a budget is left in force"
        assert not recorded(), "a tape is left recording"
        _counts_right()
        in_a_thread(_counts_right)
        assert not limited()
