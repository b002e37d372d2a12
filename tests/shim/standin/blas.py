"""cuBLAS's matrix products as cuBLAS defines them: column-major, on addresses, with leading dimensions and strides."""

from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np

from . import capturing, memory, state

N, T, C = 0, 1, 2
HOST, DEVICE = 0, 1
ALGORITHMS = {-1, 99}
#: Computation: the type of alpha and beta for real and for complex operands, then the operand pairs it takes.
COMPUTE = {
    64: ("e", None, {("e", "e")}),
    68: ("f", "F", {("e", "e"), ("e", "f"), ("E", "E"), ("E", "f"), ("f", "f"), ("F", "F")}),
    74: ("f", "F", {("f", "f"), ("F", "F")}),
    70: ("d", "D", {("d", "d"), ("D", "D")}),
}
for _same, _as in ((65, 64), (69, 68), (75, 74), (77, 74), (71, 70)):
    COMPUTE[_same] = COMPUTE[_as]
MESSAGES = {1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 13: "EXECUTION_FAILED", 15: "NOT_SUPPORTED"}
_modes: dict[int, int] = {}
_handles = itertools.count(1)


class CUBLASError(RuntimeError):
    """cuBLAS refused; ``status`` is its number."""

    def __init__(self, status: int):
        self.status = status
        super().__init__(f"CUBLAS_STATUS_{MESSAGES[status]}")


def _dtype(code: int) -> np.dtype:
    if code == 14:
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    if code not in (0, 1, 2, 4, 5):
        raise CUBLASError(15)
    return np.dtype({0: "f", 1: "d", 2: "e", 4: "F", 5: "D"}[code])


def _integers(*values: Any) -> None:
    for value in values:
        if isinstance(value, float) or not hasattr(value, "__index__"):
            raise TypeError(f"an integer is required, not {type(value).__name__}")
        if not -(2**31) <= value < 2**31:
            raise OverflowError("value too large to convert to int")


def _scalar(handle: int, pointer: int, dtype: str) -> Any:
    size = np.dtype(dtype).itemsize
    ours = any(one.ptr <= pointer < one.ptr + one.size for one in list(memory.live.values()))
    if ours != (_modes.get(handle, HOST) == DEVICE):
        # Read on the wrong side: a crash on the host, an illegal address on the device.
        raise state.CUDARuntimeError(700, "cudaErrorIllegalAddress: alpha or beta is not where the pointer mode says")
    return memory.raw(pointer, size).copy().view(dtype)[0]


def _matrices(pointer: int, dtype: np.dtype, rows: int, columns: int, ld: int, stride: int, count: int) -> np.ndarray:
    """The matrices at an address, as (count, rows, columns); every element must be device memory."""
    if not rows or not columns or not count:
        return np.empty((count, rows, columns), dtype)
    last = rows - 1 + (columns - 1) * ld
    extent, item = last + (count - 1) * abs(stride) + 1, dtype.itemsize
    if pointer % item:
        raise CUBLASError(13)
    start = pointer - (item * (count - 1) * -stride if stride < 0 else 0)
    memory.check_range(start, extent * item)
    strides = (stride * item, item, ld * item)
    return np.ndarray((count, rows, columns), dtype, memory.raw(start, extent * item), pointer - start, strides)


def _stored(transposed: int, rows: int, columns: int) -> tuple[int, int]:
    return (rows, columns) if transposed == N else (columns, rows)


def _operand(matrices: np.ndarray, transposed: int, dtype: str) -> np.ndarray:
    values = matrices.astype(dtype)
    if transposed != N:
        values = values.swapaxes(1, 2)
    return values.conj() if transposed == C else values


def _multiply(name: str, handle: int, ta: int, tb: int, m: int, n: int, k: int, alpha: int, a: tuple, b: tuple,
              beta: int, c: tuple, count: int, compute: int, stream: int | None = None,
              workspace: tuple[int, int] | None = None) -> None:  # fmt: skip
    """C = alpha op(A) op(B) + beta C; a, b and c are (address, type, leading dimension, stride)."""
    state.require_device()
    if stream is None:  # CuPy's binding
        capturing.refuse(None, "calling cuBLAS API", NotImplementedError)
    if handle not in _modes:
        raise CUBLASError(1)
    _integers(ta, tb, m, n, k, a[2], b[2], c[2], count)
    if ta not in (N, T, C) or tb not in (N, T, C) or min(m, n, k, count) < 0:
        raise CUBLASError(7)
    shape_a, shape_b = _stored(ta, m, k), _stored(tb, k, n)
    if a[2] < max(1, shape_a[0]) or b[2] < max(1, shape_b[0]) or c[2] < max(1, m):
        raise CUBLASError(7)
    types_ = [_dtype(one[1]) for one in (a, b, c)]
    if compute not in COMPUTE or types_[0] != types_[1]:
        raise CUBLASError(15)
    real, complex_, pairs = COMPUTE[compute]
    if tuple("E" if one.name == "bfloat16" else one.char for one in types_[1:]) not in pairs:
        raise CUBLASError(15)
    scale = complex_ if types_[0].kind == "c" else real
    assert scale is not None
    if not (m and n and count):
        return
    if count > 1 and abs(c[3]) < m + (n - 1) * c[2] and not (abs(c[3]) >= m and abs(c[3]) * count <= c[2]):
        raise CUBLASError(7)  # undefined in cuBLAS: the matrices of C lie over one another
    left = _matrices(a[0], types_[0], *shape_a, a[2], a[3], count)
    right = _matrices(b[0], types_[1], *shape_b, b[2], b[3], count)
    result = _matrices(c[0], types_[2], m, n, c[2], c[3], count)
    with np.errstate(all="ignore"):
        first, second = _scalar(handle, alpha, scale), _scalar(handle, beta, scale)
        # With alpha 0, A and B are not read; with beta 0, C is not: NaN there does no harm.
        total = np.zeros(result.shape, scale)
        if first != 0 and k:
            total = first * (_operand(left, ta, scale) @ _operand(right, tb, scale))
        if second != 0:
            total = total + second * result.astype(scale)
        result[...] = total.astype(types_[2])
    seen = [_extent(one) for one in (left, right, result)]
    own = () if workspace is None else (workspace,)
    reads = (*seen[:2], *([seen[2]] if second != 0 else []))
    state.log("op", stream, name=name, reads=reads, writes=(seen[2],), own=own)


def _extent(array: np.ndarray) -> tuple[int, int]:
    if not array.size:
        return 0, 0
    low, high = np.lib.array_utils.byte_bounds(array)
    return low, high - low


def gemmEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc, computeType,
           algo):  # fmt: skip
    """One product, each matrix of its own type."""
    _check_algorithm(algo)
    _multiply("gemmEx", handle, transa, transb, m, n, k, alpha, (A, Atype, lda, 0), (B, Btype, ldb, 0), beta,
              (C, Ctype, ldc, 0), 1, computeType)  # fmt: skip


def gemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB, beta,
                         C, Ctype, ldc, strideC, batchCount, computeType, algo, **own):  # fmt: skip
    """A batch of products, each matrix of its own type and so many elements from the one before."""
    _check_algorithm(algo)
    _multiply("gemmStridedBatchedEx", handle, transa, transb, m, n, k, alpha, (A, Atype, lda, strideA),
              (B, Btype, ldb, strideB), beta, (C, Ctype, ldc, strideC), batchCount, computeType, **own)  # fmt: skip


def _check_algorithm(algo: int) -> None:
    if algo not in ALGORITHMS and not (0 <= algo <= 23 or 100 <= algo <= 115):
        raise CUBLASError(7)


def _typed(letter: str, code: int, compute: int) -> tuple[Any, Any]:
    def gemm(handle, transa, transb, m, n, k, alpha, A, lda, B, ldb, beta, C, ldc):
        _multiply(f"{letter}gemm", handle, transa, transb, m, n, k, alpha, (A, code, lda, 0), (B, code, ldb, 0), beta,
                  (C, code, ldc, 0), 1, compute)  # fmt: skip

    def batched(handle, transa, transb, m, n, k, alpha, A, lda, strideA, B, ldb, strideB, beta, C, ldc, strideC,
                batchCount):  # fmt: skip
        _multiply(f"{letter}gemmStridedBatched", handle, transa, transb, m, n, k, alpha, (A, code, lda, strideA),
                  (B, code, ldb, strideB), beta, (C, code, ldc, strideC), batchCount, compute)  # fmt: skip

    return gemm, batched


def require_room() -> None:
    """Raise unless a handle's own memory fits on the current device."""
    from .cuda import Device

    if Device().mem_info[0] < state.config.workspace:
        raise CUBLASError(state.config.workspace_fails)


def create() -> int:
    """A new handle, with scalars on the host."""
    state.require_device()
    handle = 0xB1A5_0000 + next(_handles)
    _modes[handle] = HOST
    return handle


def _set_mode(handle: int, mode: int) -> None:
    _modes[handle] = mode


def build() -> types.ModuleType:
    """The module ``cupy.cuda.cublas`` is."""
    module = types.ModuleType("cupy_backends.cuda.libs.cublas")
    vars(module).update(
        CUBLASError=CUBLASError, gemmEx=gemmEx, gemmStridedBatchedEx=gemmStridedBatchedEx,
        create=create, destroy=lambda handle: _modes.pop(handle, None) and None,
        setPointerMode=_set_mode, getPointerMode=lambda handle: _modes.get(handle, HOST),
        setStream=lambda handle, stream: None, getStream=lambda handle: state.stream_pointer(),
        setMathMode=lambda handle, mode: None, getMathMode=lambda handle: 0, getVersion=lambda handle: 120901,
        CUBLAS_OP_N=N, CUBLAS_OP_T=T, CUBLAS_OP_C=C,
        CUBLAS_POINTER_MODE_HOST=HOST, CUBLAS_POINTER_MODE_DEVICE=DEVICE,
        CUBLAS_DEFAULT_MATH=0, CUBLAS_TENSOR_OP_MATH=1, CUBLAS_GEMM_DEFAULT=-1, CUBLAS_GEMM_DEFAULT_TENSOR_OP=99,
        CUBLAS_COMPUTE_16F=64, CUBLAS_COMPUTE_16F_PEDANTIC=65, CUBLAS_COMPUTE_32F=68, CUBLAS_COMPUTE_32F_PEDANTIC=69,
        CUBLAS_COMPUTE_64F=70, CUBLAS_COMPUTE_64F_PEDANTIC=71, CUBLAS_COMPUTE_32F_FAST_16F=74,
        CUBLAS_COMPUTE_32F_FAST_16BF=75, CUBLAS_COMPUTE_32F_FAST_TF32=77,
    )  # fmt: skip
    for letter, code, compute in (("s", 0, 68), ("d", 1, 70), ("c", 4, 68), ("z", 5, 70)):
        gemm, batched = _typed(letter, code, compute)
        setattr(module, f"{letter}gemm", gemm)
        setattr(module, f"{letter}gemmStridedBatched", batched)
    return module
