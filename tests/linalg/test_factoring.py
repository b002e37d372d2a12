"""QR, LU and Cholesky factors."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg as sl
from complex_grads import check_parts

import tapegrad as tg
from tapegrad.errors import LinAlgError, NoGradientError, ShapeError

la = tg.linalg
DTYPES = ["float32", "float64", "complex64", "complex128"]
SHAPES = [(4, 3), (3, 3), (2, 4), (2, 3, 2), (1, 1)]


def make(rng, *shape, dtype="float64"):
    x = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.normal(size=shape)
    return x.astype(dtype)


def positive(rng, *shape, dtype="float64"):
    x = make(rng, *shape, dtype=dtype)
    x = x @ x.conj().swapaxes(-1, -2) + np.eye(shape[-1], dtype=dtype)
    return (x + x.conj().swapaxes(-1, -2)) / 2


def same(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert got.tobytes() == np.ascontiguousarray(wanted).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 2), (3, 0), (0, 2, 2)])
def test_qr_is_numpys(rng, dtype, mode, shape):
    x = make(rng, *shape, dtype=dtype)
    got, wanted = la.qr(x, mode=mode), np.linalg.qr(x, mode=mode)
    if mode == "r":
        same(got, wanted)
        return
    same(got.Q, wanted.Q)
    same(got.R, wanted.R)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_qr_derivatives(rng, dtype, shape):
    check_parts(la.qr, make(rng, *shape, dtype=dtype))
    check_parts(lambda x: la.qr(x).R, make(rng, *shape, dtype=dtype), order=1)
    check_parts(lambda x: la.qr(x).Q, make(rng, *shape, dtype=dtype), order=1)


def test_complete_qr_has_a_gradient_if_it_is_no_larger(rng):
    check_parts(lambda x: la.qr(x, mode="complete"), make(rng, 2, 3), order=1)
    with pytest.raises(NoGradientError, match="qr_complete"):
        tg.grad(lambda x: tg.sum(la.qr(x, mode="complete").R))(tg.asarray(make(rng, 3, 2)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_lu_is_scipys(rng, dtype, shape):
    x = make(rng, *shape, dtype=dtype)
    for got, wanted in zip(la.lu(x), sl.lu(x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
        assert got.dtype == wanted.dtype or shape == (1, 1)  # then SciPy's permutation is complex
    pl, u = la.lu(x, permute_l=True)
    np.testing.assert_allclose(pl.numpy() @ u.numpy(), x, rtol=1e-4, atol=1e-5)
    if x.ndim == 2:
        p, lower, u = la.lu(x, p_indices=True)
        np.testing.assert_array_equal(p, sl.lu(x, p_indices=True)[0])
        np.testing.assert_allclose(lower.numpy()[p.numpy()] @ u.numpy(), x, rtol=1e-4, atol=1e-5)
        for got, wanted in zip(la.lu_factor(x), sl.lu_factor(x), strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_lu_derivatives(rng, dtype, shape):
    x = make(rng, *shape, dtype=dtype)
    check_parts(lambda x: la.lu(x)[1:], x)
    check_parts(lambda x: la.lu(x, permute_l=True), x, order=1)
    check_parts(lambda x: la.lu_factor(x)[0], x, order=1)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("trans", [0, 1, 2])
@pytest.mark.parametrize(("a", "b"), [((3, 3), (3,)), ((3, 3), (3, 2)), ((2, 3, 3), (2, 3, 2))])
def test_lu_solve(rng, dtype, trans, a, b):
    a, b = make(rng, *a, dtype=dtype), make(rng, *b, dtype=dtype)
    turned = (a, a.swapaxes(-1, -2), a.conj().swapaxes(-1, -2))[trans]
    solve = lambda a, b: la.lu_solve(la.lu_factor(a), b, trans=trans)
    np.testing.assert_allclose(solve(a, b), np.linalg.solve(turned, b), rtol=1e-9)
    check_parts(solve, a, b, order=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_is_numpys(rng, dtype, upper):
    for shape in [(3, 3), (2, 3, 3), (0, 0), (0, 2, 2)]:
        x = positive(rng, *shape, dtype=dtype)
        same(la.cholesky(x, upper=upper), np.linalg.cholesky(x, upper=upper))


@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_reads_one_triangle(rng, upper):
    x = positive(rng, 3, 3)
    half = np.triu(x) if upper else np.tril(x)
    same(la.cholesky(half, upper=upper), np.linalg.cholesky(x, upper=upper))
    check_parts(lambda x: la.cholesky(x, upper=upper), half)
    g = tg.grad(lambda x: tg.sum(la.cholesky(x, upper=upper)))(tg.asarray(half)).numpy()
    assert not (np.tril(g, -1) if upper else np.triu(g, 1)).any()


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_derivatives(rng, dtype, upper):
    check_parts(lambda x: la.cholesky(x, upper=upper), positive(rng, 2, 3, 3, dtype=dtype))


def test_gradient_of_a_hermitian_matrix_is_hermitian(rng):
    x = tg.asarray(positive(rng, 4, 4, dtype="complex128"))
    weights = make(rng, 4, 4)
    for f in (la.cholesky, la.eigvalsh):
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = tg.sum(tg.real(f(x)) * weights[: 4 if f is la.cholesky else 1])
        g = tape.gradient(y, x).numpy()
        np.testing.assert_allclose(g, g.conj().T, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("lower", [False, True])
def test_cho_solve(rng, dtype, lower):
    a, b = positive(rng, 3, 3, dtype=dtype), make(rng, 3, 2, dtype=dtype)
    solve = lambda a, b: la.cho_solve(la.cho_factor(a, lower), b)
    np.testing.assert_allclose(solve(a, b), sl.cho_solve(sl.cho_factor(a, lower), b), rtol=1e-10)
    np.testing.assert_allclose(solve(a, b[:, 0]), np.linalg.solve(a, b[:, 0]), rtol=1e-10)
    check_parts(solve, a, b)


def test_bad_operands_raise():
    with pytest.raises(LinAlgError, match="cholesky"):
        la.cholesky(-np.eye(2))
    for call in (
        lambda: la.cholesky(np.ones((2, 3))),
        lambda: la.qr(np.ones(3)),
        lambda: la.qr(np.ones((3, 3)), mode="raw"),
        lambda: la.lu_solve(la.lu_factor(np.eye(2)), np.ones(2), trans=3),
    ):
        with pytest.raises(ShapeError):
            call()
