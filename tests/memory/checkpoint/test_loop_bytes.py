"""How many states a loop may store within a number of bytes."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from checks import Counted, c64, var64
from peers import Peers, of_all

import tapegrad as tg
from tapegrad.core.state import thread
from tapegrad.errors import RecomputeError
from tapegrad.memory.checkpoint.loop import Loop
from tapegrad.memory.checkpoint.loop_bytes import Needs, _fit, _needs_of, states_in
from tapegrad.memory.schedules.actions import count
from tapegrad.memory.schedules.revolve import extra_steps
from tapegrad.memory.schedules.sqrt import sqrt

NEEDS = Needs(least=1000, held=100, state=30, tape=7)


@pytest.mark.parametrize("n", [1, 2, 5, 9, 30])
def test_even_segments_take_what_their_schedule_says(n: int) -> None:
    """The fewest that fit: they are run again least."""

    def takes(c: int) -> int:
        found = count(sqrt(n, c), n)
        return NEEDS.least + (c - 1) * NEEDS.state + (found.tapes - 1) * NEEDS.tape

    least = min(map(takes, range(1, n + 1)))
    for room in range(least - 1, takes(1) + 2):
        fitting = [c for c in range(1, n + 1) if takes(c) <= room]
        assert _fit(NEEDS, room, "sqrt", n) == (fitting[0] if fitting else 0, least)


def test_states_fit_while_there_is_room_and_steps() -> None:
    assert [_fit(NEEDS, room, None, 5)[0] for room in (999, 1000, 1029, 1030, 1119, 1120, 9999)] == [
        0,
        1,
        1,
        2,
        4,
        5,
        5,
    ]
    assert _fit(NEEDS, 1060, None, None) == (3, 1000)
    assert _fit(NEEDS, 9999, None, 1) == (1, 1000)
    assert _fit(Needs(1000, 100, 0, 7), 1003, None, None) == (4, 1000), (
        "as many as there are bytes, where none is taken"
    )


def test_a_mixed_schedule_has_its_units_besides_the_initial_state() -> None:
    assert [_fit(NEEDS, room, "mixed", 5)[0] for room in (1029, 1030, 1059, 1060)] == [0, 1, 1, 2]
    assert _fit(Needs(1000, 0, 7, 30), 1060, "mixed", 5) == (2, 1030)


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


def needs_of(step: Any, x: Any) -> Needs:
    """What a loop of ``step`` needs from ``x`` on, under a tape that watches that."""
    with tg.GradientTape() as tape:
        tape.watch(x)
        return _needs_of(Loop(step, "loop", 8), x, list(thread.recorders), False)[0]


def test_a_state_that_has_not_been_computed_is_there_before_the_loop() -> None:
    x = c64(np.linspace(0.1, 1.0, 20_480))
    with tg.GradientTape() as tape:
        tape.watch(x)
        pending = x * 2.0
        found = _needs_of(Loop(tg.sin, "loop", 8), pending, list(thread.recorders), False)[0]
    assert found == needs_of(tg.sin, x) and found.held == x.nbytes


def test_a_variable_takes_the_bytes_of_its_gradient_where_that_is_asked_for() -> None:
    x = c64(np.linspace(0.1, 1.0, 512))
    constant, frozen, trained = (
        needs_of(lambda s, w=beside: tg.sin(s) * w, x * 1.0).least
        for beside in (x * 1.0, var64(x, trainable=False), var64(x))
    )
    assert constant == frozen < trained


def test_what_fails_to_fit_into_a_budget_when_it_is_tried_needs_what_is_held() -> None:
    """The loop itself may do with less, or says what it lacks."""
    x = c64(np.linspace(0.1, 1.0, 4096))
    with tg.measure() as m:
        live = m.live_bytes
    with tg.memory_budget(live + 1024):
        needs = needs_of(tg.sin, x)
    assert needs.least == needs.held == x.nbytes


def test_within_a_budget_no_more_states_are_stored_than_it_has_room_for() -> None:
    """Beside what is alive; what the loop was given is alive already."""
    x, beside = c64(np.linspace(0.1, 1.0, 512)), c64(np.ones(512))
    loop = Loop(lambda s: tg.sin(s) * x, "loop", 12)
    with tg.GradientTape() as tape:
        tape.watch(x)
        _needs_of(loop, x, list(thread.recorders), False)  # its constants are there
        needs, _ = _needs_of(loop, x, list(thread.recorders), False)
        with tg.measure() as m:
            live = m.live_bytes
        for limit, states in ((0, 1), (1, 1), (4095, 1), (4096, 2), (3 * 4096, 4), (2**30, 12)):
            with tg.memory_budget(live + needs.least - needs.held + limit):
                assert states_in(loop, x, 2**40, "revolve", list(thread.recorders)) == states
                assert states_in(loop, x, needs.least, "revolve", list(thread.recorders)) == 1
    del beside


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
