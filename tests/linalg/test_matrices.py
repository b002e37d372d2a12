"""Products, powers, functions of matrices, and matrices made of vectors."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg as sl
from complex_grads import check_parts

import tapegrad as tg
from tapegrad.errors import AxisError, LinAlgError, ShapeError

la = tg.linalg


def make(rng, *shape, dtype="float64"):
    x = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.normal(size=shape)
    return x.astype(dtype)


def close(got, wanted):
    wanted = np.asarray(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_allclose(got, wanted, rtol=1e-4 if wanted.dtype.itemsize == 4 else 1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 8, -1, -2, -3])
def test_matrix_power(rng, n):
    for x in (make(rng, 3, 3), make(rng, 2, 2, 2, dtype="complex128"), np.zeros((0, 0))):
        close(la.matrix_power(x, n), np.linalg.matrix_power(x, n))
    check_parts(lambda x: la.matrix_power(x, n), make(rng, 3, 3) + 2 * np.eye(3), rtol=1e-3)
    whole = np.array([[1, 2], [1, 1]])
    close(la.matrix_power(whole, n), np.linalg.matrix_power(whole, n))


CHAINS = [
    [(3, 2), (2, 4)],
    [(3, 2), (2, 4), (4, 1)],
    [(2, 3), (3, 1), (1, 5), (5, 2)],
    [(3,), (3, 2), (2,)],
    [(3,), (3, 2)],
    [(3, 2), (2,)],
    [(2,), (2, 0), (0, 3)],
]


@pytest.mark.parametrize("shapes", CHAINS)
def test_multi_dot(rng, shapes):
    xs = [make(rng, *s) for s in shapes]
    close(la.multi_dot(xs), np.linalg.multi_dot(xs))
    check_parts(lambda *xs: la.multi_dot(xs), *xs)


def test_multi_dot_takes_the_cheapest_order():
    def allocated(*sizes):
        xs = [tg.ones(shape, dtype="float64") for shape in zip(sizes, sizes[1:])]
        with tg.measure() as m:
            la.multi_dot(xs)
        return m.allocated_bytes // 8

    assert allocated(160, 1600, 80, 800) == 160 * 80 + 160 * 800  # (AB)C: 31 million multiplications, A(BC): 307
    assert allocated(80, 1600, 160, 16) == 1600 * 16 + 80 * 16  # A(BC): 6 million, (AB)C: 21


def test_products_under_their_names_here(rng):
    x, y = make(rng, 2, 3), make(rng, 3, 2)
    close(la.matmul(x, y), x @ y)
    close(la.tensordot(x, y, axes=1), x @ y)
    close(la.matrix_transpose(x), x.T)
    close(la.vecdot(x, x), np.vecdot(x, x))
    close(la.outer(x[0], y[:, 0]), np.outer(x[0], y[:, 0]))
    with pytest.raises(ShapeError):
        la.outer(x, y)


PAIRS = [
    ((3,), (3,), -1),
    ((2, 3), (3,), -1),
    ((3, 2), (3, 2), 0),
    ((2, 1, 3), (4, 3), -1),
    ((2, 3, 4), (3, 1), -2),
]


@pytest.mark.parametrize(("a", "b", "axis"), PAIRS)
def test_cross(rng, a, b, axis):
    a, b = make(rng, *a), make(rng, *b)
    close(la.cross(a, b, axis=axis), np.linalg.cross(a, b, axis=axis))
    check_parts(lambda a, b: la.cross(a, b, axis=axis), a, b)
    with pytest.raises(ShapeError):
        la.cross(np.ones(2), np.ones(2))
    with pytest.raises(AxisError):
        la.cross(np.ones(3), np.ones(3), axis=1)


@pytest.mark.parametrize("offset", [0, 1, -2, 5])
def test_diagonal_and_trace(rng, offset):
    x = make(rng, 2, 3, 4)
    close(la.diagonal(x, offset=offset), np.linalg.diagonal(x, offset=offset))
    close(la.trace(x, offset=offset), np.linalg.trace(x, offset=offset))
    close(la.trace(np.ones((2, 2), "int8")), np.linalg.trace(np.ones((2, 2), "int8")))
    close(la.trace(np.ones((2, 2), "int8"), dtype="float32"), np.linalg.trace(np.ones((2, 2), "int8"), dtype="float32"))
    check_parts(lambda x: (la.diagonal(x, offset=offset), la.trace(x, offset=offset)), x)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_expm_is_scipys(rng, dtype):
    for shape in [(3, 3), (2, 2, 2), (1, 1), (0, 0), (0, 2, 2)]:
        x = make(rng, *shape, dtype=dtype)
        close(la.expm(x), sl.expm(x))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_expm_derivatives(rng, dtype):
    check_parts(la.expm, make(rng, 2, 3, 3, dtype=dtype))
    x = tg.asarray(make(rng, 2, 2, dtype=dtype))
    rows = tg.jacobian(lambda x: tg.real(la.expm(x)))(x).numpy()
    one = tg.grad(lambda x: tg.real(la.expm(x))[1, 0])(x).numpy()
    np.testing.assert_allclose(rows[1, 0], one, rtol=1e-10)


def test_expm_frechet(rng):
    a, e = make(rng, 3, 3), make(rng, 3, 3)
    for got, wanted in zip(la.expm_frechet(a, e), sl.expm_frechet(a, e), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9)
    np.testing.assert_allclose(la.expm_frechet(a, e, compute_expm=False), sl.expm_frechet(a, e)[1], rtol=1e-9)
    check_parts(la.expm_frechet, a, e, order=1)


def test_nan_is_an_error_of_the_matrix_that_has_it():
    good, bad = np.eye(2), np.full((2, 2), np.nan)
    with pytest.raises(LinAlgError, match=r"logm: array must not contain infs or NaNs \(of shape \(2, 2\)\)"):
        la.logm(bad)
    with pytest.raises(LinAlgError, match="solve_sylvester: array must not contain infs or NaNs"):
        la.solve_sylvester(bad, good, good)
    with pytest.raises(LinAlgError, match="example 1 of 2: logm"):
        tg.vmap(la.logm)(np.stack([good, bad]))


@pytest.mark.parametrize("f", ["sqrtm", "logm"])
def test_roots_and_logarithms(rng, f):
    ours, theirs = getattr(la, f), getattr(sl, f)
    x = make(rng, 3, 3)
    for y in (x @ x.T + np.eye(3), x + x.T - 2 * np.eye(3), x + 1j * x.T):
        got, wanted = ours(y), theirs(y)
        np.testing.assert_allclose(got, wanted, rtol=1e-8, atol=1e-10)
        assert got.dtype == wanted.dtype
        check_parts(ours, y, rtol=1e-3)
    stack = np.stack([x @ x.T, np.eye(3)])
    np.testing.assert_allclose(ours(stack)[0], theirs(stack[0]), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_solve_sylvester(rng, dtype):
    a, b, q = make(rng, 3, 3, dtype=dtype), make(rng, 2, 2, dtype=dtype), make(rng, 3, 2, dtype=dtype)
    close(la.solve_sylvester(a, b, q), sl.solve_sylvester(a, b, q))
    check_parts(la.solve_sylvester, a, b, q)
    stack = la.solve_sylvester(np.stack([a, 2 * a]), b, q).numpy()
    np.testing.assert_allclose(stack[1], sl.solve_sylvester(2 * a, b, q), rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float64", "complex128", "int64"])
def test_matrices_made_of_vectors_are_scipys(rng, dtype):
    c, r = (10 * make(rng, 4)).astype(dtype), (10 * make(rng, 3)).astype(dtype)
    close(la.toeplitz(c), sl.toeplitz(c))
    close(la.toeplitz(c, r), sl.toeplitz(c, r))
    close(la.hankel(c), sl.hankel(c))
    close(la.hankel(c, r), sl.hankel(c, r))
    close(la.circulant(c), sl.circulant(c))
    close(la.fiedler(c), sl.fiedler(c))
    for n in (1, 2, 5):
        for mode in ("full", "same", "valid"):
            close(la.convolution_matrix(c, n, mode), sl.convolution_matrix(c, n, mode))
    a, b = make(rng, 2, 3), make(rng, 4, 3)
    close(la.khatri_rao(a, b), sl.khatri_rao(a, b))
    c[0] = 2
    close(la.companion(c), sl.companion(c))
    for n in (2, 3, 4, 5, 6, 7):
        x = np.arange(2, n + 2).astype(dtype if dtype != "int64" else "float64")
        close(la.fiedler_companion(x), sl.fiedler_companion(x))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_derivatives_of_matrices_made_of_vectors(rng, dtype):
    c, r = make(rng, 4, dtype=dtype), make(rng, 3, dtype=dtype)
    for f in (la.toeplitz, la.hankel):
        check_parts(f, c)
        check_parts(f, c, r)
    for f in (la.circulant, la.fiedler, la.companion, la.fiedler_companion):
        check_parts(f, c)
    check_parts(lambda c: la.convolution_matrix(c, 3, "same"), c)


def test_stacks_of_vectors(rng):
    c = make(rng, 2, 3)
    for f in ("toeplitz", "hankel", "circulant", "companion", "fiedler"):
        got = getattr(la, f)(c)
        np.testing.assert_array_equal(got[1], getattr(la, f)(c[1]))


def test_block_diag(rng):
    blocks = [make(rng, 2, 3), make(rng, 1), np.float64(2.0), make(rng, 3, 2)]
    close(la.block_diag(*blocks), sl.block_diag(*blocks))
    check_parts(la.block_diag, *blocks)
    close(la.block_diag(np.zeros((0, 2)), np.ones((2, 2))), sl.block_diag(np.zeros((0, 2)), np.ones((2, 2))))
    assert la.block_diag(make(rng, 5, 2, 3), make(rng, 5, 1, 1)).shape == (5, 3, 4)


def test_bad_operands_raise():
    x = np.eye(2)
    for call in (
        lambda: la.matrix_power(np.ones((2, 3)), 2),
        lambda: la.multi_dot([x]),
        lambda: la.multi_dot([x, np.ones(2), x]),
        lambda: la.multi_dot([x, np.eye(3)]),
        lambda: la.expm(np.ones((2, 3))),
        lambda: la.expm_frechet(x, np.eye(3)),
        lambda: la.solve_sylvester(x, x, np.ones((2, 3))),
        lambda: la.companion(np.ones(1)),
        lambda: la.convolution_matrix(np.ones(2), 0),
        lambda: la.convolution_matrix(np.ones(2), 2, "half"),
        lambda: la.toeplitz(1.0),
        lambda: la.khatri_rao(x, np.ones((2, 3))),
        lambda: la.block_diag(np.ones((2, 2, 2)), np.ones((3, 2, 2))),
    ):
        with pytest.raises(ShapeError):
            call()
    with pytest.raises(LinAlgError):
        la.matrix_power(np.zeros((2, 2)), -1)
