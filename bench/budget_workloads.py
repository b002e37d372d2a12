"""The five workloads of the byte-budget benchmark: what they compute, at which sizes.

Each has parameters (variables) and a loss of them; calling a made one runs forward under a tape and returns the
gradients.  All data come from one seed, so a step gives the same bits whenever it runs.  The scale ``full`` takes 1 to
8 s and at most 3 GiB on one thread without a budget, ``quick`` well under a second; ``float64`` serves to check
gradients by differences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Sizes = dict[str, int]


@dataclass
class Step:
    """One training step without the update: ``step()`` gives the gradients of ``loss()`` in ``parameters``."""

    loss: Callable[[], Any]
    parameters: list[Any]

    def __call__(self) -> list[Any]:
        import tapegrad as tg

        with tg.GradientTape() as tape:
            loss = self.loss()
        return tape.gradient(loss, self.parameters)


@dataclass(frozen=True)
class Workload:
    """A name, what most of its time goes to, and sizes by scale; ``make(scale)`` gives a :class:`Step`."""

    name: str
    kind: str
    build: Callable[[Sizes, str], Step]
    scales: dict[str, Sizes]

    def make(self, scale: str = "full", dtype: str = "float32") -> Step:
        """``scale``: "full" or "quick"."""
        return self.build(self.scales[scale], dtype)


class Draws:
    """Variables and constants of one dtype from one seed."""

    def __init__(self, dtype: str) -> None:
        import numpy as np

        self.rng = np.random.default_rng(0)
        self.dtype = dtype
        self.parameters: list[Any] = []

    def normal(self, *shape: int, scale: float = 1.0) -> Any:
        """An array."""
        return (self.rng.standard_normal(shape) * scale).astype(self.dtype)

    def constant(self, *shape: int) -> Any:
        """A tensor."""
        import tapegrad as tg

        return tg.asarray(self.normal(*shape))

    def variable(self, value: Any) -> Any:
        """A parameter that starts as ``value``."""
        import tapegrad as tg

        self.parameters.append(tg.Variable(value, dtype=self.dtype))
        return self.parameters[-1]

    def weight(self, *shape: int, fan_in: int) -> Any:
        """A parameter of variance ``2 / fan_in`` (He et al., ICCV 2015)."""
        return self.variable(self.normal(*shape, scale=(2.0 / fan_in) ** 0.5))

    def filled(self, n: int, value: float) -> Any:
        """A parameter of ``n`` equal elements."""
        import numpy as np

        return self.variable(np.full(n, value, self.dtype))


def mlp(sizes: Sizes, dtype: str) -> Step:
    """Dense layers with gelu, all of one width."""
    import tapegrad as tg

    draw, width = Draws(dtype), sizes["width"]
    x, target = draw.constant(sizes["batch"], width), draw.constant(sizes["batch"], width)
    layers = [(draw.weight(width, width, fan_in=width), draw.filled(width, 0.0)) for _ in range(sizes["layers"])]

    def loss() -> Any:
        h = x
        for w, b in layers:
            h = tg.gelu(tg.matmul(h, w) + b)
        return tg.mean(tg.square(h - target))

    return Step(loss, draw.parameters)


def resnet(sizes: Sizes, dtype: str) -> Step:
    """Basic blocks with batch normalization for images of 32 x 32 (He et al., CVPR 2016, section 4.2).

    By statistics of the batch, without moving ones.
    """
    import tapegrad as tg

    F = tg.nn.functional
    draw, batch, narrow = Draws(dtype), sizes["batch"], sizes["channels"]
    images = draw.constant(batch, 3, sizes["pixels"], sizes["pixels"])
    labels = tg.asarray(draw.rng.integers(0, 10, batch))

    def conv(channels: int, filters: int, kernel: int, stride: int = 1) -> Callable[[Any], Any]:
        w = draw.weight(filters, channels, kernel, kernel, fan_in=channels * kernel * kernel)
        gamma, beta = draw.filled(filters, 1.0), draw.filled(filters, 0.0)
        return lambda x: F.batch_norm(
            F.conv2d(x, w, stride=stride, padding=kernel // 2), None, None, gamma, beta, training=True
        )

    def block(channels: int, filters: int, stride: int) -> Callable[[Any], Any]:
        first, second = conv(channels, filters, 3, stride), conv(filters, filters, 3)
        short = conv(channels, filters, 1, stride) if stride > 1 or channels != filters else lambda x: x
        return lambda x: tg.relu(second(tg.relu(first(x))) + short(x))

    stem = conv(3, narrow, 3)
    blocks, channels = [], narrow
    for stage in range(3):
        for number in range(sizes["blocks"]):
            filters = narrow << stage
            blocks.append(block(channels, filters, 2 if stage and not number else 1))
            channels = filters
    head, bias = draw.weight(channels, 10, fan_in=channels), draw.filled(10, 0.0)

    def loss() -> Any:
        h = tg.relu(stem(images))
        for each in blocks:
            h = each(h)
        return F.cross_entropy(tg.matmul(tg.mean(h, axis=(2, 3)), head) + bias, labels)

    return Step(loss, draw.parameters)


def transformer(sizes: Sizes, dtype: str) -> Step:
    """Blocks of causal attention and a layer of four times the width, normalized before each (pre-norm)."""
    import tapegrad as tg

    nn = tg.nn
    tg.random.seed(0)
    draw, width = Draws(dtype), sizes["width"]
    shape = sizes["batch"], sizes["positions"], width
    x, target = draw.constant(*shape), draw.constant(*shape)
    blocks = [
        (
            nn.LayerNormalization(dtype=dtype),
            nn.MultiHeadAttention(sizes["heads"], width // sizes["heads"], dtype=dtype),
            nn.LayerNormalization(dtype=dtype),
            nn.Dense(4 * width, activation="gelu", dtype=dtype),
            nn.Dense(width, dtype=dtype),
        )
        for _ in range(sizes["blocks"])
    ]

    def loss() -> Any:
        h = x
        for before, attention, between, wide, narrow in blocks:
            h = h + attention(before(h), use_causal_mask=True)
            h = h + narrow(wide(between(h)))
        return tg.mean(tg.square(h - target))

    loss()  # makes the weights
    return Step(loss, [v for block in blocks for layer in block for v in layer.trainable_variables])


def lstm(sizes: Sizes, dtype: str) -> Step:
    """One LSTM layer (Hochreiter and Schmidhuber, 1997, with forget gates), its inputs a tensor for each step."""
    import tapegrad as tg

    draw, batch, hidden, features = Draws(dtype), sizes["batch"], sizes["hidden"], sizes["features"]
    xs = [draw.constant(batch, features) for _ in range(sizes["steps"])]
    target = draw.constant(batch, hidden)
    w = draw.weight(features, 4 * hidden, fan_in=2 * features)
    u, b = draw.weight(hidden, 4 * hidden, fan_in=2 * hidden), draw.filled(4 * hidden, 0.1)

    def loss() -> Any:
        h = c = tg.zeros((batch, hidden), dtype=dtype)
        for x in xs:
            gates = tg.matmul(x, w) + tg.matmul(h, u) + b
            i, f, o, g = (gates[:, k * hidden : (k + 1) * hidden] for k in range(4))
            c = tg.sigmoid(f) * c + tg.sigmoid(i) * tg.tanh(g)
            h = tg.sigmoid(o) * tg.tanh(c)
        return tg.mean(tg.square(h - target)) + tg.mean(tg.square(c))

    return Step(loss, draw.parameters)


_FAR = 1.0 / 12.0, -4.0 / 3.0, 2.5  # minus the second difference of fourth order: weights at distance 2, 1, 0


def laplacian(u: Any) -> Any:
    """The sum of second differences of ``u``, zero around it, to fourth order on a grid of step 1."""
    import tapegrad as tg

    n, m = u.shape
    p = tg.pad(u, 2)
    far, near, centre = _FAR
    two = p[:n, 2:-2] + p[4:, 2:-2] + p[2:-2, :m] + p[2:-2, 4:]
    one = p[1 : n + 1, 2:-2] + p[3 : n + 3, 2:-2] + p[2:-2, 1 : m + 1] + p[2:-2, 3 : m + 3]
    return -(far * two + near * one + 2.0 * centre * u)


def wave(sizes: Sizes, dtype: str) -> Step:
    """Misfit of an acoustic wave at receivers, in the velocity it runs through (leapfrog; Tarantola, Geophysics 1984).

    Velocities in km/s, a cell of 10 m, a step of 1 ms, a Ricker wavelet of 12 Hz near the surface.
    """
    import numpy as np

    import tapegrad as tg

    draw, n, steps = Draws(dtype), sizes["cells"], sizes["steps"]
    courant = 0.1  # 1 ms in 10 m, for 1 km/s
    depth, across = np.meshgrid(np.arange(n) / n, np.arange(n) / n, indexing="ij")
    guess = (1.5 + depth).astype(dtype)
    true = guess + 0.3 * np.exp(-60.0 * ((depth - 0.4) ** 2 + (across - 0.5) ** 2))
    at = n // 10
    source = np.zeros((n, n), dtype)
    source[at, n // 2] = 1.0
    source = tg.asarray(source)
    phase = (np.pi * 12.0 * (1e-3 * np.arange(steps) - 0.1)) ** 2
    wavelet = ((1.0 - 2.0 * phase) * np.exp(-phase)).tolist()

    def traces(velocity: Any) -> Any:
        """What receivers at the source's depth record, in thousandths: (steps, receivers)."""
        factor = tg.square(velocity * courant)
        before = now = tg.zeros((n, n), dtype=dtype)
        found = []
        for amplitude in wavelet:
            before, now = now, 2.0 * now - before + factor * laplacian(now) + amplitude * source
            found.append(1e3 * now[at, 2:-2])  # a product, since a view would keep the whole field alive
        return tg.stack(found)

    observed = traces(tg.asarray(true.astype(dtype)))
    velocity = draw.variable(guess)
    return Step(lambda: tg.sum(tg.square(traces(velocity) - observed)), draw.parameters)


WORKLOADS = [
    Workload("deep MLP", "matmul-bound", mlp, {
        "full": {"layers": 64, "width": 384, "batch": 2048},
        "quick": {"layers": 12, "width": 256, "batch": 256},
    }),
    Workload("ResNet", "matmul-bound", resnet, {
        "full": {"blocks": 9, "channels": 16, "pixels": 32, "batch": 48},
        "quick": {"blocks": 1, "channels": 8, "pixels": 32, "batch": 16},
    }),
    Workload("transformer", "matmul-bound", transformer, {
        "full": {"blocks": 8, "width": 256, "heads": 8, "positions": 128, "batch": 16},
        "quick": {"blocks": 2, "width": 128, "heads": 4, "positions": 64, "batch": 8},
    }),
    Workload("LSTM", "matmul-bound", lstm, {
        "full": {"steps": 500, "batch": 128, "hidden": 320, "features": 64},
        "quick": {"steps": 60, "batch": 32, "hidden": 128, "features": 64},
    }),
    Workload("acoustic wave", "elementwise-bound", wave, {
        "full": {"steps": 1000, "cells": 500},
        "quick": {"steps": 150, "cells": 60},
    }),
]  # fmt: skip
"""In the order in which the benchmark shows them."""
