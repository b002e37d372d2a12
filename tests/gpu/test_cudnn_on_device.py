"""Convolutions by cuDNN on a device, where its frontend is installed: values, the same bits in every way, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tapegrad as tg
from tapegrad.device import asdevice, cudnn
from tapegrad.nn import functional as F

pytestmark = pytest.mark.gpu
CASES = {
    "3x3": ((4, 64, 28, 28), (64, 64, 3, 3), {"padding": 1}),
    "strided": ((4, 16, 29, 31), (24, 16, 3, 5), {"padding": (1, 2), "stride": 2}),
    "dilated groups": ((4, 16, 24, 24), (32, 4, 3, 3), {"padding": 2, "dilation": 2, "groups": 4}),
    "depthwise": ((4, 32, 24, 24), (32, 1, 3, 3), {"padding": 1, "groups": 32}),
    "line": ((4, 16, 500), (24, 16, 5), {"padding": 2}),
    "solid": ((2, 8, 10, 11, 12), (16, 8, 3, 3, 3), {"padding": 1}),
    "stride over kernel": ((4, 8, 20, 20), (8, 8, 2, 2), {"stride": 3}),
}
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}


@pytest.fixture
def cuda() -> Iterator[Any]:
    """The first CUDA device, with cuDNN; the default is the CPU's."""
    pytest.importorskip("cupy")
    device: Any = asdevice("cuda")
    if device.cudnn is None:
        pytest.skip(f"cuDNN: {cudnn.said(device)}")
    with tg.device("cpu"):
        yield device


def drawn(device: Any, shape: tuple[int, ...], dtype: str) -> Any:
    values = np.random.default_rng(list(shape)).normal(size=shape).astype(dtype)
    return tg.asarray(values, device=device)


def step(x: Any, w: Any, **options: Any) -> list[Any]:
    with tg.GradientTape() as tape:
        tape.watch([x, w])
        y = getattr(F, f"conv{x.ndim - 2}d")(x, w, **options)
    ct = tg.cos(tg.reshape(tg.arange(y.size, dtype=y.dtype), y.shape))
    return [y, *tape.gradient(y, [x, w], output_gradients=ct)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_our_kernels_and_bits_the_same_each_time(cuda: Any, case: str, dtype: str) -> None:
    *shapes, options = CASES[case]
    x, w = (drawn(cuda, shape, dtype) for shape in shapes)
    with tg.device(cuda):
        found, again = step(x, w, **options), step(x, w, **options)
        captured = tg.function(lambda x, w: step(x, w, **options))
        ways = [again, *(captured(x, w) for _ in range(3)), tg.recompute_grad(lambda: step(x, w, **options))()]
        with cudnn.without(cuda):
            wanted = step(x, w, **options)
    assert captured.stats.replays
    for one, other in zip(found, wanted, strict=True):
        a, b = (t.numpy().astype("float64") for t in (one, other))
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype] * max(1, np.abs(b).max()))
    for way in ways:
        for one, other in zip(way, found, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_plans_are_made_for_what_layers_ask(cuda: Any) -> None:
    x, w = (drawn(cuda, shape, "float32") for shape in CASES["3x3"][:2])
    with tg.device(cuda):
        step(x, w, padding=1)[2].numpy()
    assert not cuda.cudnn.declined


def test_the_ledger_is_the_pool(cuda: Any) -> None:
    x, w = (drawn(cuda, shape, "float16") for shape in CASES["3x3"][:2])
    with tg.device(cuda):
        step(x, w, padding=1)
        before = cuda.usage()[0]
        with tg.measure() as m:
            live = m.live_bytes
            found = step(x, w, padding=1)
            assert cuda.usage()[0] - before == m.live_bytes - live
    assert found and m.scratch_bytes >= 0
