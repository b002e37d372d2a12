"""Systems of equations, inverses, determinants, triangular and banded systems."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg as sl
from complex_grads import check_parts
from hypothesis import given
from hypothesis import strategies as st

import tapegrad as tg
from tapegrad.errors import LinAlgError, ShapeError

la = tg.linalg


def make(rng, *shape, dtype="float64"):
    x = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.normal(size=shape)
    return x.astype(dtype)


def regular(rng, *shape, dtype="float64"):
    return (make(rng, *shape, dtype=dtype) + 3 * np.eye(shape[-1])).astype(dtype)


def same(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    assert got.tobytes() == np.ascontiguousarray(wanted).tobytes()


DTYPES = ["float32", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_numpys(rng, dtype):
    a, stack = regular(rng, 4, 4, dtype=dtype), regular(rng, 2, 3, 3, dtype=dtype)
    same(la.inv(a), np.linalg.inv(a))
    same(la.inv(stack), np.linalg.inv(stack))
    same(la.det(stack), np.linalg.det(stack))
    for got, wanted in zip(la.slogdet(stack), np.linalg.slogdet(stack), strict=True):
        same(got, wanted)
    for b in (make(rng, 4, dtype=dtype), make(rng, 4, 2, dtype=dtype)):
        same(la.solve(a, b), np.linalg.solve(a, b))
    b = make(rng, 5, 1, 3, 2, dtype=dtype)
    same(la.solve(stack, b), np.linalg.solve(stack, b))
    same(la.solve(stack, b[0, 0, :, 0]), np.linalg.solve(stack, b[0, 0, :, 0]))


@pytest.mark.parametrize("name", ["inv", "det"])
def test_integers_are_computed_in_float64_and_half_in_single(name):
    whole = [[2, 1], [1, 3]]
    same(getattr(la, name)(np.array(whole)), getattr(np.linalg, name)(np.array(whole)))
    half = getattr(la, name)(np.array(whole, "float16"))
    assert half.dtype == "float16"
    same(half, getattr(np.linalg, name)(np.array(whole, "float32")).astype("float16"))


def test_empty_matrices_and_stacks():
    for shape in ((0, 0), (0, 2, 2), (3, 0, 0)):
        x = np.zeros(shape)
        same(la.inv(x), np.linalg.inv(x))
        same(la.det(x), np.linalg.det(x))
        same(la.slogdet(x)[1], np.linalg.slogdet(x)[1])
        same(la.solve(x, x), np.linalg.solve(x, x))
        assert tg.grad(lambda t: tg.sum(la.det(t)) + tg.sum(la.inv(t)))(tg.asarray(x)).shape == shape


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize(
    ("a", "b"), [((3, 3), (3,)), ((3, 3), (3, 2)), ((2, 3, 3), (3, 2)), ((3, 3), (2, 3, 1)), ((2, 1, 2, 2), (3, 2, 2))]
)
def test_solve_derivatives(rng, dtype, a, b):
    check_parts(la.solve, regular(rng, *a, dtype=dtype), make(rng, *b, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_derivatives_of_inverse_and_determinants(rng, dtype, n):
    x = regular(rng, 2, n, n, dtype=dtype)
    for f in (la.inv, la.det, la.slogdet):
        check_parts(f, x)


def test_real_operands_beside_complex_ones(rng):
    check_parts(la.solve, regular(rng, 3, 3), make(rng, 3, dtype="complex128"))


def adjugate(x):
    n = len(x)
    found = np.empty((n, n), x.dtype)
    for i in range(n):
        for j in range(n):
            found[i, j] = (-1) ** (i + j) * np.linalg.det(np.delete(np.delete(x, i, 0), j, 1))
    return found


@pytest.mark.parametrize("lost", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_gradient_of_det_is_the_cofactors_whatever_the_rank(rng, n, lost):
    if lost > n:
        return
    x = make(rng, n, n - lost) @ make(rng, n - lost, n)
    got = tg.grad(la.det)(tg.asarray(x)).numpy()
    np.testing.assert_allclose(got, adjugate(x), atol=1e-12)


def test_higher_derivatives_of_det_at_singular_matrices(rng):
    x = make(rng, 5, 3) @ make(rng, 3, 5)  # of rank 3: the second derivative is not 0
    check_parts(la.det, x, order=3)
    zeros = np.zeros((5, 5))
    check_parts(la.det, zeros, order=2, atol=1e-10)
    assert np.abs(tg.hessian(la.det)(tg.asarray(x)).numpy()).max() > 1e-3


def test_gradient_of_det_of_a_complex_matrix_is_conjugated(rng):
    x = make(rng, 4, 4, dtype="complex128")
    t = tg.asarray(x)
    with tg.GradientTape() as tape:
        tape.watch(t)
        y = tg.real(la.det(t))
    np.testing.assert_allclose(tape.gradient(y, t).numpy(), adjugate(x).conj(), rtol=1e-9)


def test_logdet(rng):
    a = regular(rng, 3, 3)
    a = a @ a.T
    flipped = a[[1, 0, 2]]
    np.testing.assert_allclose(la.logdet(np.stack([a, flipped])), [np.log(np.linalg.det(a)), np.nan], rtol=1e-12)
    assert la.logdet(np.zeros((2, 2))).item() == -np.inf
    check_parts(la.logdet, a)
    check_parts(la.logdet, make(rng, 3, 3, dtype="complex128"))


def test_singular_matrices_raise_and_name_the_function():
    x = tg.asarray(np.array([[1.0, 2.0], [2.0, 4.0]]))
    for name, call in {
        "inv": lambda: la.inv(x),
        "solve": lambda: la.solve(x, x),
        "solve_triangular": lambda: la.solve_triangular(np.zeros((2, 2)), x),
        "slogdet|inv": lambda: tg.grad(lambda t: la.slogdet(t)[1])(x),
    }.items():
        with pytest.raises(LinAlgError, match=f"^({name}): .*2, 2"):
            call()
    assert issubclass(LinAlgError, ValueError)


def test_shapes_that_do_not_fit_raise():
    for call in (
        lambda: la.inv(np.ones((2, 3))),
        lambda: la.det(np.ones(3)),
        lambda: la.solve(np.eye(3), np.ones(2)),
        lambda: la.solve(np.eye(3), 1.0),
        lambda: la.solve(np.ones((2, 3, 3)), np.ones((4, 3, 1))),
        lambda: la.solve_triangular(np.eye(3), np.ones(3), trans=3),
        lambda: la.tensorinv(np.ones((2, 3)), ind=1),
        lambda: la.tensorinv(np.ones((2, 2)), ind=0),
        lambda: la.tensorsolve(np.ones((2, 3)), np.ones(2)),
        lambda: la.solve_banded((1, 1), np.ones((2, 3)), np.ones(3)),
    ):
        with pytest.raises(ShapeError):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("trans", [0, 1, 2, "C"])
def test_solve_triangular_is_scipys(rng, dtype, lower, unit, trans):
    a, b = regular(rng, 4, 4, dtype=dtype), make(rng, 4, 2, dtype=dtype)
    got = la.solve_triangular(a, b, trans=trans, lower=lower, unit_diagonal=unit)
    wanted = sl.solve_triangular(a, b, trans=trans, lower=lower, unit_diagonal=unit)
    vector = la.solve_triangular(a, b[:, 0], trans, lower, unit)
    # Several columns are solved in place, from the other side, which sums in another order than SciPy's copy.
    rtol = 1e-4 if dtype in ("float32", "complex64") else 1e-12
    np.testing.assert_allclose(got, wanted, rtol=rtol)
    np.testing.assert_allclose(vector, got[:, 0], rtol=rtol)
    if trans in (0, 1):
        same(vector, sl.solve_triangular(a, b[:, 0], trans, lower, unit))


def test_solve_triangular_of_a_stack_and_in_any_order_of_memory(rng):
    a, b = regular(rng, 2, 3, 5, 5), make(rng, 2, 3, 5, 4)
    want = np.array([[sl.solve_triangular(a[i, k], b[i, k], lower=True) for k in range(3)] for i in range(2)])
    for turned in (a, np.asfortranarray(a), a.swapaxes(-1, -2).copy().swapaxes(-1, -2)):
        np.testing.assert_allclose(la.solve_triangular(turned, b, lower=True), want, rtol=1e-12)
        np.testing.assert_allclose(la.solve_triangular(turned, np.asfortranarray(b), lower=True), want, rtol=1e-12)
    a[1, 2, 3, 3] = 0.0
    with pytest.raises(LinAlgError, match=r"element 3 of its diagonal is 0.*these fail: \(1, 2\)"):
        la.solve_triangular(a, b, lower=True)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("trans", [0, 1, 2])
def test_solve_triangular_derivatives(rng, dtype, trans):
    a, b = regular(rng, 2, 3, 3, dtype=dtype), make(rng, 3, 2, dtype=dtype)
    for lower, unit in ((True, False), (False, True)):
        check_parts(lambda a, b, k=(trans, lower, unit): la.solve_triangular(a, b, *k), a, b)


def test_solve_triangular_gives_no_gradient_to_what_it_does_not_read(rng):
    a, b = tg.asarray(regular(rng, 3, 3)), make(rng, 3, 2)
    g = tg.grad(lambda a: tg.sum(la.solve_triangular(a, b, lower=True, unit_diagonal=True)))(a).numpy()
    assert not np.triu(g).any()
    assert np.tril(g, -1).any()


def test_tensor_equations(rng):
    a, b = make(rng, 2, 3, 6), make(rng, 2, 3)
    same(la.tensorsolve(a, b), np.linalg.tensorsolve(a, b))
    turned = make(rng, 3, 2, 6)
    same(la.tensorsolve(turned.transpose(2, 0, 1), b.T, axes=(0,)),
         np.linalg.tensorsolve(turned.transpose(2, 0, 1), b.T, axes=(0,)))  # fmt: skip
    same(la.tensorinv(a), np.linalg.tensorinv(a))
    same(la.tensorinv(make(rng, 6, 6)[:, :], ind=1).shape, (6, 6))
    check_parts(la.tensorsolve, a, b)
    check_parts(la.tensorinv, a)


@pytest.mark.parametrize("bands", [(0, 0), (1, 1), (2, 1), (0, 2)])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_solve_banded(rng, bands, dtype):
    ab = make(rng, sum(bands) + 1, 5, dtype=dtype)
    ab[bands[1]] += 4
    for b in (make(rng, 5, dtype=dtype), make(rng, 5, 2, dtype=dtype)):
        same(la.solve_banded(bands, ab, b), sl.solve_banded(bands, ab, b))
        check_parts(lambda ab, b: la.solve_banded(bands, ab, b), ab, b)


def test_solve_toeplitz(rng):
    c, r, b = make(rng, 4) + [3, 0, 0, 0], make(rng, 4), make(rng, 4, 2)
    np.testing.assert_allclose(la.solve_toeplitz((c, r), b), sl.solve_toeplitz((c, r), b), rtol=1e-10)
    np.testing.assert_allclose(la.solve_toeplitz(c, b[:, 0]), sl.solve_toeplitz(c, b[:, 0]), rtol=1e-10)
    check_parts(lambda c, r, b: la.solve_toeplitz((c, r), b), c, r, b)


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3), st.booleans())
def test_a_jacobian_in_one_walk_is_that_of_its_rows(batch, n, k, complex):
    rng = np.random.default_rng(batch + 10 * n + 100 * k)
    dtype = "complex128" if complex else "float64"
    a, b = regular(rng, batch, n, n, dtype=dtype), make(rng, batch, n, k, dtype=dtype)

    def f(a):
        y = la.solve(a, b)
        return tg.real(y) + tg.imag(y)

    whole = tg.jacobian(f)(tg.asarray(a)).numpy()
    assert whole.shape == (batch, n, k, batch, n, n)
    for index in np.ndindex(batch, n, k):
        row = tg.grad(lambda a, index=index: f(a)[index])(tg.asarray(a)).numpy()
        np.testing.assert_allclose(whole[index], row, atol=1e-12)
