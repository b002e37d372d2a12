"""Eigenvalues and singular values, and what is made of them."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg as sl
from complex_grads import check_parts

import tapegrad as tg
from tapegrad.errors import NoGradientError, ShapeError

la = tg.linalg
DTYPES = ["float32", "float64", "complex64", "complex128"]


def make(rng, *shape, dtype="float64"):
    x = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.normal(size=shape)
    return x.astype(dtype)


def hermitian(rng, *shape, dtype="float64"):
    x = make(rng, *shape, dtype=dtype)
    return (x + x.conj().swapaxes(-1, -2)) / 2


def same(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert got.tobytes() == np.ascontiguousarray(wanted).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("UPLO", ["L", "U"])
@pytest.mark.parametrize("whole", [True, False])
def test_eigh_is_numpys(rng, dtype, UPLO, whole):
    for shape in [(4, 4), (2, 3, 3), (0, 0), (0, 2, 2)]:
        x = (hermitian if whole else make)(rng, *shape, dtype=dtype)
        for got, wanted in zip(la.eigh(x, UPLO), np.linalg.eigh(x, UPLO), strict=True):
            same(got, wanted)
        same(la.eigvalsh(x, UPLO), np.linalg.eigvalsh(x, UPLO))


@pytest.mark.parametrize("UPLO", ["L", "U"])
@pytest.mark.parametrize("whole", [True, False])
def test_eigh_derivatives(rng, UPLO, whole):
    x = (hermitian if whole else make)(rng, 2, 3, 3)
    f = (lambda x: (x + x.mT) / 2) if whole else lambda x: x
    check_parts(lambda x: la.eigh(f(x), UPLO), x)
    check_parts(lambda x: la.eigvalsh(f(x), UPLO), x)


@pytest.mark.parametrize("UPLO", ["L", "U"])
@pytest.mark.parametrize("whole", [True, False])
def test_complex_eigh_derivatives_of_what_does_not_depend_on_phases(rng, UPLO, whole):
    x = (hermitian if whole else make)(rng, 3, 3, dtype="complex128")

    def f(x):
        w, v = la.eigh(x, UPLO)
        return w, tg.abs(v), v @ (tg.exp(w)[:, None] * tg.conj(v.mT))

    check_parts(f, x)
    check_parts(lambda x: la.eigvalsh(x, UPLO), x)


def test_a_nearly_hermitian_matrix_shares_its_gradient(rng):
    x = hermitian(rng, 3, 3)
    x[0, 2] *= 1 + 1e-15
    g = tg.grad(lambda x: la.eigvalsh(x)[0])(tg.asarray(x)).numpy()
    np.testing.assert_allclose(g, g.T, rtol=1e-12)
    x[0, 2] += 1
    g = tg.grad(lambda x: la.eigvalsh(x)[0])(tg.asarray(x)).numpy()
    assert not np.triu(g, 1).any()
    assert np.tril(g, -1)[[1, 2, 2], [0, 0, 1]].all()


def test_repeated_eigenvalues_have_a_gradient(rng):
    x = np.diag([1.0, 1.0, 2.0])
    for f in (la.eigvalsh, lambda x: la.eigh(x).eigenvalues):
        g = tg.grad(lambda x, f=f: tg.sum(f(x) ** 2))(tg.asarray(x)).numpy()
        np.testing.assert_allclose(g, 2 * x, atol=1e-12)
    y, dy = tg.jvp(la.eigvalsh, (tg.asarray(x),), (tg.asarray(np.eye(3)),))
    np.testing.assert_allclose(dy, np.ones(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_eig_is_numpys_but_always_complex(rng, dtype):
    for shape in [(4, 4), (2, 3, 3)]:
        x = make(rng, *shape, dtype=dtype)
        for got, wanted in zip(la.eig(x), np.linalg.eig(x), strict=True):
            same(got, wanted.astype(got.dtype))
            assert got.dtype.kind == "c"
        same(la.eigvals(x), np.linalg.eigvals(x).astype(got.dtype))
    assert la.eigvals(np.eye(2)).dtype == np.complex128


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_eig_derivatives(rng, dtype):
    def f(x):
        w, v = la.eig(x)
        return w, tg.abs(v), v @ (tg.exp(w)[..., None] * la.inv(v))

    check_parts(f, make(rng, 2, 3, 3, dtype=dtype))
    check_parts(la.eigvals, make(rng, 3, 3, dtype=dtype))


SHAPES = [(4, 3), (3, 4), (3, 3), (2, 3, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 2), (3, 0), (0, 2, 2), (0, 3, 2)])
def test_svd_is_numpys(rng, dtype, full, shape):
    x = make(rng, *shape, dtype=dtype)
    for got, wanted in zip(la.svd(x, full_matrices=full), np.linalg.svd(x, full_matrices=full), strict=True):
        same(got, wanted)
    same(la.svdvals(x), np.linalg.svdvals(x))
    same(la.svd(x, compute_uv=False), np.linalg.svdvals(x))


@pytest.mark.parametrize("shape", SHAPES)
def test_svd_derivatives(rng, shape):
    x = make(rng, *shape)
    check_parts(lambda x: la.svd(x, full_matrices=False), x)
    check_parts(la.svdvals, x)


@pytest.mark.parametrize("shape", SHAPES)
def test_complex_svd_derivatives_of_what_does_not_depend_on_phases(rng, shape):
    def f(x):
        u, s, vh = la.svd(x, full_matrices=False)
        return tg.abs(u), s, tg.abs(vh), (u * tg.exp(s)[..., None, :]) @ vh

    check_parts(f, make(rng, *shape, dtype="complex128"))
    check_parts(la.svdvals, make(rng, *shape, dtype="complex128"))


def test_full_svd(rng):
    x = tg.asarray(make(rng, 3, 2))
    check_parts(la.svd, make(rng, 2, 2), order=1)
    wanted = tg.grad(lambda x: tg.sum(la.svdvals(x) ** 3))(x)
    np.testing.assert_allclose(tg.grad(lambda x: tg.sum(la.svd(x).S ** 3))(x), wanted, rtol=1e-12)
    for f in (lambda x: la.svd(x).U, lambda x: la.svd(x).Vh):
        with pytest.raises(NoGradientError, match="full_matrices=False"):
            tg.grad(lambda x, f=f: tg.sum(f(x)))(x)
    with pytest.raises(NoGradientError, match="full_matrices=False"):
        tg.jvp(lambda x: la.svd(x).S, (x,), (x,))


def test_repeated_and_zero_singular_values_have_a_gradient():
    for x in (np.eye(3), np.diag([2.0, 0.0, 0.0]), np.zeros((2, 3))):
        for f in (la.svdvals, lambda x: la.svd(x, full_matrices=False).S, lambda x: la.norm(x, "nuc")):
            g = tg.grad(lambda x, f=f: tg.sum(f(x)))(tg.asarray(x)).numpy()
            assert np.isfinite(g).all()


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 0)])
def test_pinv(rng, dtype, shape):
    x = make(rng, *shape, dtype=dtype)
    same(la.pinv(x), np.linalg.pinv(x, rtol=None))
    same(la.pinv(x, 0.5), np.linalg.pinv(x, 0.5))
    if x.size:
        check_parts(la.pinv, x)


def test_pinv_of_less_than_full_rank(rng):
    x = make(rng, 2, 4)
    np.testing.assert_allclose(la.pinv(x.T @ x), np.linalg.pinv(x.T @ x, rtol=1e-10), rtol=1e-8)
    check_parts(lambda x: la.pinv(x.mT @ x, rtol=1e-10), x)
    h = hermitian(rng, 3, 3)
    np.testing.assert_allclose(la.pinv(h, hermitian=True), np.linalg.pinv(h), rtol=1e-9)


@pytest.mark.parametrize("batch", [(3,), (2, 3), (0,)])
def test_pinv_with_a_cutoff_for_each_matrix(rng, batch):
    x, rtol = make(rng, *batch, 3, 2), np.linspace(0, 0.9, 3)[: batch[-1]]
    same(la.pinv(x, rtol=rtol), np.linalg.pinv(x, rtol))
    if x.size:
        check_parts(lambda x: la.pinv(x, rtol=rtol * 1e-9), x)  # of all of the rank: the rule takes it for constant


def test_matrix_rank(rng):
    for x in (make(rng, 4, 3), make(rng, 4, 2) @ make(rng, 2, 3), np.zeros((2, 2)), np.zeros(3), np.ones(3),
              make(rng, 2, 3, 3), np.zeros((0, 3)), np.ones((2, 2), int)):  # fmt: skip
        got, wanted = la.matrix_rank(x), np.linalg.matrix_rank(x)
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, wanted)
    x = np.diag([1.0, 0.1, 0.001])
    assert la.matrix_rank(x, tol=0.01).item() == 2
    assert la.matrix_rank(x, rtol=0.5).item() == 1
    np.testing.assert_array_equal(la.matrix_rank(np.stack([x, x]), rtol=np.array([0.5, 1e-4])), [1, 3])


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("a", [(4, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize("k", [(), (2,)])
def test_lstsq(rng, dtype, a, k):
    a, b = make(rng, *a, dtype=dtype), make(rng, a[0], *k, dtype=dtype)
    got, wanted = la.lstsq(a, b), np.linalg.lstsq(a, b)
    same(got.x, wanted[0])
    np.testing.assert_allclose(got.residuals, wanted[1], rtol=1e-9)
    assert got.rank.item() == wanted[2]
    np.testing.assert_allclose(got.s, wanted[3])
    check_parts(lambda a, b: la.lstsq(a, b)[:2], a, b)


def test_lstsq_of_less_than_full_rank(rng):
    a, b = make(rng, 5, 2) @ make(rng, 2, 3), make(rng, 5)
    got = la.lstsq(a, b)
    assert got.rank.item() == 2 and got.residuals.shape == (0,)
    np.testing.assert_allclose(got.x, np.linalg.lstsq(a, b)[0], rtol=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shape", [(4, 3), (3, 3), (2, 3)])
def test_polar(rng, side, shape):
    x = make(rng, *shape)
    for got, wanted in zip(la.polar(x, side), sl.polar(x, side), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-12)
    check_parts(lambda x: la.polar(x, side), x)


def test_polar_where_singular_values_are_equal():
    x = np.array([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 3.0]])
    for at in (x, np.eye(3)):
        tg.testing.check_grads(lambda x: la.polar(x)[0], (at,), order=2)


def test_bad_operands_raise():
    for call in (
        lambda: la.eigh(np.ones((2, 3))),
        lambda: la.eigh(np.eye(2), UPLO="X"),
        lambda: la.eig(np.ones((2, 3))),
        lambda: la.svd(np.ones(3)),
        lambda: la.pinv(np.eye(2), rtol=np.ones(2)),
        lambda: la.lstsq(np.eye(2), np.ones(3)),
        lambda: la.polar(np.eye(2), side="up"),
    ):
        with pytest.raises(ShapeError):
            call()
