"""Activations: values against formulas in higher precision, edges without warnings, gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
from inside import weak

import tapegrad as tg
from tapegrad.errors import TapegradError
from tapegrad.ops.elementwise import activation
from tapegrad.testing import check_grads

NAMES = ["sigmoid", "softplus", "relu", "erf", "erfc", "gelu", "silu", "leaky_relu", "elu", "softsign", "log_sigmoid"]


def exact(name, x):
    """The value in extended precision, of one number."""
    x = np.longdouble(x)
    return {
        "sigmoid": lambda: np.exp(x) / (1 + np.exp(x)) if x < 0 else 1 / (1 + np.exp(-x)),
        "softplus": lambda: max(x, 0) + np.log1p(np.exp(-abs(x))),
        "relu": lambda: max(x, np.longdouble(0)),
        "erf": lambda: math.erf(x),
        "erfc": lambda: math.erfc(x),
        "gelu": lambda: x * (1 + np.longdouble(math.erf(x / np.sqrt(np.longdouble(2))))) / 2,
        "silu": lambda: x * (np.exp(x) / (1 + np.exp(x)) if x < 0 else 1 / (1 + np.exp(-x))),
        "leaky_relu": lambda: x if x > 0 else x * np.longdouble(0.01),
        "elu": lambda: x if x > 0 else np.expm1(x),
        "softsign": lambda: x / (1 + abs(x)),
        "log_sigmoid": lambda: -(max(-x, 0) + np.log1p(np.exp(-abs(x)))),
    }[name]()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("copies", [1, 100])
def test_relative_precision(name, dtype, copies, rng):
    far = 80 if dtype == "float32" else 600
    reach = {"erfc": 9 if dtype == "float32" else 26, "gelu": 3}.get(name, far)
    x = np.concatenate([rng.uniform(-reach, reach, 120), rng.uniform(-2, 2, 100), rng.uniform(-1e-3, 1e-3, 20)])
    x = x.astype(dtype)
    wanted = np.array([float(exact(name, v)) for v in x])
    got = getattr(activation, name)(tg.asarray(np.tile(x, copies))).numpy()
    assert got.dtype == dtype
    ulps = 20
    if name == "gelu":  # the cancellation of 1 + erf for negative x
        ulps = 20000
    np.testing.assert_allclose(got[: len(x)], wanted, rtol=ulps * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    ("name", "at_minus", "at_plus", "at_zero"),
    [
        ("sigmoid", 0, 1, 0.5), ("softplus", 0, np.inf, math.log(2)), ("relu", 0, np.inf, 0), ("erf", -1, 1, 0),
        ("erfc", 2, 0, 1), ("leaky_relu", -np.inf, np.inf, 0), ("elu", -1, np.inf, 0),
        ("log_sigmoid", -np.inf, 0, -math.log(2)),
    ],
)  # fmt: skip
def test_limits_without_warnings(name, at_minus, at_plus, at_zero, dtype):
    """Warnings are errors here."""
    x = np.array([-np.inf, np.inf, 0.0, -0.0, np.nan], dtype)
    got = getattr(activation, name)(x).numpy()
    assert got.dtype == dtype
    precision = 2e-3 if dtype == "float16" else 1e-6
    np.testing.assert_allclose(got[:4], [at_minus, at_plus, at_zero, at_zero], rtol=precision)
    assert np.isnan(got[4])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["sigmoid", "softplus", "relu", "erf", "erfc", "silu", "gelu", "softsign", "elu"])
def test_huge_arguments_without_warnings(name, dtype):
    x = np.array([-1, 1, -0.5, 0.5], dtype) * np.finfo(dtype).max / 2
    with np.errstate(over="ignore" if name in ("gelu", "erf", "erfc") else "raise"):
        assert np.isfinite(getattr(activation, name)(x).numpy()).all()
    g = tg.grad(lambda x: tg.sum(getattr(activation, name)(x)))(np.array([-90.0, 90.0]).astype(dtype))
    assert np.isfinite(g.numpy()).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, rng):
    x = rng.uniform(-3, 3, (4, 5))
    check_grads(getattr(activation, name), [x], order=3)


def test_tanh_gelu(rng):
    x = rng.uniform(-4, 4, 50)
    got = tg.gelu(x, approximate="tanh").numpy()
    np.testing.assert_allclose(got, x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))), rtol=1e-10)
    check_grads(lambda x: tg.gelu(x, approximate="tanh"), [x], order=2)
    with pytest.raises(TapegradError, match="gelu"):
        tg.gelu(x, approximate="fast")


@pytest.mark.parametrize(
    ("name", "slope"),
    [("relu", 0), ("leaky_relu", 0.01), ("elu", 1), ("softplus", 0.5), ("sigmoid", 0.25), ("softsign", 1),
     ("gelu", 0.5), ("silu", 0.5), ("log_sigmoid", 0.5)],
)  # fmt: skip
def test_slope_at_zero(name, slope):
    for size in (1, 20000):
        g = tg.grad(lambda x: tg.sum(getattr(activation, name)(x)))(np.zeros(size))
        np.testing.assert_allclose(g.numpy(), slope)


def test_integers_become_floats():
    x = np.array([-1, 0, 2])
    assert tg.relu(x).dtype == np.int64
    for name in NAMES:
        if name != "relu":
            got = getattr(activation, name)(x)
            assert got.dtype == np.float64
            np.testing.assert_allclose(got.numpy(), getattr(activation, name)(x.astype(float)).numpy())


def test_relu_keeps_its_result_only(rng):
    w = tg.asarray(rng.uniform(-2, 0, 50))
    with tg.GradientTape() as tape:
        tape.watch(w)
        x = w + 1.0
        y = tg.relu(x)
    operand = weak(x)
    del x
    assert operand() is None
    np.testing.assert_array_equal(tape.gradient(y, w).numpy(), (y.numpy() > 0) * 1.0)


def test_parameters(rng):
    x = rng.uniform(-2, 2, 30)
    np.testing.assert_allclose(tg.leaky_relu(x, 0.2).numpy(), np.where(x > 0, x, 0.2 * x))
    np.testing.assert_allclose(tg.elu(x, 0.5).numpy(), np.where(x > 0, x, 0.5 * np.expm1(x)))
