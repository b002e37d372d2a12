"""An executor over the one in force does nothing of its own."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.engine.above import Above
from tapegrad.ops.row_updates import write_rows


@pytest.mark.parametrize("length", [4, 40_000])
def test_rows_are_written_as_without_it(length: int) -> None:
    """Into the array that there is, if it is big, as into a copy."""
    v = tg.Variable(np.zeros((length, 2)))
    with tg.measure() as m:
        Above().during(write_rows, v, tg.asarray([2, -1, 0]), tg.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert v[:4].numpy().tolist() == [[5.0, 6.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]
    assert m.allocated_bytes < v.nbytes or length == 4
