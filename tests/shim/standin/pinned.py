"""Host memory that a device reads and writes by itself."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np

from . import memory, state


class PinnedMemory:
    """Host memory that the device may read by itself."""

    def __init__(self, size: int, flags: int = 0):
        self.ptr, self.size = 0, size
        state.require_device()
        if state.pinned.bytes + size > state.config.pinned:
            raise state.CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")
        self._storage = np.full(max(size, 1), 0xFF, np.uint8)
        if size > 0:
            self.ptr = self._storage.ctypes.data
            state.pinned.bytes += size
            weakref.finalize(self, _unpin, self.ptr, size).atexit = False
            if memory.shim:  # kernels may touch it, too
                memory.shim.register(self.ptr, size)
            state.log("pin", host=((self.ptr, size),))

    def __int__(self) -> int:
        return self.ptr


def _unpin(ptr: int, size: int) -> None:
    state.pinned.bytes -= size
    if memory.shim:
        memory.shim.unregister(ptr)
    state.log("unpin", host=((ptr, size),))


def PinnedMemoryPointer(mem: PinnedMemory, offset: int) -> Any:
    """A place inside pinned memory, with the buffer protocol, ``ptr``, ``mem`` and ``size()``."""
    length = mem.size - offset
    members = {"_type_": ctypes.c_ubyte, "_length_": length, "size": lambda self: length}
    pointer = type("PinnedMemoryPointer", (ctypes.Array,), members).from_buffer(mem._storage, offset)
    pointer.mem, pointer.ptr = mem, mem.ptr + offset
    return pointer


def alloc_pinned_memory(size: int) -> Any:
    """Pinned memory, rounded up to a power of two as CuPy's pool does."""
    return PinnedMemoryPointer(PinnedMemory(1 << max(0, size - 1).bit_length()), 0)


def empty_pinned(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
    """A NumPy array over pinned memory."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    held = alloc_pinned_memory(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.ndarray(shape, dtype, held, order=order)  # type: ignore[call-overload]
