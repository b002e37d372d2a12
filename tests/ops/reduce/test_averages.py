"""Weighted averages, covariances, ranges."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import ShapeError
from tapegrad.testing import check_grads


@pytest.fixture
def a(rng):
    return rng.normal(size=(3, 4))


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 1)])
def test_average(axis, keepdims, returned, a, rng):
    w = rng.uniform(size=a.shape)
    for x in (a, a.astype("f4"), np.arange(12).reshape(3, 4)):
        same("average", x, axis, returned=returned, keepdims=keepdims)
        same("average", x, axis, w, returned, keepdims=keepdims)


def test_average_with_weights_of_some_axes(rng):
    x = rng.normal(size=(2, 3, 4, 5))
    same("average", x, 2, rng.uniform(size=4))
    same("average", x, (1, 3), rng.uniform(size=(3, 5)), rtol=1e-14)
    same("average", x, (3, 1), rng.uniform(size=(5, 3)), rtol=1e-14)
    same("average", x, 0, [0.1, 0.7])
    with pytest.raises(ShapeError, match="average: weights of shape"):
        tg.average(x, 1, np.ones(4))
    with pytest.raises(ZeroDivisionError, match="sum to 0"):
        tg.average(x, 1, [1.0, -1.0, 0.0])


@pytest.mark.parametrize(
    "kwargs",
    [
        {}, {"rowvar": False}, {"bias": True}, {"ddof": 0}, {"ddof": 2}, {"fweights": [1, 2, 3, 1]},
        {"aweights": [0.1, 2, 3, 1]}, {"aweights": [0.1, 2, 3, 1], "fweights": [1, 2, 3, 1]},
    ],
)  # fmt: skip
def test_cov(kwargs, a):
    if kwargs == {"rowvar": False}:
        same("cov", a, a[:, :2], rtol=1e-13, **kwargs)
    same("cov", a, rtol=1e-11, **kwargs)
    same("cov", a + 1j * a[::-1], rtol=1e-11, **kwargs)


def test_cov_of_other_shapes(a):
    same("cov", a[0], rtol=1e-13)
    same("cov", a[0], a[1], rtol=1e-13)
    same("cov", a, a, rtol=1e-13)
    same("cov", a.astype("f4"), rtol=1e-13)
    same("cov", a, dtype=np.float32, rtol=1e-6)
    with pytest.raises(ShapeError, match="observations"):
        tg.cov(a, aweights=[1.0, 2.0])


def test_corrcoef(a):
    same("corrcoef", a, rtol=1e-13)
    same("corrcoef", a[0], a[1], rtol=1e-13)
    same("corrcoef", a[0])
    same("corrcoef", a + 1j * a[::-1], rtol=1e-13)


def test_extremes(a):
    for axis in (None, 0, (0, 1)):
        same("ptp", a, axis, keepdims=True)
    low, high = tg.aminmax(a, dim=1)
    np.testing.assert_array_equal(low, a.min(1))
    np.testing.assert_array_equal(high, a.max(1))
    np.testing.assert_allclose(tg.var_mean(a, 0)[0], a.var(0, ddof=1))
    np.testing.assert_allclose(tg.std_mean(a, correction=0, keepdim=True)[0], a.std(keepdims=True))
    g = tg.grad(tg.ptp)(tg.asarray([1.0, 3.0, 3.0, 1.0]))
    assert g.tolist() == [-0.5, 0.5, 0.5, -0.5]


def test_gradients(a, rng):
    w = rng.uniform(0.5, 1, 4)
    check_grads(lambda x, w: tg.average(x, 1, w), [a, w])
    check_grads(lambda x: tg.ptp(x, axis=0) ** 2, [a])
    check_grads(lambda x: tg.cov(x), [a])
    check_grads(lambda x, w: tg.cov(x, aweights=w), [a, w])
    check_grads(lambda x: tg.corrcoef(x)[0, 1:], [a])
    check_grads(lambda x, y: tg.corrcoef(x, y)[0, 1], [a[0], a[1]])
    check_grads(lambda x: tg.std_mean(x, 1)[0], [a])
