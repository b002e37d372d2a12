"""What a thread is doing, and where steps end: with gradients, optimizers or the program's own marks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.memory.ledger.ledger import LEDGER
from tapegrad.memory.ledger.phase import (
    BACKWARD,
    BY_GRADIENT,
    BY_OPTIMIZER,
    BY_PROGRAM,
    FORWARD,
    HERE,
    OPTIMIZER,
    OTHER,
    RECOMPUTE,
    SPECIAL,
    STEPS,
    Steps,
    during,
    optimizing,
    phase,
    set_differentiated,
)

X = tg.asarray(np.ones(4, np.float32))


@pytest.fixture(autouse=True)
def marks() -> Iterator[list[int]]:
    """The marks that count, by kind."""
    found: list[int] = []
    STEPS.restart()
    set_differentiated(False)
    STEPS.listen(found.append)
    yield found
    STEPS.leave(found.append)
    STEPS.restart()
    set_differentiated(False)


def gradient(f: Any = tg.tanh) -> None:
    with tg.GradientTape() as tape:
        tape.watch(X)
        y = f(X)
    tape.gradient(y, X)


def test_a_step_ends_where_the_next_tape_records_after_a_gradient(marks: list[int]) -> None:
    before = set(SPECIAL)  # threads of earlier tests
    with tg.measure():
        gradient()
        tg.exp(X)  # still of the step
        assert marks == []
        gradient()
        assert marks == [BY_GRADIENT]
        gradient(lambda x: (tg.cumulative_sum(x), marks.append(-1))[0])  # a value that is told of by itself
        assert (marks.pop(), marks.pop()) == (-1, BY_GRADIENT)
        gradient(lambda x: (gradient(), tg.sin(x))[1])  # ends one; the inner gradient ends none
        assert marks == [BY_GRADIENT] * 2
        gradient(tg.recompute_grad(lambda x: (gradient(), tg.sin(x))[1]))  # nor does that in a rerun
        assert marks == [BY_GRADIENT] * 3
        gradient()
    assert marks == [BY_GRADIENT] * 4 and SPECIAL - before <= {threading.get_ident()}


def test_marks_of_one_kind_take_the_place_of_lesser_ones() -> None:
    steps, told, other = Steps(), list[int](), list[int]()
    steps.listen(told.append)
    steps.listen(other.append)
    for kind in (BY_GRADIENT, BY_OPTIMIZER, BY_GRADIENT, BY_OPTIMIZER, BY_PROGRAM, BY_OPTIMIZER, BY_PROGRAM):
        steps.mark(kind)
    assert told == other == [BY_GRADIENT, BY_OPTIMIZER, BY_OPTIMIZER, BY_PROGRAM, BY_PROGRAM] and steps.count == 5
    steps.leave(other.append)
    steps.restart()
    steps.mark(BY_GRADIENT)
    assert (told[5:], len(other), steps.count) == ([BY_GRADIENT], 5, 6)


def test_what_a_thread_is_doing() -> None:
    seen: list[int] = []

    @tg.custom_gradient
    def g(x: tg.Tensor) -> Any:
        return tg.sin(x), lambda ct: (seen.append(phase()), ct)[1]

    assert phase() == OTHER
    with optimizing():
        with optimizing():
            pass
        assert phase() == OPTIMIZER
    with tg.measure():
        with tg.GradientTape() as tape:
            tape.watch(X)
            assert phase() == FORWARD
            y = tg.recompute_grad(lambda x: (seen.append(phase()), tg.exp(x))[1])(g(X))
        tape.gradient(y, X)
    assert seen == [FORWARD, RECOMPUTE, BACKWARD] and phase() == OTHER


def test_a_step_that_ends_in_a_rerun_leaves_its_values_rematerialized() -> None:
    seen: list[tuple[bool, int]] = []

    def rerun() -> None:
        set_differentiated(False)
        seen.append((HERE.special, len(SPECIAL & {threading.get_ident()})))
        y = tg.exp(X)
        seen.append((LEDGER.by("category")["rematerialized"] == 512, y.nbytes))

    with tg.measure(), tg.GradientTape():
        during(rerun, reruns=True, special=True)
        assert seen == [(True, 1), (True, 16)]
        assert not HERE.special
    set_differentiated(True)
    assert HERE.special and HERE.differentiated and threading.get_ident() in SPECIAL
    set_differentiated(False)
    assert not HERE.special and not HERE.differentiated and threading.get_ident() not in SPECIAL
