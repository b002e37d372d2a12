"""Polynomials under NumPy's names."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.testing import check_grads


@pytest.fixture
def p(rng):
    return rng.normal(size=5)


def test_polyval(p, rng):
    for x in (2.0, rng.normal(size=(2, 3)), 1j * p, [1, 2]):
        same("polyval", p, x)
    same("polyval", [1, 2, 3], 2)
    same("polyval", [], p)
    with pytest.raises(ShapeError, match="polyval: coefficients"):
        tg.polyval(np.ones((2, 2)), 1.0)


@pytest.mark.parametrize("name", ["polyadd", "polysub", "polymul"])
def test_arithmetic(name, p):
    same(name, p, p[:3])
    same(name, p[:2], p)
    same(name, [0, 1, 2], [0, 0, 3])
    same(name, p, 2.5)


def test_polydiv(p):
    for u, v in ((p, p[:3]), (p[:2], p), ([3.0, 5, 2], [2.0, 1]), ([1.0, -3, 2], [1.0, -1]), (p, p[:1])):
        same("polydiv", u, v)


@pytest.mark.parametrize("m", [0, 1, 3, 9])
def test_calculus(m, p):
    same("polyder", p, m)
    same("polyder", [1, 2, 3], m)
    same("polyint", p, m)
    same("polyint", p, m, 2.0)
    same("polyint", p, 2, [1.0, 2.0])
    for f in (tg.polyder, tg.polyint):
        with pytest.raises(TapegradError, match="m=-1"):
            f(p, -1)


def test_roots(p):
    for c in (p, [1, -3, 2.0], [0, 1, -3, 2.0, 0, 0], [0, 0.0], [3.0], [1.0, 0, 1.0], 1j * p):
        got, wanted = np.sort_complex(tg.roots(c).numpy()), np.sort_complex(np.roots(c))
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-12)
    same("poly", p)
    same("poly", [1, 2, 3])
    same("poly", np.array([1 + 1j, 1 - 1j, 2]))
    same("poly", np.arange(9.0).reshape(3, 3) ** 2, rtol=1e-10)


def test_polyfit(rng):
    x, y = rng.normal(size=(2, 12))
    both = rng.normal(size=(12, 2))
    same("polyfit", x, y, 3, rtol=1e-9)
    same("polyfit", x, both, 2, w=np.abs(y), rtol=1e-9)
    same("polyfit", x, y, 3, full=True, rtol=1e-9, check_dtype=False)
    same("polyfit", x, both, 2, cov=True, rtol=1e-9)
    same("polyfit", x, y, 2, cov="unscaled", rtol=1e-9)
    with pytest.raises(ShapeError, match="polyfit"):
        tg.polyfit(x, y[1:], 2)


def test_gradients(p, rng):
    x, y = np.linspace(-1, 1, 6), rng.normal(size=6)
    check_grads(lambda p, x: tg.polyval(p, x), [p, x])
    check_grads(lambda p, q: tg.polymul(p, q) + tg.polyadd(p, q)[0] + tg.polysub(p, q)[1], [p, p[:3]])
    check_grads(lambda u, v: tg.polydiv(u, v)[0], [p, np.array([1.5, -0.3, 0.7])])
    check_grads(lambda u, v: tg.polydiv(u, v)[1], [p, np.array([1.5, -0.3, 0.7])])
    check_grads(lambda p: tg.polyder(p, 2) ** 2, [p])
    check_grads(lambda p, k: tg.polyint(p, 2, k) ** 2, [p, p[:2]])
    check_grads(lambda z: tg.poly(z), [p])
    check_grads(lambda c: tg.sum(tg.abs(tg.roots(c))), [np.array([1.0, -1.0, -4.0, 2.0])])
    check_grads(lambda x, y: tg.polyfit(x, y, 2), [x, y], rtol=1e-3)
