"""Where CUDA's libraries find no memory outside the pool, room is made and they are asked again."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from cuda_cases import same_bits
from shim import standin

import tapegrad as tg
from tapegrad.device import cublas, oom_retry
from tapegrad.errors import DeviceMemoryError, KernelError

pytestmark = pytest.mark.sampled(1 / 2)

MIB = 2**20
X = np.arange(64.0, dtype="float32").reshape(8, 8)


@pytest.fixture(autouse=True)
def no_handle_yet(cuda, monkeypatch):
    monkeypatch.setattr(cublas, "mine", cublas.Mine())
    monkeypatch.setattr(cublas, "taken", [])
    monkeypatch.setattr(cublas, "WORKSPACES", ((0, 0),))  # what a handle takes by itself is enough here
    gc.collect()


def mebibytes(n: int, device: Any) -> tg.Tensor:
    return tg.zeros(n * MIB // 4, device=device)


@pytest.mark.parametrize("status", [1, 3])
def test_idle_blocks_are_given_back_for_a_handle(cuda, status):
    """They are the pool's, and cuBLAS asks the driver; nothing is dropped for them."""
    standin.configure(memory=16 * MIB, workspace_fails=status)
    x = tg.asarray(X, device=cuda)
    big = mebibytes(14, cuda)
    del big
    assert cuda.usage()[1] >= 14 * MIB
    with tg.memory_budget(15 * MIB) as budget:
        same_bits(x @ x, X @ X)
        assert budget.evictions == 0


@pytest.mark.parametrize("status", [1, 3])
def test_values_are_dropped_for_a_handle(cuda, status):
    standin.configure(memory=26 * MIB, workspace_fails=status)
    x = tg.asarray(X, device=cuda)
    with tg.memory_budget(25 * MIB) as budget:
        with tg.GradientTape() as tape:
            big = mebibytes(2, cuda)
            tape.watch(big)
            h = tg.reshape(big, (64, -1))
            for _ in range(9):
                h = tg.softmax(h)
            same_bits(x @ x, X @ X)
            assert budget.evictions > 0
            loss = tg.sum(h * h)
        assert np.isfinite(tape.gradient(loss, big).numpy()).all()


def test_an_error_tells_of_what_lies_outside_the_pool(cuda):
    x = tg.asarray(X, device=cuda)
    x @ x
    assert cublas.outside_bytes(0) == 8 * MIB and cublas.outside_bytes(1) == 0
    standin.configure(memory=16 * MIB)
    with pytest.raises(DeviceMemoryError, match=rf"{8 * MIB} in cuBLAS's workspaces, outside the pool"):
        mebibytes(12, cuda)


def test_where_nothing_helps_the_error_says_so(cuda):
    standin.configure(memory=16 * MIB)
    x, _held = tg.asarray(X, device=cuda), mebibytes(12, cuda)
    with pytest.raises(DeviceMemoryError, match=r"no room for matmul, .* bytes: .* in use") as caught:
        x @ x
    assert "CUBLAS_STATUS_NOT_INITIALIZED" in str(caught.value.__cause__)


def test_other_errors_are_left_alone(cuda, cupy, monkeypatch):
    x = tg.asarray(X, device=cuda)
    x @ x
    monkeypatch.setattr(standin.blas, "gemmStridedBatchedEx", lambda *a, **k: (_ for _ in ()).throw(
        cupy.cuda.cublas.CUBLASError(13)))  # fmt: skip
    with pytest.raises(cublas.CUBLASError, match="EXECUTION_FAILED"):
        x @ x


class Once:
    """A function that fails the first time."""

    def __init__(self, f: Any, error: Exception) -> None:
        self.f, self.error, self.calls = f, error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise self.error
        return self.f(*args, **kwargs)


def test_a_kernel_whose_code_does_not_fit_is_loaded_again(cuda, cupy, monkeypatch):
    driver = cupy.cuda.driver.CUDADriverError
    once = Once(cupy.RawModule, driver(2, "CUDA_ERROR_OUT_OF_MEMORY: out of memory"))
    monkeypatch.setattr(cupy, "RawModule", once)
    same_bits(tg.sinh(tg.asarray(X * 0, device=cuda)) * 7 - 3, X * 0 - 3)
    assert once.calls == 2
    monkeypatch.setattr(cupy, "RawModule", Once(None, driver(209, "CUDA_ERROR_NO_BINARY_FOR_GPU")))
    with pytest.raises(KernelError, match="NO_BINARY_FOR_GPU"):
        (tg.cosh(tg.asarray(X * 0, device=cuda)) * 9 - 3).numpy()


def test_a_launch_that_finds_no_memory_is_repeated(cuda, cupy):
    driver = cupy.cuda.driver.CUDADriverError
    function = cuda.compile('extern "C" __global__ void seven(int* x) { *x = 7; }', "seven", ())
    x = cuda.empty((1,), np.dtype("int32"))
    once = Once(function, driver(2, "CUDA_ERROR_OUT_OF_MEMORY: out of memory"))
    cuda.launch(once, (1,), (1,), (x,))
    assert once.calls == 2 and cuda.numpy(x)[0] == 7
    with pytest.raises(driver, match="INVALID_HANDLE"):
        cuda.launch(Once(function, driver(400, "CUDA_ERROR_INVALID_HANDLE")), (1,), (1,), (x,))


def test_only_errors_of_memory_count(cupy):
    assert oom_retry.outside(cupy.cuda.cublas.CUBLASError(1)) and oom_retry.outside(cupy.cuda.cublas.CUBLASError(3))
    assert not oom_retry.outside(cupy.cuda.cublas.CUBLASError(7)) and not oom_retry.outside(RuntimeError("status 3"))


def test_another_allocator_is_named_and_nothing_is_claimed_of_its_memory(cuda, cupy):
    memory = cupy.cuda.memory

    def allocate(nbytes):
        if nbytes > 1 << 20:
            raise memory.OutOfMemoryError(nbytes, 0, 0)
        return cupy.cuda.MemoryPointer(memory.Memory(nbytes), 0)

    cuda.empty((1000,), np.dtype("float32"))  # idle bytes in the pool
    with cupy.cuda.using_allocator(allocate):
        with tg.device(cuda):
            assert (tg.ones((64, 64)) @ tg.ones((64, 64))).numpy()[0, 0] == 64
        assert cuda.usage() == (-1, 0)
        with pytest.raises(DeviceMemoryError, match=r"from the allocator .*allocate; .* free on the device") as error:
            cuda.empty((1 << 20,), np.dtype("float32"))
    assert "fragmented" not in str(error.value) and "would fit" not in str(error.value)
    assert cuda.usage()[0] >= 0
