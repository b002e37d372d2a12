"""Direct solves with sparse matrices, differentiable in the right-hand side and in the stored values.

With ``x = A^-1 b``: ``db`` is the solve of the cotangent with the transposed matrix, ``dA = -db x'`` sampled where
values are stored.  One factorization (SuperLU's; on CUDA cupyx has the host make it) serves forward and backward: the
last few are kept, each for as long as its values live.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Protocol

from tapegrad.core import locks
from tapegrad.core.aval import Shape, ShapedArray, broadcast_shapes, shaped
from tapegrad.core.primitive import Bad, Primitive, Sample, general
from tapegrad.device import dtypes
from tapegrad.device.numerics import scipy
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import DTypeError, LinAlgError, ShapeError
from tapegrad.ops.apply import same_params
from tapegrad.ops.dispatch import barrier, promote
from tapegrad.sparse.array import SparseLike, SparseTensor, apply_to_columns, asarray
from tapegrad.sparse.products import batching, by_columns, matrix, sampled_product_p, sparse_matmul_p
from tapegrad.tensor import Tensor, TensorLike

_MOST = 8


class _Factors(Protocol):
    """SuperLU's object."""

    def solve(self, b: Array, trans: str) -> Array: ...


class _Cache:
    """SuperLU's factors of the last few matrices, by the arrays they were made of, which never change."""

    def __init__(self) -> None:
        self._lock = locks.lock()
        self._known: OrderedDict[tuple[int, ...], tuple[_Factors, tuple[weakref.ref[Array], ...]]] = OrderedDict()

    def of(self, xp: Namespace, arrays: tuple[Array, Array, Array], shape: Shape) -> _Factors:
        """The factors of the matrix with ``arrays`` (values, indices, indptr).  Raises LinAlgError."""
        key = tuple(map(id, arrays))
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key][0]
        factors = _factorized(xp, arrays, shape)
        forget = lambda _: self._known.pop(key, None)
        with self._lock:
            self._known[key] = factors, tuple(weakref.ref(a, forget) for a in arrays)
            if len(self._known) > _MOST:
                self._known.popitem(last=False)
        return factors


_cache = _Cache()


def _factorized(xp: Namespace, arrays: tuple[Array, Array, Array], shape: Shape) -> _Factors:
    columns = matrix(xp, *arrays, shape).tocsc()
    columns.sum_duplicates()
    try:
        return scipy.sparse(xp).linalg.splu(columns)
    except RuntimeError as e:
        raise LinAlgError(f"spsolve: the matrix {shape} is singular; check for empty rows and columns") from e


def _run(
    xp: Namespace, data: Array, b: Array, indices: Array, indptr: Array, *, shape: Shape, transposed: bool
) -> Array:
    def solution(values: Array, columns: Array) -> Array:
        return _cache.of(xp, (values, indices, indptr), shape).solve(columns, "T" if transposed else "N")

    return by_columns(xp, "spsolve", solution, data, b, shape[0])


def _infer(
    data: ShapedArray, b: ShapedArray, indices: ShapedArray, indptr: ShapedArray, *, shape: Shape, transposed: bool
) -> ShapedArray:
    if shape[0] != shape[1] or b.ndim < 2 or b.shape[-2] != shape[0]:
        raise ShapeError(f"spsolve: a matrix {shape} and a right-hand side {b.shape}; need (n, n) and (n,) or (n, k)")
    batch = broadcast_shapes("spsolve", data.shape[:-1], b.shape[:-2])
    return shaped((*batch, *b.shape[-2:]), b.dtype, b.device)


def _again(data: Tensor, b: Tensor, indices: Tensor, indptr: Tensor, shape: Shape, transposed: bool) -> Tensor:
    return barrier(spsolve_p, data, b, indices, indptr, shape=shape, transposed=transposed)


def _pull_data(
    ct: Tensor, out: Tensor, data: Tensor, indices: Tensor, indptr: Tensor, *, shape: Shape, transposed: bool
) -> Tensor:
    left = _again(data, ct, indices, indptr, shape, not transposed)
    pair = (out, left) if transposed else (left, out)
    return -barrier(sampled_product_p, *pair, indices, indptr)


def _push_data(
    t: Tensor, out: Tensor, data: Tensor, indices: Tensor, indptr: Tensor, *, shape: Shape, transposed: bool
) -> Tensor:
    moved = barrier(sparse_matmul_p, t, out, indices, indptr, shape=shape, transposed=transposed)
    return -_again(data, moved, indices, indptr, shape, transposed)


_PATTERN = [0, 1, 1, 2, 0, 2], [0, 2, 4, 6]
_VALUES = [3.0, 0.5, 2.5, -0.7, 0.4, -2.0]

spsolve_p: Primitive = general(
    "spsolve",
    impl=_run,
    infer=_infer,
    vjp=[
        _pull_data,
        lambda ct, data, indices, indptr, *, shape, transposed: _again(
            data, ct, indices, indptr, shape, not transposed
        ),
    ],
    jvp=[
        _push_data,
        lambda t, data, indices, indptr, *, shape, transposed: _again(data, t, indices, indptr, shape, transposed),
    ],
    lift=same_params,
    batch=batching("spsolve", 1, 2),
    samples=[
        Sample(_VALUES, (3, 2), *_PATTERN, shape=(3, 3), transposed=False),
        Sample(_VALUES, (3, 1), *_PATTERN, shape=(3, 3), transposed=True),
        Sample(_VALUES, (2, 3, 1), *_PATTERN, shape=(3, 3), transposed=False),
        Sample([_VALUES, _VALUES], (3, 2), *_PATTERN, shape=(3, 3), transposed=True),
        Bad(_VALUES, (2, 1), *_PATTERN, shape=(3, 3), transposed=False, error=ShapeError),
        Bad((2,), (1, 1), [0, 1], [0, 2], shape=(1, 2), transposed=False, error=ShapeError),
    ],
)  # fmt: skip


def square(op: str, a: SparseLike) -> SparseTensor:
    """``a`` as a square sparse tensor of floats.  Raises ShapeError, DTypeError for integer values."""
    matrix = asarray(a)
    if matrix.shape[0] != matrix.shape[1]:
        raise ShapeError(f"{op}: a matrix {matrix.shape}; only a square one has an inverse")
    if not dtypes.is_inexact(matrix.dtype):
        raise DTypeError(f"{op}: values of dtype {matrix.dtype}; make them floats with astype")
    return matrix


def spsolve(A: SparseLike, b: TensorLike) -> Tensor:
    """The solution of ``A x = b`` (scipy.sparse.linalg.spsolve), with gradients for ``b`` and the values of ``A``.

    A: a square :class:`SparseTensor`, or a matrix of SciPy's or cupyx'; b: dense, ``(n,)``, ``(n, k)`` or
    ``(..., n, k)``.  The factors, which serve the gradient, too, live as long as the values; the ledger does not count
    them.  Raises ShapeError, DTypeError for integer values of ``A``, LinAlgError.
    """
    a = square("spsolve", A)
    data, x = promote("spsolve", (a.data, b))
    if not x.ndim:
        raise ShapeError("spsolve: the right-hand side is a scalar; need (n,) or (n, k)")
    return apply_to_columns(spsolve_p, a, data, x)
