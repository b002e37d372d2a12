"""Dense, Embedding, LayerNormalization, Dropout, Lambda, Sequential."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import nn
from tapegrad.errors import (
    AxisError,
    DTypeError,
    IndexingError,
    NotATensorError,
    ShapeError,
    TapegradError,
)

rng = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4), (2, 0, 4)])
def test_dense_is_a_product_over_the_last_axis(shape: tuple[int, ...]) -> None:
    layer = nn.Dense(5, activation="tanh", bias_initializer="uniform", dtype="float64")
    x = rng.normal(size=shape)
    y = layer(x)
    assert y.shape == (*shape[:-1], 5)
    np.testing.assert_allclose(y.numpy(), np.tanh(x @ layer.kernel.numpy() + layer.bias.numpy()), rtol=1e-14)


def test_dense_gradients_are_exact_and_the_kernel_s_has_its_shape() -> None:
    layer = nn.Dense(5, dtype="float64")
    x = tg.asarray(rng.normal(size=(2, 3, 4)))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(layer(x) ** 2)
    dx, dw, db = tape.gradient(y, [x, layer.kernel, layer.bias])
    ct = 2 * (x.numpy() @ layer.kernel.numpy() + layer.bias.numpy())
    np.testing.assert_allclose(dx.numpy(), ct @ layer.kernel.numpy().T, rtol=1e-12)
    np.testing.assert_allclose(dw.numpy(), np.einsum("btk,btu->ku", x.numpy(), ct), rtol=1e-12)
    np.testing.assert_allclose(db.numpy(), ct.sum((0, 1)), rtol=1e-12)


def test_dense_without_bias() -> None:
    layer = nn.Dense(2, use_bias=False)
    layer(tg.ones((1, 3)))
    assert [v.shape for v in layer.variables] == [(3, 2)] and layer.bias is None


def test_dense_refuses_what_does_not_fit() -> None:
    layer = nn.Dense(2, name="d")
    layer(tg.ones((1, 3)))
    with pytest.raises(ShapeError, match=r'Dense "d": wanted inputs \(\.\.\., 3\).*got \(1, 4\); kernel \(3, 2\)'):
        layer(tg.ones((1, 4)))
    for units in (0, -1, 2.0, "2", None):
        with pytest.raises(TapegradError, match="positive integer for units"):
            nn.Dense(units)  # type: ignore[arg-type]
    with pytest.raises(TapegradError, match="activation: wanted .*relu.*got 'rellu'"):
        nn.Dense(2, activation="rellu")
    assert layer(tg.ones((2, 3))).shape == (2, 2)


def test_dense_takes_any_activation() -> None:
    x = rng.normal(size=(3, 2))
    layer = nn.Dense(4, activation=lambda h: tg.maximum(h, 0.5), dtype="float64")
    assert layer(x).numpy().min() >= 0.5


def test_embedding_looks_up_rows() -> None:
    layer = nn.Embedding(7, 3)
    indices = np.array([[0, 6], [6, 2]], dtype=np.int32)
    with tg.GradientTape() as tape:
        y = layer(indices)
        target = tg.sum(y * tg.constant([1.0, 2.0, 3.0]))
    assert np.array_equal(y.numpy(), layer.embeddings.numpy()[indices])
    gradient = tape.gradient(target, layer.embeddings).numpy()
    assert np.array_equal(gradient, np.outer([1, 0, 1, 0, 0, 0, 2], [1, 2, 3]))


@pytest.mark.parametrize("indices", [[-1, 0], [7], [[0], [100]]])
def test_embedding_refuses_integers_outside_the_table(indices: Any) -> None:
    with pytest.raises(IndexingError, match=r'Embedding "e": wanted integers in \[0, 7\), got'):
        nn.Embedding(7, 3, name="e")(indices)


def test_embedding_refuses_floats_and_takes_nothing() -> None:
    layer = nn.Embedding(7, 3)
    with pytest.raises(DTypeError, match="wanted integer inputs, got float32"):
        layer([0.0])
    assert layer(tg.zeros((0,), dtype="int64")).shape == (0, 3)


@pytest.mark.parametrize("axis", [-1, 1, (1, 2), (2, 1), (0, 2), (0, 1, 2), [-1]])
@pytest.mark.parametrize(("center", "scale"), [(True, True), (True, False), (False, True), (False, False)])
def test_layer_normalization(axis: Any, center: bool, scale: bool) -> None:
    layer = nn.LayerNormalization(
        axis,
        epsilon=1e-2,
        center=center,
        scale=scale,
        gamma_initializer="uniform",
        beta_initializer="uniform",
        dtype="float64",
    )
    x = rng.normal(size=(2, 3, 4))
    y = layer(x).numpy()
    axes = (axis,) if isinstance(axis, int) else tuple(a % 3 for a in axis)
    want = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-2)

    def spread(v: Any) -> Any:
        """A weight, whose axes are `axes` in their order, among the axes of x."""
        order = np.argsort(axes)
        full = [x.shape[a] if a in [b % 3 for b in axes] else 1 for a in range(3)]
        return v.numpy().transpose(order).reshape(full)

    if scale:
        want = want * spread(layer.gamma)
    if center:
        want = want + spread(layer.beta)
    np.testing.assert_allclose(y, want, rtol=1e-10, atol=1e-12)
    assert len(layer.variables) == center + scale


def test_layer_normalization_refuses_what_does_not_fit() -> None:
    layer = nn.LayerNormalization(name="n")
    layer(tg.ones((2, 3)))
    with pytest.raises(ShapeError, match=r'LayerNormalization "n": wanted sizes \(3,\) on axes \(-1,\), got \(4,\)'):
        layer(tg.ones((2, 4)))
    with pytest.raises(AxisError, match="axis 2 is out of range for inputs with 2 axes"):
        nn.LayerNormalization(axis=2)(tg.ones((2, 3)))
    with pytest.raises(AxisError, match="wanted different axes"):
        nn.LayerNormalization(axis=(1, -1))(tg.ones((2, 3)))
    with pytest.raises(AxisError, match="wanted different axes, at least one"):
        nn.LayerNormalization(axis=())(tg.ones((2, 3)))


def test_dropout_scales_what_it_keeps() -> None:
    tg.random.seed(0)
    x = tg.full((100, 100), 3.0)
    layer = nn.Dropout(0.25)
    assert layer(x) is not x and np.array_equal(layer(x).numpy(), x.numpy())
    y = layer(x, training=True).numpy()
    assert set(np.unique(y)) == {0.0, 4.0}
    assert abs((y == 0).mean() - 0.25) < 0.02
    assert not np.array_equal(layer(x, training=True).numpy(), y)
    assert layer([1, 2, 3], training=True).dtype == np.float32
    assert layer(np.ones(3), training=True).dtype == np.float64


def test_dropout_of_all_and_of_nothing() -> None:
    x = tg.constant([1.0, np.inf])
    assert np.array_equal(nn.Dropout(0)(x, training=True).numpy(), x.numpy())
    assert nn.Dropout(1)(x, training=True).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_dropout_refuses_what_is_no_probability(rate: float) -> None:
    with pytest.raises(TapegradError, match="wanted a rate from 0 to 1"):
        nn.Dropout(rate)


def test_dropout_in_a_checkpoint_is_replayed() -> None:
    layer = nn.Dropout(0.5)
    tg.random.seed(5)
    x = tg.ones((1000,))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.recompute_grad(layer)(x, training=True)
    after = tg.random.uniform((3,)).numpy()
    assert np.array_equal(tape.gradient(y, x).numpy(), y.numpy())
    tg.random.seed(5)
    layer(x, training=True)
    assert np.array_equal(tg.random.uniform((3,)).numpy(), after)


def test_lambda_calls_its_function() -> None:
    layer = nn.Lambda(lambda x, power: x**power, arguments={"power": 3})
    assert layer([2.0]).tolist() == [8.0]
    assert layer([2.0], training=True).tolist() == [8.0]
    assert layer.variables == []
    with pytest.raises(NotATensorError, match="wanted a function, got int"):
        nn.Lambda(3)  # type: ignore[arg-type]


def test_sequential_chains_layers_wrapped_layers_and_functions() -> None:
    inner = nn.Dense(3)
    model = nn.Sequential([nn.Dense(2), tg.tanh, tg.recompute_grad(inner), nn.Sequential([nn.Dense(1)])])
    x = tg.asarray(rng.normal(size=(4, 5)).astype(np.float32))
    y = model(x, training=True)
    assert y.shape == (4, 1)
    assert [v.shape for v in model.variables] == [(5, 2), (2,), (2, 3), (3,), (3, 1), (1,)]
    assert np.array_equal(model[3](inner(tg.tanh(model[0](x)))).numpy(), y.numpy())
    assert len(model) == 4 and len(list(model)) == 4 and len(model[1:]) == 3


def test_sequential_grows_and_shrinks() -> None:
    model = nn.Sequential()
    x = tg.ones((1, 2))
    assert model(x) is x
    model.add(nn.Dense(3))
    assert model(x).shape == (1, 3)
    last = nn.Dense(4)
    model.add(last)
    assert model(x).shape == (1, 4)
    assert model.pop() is last
    assert len(model.variables) == 2
    with pytest.raises(NotATensorError, match="wanted layers or functions, got int"):
        model.add(3)  # type: ignore[arg-type]
    with pytest.raises(NotATensorError, match="wanted a list of layers, got Dense"):
        nn.Sequential(nn.Dense(2))  # type: ignore[arg-type]


def test_sequential_of_integers() -> None:
    """The seed document's model: Lambda passes the integers on, Dense converts them."""
    model = nn.Sequential([nn.Lambda(lambda x: x), nn.Dense(2)])
    wrapped = tg.recompute_grad(model)
    with tg.GradientTape() as tape:
        y = tg.constant([[1, 2]])
        for _ in range(4):
            y = wrapped(y)
    assert [g.shape for g in tape.gradient(y, model.variables)] == [(2, 2), (2,)]
