"""Every operation of the coverage table, captured with its gradient: the bits of eager calls, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from captured import bits
from table.registry import CASES

import tapegrad as tg
from tapegrad.engine import region

CALLS = 3
BY_VALUES = {
    "linalg.lstsq", "scipy.linalg.sqrtm", "nn.roi_pooling_2d", "average", "choose", "histogram", "histogram2d",
    "histogramdd", "polymul", "polydiv", "polyfit", "roots", "scipy.integrate.odeint", "sparse_matmul",
}  # fmt: skip
"""What they do depends on values: they run eagerly."""


@pytest.fixture(params=["at once", "in regions"])
def small(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether small arrays run at once or through regions."""
    before = region.SMALL
    region.set_small(before if request.param == "at once" else 1)
    yield
    region.set_small(before)


@pytest.mark.sampled(1 / 5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("op", CASES)
def test_captured(op: str) -> None:
    case = CASES[op]

    def f(*xs: tg.Tensor) -> Any:
        with tg.GradientTape() as tape:
            tape.watch(list(xs))
            ys = case.function(*xs)
            total = sum(tg.sum(tg.real(y) ** 2) if y.dtype.kind == "c" else tg.sum(y**2) for y in ys)
        return tuple(ys), tape.gradient(total, list(xs))

    captured = tg.function(f)
    for k in range(CALLS):
        xs = [tg.asarray(x * (1 - 0.003 * k)) for x in case.leaves]
        got = captured(*xs)
        if k == CALLS - 1:
            assert bits(got) == bits(f(*xs))
    reasons = list(captured.stats.fallbacks)
    if op in BY_VALUES:
        assert captured.stats.replays == 0
        assert "depends on values" in reasons[0]
    elif reasons:  # how results lie was found out at the second call
        assert "lie otherwise" in reasons[0]
        assert bits(captured(*xs)) == bits(f(*xs))
        assert (captured.stats.traces, captured.stats.replays) == (2, 1)
    else:
        assert (captured.stats.traces, captured.stats.replays) == (1, CALLS - 2)
