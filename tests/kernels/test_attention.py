"""The kernels of attention against the blocks that the CPU computes, in float64."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from tapegrad.device.numerics import attention as blocks
from tapegrad.device.numerics.attention import Weighting
from tapegrad.ops.products import _cuda_attention as cuda

FLOATS = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
TOLERANCE = {"float32": 5e-5, "float64": 1e-11, "float16": 4e-3, "bfloat16": 3e-2}
STREAM = (2**70 + 5, 3)

# lead, queries, heads, keys, groups, width of keys, of values
SHAPES = [
    ((2,), 5, 4, 7, 2, 3, 6),
    ((), 70, 2, 40, 1, 8, 16),
    ((3,), 33, 2, 65, 2, 16, 20),
    ((1, 2), 9, 1, 130, 1, 40, 33),
    ((1,), 3, 2, 5, 1, 130, 100),
    ((1,), 10, 1, 20, 1, 256, 256),
]
RULES = [
    Weighting(0.3, causal, masked, blind, p)
    for causal, masked, blind, p in [
        (False, "none", "zero", 0.0), (True, "none", "zero", 0.0), (False, "see", "zero", 0.0),
        (True, "see", "mean", 0.0), (False, "add", "mean", 0.0), (True, "add", "zero", 0.25),
        (False, "none", "zero", 0.5),
    ]
]  # fmt: skip


def draw(shape, how, number, dtype):
    """Operands with the heads where they lie, and the mask."""
    lead, t, h, s, g, k, w = shape
    rng = np.random.default_rng(number)
    made = [rng.normal(size=(*lead, *own)).astype(dtype) for own in ((t, h, k), (s, g, k), (s, g, w), (t, h, w))]
    own = ([1, h][number % 2], [t, 1][number // 2 % 2], s)
    front = lead if number % 3 else (1,) * len(lead)
    mask = np.zeros((), bool)
    if how.masked == "see":
        mask = rng.random((*front, *own)) < 0.6
        mask[..., 0, :] = False
    elif how.masked == "add":
        mask = rng.normal(size=(*front, *own)).astype(dtype)
        mask[..., :2] = -np.inf
    return made[:3], mask, made[3]


CASES = list(enumerate([*itertools.product(SHAPES[:3], RULES), *itertools.product(SHAPES[3:], RULES[:2])]))
"""Each set of widths, dtypes and draws is a compilation: wide heads are tried by two rules."""


def compare(found, expected, dtype, what):
    expected = np.asarray(expected, np.float64)
    size = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=0, atol=TOLERANCE[np.dtype(dtype).name] * size, err_msg=what
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: np.dtype(d).name)
def test_values_and_derivatives(emulated, dtype):
    for number, (shape, how) in CASES if dtype is np.float32 else [CASES[8], CASES[12], CASES[17]]:
        (q, k, v), mask, g = draw(shape, how, number, dtype)
        wide = [x.astype(np.float64) for x in (q, k, v)]
        mask_64 = mask.astype(np.float64) if how.masked == "add" else mask
        given, params = (q, k, v, mask), {"how": how, "key": STREAM[0], "counter": STREAM[1]}
        out, expected = emulated.empty(g.shape, g.dtype), np.empty(g.shape)
        cuda.forward(emulated, *given, out=out, **params)
        blocks.forward(*wide, mask_64, expected, how, *STREAM)
        compare(out, expected, dtype, f"forward of {shape}, {how}")
        pulled = (0, 1, 2, 3) if how.masked == "add" else [(0, 1, 2), (1,), (0, 2)][number % 3]
        size = blocks.elements([x.shape for x in given], pulled)
        out, expected = emulated.empty((size,), g.dtype), np.empty(size)
        cuda.backward(emulated, *given, g, out=out, pulled=pulled, **params)
        blocks.backward(*wide, mask_64, g.astype(np.float64), expected, how, *STREAM, pulled)
        compare(out, expected, dtype, f"backward of {shape}, {how}, {pulled}")
        for of in (0, 1, 3) if how.masked == "add" else (0, 1):
            u = np.random.default_rng(number).normal(size=given[of].shape).astype(dtype)
            out, expected = emulated.empty(g.shape, g.dtype), np.empty(g.shape)
            cuda.tangent(emulated, *given, u, out=out, of=of, **params)
            blocks.tangent(*wide, mask_64, u.astype(np.float64), expected, how, *STREAM, of)
            compare(out, expected, dtype, f"tangent {of} of {shape}, {how}")


def test_operands_as_they_lie(emulated):
    """Heads that were split by a view, and examples that broadcast, are read where they are."""
    how, rng = Weighting(0.5, True, "none", "zero", 0.0), np.random.default_rng(0)
    whole = rng.normal(size=(2, 12, 3 * 4 * 8)).astype(np.float32)
    q, k, v = (part.reshape(2, 12, 4, 8) for part in np.split(whole, 3, axis=-1))
    k = np.broadcast_to(k[:1], k.shape)
    for views in ((q, k, v), (q[:, ::-1], k[..., ::2], v.swapaxes(1, 2).copy().swapaxes(1, 2)[..., ::-1])):
        q1, k1, v1 = views if views[1].shape[-1] == views[0].shape[-1] else (views[0][..., :4], views[1], views[2])
        out, expected = emulated.empty(v1.shape, v1.dtype), np.empty(v1.shape)
        cuda.forward(emulated, q1, k1, v1, np.zeros((), bool), out=out, how=how, key=0, counter=0)
        blocks.forward(*(x.astype(np.float64) for x in (q1, k1, v1)), np.zeros(()), expected, how, 0, 0)
        compare(out, expected, np.float32, "views")
