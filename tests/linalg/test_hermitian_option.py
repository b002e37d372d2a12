"""``hermitian=True`` reads the lower triangle alone, as NumPy's does."""

from __future__ import annotations

import numpy as np
import pytest
from complex_grads import check_parts

import tapegrad as tg


def lower(x: np.ndarray) -> np.ndarray:
    """Return the Hermitian matrices that have the lower triangles of ``x``."""
    below = np.tril(x, -1)
    return below + np.swapaxes(below.conj(), -1, -2) + np.eye(x.shape[-1]) * x.real


@pytest.fixture(params=[(3, 3), (2, 4, 4), (0, 0)], ids=str)
def matrices(request, rng):
    x = rng.normal(size=request.param)
    return [x, x + 1j * rng.normal(size=request.param)]


def test_pinv_is_numpys(matrices):
    for x in matrices:
        np.testing.assert_allclose(tg.linalg.pinv(x, hermitian=True), np.linalg.pinv(x, hermitian=True), atol=1e-11)
        np.testing.assert_allclose(tg.linalg.pinv(x, hermitian=True), np.linalg.pinv(lower(x)), atol=1e-11)


def test_singular_values_and_ranks_are_numpys(matrices):
    for x in matrices:
        s = tg.linalg.svd(x, compute_uv=False, hermitian=True)
        np.testing.assert_allclose(s, np.linalg.svd(x, compute_uv=False, hermitian=True), atol=1e-12)
        u, s, vh = tg.linalg.svd(x, hermitian=True)
        np.testing.assert_allclose((u * s[..., None, :]) @ vh, lower(x), atol=1e-12)
        if x.size:
            np.testing.assert_array_equal(
                tg.linalg.matrix_rank(x, hermitian=True), np.linalg.matrix_rank(x, hermitian=True)
            )
    x = np.array([[1.0, 5.0], [1.0, 1.0]])
    assert int(tg.linalg.matrix_rank(x, hermitian=True)) == 1


def test_gradient_goes_to_the_lower_triangle(rng):
    x = rng.normal(size=(3, 3)) + 1j * rng.normal(size=(3, 3))
    check_parts(lambda x: tg.linalg.pinv(x, hermitian=True), x, order=1)
