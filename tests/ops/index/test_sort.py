"""Sorting and searching."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import AxisError, DTypeError, ShapeError
from tapegrad.testing import check_grads


@pytest.fixture(params=[(3, 4, 5), (30, 41, 17)])
def x(request, rng):
    return rng.permutation(np.prod(request.param)).reshape(request.param) / 10


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_values(axis, x):
    np.testing.assert_array_equal(tg.sort(x, axis=axis).numpy(), np.sort(x, axis))
    np.testing.assert_array_equal(tg.sort(x, axis=axis, descending=True).numpy(), -np.sort(-x, axis))
    np.testing.assert_array_equal(tg.argsort(x, axis=axis).numpy(), np.argsort(x, axis))
    for name in ("argmax", "argmin"):
        got, wanted = getattr(tg, name)(x, axis=axis), getattr(np, name)(x, axis)
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got.numpy(), wanted)
        assert getattr(tg, name)(x, axis=axis, keepdims=True).shape == getattr(np, name)(x, axis, keepdims=True).shape
        assert getattr(tg, name)(x).item() == getattr(np, name)(x)


def test_equal_elements_keep_their_order():
    x = [1, 0, 1, 0, 1]
    assert tg.argsort(x).tolist() == [1, 3, 0, 2, 4]
    assert tg.argsort(x, descending=True).tolist() == [0, 2, 4, 1, 3]
    assert tg.argmax(x).item() == 0 and tg.argmin(x).item() == 1


def test_nan():
    x = tg.asarray([2.0, np.nan, 1.0])
    np.testing.assert_array_equal(tg.sort(x).numpy(), [1, 2, np.nan])
    assert tg.argmax(x).item() == tg.argmin(x).item() == 1


def test_gradients(x):
    small = x[:3, :4, :2]
    check_grads(lambda x: tg.sort(x, axis=1) * np.arange(8.0).reshape(4, 2), [small])
    check_grads(lambda x: tg.sort(x, axis=0, descending=True) ** 2, [small])
    check_grads(lambda x: tg.top_k(x, 2, axis=1).values ** 2, [small])
    w = np.arange(x.size, dtype=float).reshape(x.shape)
    g = tg.grad(lambda x: tg.sum(tg.sort(x, axis=1) * w))(tg.asarray(x)).numpy()
    np.testing.assert_array_equal(np.take_along_axis(g, np.argsort(x, 1), 1), w)


def test_positions_are_not_followed(x):
    with tg.GradientTape() as tape:
        t = tg.asarray(x)
        tape.watch(t)
        y = tg.sum(tg.astype(tg.argmax(t, axis=0), "float64")) + tg.sum(t * 0)
    assert (tape.gradient(y, t).numpy() == 0).all()


def test_top_k_searchsorted_unique():
    values, indices = tg.top_k([[3, 1, 2], [4, 6, 5]], 2)
    assert values.tolist() == [[3, 2], [6, 5]] and indices.tolist() == [[0, 2], [1, 2]]
    assert tg.searchsorted([1.0, 2.0, 2.0], [[2.0, 0.0]], side="right").tolist() == [[3, 0]]
    assert tg.searchsorted([2.0, 1.0], 1.5, sorter=[1, 0]).item() == 1
    x = np.array([[3, 1], [1, 2]])
    found = tg.unique_all(x)
    assert found.values.tolist() == [1, 2, 3] == tg.unique_values(x).tolist() and found.counts.tolist() == [2, 1, 1]
    assert found.values[found.inverse_indices].tolist() == x.tolist() == found.values[tg.unique_inverse(x)[1]].tolist()
    assert x.ravel()[found.indices.numpy()].tolist() == [1, 2, 3] and tg.unique_counts([np.nan, np.nan])[1].size == 2


def test_empty_and_errors():
    assert tg.sort(np.ones((0, 3)), axis=0).shape == (0, 3) and tg.argsort(np.ones(0)).shape == (0,)
    for call, error in (
        (lambda: tg.argmax(np.ones((0, 3)), axis=0), ShapeError),
        (lambda: tg.argmax(np.ones(0)), ShapeError),
        (lambda: tg.sort(np.ones(3), axis=1), AxisError),
        (lambda: tg.sort(1.0), AxisError),
        (lambda: tg.argmax([1j]), DTypeError),
        (lambda: tg.top_k([1], 2), ShapeError),
        (lambda: tg.searchsorted([[1]], 1), ShapeError),
    ):
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_nan_sorts_last_in_every_dtype(dtype):
    x = tg.astype(tg.asarray([3.0, np.nan, 1.0, np.nan, 2.0]), dtype)
    as_float = lambda t: tg.astype(t, "float32").numpy()
    np.testing.assert_array_equal(as_float(tg.sort(x)), [1, 2, 3, np.nan, np.nan])
    np.testing.assert_array_equal(tg.argsort(x), [2, 4, 0, 1, 3])
    np.testing.assert_array_equal(np.sort(as_float(tg.partition(x, 2))[:3]), [1, 2, 3])
    np.testing.assert_array_equal(as_float(tg.unique(x)), [1, 2, 3, np.nan])
    np.testing.assert_array_equal(as_float(tg.unique_values(x)), [1, 2, 3, np.nan, np.nan])
    assert tg.unique_all(x).values.dtype == x.dtype
    np.testing.assert_array_equal(tg.searchsorted(tg.sort(x), x), [2, 3, 0, 3, 1])
    assert as_float(tg.nanmedian(x)) == 2
    np.testing.assert_array_equal(as_float(tg.grad(lambda x: tg.sum(tg.sort(x)[:2]))(x)), [0, 0, 1, 0, 1])
