"""What a budget's recipes hold: nothing that no tape needs, over hundreds of steps, whatever else is alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from budget_cases import in_a_thread
from checks import c64, no_garbage
from programs.laws import check_left, settled

import tapegrad as tg

SIDE = 16
UNIT = SIDE * SIDE * 8
STEPS = 200
X = np.random.default_rng(1).normal(size=(SIDE, SIDE))
PLENTY = "64MiB"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    tg.grad(lambda h: tg.sum(forward(h) ** 2.0) * 1e-9 + 1.0)(c64(X)), c64(X) + 1.0, c64(X) * 2  # constants are there
    before = settled()
    yield
    check_left(before)


def forward(h: Any, number: int = 0) -> Any:
    """Data that no rule reads (the sums), and values that some do."""
    for k in range(3):
        h = tg.softmax(h + c64(X + number + k)) + c64(X * k)
    return h


def step(h: Any, number: int, persistent: bool = False) -> tuple[Any, Any]:
    """A gradient, taken, and the last value."""
    with tg.GradientTape(persistent=persistent) as tape:
        tape.watch(h)
        y = forward(h, number)
        loss = tg.sum(y * y)
    tape.gradient(loss, h)
    return tape, y


def flat(run: Callable[[int], Any], steps: int = STEPS) -> None:
    """The live bytes after each step are those after the third."""
    with tg.measure() as m:
        live = []
        for number in range(steps):
            run(number)
            live.append(m.live_bytes)
    assert len(set(live[3:])) == 1, (live[3], live[-1])


@pytest.mark.parametrize("nested", [False, True])
def test_an_old_tape_does_not_hold_later_steps_but_its_own_values(nested: bool) -> None:
    def run(number: int) -> None:
        if nested:
            with tg.memory_budget("32MiB"):
                step(x, number)
        else:
            step(x, number)

    with no_garbage(), tg.memory_budget(PLENTY):
        x = c64(X)
        with tg.GradientTape(persistent=True) as old:
            old.watch(x)
            y = tg.sum(forward(x) ** 2.0)
        expected = old.gradient(y, x).numpy(copy=True)
        flat(run)
        assert np.array_equal(old.gradient(y, x).numpy(), expected)
        del old, y


@pytest.mark.parametrize("persistent", [False, True])
def test_the_history_of_a_value_carried_from_step_to_step_is_not_held(persistent: bool) -> None:
    def run(number: int) -> None:
        found[:] = step(found[1], number, persistent)

    with no_garbage(), tg.memory_budget(PLENTY):
        found: list[Any] = [None, c64(X)]
        old = [step(found[1], 0, persistent=True)[0]]
        flat(run)
        old.clear(), found.clear()


def test_data_that_only_a_value_was_made_from_is_not_held_once_the_value_is_used_again() -> None:
    with tg.memory_budget(PLENTY) as m:
        with tg.GradientTape() as old:
            x = c64(np.ones((200, 100)))
            old.watch(x)
            y = tg.softmax(tg.cumulative_sum(x, axis=0))
            total = tg.exp(1e-9 * tg.sum(y))
        del x
        before = m.live_bytes
        with tg.GradientTape() as tape:
            tape.watch(y)
            y + 1.0
        assert before - m.live_bytes > y.nbytes / 2
        del total, old, tape


def test_dead_branches_inside_one_recording() -> None:
    """Data goes with the values made from it; what a rule reads, at the tape's next sweep."""
    x = c64(X)
    with no_garbage(), tg.memory_budget(PLENTY) as m, tg.GradientTape() as tape:
        tape.watch(x)
        base = m.live_bytes
        for number in range(STEPS):
            x + c64(X + number)
            assert m.live_bytes <= base + UNIT
    del tape


@pytest.mark.parametrize("watched", [True, False])
def test_a_tape_that_outlives_its_budget_forgets_dead_values(watched: bool) -> None:
    x = c64(X)
    with no_garbage(), tg.measure() as m, tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        with tg.memory_budget(PLENTY):
            y = tg.softmax(x)
        peaks = []
        for number in range(3 * STEPS):
            forward(y if watched else x, number)
            peaks.append(m.live_bytes)
        assert max(peaks[STEPS:]) <= max(peaks[:STEPS])
        total = tg.sum(y * y)
        assert tape.gradient(total, x) is not None
        del y, total
    del tape


def test_data_of_dead_values_makes_room_before_anything_is_dropped() -> None:
    x = c64(X)

    def gradient() -> Any:
        with tg.GradientTape() as tape:
            tape.watch(x)
            h = x
            for _ in range(10):
                h = tg.softmax(h)
            for number in range(40):
                h + c64(X + number)
            loss = tg.sum(h)
            del h
        return tape.gradient(loss, x)

    with tg.measure() as plain:
        gradient()
    with tg.memory_budget(plain.peak_bytes + 2 * UNIT) as m:
        gradient()
    assert m.evictions == 0


def test_exactly_the_bytes_that_are_left_can_be_taken_and_no_more() -> None:
    """Whatever came and went before, in this thread or another, and after kernels that failed."""
    x, negative = c64(np.ones(100)), c64(np.linspace(-1.0, 1.0, 20_000))

    def fail() -> None:
        with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
            tg.log(negative).numpy()

    def churn() -> None:
        for _ in range(20):
            tg.sin(x), c64(np.ones(200))
        fail()

    fail()
    limit = settled().live_bytes + 400 * 1024
    for run in (churn, lambda: in_a_thread(churn)):
        with tg.memory_budget(limit) as m:
            run()
            kept = [tg.sin(x) for _ in range(400)]
            assert m.live_bytes == limit
            with pytest.raises(tg.errors.BudgetError) as e:
                tg.cos(x)
            assert e.value.needed_bytes == limit + 1024
            e.value.__traceback__ = None
            kept.pop()
            kept.append(tg.cos(x))
            assert m.peak_bytes == limit
            del kept, e


def test_bytes_promised_to_a_kernel_that_runs_are_nobody_elses() -> None:
    """Meanwhile another thread enters a block of its own and asks for one byte more than is left, then for that."""
    x, fitted = c64(np.ones(1000)), list[bool]()

    def fits(nbytes: int) -> bool:
        with tg.memory_budget("1GiB"):
            try:
                return tg.asarray(np.zeros(nbytes, np.int8)) is not None
            except tg.errors.BudgetError:
                return False

    @tg.primitive(infer=lambda a: (a.shape, a.dtype))
    def twice(a: np.ndarray) -> np.ndarray:
        fitted.extend(in_a_thread(lambda n=n: fits(n))[0] for n in (1025, 1024))
        return a * 2.0

    with tg.memory_budget(settled().live_bytes + 8192 + 1024) as m:
        y = twice(x)
        assert m.peak_bytes <= settled().live_bytes + 1024
    assert fitted == [False, True] and y[0].numpy() == 2.0
