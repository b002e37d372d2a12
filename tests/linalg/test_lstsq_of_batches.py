"""``vmap`` of ``lstsq``: the solutions of a loop, and residuals where all matrices have full rank."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg

lstsq = tg.linalg.lstsq


@pytest.mark.parametrize("shape", [(5, 2), (3, 3), (2, 5)])
@pytest.mark.parametrize("right", [(), (4,)])
def test_vmap_is_a_loop(shape, right, rng):
    a, b = rng.normal(size=(3, *shape)), rng.normal(size=(3, shape[0], *right))
    result = tg.vmap(lstsq)(a, b)
    for i in range(3):
        for got, expected in zip(result, np.linalg.lstsq(a[i], b[i], rcond=None), strict=True):
            assert got[i].shape == np.shape(expected) or not np.size(expected)
            np.testing.assert_allclose(got[i], np.reshape(expected, got[i].shape), rtol=1e-9)


def test_over_one_operand_only(rng):
    a, b = rng.normal(size=(3, 5, 2)), rng.normal(size=5)
    for got, i in zip(tg.vmap(lstsq, in_axes=(0, None))(a, b).x, range(3), strict=True):
        np.testing.assert_allclose(got, np.linalg.lstsq(a[i], b)[0], rtol=1e-9)
    for got, i in zip(tg.vmap(lstsq, in_axes=(None, 1))(a[0], a[1]).x, range(2), strict=True):
        np.testing.assert_allclose(got, np.linalg.lstsq(a[0], a[1][:, i])[0], rtol=1e-9)


def test_residuals_are_empty_if_one_matrix_lacks_rank(rng):
    a, b = rng.normal(size=(3, 5, 2)), rng.normal(size=(3, 5))
    a[1, :, 1] = 2 * a[1, :, 0]
    result = tg.vmap(lstsq)(a, b)
    np.testing.assert_array_equal(result.rank, [2, 1, 2])
    assert result.residuals.shape == (3, 0)
    np.testing.assert_allclose(result.x, [np.linalg.lstsq(m, v)[0] for m, v in zip(a, b, strict=True)], rtol=1e-9)


def test_derivatives_and_nested_maps(rng):
    a, b = rng.normal(size=(2, 3, 5, 2)), rng.normal(size=(2, 3, 5))

    def residual(a, b):
        return tg.sum(lstsq(a, b).residuals) + tg.sum(lstsq(a, b).x)

    gradients = tg.vmap(tg.vmap(tg.grad(residual)))(a, b)
    for i in np.ndindex(2, 3):
        np.testing.assert_allclose(gradients[i], tg.grad(residual)(a[i], b[i]), rtol=1e-9)
