"""Indices of grids, diagonals and triangles."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import IndexingError, ShapeError, TapegradError


def test_grids():
    for shape in ((2, 3), (4,), (2, 0, 1), ()):
        same("indices", shape)
        same("indices", shape, sparse=True)
    same("indices", (2, 3), dtype=np.float64)
    same("ix_", [0, 1], [2, 4])
    same("ix_", np.array([True, False, True]), [1], [])
    x = np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(tg.asarray(x)[tg.ix_([0, 2], [1, 3])], x[np.ix_([0, 2], [1, 3])])
    with pytest.raises(ShapeError, match="ix_: needs vectors"):
        tg.ix_([[1]])


@pytest.mark.parametrize("k", [-2, 0, 1, 9])
def test_diagonals_and_triangles(k):
    same("diag_indices", 4, 3)
    same("diag_indices_from", np.ones((3, 3)))
    for name in ("tril_indices", "triu_indices"):
        same(name, 4, k)
        same(name, 3, k, 5)
        same(f"{name}_from", np.ones((3, 4)), k)
    with pytest.raises(ShapeError, match="needs equal lengths"):
        tg.diag_indices_from(np.ones((2, 3)))
    with pytest.raises(ShapeError, match="needs a matrix"):
        tg.tril_indices_from(np.ones(3))


@pytest.mark.parametrize("order", ["C", "F"])
def test_flat_positions(order, rng):
    i, j = rng.integers(0, 4, (2, 3, 4))
    same("unravel_index", i, (2, 3), order=order)
    same("unravel_index", 4, (7, 6), order=order)
    same("unravel_index", i, 9)
    same("ravel_multi_index", (i, j), (4, 5), order=order)
    same("ravel_multi_index", (i * 3, j), (3, 4), mode="wrap", order=order)
    same("ravel_multi_index", (i - 2, j), (3, 2), mode=("clip", "wrap"), order=order)


def test_errors():
    with pytest.raises(IndexingError, match="unravel_index: a position is out of range"):
        tg.unravel_index([6], (2, 3))
    with pytest.raises(IndexingError, match="ravel_multi_index: an index is out of range"):
        tg.ravel_multi_index(([2], [0]), (2, 3))
    with pytest.raises(TapegradError, match="order 'K'"):
        tg.unravel_index([1], (2, 3), order="K")
    with pytest.raises(IndexingError, match="integers"):
        tg.unravel_index([0.5], (2, 3))
