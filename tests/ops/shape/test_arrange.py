"""NumPy's names for arranging arrays."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import AxisError, ShapeError
from tapegrad.testing import check_grads

STACKS = ["hstack", "vstack", "dstack", "column_stack"]


@pytest.mark.parametrize("name", ["ravel", "atleast_1d", "atleast_2d", "atleast_3d"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0, 3, 4)])
def test_one_array(name, shape, rng):
    x = rng.standard_normal(shape)
    np.testing.assert_array_equal(getattr(tg, name)(x).numpy(), getattr(np, name)(x), strict=True)


@pytest.mark.parametrize("name", STACKS)
def test_stacks(name, rng):
    for shape in ((3,), (3, 2), (3, 2, 4)):
        x = rng.standard_normal(shape)
        np.testing.assert_array_equal(getattr(tg, name)([x, 2 * x]).numpy(), getattr(np, name)([x, 2 * x]), strict=True)
        check_grads(lambda x: getattr(tg, name)([x, x * x]), [x], order=1)
    with pytest.raises(ShapeError):
        getattr(tg, name)([])


def test_splits_and_turns(rng):
    x = rng.standard_normal((2, 4, 6))
    for name in ("hsplit", "vsplit", "dsplit"):
        for a, b in zip(getattr(tg, name)(x, 2), getattr(np, name)(x, 2), strict=True):
            np.testing.assert_array_equal(a.numpy(), b)
    assert [p.tolist() for p in tg.hsplit([1, 2], 2)] == [[1], [2]]
    for k in range(-1, 5):
        for axes in ((0, 1), (2, 0)):
            np.testing.assert_array_equal(tg.rot90(x, k, axes).numpy(), np.rot90(x, k, axes))
    np.testing.assert_array_equal(tg.fliplr(x).numpy(), np.fliplr(x))
    np.testing.assert_array_equal(tg.flipud(x).numpy(), np.flipud(x))
    for call, error in ((lambda: tg.dsplit(x[0], 2), ShapeError), (lambda: tg.rot90(x, 1, (0, -3)), AxisError)):
        with pytest.raises(error):
            call()


def test_grids(rng):
    a, b, c = rng.standard_normal(2), rng.standard_normal(3), rng.standard_normal(4)
    for indexing in ("xy", "ij"):
        for lines in ((a,), (a, b), (a, b, c)):
            got, wanted = tg.meshgrid(*lines, indexing=indexing), np.meshgrid(*lines, indexing=indexing)
            for g, w in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(g.numpy(), w)
    assert tg.meshgrid() == ()
    assert [t.shape for t in tg.broadcast_arrays(np.ones((2, 1)), np.ones(3))] == [(2, 3)] * 2
    assert tg.broadcast_shapes((2, 1), 3, [1]) == (2, 3)
    assert tg.broadcast_shapes() == ()
    with pytest.raises(ShapeError, match="broadcast_shapes: shapes"):
        tg.broadcast_shapes((2, 1), (3, 2))
    with pytest.raises(ShapeError):
        tg.meshgrid(np.ones((2, 2)))


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (2, 3, 3), (0, 3), (150, 150)])
@pytest.mark.parametrize("k", [-2, 0, 1, 9])
def test_triangles(shape, k, rng):
    x = rng.standard_normal(shape)
    for name in ("tril", "triu"):
        np.testing.assert_array_equal(getattr(tg, name)(x, k=k).numpy(), getattr(np, name)(x, k))
    if x.size < 100:
        check_grads(lambda x: tg.tril(x, k=k) * tg.triu(x, k=k - 1), [x], order=1)
    with pytest.raises(ShapeError, match="tril: needs two dimensions"):
        tg.tril(np.ones(3))
