"""What an optimizer's step leaves on CUDA, and on the CPU: values that are counted as what they serve, and memory."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from inside import content_of

import tapegrad as tg
from tapegrad.device import CPU, Device

pytestmark = pytest.mark.sampled(1 / 2)

SHAPE = (40, 16)
ROWS = [1, 3]


@pytest.fixture(params=["cpu", "cuda"])
def where(request: pytest.FixtureRequest) -> Device:
    return CPU if request.param == "cpu" else request.getfixturevalue("cuda")


def trained(where: Device, optimizer: Any, dtype: str = "float32") -> tg.Variable:
    """A variable after a step by a gradient of all of it."""
    v = tg.Variable(tg.ones(SHAPE, dtype=dtype, device=where))
    optimizer.apply([tg.ones(SHAPE, dtype=dtype, device=where)], [v])
    return v


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_values_count_as_what_they_serve(where: Device, dtype: str) -> None:
    optimizer = tg.optim.Adam()
    v = trained(where, optimizer, dtype)
    gc.collect()  # what is left of other tests would count, too
    with tg.measure() as before:
        pass
    with tg.measure() as after:
        optimizer.apply([tg.ones(SHAPE, dtype=dtype, device=where)], [v])
    for category in ("parameter", "optimizer"):
        assert after.live_by_category[category] == before.live_by_category[category] > 0


def test_rows_are_written_into_what_a_step_has_made(where: Device) -> None:
    """Unless somebody holds it."""
    optimizer = tg.optim.SGD(0.5)
    v = trained(where, optimizer)

    def step() -> None:
        optimizer.apply([tg.IndexedSlices(tg.ones((len(ROWS), SHAPE[1]), device=where), ROWS, SHAPE)], [v])

    def array() -> Any:
        return content_of(v)

    before = array()
    at = id(before)
    del before
    step()
    assert id(array()) == at
    held = v.value()
    step()
    assert id(array()) != at
    wanted = np.full(SHAPE, 0.5, np.float32)
    wanted[ROWS] -= 0.5
    np.testing.assert_array_equal(held.numpy(), wanted)
    wanted[ROWS] -= 0.5
    np.testing.assert_array_equal(v.numpy(), wanted)
