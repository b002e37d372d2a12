"""The canned workloads of ``tapegrad bench``, written with public names alone, as a user would write them.

Each is a loss of a few variables, made of parts that may be checkpointed: ``loss(wrap)`` puts each through ``wrap``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tapegrad as tg
from tapegrad import nn

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Workload:
    """What is measured: its size in words, its trainable variables, its loss."""

    name: str
    size: str
    variables: list[tg.Variable]
    loss: Callable[[Wrap], tg.Tensor]


class _Block(nn.Layer):
    """A block of a transformer; (b, t, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNormalization(), nn.LayerNormalization()
        self.attention = nn.MultiHeadAttention(heads, width // heads)
        self.expand, self.contract = nn.Dense(4 * width, activation="gelu"), nn.Dense(width)

    def call(self, x: tg.Tensor) -> tg.Tensor:
        x = x + self.attention(self.norm_1(x), use_causal_mask=True)
        return x + self.contract(self.expand(self.norm_2(x)))


def transformer(quick: bool) -> Workload:
    """A stack of transformer blocks; each block is a part."""
    blocks, batch, context, width = (4, 4, 64, 64) if quick else (6, 16, 128, 128)
    layers = [_Block(width, 4) for _ in range(blocks)]
    x = tg.random.normal((batch, context, width))

    def loss(wrap: Wrap) -> tg.Tensor:
        y = x
        for layer in layers:
            y = wrap(layer)(y)
        return tg.mean(y * y)

    loss(lambda f: f)  # makes the weights
    variables = [v for layer in layers for v in layer.trainable_variables]
    return Workload("transformer", f"{blocks} blocks, {batch} x {context} tokens, width {width}", variables, loss)


def mlp(quick: bool) -> Workload:
    """Dense layers; each three of them are a part."""
    depth, batch, width = (12, 2048, 64) if quick else (18, 8192, 128)
    model = [nn.Sequential([nn.Dense(width, activation="tanh") for _ in range(3)]) for _ in range(depth // 3)]
    x = tg.random.normal((batch, width))

    def loss(wrap: Wrap) -> tg.Tensor:
        y = x
        for layers in model:
            y = wrap(layers)(y)
        return tg.mean(y * y)

    loss(lambda f: f)
    variables = [v for layers in model for v in layers.trainable_variables]
    return Workload("mlp", f"{depth} layers, batch {batch}, width {width}", variables, loss)


def lstm(quick: bool) -> Workload:
    """An LSTM written as a loop over time; some steps together are a part."""
    steps, together, batch, width = (24, 6, 32, 64) if quick else (64, 8, 128, 128)
    w = tg.Variable(tg.random.normal((2 * width, 4 * width)) / width**0.5, name="w")
    b = tg.Variable(tg.zeros(4 * width), name="b")
    xs = tg.random.normal((steps, batch, width))

    def run(begin: int, h: tg.Tensor, c: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
        for t in range(begin, begin + together):
            z = tg.concat([xs[t], h], axis=1) @ w + b
            i, f, o = (tg.sigmoid(z[:, n * width : (n + 1) * width]) for n in range(3))
            c = f * c + i * tg.tanh(z[:, 3 * width :])
            h = o * tg.tanh(c)
        return h, c

    def loss(wrap: Wrap) -> tg.Tensor:
        h = c = tg.zeros((batch, width))
        for begin in range(0, steps, together):
            h, c = wrap(lambda h, c, begin=begin: run(begin, h, c))(h, c)
        return tg.mean(h * h)

    return Workload("lstm", f"{steps} steps, batch {batch}, width {width}", [w, b], loss)


def wave(quick: bool) -> Workload:
    """The wave equation by finite differences, and the gradient by the speed; some steps together are a part."""
    steps, together, side = (40, 8, 128) if quick else (100, 10, 512)
    speed = tg.Variable(tg.full((side, side), 0.25), name="speed")
    pulse = tg.exp(-0.02 * (tg.arange(side, dtype="float32") - side / 2) ** 2)
    start = pulse[:, None] * pulse

    def run(u: tg.Tensor, before: tg.Tensor) -> tuple[tg.Tensor, tg.Tensor]:
        for _ in range(together):
            around = sum((tg.roll(u, n, axis=a) for a in (0, 1) for n in (1, -1)), -4 * u)
            u, before = 2 * u - before + speed * around, u
        return u, before

    def loss(wrap: Wrap) -> tg.Tensor:
        u = before = start
        for _ in range(steps // together):
            u, before = wrap(run)(u, before)
        return tg.mean(u * u)

    return Workload("wave", f"{steps} steps, {side} x {side} points", [speed], loss)


ALL: tuple[Callable[[bool], Workload], ...] = (transformer, mlp, lstm, wave)
