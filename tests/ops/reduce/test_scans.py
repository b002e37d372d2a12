"""The largest, smallest and logarithm of the sum of exponentials so far."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import AxisError, DTypeError
from tapegrad.testing import check_grads


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "uint8"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_extremes(name, axis, dtype, rng):
    x = rng.integers(0, 4, (5, 9)).astype(dtype)
    values, places = getattr(tg, name)(x, axis)
    ufunc = np.maximum if name == "cummax" else np.minimum
    np.testing.assert_array_equal(values, ufunc.accumulate(x, axis))
    assert values.dtype == x.dtype and places.dtype == np.int64
    for row, best, at in zip(
        *(np.moveaxis(np.asarray(t), axis, -1).reshape(-1, x.shape[axis]) for t in (x, values, places))
    ):
        for k in range(len(row)):
            assert at[k] == max(i for i in range(k + 1) if row[i] == best[k])  # the last of equal ones


def test_nan_stays():
    values, places = tg.cummax([1.0, np.nan, 2.0, np.nan, 3.0])
    np.testing.assert_array_equal(values, [1, np.nan, np.nan, np.nan, np.nan])
    assert places.tolist() == [0, 1, 1, 3, 3]


def test_the_gradient_goes_to_the_last_of_equal_elements():
    x = tg.asarray([1.0, 3.0, 3.0, 2.0])
    assert tg.grad(lambda x: tg.sum(tg.cummax(x).values))(x).tolist() == [1, 1, 2, 0]
    assert tg.grad(lambda x: tg.sum(tg.cummin(x).values))(x).tolist() == [4, 0, 0, 0]


def test_logcumsumexp(rng):
    x = rng.normal(size=(4, 7)) * 50
    for axis in (0, 1):
        wanted = np.logaddexp.accumulate(x, axis)
        np.testing.assert_allclose(tg.logcumsumexp(x, axis), wanted, rtol=1e-13)
    x[0, 0] = x[1, :] = -np.inf
    np.testing.assert_allclose(tg.logcumsumexp(x, 1), np.logaddexp.accumulate(x, 1), rtol=1e-13)
    g = tg.grad(lambda x: tg.sum(tg.where(tg.isfinite(y := tg.logcumsumexp(x, 1)), y, 0)))(tg.asarray(x)).numpy()
    assert np.isfinite(g).all() and (g[np.isinf(x)] == 0).all()


def test_gradients(rng):
    x = rng.permutation(12).reshape(3, 4) / 4
    for axis in (0, 1):
        check_grads(lambda x: tg.cummax(x, axis).values ** 2, [x])  # noqa: B023
        check_grads(lambda x: tg.cummin(x, axis).values ** 2, [x])  # noqa: B023
        check_grads(lambda x: tg.logcumsumexp(x, axis), [x])  # noqa: B023


def test_edges():
    for name in ("cummax", "cummin", "logcumsumexp"):
        f = getattr(tg, name)
        empty, scalar = f(np.zeros((0, 2)), 0), f(np.array(2.5))
        assert (empty if name == "logcumsumexp" else empty.values).shape == (0, 2)
        assert (scalar if name == "logcumsumexp" else scalar.values).item() == 2.5
        with pytest.raises(AxisError, match=name):
            f([1.0], 1)
        with pytest.raises(DTypeError, match=name):
            f([1j])


@pytest.mark.parametrize(
    "x", [np.full(4, 1e8, np.float32), np.array([-5.0, 1e8, -3.0, 1e8], np.float32), np.array([-np.inf, 1.0, -2.0])]
)
def test_logcumsumexp_keeps_gradients_at_large_arguments(x: np.ndarray) -> None:
    """They are the shares of each element in the sums that it is part of, however large the exponents."""
    wide, shares, first = x.astype(np.float64), np.zeros(x.size), int(np.isfinite(x).argmax())
    for i in range(first, x.size):
        e = np.exp(wide[: i + 1] - wide[: i + 1].max())
        shares[: i + 1] += e / e.sum()
    actual = tg.grad(lambda v: tg.sum(tg.logcumsumexp(v)[first:]))(x)
    np.testing.assert_allclose(actual, shares, rtol=1e-6)
