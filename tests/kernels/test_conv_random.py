"""Convolutions of random shapes and options, compiled for the CPU, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kernels import test_conv_kernels as conv
from tapegrad.device.numerics import blas
from tapegrad.device.numerics.windows import Moves
from tapegrad.ops.products.convolution import conv_in_w_p, conv_in_x_p, conv_p
from tapegrad.ops.products.convolution_bias import conv_bias_relu_p

pytestmark = pytest.mark.sampled(1 / 6)

torch = pytest.importorskip("torch")

DTYPES = [np.dtype(one) for one in ("float16", ml_dtypes.bfloat16, "float32", "float64")]


def drawn(rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...], Moves]:
    """Shapes of an image and a kernel, and how this moves; it fits."""
    while True:
        dims, groups = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 3]))
        channels, outputs = (int(rng.integers(1, most)) for most in (7, 70 if rng.random() < 0.15 else 12))
        size, kernel, strides, low, dilation = (
            tuple(rng.integers(least, most, dims).tolist())
            for least, most in ((2, (40, 10, 6)[dims - 1]), (1, 4), (1, 4), (0, 3), (1, 3))
        )
        moves = Moves(strides, tuple((n, n) for n in low), dilation, groups, bool(rng.random() < 0.5))
        if min(moves.over(size, kernel).positions) > 0:
            images = int(rng.integers(1, 4))
            return (images, channels * groups, *size), (outputs * groups, channels, *kernel), moves


def pytorch(x: Any, w: Any, ct: Any, moves: Moves) -> list[np.ndarray]:
    """The result and both cotangents."""
    x, w = (torch.tensor(a.astype("f8"), requires_grad=True) for a in (x, w))
    low = tuple(n for n, _ in moves.padding)
    f = getattr(torch.nn.functional, f"conv{x.ndim - 2}d")
    y = f(x, w, None, moves.strides, low, moves.dilation, moves.groups)
    y.backward(torch.tensor(ct.astype("f8")))
    return [y.detach().numpy(), x.grad.numpy(), w.grad.numpy()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_like_pytorch(dtype, emulated):
    """Float32 operands have 10 bits of fraction, so that rounding them changes nothing."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        image, kernel, moves = drawn(rng)
        result = (image[0], kernel[0], *moves.over(image[2:], kernel[2:]).positions)
        x, w, ct = (rng.normal(size=shape).astype(dtype) for shape in (image, kernel, result))
        if dtype == np.float32:
            x, w, ct = map(blas.in_tf32, (x, w, ct))
        one = {"moves": moves}
        got = [conv.found(emulated, conv_p, (x, w), result, one),
               conv.found(emulated, conv_in_x_p, (ct, w), image, {**one, "size": image[2:]}),
               conv.found(emulated, conv_in_w_p, (x, ct), kernel, {**one, "kernel": kernel[2:]})]  # fmt: skip
        for found, expected in zip(got, pytorch(x, w, ct, moves), strict=True):
            conv.close(found, expected, f"{image} {kernel} {moves}", slack=2)
        b = rng.normal(size=kernel[0]).astype(dtype)
        clipped = np.maximum(got[0] + b.reshape(-1, *(1,) * (x.ndim - 2)), 0)
        finished = conv.found(emulated, conv_bias_relu_p, (x, w, b), result, one)
        if moves.groups > 1 or max(kernel[2:]) > 1:  # else cuBLAS multiplies, and adds up in another order
            np.testing.assert_array_equal(finished, clipped)
