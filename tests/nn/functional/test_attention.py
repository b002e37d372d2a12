"""Attention as one primitive: against its composite, and what it does not store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.core import state
from tapegrad.nn import functional as F

rng = np.random.default_rng(4)


def draw(*shape: int, dtype: str = "float64") -> tg.Tensor:
    return tg.asarray(rng.normal(size=shape).astype(dtype))


def composite(q: tg.Tensor, k: tg.Tensor, v: tg.Tensor, mask: Any, p: float, causal: bool) -> tg.Tensor:
    return F.dropout(F.attention_weights(q, k, mask, is_causal=causal), p) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_values_and_gradients_are_those_of_the_composite(causal: bool, mask: str | None, p: float) -> None:
    """With the same weights dropped: both draw the same mask."""
    q, k, v = draw(2, 3, 40, 8), draw(2, 3, 70, 8), draw(2, 3, 70, 5)
    m: Any = None
    if mask == "bool":
        seen = rng.random((40, 70)) < 0.7
        seen[:, 0] = True
        m = tg.asarray(seen)
    elif mask == "float":
        m = draw(3, 40, 70)
    found = []
    for f in (lambda: F.scaled_dot_product_attention(q, k, v, m, p, causal), lambda: composite(q, k, v, m, p, causal)):
        tg.random.seed(5)
        with tg.GradientTape() as tape:
            sources = [q, k, v] + ([m] if mask == "float" else [])
            tape.watch(sources)
            y = tg.sum(tg.sin(f()))
        found.append([y, *tape.gradient(y, sources)])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-9, atol=1e-11)


def test_nothing_of_size_queries_by_keys_is_stored() -> None:
    """Forward, backward and forward mode, also while they run: a tenth of the scores, which are 16 MiB."""
    q, k, v = (draw(1, 2, 1448, 8, dtype="float32") for _ in range(3))
    scores = 2 * 1448 * 1448 * 4

    def backward() -> None:
        with tg.GradientTape() as tape:
            tape.watch([q, k, v])
            y = tg.sum(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        tape.gradient(y, [q, k, v])

    def forward_mode() -> None:
        tg.jvp(lambda x: F.scaled_dot_product_attention(x, k, v), (q,), (q,))

    before = tg.get_num_threads()
    tg.set_num_threads(1)
    try:
        for run in (backward, forward_mode, tg.recompute_grad(backward)):
            with tg.measure() as m:
                run()
            assert m.peak_bytes < scores / 10
        with tg.measure() as m:
            composite(q, k, v, None, 0.0, True).numpy()
        assert m.peak_bytes > scores, "the check bites"
    finally:
        tg.set_num_threads(before)


def test_one_run_gives_all_gradients() -> None:
    q, k, v = draw(2, 4, 16, 8), draw(2, 2, 16, 8), draw(2, 2, 16, 8)
    with tg.GradientTape() as tape:
        tape.watch([q, k, v])
        y = tg.sum(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    with tg.measure() as m:
        tape.gradient(y, [q, k, v])
    assert m.kernel_runs < 10  # of which one is attention's; each cotangent by itself would be three


@pytest.mark.parametrize(
    ("p", "dtype", "precision"),
    [
        (0.0, "float32", "highest"),
        (0.25, "float32", "highest"),
        (0.25, "float32", "high"),
        (0.25, "float16", "highest"),
    ],
)
def test_every_way_to_run_gives_the_same_bits(p: float, dtype: str, precision: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(state, "chosen", [precision])
    q, k, v = (draw(2, 3, 36, 8, dtype=dtype) for _ in range(3))

    def loss(x: tg.Tensor) -> tg.Tensor:
        return tg.sum(F.scaled_dot_product_attention(x, k * x, v, dropout_p=p, is_causal=True) ** 2)

    def gradient(f: Any) -> bytes:
        tg.random.seed(3)
        with tg.GradientTape() as tape:
            tape.watch(q)
            y = f(q)
        return tape.gradient(y, q).numpy().tobytes()

    plain = gradient(loss)
    assert gradient(tg.recompute_grad(loss)) == plain
    captured = tg.function(lambda: gradient_of(loss, q))
    for _ in range(3):
        tg.random.seed(3)
        assert captured().numpy().tobytes() == plain
    with tg.memory_budget("64MiB"):
        assert gradient(loss) == plain
    before = tg.get_num_threads()
    try:
        for n in (1, 3):
            tg.set_num_threads(n)
            assert gradient(loss) == plain
    finally:
        tg.set_num_threads(before)


def gradient_of(f: Any, x: tg.Tensor) -> tg.Tensor:
    with tg.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x)


def test_vmap_and_jacobians() -> None:
    q, k, v = draw(4, 3, 5, 2), draw(4, 3, 6, 2), draw(3, 6, 2)
    found = tg.vmap(F.scaled_dot_product_attention, in_axes=(0, 0, None))(q, k, v).numpy()
    for i in range(4):
        np.testing.assert_allclose(found[i], F.scaled_dot_product_attention(q[i], k[i], v).numpy(), rtol=1e-12)
    each = tg.vmap(lambda x, y: gradient_of(lambda z: tg.sum(F.scaled_dot_product_attention(z, y, v)), x))(q, k)
    np.testing.assert_allclose(
        each[2].numpy(), gradient_of(lambda z: tg.sum(F.scaled_dot_product_attention(z, k[2], v)), q[2]).numpy(),
        rtol=1e-10, atol=1e-13,
    )  # fmt: skip
    with tg.GradientTape() as tape:
        tape.watch(q)
        y = F.scaled_dot_product_attention(q[0], k[0], v)
    rows = tape.jacobian(y, q).numpy()
    assert rows.shape == (3, 5, 2, 4, 3, 5, 2)
    assert not rows[0, :, :, 0, 1:].any()


def test_queries_that_may_look_nowhere() -> None:
    """They get 0, or in a layer of Keras' kind the mean of all values; neither gives NaN, nor its gradients."""
    q, v = draw(1, 1, 3, 4), draw(1, 1, 5, 2)
    mask = tg.asarray(np.array([[True] * 5, [False] * 5, [False, True] * 2 + [True]]))
    with tg.GradientTape() as tape:
        tape.watch([q, v])
        y = F.scaled_dot_product_attention(q, draw(1, 1, 5, 4), v, mask)
    assert not y.numpy()[0, 0, 1].any()
    assert all(np.isfinite(g.numpy()).all() for g in tape.gradient(y, [q, v]))
    layer = tg.nn.MultiHeadAttention(2, 4)
    x = draw(1, 3, 8, dtype="float32")
    alone = layer(x, attention_mask=np.array([[True] * 3, [False] * 3, [True] * 3]))
    scored, _ = layer(x, attention_mask=np.array([[True] * 3, [False] * 3, [True] * 3]), return_attention_scores=True)
    np.testing.assert_allclose(alone.numpy(), scored.numpy(), rtol=1e-5, atol=1e-6)


def test_not_a_number_spreads_to_its_query_alone() -> None:
    q = rng.normal(size=(1, 4, 3))
    q[0, 2, 1] = np.nan
    y = F.scaled_dot_product_attention(q, draw(1, 5, 3), draw(1, 5, 2)).numpy()
    assert np.isnan(y[0, 2]).all()
    assert np.isfinite(np.delete(y, 2, axis=1)).all()


def test_allowed_to_it_rounds_its_products_and_keeps_that_precision(monkeypatch: Any) -> None:
    """Values, derivatives and reruns."""
    monkeypatch.setattr(state, "chosen", ["highest"])
    q, k, v = (draw(2, 3, 40, 16, dtype="float32") for _ in range(3))

    def attention(x: tg.Tensor) -> tg.Tensor:
        return tg.sum(tg.nn.functional.scaled_dot_product_attention(x, k, v, is_causal=True) ** 2)

    def gradient(forward: str, backward: str, f: Any = attention) -> np.ndarray:
        tg.set_float32_matmul_precision(forward)
        with tg.GradientTape() as tape:
            tape.watch(q)
            y = f(q)
        tg.set_float32_matmul_precision(backward)
        return tape.gradient(y, q).numpy()

    exact, rounded = gradient("highest", "highest"), gradient("high", "high")
    assert 1e-5 < np.abs(rounded - exact).max() / np.abs(exact).max() < 5e-3
    for f in (attention, tg.recompute_grad(attention)):
        assert gradient("high", "highest", f).tobytes() == rounded.tobytes()
        assert gradient("highest", "high", f).tobytes() == exact.tobytes()
