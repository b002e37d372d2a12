"""Convolution and correlation of two vectors."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.testing import check_grads

LENGTHS = [(7, 5), (5, 7), (7, 1), (1, 1), (6, 6), (7, 4), (4, 7)]


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_like_numpy(mode, lengths, rng):
    x, y = (rng.normal(size=n) for n in lengths)
    for a, b in ((x, y), (x + 1j * x[::-1], y), (x, 1j * y), (x.astype("f4"), y.astype("f4"))):
        same("convolve", a, b, mode)
        same("correlate", a, b, mode)
    same("correlate", np.arange(lengths[0]), np.arange(lengths[1]), mode)
    check_grads(lambda x, y: tg.convolve(x, y, mode), [x, y])
    check_grads(lambda x, y: tg.correlate(x, y, mode), [x, y])


def test_complex_gradients(rng):
    def f(a, b, c, d):
        return tg.abs(tg.correlate(tg.complex(a, b), tg.complex(c, d), "full")) ** 2

    check_grads(f, [rng.normal(size=n) for n in (4, 4, 3, 3)])


def test_errors():
    for f in (tg.convolve, tg.correlate):
        with pytest.raises(ShapeError, match="two vectors, not empty"):
            f([], [1.0])
        with pytest.raises(ShapeError, match="two vectors"):
            f(np.ones((2, 2)), [1.0])
        with pytest.raises(TapegradError, match="mode 'nope'"):
            f([1.0, 2.0], [1.0], "nope")
