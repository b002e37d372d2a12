"""Activations, losses, distances and norms of complex numbers: the right value and gradient, or DTypeError."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from complex_grads import check_parts
from scipy.spatial import distance
from scipy.special import logsumexp

import tapegrad as tg
from tapegrad.errors import DTypeError
from tapegrad.nn.functional import activations, norm, renormalizing
from tapegrad.nn.losses import classification, distances, margin, regression, sampled, sequence

X = np.array(
    [[1 + 3j, -2 + 0.5j, 0.3 - 1j, 0.2 + 0.1j], [1.5j, 1, -1 - 1j, 0.5], [60 - 2j, -60 + 2j, 3 - 9j, -0.1 + 4j]]
)
Y = X[::-1] * 1.5 + 0.1 - 0.7j
CHANNELS = X[0]
LABELS = np.array([0, 1, 1])


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def softmax(x: Any) -> Any:
    e = np.exp(x - x.real.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def pairs(x: Any, y: Any) -> Any:
    return np.abs(x[:, None] - y[None])


# Those that are defined for complex numbers, by NumPy; all others must refuse them.
DEFINED: dict[str, Callable[..., Any]] = {
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "swish": lambda x: x * sigmoid(x),
    "tanh": np.tanh,
    "tanhshrink": lambda x: x - np.tanh(x),
    "softplus": lambda x: np.log(1 + np.exp(x)),
    "logsigmoid": lambda x: np.log(sigmoid(x)),
    "softmax": softmax,
    "softmin": lambda x: softmax(-x),
    "log_softmax": lambda x: x - logsumexp(x, axis=-1, keepdims=True),
    "logmeanexp": lambda x: logsumexp(x) - np.log(x.size),
    "squareplus": lambda x: (x + np.sqrt(x * x + 4)) / 2,
    "glu": lambda x: x[:, :2] * sigmoid(x[:, 2:]),
    "normalize": lambda x: x / np.sqrt((np.abs(x) ** 2).sum(1, keepdims=True)),
    "squared_difference": lambda x, y: (x - y) * np.conj(x - y),
    "l1_loss": lambda x, y: np.abs(x - y).mean(),
    "pairwise_distance": lambda x, y: np.linalg.norm(x - y + 1e-6, axis=-1),
    "cdist": lambda x, y: np.sqrt((pairs(x, y) ** 2).sum(-1)),
    "pdist": lambda x: np.sqrt((pairs(x, x) ** 2).sum(-1))[np.triu_indices(len(x), 1)],
    "triplet_margin_loss": lambda a, p, n: np.maximum(
        0, 1 + np.linalg.norm(a - p + 1e-6, axis=-1) - np.linalg.norm(a - n + 1e-6, axis=-1)
    ).mean(),
}
DEFINED["triplet_margin_with_distance_loss"] = DEFINED["triplet_margin_loss"]
OTHERS = {"linear"}  # tested as a product

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "prelu": (X, 0.25),
    "threshold": (X, 0.0, 1.0),
    "maxout": (X, 2),
    "batch_norm": (X, None, None, None, None, True),
    "instance_norm": (X[None],),
    "group_norm": (X, 2),
    "layer_norm": (X, (4,)),
    "rms_norm": (X, (4,)),
    "local_response_norm": (X[None], 2),
    "fixed_batch_normalization": (X, *[CHANNELS] * 4),
    "fixed_batch_renormalization": (X, *[CHANNELS] * 4),
    "batch_renormalization": (X, CHANNELS, CHANNELS, 3.0, 5.0),
    "decorrelated_batch_normalization": (X, 1),
    "fixed_decorrelated_batch_normalization": (X, CHANNELS, np.eye(4)[None], 1),
    "cross_entropy": (X, LABELS),
    "nll_loss": (X, LABELS),
    "linear_cross_entropy": (X, X, LABELS),
    "gaussian_nll_loss": (X, X, 1.0),
    "multi_margin_loss": (X, LABELS),
    "multilabel_margin_loss": (X, np.zeros(X.shape, "int64")),
    "hinge": (X, LABELS),
    "contrastive": (X, Y, LABELS),
    "cosine_embedding_loss": (X, Y, np.ones(3)),
    "margin_ranking_loss": (X, Y, np.ones(X.shape)),
    "discriminative_margin_based_clustering_loss": (X[None, :, None], LABELS[None, :, None], 0.5, 1.5, 3),
    "black_out": (X, LABELS, X, LABELS[:, None]),
    "negative_sampling": (X, LABELS, X, lambda shape: np.zeros(shape, "int64"), 2),
    "ctc_loss": (X[:, None], np.array([[1, 2]]), [3], [2]),
    "crf1d": (np.eye(4), [X, X], [LABELS, LABELS]),
    "argmax_crf1d": (np.eye(4), [X, X]),
}
MODULES = (activations, norm, renormalizing, classification, distances, margin, regression, sampled, sequence)
NAMES = sorted({name for module in MODULES for name in module.__all__} - OTHERS)


def arguments(name: str) -> tuple[Any, ...]:
    if name in ARGUMENTS:
        return ARGUMENTS[name]
    f = getattr(tg.nn.functional, name)
    required = [p for p in inspect.signature(f).parameters.values() if p.default is p.empty]
    return (X, Y, X[:1] + Y)[: len(required)]


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name", NAMES)
def test_functional_is_right_or_refuses(name: str, dtype: str) -> None:
    f = getattr(tg.nn.functional, name)
    operands = [a.astype(dtype) if isinstance(a, np.ndarray) and a.dtype.kind == "c" else a for a in arguments(name)]
    if name not in DEFINED:
        with pytest.raises(DTypeError, match="complex"):
            f(*operands)
        return
    expected = DEFINED[name](*arguments(name))
    result = f(*operands).numpy()
    tolerance = 1e-12 if dtype == "complex128" else 3e-5
    if name in ("log_softmax", "logmeanexp"):  # logarithms, up to whole turns
        result, expected = np.exp(result), np.exp(expected)
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", sorted(DEFINED))
def test_gradients_of_those_that_are_defined(name: str) -> None:
    near = [a[:2] if a.shape[0] == 3 else a for a in arguments(name)]
    check_parts(getattr(tg.nn.functional, name), *near, order=1)


@pytest.mark.parametrize("p", [0, 1, 2, 3, np.inf])
def test_distances_in_every_norm(p: float) -> None:
    expected = np.linalg.norm(X[:, None] - Y[None], p, axis=-1)
    for f in (tg.cdist, tg.nn.functional.cdist):
        result = f(X, Y, p)
        assert result.dtype == "float64"
        np.testing.assert_allclose(result, expected, rtol=1e-13)
        check_parts(lambda x, y, f=f: f(x, y, p), X[:2], Y[:2], order=1)
    np.testing.assert_allclose(tg.dist(X, Y, p), np.linalg.norm((X - Y).ravel(), p), rtol=1e-13)
    norms = np.linalg.norm(X, p, axis=1, keepdims=True)
    expected = np.where(norms > 3, X * 3 / (norms + 1e-7), X)
    np.testing.assert_allclose(tg.renorm(X, p, 0, 3), expected, rtol=1e-13)
    check_parts(lambda x, y: (tg.dist(x, y, p), tg.renorm(x, p, 0, 3)), X[:2], Y[:2], order=1)


def test_real_distances_are_scipys() -> None:
    np.testing.assert_allclose(tg.cdist(X.real, Y.real), distance.cdist(X.real, Y.real), rtol=1e-13)


def test_squared_difference_is_tensorflows() -> None:
    np.testing.assert_allclose(tg.squared_difference(X, Y), np.abs(X - Y) ** 2, rtol=1e-13)
    check_parts(tg.squared_difference, X[:2], Y[:2])


@pytest.mark.parametrize("name", ["relu", "elu", "leaky_relu", "gelu"])
def test_activations_of_the_main_namespace_refuse(name: str) -> None:
    with pytest.raises(DTypeError, match="complex"):
        getattr(tg, name)(X)


@pytest.mark.parametrize("name", ["BatchNormalization", "LayerNormalization"])
def test_layers_refuse(name: str) -> None:
    with pytest.raises(DTypeError, match="complex"):
        getattr(tg.nn, name)()(X, training=True) if name.startswith("B") else getattr(tg.nn, name)()(X)


def test_attention_refuses() -> None:
    f = tg.nn.functional
    with pytest.raises(DTypeError, match="complex"):
        f.scaled_dot_product_attention(X, X, X)
    with pytest.raises(DTypeError, match="complex"):
        f.attention_weights(X, X)


def test_complex_numbers_in_nested_lists_are_refused() -> None:
    with pytest.raises(DTypeError, match="mse_loss: not defined for complex numbers"):
        tg.nn.functional.mse_loss([[1 + 3j, 2j]], np.zeros((1, 2)))
