"""Solves with sparse matrices: direct and iterative, their implicit derivatives, and what is refused."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg

import tapegrad as tg
from tapegrad.errors import DTypeError, LinAlgError, NotATensorError, ShapeError
from tapegrad.testing import check_grads

TIGHT = {"rtol": 1e-13, "atol": 1e-13}


def invertible(rng, n=6, symmetric=False):
    a = scipy.sparse.random_array((n, n), density=0.3, rng=rng)
    if symmetric:
        a = a @ a.T
    found = scipy.sparse.csr_array(a + 2 * scipy.sparse.eye_array(n))
    found.sort_indices()
    return found


def tensor_of(a, data):
    return tg.sparse.csr(data, a.indices, a.indptr, a.shape)


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 0), (2, 6, 3)])
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
def test_spsolve(rng, shape, dtype):
    a, b = invertible(rng).astype(dtype), rng.normal(size=shape).astype(dtype)
    columns = b if b.ndim > 1 else b[:, None]
    for s, dense in ((a, a.toarray()), (tg.sparse.asarray(a), a.toarray()), (tg.sparse.asarray(a).T, a.toarray().T)):
        x = tg.sparse.spsolve(s, b)
        assert (x.shape, x.dtype) == (shape, dtype)
        np.testing.assert_allclose(x.numpy(), np.linalg.solve(dense, columns).reshape(shape), rtol=1e-4, atol=1e-5)


def test_nothing_to_solve():
    a = tg.sparse.csr(np.zeros(0), np.zeros(0, int), np.zeros(1, int), (0, 0))
    assert tg.sparse.spsolve(a, np.zeros((0, 2))).shape == (0, 2)


def test_spsolve_has_scipys_values(rng):
    a, b = invertible(rng), rng.normal(size=6)
    np.testing.assert_allclose(tg.sparse.spsolve(a, b).numpy(), scipy.sparse.linalg.spsolve(a.tocsc(), b), rtol=1e-14)


@pytest.mark.parametrize("shape", [(6,), (6, 2)])
def test_spsolve_derivatives_in_values_and_right_hand_side(rng, shape):
    a, b = invertible(rng), rng.normal(size=shape)
    check_grads(lambda d, b: tg.sparse.spsolve(tensor_of(a, d), tg.sin(b)), [a.data, b], order=2)
    check_grads(lambda d, b: tg.sparse.spsolve(tensor_of(a, d).T, b), [a.data, b], order=2)
    f = lambda d: tg.sum(tg.sparse.spsolve(tensor_of(a, d), b) ** 2)
    rows, columns = a.tocoo().coords
    g = lambda d: tg.sum(tg.sparse.spsolve(tg.sparse.coo(d, rows, columns, a.shape), b) ** 2)
    np.testing.assert_allclose(tg.hessian(f)(a.data).numpy(), tg.hessian(g)(a.data).numpy())


def test_complex_solve_gradients_are_the_conjugates(rng):
    a = invertible(rng).astype("complex128")
    a.data = a.data + 0.3j * rng.normal(size=a.nnz)
    b, ct = (rng.normal(size=6) + 1j * rng.normal(size=6) for _ in range(2))
    x, pull = tg.vjp(lambda d, b: tg.sparse.spsolve(tensor_of(a, d), b), a.data, b)
    of_data, of_b = (g.numpy() for g in pull(ct))
    left = np.linalg.solve(a.toarray().conj().T, ct)
    np.testing.assert_allclose(of_b, left)
    rows, columns = a.tocoo().coords
    np.testing.assert_allclose(of_data, -left[rows] * x.numpy().conj()[columns])


def test_one_factorization_serves_forward_and_backward(rng, monkeypatch):
    made = []

    class Factors:
        """SuperLU's, of which a weak reference can be made."""

        def __init__(self, matrix, splu=scipy.sparse.linalg.splu):
            self.solve = splu(matrix).solve
            made.append(weakref.ref(self))

    alive = lambda: sum(ref() is not None for ref in made)
    monkeypatch.setattr(scipy.sparse.linalg, "splu", Factors)
    a, b = invertible(rng), rng.normal(size=6)
    s = tg.sparse.asarray(a)
    with tg.GradientTape() as tape:
        tape.watch(s.data)
        y = tg.sum(tg.sparse.spsolve(s, b) ** 2)
    tape.gradient(y, s.data)
    tg.sparse.spsolve(s.T, b)
    assert len(made) == 1
    del s, tape
    gc.collect()
    assert not alive(), "factors outlive their matrix"
    kept = [tg.sparse.asarray(invertible(rng)) for _ in range(16)]
    for s in kept:
        tg.sparse.spsolve(s, b)
    assert len(made) == 17 and 0 < alive() <= 8


@pytest.mark.parametrize("how", ["matrix", "scipy", "dense", "function"])
@pytest.mark.parametrize("method", ["cg", "gmres"])
def test_iterative_solves(rng, how, method):
    a, b = invertible(rng, symmetric=True), rng.normal(size=6)
    given = {
        "matrix": tg.sparse.asarray(a), "scipy": a, "dense": a.toarray(), "function": lambda x: tg.sparse.matmul(a, x)
    }[how]  # fmt: skip
    solve = getattr(tg.sparse, method)
    x, info = solve(given, b, **TIGHT)
    assert info == 0
    np.testing.assert_allclose(x.numpy(), np.linalg.solve(a.toarray(), b))
    column, _ = solve(a, b[:, None], x0=b[:, None], M=scipy.sparse.eye_array(6), **TIGHT)
    np.testing.assert_allclose(column.numpy(), np.linalg.solve(a.toarray(), b[:, None]))
    wanted, wanted_info = getattr(scipy.sparse.linalg, method)(a, b, maxiter=1, **TIGHT)
    x, info = solve(given, b, maxiter=1, **TIGHT)
    assert info == wanted_info
    np.testing.assert_allclose(x.numpy(), wanted, rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
@pytest.mark.parametrize("method", ["cg", "gmres"])
def test_iterations_whose_inner_products_are_reduced(rng, method, dtype):
    """Where a function sums them: the iteration is ours, SciPy's the oracle."""
    a, b = invertible(rng, 12, symmetric=method == "cg").astype(dtype), rng.normal(size=12).astype(dtype)
    if method == "gmres" and dtype == "complex128":
        a.data = a.data + 0.3j * rng.normal(size=a.nnz)
    solve, theirs = getattr(tg.sparse, method), getattr(scipy.sparse.linalg, method)
    few = {} if method == "cg" else {"restart": 4}
    for options in ({}, {"x0": b / 3}, {"M": scipy.sparse.diags_array(1 / a.diagonal()).tocsr()}, few):
        x, info = solve(a, b, reduce=lambda s: s, rtol=1e-5, **options)
        assert x.dtype == dtype
        assert info == theirs(a, b, rtol=1e-5, **options)[1]
        if not info:
            np.testing.assert_array_less(np.linalg.norm(a @ x.numpy() - b), 1.1e-5 * np.linalg.norm(b))
    x, info = solve(a, b, reduce=lambda s: s, maxiter=2, **few)
    wanted, wanted_info = theirs(a, b, maxiter=2, **few)
    assert info == wanted_info
    np.testing.assert_allclose(x.numpy(), wanted, rtol=1e-4 if dtype == "float32" else 1e-10, atol=1e-6)
    nothing, info = solve(a, b * 0, reduce=lambda s: s)
    assert info == 0 and not nothing.numpy().any()
    x, info = solve(a * np.nan, b, reduce=lambda s: s)
    assert info and np.isnan(x.numpy()).all()
    exact, info = solve(lambda x: x * 2, b[:1], reduce=lambda s: s)
    assert info == 0
    np.testing.assert_allclose(exact.numpy(), b[:1] / 2)


@pytest.mark.parametrize(("method", "symmetric"), [("cg", True), ("gmres", False)])
def test_derivatives_of_iterative_solves(rng, method, symmetric):
    a, b = invertible(rng, symmetric=symmetric), rng.normal(size=6)
    solve = getattr(tg.sparse, method)
    rows, columns = a.tocoo().coords
    order = np.argsort(columns * 6 + rows, kind="stable") if symmetric else np.arange(a.nnz)

    def matrix(data):
        return tensor_of(a, (data + data[order]) / 2 if symmetric else data)

    by_matrix = lambda d, b: solve(matrix(d), tg.sin(b), **TIGHT)[0]
    check_grads(by_matrix, [a.data, b], order=2)
    check_grads(lambda d, b: solve(lambda x: matrix(d) @ x, b, **TIGHT)[0], [a.data, b], order=2)
    check_grads(lambda d, b: solve(matrix(d), tg.sin(b), reduce=lambda s: s, **TIGHT)[0], [a.data, b], order=2)
    dense = tg.jacobian(lambda d, b: tg.sparse.spsolve(matrix(d), tg.sin(b)), (0, 1))(a.data, b)
    for g, w in zip(tg.jacobian(by_matrix, (0, 1))(a.data, b), dense, strict=True):
        np.testing.assert_allclose(g.numpy(), w.numpy(), atol=1e-9)
    third = lambda f: tg.grad(lambda d: tg.sum(tg.hvp(lambda d: tg.sum(f(d, b) ** 3), d, a.data)))(a.data).numpy()
    exact = lambda d, b: tg.sparse.spsolve(matrix(d), tg.sin(b))
    np.testing.assert_allclose(third(by_matrix), third(exact), rtol=1e-6)


def test_an_operator_on_a_grid_with_variables(rng):
    """A function of a field of any shape that reads a variable and closes over a watched tensor."""
    v, c = tg.Variable(np.float64(0.3)), tg.asarray(rng.uniform(1, 2, (4, 5)))
    b = tg.asarray(rng.normal(size=(4, 5)))

    def operator(x):
        around = sum(tg.roll(x, k, axis=i) for k in (1, -1) for i in (0, 1))
        return 4 * x + v * c * tg.sum(c * x) - around * v

    def loss(vv, cc, bb):
        a = np.stack([_apply(vv, cc, e.reshape(4, 5)).ravel() for e in np.eye(20)], axis=1)
        return np.sum(np.linalg.solve(a, bb.ravel()) ** 2)

    def _apply(vv, cc, x):
        around = sum(np.roll(x, k, axis=i) for k in (1, -1) for i in (0, 1))
        return 4 * x + vv * cc * np.sum(cc * x) - around * vv

    with tg.GradientTape() as tape:
        tape.watch([c, b])
        y = tg.sum(tg.sparse.gmres(operator, b, **TIGHT)[0] ** 2)
    gv, gc_, gb = tape.gradient(y, [v, c, b])
    start = [np.asarray(v.numpy()), c.numpy(), b.numpy()]
    np.testing.assert_allclose(y.numpy(), loss(*start))
    for i, g in enumerate((gv, gc_, gb)):
        step = rng.normal(size=start[i].shape)
        up, down = ([x + e * step if k == i else x for k, x in enumerate(start)] for e in (1e-6, -1e-6))
        np.testing.assert_allclose(np.sum(g.numpy() * step), (loss(*up) - loss(*down)) / 2e-6, rtol=1e-5)


def test_complex_iterative_gradients_are_the_conjugates(rng):
    a = invertible(rng).astype("complex128")
    a.data = a.data + 0.3j * rng.normal(size=a.nnz)
    b, ct = (rng.normal(size=6) + 1j * rng.normal(size=6) for _ in range(2))
    pulled = [
        tg.vjp(lambda d, b, s=s: s(tensor_of(a, d), b), a.data, b)[1](ct)
        for s in (tg.sparse.spsolve, lambda m, b: tg.sparse.gmres(m, b, **TIGHT)[0])
    ]
    for g, w in zip(*pulled, strict=True):
        np.testing.assert_allclose(g.numpy(), w.numpy())


def test_what_is_not_watched_costs_nothing(rng):
    a, b = invertible(rng, symmetric=True), tg.asarray(rng.normal(size=6))
    runs = []

    def operator(x):
        runs.append(1)
        return tg.sparse.matmul(a, x)

    with tg.GradientTape() as tape:
        tape.watch(b)
        x, _ = tg.sparse.cg(operator, b, **TIGHT)
        y = tg.sum(x)
    forward = len(runs)
    g = tape.gradient(y, b)
    np.testing.assert_allclose(g.numpy(), np.linalg.solve(a.toarray(), np.ones(6)))
    assert len(runs) - forward <= forward + 1


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda a: tg.sparse.spsolve(a, np.ones(5)), ShapeError, "right-hand side"),
        (lambda a: tg.sparse.spsolve(a, 1.0), ShapeError, "scalar"),
        (lambda a: tg.sparse.spsolve(a[:3], np.ones(3)), ShapeError, "square"),
        (lambda a: tg.sparse.spsolve(np.eye(2), np.ones(2)), NotATensorError, "sparse.csr"),
        (lambda a: tg.sparse.spsolve(a.astype("int64"), np.ones(6)), DTypeError, "astype"),
        (lambda a: tg.sparse.spsolve(a * 0, np.ones(6)), LinAlgError, "singular"),
        (lambda a: tg.sparse.cg(a, np.ones((6, 2))), ShapeError, "spsolve"),
        (lambda a: tg.sparse.cg(a, np.ones(5)), ShapeError, "right-hand side"),
        (lambda a: tg.sparse.cg(a, np.ones(6), x0=np.ones(5)), ShapeError, "x0"),
        (lambda a: tg.sparse.cg(a[:3], np.ones(3)), ShapeError, "square"),
        (lambda a: tg.sparse.cg(np.ones((3, 2)), np.ones(3)), ShapeError, "square"),
        (lambda a: tg.sparse.gmres(lambda x: x[:2], np.ones(3)), ShapeError, "keep the shape"),
        (lambda a: tg.sparse.gmres(lambda x: x * 1j, np.ones(3)), DTypeError, "give b that dtype"),
        (lambda a: tg.sparse.cg(a.astype("int64"), np.ones(6)), DTypeError, "astype"),
        (lambda a: tg.sparse.cg("A", np.ones(6)), NotATensorError, "cg"),
        (lambda a: tg.sparse.cg(a, np.ones(6), reduce=tg.sum), ShapeError, r"reduce made \(\) of \(1,\)"),
    ],
)
def test_bad_input(rng, f, error, words):
    with pytest.raises(error, match=words):
        f(invertible(rng))


def test_vmap(rng):
    a = invertible(rng)
    data, b = a.data + 0.1 * rng.normal(size=(3, a.nnz)), rng.normal(size=(3, 6))
    for f in (lambda d, b: tensor_of(a, d) @ b, lambda d, b: tg.sparse.spsolve(tensor_of(a, d).T, b)):
        for axes in ((0, 0), (0, None), (None, 0)):
            given = [x if axis == 0 else x[0] for x, axis in zip((data, b), axes, strict=True)]
            rows = [[x[k] if axis == 0 else x for x, axis in zip(given, axes, strict=True)] for k in range(3)]
            gradient = tg.grad(lambda d, b, f=f: tg.sum(f(d, b) ** 2), (0, 1))
            for g in (f, gradient):
                got = tg.vmap(g, in_axes=axes)(*given)
                wanted = [g(*row) for row in rows]
                got, wanted = ((got,), [(w,) for w in wanted]) if g is f else (got, wanted)
                for x, *each in zip(got, *wanted, strict=True):
                    np.testing.assert_allclose(x.numpy(), np.stack([e.numpy() for e in each]))


def _itself(f):
    return f


def _gradient(f):
    return tg.grad(lambda x: tg.sum(f(x) ** 2))


def _pushed(f):
    return lambda x: tg.jvp(f, (x,), (x,))[1]


def test_vmap_of_iterative_solves(rng):
    a, b = invertible(rng), rng.normal(size=(3, 2, 6))
    f = lambda b: tg.sparse.gmres(a, tg.sin(b), **TIGHT)[0]
    exact = lambda b: tg.sparse.spsolve(a, tg.sin(b))
    for make in (_itself, _gradient, tg.jacobian, _pushed):
        wanted = np.stack([[make(exact)(x).numpy() for x in row] for row in b])
        np.testing.assert_allclose(tg.vmap(tg.vmap(make(f)))(b).numpy(), wanted)
        outside = _gradient(tg.vmap(make(f)))(b[0])
        np.testing.assert_allclose(outside.numpy(), _gradient(tg.vmap(make(exact)))(b[0]).numpy(), rtol=1e-6)
    many = a.data + 0.1 * rng.normal(size=(3, a.nnz))
    with pytest.raises(tg.errors.GradientError, match="spsolve"):
        tg.vmap(lambda d: tg.sparse.gmres(tensor_of(a, d), b[0, 0])[0])(many)
