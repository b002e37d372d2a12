"""Norms and condition numbers."""

from __future__ import annotations

import numpy as np
import pytest
from complex_grads import check_parts

import tapegrad as tg
from tapegrad.errors import AxisError, LinAlgError, ShapeError

la = tg.linalg
inf = np.inf
VECTOR = [None, 2, 1, 0, inf, -inf, 3, 1.5, 0.5, -1, -2]
MATRIX = [None, "fro", "nuc", 1, -1, 2, -2, inf, -inf]


def make(rng, *shape, dtype="float64"):
    x = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.normal(size=shape)
    return x.astype(dtype)


def close(got, wanted):
    wanted = np.asarray(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_allclose(got, wanted, rtol=1e-5 if wanted.dtype == np.float32 else 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128", "int64"])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, -1, (1,), (0, 2), (2, 1), (-1, 0)])
def test_norm_is_numpys(rng, dtype, keepdims, axis):
    x = make(rng, 2, 3, 4, dtype=dtype)
    count = 1 if isinstance(axis, int) or axis == (1,) else 2
    for ord in [None] if axis is None else VECTOR if count == 1 else MATRIX:
        if dtype == "int64" and isinstance(ord, (int, float)) and ord < 0:
            continue
        close(la.norm(x, ord, axis, keepdims), np.linalg.norm(x, ord, axis, keepdims))


def test_norm_of_all_elements(rng):
    x = make(rng, 3, 4)
    for ord in MATRIX:
        close(la.norm(x, ord), np.linalg.norm(x, ord))
    for ord in VECTOR:
        close(la.norm(x[0], ord), np.linalg.norm(x[0], ord))
    close(la.norm(x, keepdims=True), np.linalg.norm(x, keepdims=True))
    close(la.norm(np.zeros(0)), np.linalg.norm(np.zeros(0)))


@pytest.mark.parametrize("keepdims", [False, True])
def test_names_of_the_standard(rng, keepdims):
    x = make(rng, 2, 3, 4)
    for axis in (None, 1, (0, 2), (0, 1, 2), ()):
        for ord in (2, 1, inf, 3):
            if axis != () or ord != 2:
                close(la.vector_norm(x, axis=axis, ord=ord, keepdims=keepdims),
                      np.linalg.vector_norm(x, axis=axis, ord=ord, keepdims=keepdims))  # fmt: skip
    for ord in ("fro", "nuc", 2, 1, -inf):
        close(la.matrix_norm(x, ord=ord, keepdims=keepdims), np.linalg.matrix_norm(x, ord=ord, keepdims=keepdims))
    close(la.vector_norm(np.array(-2.0)), np.linalg.vector_norm(np.array(-2.0)))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("keepdims", [False, True])
def test_derivatives(rng, dtype, keepdims):
    x = make(rng, 2, 3, 3, dtype=dtype)
    for ord in VECTOR:
        check_parts(lambda x, ord=ord: la.norm(x, ord, 1, keepdims), x)
    for ord in MATRIX:
        check_parts(lambda x, ord=ord: la.norm(x, ord, (2, 0), keepdims), x)


@pytest.mark.parametrize("ord", [None, 2, 1, inf, -inf, 0, 3, 1.5, 0.5])
def test_gradient_of_a_norm_of_0_is_0(ord):
    g = tg.grad(lambda x: la.norm(x, ord))(tg.asarray(np.zeros(3))).numpy()
    np.testing.assert_array_equal(g, np.zeros(3))
    for order in ("fro", 1, inf):
        g = tg.grad(lambda x, order=order: la.norm(x, order))(tg.asarray(np.zeros((2, 2)))).numpy()
        np.testing.assert_array_equal(g, np.zeros((2, 2)))


def test_gradients_at_ties_and_zeros():
    x = tg.asarray(np.array([2.0, -2.0, 0.0]))
    np.testing.assert_array_equal(tg.grad(lambda x: la.norm(x, inf))(x), [0.5, -0.5, 0])
    np.testing.assert_array_equal(tg.grad(lambda x: la.norm(x, 1))(x), [1, -1, 0])
    for p in (1.5, 0.5, 3):
        g = tg.grad(lambda x, p=p: la.norm(x, p))(x).numpy()
        assert g[2] == 0 and g[0] == -g[1] > 0


def test_a_list_of_tensors_is_stacked():
    assert tg.grad(lambda x: la.norm([x, x + 2]))(tg.asarray(0.0)).item() == 1
    assert tg.grad(lambda x: la.norm((x, x + 2)))(tg.asarray(0.0)).item() == 1


@pytest.mark.parametrize("p", [None, 2, -2, "fro", 1, inf, -1, "nuc"])
def test_cond(rng, p):
    x = make(rng, 2, 3, 3)
    close(la.cond(x, p), np.linalg.cond(x, p))
    check_parts(lambda x: la.cond(x, p), x, order=1)
    singular = np.array([[1.0, 0.0], [0.0, 0.0]])
    if p not in (-2, "nuc"):  # NumPy's LAPACK does not converge on the infinite inverse
        close(la.cond(singular, p), np.linalg.cond(singular, p))
    nan = np.full((2, 2), np.nan)
    if p not in (None, 2, -2, "nuc"):
        assert np.isnan(la.cond(nan, p).item())


def test_cond_of_rectangles_and_of_nothing(rng):
    close(la.cond(make(rng, 4, 2)), np.linalg.cond(make(np.random.default_rng(20260101), 4, 2)))
    with pytest.raises(LinAlgError):
        la.cond(np.zeros((0, 0)))
    with pytest.raises(LinAlgError):
        la.cond(np.zeros((2, 2, 2)), 1)


def test_bad_orders_and_axes_raise():
    x = np.ones((2, 3, 4))
    for call in (
        lambda: la.norm(x, 2),
        lambda: la.norm(x, "nuc", 0),
        lambda: la.norm(x, 3, (0, 1)),
        lambda: la.norm(x, None, (1, 1)),
        lambda: la.matrix_norm(np.ones(3)),
        lambda: la.matrix_norm(x, ord="nothing"),
    ):
        with pytest.raises(ShapeError):
            call()
    with pytest.raises(AxisError):
        la.norm(x, axis=3)
