"""MultiHeadAttention against a loop over batches, heads and positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad import nn
from tapegrad.errors import ShapeError, TapegradError

rng = np.random.default_rng(1)


def reference(layer: nn.MultiHeadAttention, query: Any, value: Any, key: Any, allowed: Any) -> tuple[Any, Any]:
    """The result and the weights (b, heads, t, s), position by position."""

    def project(dense: nn.Dense, x: Any) -> Any:
        y = x @ dense.kernel.numpy() + (0 if dense.bias is None else dense.bias.numpy())
        return y.reshape(*x.shape[:2], layer.num_heads, -1)

    q, k, v = project(layer.query_dense, query), project(layer.key_dense, key), project(layer.value_dense, value)
    (b, t, heads, _), s = q.shape, k.shape[1]
    weights = np.zeros((b, heads, t, s))
    mixed = np.zeros((b, t, heads, v.shape[-1]))
    for i, h, j in np.ndindex(b, heads, t):
        seen = np.flatnonzero(allowed[i, j])
        seen = seen if seen.size else np.arange(s)
        scores = k[i, seen, h] @ q[i, j, h] / np.sqrt(layer.key_dim) * bool(allowed[i, j].any())
        e = np.exp(scores - scores.max())
        weights[i, h, j, seen] = e / e.sum()
        mixed[i, j, h] = weights[i, h, j] @ v[i, :, h]
    out = layer.output_dense
    assert out is not None
    y = mixed.reshape(b, t, -1) @ out.kernel.numpy() + (0 if out.bias is None else out.bias.numpy())
    return y, weights


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
def test_against_the_loop(causal: bool, masked: bool, use_bias: bool) -> None:
    layer = nn.MultiHeadAttention(2, 3, value_dim=5, use_bias=use_bias, output_shape=6, dtype="float64")
    query, value, key = rng.normal(size=(2, 4, 7)), rng.normal(size=(2, 5, 8)), rng.normal(size=(2, 5, 9))
    allowed = rng.random((2, 4, 5)) < 0.6 if masked else np.ones((2, 4, 5), bool)
    if masked:
        allowed[1, 2] = False  # a query that may look nowhere
    mask = allowed if masked else None
    y, weights = layer(query, value, key, attention_mask=mask, return_attention_scores=True, use_causal_mask=causal)
    if causal:
        allowed = allowed & (np.arange(4)[:, None] >= np.arange(5))
    want, want_weights = reference(layer, query, value, key, allowed)
    np.testing.assert_allclose(weights.numpy(), want_weights, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(y.numpy(), want, rtol=1e-12, atol=1e-13)


def test_value_and_key_default_to_query_and_value() -> None:
    layer = nn.MultiHeadAttention(2, 3)
    x, other = tg.asarray(rng.normal(size=(2, 4, 6))), tg.asarray(rng.normal(size=(2, 5, 6)))
    assert np.array_equal(layer(x).numpy(), layer(x, x, x).numpy())
    assert np.array_equal(layer(x, other).numpy(), layer(x, other, other).numpy())
    assert layer(x).shape == (2, 4, 6)
    assert [v.shape for v in layer.variables] == [(6, 6), (6,)] * 4


def test_a_causal_query_does_not_depend_on_later_positions() -> None:
    layer = nn.MultiHeadAttention(2, 3, dtype="float64")
    x = tg.asarray(rng.normal(size=(1, 5, 6)))
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = tg.sum(layer(x, use_causal_mask=True)[:, 2])
    reached = np.abs(tape.gradient(y, x).numpy()).sum((0, 2)) > 0
    assert reached.tolist() == [True, True, True, False, False]


def test_gradients() -> None:
    layer = nn.MultiHeadAttention(2, 3, dtype="float64")
    x = rng.normal(size=(2, 4, 6))
    layer(x)
    tg.testing.check_grads(lambda x: layer(x, use_causal_mask=True), (tg.asarray(x),))


def test_one_mask_for_all_batches_or_all_queries() -> None:
    layer = nn.MultiHeadAttention(1, 2, dtype="float64")
    x = rng.normal(size=(2, 3, 4))
    mask = np.array([True, False, True])
    full = layer(x, attention_mask=np.broadcast_to(mask, (2, 3, 3))).numpy()
    assert np.array_equal(layer(x, attention_mask=mask).numpy(), full)
    assert np.array_equal(layer(x, attention_mask=np.tile(mask, (3, 1))).numpy(), full)
    assert np.array_equal(layer(x, attention_mask=mask.astype(np.int64)).numpy(), full)


def test_dropout_of_weights_only_in_training() -> None:
    tg.random.seed(0)
    layer = nn.MultiHeadAttention(2, 3, dropout=0.5)
    x = tg.asarray(rng.normal(size=(2, 8, 6)).astype(np.float32))
    assert np.array_equal(layer(x).numpy(), layer(x, training=False).numpy())
    assert not np.array_equal(layer(x).numpy(), layer(x, training=True).numpy())


def test_what_does_not_fit_is_refused() -> None:
    layer = nn.MultiHeadAttention(2, 3, name="m")
    good = tg.ones((2, 4, 6))
    with pytest.raises(ShapeError, match=r'MultiHeadAttention "m": wanted query \(batch, positions, features\)'):
        layer(tg.ones((4, 6)))
    layer(good)
    with pytest.raises(ShapeError, match=r"wanted value \(batch, positions, features\), got \(4, 6\)"):
        layer(good, tg.ones((4, 6)))
    with pytest.raises(ShapeError, match=r"got \(2, 4, 6\), \(3, 4, 6\), \(3, 4, 6\)"):
        layer(good, tg.ones((3, 4, 6)))
    with pytest.raises(ShapeError, match=r"wanted a mask that broadcasts to \(2, 4, 4\), got \(4, 5\)"):
        layer(good, attention_mask=tg.ones((4, 5)))
    with pytest.raises(TapegradError, match="positive integer for num_heads"):
        nn.MultiHeadAttention(0, 3)
    with pytest.raises(TapegradError, match="wanted a rate from 0 to 1, got 2"):
        nn.MultiHeadAttention(1, 3, dropout=2)
