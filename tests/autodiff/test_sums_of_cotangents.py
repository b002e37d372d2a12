"""Cotangents of one value that come from several operations are added, however they come."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

import tapegrad as tg


@pytest.mark.parametrize("within", [nullcontext, tg.measure, lambda: tg.memory_budget("1GiB")],
                         ids=["plain", "measure", "budget"])  # fmt: skip
@pytest.mark.parametrize("size", [3, 100_000])
def test_those_of_a_large_value_come_from_operations_without_elements(size, within):
    """The operations are small enough to be run at once; the sums of their cotangents are not."""
    x, none = tg.asarray(np.ones((size, 1))), tg.asarray(np.ones((size, 0)))
    with within(), tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(x)
        for _ in range(4):
            y = y + tg.sum(tg.sin(none * x))
        g = tape.gradient(y, x)
    np.testing.assert_array_equal(g.numpy(), np.ones((size, 1)))
