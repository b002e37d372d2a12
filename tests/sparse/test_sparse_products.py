"""Products of sparse matrices with dense tensors: values as SciPy's, derivatives in both, SciPy's own operators."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import tapegrad as tg
from tapegrad.errors import DTypeError, IndexingError, NotATensorError, ShapeError
from tapegrad.testing import check_grads

SHAPES = [((4,), ()), ((4, 3), ()), ((2, 4, 3), ()), ((4, 0), ())]


def some(rng, rows=5, columns=4, density=0.4, dtype="float64"):
    return scipy.sparse.random_array((rows, columns), density=density, rng=rng, dtype=dtype, format="csr")


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 1), (4, 0)])
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128", "int64"])
def test_products_are_scipys_bit_for_bit(rng, shape, dtype):
    a = some(rng).astype(dtype)
    x = (rng.normal(size=shape) * 3).astype(dtype)
    for found in (tg.sparse.matmul(a, x), tg.sparse.asarray(a) @ x, tg.sparse.asarray(a) @ tg.asarray(x)):
        assert isinstance(found, tg.Tensor)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.numpy(), a @ x)
    np.testing.assert_array_equal((tg.sparse.asarray(a).T @ (a @ x)).numpy(), a.T @ (a @ x))


@pytest.mark.parametrize("make", [scipy.sparse.csc_array, scipy.sparse.coo_array, scipy.sparse.csr_matrix])
def test_other_formats_are_converted(rng, make):
    a = make(some(rng))
    np.testing.assert_allclose(tg.sparse.matmul(a, np.eye(4)).numpy(), a.toarray())
    np.testing.assert_array_equal(tg.sparse.asarray(a).todense().numpy(), a.toarray())


def test_a_dense_operand_may_stand_left_and_have_more_dimensions(rng):
    a = some(rng)
    s = tg.sparse.asarray(a)
    for shape in ((5,), (3, 5), (2, 3, 5)):
        x = rng.normal(size=shape)
        np.testing.assert_allclose((tg.asarray(x) @ s).numpy(), x @ a.toarray())
        np.testing.assert_allclose((x @ s).numpy(), x @ a.toarray())
    x = rng.normal(size=(2, 4, 3))
    np.testing.assert_allclose((s @ x).numpy(), a.toarray() @ x)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (2, 4, 3)])
def test_derivatives_in_both_operands(rng, shape):
    a = some(rng)
    f = lambda data, x: tg.sparse.csr(data, a.indices, a.indptr, a.shape) @ tg.sin(x)
    check_grads(f, [a.data, rng.normal(size=shape)], order=2)
    g = lambda data, x: tg.cos(x).mT @ tg.sparse.csr(tg.exp(data), a.indices, a.indptr, a.shape).T
    check_grads(g, [a.data, rng.normal(size=(4, 3))], order=2)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.integers(0, 6), st.booleans(), st.integers(0, 2**20))
def test_sparse_is_dense_with_gaps(rows, columns, width, count, transposed, seed):
    """Any places, some twice: the gradients are those of the dense product, gathered."""
    rng = np.random.default_rng(seed)
    i, j, data = rng.integers(rows, size=count), rng.integers(columns, size=count), rng.normal(size=count)
    x = rng.normal(size=(rows if transposed else columns, width))

    def sparse(data, x):
        a = tg.sparse.coo(data, i, j, (rows, columns))
        return (a.T if transposed else a) @ x

    def dense(data, x):
        a = tg.zeros((rows, columns), dtype="float64").at[i, j].add(data)
        return (a.T if transposed else a) @ x

    (y, pull), (z, pull_dense) = tg.vjp(sparse, data, x), tg.vjp(dense, data, x)
    np.testing.assert_allclose(y.numpy(), z.numpy(), atol=1e-12)
    ct = rng.normal(size=y.shape)
    for g, w in zip(pull(ct), pull_dense(ct), strict=True):
        np.testing.assert_allclose(g.numpy(), w.numpy(), atol=1e-12)
    jacobians = (tg.jacobian(f, (0, 1))(data, x) for f in (sparse, dense))
    for g, w in zip(*jacobians, strict=True):
        np.testing.assert_allclose(g.numpy(), w.numpy(), atol=1e-12)


def test_complex_gradients_are_the_conjugates(rng):
    a = some(rng).astype("complex128")
    a.data = a.data + 1j * rng.normal(size=a.nnz)
    x, ct = (rng.normal(size=s) + 1j * rng.normal(size=s) for s in ((4, 3), (5, 3)))
    f = lambda data, x: tg.sparse.csr(data, a.indices, a.indptr, a.shape) @ x
    _, pull = tg.vjp(f, a.data, x)
    of_data, of_x = (g.numpy() for g in pull(ct))
    np.testing.assert_allclose(of_x, a.toarray().conj().T @ ct)
    rows = a.tocoo().coords[0]
    np.testing.assert_allclose(of_data, (ct @ x.conj().T)[rows, a.indices])


def test_algebra_of_sparse_tensors(rng):
    a = some(rng, 4, 4)
    data, dense = tg.asarray(a.data), a.toarray()
    s = tg.sparse.csr(data, a.indices, a.indptr, a.shape)
    for found, wanted in [
        (s * 2, dense * 2), (0.5 * s, dense / 2), (s / 4, dense / 4), (-s, -dense), (s + s * 3, dense * 4),
        (s - s, dense * 0), (s.T, dense.T), (s.T + s.T, 2 * dense.T), (tg.asarray(3.0) * s, dense * 3),
        (s.astype("complex128").conj(), dense),
    ]:  # fmt: skip
        assert isinstance(found, tg.sparse.SparseTensor)
        np.testing.assert_allclose(found.todense().numpy(), wanted)
    np.testing.assert_allclose(s.sum().numpy(), dense.sum())
    np.testing.assert_allclose(s.sum(axis=0).numpy(), dense.sum(0))
    np.testing.assert_allclose(s.T.sum(axis=-1).numpy(), dense.sum(0))
    np.testing.assert_array_equal(s.diagonal().numpy(), dense.diagonal())
    np.testing.assert_array_equal(s.to_library().toarray(), dense)
    assert (s.nnz, s.shape, s.ndim, s.dtype) == (a.nnz, (4, 4), 2, np.float64)
    assert "values of float64" in repr(s)
    check_grads(lambda d: tg.sparse.csr(d * d, a.indices, a.indptr, a.shape).todense(), [a.data])


def test_a_diagonal_of_a_matrix_that_is_not_square(rng):
    for shape in ((3, 5), (5, 3)):
        a = some(rng, *shape, density=0.8)
        np.testing.assert_array_equal(tg.sparse.asarray(a).diagonal().numpy(), a.diagonal())
        np.testing.assert_array_equal(tg.sparse.asarray(a).T.diagonal().numpy(), a.diagonal())


def test_scipys_own_operator_leaves_tensors_to_us(rng):
    a = some(rng, 4, 4)
    for make in (scipy.sparse.csr_array, scipy.sparse.csr_matrix, scipy.sparse.coo_array, scipy.sparse.dia_array):
        m = make(a)
        for shape in ((4,), (4, 2)):
            x = tg.asarray(rng.normal(size=shape))
            with tg.GradientTape() as tape:
                tape.watch(x)
                y, z = m @ x, x.mT @ m if x.ndim > 1 else x @ m
            assert isinstance(y, tg.Tensor)
            assert isinstance(z, tg.Tensor)
            g = tape.gradient([y, z], x)
            np.testing.assert_allclose(y.numpy(), a @ x.numpy())
            sums = a.toarray().sum(0) + a.toarray().sum(1)
            np.testing.assert_allclose(g.numpy(), np.broadcast_to(sums.reshape(-1, *[1] * (x.ndim - 1)), shape))
    v = tg.Variable(np.ones(4))
    with tg.GradientTape() as tape:
        y = tg.sum(a @ v)
    np.testing.assert_allclose(tape.gradient(y, v).numpy(), a.toarray().sum(0))


def test_elsewhere_in_scipy_no_gradient_is_dropped(rng):
    a, x, v = some(rng, 4, 4), tg.ones(4, dtype="float64"), tg.Variable(np.ones(4))
    with tg.GradientTape() as tape:
        tape.watch(x)
        for f in (lambda t: a * t, lambda t: t * a, lambda t: scipy.sparse.csr_array((t, a.indices[:4], [0, 4]))):
            for t in (x, v):
                with pytest.raises(NotATensorError, match="drop its gradient"):
                    f(t)
            f(tg.stop_gradient(x))
        assert isinstance(a.dot(x), tg.Tensor)
    np.testing.assert_array_equal((a * x).toarray(), a.toarray())
    with pytest.raises(TypeError):
        np.matmul(a, x)


def test_elsewhere_a_tensor_still_converts():
    def _matmul_dispatch(x):
        return np.asarray(x)

    np.testing.assert_array_equal(_matmul_dispatch(tg.ones(2)), np.ones(2))
    np.testing.assert_array_equal(scipy.sparse.csr_array(tg.eye(2)).toarray(), np.eye(2))


def test_a_product_keeps_only_what_its_rules_read(rng):
    a = tg.sparse.asarray(some(rng, 40, 30))
    x = tg.asarray(rng.normal(size=(30, 7)))
    with tg.measure() as m, tg.GradientTape() as tape:
        tape.watch(a.data)
        y = a @ (x * 2)
        g = tape.gradient(tg.sum(y), a.data)
    assert g.shape == a.data.shape
    assert m.peak_bytes < 8 * 40 * 30 * 8  # nothing of the size nnz * 7, let alone rows * columns


@pytest.mark.parametrize(
    ("f", "error", "words"),
    [
        (lambda a, s: s @ np.ones(5), ShapeError, r"\(5, 4\) @ \(5,\)"),
        (lambda a, s: np.ones((2, 4)) @ s, ShapeError, "inner sizes"),
        (lambda a, s: s @ 2.0, ShapeError, "scalar"),
        (lambda a, s: s @ s, TypeError, "no product of two sparse"),
        (lambda a, s: tg.sparse.matmul(s, s), NotATensorError, "one dense"),
        (lambda a, s: tg.sparse.matmul(np.ones((2, 2)), np.ones(2)), NotATensorError, "tg.matmul"),
        (lambda a, s: tg.sparse.matmul(a, "x"), NotATensorError, "sparse.matmul"),
        (lambda a, s: s * np.ones((5, 4)), ShapeError, "number"),
        (lambda a, s: s + 1, TypeError, "unsupported"),
        (lambda a, s: s + tg.sparse.asarray(scipy.sparse.eye_array(5, 4)), ShapeError, "different elements"),
        (lambda a, s: s.sum(axis=2), ShapeError, "axis 2"),
        (lambda a, s: tg.sparse.asarray(np.ones((2, 2))), NotATensorError, "sparse.csr"),
        (lambda a, s: tg.sparse.asarray(scipy.sparse.coo_array(np.ones(3))), ShapeError, "two dimensions"),
        (lambda a, s: tg.sparse.csr([1.0], [0.0], [0, 1], (1, 1)), IndexingError, "indices must be integers"),
        (lambda a, s: tg.sparse.csr([1.0], [0], [0.0, 1.0], (1, 1)), IndexingError, "indptr must be integers"),
        (lambda a, s: tg.sparse.csr([1.0], [2], [0, 1], (1, 2)), IndexingError, "column 2 for 2"),
        (lambda a, s: tg.sparse.csr([1.0], [0], [0, 1, 0], (2, 2)), IndexingError, "indptr"),
        (lambda a, s: tg.sparse.csr([1.0], [0], [1, 1], (1, 2)), IndexingError, "begins with 1"),
        (lambda a, s: tg.sparse.csr([1.0, 2.0], [0, 1], [0, 1], (1, 2)), IndexingError, "ends with 1"),
        (lambda a, s: tg.sparse.csr([1.0], [0, 1], [0, 1], (1, 2)), ShapeError, "indices"),
        (lambda a, s: tg.sparse.csr([1.0], [0], [0, 1], (2,)), ShapeError, "two dimensions"),
        (lambda a, s: tg.sparse.coo([1.0], [3], [0], (2, 2)), IndexingError, "row 3"),
        (lambda a, s: tg.sparse.coo([1.0], [0, 1], [0], (2, 2)), ShapeError, "row"),
        (lambda a, s: s.astype("nonsense"), DTypeError, "dtype"),
    ],
)
def test_bad_input(rng, f, error, words):
    a = some(rng)
    with pytest.raises(error, match=words):
        f(a, tg.sparse.asarray(a))
