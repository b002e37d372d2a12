"""Medians and quantiles."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.ops.reduce.quantiles import DISCRETE, POSITIONS
from tapegrad.testing import check_grads

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:Mean of empty slice")
WANTED = [0.3, 0, 1, 0.25, np.float32(0.7), np.float64(0.7), [0.1, 0.5, 1.0], np.array([[0.25, 0.75]])]


@pytest.fixture
def a(rng):
    return rng.normal(size=(3, 4))


@pytest.fixture
def holes(a):
    a = a.copy()
    a[0, 1] = a[2] = np.nan
    return a


@pytest.mark.parametrize("method", POSITIONS)
@pytest.mark.parametrize("q", WANTED, ids=str)
def test_methods(method, q, a, holes):
    for axis in (None, 0, -1, (0, 1)):
        same("quantile", a, q, axis, method=method)
    same("quantile", a.astype("f4"), q, 0, method=method, keepdims=True)
    same("quantile", np.arange(12).reshape(3, 4), q, 1, method=method)
    for axis in (0, 1):
        same("quantile", holes, q, axis, method=method)
        same("nanquantile", holes, q, axis, method=method)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("method", POSITIONS)
def test_every_length(n, method, rng):
    same("quantile", rng.normal(size=n), np.linspace(0, 1, 13), method=method)


def test_percentiles(a, holes):
    same("percentile", a, 30)
    same("percentile", a, [10, 20.5], axis=0, keepdims=True)
    same("nanpercentile", holes, [10, 20.5], axis=0)


def test_weights(a, holes, rng):
    w = rng.uniform(size=a.shape)
    for q in (0.4, 0.0, [0.1, 0.5, 1.0]):
        same("quantile", a, q, axis=1, method="inverted_cdf", weights=w)
        same("quantile", a, q, method="inverted_cdf", weights=w)
        same("quantile", a, q, axis=1, method="inverted_cdf", weights=np.array([0, 1, 2, 0.5]))
        same("nanquantile", holes, q, axis=0, method="inverted_cdf", weights=w)
    with pytest.raises(TapegradError, match="inverted_cdf, with weights"):
        tg.quantile(a, 0.5, weights=w)


@pytest.mark.parametrize("name", ["median", "nanmedian"])
def test_median(name, a, holes, rng):
    for x in (a, a[:, :3], holes, holes[:, :3], a.astype("f2"), a.astype("f4"), (a * 9).astype(int), a > 0):
        for axis in (None, 0, 1, (0, 1)):
            same(name, x, axis) if x.dtype != bool else None
        same(name, rng.normal(size=(2, 3, 4)), axis=(0, 2), keepdims=True)
    same(name, np.zeros((0, 3)), axis=0)
    same(name, np.array(3.5))


def test_gradients(a):
    for method in POSITIONS:
        check_grads(lambda x: tg.quantile(x, [0.13, 0.57, 0.81], axis=1, method=method) ** 2, [a])  # noqa: B023
        if method not in (*DISCRETE, "averaged_inverted_cdf", "midpoint"):
            check_grads(lambda x, q: tg.quantile(x, q, axis=0, method=method), [a, np.array([0.41, 0.57])])  # noqa: B023
    check_grads(lambda x: tg.median(x, axis=(0, 1), keepdims=True) ** 2, [a])
    check_grads(lambda x: tg.nanmedian(x, axis=1) ** 2, [a])
    check_grads(lambda x: tg.nanpercentile(x, 30, axis=1) ** 2, [a])


def test_gradients_at_ties_and_nan(holes):
    grad = tg.grad(lambda x: tg.median(x))
    assert grad(tg.asarray([1.0, 4.0, 2.0, 3.0])).tolist() == [0, 0, 0.5, 0.5]
    assert grad(tg.asarray([2.0, 1.0, 2.0, 2.0, 5.0])).tolist() == [0, 0, 1, 0, 0]
    g = tg.grad(lambda x: tg.sum(tg.nanmedian(x, axis=1)[:2]))(tg.asarray(holes)).numpy()
    assert (g[np.isnan(holes)] == 0).all() and g.sum() == 2


def test_discrete_methods_choose_one_element(a):
    q = tg.asarray(np.float64(0.4))
    with tg.GradientTape() as tape:
        tape.watch(q)
        y = tg.quantile(a, q, method="lower") + 0 * q
    assert tape.gradient(y, q).item() == 0


def test_errors(a):
    with pytest.raises(TapegradError, match=r"quantile: 1.5 has elements outside \[0, 1\]"):
        tg.quantile(a, 1.5)
    with pytest.raises(TapegradError, match="percentile"):
        tg.percentile(a, tg.asarray([-1.0]))
    with pytest.raises(TapegradError, match="method 'nope'"):
        tg.quantile(a, 0.5, method="nope")
    with pytest.raises(ShapeError, match="no elements"):
        tg.quantile(np.zeros((0, 2)), 0.5, axis=0)
    with pytest.raises(DTypeError, match="no order"):
        tg.median(1j)


@pytest.mark.parametrize(
    "f", [tg.median, tg.nanmedian, lambda x: tg.quantile(x, 0.3)], ids=["median", "nan", "quantile"]
)
def test_a_tape_keeps_places_of_what_matters(f):
    x = tg.Variable(np.random.default_rng(0).normal(size=100_000))
    with tg.GradientTape() as tape:
        y = f(x)
        saved = tg.memory.saved(tape)
    assert saved.kept_bytes < 10_000, saved
    assert tape.gradient(y, x).numpy().any()
