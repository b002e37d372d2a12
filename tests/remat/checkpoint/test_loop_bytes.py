"""How many states a loop may store within a number of bytes."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from checks import Counted, c64
from peers import Peers, of_all

import tapegrad as tg
from tapegrad.errors import RecomputeError
from tapegrad.remat.schedules.revolve import extra_steps


def test_where_the_schedule_records_one_step_at_a_time_nobody_asks_what_the_record_of_another_takes() -> None:
    x = c64([0.5, 1.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(RecomputeError, match="One state takes 512 bytes, the record of one step the rest;"):
            tg.checkpointed_loop(tg.sin, x, 8, bytes=1)


def test_what_the_steps_that_are_tried_draw_is_drawn_again() -> None:
    x, factors = c64([0.5, 1.0]), list[float]()

    def step(s: Any) -> Any:
        factors.append(np.random.rand())
        return s * factors[-1]

    np.random.seed(3)
    with tg.GradientTape() as tape:
        tape.watch(x)
        tg.checkpointed_loop(step, x, 8, bytes="1MiB")
    np.random.seed(3)
    assert len(factors) > 8 and factors[-8:] == np.random.rand(8).tolist()


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_steps_are_tried(collects: bool) -> None:
    """It would be taken for bytes that the loop gives back."""
    x, found, before = c64([0.5, 1.0]), list[bool](), gc.isenabled()

    def step(s: Any) -> Any:
        found.append(gc.isenabled())
        return tg.sin(s)

    try:
        (gc.enable if collects else gc.disable)()
        with tg.GradientTape() as tape:
            tape.watch(x)
            tg.checkpointed_loop(step, x, 5, bytes="1MiB")
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    tried = len(found) - 5
    assert tried > 3 and found == [False] * tried + [collects] * 5


@pytest.mark.parametrize("schedule", ["mixed", "sqrt"])
def test_the_record_of_a_step_that_waits_takes_its_bytes(schedule: str) -> None:
    """Of a lazy step a tape keeps the state that it was given: that is seen once the next state is there."""
    x = c64(np.linspace(0.1, 1.0, 20_480))
    with tg.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(RecomputeError, match=r"One state takes (\d+) bytes, the record of one step \1;"):
            tg.checkpointed_loop(lambda s: tg.tanh(tg.sin(s) * s), x, 8, bytes=1, schedule=schedule)


def steps_and_peak(step: Any, x: Any, **options: Any) -> tuple[int, int, int]:
    """Return how often a step of 12 runs, how many bytes are alive at the loop's peak, and how many before it."""
    counted = Counted(step)
    with tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(x)
        before = m.live_bytes
        y = tg.checkpointed_loop(counted, x, 12, **options)
        counted.take() if "bytes" not in options else None
        tape.gradient(y, x)
        return counted.take(), m.peak_bytes, before


@pytest.mark.parametrize("schedule", ["revolve", "sqrt", "mixed"])
def test_more_bytes_mean_fewer_steps_and_are_never_exceeded(schedule: str) -> None:
    x = c64(np.linspace(0.1, 1.0, 4096))
    step = lambda s: tg.tanh(tg.sin(s) * s)
    steps_and_peak(step, x, snapshots=2)  # constants are there
    runs = []
    for nbytes in (16, 18, 21, 28, 40):
        count, peak, before = steps_and_peak(step, x, bytes=nbytes * x.nbytes, schedule=schedule)
        assert peak - before <= nbytes * x.nbytes
        runs.append(count)
    assert runs == sorted(runs, reverse=True) and runs[0] > runs[-1]


def test_within_a_budget_no_more_states_are_stored_than_it_has_room_for() -> None:
    x = c64(np.linspace(0.1, 1.0, 512))
    step = lambda s: tg.sin(s) * x
    steps_and_peak(step, x, snapshots=2)
    runs = []
    for units in (9, 12, 16, 40):
        with tg.measure() as m:
            limit = m.live_bytes + units * x.nbytes
        with tg.memory_budget(limit) as b:
            runs.append(steps_and_peak(step, x, bytes=2**40)[0])
        assert b.peak_bytes <= limit
    assert runs == sorted(runs, reverse=True) and runs[0] > runs[-1]


class Others(Peers):
    """Other processes, on which ``states`` fit each."""

    def __init__(self, *states: int) -> None:
        super().__init__(1 + len(states))
        self.states = states

    def replicated(self, node: Any) -> None:  # type: ignore[override]  # each has targets of its own
        return None

    def told(self, group: str, mine: Any) -> list[Any]:
        return [mine, *(("states", n) for n in self.states)] if mine[0] == "states" else super().told(group, mine)


def steps_run(peers: Peers, nbytes: int = 2**20) -> int:
    """How often a step of 10 runs, besides those that tell what one takes."""
    x = c64([0.5, 1.0])
    with pytest.MonkeyPatch.context() as patch:
        everyone = of_all(peers, patch)
        step = Counted(lambda s: tg.sin(everyone(s)))
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.checkpointed_loop(step, x, 10, bytes=nbytes) + x
        first = step.take()
        tape.gradient(y, x)
        return first + step.take()


def test_among_several_processes_as_many_states_are_stored_as_fit_on_each() -> None:
    alone = steps_run(Others())
    for states, stored in (((4, 2), 2), ((3, 100), 3), ((1, 9), 1)):
        assert steps_run(Others(*states)) - alone == extra_steps(10, stored) - extra_steps(10, 10)


def test_too_few_bytes_on_another_process_are_an_error_here_that_says_where() -> None:
    with pytest.raises(
        RecomputeError, match=r"checkpointed_loop.*: bytes is too little on rank 2, which says how many"
    ):
        steps_run(Others(5, 0, 7))
    with pytest.raises(RecomputeError, match=r"bytes=1 \(1 B\) is too little: no stored state fits"):
        steps_run(Others(5, 0), 1)
