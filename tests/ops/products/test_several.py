"""Products and arrangements of several arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy_like import same

import tapegrad as tg
from tapegrad.errors import AxisError, IndexingError, ShapeError
from tapegrad.testing import check_grads

SHAPES = [(), (3,), (2, 3), (3, 1), (2, 2, 2), (0, 2)]


@pytest.mark.parametrize("one", SHAPES)
@pytest.mark.parametrize("other", SHAPES)
def test_kron(one, other, rng):
    x, y = rng.normal(size=one), rng.normal(size=other)
    same("kron", x, y)
    check_grads(tg.kron, [x, y])


@pytest.mark.parametrize("lengths", [(2, 2), (2, 3), (3, 2), (3, 3)])
def test_cross(lengths, rng):
    """NumPy from 2.5 on takes vectors of length 3 alone."""
    x, y = rng.normal(size=(4, lengths[0])), rng.normal(size=(4, lengths[1]))
    u, v = (np.pad(t, ((0, 0), (0, 3 - t.shape[1]))) for t in (x, y))
    wanted = np.cross(u, v)[:, slice(None) if 3 in lengths else 2]
    np.testing.assert_allclose(tg.cross(x, y).numpy(), wanted, rtol=1e-14)
    np.testing.assert_allclose(tg.cross(x.T, y, axisa=0).numpy(), wanted, rtol=1e-14)
    np.testing.assert_allclose(tg.cross(x, y[:1]).numpy()[0], wanted[0], rtol=1e-14)
    if lengths == (3, 3):
        same("cross", x, y, axisc=0)
        same("cross", x.T, y.T, axis=0)
        same("cross", x, y[0])
    check_grads(tg.cross, [x, y])


def test_block(rng):
    a, b = rng.normal(size=(2, 3, 4))
    same("block", [[a, b], [b, a]])
    same("block", [a, b])
    same("block", [1.0, a[0], 2.0])
    same("block", a)
    same("block", [[a], [b[0]]])
    check_grads(lambda x, y: tg.block([[x, y], [y, x]]) ** 2, [a, b])
    with pytest.raises(ShapeError, match="different depths"):
        tg.block([[a], b])
    with pytest.raises(ShapeError, match="empty"):
        tg.block([])


def test_choices(rng):
    a, b = rng.normal(size=3), rng.normal(size=4)
    np.testing.assert_array_equal(tg.cartesian_prod(a, b), list(itertools.product(a, b)))
    assert tg.cartesian_prod(a, b[:0]).shape == (0, 2)
    np.testing.assert_array_equal(tg.combinations(b, 3), list(itertools.combinations(b, 3)))
    np.testing.assert_array_equal(
        tg.combinations(b, with_replacement=True), list(itertools.combinations_with_replacement(b, 2))
    )
    assert tg.combinations(a, 5).shape == (0, 5)
    check_grads(lambda x, y: tg.cartesian_prod(x, y) ** 2, [a, b])
    check_grads(lambda x: tg.combinations(x) ** 2, [b])


@pytest.mark.parametrize("axis", range(-3, 3))
@pytest.mark.parametrize("start", range(-3, 4))
def test_rollaxis(axis, start, rng):
    same("rollaxis", rng.normal(size=(2, 3, 4)), axis, start)


def test_windows(rng):
    x = rng.normal(size=(4, 6))
    wanted = np.lib.stride_tricks.sliding_window_view(x, 3, 1)[:, ::2]
    np.testing.assert_array_equal(tg.unfold(x, 1, 3, 2), wanted)
    np.testing.assert_array_equal(tg.unfold(x, 0, 2, 3), np.lib.stride_tricks.sliding_window_view(x, 2, 0)[::3])
    step = x.itemsize
    wanted = np.lib.stride_tricks.as_strided(x[0, 1:], (3, 2), (6 * step, step))
    np.testing.assert_array_equal(tg.as_strided(x, (3, 2), (6, 1), 1), wanted)
    check_grads(lambda x: tg.unfold(x, 1, 3) ** 2, [x])
    check_grads(lambda x: tg.as_strided(x, (3, 4), (1, 1)) ** 2, [x])
    with pytest.raises(ShapeError, match="unfold"):
        tg.unfold(x, 0, 5)
    with pytest.raises(IndexingError, match="out of range"):
        tg.as_strided(x, (30,), (1,))
    with pytest.raises(AxisError, match="rollaxis"):
        tg.rollaxis(x, 0, 3)


@pytest.mark.parametrize("p", [0, 1, 1.5, 2, 3, float("inf")])
def test_distances(p, rng):
    x, y = rng.normal(size=(2, 4, 3)), rng.normal(size=(5, 3))
    gaps = np.abs(x[:, :, None] - y)
    wanted = np.linalg.norm(gaps, p, -1)
    np.testing.assert_allclose(tg.cdist(x, y, p), wanted, rtol=1e-13)
    np.testing.assert_allclose(tg.dist(x[0], y[:4], p), np.linalg.norm((x[0] - y[:4]).reshape(-1), p), rtol=1e-13)
    if p:
        check_grads(lambda x, y: tg.cdist(x, y, p), [x, y])
        check_grads(lambda x, y: tg.dist(x, y, p), [x[0], y[:4]])
    same_rows = tg.grad(lambda x: tg.sum(tg.cdist(x, x, p)))(tg.asarray(y)).numpy()
    assert np.isfinite(same_rows).all()
    assert tg.cdist(x[:, :0], y, p).shape == (2, 0, 5)


def test_renorm(rng):
    x = rng.normal(size=(3, 4)) * np.array([[0.1], [1], [5]])
    got = tg.renorm(x, 2, 0, 1.0).numpy()
    norms = np.linalg.norm(x, axis=1)
    np.testing.assert_array_equal(got[0], x[0])
    np.testing.assert_allclose(np.linalg.norm(got[norms > 1], axis=1), 1, rtol=1e-6)
    check_grads(lambda x: tg.renorm(x, 2, 1, 0.5), [x])
    check_grads(lambda x: tg.renorm(x, 1, 0, 0.5), [x])


def test_sums(rng):
    x = rng.normal(size=(2, 3, 4))
    np.testing.assert_allclose(tg.sum_to(x, (3, 1)), x.sum((0, 2))[:, None])
    np.testing.assert_allclose(tg.batch_l2_norm_squared(x), (x**2).sum((1, 2)))
    check_grads(lambda x: tg.sum_to(x, (1, 4)) ** 2, [x])
    check_grads(tg.batch_l2_norm_squared, [x])
    with pytest.raises(ShapeError, match="sum_to"):
        tg.sum_to(x, (5,))
