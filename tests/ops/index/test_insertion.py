"""Elements put, deleted and inserted."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same, same_in_place

import tapegrad as tg
from tapegrad.errors import IndexingError, ShapeError, TapegradError
from tapegrad.testing import check_grads

OBJECTS = [1, -1, [0, 2], [2, 0, 0], slice(None, None, 2), np.array([True, False, True]), [], [1, 1], np.array([1])]


@pytest.fixture
def a(rng):
    return rng.normal(size=(3, 4))


def test_put(a):
    same_in_place("put", a, [0, 5], [9.0, 8.0])
    same_in_place("put", a, [[0, 5], [-1, 0]], 7.0)
    same_in_place("put", a, [0, 25, 3], [7.0, 8], mode="wrap")
    same_in_place("put", a, [0, 25, -4], [1, 2.0], mode="clip")
    same_in_place("put", a, [], [])
    with pytest.raises(IndexingError, match="put: index 12"):
        tg.put(a, 12, 1.0)
    with pytest.raises(TapegradError, match="mode"):
        tg.put(a, 1, 1.0, mode="nope")


def test_put_along_axis(a):
    same_in_place("put_along_axis", a, np.array([[1], [0], [3]]), 9.0, 1)
    same_in_place("put_along_axis", a, np.array([[1, 0, 2, 2]]), a[:1] * 2, 0)
    same_in_place("put_along_axis", a, np.array([1, 7]), np.array([3.0, 4.0]), None)
    same_in_place("put_along_axis", a, np.argsort(a, 1), a[::-1].copy(), -1)
    with pytest.raises(ShapeError, match="as many dimensions"):
        tg.put_along_axis(a, [1], 2.0, 0)


def test_masks(a):
    same_in_place("place", a, a > 0, [1.0, 2.0])
    same_in_place("place", a, a > 99, [])
    for values in ([1.0, 2.0, 3], a[::-1].copy(), 5.0):
        same_in_place("putmask", a, a > 0, values)
    with pytest.raises(ShapeError, match="no values"):
        tg.place(a, a > 0, [])


def test_ends(a):
    same("append", a, a)
    same("append", a, a[:1], axis=0)
    for shape in ((5, 7), 3, (2, 2), (0, 3)):
        same("resize", a, shape)
    same("resize", a[:0], (2, 2))


@pytest.mark.parametrize("obj", OBJECTS, ids=str)
def test_delete_and_insert(obj, a):
    same("delete", a, obj, 0)
    same("insert", a, obj, 9.5, axis=0)
    if not isinstance(obj, np.ndarray):
        same("delete", a, obj)
        same("insert", a, obj, 9.5)


def test_insert_many(a):
    same("insert", a, 1, [1, 2, 3.0], axis=1)
    same("insert", a, [1], [[1], [2], [3.0]], axis=1)
    same("insert", a, [2, 0], [1, 2.0], axis=1)
    same("insert", a[0], [2, 2], [5, 6.0])
    same("insert", a[0], slice(2, 4), [5, 6.0])
    same("insert", a, 2, [1, 2, 3.0])
    same("insert", a, -1, a[0], axis=0)
    same("insert", a, 1, a[:2], axis=0)
    for f in (tg.delete, lambda x, k, axis: tg.insert(x, k, 1.0, axis)):
        with pytest.raises(IndexingError, match="index 4 is out of range"):
            f(a, 4, axis=0)


def test_scatter_add(a, rng):
    index = rng.integers(0, 3, (2, 4))
    wanted = a.copy()
    np.add.at(wanted, (index, np.arange(4)), a[1:])
    np.testing.assert_allclose(tg.scatter_add(a, 0, index, a[1:]), wanted)
    np.testing.assert_allclose(tg.scatter_add(a, 0, index[:, :2], a)[:, 2:], a[:, 2:])
    check_grads(lambda x, y: tg.scatter_add(x, 0, index, y) ** 2, [a, a[1:]])
    with pytest.raises(ShapeError, match="scatter_add"):
        tg.scatter_add(a, 0, index, a[:1])


def test_gradients(a):
    v = a[0] * 2
    check_grads(lambda x, v: tg.put(x, [0, 5, 5, 2, 7], v) ** 2, [a, v])
    check_grads(lambda x, v: tg.put_along_axis(x, np.array([[1, 0, 2, 2]]), v, 0) ** 2, [a, v[None]])
    check_grads(lambda x, v: tg.place(x, a > 0, v) ** 2, [a, v])
    check_grads(lambda x, v: tg.putmask(x, a > 0, v) ** 2, [a, v])
    check_grads(lambda x, v: tg.append(x, v) ** 2, [a, v])
    check_grads(lambda x: tg.resize(x, (5, 4)) ** 2, [a])
    check_grads(lambda x: tg.delete(x, [0, 2], 1) ** 2, [a])
    check_grads(lambda x, v: tg.insert(x, [0, 2], v, axis=0) ** 2, [a, v])
