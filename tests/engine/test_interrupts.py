"""Ctrl-C in the middle of an evaluation: its lock is free then, and the value is there when it is asked for again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import c64, same
from core.test_locks import Interrupts

import tapegrad as tg
from tapegrad.core.buffer import Buffer
from tapegrad.engine import evaluate

X = np.linspace(-1.0, 1.0, 20_000)


def pending() -> tuple[list[Buffer], Callable[[], None]]:
    """Two values that share work, and a view of one."""
    x = c64(X)
    y = tg.tanh(x)
    found = [y * 2.0, y + 1.0, tg.real(y)]

    def right() -> None:
        for t, wanted in zip(found, (np.tanh(X) * 2, np.tanh(X) + 1, np.tanh(X)), strict=True):
            same(t, wanted)

    return [t._buffer for t in found], right


def postponed() -> tuple[list[Buffer], Callable[[], None]]:
    """A product that nobody has asked for, and what is made of it."""
    m = c64(X[:400].reshape(20, 20))
    product = tg.Tensor(evaluate.postponed((m @ m)._buffer.node, (m._buffer, m._buffer)))
    return [product._buffer], lambda: same(product, m.numpy() @ m.numpy())


@pytest.mark.parametrize(
    ("make", "evaluated"), [(pending, evaluate.fill), (postponed, evaluate.fill), (postponed, evaluate.catch_up)]
)
def test_an_interrupt_at_any_instruction_of_an_evaluation_leaves_its_lock_free(
    make: Callable[[], Any], evaluated: Callable[[list[Buffer]], None]
) -> None:
    made: list[Any] = []
    make()

    def work() -> None:
        evaluated(made[-1][0])

    made.append(make())
    count = 0
    for where in Interrupts([evaluate.__file__], opcodes=True).everywhere(work, turns=1):
        count += 1
        assert not evaluate._lock._is_owned(), where
        made.pop()[1]()
        made.append(make())
    assert count > 100
