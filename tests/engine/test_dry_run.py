"""Dry runs: the arrays that nobody computes lie as those would that are computed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core.node import next_index
from tapegrad.core.state import executed, thread
from tapegrad.engine.dry_run import Dry
from tapegrad.engine.evaluate import fill

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "a ufunc": lambda x, y: -x,
    "a ufunc of two": lambda x, y: x + y,
    "one that writes into an array": lambda x, y: tg.nn.functional.relu(x),
    "a chain": lambda x, y: tg.exp(x * 2.0) + tg.nn.functional.relu(y),
    "a comparison": lambda x, y: x < y,
}
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "by rows": lambda x: x,
    "by columns": lambda x: tg.permute_dims(x, (1, 0)),
    "every second": lambda x: x[:, ::2],
    "a row": lambda x: x[:1],
}


@pytest.mark.parametrize("what", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", [3, 40, 150])
def test_small_values_lie_as_they_would_if_they_were_computed(what: str, layout: str, side: int) -> None:
    """Below the size from which arrays come from the pool, above it, and where values wait for others."""
    x, y = (LAYOUTS[layout](tg.asarray(np.random.default_rng(k).normal(size=(side, side)))) for k in range(2))

    def lies() -> Any:
        found = OPERATIONS[what](x, y)._buffer
        fill((found,))
        return found.array.shape, found.array.dtype, found.array.strides

    wanted = lies()
    assert executed(lies, by=Dry(next_index())) == wanted


def test_phantoms_lie_apart_and_each_dry_run_has_all_the_room_there_is() -> None:
    """In the next one the first lies where the first one did: a process may follow any number of programs."""

    def places() -> list[int]:
        found = [thread.executor.device(tg.zeros(1).device).empty((100,), np.dtype("f8")) for _ in range(3)]
        return [array.__array_interface__["data"][0] for array in found]

    first = executed(places, by=Dry(next_index()))
    assert len(set(first)) == 3 and all(b - a >= 800 for a, b in pairwise(first))
    assert executed(places, by=Dry(next_index())) == first
