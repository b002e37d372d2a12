"""Choosing elements by conditions, numbers and masks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import IndexingError, ShapeError, TapegradError
from tapegrad.testing import check_grads


@pytest.fixture
def a(rng):
    return rng.normal(size=(3, 4))


def test_select(a):
    same("select", [a > 0, a > -1], [a, a[0]], 5.0)
    same("select", [a[0] > 0, a > -1], [a, 2])
    same("select", [True, False], [np.arange(2), 1.5])
    with pytest.raises(ShapeError, match="1 conditions for 2 choices"):
        tg.select([a > 0], [a, a])


def test_choose(a):
    i = np.arange(12).reshape(3, 4) - 3
    same("choose", i % 3, [a, a[0], 0.0])
    same("choose", i, [a, -a, 0.0], mode="wrap")
    same("choose", i, [a, -a, 0.0], mode="clip")
    same("choose", 1, [a, -a])
    with pytest.raises(IndexingError, match="out of range for 2 choices"):
        tg.choose(i, [a, a])
    with pytest.raises(TapegradError, match="mode"):
        tg.choose(i, [a, a], mode="nope")


def test_by_masks(a):
    same("compress", [1, 0, 1], a, 0)
    same("compress", [True, False, True, True], a, axis=-1)
    same("compress", [0, 1, 1], a)
    same("extract", a > 0, a)
    same("extract", [0, 1, 2, 0], a[0])
    same("flatnonzero", a > 0)
    for x in (a > 0, np.array(3), np.array(0), np.zeros((2, 0))):
        same("argwhere", x)
    with pytest.raises(IndexingError, match="compress|take"):
        tg.compress([False, True, True, True], a, 0)
    with pytest.raises(ShapeError, match="need a vector"):
        tg.compress(a > 0, a)


def test_piecewise(a):
    same("piecewise", a, [a < 0, a > 1], [lambda t: t * t, 3.0])
    same("piecewise", a, [a < 0, a > 1], [lambda t: t * t, 3.0, lambda t: t - 1])
    same("piecewise", a, [a < 9, a > 0], [lambda t, k: t * k, 3.0], 2.0)
    same("piecewise", a[0], a[0] < 0, [-1, 1])
    same("piecewise", a, [a[:, 0] < 0], [-1, 1])
    with pytest.raises(ShapeError, match="piecewise: a condition"):
        tg.piecewise(a, [np.ones(a.shape[0] + 1, bool)], [1.0, 2.0])
    same("piecewise", np.arange(6), [np.arange(6) < 3], [-1, 7])
    same("piecewise", np.float64(2.0), [False], [1, lambda t: t + 2])
    with pytest.raises(ShapeError, match="3 functions for 1"):
        tg.piecewise(a, [a > 0], [1, 2, 3])


@pytest.mark.parametrize("trim", ["fb", "f", "b", "FB"])
def test_trim_zeros(trim, a):
    for x in (np.array([0, 0, 1.0, 0, 2, 0]), np.zeros(3), np.array([1.0]), np.zeros(0)):
        same("trim_zeros", x, trim)
    same("trim_zeros", np.pad(a, 2), trim)
    same("trim_zeros", np.pad(a, 2), trim, axis=0)


def test_gradients(a):
    b = a[::-1].copy()
    check_grads(lambda x, y: tg.select([a > 0, a < -0.3], [x * x, y], x * y), [a, b])
    check_grads(lambda x, y: tg.choose(np.arange(4) % 3, [x, y, 1.0]) ** 2, [a, b])
    check_grads(lambda x: tg.compress([1, 0, 1], x, 0) ** 2, [a])
    check_grads(lambda x: tg.extract(a > 0, x) ** 2, [a])
    check_grads(lambda x: tg.piecewise(x, [a < 0], [tg.exp, lambda t: t**3]), [a])
    check_grads(lambda x: tg.trim_zeros(tg.pad(x, 1)) ** 2, [a])


def test_other_parts_of_a_piecewise_function_do_not_spoil_the_gradient():
    x = tg.asarray([-1.0, 0.0, 4.0])
    g = tg.grad(lambda x: tg.sum(tg.piecewise(x, [x > 0], [tg.sqrt, 0.0])))(x)
    assert g.tolist() == [0, 0, 0.25]
