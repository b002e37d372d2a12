"""copysign and nextafter."""

from __future__ import annotations

import numpy as np
import pytest
from checks import c64, gradients, same

import tapegrad as tg
from tapegrad import errors, testing

EDGES = [0.0, -0.0, 1.0, -2.5, np.inf, -np.inf, np.nan, -np.nan, 5e-324, 1e308]


@pytest.mark.parametrize("name", ["copysign", "nextafter"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "bool"])
def test_values_are_numpys(name: str, dtype: str) -> None:
    with np.errstate(all="ignore"):
        a = (np.array(EDGES) if "float" in dtype else np.array([0, 1, 0, 1])).astype(dtype)
        x, y = a[:, None], a
        wanted = getattr(np, name)(x, y)
        got = getattr(tg, name)(tg.asarray(x), tg.asarray(y))
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got.numpy(), wanted)
    np.testing.assert_array_equal(np.signbit(got.numpy()), np.signbit(wanted))


def test_forms() -> None:
    same(tg.copysign(c64([1.0, -2.0]), -1), [-1.0, -2.0])
    same(tg.copysign(3.0, c64([1.0, -0.0])), [3.0, -3.0])
    assert tg.nextafter(c64(1.0), np.inf).item() == np.nextafter(1.0, np.inf)
    assert tg.nextafter(tg.zeros((0, 3)), tg.ones(3)).shape == (0, 3)
    for f in (tg.copysign, tg.nextafter):
        with pytest.raises(errors.DTypeError, match=f"{f.__name__}: not defined for complex"):
            f(tg.asarray(1j), 1.0)
        with pytest.raises(errors.ShapeError, match=f.__name__):
            f(tg.ones(2), tg.ones(3))


def test_gradients(rng: np.random.Generator) -> None:
    x, y = rng.normal(size=(2, 3)), rng.normal(size=(3,))
    testing.check_grads(lambda a: tg.copysign(a, y) ** 2, (x,), order=2)
    testing.check_grads(lambda a, b: tg.copysign(a, b), (x, y), order=2)
    s = c64([0.0, -0.0, 2.0, -2.0])
    same(gradients(lambda s: tg.sum(tg.copysign(s, -1.0)), [s]), [[0.0, 0.0, -1.0, 1.0]])
    with pytest.raises(errors.NoGradientError, match="nextafter"):
        gradients(lambda s: tg.sum(tg.nextafter(s, 1.0)), [s])
