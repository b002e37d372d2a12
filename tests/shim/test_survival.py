"""Whatever a kernel does, the process lives and the next launch works."""

from __future__ import annotations

import numpy as np
import pytest

from shim.trial import faulty, launch, needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("check", [False, True])
def test_divergent_warp(check):
    code = r"""
    extern "C" __global__ void k(int *y) {
        int i = threadIdx.x;
        if (i < 16) y[i] = __shfl_xor_sync(MASK, i, 1);
    }
    """
    y = np.zeros(64, np.int32)
    launch(code.replace("MASK", "0xffffu"), (y,), check=check)
    np.testing.assert_array_equal(y[:16], np.arange(16) ^ 1)
    bad = code.replace("MASK", "0xffffffffu")
    faulty(
        bad, (y,), r"divergent warp.*a shuffle with mask 0xffffffff at kernel.cu:4, while .* has exited", check=check
    )
    faulty(bad, (y,), "divergent warp.*has no lane 16", block=(16,), check=check)
    faulty(code.replace("MASK", "2u"), (y,), "not in its own mask", check=check)


@pytest.mark.parametrize(
    ("grid", "block", "shared_mem", "match"),
    [
        ((1,), (1025,), 0, "bad block size"),
        ((1,), (65,), 0, "bad block size"),
        ((0,), (1,), 0, "bad grid size"),
        ((1, 65536), (1,), 0, "bad grid size"),
        ((1,), (1,), 300_000, "bad shared memory size"),
    ],
)
def test_bad_sizes(grid, block, shared_mem, match):
    code = """extern "C" __global__ void __launch_bounds__(64, 2) k(int n) {}"""
    faulty(code, (np.int32(1),), match, grid=grid, block=block, shared_mem=shared_mem, check=False)


def test_survives_signals():
    code = r"""
    extern "C" __global__ void k(int *y, int n, long long wild) {
        if (n == 2) *(volatile int *)wild = 1;
        y[threadIdx.x] = 7 / n;
    }
    extern "C" __global__ void deep(int *y, int n) {
        volatile char big[200000];
        big[0] = n;
        *y = big[n];
    }
    """
    y = np.zeros(64, np.int32)
    faulty(code, (y, np.int32(0), 0), "integer division by zero", check=False)
    faulty(code, (y, np.int32(2), 64), "out of bounds: no memory at 0x40", check=False)
    faulty(code, (y, np.int32(0)), "stack overflow", check=False, name="deep")
    launch(code, (y, np.int32(1), 0), check=False)
    assert (y == 7).all()


def test_an_endless_loop_ends(monkeypatch):
    monkeypatch.setattr("shim.host.SECONDS", 0.2)
    code = """extern "C" __global__ void k(volatile int *y) { while (*y == 0) {} }"""
    y = np.zeros(1, np.int32)
    faulty(code, (y,), "hang: still running after 0.2 seconds", check=False)
    y[0] = 1
    launch(code, (y,), check=False)


@pytest.mark.parametrize("check", [False, True])
def test_survives_a_fault(check):
    """A fault leaves half of the block's threads waiting; the next launch knows nothing of them."""
    code = r"""
    extern "C" __global__ void k(int *y, int n) {
        if (threadIdx.x < n) __syncthreads();
        y[threadIdx.x] = threadIdx.x;
    }
    """
    y = np.zeros(512, np.int32)
    for _ in range(3):
        faulty(code, (y, np.int32(300)), "divergent barrier", block=(512,), check=check)
        launch(code, (y, np.int32(512)), block=(512,), check=check)
        np.testing.assert_array_equal(y, np.arange(512))
        y[:] = 0


def test_trap_and_assert():
    code = """extern "C" __global__ void k(int n) { assert(n == 1); if (n == 1) __trap(); }"""
    faulty(code, (np.int32(1),), r"__trap was called, at kernel.cu:1", check=False)
    faulty(code, (np.int32(2),), r"assertion failed: n == 1, at kernel.cu:1", check=False)
