"""Diagonals: read, written, summed."""

from __future__ import annotations

import numpy as np
import pytest
from numpy_like import same, same_in_place

import tapegrad as tg
from tapegrad.errors import AxisError, ShapeError
from tapegrad.testing import check_grads


@pytest.mark.parametrize("k", [-5, -2, -1, 0, 1, 3, 9])
@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (3, 3), (0, 3), (1, 1)])
def test_of_a_matrix(k, shape, rng):
    x = rng.normal(size=shape)
    for name in ("diag", "diagonal", "trace", "diagflat"):
        same(name, x, k)
    same("diagonal", x.T, k)
    same("diag", x.reshape(-1), k)
    same("trace", x.astype("i1"), k)


@pytest.mark.parametrize("axes", [(0, 1), (3, 1), (-1, -2), (0, 2)])
@pytest.mark.parametrize("k", [-1, 0, 2])
def test_of_many_dimensions(axes, k, rng):
    x = rng.normal(size=(2, 3, 4, 5))
    same("diagonal", x, k, *axes)
    same("trace", x, k, *axes)
    found = tg.diag_embed(x, k, *axes)
    np.testing.assert_array_equal(tg.diagonal(found, k, *axes), x)
    assert tg.sum(found).item() == pytest.approx(x.sum())


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (7, 3), (3, 3, 3)])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("value", [5.0, [1.0, 2.0], [[1.0], [2.0], [3.0], [4.0]]])
def test_fill(shape, wrap, value, rng):
    same_in_place("fill_diagonal", rng.normal(size=shape), value, wrap=wrap)


def test_gradients(rng):
    x, v, cube = rng.normal(size=(3, 4)), rng.normal(size=3), rng.normal(size=(2, 3, 3))
    check_grads(lambda x: tg.diagonal(x, 1) ** 2, [x])
    check_grads(lambda x: tg.diagonal(x, -1, 2, 0) ** 2, [cube])
    check_grads(lambda x: tg.trace(x, axis1=1, axis2=2) ** 2, [cube])
    check_grads(lambda v: tg.diag(v, -1) ** 2, [v])
    check_grads(lambda x: tg.diagflat(x, 1) ** 2, [x])
    check_grads(lambda x: tg.make_diagonal(x, offset=0, axis1=-1, axis2=-2) ** 2, [x])
    check_grads(lambda x, v: tg.fill_diagonal(x, v) ** 2, [x, v])
    check_grads(lambda x, v: tg.fill_diagonal(x, v) ** 2, [x, v[0]])


def test_errors():
    with pytest.raises(ShapeError, match="diagonal: needs two"):
        tg.diagonal([1.0])
    with pytest.raises(AxisError, match="one dimension"):
        tg.diagonal(np.ones((2, 2)), 0, 1, -1)
    with pytest.raises(ShapeError, match="diag: needs a vector or a matrix"):
        tg.diag(np.ones((2, 2, 2)))
    with pytest.raises(ShapeError, match="fill_diagonal"):
        tg.fill_diagonal(np.ones((2, 3, 2)), 1.0)
