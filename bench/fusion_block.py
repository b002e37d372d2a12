"""The transformer block that ``fusion.py`` counts: tapegrad's layers and the same weights for others."""

from __future__ import annotations

from typing import Any

import common

TOLERANCE = 1e-4
WEIGHTS = ("norm_1.gamma", "norm_1.beta", *(f"{p}.{w}" for p in ("query", "key", "value", "output")
           for w in ("kernel", "bias")), "norm_2.gamma", "norm_2.beta",
           *(f"{p}.{w}" for p in ("expand", "contract") for w in ("kernel", "bias")))  # fmt: skip


def inputs(sizes: Any) -> tuple[Any, Any]:
    """x and the cotangent of the result."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (sizes.batch, sizes.context, sizes.width)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)


def ours(tg: Any, sizes: Any, rate: float) -> tuple[Any, Any, Any]:
    """The block on the default device, built, and its inputs."""
    nn, width = tg.nn, sizes.width

    class Block(nn.Layer):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm_1 = nn.LayerNormalization(epsilon=1e-5)
            self.attention = nn.MultiHeadAttention(sizes.heads, width // sizes.heads, dropout=rate)
            self.norm_2 = nn.LayerNormalization(epsilon=1e-5)
            self.expand = nn.Dense(4 * width, activation="gelu")
            self.contract = nn.Dense(width)
            self.dropout = nn.Dropout(rate)

        def call(self, x: Any) -> Any:
            x = x + self.dropout(self.attention(self.norm_1(x), training=True), training=True)
            return x + self.dropout(self.contract(self.expand(self.norm_2(x))), training=True)

    tg.random.seed(0)
    x, ct = (tg.asarray(a) for a in inputs(sizes))
    model = Block()
    model(x)
    return model, x, ct


def weights_of(model: Any) -> list[Any]:
    """In the order of ``WEIGHTS``."""
    attention = model.attention
    denses = [attention.query_dense, attention.key_dense, attention.value_dense, attention.output_dense]
    norms = [[layer.gamma, layer.beta] for layer in (model.norm_1, model.norm_2)]
    pairs = [[d.kernel, d.bias] for d in (*denses, model.expand, model.contract)]
    return [*norms[0], *sum(pairs[:4], []), *norms[1], *sum(pairs[4:], [])]


def gradients(tg: Any, model: Any, x: Any, ct: Any) -> list[Any]:
    """The result, and the gradients of x and of every weight, all of them evaluated."""
    from tapegrad.tensor import materialize

    with tg.GradientTape() as tape:
        tape.watch(x)
        y = model(x)
    found = [y, *tape.gradient(y, [x, *weights_of(model)], output_gradients=ct)]
    for t in found:
        materialize(t)
    return found


def results(tg: Any, sizes: Any, device: str, rate: float) -> list[Any]:
    """Result and gradients as NumPy arrays, with masks that depend on the seed alone."""
    with tg.device(device):
        model, x, ct = ours(tg, sizes, rate)
        tg.random.seed(1)
        return [t.numpy() for t in gradients(tg, model, x, ct)]


def agree(who: str, got: list[Any], want: list[Any]) -> float:
    """The worst difference of results and gradients; ends the script where one is too large.

    A key's bias changes no softmax, so its gradient is rounding errors alone: hence the floor.
    """
    floor = 1e-3 * max(float(abs(w).max()) for w in want)
    names = ("the result", "the gradient of x", *(f"the gradient of {w}" for w in WEIGHTS))
    return max(common.must_agree(who, n, g, w, TOLERANCE, floor) for n, g, w in zip(names, got, want, strict=True))
