"""Derivatives of ``logaddexp`` and ``logaddexp2``, against SciPy's softmax of both operands."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

import tapegrad as tg

NAMES = {"logaddexp": 1.0, "logaddexp2": np.log(2)}
PAIRS = [(1e8, 1e8), (-1e8, -1e8), (1e8, 1e8 - 8), (30.0, 31.5), (0.0, -20.0), (-np.inf, 2.0), (np.inf, 2.0)]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_softmax_of_the_operands(name: str, dtype: str) -> None:
    x, y = np.array([p for p in PAIRS if abs(p[0]) < 1e4 or dtype != "float16"], dtype).T
    with np.errstate(invalid="ignore"):
        gap = (y.astype("float64") - x) * NAMES[name]
        expected = softmax(np.stack([np.zeros_like(gap), np.clip(gap, -1e3, 1e3)]), axis=0)
    f = getattr(tg, name)
    _, pullback = tg.vjp(f, x, y)
    tolerance = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    for gradient, value in zip(pullback(np.ones_like(x)), expected):
        np.testing.assert_allclose(gradient, value, rtol=tolerance, atol=1e-7)
    _, tangent = tg.jvp(f, (x, y), (np.ones_like(x), np.zeros_like(y)))
    np.testing.assert_allclose(tangent, expected[0], rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", [-np.inf, np.inf, 0.0, 3e38])
def test_equal_operands_share_the_gradient(name: str, at: float) -> None:
    assert [float(g) for g in tg.grad(getattr(tg, name), (0, 1))(np.float64(at), np.float64(at))] == [0.5, 0.5]


SHARES = [
    ([1e8, np.inf], [0.0, 1.0]), ([np.inf, -np.inf], [1.0, 0.0]), ([-np.inf, 2.0], [0.0, 1.0]),
    ([np.inf, np.inf], [0.5, 0.5]), ([-np.inf, -np.inf], [0.5, 0.5]), ([3e38, 3e38], [0.5, 0.5]),
]  # fmt: skip
SUMS = {
    "logaddexp": lambda x: tg.logaddexp(x[0], x[1]),
    "logcumsumexp": lambda x: tg.logcumsumexp(x)[-1],
    "logsumexp": lambda x: tg.logsumexp(x),
    "special.logsumexp": lambda x: tg.special.logsumexp(x, axis=0),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", SUMS)
def test_the_largest_operands_share_the_gradient_also_if_infinite(name: str, dtype: str) -> None:
    """To second order and in forward mode: the shares are ``p``, their derivatives ``diag(p) - p p^T``."""
    for values, shares in SHARES:
        x, p = tg.asarray(values, dtype=dtype), np.array(shares)
        np.testing.assert_allclose(tg.grad(SUMS[name])(x), p, rtol=1e-6)
        np.testing.assert_allclose(tg.jvp(SUMS[name], (x,), (tg.asarray([1.0, 3.0], dtype=dtype),))[1], p @ [1, 3])
        np.testing.assert_allclose(tg.hessian(SUMS[name])(x), np.diag(p) - np.outer(p, p), atol=1e-6)
