"""cuBLAS, called through ctypes: one handle for each thread and device, whose stream and workspace are ours.

CuPy's binding refuses every call while a stream is capturing, in all releases up to 14.2 (cupy/cupy#6290), so products
could be no part of a CUDA graph; and a handle's own workspace is in no account, and another one in each graph
(pytorch/pytorch#83461).  Here eager and captured products are the same call with a workspace of the same size, by
which cuBLAS chooses its kernels: so they have the same bits.

The library is the one that CuPy has loaded; ``TAPEGRAD_CUBLAS`` names another file.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from tapegrad.errors import KernelError

N, T = 0, 1
"""Whether an operand is read transposed."""
COMPUTE_32F, COMPUTE_64F, COMPUTE_32F_FAST_TF32 = 68, 70, 77
R_32F, R_64F, R_16F, C_32F, C_64F, R_16BF = 0, 1, 2, 4, 5, 14
DEFAULT_ALGORITHM = -1
DEFAULT_MATH, NO_HALF_SUMS = 0, 16
"""Modes: the second has no sum of products kept in half precision, which overflows at 65504."""

WORKSPACES = ((9, 32 * 2**20), (0, 4 * 2**20))
"""Bytes of a handle's workspace from a compute capability on, as NVIDIA's manual recommends them."""

_STATUS = {
    1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED",
}  # fmt: skip

_int, _long, _pointer = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
_MATRIX = (_pointer, _int, _int, _long)  # where it is, type, leading dimension, step to the next
_PARAMETERS = {
    "cublasCreate_v2": (ctypes.POINTER(_pointer),),
    "cublasDestroy_v2": (_pointer,),
    "cublasSetStream_v2": (_pointer, _pointer),
    "cublasSetWorkspace_v2": (_pointer, _pointer, ctypes.c_size_t),
    "cublasSetMathMode": (_pointer, _int),
    "cublasGemmStridedBatchedEx": (
        _pointer, _int, _int, _int, _int, _int, _pointer, *_MATRIX, *_MATRIX, _pointer, *_MATRIX, _int, _int, _int,
    ),
}  # fmt: skip
"""The functions of the library that are called, with their parameters (``cublas_api.h``); all return a status."""


class CUBLASError(RuntimeError):
    """cuBLAS returned an error; ``status`` is its number."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"CUBLAS_STATUS_{_STATUS.get(status, status)}")


def require(status: int) -> None:
    """Raise CUBLASError for any status but success."""
    if status:
        raise CUBLASError(status)


class Handle:
    """One thread's handle on one device.  ``multiply(value, ...)`` is ``cublasGemmStridedBatchedEx``."""

    __slots__ = ("_device", "_library", "_workspace", "mode", "multiply", "stream", "value")

    def __init__(self, library: Any, xp: Any, device: Any) -> None:
        self._library, self._device = library, device
        self.multiply = library.cublasGemmStridedBatchedEx
        value = ctypes.c_void_p()
        require(library.cublasCreate_v2(ctypes.byref(value)))
        self.value = value
        self.stream: int | None = None
        """The stream that it works on."""
        self.mode = DEFAULT_MATH
        """The math mode that it uses."""
        self._workspace = fresh_workspace(xp, device)

    def follow(self, stream: int) -> None:
        """Work on a stream, given by its pointer; cuBLAS takes the workspace away with the stream before."""
        require(self._library.cublasSetStream_v2(self.value, stream))
        require(self._library.cublasSetWorkspace_v2(self.value, int(self._workspace.ptr), int(self._workspace.size)))
        self.stream = stream

    def turn(self, mode: int) -> None:
        """Use a math mode, which is not the present one."""
        require(self._library.cublasSetMathMode(self.value, mode))
        self.mode = mode

    def __del__(self, at_exit: Any = sys.is_finalizing) -> None:
        if not at_exit() and getattr(self, "value", None):
            with self._device:
                self._library.cublasDestroy_v2(self.value)


def workspace_bytes(device: Any) -> int:
    """Bytes of workspace that a handle on the device gets."""
    major = int(str(device.compute_capability)[:-1])
    return next(nbytes for least, nbytes in WORKSPACES if major >= least)


class Mine(threading.local):
    """This thread's handles, by device."""

    def __init__(self) -> None:
        self.handles: dict[int, Handle] = {}


mine = Mine()
taken: list[tuple[int, int]] = []  # a device, and what making a handle took of it


def made(xp: Any, device: Any) -> Handle:
    """This thread's handle on a device, which is the current one, at its first use.

    Raises KernelError where there is no cuBLAS, CUBLASError or CuPy's errors where there is no room.
    """
    free = xp.cuda.runtime.memGetInfo()[0]
    handle = mine.handles[device.id] = Handle(load(xp), xp, device)
    taken.append((device.id, max(0, free - xp.cuda.runtime.memGetInfo()[0])))  # other code may have taken some
    return handle


def outside_bytes(device: int) -> int:
    """Bytes that handles and their workspaces have taken from the driver: they are in no pool and no budget."""
    return sum(nbytes for index, nbytes in list(taken) if index == device)


def fresh_workspace(xp: Any, device: Any) -> Any:
    """Memory of the size of a workspace on ``device``, which is the current one."""
    return xp.cuda.Memory(workspace_bytes(device))


@contextmanager
def workspace(device: int, memory: object) -> Iterator[None]:
    """Products of this thread use other memory of the same size as their workspace inside the block."""
    handle = mine.handles.get(device)
    if handle is None:  # no product has run, so none needs a workspace
        yield
        return
    before = handle._workspace
    handle._workspace, handle.stream = memory, None
    try:
        yield
    finally:
        handle._workspace, handle.stream = before, None


@cache
def load(xp: Any) -> Any:
    """The library, with the parameters of its functions.  Raises KernelError saying what to install."""
    try:
        library = _opened(xp)
        for name, parameters in _PARAMETERS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = parameters, _int
    except (ImportError, OSError, RuntimeError, AttributeError) as e:
        raise KernelError(
            f"matmul: cuBLAS cannot be loaded: {e}; install it beside CuPy: pip install nvidia-cublas-cu12 "
            "(CUDA 13: nvidia-cublas), or all of CUDA's libraries with 'cupy-cuda12x[ctk]' (or cupy-cuda13x[ctk]), or "
            "set TAPEGRAD_CUBLAS to the library's file"
        ) from e
    return library


def _opened(xp: Any) -> Any:
    if path := os.environ.get("TAPEGRAD_CUBLAS"):
        return ctypes.CDLL(path)
    xp.cuda.cublas.getVersion  # noqa: B018  (CuPy finds the library and loads it)
    major = xp.cuda.runtime.runtimeGetVersion() // 1000
    return ctypes.CDLL(f"cublas64_{major}.dll" if os.name == "nt" else f"libcublas.so.{major}")
