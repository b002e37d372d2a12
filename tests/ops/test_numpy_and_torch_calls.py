"""Calls that users bring along from NumPy and PyTorch: broadcast shifts, complex truth values, absolute tolerances."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.special

import tapegrad as tg
from tapegrad.errors import DTypeError, IndexingError, ShapeError

GRID = np.arange(12.0).reshape(3, 4)
COMPLEX = np.array([1 + 2j, 0, 3j, -1.5 + 0.2j, 40 + 3j])


@pytest.mark.parametrize(
    ("shift", "axis"),
    [((1, 2), 0), (1, (0, 1)), ((1, 2), (0, 1)), ((1, -2, 5), (0, 1, 0)), (-7, None), ((3,), (1,)), (0, 0)],
)
def test_roll_broadcasts_shifts_and_axes(shift: Any, axis: Any) -> None:
    np.testing.assert_array_equal(tg.roll(GRID, shift, axis), np.roll(GRID, shift, axis))
    tensors = tg.asarray(shift)
    np.testing.assert_array_equal(tg.roll(GRID, tensors, axis), np.roll(GRID, shift, axis))
    tg.testing.check_grads(lambda x: tg.roll(x, tensors, axis) ** 2, [GRID])


def test_roll_by_shifts_that_differ_from_example_to_example() -> None:
    shifts = np.array([1, -6, 3])
    rolled = tg.vmap(lambda row, shift: tg.roll(row, shift))(GRID, shifts)
    np.testing.assert_array_equal(rolled, [np.roll(row, s) for row, s in zip(GRID, shifts, strict=True)])
    with pytest.raises(DTypeError, match="roll: shifts must be integers"):
        tg.roll(GRID, tg.asarray(1.5))
    with pytest.raises(ShapeError, match="roll: 3 shifts for 2 axes"):
        tg.roll(GRID, (1, 2, 3), (0, 1))
    assert tg.roll(np.zeros((0, 2)), 1, 0).shape == (0, 2)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_true_where_they_are_not_zero(dtype: str) -> None:
    z, w = COMPLEX.astype(dtype), COMPLEX[::-1].astype(dtype)
    for name in ("logical_and", "logical_or", "logical_xor"):
        np.testing.assert_array_equal(getattr(tg, name)(z, w), getattr(np, name)(z, w))
        np.testing.assert_array_equal(
            getattr(tg, name)(z, [True, False] * 2 + [True]), getattr(np, name)(z, [True, False] * 2 + [True])
        )
    np.testing.assert_array_equal(tg.logical_not(z), np.logical_not(z))
    np.testing.assert_array_equal(tg.astype(z, bool), z.astype(bool))
    with pytest.raises(DTypeError, match="drops the imaginary part"):
        tg.astype(z, "float32")


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_logsumexp_of_complex_numbers(axis: int | None) -> None:
    z = np.stack([COMPLEX, COMPLEX[::-1] * 1j, COMPLEX - 700])
    expected = scipy.special.logsumexp(z, axis=axis)
    np.testing.assert_allclose(tg.logsumexp(z, axis=axis), expected, rtol=1e-12)
    tg.testing.check_grads(lambda z: tg.logsumexp(z, axis=axis), [z[:2, :4]])


@pytest.mark.parametrize("name", ["erf", "erfc"])
def test_error_functions_of_complex_numbers(name: str) -> None:
    z = COMPLEX[:4]
    np.testing.assert_allclose(getattr(tg, name)(z), getattr(scipy.special, name)(z), rtol=1e-12)
    tg.testing.check_grads(getattr(tg, name), [z / 2])
    assert getattr(tg, name)(z.astype("complex64")).dtype == np.complex64


def test_square_of_bool_has_numpys_dtype() -> None:
    x = np.array([True, False])
    assert tg.square(x).dtype == np.square(x).dtype
    np.testing.assert_array_equal(tg.square(x), np.square(x))


TALL = np.random.default_rng(0).normal(size=(2, 5, 3))
TALL[:, :, 2] = TALL[:, :, 0] * 1e-3 + TALL[:, :, 1]


@pytest.mark.parametrize(
    ("atol", "rtol"), [(0.5, None), (1e-3, 0.3), (100.0, None), (0.0, 0.4), (np.array([0.5, 3.0]), None)]
)
def test_absolute_tolerances(atol: Any, rtol: float | None) -> None:
    """Singular values count where they exceed both bounds, as in PyTorch."""
    u, s, vh = np.linalg.svd(TALL, full_matrices=False)
    bound = np.maximum(np.broadcast_to(atol, 2)[:, None], (rtol or 0) * s[:, :1])
    inverse = np.where(s > bound, 1 / s, 0)
    np.testing.assert_allclose(
        tg.linalg.pinv(TALL, atol=atol, rtol=rtol), np.swapaxes((u * inverse[:, None]) @ vh, 1, 2), atol=1e-12
    )
    np.testing.assert_array_equal(tg.linalg.matrix_rank(TALL, atol=atol, rtol=rtol), (s > bound).sum(-1))


def test_divmod_and_round_of_python() -> None:
    x = tg.asarray(GRID)
    for ours, theirs in ((divmod(x, 5.0), divmod(GRID, 5.0)), (divmod(7.0, x + 1), divmod(7.0, GRID + 1))):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(round(x / 7, 2), np.round(GRID / 7, 2))
    np.testing.assert_array_equal(round(x / 7), np.round(GRID / 7))
    assert isinstance(round(tg.Variable(2.6)), tg.Tensor) and divmod(tg.Variable(7.0), 4.0)[1].item() == 3.0


REDUCTIONS = {
    "sum": np.add, "prod": np.multiply, "mean": np.add, "amax": np.maximum, "amin": np.minimum,
}  # fmt: skip
START = {"sum": 0.0, "prod": 1.0, "mean": 0.0, "amax": -np.inf, "amin": np.inf}


@pytest.mark.parametrize(("reduce", "include"), [*itertools.product(REDUCTIONS, [True, False])])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_reduce(reduce: str, include: bool, dim: int) -> None:
    rng = np.random.default_rng(3)
    x, src = rng.normal(size=(3, 4)), rng.normal(size=(5, 4))
    index = rng.integers(0, 3, size=(2, 3)) if dim == 0 else rng.integers(0, 4, size=(3, 2))
    expected, count = x.copy(), np.full(x.shape, float(include))
    touched = np.zeros(x.shape, bool)
    for at in np.ndindex(index.shape):
        place = list(at)
        place[dim] = index[at]
        place = tuple(place)
        if not touched[place] and not include:
            expected[place] = START[reduce]
        touched[place] = True
        expected[place] = REDUCTIONS[reduce](expected[place], src[at])
        count[place] += 1
    if reduce == "mean":
        expected = np.where(touched, expected / np.maximum(count, 1), expected)
    f = lambda x, src: tg.scatter_reduce(x, dim, index, src, reduce, include_self=include)
    np.testing.assert_allclose(f(x, src), expected, rtol=1e-12)
    tg.testing.check_grads(f, [x, src])


def test_scatter_reduce_refuses() -> None:
    x, index = np.zeros((3, 4)), np.zeros((2, 2), int)
    with pytest.raises(ShapeError, match=r"scatter_reduce: indices \(2, 2\) and source \(1, 4\)"):
        tg.scatter_reduce(x, 0, index, np.zeros((1, 4)), "sum")
    with pytest.raises(IndexingError):
        tg.scatter_reduce(x, 0, index + 3, np.zeros((2, 2)), "prod")
    with pytest.raises(tg.errors.TapegradError, match="'median' is not one of"):
        tg.scatter_reduce(x, 0, index, np.zeros((2, 2)), "median")


@pytest.mark.parametrize("order", [-0.5, -1, -2])
def test_norms_of_negative_order_at_zero(order: float) -> None:
    """The norm is 0 where an element is; its gradient there is 0, one of its subgradients."""
    for x in ([0.0, 0.0], [0.0, 2.0]):
        assert tg.linalg.norm(tg.asarray(x), order).item() == 0
        np.testing.assert_array_equal(tg.grad(lambda x: tg.linalg.norm(x, order))(tg.asarray(x)), [0, 0])
    tg.testing.check_grads(lambda x: tg.linalg.norm(x, order), [np.array([1.0, -2.0, 0.5])])


def test_slices_without_a_shape() -> None:
    """TensorFlow's ``dense_shape`` may be left out: a variable and an optimizer know the shape."""
    rows = tg.IndexedSlices([[1.0, 2.0], [3.0, 4.0]], [2, 2])
    assert rows.dense_shape is None and rows.ndim == 2
    v = tg.Variable(np.zeros((4, 2), np.float32))
    v.scatter_add(rows)
    np.testing.assert_array_equal(v, [[0, 0], [0, 0], [4, 6], [0, 0]])
    tg.optim.SGD(1.0).apply([rows], [v])
    np.testing.assert_array_equal(v, np.zeros((4, 2)))
    for f in (rows.to_dense, rows.numpy, lambda: rows.shape, lambda: tg.exp(rows)):
        with pytest.raises(ShapeError, match="give dense_shape"):
            f()
    with pytest.raises(IndexingError):
        tg.optim.SGD(1.0).apply([tg.IndexedSlices([[1.0, 2.0]], [9])], [v])
    with pytest.raises(IndexingError, match="indices must be integers"):
        tg.IndexedSlices([[1.0]], [0.5])
