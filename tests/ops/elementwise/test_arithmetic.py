"""Arithmetic, rounding, comparison, choice: NumPy's numbers, dtypes and promotion; ties and edges; messages."""

from __future__ import annotations

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import DTypeError, NotATensorError, ShapeError
from tapegrad.testing import check_grads

BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "power": np.power,
    "maximum": np.maximum, "minimum": np.minimum, "floor_divide": np.floor_divide, "remainder": np.remainder,
    "equal": np.equal, "not_equal": np.not_equal, "less": np.less, "less_equal": np.less_equal,
    "greater": np.greater, "greater_equal": np.greater_equal,
}  # fmt: skip
UNARY = {
    "negative": np.negative, "positive": np.positive, "sign": np.sign, "abs": np.abs, "square": np.square,
    "sqrt": np.sqrt, "reciprocal": np.reciprocal, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc,
    "round": np.round, "exp": np.exp, "isnan": np.isnan, "isfinite": np.isfinite,
}  # fmt: skip
DTYPES = ["int8", "int32", "int64", "uint8", "float16", "float32", "float64"]


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("a", DTYPES)
@pytest.mark.parametrize("b", DTYPES)
@pytest.mark.parametrize("name", BINARY)
def test_binary_dtypes_are_numpys(name, a, b):
    x, y = np.array([[1, 2], [3, 4]], a), np.array([3, 2], b)
    got, wanted = getattr(tg, name)(x, y), BINARY[name](x, y)
    if name == "divide" and np.result_type(a, b).kind in "iu":
        wanted = wanted.astype("float64")
    assert got.dtype == wanted.dtype
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-3 if "16" in a + b else 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", UNARY)
def test_unary(name, dtype, rng):
    for shape in ((7,), (), (0, 3), (150, 150)):
        x = rng.uniform(0.2, 3, shape).astype(dtype)
        got, wanted = getattr(tg, name)(x), UNARY[name](x)
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        np.testing.assert_array_equal(got.numpy(), wanted)


@pytest.mark.parametrize(
    ("x", "y", "dtype"),
    [
        (np.float32([1]), 2.5, "float32"), (np.float32([1]), 2, "float32"), (np.int32([1]), 2, "int32"),
        (np.int32([1]), 2.5, "float64"), (np.float16([1]), 1e3, "float16"), (1.5, 2, "float32"), (1, 2, "int64"),
        (np.float32([1]), np.float64(2), "float64"), (True, 1, "int64"), (np.array([True]), 1, "int64"),
        (np.uint8([1]), 200, "uint8"), (np.float32([1]), 1j, "complex64"),
    ],
)  # fmt: skip
def test_python_numbers_are_weak(x, y, dtype):
    assert (tg.asarray(x) + y).dtype == dtype
    assert tg.add(x, y).dtype == dtype
    assert tg.add(y, x).dtype == dtype


def test_a_python_integer_that_does_not_fit():
    with pytest.raises(OverflowError):
        tg.asarray(np.uint8([1])) + 300


@pytest.mark.parametrize("x", [0.0, -0.0, 1.0, -1.0])
@pytest.mark.parametrize("y", [0.0, -0.0, np.inf, -np.inf, np.nan])
def test_signs_of_zeros_and_infinities(x, y):
    for name in ("add", "subtract", "multiply", "maximum", "minimum"):
        with np.errstate(invalid="ignore"):
            got = getattr(tg, name)(np.array([x, x]), y).numpy()
            np.testing.assert_array_equal(got, BINARY[name](np.array([x, x]), y))
            np.testing.assert_array_equal(np.signbit(got), np.signbit(BINARY[name](np.array([x, x]), y)))


@pytest.mark.parametrize("size", [1, 20000])
def test_ties(size):
    """The whole gradient goes to the first operand."""
    x = np.ones(size)
    for f in (tg.maximum, tg.minimum):
        a, b = tg.grad(lambda x, y, f=f: tg.sum(f(x, y)), argnums=(0, 1))(x, x)
        assert (a.numpy() == 1).all() and (b.numpy() == 0).all()
    zero = np.zeros(size)
    assert (tg.grad(lambda x: tg.sum(tg.abs(x)))(zero).numpy() == 0).all()
    assert (tg.grad(lambda x: tg.sum(tg.sign(x)))(x).numpy() == 0).all()
    assert (tg.grad(lambda x: tg.sum(tg.clip(x, -1, 1)))(x).numpy() == 1).all()
    assert (tg.grad(lambda x: tg.sum(tg.clip(x, 1, 2)))(x).numpy() == 1).all()
    assert (tg.grad(lambda x: tg.sum(tg.clip(x, 2, 3)))(x).numpy() == 0).all()


@pytest.mark.parametrize("size", [1, 20000])
def test_sqrt_at_zero(size):
    zero = np.zeros(size)
    with np.errstate(divide="ignore"):
        assert np.isinf(tg.grad(lambda x: tg.sum(tg.sqrt(x)))(zero).numpy()).all()
    assert (tg.grad(lambda x: tg.sum(tg.where(x > 0, tg.sqrt(x), 0.0)))(zero).numpy() == 0).all()
    mixed = tg.grad(lambda w: tg.sum(tg.grad(lambda x: tg.sum(w * tg.sqrt(x)))(zero + 4.0)))(zero)
    assert (mixed.numpy() == 0.25).all()


def test_power(rng):
    x, y = rng.uniform(0.5, 2, 5), rng.uniform(-2, 2, 5)
    check_grads(tg.power, [x, y], order=2)
    for exponent in (2, 3, 0.5, -1, 1, 2.5, 0):
        np.testing.assert_allclose((tg.asarray(x) ** exponent).numpy(), x**exponent, rtol=1e-14)
        check_grads(lambda x, e=exponent: x**e, [x], order=2)
    gx, gy = tg.grad(lambda x, y: tg.sum(tg.power(x, y)), argnums=(0, 1))(np.array([0.0, -2.0]), np.array([2.0, 3.0]))
    np.testing.assert_allclose(gx.numpy(), [0, 12])
    np.testing.assert_allclose(gy.numpy(), [0, 0])
    assert tg.grad(lambda x: tg.power(x, 0.0))(0.0).item() == 0
    mixed = tg.grad(lambda y: tg.grad(lambda x: tg.power(x, y))(2.0))(0.0)
    assert mixed.item() == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["divide", "remainder", "floor_divide"])
def test_division_gradients(name, rng):
    x, y = rng.uniform(1, 5, 6) * [1, -1, 1, -1, 1, 1], rng.uniform(0.4, 0.9, 6) * [1, 1, -1, -1, 1, 1]
    check_grads(getattr(tg, name), [x, y], order=2)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "bool", "complex64", "complex128"])
@pytest.mark.parametrize("size", [3, 40000])
def test_where(dtype, size, rng):
    c = rng.uniform(size=size) > 0.5
    x, y = (rng.uniform(-3, 3, size).astype(dtype) for _ in range(2))
    zero = np.zeros((), dtype)
    for a, b in ((x, y), (x, zero), (zero, y), (x, y[:1]), (zero, zero), (x[0], y[0])):
        np.testing.assert_array_equal(tg.where(c, a, b).numpy(), np.where(c, a, b))
        np.testing.assert_array_equal(tg.where(c[:1], a, b).numpy(), np.where(c[:1], a, b))


def test_where_keeps_signs_and_nans():
    c = np.array([True, False])
    assert np.signbit(tg.where(c, -0.0, -0.0).numpy()).all()
    assert tg.where(c, np.float32(1), np.nan).numpy()[0] == 1
    np.testing.assert_array_equal(tg.where(np.array([1, 0]), 5.0, 7.0).numpy(), [5, 7])
    with pytest.raises(DTypeError, match="where"):
        tg.where(np.array([1.0, 0.0]), 1.0, 2.0)


@pytest.mark.parametrize(
    ("f", "error"),
    [
        (lambda: tg.add(np.ones((2, 3)), np.ones((4, 3))), ShapeError),
        (lambda: tg.subtract(np.array([True]), np.array([True])), DTypeError),
        (lambda: tg.negative(np.array([True])), DTypeError),
        (lambda: tg.add(1, "two"), NotATensorError),
        (lambda: tg.add(None, 1), NotATensorError),
        (lambda: tg.bitwise_and(np.ones(2), np.ones(2)), DTypeError),
    ],
)
def test_errors(f, error):
    with pytest.raises(error) as caught:
        f()
    assert any(name in str(caught.value) for name in ("add", "subtract", "negative", "bitwise_and"))
