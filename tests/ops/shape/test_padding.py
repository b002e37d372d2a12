"""NumPy's modes of padding."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.ops.shape.padding import MODES
from tapegrad.testing import check_grads

FILLING = [m for m in MODES if m != "empty"]


@pytest.mark.parametrize("mode", FILLING)
def test_modes(mode, rng):
    x = rng.normal(size=(3, 4))
    for a in (x, np.arange(12).reshape(3, 4), x[0], x[:1], rng.normal(size=(2, 3, 2))):
        for width in (1, (2, 3), ((1, 2),) * a.ndim, 0, [[2]], ((9, 11),), np.array([1, 2])):
            same("pad", a, width, mode, rtol=1e-13)


@pytest.mark.parametrize("mode", ["reflect", "symmetric"])
@pytest.mark.parametrize("width", [0, 1, 2, (3, 5), (13, 9)])
def test_odd_reflection(mode, width, rng):
    same("pad", np.arange(12).reshape(3, 4) ** 2, width, mode, reflect_type="odd")
    same("pad", rng.normal(size=5), width, mode, reflect_type="odd", rtol=1e-13)
    same("pad", np.array([[1, 2, 4]]), width, mode, reflect_type="odd")


def test_values_and_lengths(rng):
    x = rng.normal(size=(3, 4))
    for values in (3, (1, 2), ((1, 2), (3, 4)), [[1.5]]):
        same("pad", x, 2, "constant", constant_values=values)
        same("pad", x, 2, "linear_ramp", end_values=values)
    for length in (None, 2, (1, 2), ((1, 2), (3, 1)), 99):
        for mode in ("maximum", "minimum", "mean", "median"):
            same("pad", x, 2, mode, stat_length=length, rtol=1e-14)
    same("pad", x, {1: (1, 2)})
    same("pad", x, {-1: 2}, "edge")
    assert tg.pad(x, 2, "empty").shape == (7, 8)
    same("pad", x[:, :0], ((1, 1), (0, 2)), "constant")


def test_gradients(rng):
    x = rng.permutation(12).reshape(3, 4) / 3
    for mode in FILLING:
        check_grads(lambda x: tg.pad(x, (2, 3), mode) ** 2, [x])  # noqa: B023
    for mode in ("reflect", "symmetric"):
        check_grads(lambda x: tg.pad(x, 5, mode, reflect_type="odd") ** 2, [x])  # noqa: B023
    check_grads(lambda x, c: tg.pad(x, 1, constant_values=c) ** 2, [x, np.array(0.5)])
    check_grads(lambda x, c: tg.pad(x, 2, "linear_ramp", end_values=c) ** 2, [x, np.array(0.5)])
    check_grads(lambda x: tg.pad(x, 2, "mean", stat_length=2) ** 2, [x])


def test_errors():
    x = np.ones((2, 3))
    with pytest.raises(TapegradError, match="mode 'nope'"):
        tg.pad(x, 1, "nope")
    for width in (-1, ((1, 2), (3, 4), (5, 6)), 1.5):
        with pytest.raises(ShapeError, match="pad: pad_width"):
            tg.pad(x, width)
    with pytest.raises(ShapeError, match="is empty"):
        tg.pad(x[:0], 1, "edge")
    with pytest.raises(ShapeError, match="stat_length of 0"):
        tg.pad(x, 1, "maximum", stat_length=0)
