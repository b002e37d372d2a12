"""nn.functional against formulas in NumPy and, where it is installed, against torch itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.nn import functional as F

rng = np.random.default_rng(2)
X = rng.normal(size=(3, 4)) * 3
erf = np.vectorize(math.erf)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


POINTWISE = {
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / 2**0.5)),
    "hardsigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "hardtanh": lambda x: np.clip(x, -1, 1),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "logsigmoid": lambda x: np.log(sigmoid(x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "softplus": lambda x: np.log1p(np.exp(x)),
    "softsign": lambda x: x / (1 + abs(x)),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str) -> None:
    f = getattr(F, name)
    np.testing.assert_allclose(f(tg.asarray(X)).numpy(), POINTWISE[name](X), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(f(X).numpy(), f(tg.asarray(X)).numpy(), rtol=0)
    assert f(X.astype(np.float32)).dtype == np.float32
    tg.testing.check_grads(f, (tg.asarray(X),))


def test_gelu_s_approximation() -> None:
    want = 0.5 * X * (1 + np.tanh((2 / np.pi) ** 0.5 * (X + 0.044715 * X**3)))
    np.testing.assert_allclose(F.gelu(X, approximate="tanh").numpy(), want, rtol=1e-12, atol=1e-14)
    with pytest.raises(TapegradError, match='gelu: approximate must be "none" or "tanh"'):
        F.gelu(X, approximate="Tanh")


def test_softmax_and_softplus_with_options() -> None:
    e = np.exp(X)
    np.testing.assert_allclose(F.softmax(X, dim=0).numpy(), e / e.sum(0), rtol=1e-13)
    np.testing.assert_allclose(F.log_softmax(X, dim=0).numpy(), np.log(e / e.sum(0)), rtol=1e-12)
    np.testing.assert_allclose(F.softplus(X, beta=2).numpy(), np.log1p(np.exp(2 * X)) / 2, rtol=1e-12)


def test_linear_and_embedding() -> None:
    w, b = rng.normal(size=(5, 4)), rng.normal(size=5)
    np.testing.assert_allclose(F.linear(X, w, b).numpy(), X @ w.T + b, rtol=1e-13)
    np.testing.assert_allclose(F.linear(X, w).numpy(), X @ w.T, rtol=1e-13)
    assert np.array_equal(F.embedding([[4, 0]], w).numpy(), w[[[4, 0]]])
    with pytest.raises(ShapeError, match=r"linear: wanted a weight \(units, k\), got \(1, 5, 4\)"):
        F.linear(X, w[None])


def test_one_hot() -> None:
    assert F.one_hot([0, 2]).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert F.one_hot([[1]], 2).tolist() == [[[0, 1]]]
    assert F.one_hot([1]).dtype == np.int64
    with pytest.raises(DTypeError, match="one_hot: wanted integer labels, got float32"):
        F.one_hot([0.5])
    with pytest.raises(ShapeError, match="give num_classes"):
        F.one_hot(tg.zeros((0,), dtype="int64"))


def test_layer_norm_over_trailing_axes() -> None:
    x, w, b = rng.normal(size=(2, 3, 4)), rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    want = (x - x.mean((1, 2), keepdims=True)) / np.sqrt(x.var((1, 2), keepdims=True) + 1e-5)
    np.testing.assert_allclose(F.layer_norm(x, (3, 4)).numpy(), want, rtol=1e-10)
    np.testing.assert_allclose(F.layer_norm(x, (3, 4), w, b).numpy(), want * w + b, rtol=1e-10, atol=1e-12)
    with pytest.raises(ShapeError, match=r"layer_norm: wanted input \(\.\.\., 4, 3\), got \(2, 3, 4\)"):
        F.layer_norm(x, (4, 3))
    for scale in (w, w[0], tg.asarray(w), tg.asarray(w[0])):
        with pytest.raises(ShapeError, match=r"(?s)layer_norm: normalized_shape .* got .*; pass a scale as weight="):
            F.layer_norm(x, scale)  # type: ignore[arg-type]


def test_normalize() -> None:
    np.testing.assert_allclose(F.normalize(X).numpy(), X / np.linalg.norm(X, axis=1, keepdims=True), rtol=1e-13)
    want = X / np.linalg.norm(X, 3, axis=0, keepdims=True)
    np.testing.assert_allclose(F.normalize(X, p=3, dim=0).numpy(), want, rtol=1e-12)
    assert F.normalize(np.zeros((1, 2))).tolist() == [[0, 0]]


def test_dropout_keeps_infinities_from_becoming_nan() -> None:
    tg.random.seed(0)
    y = F.dropout(np.full(100, np.inf)).numpy()
    assert set(y) == {0.0, np.inf}
    assert np.array_equal(F.dropout(X, training=False).numpy(), X)
    with pytest.raises(TapegradError, match="dropout: wanted a rate from 0 to 1, got 3"):
        F.dropout(X, 3)


def test_attention_with_a_scale_and_refusals() -> None:
    q, k, v = np.ones((1, 2)), np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([[1.0], [0.0]])
    y = F.scaled_dot_product_attention(q, k, v, scale=3.0)
    np.testing.assert_allclose(y.item(), sigmoid(3.0), rtol=1e-12)
    with pytest.raises(ShapeError, match=r"scaled_dot_product_attention: wanted .* got \(1, 2\), \(2, 3\), \(2, 1\)"):
        F.scaled_dot_product_attention(q, np.ones((2, 3)), v)


def test_activations_by_name() -> None:
    for name in ("relu", "gelu", "silu", "swish", "softmax", "log_softmax", "exponential", "hard_sigmoid", "linear"):
        assert F.activation(name)(tg.asarray(X)).shape == X.shape
    assert F.activation(None)(X) is X
    assert F.activation(math.exp) is math.exp
