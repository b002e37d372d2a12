"""Evenly spaced numbers, and matrices and windows made of them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.testing import check_grads

FORMS = [{}, {"endpoint": False}, {"axis": -1}, {"num": 1}, {"num": 2}, {"num": 0}, {"dtype": np.float32}]


@pytest.mark.parametrize("kwargs", FORMS, ids=str)
def test_spaces_between_arrays(kwargs, rng):
    a, b = rng.normal(size=(2, 4))
    same("linspace", a, b, **kwargs)
    same("linspace", a, 2, **kwargs)
    same("linspace", 0, a.astype("f4"), **kwargs)
    same("linspace", np.float64(1), 2.0, **kwargs)
    same("linspace", a, a, **kwargs)
    same("logspace", a, b, **kwargs)
    for sign in (1, -1):
        same("geomspace", sign * a**2, sign * b**2, **kwargs)


def test_other_forms(rng):
    a, b = rng.normal(size=(2, 4))
    same("linspace", a, b, retstep=True)
    same("linspace", a + 1j, 3.0)
    same("linspace", 0, np.arange(3), 5)
    same("logspace", a, b, num=4, base=np.array([2.0, 3, 4, 5]))
    same("logspace", 0.0, 2.0, 5, dtype=float)
    same("logspace", np.float64(1), 2, base=np.array([2.0, 10.0]), num=3)
    same("geomspace", 1, 1000, 4, dtype=float)
    same("geomspace", np.array([1 + 0j]), np.array([1j]), 5)


def test_python_numbers_make_single_precision():
    for f in (tg.linspace, tg.logspace, tg.geomspace):
        assert f(1, 10, 3).dtype == np.float32
    np.testing.assert_array_equal(tg.linspace(0, 1, 5), np.linspace(0, 1, 5, dtype="f4"))
    assert tg.linspace(0, 1, 5, retstep=True)[1] == 0.25
    with pytest.raises(ShapeError, match="num=-1"):
        tg.linspace(0, 1, -1)
    with pytest.raises(TapegradError, match="cannot contain 0"):
        tg.geomspace(0, 1)


@pytest.mark.parametrize("name", ["bartlett", "blackman", "hamming", "hanning", "kaiser"])
@pytest.mark.parametrize("m", [0, 1, 2, 9])
def test_windows(name, m):
    same(name, m, *([5.0] if name == "kaiser" else []), check_dtype=False, rtol=1e-7)
    more = [5.0] if name == "kaiser" else []
    np.testing.assert_array_equal(getattr(tg, name)(m, *more, dtype="float64"), getattr(np, name)(m, *more))


def test_matrices(rng):
    same("tri", 3, 5, 1, dtype=float)
    same("tri", 3, dtype=int)
    same("identity", 3, dtype=float)
    v = rng.normal(size=4)
    for n in (None, 0, 1, 3, 6):
        same("vander", v, n)
        same("vander", v, n, increasing=True)
        same("vander", np.arange(3), n)
    with pytest.raises(ShapeError, match="vander: needs a vector"):
        tg.vander(np.ones((2, 2)))


def test_gradients(rng):
    a, b = rng.uniform(0.5, 2, (2, 3))
    for endpoint in (True, False):
        check_grads(lambda a, b: tg.linspace(a, b, 4, endpoint) ** 2, [a, b])  # noqa: B023
        check_grads(lambda a, b: tg.logspace(a, b, 4, endpoint, base=2.0), [a, b])  # noqa: B023
        check_grads(lambda a, b: tg.geomspace(a, b, 4, endpoint), [a, b])  # noqa: B023
    check_grads(lambda a, b, c: tg.logspace(a, b, 3, base=c), [a[:2], b[:2], a[1:]])
    check_grads(lambda a: tg.linspace(a, 3.0, 1), [a])
    check_grads(lambda a: tg.vander(a, 4), [np.array([0.0, 1.5, -0.5])])
