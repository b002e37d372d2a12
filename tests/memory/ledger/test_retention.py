"""What a budget's recipes hold: nothing that no tape needs, over hundreds of steps, whoever else is alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from checks import c64, no_garbage

import tapegrad as tg
from tapegrad.core import account
from tapegrad.memory.budget.budget import MANAGER

SIDE = 16
UNIT = SIDE * SIDE * 8
STEPS = 200
X = np.random.default_rng(1).normal(size=(SIDE, SIDE))
PLENTY = "64MiB"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    yield
    assert account.current is account.NOBODY and MANAGER._present() is None and len(MANAGER._storages.candidates) == 0


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
    """The ledger's bytes after each step are those after the third."""
    with tg.measure() as m:
        live = []
        for number in range(steps):
            run(number)
            live.append(m.live_bytes)
    assert len(set(live[3:])) == 1, (live[3], live[-1])


def test_an_old_tape_does_not_hold_later_steps() -> None:
    x = c64(X)
    with no_garbage(), tg.memory_budget(PLENTY):
        old = [step(x, 0, persistent=True)[0]]
        flat(lambda number: step(x, number))
        assert old.pop()._records


def test_nor_the_history_of_what_is_carried_from_step_to_step() -> None:
    state = [c64(X)]

    def run(number: int) -> None:
        state[0] = step(state[0], number)[1]

    with no_garbage(), tg.memory_budget(PLENTY):
        old = [step(state[0], 0, persistent=True)[0]]
        flat(run)
        assert old.pop()._records


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        (tg.cumulative_sum, tg.softmax, True),
        (tg.softmax, tg.softmax, False),
        (tg.cumulative_sum, lambda x: x * 2.0, False),
    ],
    ids=["data that nothing else needs", "of what a tape keeps anyway", "still to be computed"],
)
def test_a_value_that_is_read_again_later_takes_the_place_of_what_it_was_made_from(
    first: Callable[..., Any], then: Callable[..., Any], kept: bool
) -> None:
    """For good, so that it cannot be dropped: only where that frees as many bytes."""
    with tg.memory_budget(PLENTY) as m:
        with tg.GradientTape() as old:
            x = c64(np.ones((200, 100)))
            old.watch(x)
            y = then(first(x, axis=0))
            total = tg.exp(1e-9 * tg.sum(y))  # the tape keeps this at least
            (x * 2.0).numpy()  # what tapes keep is looked at where what has waited gets its bytes
        del x
        before = m.live_bytes
        with tg.GradientTape() as tape:
            tape.watch(y)
            y + 1.0
            graph = MANAGER._present()
            assert graph is not None
            recipe = graph.recipes.get(y._buffer.node.index)
            assert recipe is not None and (recipe.pinned is y._buffer) == kept
            del recipe, graph
        assert (before - m.live_bytes > y.nbytes / 2) == kept
        del total


def test_persistent_tapes_that_follow_each_other() -> None:
    found: list = [None, c64(X)]

    def run(number: int) -> None:
        found[:] = step(found[1], number, persistent=True)

    with no_garbage(), tg.memory_budget(PLENTY):
        flat(run)
        found.clear()


def test_nested_budgets() -> None:
    x = c64(X)

    def run(number: int) -> None:
        with tg.memory_budget("32MiB"):
            step(x, number)

    with no_garbage(), tg.memory_budget(PLENTY):
        old = [step(x, 0, persistent=True)[0]]
        flat(run)
        assert old.pop()._records


def test_dead_branches_inside_one_recording() -> None:
    """Data goes with the values made from it; what a rule reads, at the tape's next sweep."""
    x = c64(X)
    with no_garbage(), tg.memory_budget(PLENTY) as m, tg.GradientTape() as tape:
        tape.watch(x)
        base = m.live_bytes
        for number in range(STEPS):
            x + c64(X + number)
            assert m.live_bytes <= base + UNIT


@pytest.mark.parametrize("watched", [True, False])
def test_a_tape_that_outlives_its_budget_sweeps(watched: bool) -> None:
    x = c64(X)
    with no_garbage(), tg.measure() as m, tg.GradientTape(persistent=True) as tape:
        tape.watch(x)
        with tg.memory_budget(PLENTY):
            y = tg.softmax(x)
        peaks = []
        for number in range(5 * STEPS):
            forward(y if watched else x, number)
            peaks.append(m.live_bytes)
        assert max(peaks[STEPS:]) <= max(peaks[:STEPS])
        assert len(tape._records) < 200
        total = tg.sum(y * y)
        assert tape.gradient(total, x) is not None
        del y, total


def test_what_room_there_is_serves_what_tapes_keep() -> None:
    """Data that served a dead value makes room before anything is dropped."""
    x = c64(X)

    def wanted() -> Any:
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
        wanted()
    with tg.memory_budget(plain.peak_bytes + 2 * UNIT) as m:
        wanted()
    assert m.evictions == 0
