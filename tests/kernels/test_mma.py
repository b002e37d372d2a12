"""Products on tensor cores (``kernels/mma.cuh``): fragments from memory and from sums, as the host emulates them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from shim import nvrtc

from tapegrad.device.kernel import options

pytestmark = pytest.mark.sampled(1 / 6)

WARPS = 2
TEXT = f"""#include "mma.cuh"
constexpr int DEPTH = tg_fragment<E>::DEPTH, PAD = 16 / sizeof(E), WARPS = {WARPS};
__device__ void fill(E* to, const S* from, int rows, int width) {{
    for (int i = threadIdx.x; i < rows * width; i += 32 * WARPS) {{
        to[i / width * (width + PAD) + i % width] = tg_operand<E>::from(from[i]);
    }}
}}
__device__ void tell(float* to, const float (&sums)[2][4]) {{
    for (int n = 0; n < 2; ++n)
        for (int r = 0; r < 4; ++r) {{
            const int row = threadIdx.x / 32 * 16 + tg_sum_row(tg_lane(), r);
            to[row * 16 + 8 * n + tg_sum_column(tg_lane(), r)] = sums[n][r];
        }}
}}
// once = a b' and twice = (the first DEPTH columns of a b') c, for each warp's 16 rows of a
extern "C" __global__ void products(const S* a, const S* b, const S* c, float* once, float* twice) {{
    __shared__ __align__(16) E left[16 * WARPS * (DEPTH + PAD)], right[16 * (DEPTH + PAD)], last[DEPTH * (16 + PAD)];
    fill(left, a, 16 * WARPS, DEPTH);
    fill(right, b, 16, DEPTH);
    fill(last, c, DEPTH, 16);
    __syncthreads();
    unsigned int x[4], y[2][2];
    float sums[2][4] = {{}}, more[2][4] = {{}};
    tg_load_a(x, left + threadIdx.x / 32 * 16 * (DEPTH + PAD), DEPTH + PAD);
    tg_load_b(y, right, DEPTH + PAD);
    for (int n = 0; n < 2; ++n) tg_mma<E>(sums[n], x, y[n]);
    tell(once, sums);
    tg_sums_as_a<E>(x, sums);
    tg_load_b_turned(y, last, 16 + PAD);
    for (int n = 0; n < 2; ++n) {{
        tg_mma<E>(more[n], x, y[n]);
        tg_mma<E>(more[n], x, y[n]);  // sums are added to
    }}
    tell(twice, more);
}}
extern "C" __global__ void roundings(const float* x, unsigned int* y) {{
    const int i = threadIdx.x;
    if constexpr (sizeof(E) == 4) {{
        y[i] = tg_to_tf32(x[i]).bits;
    }} else {{
        y[i] = tg_pair<E>(x[i], x[(i + 1) % blockDim.x]);
    }}
}}"""
KINDS = {
    "float16": ("tg_float16", np.dtype("float16")),
    "bfloat16": ("tg_bfloat16", np.dtype(ml_dtypes.bfloat16)),
    "tf32": ("tg_tf32", np.dtype("float32")),
}


def macros(kind):
    return (f"-DE={KINDS[kind][0]}", f"-DS=tg_{KINDS[kind][1].name}")


def products(device, kind, given=None):
    """What the kernel gives, and what it should."""
    dtype, rng = KINDS[kind][1], np.random.default_rng(0)
    depth = 8 if kind == "tf32" else 16
    a, b, c = (rng.integers(-2, 3, s).astype(dtype) for s in ((16 * WARPS, depth), (16, depth), (depth, 16)))
    once, twice = (np.full((16 * WARPS, 16), np.nan, np.float32) for _ in range(2))
    function = device.compile(TEXT, "products", (*(given or options()), *macros(kind)))
    function((1,), (32 * WARPS,), (a, b, c, once, twice))
    a, b, c = (x.astype(np.float32) for x in (a, b, c))
    return (once, twice), (a @ b.T, 2 * (a @ b.T)[:, :depth] @ c)


NUMBERS = np.array([1, -1, 0, 1 + 2**-9, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11, 65504, 65520, 1e38, 3.4028235e38,
                    1e-7, np.inf, -np.inf, np.nan, 3.14159265], np.float32)  # fmt: skip


def roundings(device, kind):
    found = np.zeros(NUMBERS.size, np.uint32)
    device.compile(TEXT, "roundings", (*options(), *macros(kind)))((1,), (NUMBERS.size,), (NUMBERS, found))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_products(kind, watched):
    for found, wanted in zip(*products(watched, kind), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_pairs_are_rounded(kind, watched):
    with np.errstate(over="ignore"):
        wanted = np.stack([NUMBERS, np.roll(NUMBERS, -1)], axis=1).astype(KINDS[kind][1])
    found = roundings(watched, kind).view(KINDS[kind][1]).reshape(-1, 2)
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


def test_tf32_keeps_ten_bits(watched):
    found = roundings(watched, "tf32").view(np.float32)
    bits = np.frexp(NUMBERS.astype(np.float64))
    with np.errstate(invalid="ignore"):
        wanted = np.ldexp(np.trunc(np.abs(bits[0]) * 2048 + 0.5) / 2048 * np.sign(NUMBERS), bits[1])
    wanted[10] = np.inf  # beyond the largest
    np.testing.assert_array_equal(found, wanted.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("kind", "form"), [("float16", "HMMA.16816.F32 "), ("bfloat16", "HMMA.16816.F32.BF16 "),
                                            ("tf32", "HMMA.1688.F32.TF32 ")])  # fmt: skip
def test_machine_code_multiplies_on_tensor_cores(kind, form, arch):
    compiled = nvrtc.compile(TEXT, (*options(), *macros(kind)), arch)
    code = nvrtc.sass(compiled)
    assert code.count(form) == 6
    assert code.count("LDSM.16.M88.4") == 2 and code.count("LDSM.16.MT88.4") == (kind != "tf32")
    assert all(spilled == 0 for _, spilled, _ in compiled.usage.values())
