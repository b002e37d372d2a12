"""Training steps by gradients of some rows alone, for the tests on the CPU and on devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import optim


def training(v: tg.Variable, optimizer: optim.Optimizer) -> Callable[[Any], Any]:
    """A step of which ``v`` is a table: it gets the rows to take, and gives the loss."""

    def train(at: Any) -> Any:
        with tg.GradientTape() as tape:
            loss = tg.sum(tg.take(v, at, axis=0, sparse_grad=True) ** 2)
        optimizer.apply([tape.gradient(loss, v)], [v])
        return loss

    return train


def captured_by_turns(v: tg.Variable, optimizer: optim.Optimizer, captured: bool) -> list[Any]:
    """Losses, table and state after steps that are captured, by turns with eager ones, or all eager.

    Eager steps write where the program has written; a value that somebody holds meanwhile does not change.
    """
    train = training(v, optimizer)
    f = tg.function(train) if captured else train
    found = []
    for k in range(10):
        at, held = tg.asarray(np.array([k, 7, 7, k + 3])), v.value()
        before = v.numpy(copy=True)
        found.append((train if k % 4 == 3 else f)(at).numpy(copy=True))
        np.testing.assert_array_equal(held.numpy(), before)
        del held
    assert not captured or (f.stats.replays >= 3 and not f.stats.fallbacks)
    return [*found, *(x.numpy(copy=True) for x in (v, *optimizer.variables))]
