"""constant: TensorFlow's way to make a tensor."""

from __future__ import annotations

import numpy as np
import pytest
from checks import c64, same

import tapegrad as tg
from tapegrad.errors import ShapeError


def test_constant_takes_a_shape() -> None:
    same(tg.constant([1, 2, 3, 4, 5, 6], shape=(2, 3), name="c"), [[1, 2, 3], [4, 5, 6]])
    same([tg.constant(-1.0, shape=[2, 3]), tg.constant([7.0], shape=2)], [np.full((2, 3), -1.0), [7.0, 7.0]])
    assert tg.constant(3, "float64", ()).shape == () and tg.constant(value=[], shape=(0, 2)).shape == (0, 2)
    assert tg.constant(2.0, shape=(0,)).shape == (0,)
    x = c64([1.0, 2.0])
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.constant(x[:1], shape=(3,)) * tg.constant(x, shape=(2, 1))
    same(tape.gradient(y, x), [12.0, 3.0])
    for wrong in ((2,), (4,), ()):
        with pytest.raises(ShapeError, match=r"constant: a value of shape \(3,\) has 3 elements, too few or many"):
            tg.constant([1.0, 2.0, 3.0], shape=wrong)
