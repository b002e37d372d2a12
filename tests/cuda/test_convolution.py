"""Convolutions on a device: how many kernels, how many bytes, and that every way to run gives the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_cases import same_bits

import tapegrad as tg
from tapegrad.nn import functional as F

pytestmark = pytest.mark.sampled(1 / 2)

LAYERS = {
    "3x3": ((32, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
    "3x3, strided": ((32, 64, 56, 56), (128, 64, 3, 3), {"padding": 1, "stride": 2}),
    "1x1": ((32, 64, 56, 56), (64, 64, 1, 1), {}),
    "depthwise": ((32, 64, 56, 56), (64, 1, 3, 3), {"padding": 1, "groups": 64}),
    "line": ((32, 64, 4096), (64, 64, 5), {"padding": 2}),
    "solid": ((4, 16, 32, 32, 32), (16, 16, 3, 3, 3), {"padding": 1}),
}


def counted(run: Any) -> Any:
    """Kernels and bytes of what ``run`` does, which a dry run counts without computing."""
    return tg.memory.predict_peak(run, budgets=[], least=False)


@pytest.mark.parametrize("layer", LAYERS)
def test_few_kernels_move_few_bytes(cuda, layer):
    """Forward and each gradient: at most 3 kernels, and 1.5 times the bytes of operands and result."""
    image, kernel, options = LAYERS[layer]
    conv = getattr(F, f"conv{len(image) - 2}d")
    x, w = (tg.zeros(s, device=cuda) for s in (image, kernel))
    y = counted(lambda: conv(x, w, **options))
    shape: list[int] = []

    def step(asked: str) -> Any:
        with tg.GradientTape() as tape:
            tape.watch([x, w])
            z = conv(x, w, **options)
        shape[:] = z.shape
        ct = tg.zeros(z.shape, device=cuda)
        return tape.gradient(z, {"x": x, "w": w}[asked], output_gradients=ct)

    counted(lambda: step("x"))
    none = counted(lambda: tg.zeros(tuple(shape), device=cuda))
    nbytes = {"x": x.nbytes, "w": w.nbytes, "y": 4 * int(np.prod(shape))}
    least = sum(nbytes.values())
    assert y.kernel_runs == 1 and y.bytes_moved == least
    for asked, kernels in (("x", 1), ("w", 2)):
        both = counted(lambda asked=asked: step(asked))
        runs = both.kernel_runs - y.kernel_runs - none.kernel_runs
        moved = both.bytes_moved - y.bytes_moved - none.bytes_moved
        assert runs <= kernels and least <= moved <= 1.5 * least, (asked, runs, moved / least)


def test_every_way_to_run_gives_the_same_bits(cuda):
    rng = np.random.default_rng(0)
    x, w, d = (tg.asarray(rng.normal(size=s).astype("float32"), device=cuda)
               for s in ((2, 6, 9, 8), (6, 6, 3, 3), (6, 1, 3, 3)))  # fmt: skip

    def step(x: Any, w: Any, d: Any) -> Any:
        with tg.GradientTape() as tape:
            tape.watch([x, w, d])
            h = tg.tanh(F.conv2d(x, w, padding=1))
            for _ in range(12):
                h = tg.softmax(h)
            h = tg.relu(F.conv2d(h, d, padding=1, groups=6))
            loss = tg.sum(F.conv2d(h, w[:, :, :1, :1]) ** 2)
        return tape.gradient(loss, [x, w, d])

    plain = step(x, w, d)
    captured = tg.function(step)
    ways = [step(x, w, d), tg.recompute_grad(lambda: step(x, w, d))()]
    ways += [captured(x, w, d) for _ in range(3)]
    with tg.measure() as m:
        base = m.live_bytes
        step(x, w, d)
    with tg.memory_budget(base + int((m.peak_bytes - base) * 0.9)) as budget:
        ways.append(step(x, w, d))
    assert budget.evictions and captured.stats.replays
    for way in ways:
        for got, wanted in zip(way, plain, strict=True):
            same_bits(got, wanted)


def with_relu(cuda: Any, *shape: int, **options: Any) -> Any:
    """An image, a layer that ends in relu, and what it says, one operation after the other."""
    rng = np.random.default_rng(1)
    x = tg.asarray(rng.normal(size=shape).astype("float32"), device=cuda)
    with tg.device(cuda):
        layer = tg.nn.Conv2D(6, 3, padding=1, activation="relu", **options)
        layer(x)
        layer.bias.assign(tg.asarray(rng.normal(size=6).astype("float32")))
    apart = lambda x: tg.relu(F.conv2d(x, layer.kernel, padding=1, **options) + tg.reshape(layer.bias, (6, 1, 1)))
    return x, layer, apart


def test_bias_and_relu_are_written_with_the_product(cuda):
    x, layer, apart = with_relu(cuda, 8, 4, 16, 16)
    y = 8 * 6 * 16 * 16 * 4
    least = x.nbytes + layer.kernel.nbytes + layer.bias.nbytes + y
    alone = counted(lambda: layer(x))
    assert (alone.kernel_runs, alone.bytes_moved) == (1, least)
    fused, plain = (counted(lambda f=f: F.max_pool2d(f(x), 2)) for f in (layer, apart))
    assert plain.kernel_runs - fused.kernel_runs == 1
    assert plain.bytes_moved - fused.bytes_moved == 2 * y


@pytest.mark.parametrize("options", [{}, {"groups": 2}])
def test_bias_and_relu_give_the_bits_of_operations_of_their_own(cuda, options):
    x, layer, apart = with_relu(cuda, 2, 4, 9, 8, **options)

    def run(f: Any) -> list[Any]:
        with tg.GradientTape() as tape:
            tape.watch(x)
            loss = tg.sum(f(x) * tg.sin(x[:, :1]))
        return [loss, *tape.gradient(loss, [x, layer.kernel, layer.bias])]

    wanted = run(apart)
    for f in (layer, tg.recompute_grad(layer), tg.function(layer)):
        for one, other in zip(run(f), wanted, strict=True):
            same_bits(one, other)
    along = lambda f: tg.jvp(f, [x], [tg.cos(x)])[1]
    same_bits(along(layer), along(apart))
    rows = lambda f: tg.vmap(lambda one: f(tg.stack([one, one])))(x)
    np.testing.assert_allclose(rows(layer).numpy(), rows(apart).numpy(), rtol=1e-5, atol=1e-5)
