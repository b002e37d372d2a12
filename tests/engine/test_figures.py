"""What a measure says of one operation, for each way in which it runs: counted together, one by one, in a budget.

Kernels, bytes moved and cost are worked out by hand: what is read and written, each array once, 8 bytes an element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
from checks import c64

import tapegrad as tg

SMALL, LARGE = 100, 40_000
BUDGET = "a budget"


class Figures(NamedTuple):
    """Of an operation on ``n`` elements."""

    nodes: dict[str, int]
    kernels: int
    moved: int
    cost: int


CASES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[int], Figures]]] = {
    "a ufunc": (lambda x, m: tg.exp(x), lambda n: Figures({"exp": 1}, 1, 16 * n, 8 * n + 1)),
    "an array twice": (lambda x, m: x * x, lambda n: Figures({"multiply": 1}, 1, 16 * n, 8 * n + 1)),
    "no ufunc": (lambda x, m: tg.nn.functional.relu(x), lambda n: Figures({"relu": 1}, 1, 16 * n, 8 * n + 1)),
    "three operands": (
        lambda x, m: tg.where(x > 0.5, x, x),
        # Together the truth values are not stored.
        lambda n: (
            Figures({"greater": 1, "where": 1}, 2, 9 * n + 8 + 17 * n, 9 * n + 2)
            if n == SMALL
            else Figures({"greater": 1, "where": 1}, 1, 16 * n + 8, 9 * n + 2)
        ),
    ),
    "a view": (lambda x, m: x[1:], lambda n: Figures({}, 0, 0, 1)),
    "another name": (lambda x, m: tg.real(x), lambda n: Figures({}, 0, 0, 1)),
    "a reduction": (
        lambda x, m: tg.sum(m, axis=0),
        lambda n: Figures({"sum": 1}, 1, 8 * n + 8 * n // 10, 8 * n + 8 * n // 10 + 1),
    ),
    "a copy": (
        lambda x, m: tg.concat([x, x]),
        lambda n: Figures({"concat": 1}, 1, 8 * n + 16 * n, 2 * 8 * n + 16 * n + 1),
    ),
    "creation": (lambda x, m: tg.zeros((x.size,)), lambda n: Figures({}, 0, 0, 0)),
}
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "together": nullcontext,
    "one by one": lambda: tg.measure(timeline=True),
    BUDGET: lambda: tg.memory_budget("1GiB"),
}


@pytest.mark.parametrize("n", [SMALL, LARGE])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", CASES)
def test_each_way_of_running_is_counted_alike(what: str, way: str, n: int) -> None:
    operation, figures = CASES[what]
    x, m = c64(np.linspace(0.1, 1.0, n)), c64(np.ones((10, n // 10)))
    with WAYS[way](), tg.measure() as measured:
        y = operation(x, m)
        y.numpy()
    got = Figures(measured.nodes_run, measured.kernel_runs, measured.bytes_moved, measured.cost)
    assert got == figures(n)._replace(nodes=Counter(figures(n).nodes))
    assert n == LARGE or not measured.scratch_bytes


@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_due_to_the_line_of_the_operation_that_needs_them(way: str) -> None:
    """Not to the line that asks for a value that waits."""
    x = c64(np.ones(LARGE))

    def later() -> tg.Tensor:
        y = tg.exp(x)
        z = y[::2]
        z.numpy()
        return z

    with WAYS[way](), tg.measure() as m:
        z = later()
    line = later.__code__.co_firstlineno + 1
    lines = {place: n for place, n in m.peak_by_line.items() if "before" not in place}
    assert [place.endswith(f"{__file__}:{line}") for place in lines] == [True] and z.shape == (LARGE // 2,)
