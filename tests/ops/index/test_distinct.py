"""NumPy's set functions."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.testing import check_grads

FLAGS = [{}, {"return_index": True}, {"return_counts": True, "return_inverse": True}]


@pytest.mark.parametrize("kwargs", FLAGS, ids=str)
def test_unique(kwargs, rng):
    i = rng.integers(0, 6, (3, 4))
    for x in (i, i / 4, np.array([1, np.nan, np.nan, 0]), i[:0]):
        same("unique", x, **kwargs)
    same("unique", np.array([1, np.nan, np.nan, 0]), equal_nan=False, **kwargs)
    for axis in (0, 1, -1):
        same("unique", i % 2, axis=axis, **kwargs)


@pytest.mark.parametrize("name", ["union1d", "intersect1d", "setdiff1d", "setxor1d"])
def test_sets(name, rng):
    i, v = rng.integers(0, 6, (3, 4)), rng.normal(size=7)
    same(name, i, i + 2)
    same(name, v, v[::2])
    same(name, v[:0], v)
    same(name, i, v)


def test_other_arguments(rng):
    i = rng.integers(0, 6, (3, 4))
    same("intersect1d", i, i + 2, return_indices=True)
    same("setdiff1d", [3, 1, 2], [1], assume_unique=True)


def test_gradients_go_to_the_first_of_equal_elements():
    x = tg.asarray([3.0, 1.0, 3.0, 2.0])
    assert tg.grad(lambda x: tg.sum(tg.unique(x) * tg.asarray([1.0, 2.0, 3.0])))(x).tolist() == [3, 1, 0, 2]
    check_grads(lambda x: tg.unique(x) ** 2, [np.array([3.0, 1.0, 2.0])])
    check_grads(lambda x, y: tg.union1d(x, y) ** 2, [np.array([3.0, 1.0]), np.array([2.0])])


@pytest.mark.parametrize("name", ["union1d", "intersect1d", "setdiff1d", "setxor1d"])
@pytest.mark.parametrize(
    ("x", "y"),
    [([1, np.nan], [2, np.nan]), ([1, np.nan, np.nan], [2.0, 1]), ([np.nan], [np.nan] * 2), ([1j, np.nan], [2])],
)
def test_nan_equals_no_element_of_the_other_array(name, x, y):
    np.testing.assert_array_equal(getattr(tg, name)(x, y), getattr(np, name)(x, y))
