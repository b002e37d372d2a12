"""The kernels of convolutions, compiled for the CPU, against the implementation for NumPy and plain loops."""

from __future__ import annotations

from typing import Any

import kernel_modules
import ml_dtypes
import numpy as np
import pytest

from tapegrad.device import traffic
from tapegrad.device.dtypes import accumulator
from tapegrad.device.numerics import blas
from tapegrad.device.numerics.windows import Moves
from tapegrad.ops.products.convolution import conv_in_w_p, conv_in_x_p, conv_p
from tapegrad.ops.products.convolution_bias import conv_bias_p, conv_bias_relu_p

pytestmark = pytest.mark.sampled(1 / 6)

TOLERANCES = {"float32": 2e-6, "float64": 1e-13, "float16": 2e-3, "bfloat16": 1.6e-2, "complex64": 3e-6}
CASES = {
    "3x3": ((2, 5, 9, 8), (7, 5, 3, 3), Moves((1, 1), ((1, 1), (1, 1)), (1, 1), 1)),
    "all at once": ((2, 6, 9, 8), (8, 3, 3, 2), Moves((2, 1), ((1, 2), (0, 1)), (1, 2), 2)),
    "stride over kernel": ((2, 3, 11), (4, 3, 2), Moves((3,), ((0, 0),), (1,), 1)),
    "stride and dilation share a factor": ((1, 4, 15, 9), (5, 4, 3, 2), Moves((4, 3), ((2, 1), (0, 2)), (2, 6), 1)),
    "many rows": ((1, 4, 12, 12), (70, 4, 3, 3), Moves((1, 1), ((1, 1), (1, 1)), (1, 1), 1)),
    "some rows": ((1, 20, 6, 6), (24, 20, 2, 2), Moves((1, 1), ((0, 0), (0, 0)), (1, 1), 1)),
    "depthwise": ((3, 6, 6, 5), (12, 1, 3, 3), Moves((1, 1), ((1, 1), (1, 1)), (1, 1), 6)),
    "depthwise, strided": ((2, 4, 9, 7), (4, 1, 3, 2), Moves((2, 3), ((1, 1), (0, 1)), (2, 1), 4)),
    "depthwise, 5x5": ((2, 3, 9, 8), (6, 1, 5, 5), Moves((1, 2), ((2, 2), (3, 1)), (1, 1), 3)),
    "solid": ((1, 4, 5, 6, 4), (3, 4, 2, 3, 2), Moves((1, 2, 1), ((1, 0), (0, 1), (2, 2)), (1, 1, 2), 1)),
    "line": ((3, 4, 150), (5, 4, 5), Moves((1,), ((2, 2),), (1,), 1)),
    "1x1, as many positions as elements": ((2, 3, 17), (5, 3, 1), Moves((2,), ((8, 8),), (1,), 1)),
    "1x1 strided": ((3, 4, 5, 4), (5, 4, 1, 1), Moves((2, 2), ((0, 0), (0, 0)), (1, 1), 1)),
    "kernel meets padding only": ((1, 3, 2), (2, 3, 2), Moves((1,), ((3, 3),), (4,), 1)),
    "one channel": ((2, 1, 7, 7), (1, 1, 3, 3), Moves((1, 1), ((0, 0), (0, 0)), (1, 1), 1)),
}
FEW = ("one channel", "depthwise", "depthwise, strided", "depthwise, 5x5")
"""Cases with kernels of their own."""


def drawn(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed)
    values = draw.normal(size=shape)
    return (values + 1j * draw.normal(size=shape) if np.dtype(dtype).kind == "c" else values).astype(dtype)


def three(case: str, dtype: Any, lay: Any = lambda x: x, tf32: bool = False) -> list[tuple[Any, ...]]:
    """Each primitive, its operands, the shape of its result, and its parameters."""
    image, kernel, moves = CASES[case]
    moves = moves._replace(tf32=tf32)
    result = image[0], kernel[0], *moves.over(image[2:], kernel[2:]).positions
    x, w, g = (lay(drawn(s, dtype, i)) for i, s in enumerate((image, kernel, result)))
    return [
        (conv_p, (x, w), result, {"moves": moves}),
        (conv_in_x_p, (g, w), image, {"moves": moves, "size": image[2:]}),
        (conv_in_w_p, (x, g), kernel, {"moves": moves, "kernel": kernel[2:]}),
    ]


def found(device: Any, prim: Any, operands: Any, shape: Any, params: Any) -> np.ndarray:
    out = device.empty(shape, operands[0].dtype)
    prim.cuda(device, *operands, out=out, **params)
    return out


def wanted(prim: Any, operands: Any, shape: Any, params: Any) -> np.ndarray:
    wide = np.complex128 if operands[0].dtype.kind == "c" else np.float64
    if params["moves"].tf32 and operands[0].dtype == np.float32:
        operands = [blas.in_tf32(x) for x in operands]
    out = np.empty(shape, wide)
    plain = {**params, "moves": params["moves"]._replace(tf32=False)}
    prim.impl(np, *(x.astype(wide) for x in operands), out=out, **plain)
    return out


def close(got: np.ndarray, expected: np.ndarray, case: str, slack: float = 1.0) -> None:
    wide = expected.dtype
    most = slack * TOLERANCES[got.dtype.name] * np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(got.astype(wide), expected, rtol=0, atol=most, err_msg=case)


OTHERS = ["float64", "float16", ml_dtypes.bfloat16, "complex64"]


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "float32") for case in CASES), *((case, t) for t in OTHERS for case in ("all at once", "depthwise"))],
    ids=str,
)
def test_like_the_cpu(case, dtype, emulated):
    for prim, *rest in three(case, dtype):
        close(found(emulated, prim, *rest), wanted(prim, *rest), f"{case}: {prim.name}")


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case not in FEW])
def test_tensor_cores_multiply_what_is_rounded(case, dtype, emulated):
    """Float32 rounded to 10 bits of fraction, as the CPU rounds it but for ties; numbers of 16 bits as they are."""
    for prim, *rest in three(case, dtype, tf32=True):
        close(found(emulated, prim, *rest), wanted(prim, *rest), f"{case}: {prim.name}", slack=10)


def test_float32_is_rounded_where_that_is_chosen(emulated):
    prim, *rest = three("many rows", "float32")[0]
    _, *chosen = three("many rows", "float32", tf32=True)[0]
    plain, rounded, exact = found(emulated, prim, *rest), found(emulated, prim, *chosen), wanted(prim, *rest)
    error = np.abs(rounded - exact).max()
    assert np.abs(plain - exact).max() * 50 < error < 5e-3 * np.abs(exact).max()


@pytest.mark.parametrize("case", ["all at once", "depthwise, strided", "solid"])
def test_every_access_is_within_bounds(case, watched):
    for prim, *rest in three(case, "float32"):
        close(found(watched, prim, *rest), wanted(prim, *rest), f"{case}: {prim.name}")


LAYS = {
    "every other": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "channels last": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1),
    "backwards": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "broadcast": lambda x: np.broadcast_to(x[:, :1], x.shape),
}


@pytest.mark.parametrize("lay", LAYS)
@pytest.mark.parametrize("case", ["3x3", "depthwise"])
def test_bits_do_not_depend_on_how_operands_lie(case, lay, emulated):
    for prim, operands, *rest in three(case, "float32", LAYS[lay]):
        plain = [np.ascontiguousarray(x) for x in operands]
        np.testing.assert_array_equal(found(emulated, prim, operands, *rest), found(emulated, prim, plain, *rest))


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16, "float64"], ids=str)
@pytest.mark.parametrize("case", ["all at once", "depthwise", "many rows", "1x1 strided"])
def test_what_follows_a_product_gives_the_bits_of_operations_of_their_own(case, dtype, emulated):
    _, (x, w), shape, params = three(case, dtype)[0]
    b = drawn(shape[1:2], dtype, 7)
    y = found(emulated, conv_p, (x, w), shape, params) + b.reshape(-1, *(1,) * (len(shape) - 2))
    np.testing.assert_array_equal(found(emulated, conv_bias_p, (x, w, b), shape, params), y)
    np.testing.assert_array_equal(found(emulated, conv_bias_relu_p, (x, w, b), shape, params), np.maximum(y, 0))
    assert (y < 0).any() and (y > 0).any()


def test_a_sum_in_parts_is_the_sum(emulated, monkeypatch):
    """One part and many differ by rounding alone, and many give the same bits again."""
    results = []
    for blocks in (1, 64, 64):
        monkeypatch.setattr(kernel_modules.convolution, "BLOCKS", blocks)
        monkeypatch.setattr(kernel_modules.convolution, "SHARE", 16)
        (_, _, (prim, *rest)) = three("line", "float32")
        results.append(found(emulated, prim, *rest))
    parts = [n for n, _ in traffic.taken()]
    assert parts[0] < parts[1] == parts[2]
    close(results[1], results[0].astype("float64"), "parts")
    np.testing.assert_array_equal(results[1], results[2])
    assert accumulator(results[0].dtype) == np.float32


@pytest.mark.parametrize("name", ["forward", "in_image", "in_kernel"])
def test_nothing_to_sum_is_zero(name, emulated):
    prim, operands, shape, params = three("3x3", "float32")[["forward", "in_image", "in_kernel"].index(name)]
    if name == "in_kernel":  # no images
        operands = tuple(x[:0] for x in operands)
    else:  # no channels to sum over
        operands = (operands[0][:, :0], operands[1][:, :0] if name == "forward" else operands[1][:0])
    assert not found(emulated, prim, operands, shape, params).any()
