"""Sorting in part, by several keys, and what is most frequent."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import DTypeError, ShapeError
from tapegrad.testing import check_grads


@pytest.fixture
def a(rng):
    return rng.permutation(30).reshape(5, 6) / 4


@pytest.mark.parametrize("kth", [0, 2, -1, (1, 3), [0, 2, 4]])
@pytest.mark.parametrize("axis", [0, 1, -1, None])
def test_partition(kth, axis, a):
    same("partition", a, kth, axis)
    found = np.asarray(tg.partition(a, kth, axis))
    places = np.asarray(tg.argpartition(a, kth, axis))
    flat = a.reshape(-1) if axis is None else a
    np.testing.assert_array_equal(found, np.take_along_axis(flat, places, 0 if axis is None else axis))


def test_other_orders(a, rng):
    i = rng.integers(0, 3, (2, 20))
    same("lexsort", tuple(i))
    same("lexsort", i)
    same("lexsort", (i, i[::-1]), axis=0)
    same("sort_complex", i[0] + 1j * i[1])
    same("sort_complex", a)
    np.testing.assert_array_equal(tg.msort(a), np.sort(a, 0))


def test_kthvalue_and_topk(a):
    values, places = tg.kthvalue(a, 2, 0)
    np.testing.assert_array_equal(values, np.sort(a, 0)[1])
    np.testing.assert_array_equal(places, np.argsort(a, 0)[1])
    assert tg.kthvalue(a, 1, 1, True).values.shape == (5, 1)
    np.testing.assert_array_equal(tg.topk(a, 2).values, -np.sort(-a)[:, :2])
    np.testing.assert_array_equal(tg.topk(a, 2, 0, largest=False).indices, np.argsort(a, 0)[:2])
    for f in (tg.kthvalue, tg.topk):
        with pytest.raises(ShapeError, match="k=7"):
            f(a, 7)


def test_mode(rng):
    x = rng.integers(0, 4, (6, 9)).astype(float)
    for axis in (0, 1, -1):
        values, places = tg.mode(x, axis, keepdim=True)
        for row, best, at in zip(
            *(np.moveaxis(np.asarray(t), axis, -1).reshape(-1, np.asarray(t).shape[axis]) for t in (x, values, places))
        ):
            found, counts = np.unique(row, return_counts=True)
            assert best[0] == found[counts.argmax()]
            assert at[0] == np.flatnonzero(row == best[0])[-1]
    assert tg.mode([np.nan, 1.0, np.nan]).indices.item() == 2
    assert tg.mode(np.array(2.0)).values.item() == 2
    with pytest.raises(ShapeError, match="mode of nothing"):
        tg.mode(np.zeros((2, 0)))


def test_gradients(a):
    w = np.arange(30.0).reshape(5, 6)
    check_grads(lambda x: tg.partition(x, (1, 3), 1) ** 2 * w, [a])
    check_grads(lambda x: tg.kthvalue(x, 3, 0).values ** 2, [a])
    check_grads(lambda x: tg.topk(x, 2, largest=False).values ** 2, [a])
    check_grads(lambda x: tg.mode(tg.concat([x, x])).values ** 2, [a[0]])
    check_grads(lambda x: tg.real(tg.sort_complex(x * (1 + 2j)) ** 2), [a[0]])


def test_complex_numbers_have_no_order():
    for f in (tg.lexsort, tg.mode, lambda x: tg.kthvalue(x, 1), lambda x: tg.partition(x, 0)):
        with pytest.raises(DTypeError, match="no order"):
            f(np.array([[1j]]))
