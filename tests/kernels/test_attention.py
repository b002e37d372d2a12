"""The kernels of attention against the blocks that the CPU computes, in float64."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from kernel_modules import attention as cuda
from kernel_modules import attention_tiles

from tapegrad.device.numerics import attention as blocks
from tapegrad.device.numerics.attention_cut import Weighting

pytestmark = pytest.mark.sampled(1 / 6)

KINDS = {
    "float32": np.dtype("float32"), "tf32": np.dtype("float32"), "float16": np.dtype("float16"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16), "float64": np.dtype("float64"),
}  # fmt: skip
TOLERANCE = {"float32": 5e-5, "float64": 1e-11, "float16": 4e-3, "tf32": 4e-3, "bfloat16": 3e-2}
STREAM = (2**70 + 5, 3)

# lead, queries, heads, keys, groups, width of keys, of values; each set of widths in whole fragments is a compilation
NARROW = [
    ((2,), 5, 4, 7, 2, 3, 6),
    ((), 70, 2, 40, 1, 8, 16),
    ((3,), 33, 2, 65, 2, 16, 12),
]
WIDE = [((1,), 9, 1, 130, 1, 40, 33), ((1,), 3, 2, 37, 1, 130, 100), ((1,), 10, 1, 20, 1, 256, 256)]
RULES = [
    Weighting(0.3, causal, masked, blind, p)
    for causal, masked, blind, p in [
        (False, "none", "zero", 0.0), (True, "none", "zero", 0.0), (False, "see", "zero", 0.0),
        (True, "see", "mean", 0.0), (False, "add", "mean", 0.0), (True, "add", "zero", 0.25),
        (False, "none", "zero", 0.5),
    ]
]  # fmt: skip
CASES = list(enumerate(itertools.product(NARROW, RULES)))
OF_KIND = {
    "float32": [*CASES, (21, (WIDE[0], RULES[1])), (22, (WIDE[2], RULES[0]))],
    "float16": [*CASES, (23, (WIDE[1], RULES[1])), (24, (WIDE[2], RULES[0]))],
    "tf32": [*(CASES[i] for i in (0, 8, 9, 11, 17)), (25, (WIDE[0], RULES[1]))],
    "bfloat16": [CASES[i] for i in (8, 12, 17)],
    "float64": [CASES[i] for i in (8, 12, 17)],
}


def draw(shape, how, number, dtype):
    """Operands with the heads where they lie, the mask, and the result's cotangent."""
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


def close(found, expected, kind, what):
    size = max(1.0, np.abs(expected).max(initial=0))
    found = np.asarray(found, np.float64)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[kind] * size, err_msg=what)


def compared(device, kind, number, shape, how, forward_mode=True):
    """Values, cotangents and tangents by the kernels and by the blocks of the CPU in float64."""
    dtype, how = KINDS[kind], how._replace(tf32=kind == "tf32")
    (q, k, v), mask, g = draw(shape, how, number, dtype)
    given, params = (q, k, v, mask), {"how": how, "key": STREAM[0], "counter": STREAM[1]}
    exact = [x.astype(np.float64) if x.dtype.kind != "b" else x for x in given]
    plain = how._replace(tf32=False), *STREAM

    def both(what, kernels, reference, size, more, options, **named):
        out, expected = device.empty(size, dtype), np.empty(size)
        kernels(device, *given, *more, out=out, **params, **named)
        reference(*exact, *(x.astype(np.float64) for x in more), expected, *plain, *options)
        close(out, expected, kind, f"{what} of {shape}, {how}")
        return out

    value = both("values", cuda.forward, blocks.forward, g.shape, (), ())
    wide = np.dtype("float64" if kind == "float64" else "float32")
    again, stats, alone = (
        device.empty(g.shape, dtype),
        *(device.empty((*shape[0], *shape[2:0:-1], 2), wide) for _ in "12"),
    )
    cuda.forward(device, *given, out=again, beside=stats, **params)
    cuda.statistics(device, q, k, mask, out=alone, how=how, features=v.shape[-1])
    assert again.tobytes() == value.tobytes() and stats.tobytes() == alone.tobytes()
    pulled = (0, 1, 2, 3) if how.masked == "add" else [(0, 1, 2), (1,), (0, 2)][number % 3]
    size = (blocks.elements([x.shape for x in given], pulled),)
    found = both(f"cotangents {pulled}", cuda.backward, blocks.backward, size, (g,), (pulled,), pulled=pulled)
    again = device.empty(size, dtype)
    cuda.backward(device, *given, g, value, stats, out=again, pulled=pulled, **params)
    assert again.tobytes() == found.tobytes(), "what is known changes no bit"
    for of in () if not forward_mode else (0, 1, 3) if how.masked == "add" else (0, 1):
        u = np.random.default_rng(number).normal(size=given[of].shape).astype(dtype)
        both(f"tangent {of}", cuda.tangent, blocks.tangent, g.shape, (u,), (of,), of=of)


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_derivatives(kind, emulated):
    for number, (shape, how) in OF_KIND[kind]:
        compared(emulated, kind, number, shape, how)


def test_more_rows_of_many_blocks_change_no_bit(emulated, monkeypatch):
    """Where there are blocks enough, each has 128 rows instead of 64."""
    how, found = RULES[3], []
    (q, k, v), mask, g = draw(((), 140, 2, 70, 1, 8, 16), how, 0, np.dtype("float16"))
    for many in (10**9, 1):
        monkeypatch.setattr(attention_tiles, "MANY", many)
        found.append(np.empty_like(g))
        cuda.forward(emulated, q, k, v, mask, out=found[-1], how=how, key=0, counter=0)
    assert found[0].tobytes() == found[1].tobytes()
    compared(emulated, "float16", 0, ((), 140, 2, 70, 1, 8, 16), how, forward_mode=False)


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_no_access_is_forbidden(kind, watched):
    """Several tiles, the last of which are cut: every access in its array, none that a barrier should be between."""
    compared(watched, kind, 0, NARROW[1], RULES[3])


def test_operands_as_they_lie(emulated):
    """Heads that were split by a view, and examples that broadcast, are read where they are."""
    how, rng = Weighting(0.5, True, "none", "zero", 0.0), np.random.default_rng(0)
    whole = rng.normal(size=(2, 12, 3 * 4 * 8)).astype(np.float32)
    q, k, v = (part.reshape(2, 12, 4, 8) for part in np.split(whole, 3, axis=-1))
    k = np.broadcast_to(k[:1], k.shape)
    for views in ((q, k, v), (q[:, ::-1], k[..., ::2], v.swapaxes(1, 2).copy().swapaxes(1, 2)[..., ::-1])):
        q1, k1, v1 = views if views[1].shape[-1] == views[0].shape[-1] else (views[0][..., :4], views[1], views[2])
        for kind in ("float32", "float16"):
            given = [x if kind == "float32" else _as_it_lies(x, np.float16) for x in (q1, k1, v1)]
            out, expected = emulated.empty(v1.shape, KINDS[kind]), np.empty(v1.shape)
            cuda.forward(emulated, *given, np.zeros((), bool), out=out, how=how, key=0, counter=0)
            blocks.forward(*(x.astype(np.float64) for x in given), np.zeros(()), expected, how, 0, 0)
            close(out, expected, kind, "views")


def _as_it_lies(x, dtype):
    """``x`` in another dtype with steps of as many elements."""
    whole = x.base
    while whole.base is not None:
        whole = whole.base
    start = (x.ctypes.data - whole.ctypes.data) // x.itemsize
    flat = whole.reshape(-1).astype(dtype)
    steps = [step // x.itemsize * flat.itemsize for step in x.strides]
    return np.lib.stride_tricks.as_strided(flat[start:], x.shape, steps)
