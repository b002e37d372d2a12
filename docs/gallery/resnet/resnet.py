"""A residual network trained in half the memory: one line, the same bits.

    python docs/gallery/resnet/resnet.py [--small] [--picture resnet.svg]

A ResNet (pre-activation, group normalization, two stages) learns to tell noisy circles, squares, triangles and crosses
apart.  It is trained inside ``tg.memory_budget`` of half of what a plain step keeps: values are dropped when room is
needed and recomputed when a rule reads them.  The gradients have the bits of the plain step's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import tapegrad as tg
from tapegrad import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import example

KINDS = ("circle", "square", "triangle", "cross")


def images(count: int, n: int, seed: int) -> tuple[Any, Any]:
    """Pictures (count, 1, n, n) in float32 and their kinds (count,)."""
    draw = np.random.default_rng(seed)
    kinds = draw.integers(0, len(KINDS), count)
    sizes, turns = draw.uniform(0.28, 0.42, count) * n, draw.uniform(0, 2 * np.pi, count)
    middle = draw.uniform(0.4, 0.6, (2, count)) * n
    y, x = np.mgrid[:n, :n]
    found = np.empty((count, 1, n, n), "float32")
    for i in range(count):
        dx, dy = x - middle[0, i], y - middle[1, i]
        u = (dx * np.cos(turns[i]) + dy * np.sin(turns[i])) / sizes[i]
        v = (dy * np.cos(turns[i]) - dx * np.sin(turns[i])) / sizes[i]
        inside = (
            u * u + v * v < 1,
            np.maximum(abs(u), abs(v)) < 0.85,
            (v > -0.5) & (v < 1 - 1.7 * abs(u)),
            (np.minimum(abs(u), abs(v)) < 0.25) & (np.maximum(abs(u), abs(v)) < 1),
        )[kinds[i]]
        found[i, 0] = inside + 0.2 * draw.standard_normal((n, n))
    return found, kinds


class Block(nn.Layer):
    """``x + conv(relu(norm(conv(relu(norm(x))))))``; (b, channels, n, n) to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = [nn.GroupNormalization(groups=4) for _ in range(2)]
        self.convolutions = [
            nn.Conv2D(channels, 3, padding="same", use_bias=False, kernel_initializer=begin)
            for begin in ("glorot_uniform", "zeros")  # so a block begins as the identity
        ]

    def call(self, x: tg.Tensor) -> tg.Tensor:
        h = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            h = convolution(tg.relu(norm(h)))
        return x + h


def network(channels: int, blocks: int) -> nn.Layer:
    """Logits (b, 4) of pictures (b, 1, n, n)."""
    return nn.Sequential([
        nn.Conv2D(channels, 3, padding="same"),
        *[Block(channels) for _ in range(blocks)],
        nn.Conv2D(2 * channels, 3, strides=2, padding="same"),
        *[Block(2 * channels) for _ in range(blocks)],
        nn.GlobalAveragePooling2D(),
        nn.Dense(len(KINDS)),
    ])  # fmt: skip


def loss_and_gradients(model: nn.Layer, x: Any, kinds: Any) -> tuple[Any, list[Any]]:
    with tg.GradientTape() as tape:
        loss = tg.mean(tg.cross_entropy(model(x), kinds))
    return loss, tape.gradient(loss, model.trainable_variables)


def main() -> None:
    options = example.parser(__doc__).parse_args()
    n, channels, blocks, batch, steps = (16, 4, 8, 8, 40) if options.small else (16, 8, 4, 32, 300)
    tg.random.seed(0)
    model = network(channels, blocks)
    x, kinds = images(batch * (2 if options.small else steps), n, seed=0)
    batches = [(tg.asarray(x[i : i + batch]), tg.asarray(kinds[i : i + batch])) for i in range(0, len(x), batch)]
    model(batches[0][0])  # makes the weights

    loss_and_gradients(model, *batches[0])
    with tg.measure() as m:
        there = m.live_bytes
        _, plain = loss_and_gradients(model, *batches[0])
    taken = m.peak_bytes - there
    half = there + taken // 2
    with tg.measure() as m, tg.memory_budget(half):
        _, gradients = loss_and_gradients(model, *batches[0])
    print(f"{example.mib(there)} of weights and data; a plain step takes {example.mib(taken)} besides")
    print(f"within half of that {m.evictions} values are evicted, {m.restored} recomputed")
    example.check_memory("the step in half the memory", m.peak_bytes - there, taken / 2)
    same = all(np.array_equal(a.numpy(), b.numpy()) for a, b in zip(plain, gradients, strict=True))
    example.check(same and m.evictions, "its gradients have the plain step's bits")
    del plain, gradients

    optimizer = tg.optim.Adam(tg.optim.schedules.CosineDecay(5e-3, decay_steps=steps))
    losses = []
    for step in example.steps("steps", steps):
        with tg.memory_budget(half + 4 * model_bytes(model)):  # gradients that are returned, Adam's two states
            loss, gradients = loss_and_gradients(model, *batches[step % len(batches)])
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        losses.append(loss.item())
    others, kinds = images(200, n, seed=1)
    logits = np.concatenate([model(tg.asarray(others[i : i + 50])).numpy() for i in range(0, 200, 50)])
    right = float((logits.argmax(axis=1) == kinds).mean())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {right:.1%} of 200 new pictures are told")
    if options.small:
        example.check(losses[-1] < 0.7 * losses[0], "few pictures are learned by heart")
    else:
        example.check(right > 0.9, "new pictures are told")
    if options.picture:
        draw(options.picture, losses, others, kinds, logits.argmax(axis=1), taken, m.peak_bytes - there)


def model_bytes(model: nn.Layer) -> int:
    return sum(v.size * v.dtype.itemsize + 512 for v in model.trainable_variables)


def draw(path: str, losses: list[float], x: Any, kinds: Any, told: Any, plain: int, budget: int) -> None:
    figure, axes = example.panels(3, height=3.0)
    axes[0].bar(["plain", "in a budget"], [plain / 2**20, budget / 2**20], color=["C1", "C0"])
    axes[0].set(ylabel="peak of a step, MiB")
    axes[1].plot(losses)
    axes[1].set(xlabel="step", ylabel="loss")
    n = x.shape[-1]
    axes[2].imshow(x[:12, 0].reshape(3, 4, n, n).swapaxes(1, 2).reshape(3 * n, 4 * n), cmap="gray")
    for i in range(12):
        color = "C0" if told[i] == kinds[i] else "C3"
        axes[2].text(i % 4 * n + 1, i // 4 * n + 4, KINDS[told[i]], color=color, fontsize=7, backgroundcolor="white")
    example.save(figure, path, axes[2:])


if __name__ == "__main__":
    main()
