"""Every planted fault is found and named, and the correct twin of its kernel passes."""

from __future__ import annotations

import numpy as np
import pytest

from shim.host import register, unregister
from shim.trial import ORDERS, faulty, floats, launch, needs_compiler

pytestmark = needs_compiler


SHIFT = r"""
extern "C" __global__ void k(const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i + SHIFT];
}
"""


@pytest.mark.parametrize("order", ORDERS)
def test_out_of_bounds(order):
    x, y = floats(64), floats(64)
    launch(SHIFT.replace("SHIFT", "0"), (x, y, np.int32(64)), order=order)
    np.testing.assert_array_equal(x, y)
    text = faulty(SHIFT.replace("SHIFT", "1"), (x, y, np.int32(64)), "out of bounds", order=order)
    assert "kernel k, block (0,0,0), thread (63,0,0)" in text and "it reads 4 bytes" in text
    assert "0 bytes past the end of an allocation of 256" in text and text.endswith("at kernel.cu:4")
    faulty(SHIFT.replace("SHIFT", "(-1)"), (x, y, np.int32(64)), "out of bounds.*4 bytes before", order=order)


def test_out_of_bounds_of_registered_memory():
    class Memory:
        def __init__(self, address):
            self.ptr = address

    class Array:
        def __init__(self, address):
            self.data = Memory(address)

    store, y = floats(128), np.zeros(64, np.float32)
    address = store.ctypes.data
    code = SHIFT.replace("SHIFT", "0")
    faulty(code, (Array(address), y, np.int32(64)), "out of bounds")
    register(address, 256)
    try:
        launch(code, (Array(address), y, np.int32(64)))
        faulty(
            code, (Array(address + 4), y, np.int32(64)), "out of bounds.*0 bytes past the end of an allocation of 256"
        )
    finally:
        unregister(address)
    faulty(code, (Array(address), y, np.int32(64)), "out of bounds")


def test_out_of_bounds_of_shared_memory():
    code = r"""
    extern "C" __global__ void k(int *y, int at) {
        TG_DYNAMIC_SHARED(int, d);
        d[threadIdx.x] = 1;
        __syncthreads();
        y[threadIdx.x] = d[(threadIdx.x + at) % (64 + at)];
    }
    """
    y = np.zeros(64, np.int32)
    launch(code, (y, np.int32(0)), shared_mem=256)
    faulty(code, (y, np.int32(1)), "out of bounds.*offset 256 of 256 bytes of dynamic shared", shared_mem=256)


VECTOR = r"""
extern "C" __global__ void k(const float *x, float *y, int n) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i + 4 <= n) {
        float4 v = *reinterpret_cast<const float4 *>(x + i);
        v.x *= 2; v.y *= 2; v.z *= 2; v.w *= 2;
        *reinterpret_cast<float4 *>(y + i) = v;
    } else {
        for (; i < n; i++) y[i] = x[i] * 2;
    }
}
"""


def aligned_floats(n):
    store = np.zeros(n + 8, np.float32)
    return store[-store.ctypes.data % 16 // 4 :][:n]


@pytest.mark.parametrize("n", [1, 3, 4, 5, 127, 128])
def test_misaligned_vector(n):
    x, y = aligned_floats(n + 1), aligned_floats(n + 1)
    x[:] = floats(n + 1)
    launch(VECTOR, (x, y, np.int32(n)), block=(32,))
    np.testing.assert_array_equal(y[:n], 2 * x[:n])
    assert y[n] == 0
    if n >= 4:
        text = faulty(VECTOR, (x[1:], y, np.int32(n)), "misaligned vector.*float4", block=(32,))
        assert text.endswith("at kernel.cu:5")
        text = faulty(VECTOR, (x, y[1:], np.int32(n)), "misaligned vector", block=(32,))
        assert text.endswith("at kernel.cu:7")


SHARED = r"""
extern "C" __global__ void k(const float *x, float *y) {
    __shared__ float s[64];
    int i = threadIdx.x;
    FILL s[i] = x[i];
    __syncthreads();
    y[blockIdx.x * 64 + i] = s[63 - i];
}
"""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_uninitialised_shared_memory(order, dynamic):
    code = SHARED.replace("__shared__ float s[64]", "TG_DYNAMIC_SHARED(float, s)") if dynamic else SHARED
    x, y = floats(64), floats(64)
    launch(code.replace("FILL", ""), (x, y), shared_mem=256, order=order)
    np.testing.assert_array_equal(y, x[::-1])
    bad = code.replace("FILL", "if (i != 5)")
    text = faulty(bad, (x, y), "uninitialised shared memory", shared_mem=256, order=order)
    assert "thread (58,0,0)" in text and "offset 20 of" in text and text.endswith("at kernel.cu:7")
    launch(bad, (x, y), shared_mem=256, check=False)
    assert np.isnan(y[58])  # unwatched, the poison still shows


def test_shared_memory_is_uninitialised_again_in_the_next_block():
    bad = SHARED.replace("FILL", "if (blockIdx.x == 0)")
    faulty(bad, (floats(64), floats(128)), r"block \(1,0,0\).*uninitialised shared memory", grid=(2,))


@pytest.mark.parametrize("order", ORDERS)
def test_missing_barrier(order):
    x, y = floats(64), floats(64)
    bad = SHARED.replace("FILL", "").replace("__syncthreads();", "")
    text = faulty(bad, (x, y), "missing barrier", order=order)
    assert "static shared memory" in text and ", at kernel.cu:" in text


def test_missing_barrier_before_shared_memory_is_used_again():
    code = r"""
    extern "C" __global__ void k(int *y) {
        __shared__ int s[64];
        for (int round = 0; round < 2; round++) {
            s[threadIdx.x] = threadIdx.x + round;
            __syncthreads();
            y[threadIdx.x] = s[(threadIdx.x + 1) % 64];
            AGAIN
        }
    }
    """
    y = np.zeros(64, np.int32)
    launch(code.replace("AGAIN", "__syncthreads();"), (y,))
    faulty(code.replace("AGAIN", ""), (y,), "missing barrier: it writes offset .* which thread .* read")


def test_missing_warp_barrier():
    code = r"""
    extern "C" __global__ void k(int *y) {
        __shared__ int s[64];
        s[threadIdx.x] = threadIdx.x;
        __syncwarp();
        y[threadIdx.x] = s[threadIdx.x ^ BITS];
    }
    """
    y = np.zeros(64, np.int32)
    launch(code.replace("BITS", "31"), (y,))
    np.testing.assert_array_equal(y, np.arange(64) ^ 31)
    faulty(code.replace("BITS", "32"), (y,), "missing barrier")  # the partner is in another warp
    faulty(code.replace("BITS", "1").replace("__syncwarp();", ""), (y,), "missing barrier")


def test_missing_barrier_on_global_memory():
    code = r"""
    extern "C" __global__ void k(int *y) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        y[i] = i;
        SYNC
        y[(i + STEP) % (blockDim.x * gridDim.x)] += 1;
    }
    """
    y = np.zeros(64, np.int32)
    launch(code.replace("SYNC", "").replace("STEP", "0"), (y,))
    launch(code.replace("SYNC", "__syncthreads();").replace("STEP", "5"), (y,))
    np.testing.assert_array_equal(y, np.arange(64) + 1)
    faulty(code.replace("SYNC", "").replace("STEP", "5"), (y,), "missing barrier.*global allocation of 256 bytes")
    # A barrier orders nothing between blocks.
    bad = code.replace("SYNC", "__syncthreads();").replace("STEP", "16")
    faulty(bad, (y,), r"missing barrier.*of block \(0,0,0\)", grid=(4,), block=(16,))


def test_neighbours_in_one_word_are_no_race():
    code = """extern "C" __global__ void k(unsigned char *y) { y[threadIdx.x] = threadIdx.x; }"""
    y = np.zeros(64, np.uint8)
    launch(code, (y,))
    np.testing.assert_array_equal(y, np.arange(64))


def test_atomic_and_plain_access_race():
    code = """extern "C" __global__ void k(int *y) { atomicAdd(y, 1); if (threadIdx.x == 9) y[0] = 0; }"""
    faulty(code, (np.zeros(1, np.int32),), "missing barrier: it atomically changes offset 0")


@pytest.mark.parametrize("fence", ["__threadfence();", ""])
def test_last_block_needs_a_fence(fence):
    code = r"""
    extern "C" __global__ void k(int *partial, unsigned *done, int *y) {
        __shared__ bool last;
        if (threadIdx.x == 0) {
            partial[blockIdx.x] = blockIdx.x;
            FENCE
            last = atomicAdd(done, 1u) == gridDim.x - 1;
        }
        __syncthreads();
        if (last && threadIdx.x == 0) for (int i = 0; i < gridDim.x; i++) y[0] += partial[i];
    }
    """.replace("FENCE", fence)
    partial, done, y = np.zeros(8, np.int32), np.zeros(1, np.uint32), np.zeros(1, np.int32)
    if fence:
        launch(code, (partial, done, y), grid=(8,), order="shuffle:1")
        assert y[0] == 28
    else:
        faulty(code, (partial, done, y), "missing barrier", grid=(8,))


@pytest.mark.parametrize("check", [False, True])
def test_divergent_barrier(check):
    code = r"""
    extern "C" __global__ void k(float *y) {
        y[threadIdx.x] = 1;
        if (threadIdx.x WHO) __syncthreads();
        else { OTHER
        }
        y[threadIdx.x] = 2;
    }
    """
    y = floats(64)
    launch(code.replace("WHO", ">= 0").replace("OTHER", ""), (y,), check=check)
    text = faulty(code.replace("WHO", "< 63").replace("OTHER", "return;"), (y,), "divergent barrier", check=check)
    assert "waits in __syncthreads at kernel.cu:4, while thread (63,0,0) has exited" in text
    text = faulty(
        code.replace("WHO", "< 63").replace("OTHER", "__syncthreads();"), (y,), "divergent barrier", check=check
    )
    assert "kernel.cu:4" in text and "kernel.cu:5" in text


def test_wrong_argument_size():
    code = """extern "C" __global__ void k(float *y, float a) { y[threadIdx.x] = a; }"""
    y = floats(64)
    launch(code, (y, np.float32(1.5)))
    assert (y == 1.5).all()
    match = "kernel k: wrong argument size of parameter 2: float has 8 bytes, the parameter 4"
    faulty(code, (y, 1.5), match)  # CuPy passes a Python float as a double, which the device reads silently
    faulty(code, (y, 1), "wrong argument size of parameter 2: int has 8 bytes")
    faulty(code, (y,), "wrong number of arguments: 1, it has 2")


def test_wrong_argument_kind():
    code = """extern "C" __global__ void k(long long *y, long long n) { *y = n; }"""
    y = np.zeros(1, np.int64)
    launch(code, (y, 5), block=(1,))
    faulty(code, (y, 5.0), "wrong argument kind of parameter 2")
    faulty(code, (y, y), "wrong argument kind of parameter 2")
