"""Activations, shapes, global pooling and group normalization as layers, against NumPy and torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import nn
from tapegrad.errors import AxisError, ShapeError, TapegradError

X = np.random.default_rng(0).normal(size=(2, 3, 4, 5)) * 3

ACTIVATIONS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: nn.Activation("tanh"), np.tanh),
    (lambda: nn.Activation(tg.exp), np.exp),
    (lambda: nn.Activation(None), lambda x: x),
    (lambda: nn.ReLU(), lambda x: np.maximum(x, 0)),
    (lambda: nn.ReLU(2.0), lambda x: np.clip(x, 0, 2)),
    (lambda: nn.ReLU(2.0, 0.5, 1.0), lambda x: np.where(x >= 2, 2, np.where(x >= 1, x, 0.5 * (x - 1)))),
    (lambda: nn.LeakyReLU(), lambda x: np.where(x > 0, x, 0.3 * x)),
    (lambda: nn.ELU(0.5), lambda x: np.where(x > 0, x, 0.5 * np.expm1(x))),
    (lambda: nn.Softmax(), lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
    (lambda: nn.Softmax(1), lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True)),
]


@pytest.mark.parametrize("i", range(len(ACTIVATIONS)))
def test_activations(i: int) -> None:
    make, formula = ACTIVATIONS[i]
    layer = make()
    np.testing.assert_allclose(layer(X).numpy(), formula(X), rtol=1e-10)
    assert layer(X.astype(np.float32)).dtype == np.float32 and not layer.variables
    tg.testing.check_grads(layer, (X,))


def test_prelu_and_a_masked_softmax() -> None:
    layer = nn.PReLU("uniform", dtype="float64")
    y = layer(X)
    assert layer.alpha.shape == (3,) and nn.PReLU()(X).numpy().min() == 0
    slopes = layer.alpha.numpy()[:, None, None]
    np.testing.assert_allclose(y.numpy(), np.where(X > 0, X, slopes * X), rtol=1e-12)
    tg.testing.check_grads(layer, (X,))
    with pytest.raises(ShapeError, match=r"wanted inputs \(n, 3, ...\)"):
        layer(np.ones((2, 4)))
    with pytest.raises(ShapeError, match=r"wanted inputs \(n, channels, ...\), got \(3,\)"):
        nn.PReLU()(np.ones(3))
    mask = np.array([True, False, True, True, False])
    y = nn.Softmax()(X, mask=mask).numpy()
    np.testing.assert_allclose(y[..., mask], np.exp(X[..., mask]) / np.exp(X[..., mask]).sum(-1, keepdims=True), 1e-10)
    assert not y[..., ~mask].any()
    np.testing.assert_allclose(nn.Softmax()(X, mask=np.zeros(5, bool)).numpy(), 0.2)
    with pytest.raises(AxisError):
        nn.Softmax(4)(X)
    with pytest.raises(TapegradError, match="wanted no negative arguments"):
        nn.ReLU(-1.0)
    with pytest.raises(TapegradError, match="wanted None, a function or one of"):
        nn.Activation("no such")


def test_shapes() -> None:
    assert nn.Flatten()(X).numpy().tobytes() == X.tobytes() and nn.Flatten()(X).shape == (2, 60)
    assert nn.Flatten()(np.ones(3)).shape == (3, 1) and nn.Flatten()(np.ones((0, 2, 3))).shape == (0, 6)
    np.testing.assert_array_equal(nn.Reshape((5, 12))(X).numpy(), X.reshape(2, 5, 12))
    np.testing.assert_array_equal(nn.Reshape((-1, 10))(X).numpy(), X.reshape(2, 6, 10))
    assert nn.Reshape((3, -1))(np.ones((0, 6))).shape == (0, 3, 2) and nn.Reshape(())(np.ones((2, 1))).shape == (2,)
    assert nn.Reshape((-1,))(np.ones((2, 0))).shape == (2, 0)
    np.testing.assert_array_equal(nn.Permute((3, 1, 2))(X).numpy(), X.transpose(0, 3, 1, 2))
    for bad, wanted in ((lambda: nn.Reshape((7,))(X), r"cannot make \(7,\) of the 60 elements"),
                        (lambda: nn.Reshape((-1, 7))(X), r"cannot make \(-1, 7\) of the 60"),
                        (lambda: nn.Reshape((-1, -1)), "at most one of them -1"),
                        (lambda: nn.Flatten()(1.0), "got a scalar")):  # fmt: skip
        with pytest.raises(ShapeError, match=wanted):
            bad()
    with pytest.raises(AxisError, match=r"wanted the axes from 1 to 2, got \(0, 1\)"):
        nn.Permute((0, 1))
    with pytest.raises(AxisError, match="wanted inputs of 3 axes"):
        nn.Permute((2, 1))(X)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_global_pooling(dims: int) -> None:
    x, axes = X.reshape((2, 3, 4, 5, 1)[: dims + 1] + (-1,)), tuple(range(2, dims + 2))
    for kind, function in (("Average", np.mean), ("Max", np.max)):
        make = getattr(nn, f"Global{kind}Pooling{dims}D")
        np.testing.assert_allclose(make()(x).numpy(), function(x, axis=axes), rtol=1e-12)
        np.testing.assert_allclose(make(keepdims=True)(x).numpy(), function(x, axis=axes, keepdims=True), rtol=1e-12)
        tg.testing.check_grads(make(), (x,))
        with pytest.raises(ShapeError, match=r"wanted inputs \(n, channels, "):
            make()(np.ones((2, 3)))


@pytest.mark.parametrize("groups", [1, 2, 6, -1])
def test_group_normalization(groups: int) -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(1).normal(size=(4, 6, 3, 2)) + 1
    layer = nn.GroupNormalization(
        groups, 1e-5, gamma_initializer="uniform", beta_initializer="uniform", dtype="float64"
    )
    y = layer(x)
    ours = [torch.tensor(v.numpy(copy=True)) for v in (layer.gamma, layer.beta)]
    theirs = torch.nn.functional.group_norm(torch.tensor(x), 6 if groups == -1 else groups, *ours, 1e-5)
    np.testing.assert_allclose(y.numpy(), theirs.numpy(), rtol=1e-10, atol=1e-12)
    assert nn.GroupNormalization(groups, center=False, scale=False)(x).shape == x.shape
    with pytest.raises(ShapeError, match=r"wanted inputs \(n, 6, ...\), for which it was built"):
        layer(x[:, :3])
    with pytest.raises(ShapeError, match="channels divisible by groups=4"):
        nn.GroupNormalization(4)(x)
    with pytest.raises(TapegradError, match="positive integer for groups, got 0"):
        nn.GroupNormalization(0)
