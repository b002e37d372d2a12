"""Kernels run on the CPU as they would on a device."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from shim.host import HostModule
from shim.trial import ORDERS, floats, launch, needs_compiler

pytestmark = needs_compiler


REDUCE = r"""
__device__ __forceinline__ float block_sum(float v, float *partial) {
    for (int step = 16; step > 0; step >>= 1) v += __shfl_down_sync(0xffffffffu, v, step);
    if (threadIdx.x % warpSize == 0) partial[threadIdx.x / warpSize] = v;
    __syncthreads();
    v = threadIdx.x < blockDim.x / warpSize ? partial[threadIdx.x] : 0.0f;
    if (threadIdx.x < 32) {
        for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    }
    if (threadIdx.x == 0) partial[0] = v;
    __syncthreads();
    return partial[0];
}
extern "C"
__global__ void
__launch_bounds__(256, 2)
softmax(
    const float *__restrict__ x,
    float *__restrict__ y,
    int n
) {
    __shared__ float partial[32];
    extern __shared__ float row[];
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += row[i] = exp(x[blockIdx.x * n + i]);
    sum = block_sum(sum, partial);
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[blockIdx.x * n + i] = row[n - 1 - (n - 1 - i)] / sum;
}
"""


@pytest.mark.parametrize("check", [False, True])
def test_block_reduction_does_not_depend_on_the_order(rng, check):
    x = rng.standard_normal((5, 300), dtype=np.float32)
    results = []
    for order in ORDERS:
        y = np.zeros_like(x)
        args = (x, y, np.int32(300))
        launch(REDUCE, args, grid=(5,), block=(128,), name="softmax", shared_mem=1200, order=order, check=check)
        results.append(y)
    want = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(results[0], want / want.sum(1, keepdims=True), rtol=1e-5)
    assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes()


def test_order_is_the_threads_order():
    code = (
        """extern "C" __global__ void k(int *y, int *next) { y[atomicAdd(next, 1)] = blockIdx.x * 4 + threadIdx.x; }"""
    )
    seen = {}
    for order in ORDERS:
        y, following = np.zeros(8, np.int32), np.zeros(1, np.int32)
        launch(code, (y, following), grid=(2,), block=(4,), order=order)
        seen[order] = y.tolist()
    assert seen["forward"] == list(range(8)) and seen["reverse"] == list(range(8))[::-1]
    assert sorted(seen["shuffle:7"]) == list(range(8)) and seen["shuffle:7"] not in (seen["forward"], seen["reverse"])
    with pytest.raises(ValueError, match="order"):
        launch(code, (y, following), order="sideways")


@pytest.mark.parametrize("check", [False, True])
def test_atomics(check):
    code = r"""
    extern "C" __global__ void k(int *i, unsigned *u, unsigned long long *l, float *f, double *d,
                                 int *most, int *least) {
        __shared__ int count;
        if (threadIdx.x == 0) count = 0;
        __syncthreads();
        atomicAdd(&count, 1);
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd(i, count);
        atomicAdd(u, 2u);
        atomicAdd(l, 3ull);
        atomicAdd(f, 0.5f);
        atomicAdd(d, 0.25);
        int id = blockIdx.x * blockDim.x + threadIdx.x;
        atomicMax(most, id);
        atomicMin(least, -id);
        int old = atomicExch(i + 1, id), seen = i[2];
        do { old = seen; seen = atomicCAS(i + 2, old, old + 2); } while (seen != old);
    }
    """.replace("seen = i[2]", "seen = atomicCAS(i + 2, 0, 0)")
    i, u, wide = np.zeros(3, np.int32), np.zeros(1, np.uint32), np.zeros(1, np.uint64)
    f, d, most, least = np.zeros(1, np.float32), np.zeros(1), np.zeros(1, np.int32), np.zeros(1, np.int32)
    launch(code, (i, u, wide, f, d, most, least), grid=(4,), check=check)
    assert i[0] == 256 and u[0] == 512 and wide[0] == 768 and f[0] == 128 and d[0] == 64
    assert (most[0], least[0], i[2]) == (255, -255, 512)


def philox(counter, key):
    """Philox4x64-10 in Python's own integers."""
    low = (1 << 64) - 1
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p, q = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = q >> 64 ^ b ^ k0, q & low, p >> 64 ^ d ^ k1, p & low
        k0, k1 = k0 + 0x9E3779B97F4A7C15 & low, k1 + 0xBB67AE8584CAA73B & low
    return a, b, c, d


def test_integer_intrinsics_bitwise(rng):
    code = r"""
    typedef unsigned long long u64;
    extern "C" __global__ void k(u64 *y, u64 k0, u64 k1) {
        u64 i = blockIdx.x * blockDim.x + threadIdx.x, a = i + 1, b = 0, c = 0, d = 0;
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B97F4A7C15ull, k1 += 0xBB67AE8584CAA73Bull) {
            u64 p = __umul64hi(0xD2E7470EE14C6C93ull, a), q = __umul64hi(0xCA5A826395121157ull, c);
            u64 p0 = 0xD2E7470EE14C6C93ull * a, q0 = 0xCA5A826395121157ull * c;
            a = q ^ b ^ k0; b = q0; c = p ^ d ^ k1; d = p0;
        }
        ulonglong2 *out = reinterpret_cast<ulonglong2 *>(y) + 2 * i;
        out[0] = make_ulonglong2(a, b);
        out[1] = make_ulonglong2(c, d);
    }
    extern "C" __global__ void bits(const unsigned *x, unsigned *y) {
        unsigned v = x[threadIdx.x], *out = y + 6 * threadIdx.x;
        out[0] = __brev(v); out[1] = __clz(v); out[2] = __popc(v);
        out[3] = __umulhi(v, 0x9E3779B9u); out[4] = __float_as_uint(__uint_as_float(v));
        out[5] = __byte_perm(v, ~v, 0x5140);
    }
    """
    key = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
    y = np.zeros(4 * 128 + 2, np.uint64)
    y = y[y.ctypes.data % 16 // 8 :][: 4 * 128]
    launch(code, (y, np.uint64(key[0]), np.uint64(key[1])), grid=(2,))
    assert y.reshape(-1, 4).tolist() == [list(philox((i + 1, 0, 0, 0), key)) for i in range(128)]
    reference = np.random.Philox(counter=0, key=np.array(key, np.uint64)).random_raw(512)
    np.testing.assert_array_equal(y, reference)

    x = rng.integers(0, 2**32, 64, dtype=np.uint32)
    x[:2] = 0, 2**32 - 1
    out = np.zeros((64, 6), np.uint32)
    launch(code, (x, out), name="bits")
    for v, row in zip(x.tolist(), out.tolist()):
        b, c = v & 255, v >> 8 & 255
        permuted = b | (255 - b) << 8 | c << 16 | (255 - c) << 24
        assert row == [int(f"{v:032b}"[::-1], 2), 32 - v.bit_length(), v.bit_count(), v * 0x9E3779B9 >> 32, v, permuted]


def test_math_is_overloaded_as_in_cuda():
    code = r"""
    template <class A, class B> struct same { static const bool value = false; };
    template <class A> struct same<A, A> { static const bool value = true; };
    #define FLOAT(e) static_assert(same<decltype(e), float>::value, #e)
    #define DOUBLE(e) static_assert(same<decltype(e), double>::value, #e)
    FLOAT(exp(1.f)); DOUBLE(exp(1.0)); FLOAT(pow(2.f, 3.f)); FLOAT(rsqrt(2.f)); FLOAT(fmax(1.f, 2.f));
    FLOAT(max(1.f, 2.f)); DOUBLE(max(1.0f, 2.0)); FLOAT(fma(1.f, 2.f, 3.f)); FLOAT(erfc(1.f));
    FLOAT(abs(-1.f)); FLOAT(copysign(1.f, -1.f));
    extern "C" __global__ void k(const double *x, double *y, float *z) {
        double v = x[threadIdx.x], *out = y + threadIdx.x * 8;
        out[0] = sinpi(v); out[1] = cospi(v); out[2] = rsqrt(fabs(v));
        out[3] = isnan(v) + 2 * isinf(v) + 4 * isfinite(v) + 8 * signbit(v);
        out[4] = rint(v); out[5] = fmod(v, 1.5); out[6] = max(v, 0.0); out[7] = __double2int_rz(v);
        z[threadIdx.x] = __fdividef(__expf((float)v), 2.0f);
    }
    """
    x = np.array([0.0, -0.0, 0.25, -0.5, 1.0, 1.5, -1.75, 2.0, 7.25, -3.5, np.nan, np.inf, 1e300])
    y, z = np.zeros((13, 8)), np.zeros(13, np.float32)
    launch(code, (x, y, z), block=(13,))
    finite = x[:10]
    np.testing.assert_allclose(y[:10, 0], np.sin(np.pi * finite), atol=1e-14)
    np.testing.assert_allclose(y[:10, 1], np.cos(np.pi * finite), atol=1e-14)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(y[:, 2], 1 / np.sqrt(np.abs(x)))
        np.testing.assert_array_equal(y[:, 5], np.fmod(x, 1.5))
    kinds = np.isnan(x) + 2 * np.isinf(x) + 4 * np.isfinite(x) + 8 * np.signbit(x)
    np.testing.assert_array_equal(y[:, 3], kinds)
    np.testing.assert_array_equal(y[:, 4], np.rint(x))
    np.testing.assert_array_equal(y[:, 6], np.fmax(x, 0))
    assert y[10, 7] == -(2**31) and y[11, 7] == 2**31 - 1 and y[6, 7] == -1
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(z, np.exp(x.astype(np.float32)) / 2, rtol=1e-6)


@pytest.mark.parametrize("check", [False, True])
def test_warp_collectives(check):
    code = r"""
    extern "C" __global__ void k(double *d, long long *l, unsigned *u) {
        int i = threadIdx.x;
        unsigned all = 0xffffffffu;
        d[i] = __shfl_up_sync(all, i * 0.5, 3);
        d[i + 64] = __shfl_down_sync(all, i * 0.5, 2, 8);
        l[i] = __shfl_sync(all, (1ll << 40) + i, 5, 16);
        u[i] = __ballot_sync(all, i % 3 == 0);
        u[i + 64] = __any_sync(all, i == 40) + 2 * __all_sync(all, i < 32) + 4 * __syncthreads_count(i < 10);
        u[i + 128] = __match_any_sync(all, i % 4);
    }
    """
    i = np.arange(64)
    d, wide, u = np.zeros(128), np.zeros(64, np.int64), np.zeros((3, 64), np.uint32)
    launch(code, (d, wide, u), check=check)
    np.testing.assert_array_equal(d[:64] * 2, np.where(i % 32 < 3, i, i - 3))
    np.testing.assert_array_equal(d[64:] * 2, np.where(i % 8 + 2 < 8, i + 2, i))
    np.testing.assert_array_equal(wide, 2**40 + i // 16 * 16 + 5)
    ballots = [sum(1 << lane for lane in range(32) if (first + lane) % 3 == 0) for first in (0, 32)]
    np.testing.assert_array_equal(u[0], np.repeat(ballots, 32))
    np.testing.assert_array_equal(u[1], 40 + np.repeat([2, 1], 32))
    np.testing.assert_array_equal(u[2], 0x11111111 << (i % 4))


def test_every_kind_of_argument():
    code = r"""
    struct Pair { int a; double b; };
    struct Tiny { unsigned char a, b, c; };
    enum Mode { OFF, ON };
    extern "C" __global__ void k(double *y, const float *none, bool flag, signed char c, unsigned short h, int i,
                                 long long l, float f, double d, Pair pair, Tiny tiny, Mode mode, double2 z) {
        double all[] = {none == nullptr, flag, c, h, i, l, f, d, pair.a, pair.b,
                        tiny.a + 10 * tiny.b + 100 * tiny.c, mode, z.x, z.y};
        for (int n = 0; n < 14; n++) y[n] = all[n];
    }
    """

    class Tiny(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint8) for name in "abc"]

    pair = np.zeros((), np.dtype([("a", np.int32), ("b", np.float64)], align=True))
    pair["a"], pair["b"] = 8, 9.5
    y = np.zeros(14)
    scalars = (np.bool_(True), np.int8(-2), np.uint16(3), np.int32(-4), 5, np.float32(6.5), 7.5)
    for struct in (pair, pair[()]):
        y[:] = 0
        launch(code, (y, None, *scalars, struct, Tiny(1, 2, 3), np.int32(1), 12 + 13j), block=(1,))
        assert y.tolist() == [1, 1, -2, 3, -4, 5, 6.5, 7.5, 8, 9.5, 321, 1, 12, 13]
    with pytest.raises(TypeError, match="a str cannot be given"):
        launch(code, ("y", None, *scalars, pair, Tiny(), np.int32(1), 0j), block=(1,))


def test_grid_and_block_have_three_dimensions():
    code = r"""
    extern "C" __global__ void k(int *y) {
        int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        y[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1;
    }
    """
    y = np.zeros(2 * 3 * 4 * 5 * 2 * 3, np.int32)
    launch(code, (y,), grid=(2, 3, 4), block=(5, 2, 3))
    assert (y == 1).all()


def test_two_threads_may_launch_at_once():
    function = HostModule(REDUCE).get_function("softmax")
    x, results = floats(2000).reshape(20, 100) / 2000, [np.zeros((20, 100), np.float32) for _ in range(4)]

    def work(y):
        for _ in range(10):
            function((20,), (64,), (x, y, np.int32(100)), shared_mem=400)

    workers = [threading.Thread(target=work, args=(y,)) for y in results]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    np.testing.assert_allclose(results[0].sum(1), 1, rtol=1e-5)
    assert all(y.tobytes() == results[0].tobytes() for y in results)
