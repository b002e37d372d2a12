"""When a device has no room, registered helpers drop something, and the request is repeated.

Higher layers register them (:func:`helpers`): one drops values, one tells what holds the memory.  A fragmented pool is
given back to the device between two tries, so that what was dropped can be joined.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapegrad.device.types import Namespace
from tapegrad.errors import BudgetError, DeviceError, DeviceMemoryError

if TYPE_CHECKING:
    from tapegrad.device.base import Device

_NO_MEMORY = {
    "CUBLASError": (1, 3),  # making a handle gives NOT_INITIALIZED where its workspace does not fit
    "CUSOLVERError": (1, 2),
    "CuSparseError": (1, 2),
    "CuFFTError": (2,),
    "CUDARuntimeError": (2,),
    "CUDADriverError": (2,),
}
"""The errors of CUDA's libraries that mean a lack of memory outside CuPy's pool, by their status."""

_WORKSPACE = 32 * 2**20
"""A guess of what such a request takes: cuBLAS's workspace on Hopper."""


class OutsideError(MemoryError):
    """A library of CUDA's found no memory for what it takes from the driver itself: a workspace, a kernel's code."""


def outside(error: BaseException) -> OutsideError | None:
    """What an error means if it is one of memory outside the pool; None for all others."""
    status = getattr(error, "status", getattr(error, "result", None))
    if status not in _NO_MEMORY.get(type(error).__name__, ()):
        return None
    return OutsideError(f"{error} (memory outside the pool)")


_KERNEL_FAILED = {700, 702, 710, *range(714, 720)}
"""Statuses of a failed kernel (illegal or misaligned address, assertion, ...): all later calls in the process fail."""


def unusable(error: BaseException, device: Device, kernel: str = "") -> DeviceError | None:
    """Return the exception to raise if ``error`` leaves the process without CUDA; ``kernel``: the one that failed."""
    cuda_error = type(error).__name__ in ("CUDARuntimeError", "CUDADriverError")
    if not cuda_error or getattr(error, "status", None) not in _KERNEL_FAILED:
        return None
    cause = f"kernel {kernel} failed" if kernel else "an earlier kernel failed"
    remedy = "start it anew" if kernel else "start it anew, with TAPEGRAD_CHECK_AT_ONCE=1 to find the kernel"
    return DeviceError(f"{device}: {cause} ({error}), and CUDA is unusable in this process: {remedy}")


_relieve: Callable[[int], bool] = lambda nbytes: False
_explain: Callable[[], str] = lambda: ""


def helpers(free_device_memory: Callable[[int], bool], explain: Callable[[], str]) -> None:
    """``free_device_memory(nbytes)`` evicts about ``nbytes`` or returns False; ``explain()`` says what is alive."""
    global _relieve, _explain
    _relieve, _explain = free_device_memory, explain


def retried(error: MemoryError, device: Device, what: str, nbytes: int, make: Callable[[], object]) -> Any:
    """What ``make()`` returns, after it failed with ``error`` and as often as something can be dropped.

    What lacks memory outside the pool is first tried again with the pool's idle blocks given back.
    Raises DeviceMemoryError (MemoryError) saying what was asked for, what holds the memory, and what would fit.
    """
    try:
        again = isinstance(error, OutsideError)
        if again:
            nbytes = max(nbytes, _WORKSPACE)
        while again or (not isinstance(error, BudgetError) and _relieve(nbytes)):
            again = False
            _let_go(error)
            device.give_back()
            try:
                return make()
            except MemoryError as e:
                error = e
        if isinstance(error, DeviceMemoryError):
            raise error
        explanation = _explain()
        raise DeviceMemoryError(
            f"{device}: no room for {what}, {nbytes} bytes: {device.room(nbytes)}; tg.memory_budget keeps within a "
            f"limit, tg.recompute_grad keeps fewer intermediates\n{explanation}"
        ) from error
    finally:
        del error  # its traceback names this frame: a cycle, and what all the frames hold would wait for the collector


def _let_go(error: BaseException | None) -> None:
    """Drop what the failed attempt had made: a small array in an idle block would keep all of the block."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def other_allocator(cupy: Namespace) -> str | None:
    """Return the name of the allocator set by ``cupy.cuda.set_allocator``; None: CuPy's default pool."""
    allocator = cupy.cuda.get_allocator()
    owner = getattr(allocator, "__self__", None)
    if owner is cupy.get_default_memory_pool():
        return None
    module = getattr(allocator, "__module__", None) or type(owner or allocator).__module__
    return f"{module}.{getattr(allocator, '__qualname__', type(allocator).__name__)}"


def pool_room(cupy: Namespace, nbytes: int, outside_bytes: int, cudnn_bytes: int = 0) -> str:
    """Text for an error: the memory there is on CuPy's current device, after a request for ``nbytes`` failed.

    ``outside_bytes``: what cuBLAS holds beside the pool; ``cudnn_bytes``: what cuDNN's handle does.
    """
    pool, (free, total) = cupy.get_default_memory_pool(), cupy.cuda.runtime.memGetInfo()
    if (name := other_allocator(cupy)) is not None:
        return f"memory comes from the allocator {name}; {free} of {total} bytes are free on the device"
    idle, limit = pool.free_bytes(), pool.get_limit()
    state = "in pieces that are too small (fragmented)" if idle >= nbytes else "(full)"
    fits = max(0, min(free, limit - pool.total_bytes()) if limit else free)
    within = f", {limit} are allowed to the pool" if limit else ""
    beside = f", {outside_bytes} in cuBLAS's workspaces, outside the pool" if outside_bytes else ""
    beside += f", {cudnn_bytes} in cuDNN's handle, outside the pool" if cudnn_bytes else ""
    return (
        f"{pool.used_bytes()} bytes are in use, {idle} idle in the pool {state}, {free} of {total} free on the "
        f"device{within}{beside}; {fits} bytes would fit"
    )
