"""Numerical derivatives, integrals and interpolation."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.integrate
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import AxisError, ShapeError, TapegradError
from tapegrad.testing import check_grads

COORDINATES = np.array([0, 1, 1.5, 4.0, 4.25])


@pytest.fixture
def a(rng):
    return rng.normal(size=(4, 5))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("axis", [None, 0, -1, (1, 0), (0,)])
def test_gradient(axis, order, a):
    for x in (a, a.astype("f4"), np.arange(20).reshape(4, 5), a + 1j):
        same("gradient", x, axis=axis, edge_order=order)
        same("gradient", x, 2.5, axis=axis, edge_order=order)
    same("gradient", a[0], edge_order=order)
    same("gradient", a, 2.0, COORDINATES, edge_order=order)
    same("gradient", a, COORDINATES, axis=1, edge_order=order)


def test_gradient_of_few(a):
    same("gradient", a[:2], axis=0)
    same("gradient", a[:2], np.array([0, 3.0]), axis=0)
    same("gradient", a[:3], axis=0, edge_order=2)
    with pytest.raises(ShapeError, match="fewer than 2"):
        tg.gradient(a[:1])
    with pytest.raises(AxisError, match="twice"):
        tg.gradient(a, axis=(0, 0))
    with pytest.raises(TapegradError, match="edge_order=3"):
        tg.gradient(a, edge_order=3)
    with pytest.raises(ShapeError, match="2 spacings for 1 axes"):
        tg.gradient(a, 1.0, 2.0, axis=0)


def test_trapezoid(a):
    for x in (a, a.astype("f4"), np.arange(20).reshape(4, 5)):
        same("trapezoid", x)
        same("trapezoid", x, dx=0.3, axis=0)
        same("trapezoid", x, COORDINATES)
        same("trapezoid", x, np.cumsum(a**2, 1))
    same("trapezoid", a[0, :1])
    for kwargs in ({}, {"dx": 0.3, "axis": 0}, {"x": COORDINATES}, {"initial": 0}, {"axis": 0, "initial": 0}):
        got = tg.cumulative_trapezoid(a, **kwargs)
        np.testing.assert_allclose(got, scipy.integrate.cumulative_trapezoid(a, **kwargs), rtol=1e-14, atol=1e-15)
    with pytest.raises(ShapeError, match="trapezoid: coordinates"):
        tg.trapezoid(a, [1.0, 2.0])


def test_ediff1d(a):
    same("ediff1d", a)
    same("ediff1d", a, to_end=[1, 2.0], to_begin=0.0)
    same("ediff1d", np.array([1, 4, 9]), to_begin=np.array([[7]]))
    same("ediff1d", a[0, :1])


@pytest.mark.parametrize("kwargs", [{}, {"left": -9.0}, {"left": -9.0, "right": 9.0}, {"period": 5.0}])
def test_interp(kwargs, rng):
    knots, values = np.array([0, 1, 2.5, 3, 7.0]), rng.normal(size=5)
    for x in (np.array([-1, 0, 0.3, 1, 2.6, 7, 8, np.nan]), 2.7, rng.normal(size=(4, 5)), [1, 2.1], np.arange(3)):
        same("interp", x, knots, values, **kwargs)
        same("interp", x, knots, values + 1j * values[::-1], **kwargs)
    same("interp", 1.1, [1.1, 2, 3], [3, 2, 0], **kwargs)
    same("interp", knots, [1.0], [2.0])
    with pytest.raises(ShapeError, match="interp: xp of shape"):
        tg.interp(1.0, [1.0, 2.0], [1.0])


def test_gradients(a, rng):
    knots, values = np.array([0.1, 1, 2.5, 3.0]), rng.normal(size=4)
    for order in (1, 2):
        check_grads(lambda f: tg.gradient(f, 0.5, edge_order=order)[1] ** 2, [a])  # noqa: B023
        check_grads(lambda f, x: tg.gradient(f, x, axis=1, edge_order=order), [a, COORDINATES])  # noqa: B023
    check_grads(lambda y, x: tg.trapezoid(y, x), [a, COORDINATES])
    check_grads(lambda y, x: tg.trapezoid(y, x, axis=0), [a, a**2])
    check_grads(lambda y, d: tg.cumulative_trapezoid(y, dx=d, axis=0, initial=0), [a, np.array(0.3)])
    check_grads(lambda y, e: tg.ediff1d(y, e, e) ** 2, [a, a[0]])
    at = np.array([0.3, 1.7, 2.6, -1.3, 9.3])
    check_grads(lambda x, k, v: tg.interp(x, k, v), [at, knots, values])
    check_grads(lambda x, k, v: tg.interp(x, k, v, period=4.0), [at, knots, values])
    check_grads(lambda v: tg.interp(knots, knots, v) ** 2, [values])


def test_slope_at_points_and_outside():
    g = tg.grad(lambda x: tg.sum(tg.interp(x, [0.0, 1.0, 3.0], [0.0, 2.0, 3.0])))
    assert g(tg.asarray(np.array([-1.0, 0.0, 1.0, 2.0, 3.0, 5.0, np.inf]))).tolist() == [0, 2, 0.5, 0.5, 0.5, 0, 0]
