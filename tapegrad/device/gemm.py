"""Matrix products on CUDA: cuBLAS's strided batched product, called directly.

CuPy's own ``matmul`` converts stacks of float16 to float32, refuses stacks of bfloat16 and copies transposed operands
of stacks.  Here a product of any floating dtype is one call wherever one call can say it, and a transposed view is
passed as what it is: memory with a flag.

cuBLAS thinks in columns.  The memory of a row-major ``(r, c)`` matrix is that of a column-major ``(c, r)`` one, its
transpose; so ``out = x @ y`` is asked for as ``out' = y' @ x'``, and "not transposed" means row-major throughout.

How a batch becomes calls: leading dimensions that both operands step through evenly are one dimension (step 0 where an
operand is broadcast).  Where several remain, rows of ``x`` that share one ``y`` are first taken as rows of a taller
matrix.  Where there are still several, either the operands that do not step evenly are copied out, or there is one call
for each index of all dimensions but the longest: whichever is cheaper, a call being worth ``CALL`` bytes of copying.

The dtypes that are not in ``KINDS`` (integers, bool) go to CuPy's ``matmul``.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tapegrad.device.tally import contiguous
from tapegrad.errors import KernelError

KINDS = {
    "float16": ("CUDA_R_16F", "CUBLAS_COMPUTE_32F", np.float32),
    "bfloat16": ("CUDA_R_16BF", "CUBLAS_COMPUTE_32F", np.float32),
    "float32": ("CUDA_R_32F", "CUBLAS_COMPUTE_32F", np.float32),
    "float64": ("CUDA_R_64F", "CUBLAS_COMPUTE_64F", np.float64),
    "complex64": ("CUDA_C_32F", "CUBLAS_COMPUTE_32F", np.complex64),
    "complex128": ("CUDA_C_64F", "CUBLAS_COMPUTE_64F", np.complex128),
}
"""By dtype: what cuBLAS calls it, what it accumulates in, and the type of the factors alpha and beta."""

CALL = 4 * 2**20
"""A call takes as long as moving so many bytes (some 3 microseconds at an A100's 1.5 TB/s)."""

# cuBLAS may add up the parts of a long sum in half precision, which overflows at 65504, unless told not to.
_NO_HALF_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, for which CuPy has no name
_MOST = 2**31 - 1  # sizes are C ints

_one_and_zero = {t: (np.ones((), t), np.zeros((), t)) for t in (np.float32, np.float64, np.complex64, np.complex128)}
_tf32: bool | None = None


def allow_tf32(allow: bool | None = True) -> None:
    """Let float32 products round their operands to 10 bits of fraction, several times as fast; None: ask CUPY_TF32."""
    global _tf32
    _tf32 = allow


def matmul(xp: Any, x: Any, y: Any, out: Any) -> None:
    """``x @ y`` into C-contiguous ``out``: stacks of matrices, of which leading dimensions broadcast.

    ``xp``: CuPy; None: nothing is multiplied, but the copies that it would take are told of (see ``tally``).

    Raises KernelError where cuBLAS is not installed.
    """
    (m, k), n = x.shape[-2:], y.shape[-1]
    kind = KINDS.get(out.dtype.name)
    if kind is None or not x.dtype == y.dtype == out.dtype or max(m, k, n) > _MOST:
        if xp is not None:
            xp.matmul(x, y, out=out)
    elif not k:
        out.fill(0)
    elif out.size and xp is None:
        _product(xp, kind, x, y, out, (m, k, n))
    elif out.size:
        device = out.device
        if device.id == xp.cuda.runtime.getDevice():
            _product(xp, kind, x, y, out, (m, k, n))
        else:
            with device:
                _product(xp, kind, x, y, out, (m, k, n))


class _Stack(NamedTuple):
    """A stack of matrices as cuBLAS is told of it; steps and leading dimension in elements."""

    array: Any  # keeps a copy alive until it has been used
    transposed: bool
    ld: int
    steps: tuple[int, ...]  # for each dimension of the batch


def _product(xp: Any, kind: tuple[Any, ...], x: Any, y: Any, out: Any, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    batch = out.shape[:-2]
    a, b = _stack(xp, x, batch), _stack(xp, y, batch)
    dims = _joined(batch, a.steps, b.steps)
    if len(dims) > 1 and not a.transposed and dims[-1][1:] == (m * a.ld, 0) and m * dims[-1][0] <= _MOST:
        m *= dims.pop()[0]
    if len(dims) > 1:
        uneven = [len(_joined(batch, stack.steps)) > 1 for stack in (a, b)]
        copied = sum(prod(batch) * prod(s.array.shape[-2:]) for s, copy in zip((a, b), uneven) if copy)
        calls = prod(count for count, *_ in dims) // max(dims)[0]
        if 2 * copied * out.itemsize < (calls - 1) * CALL:
            m = sizes[0]
            a, b = (_spread(xp, stack, batch) if copy else stack for stack, copy in zip((a, b), uneven))
            dims = _joined(batch, a.steps, b.steps)
    if xp is None:  # all copies are told of by now
        return
    call = _caller(xp, kind, (m, k, n), a, b, out)
    steps_out = [m * n * prod(count for count, *_ in dims[i + 1 :]) for i in range(len(dims))]
    longest = max(range(len(dims)), key=lambda i: dims[i][0], default=0)
    inner = (*dims.pop(longest), steps_out.pop(longest)) if dims else (1, 0, 0, m * n)
    for index in np.ndindex(*(count for count, *_ in dims)):
        at_a = sum(i * step for i, (_, step, _) in zip(index, dims))
        at_b = sum(i * step for i, (_, _, step) in zip(index, dims))
        call(inner, at_a, at_b, sum(i * step for i, step in zip(index, steps_out)))


def _caller(xp: Any, kind: tuple[Any, ...], sizes: tuple[int, int, int], a: _Stack, b: _Stack, out: Any) -> Any:
    """A function that makes one call, for ``(count, steps of a, b and out)`` and where each begins, in elements.

    CuPy's binding sets the handle's stream to the current one in every call, so nothing is to be done about streams.
    """
    cublas = _library(xp)
    handle = _handle(xp, out.device)
    type_name, compute_name, factor = kind
    kept = cublas.getMathMode(handle) if out.itemsize == 2 else None
    if out.dtype == np.float32 and _may_use_tf32():
        compute_name += "_FAST_TF32"
    dtype, compute = getattr(xp.cuda.runtime, type_name), getattr(cublas, compute_name)
    flags = (cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T)
    one, zero = (number.ctypes.data for number in _one_and_zero[factor])
    m, k, n = sizes
    width = out.itemsize
    at = [stack.data.ptr for stack in (a.array, b.array, out)]

    def call(inner: tuple[int, int, int, int], at_a: int, at_b: int, at_out: int) -> None:
        count, step_a, step_b, step_out = inner
        if kept is not None:
            cublas.setMathMode(handle, kept | _NO_HALF_SUMS)
        try:
            cublas.gemmStridedBatchedEx(
                handle, flags[b.transposed], flags[a.transposed], n, m, k,
                one, at[1] + at_b * width, dtype, b.ld, step_b, at[0] + at_a * width, dtype, a.ld, step_a,
                zero, at[2] + at_out * width, dtype, n, step_out, count, compute, cublas.CUBLAS_GEMM_DEFAULT,
            )  # fmt: skip
        finally:
            if kept is not None:
                cublas.setMathMode(handle, kept)

    return call


class _Seen(threading.local):
    """The devices for which this thread has a handle."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_seen = _Seen()
_workspaces: list[tuple[int, int]] = []  # a device, and what making a handle took of it


def outside_bytes(device: int) -> int:
    """Bytes that cuBLAS has taken from the driver for its handles on a device.

    They are in no pool and no budget: each thread that multiplies has a handle of its own, and CuPy's binding cannot
    give a handle a workspace (``cublasSetWorkspace``), which every change of streams would take away again.
    """
    return sum(nbytes for index, nbytes in list(_workspaces) if index == device)


def _handle(xp: Any, device: Any) -> int:
    """This thread's handle; the first time it is made, and what it takes is noted."""
    if device.id in _seen.devices:
        return device.cublas_handle
    free = xp.cuda.runtime.memGetInfo()[0]
    found: int = device.cublas_handle
    _workspaces.append((device.id, max(0, free - xp.cuda.runtime.memGetInfo()[0])))  # or what others took just then
    _seen.devices.add(device.id)
    return found


def _stack(xp: Any, x: Any, batch: tuple[int, ...]) -> _Stack:
    """How cuBLAS reads ``x``; what it cannot read is copied, though not what broadcasting repeats along the batch."""
    lead = x.ndim - 2
    found = _layout(x)
    if found is None:
        once = tuple(slice(0, 1) if not stride else slice(None) for stride in x.strides[:lead])
        x = contiguous(xp, x[once])
        found = False, x.shape[-1]
    steps = [0 if length == 1 else stride // x.itemsize for length, stride in zip(x.shape[:lead], x.strides)]
    return _Stack(x, *found, (*[0] * (len(batch) - lead), *steps))


def _layout(x: Any) -> tuple[bool, int] | None:
    """Whether the memory of ``x`` holds the transposes, and the leading dimension; None if cuBLAS cannot read it."""
    width = x.itemsize
    for stride, length in zip(x.strides, x.shape):
        if length > 1 and (stride < 0 or stride % width):
            return None
    (r, c), (pitch_r, pitch_c) = x.shape[-2:], x.strides[-2:]
    rows, columns = (r, pitch_r // width), (c, pitch_c // width)
    for transposed, (length, stride), (others, pitch) in ((False, columns, rows), (True, rows, columns)):
        pitch = pitch if others > 1 else length  # the stride of a dimension of length 1 says nothing
        if (length == 1 or stride == 1) and length <= pitch <= _MOST:
            return transposed, pitch
    return None


def _joined(batch: tuple[int, ...], *steps: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The dimensions of a batch, each with its steps, those that all operands step through evenly made one."""
    dims: list[tuple[int, ...]] = []
    for count, *own in zip(batch, *steps):
        if count == 1:
            continue
        if dims and all(outer == count * step for outer, step in zip(dims[-1][1:], own)):
            dims[-1] = (dims[-1][0] * count, *own)
        else:
            dims.append((count, *own))
    return dims


def _spread(xp: Any, stack: _Stack, batch: tuple[int, ...]) -> _Stack:
    """The same with every matrix of the batch in memory."""
    x = stack.array
    return _stack(xp, contiguous(xp, (np if xp is None else xp).broadcast_to(x, (*batch, *x.shape[-2:]))), batch)


def _may_use_tf32() -> bool:
    return os.environ.get("CUPY_TF32") == "1" if _tf32 is None else _tf32


@cache
def _library(xp: Any) -> Any:
    """CuPy's binding of cuBLAS, which loads the library.  Raises KernelError saying what to install."""
    try:
        return xp.cuda.cublas
    except (ImportError, OSError, RuntimeError) as e:
        raise KernelError(
            f"matmul: cuBLAS cannot be loaded: {e}; install it beside CuPy: pip install nvidia-cublas-cu12 "
            "(CUDA 13: nvidia-cublas), or all of CUDA's libraries with 'cupy-cuda12x[ctk]' (or cupy-cuda13x[ctk])"
        ) from e
