"""Direct solves with sparse matrices, differentiable in the right-hand side and in the stored values.

With ``x = A^-1 b``: ``db`` is the solve of the cotangent with the transposed matrix, ``dA = -db x'`` sampled at the
stored places.  One factorization (SuperLU's; on CUDA cupyx has the host make it) serves forward and backward: the last
few are kept, each for as long as its values live.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from math import prod
from typing import Any

from tapegrad.core import locks
from tapegrad.core.aval import Shape, ShapedArray, broadcast_shapes, shaped
from tapegrad.core.primitive import Bad, Primitive, Sample, general
from tapegrad.device import dtypes
from tapegrad.device.numerics import scipy
from tapegrad.errors import DTypeError, LinAlgError, ShapeError
from tapegrad.ops.dispatch import barrier, promote
from tapegrad.ops.shape.shape import expand_dims, squeeze
from tapegrad.sparse.array import SparseTensor, asarray
from tapegrad.sparse.products import batching, matrix, sampled_product_p, sparse_matmul_p
from tapegrad.tensor import Tensor

_MOST = 8


class _Factors:
    """SuperLU's factors of the last few matrices, by the arrays they were made of, which never change."""

    def __init__(self) -> None:
        self._lock = locks.lock()
        self._found: OrderedDict[tuple, tuple[Any, tuple]] = OrderedDict()

    def of(self, xp: Any, arrays: tuple[Any, ...], shape: Shape) -> Any:
        """The factors of the matrix with ``arrays`` (values, indices, indptr).  Raises LinAlgError."""
        key = tuple(map(id, arrays))
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
                return found[0]
        factors = _factorized(xp, arrays, shape)
        forget = lambda _: self._found.pop(key, None)
        with self._lock:
            self._found[key] = factors, tuple(weakref.ref(a, forget) for a in arrays)
            if len(self._found) > _MOST:
                self._found.popitem(last=False)
        return factors


_factors = _Factors()


def _factorized(xp: Any, arrays: tuple[Any, ...], shape: Shape) -> Any:
    data, indices, indptr = arrays
    columns = matrix(xp, data, indices, indptr, shape).tocsc()
    columns.sum_duplicates()
    try:
        return scipy.sparse(xp).linalg.splu(columns)
    except RuntimeError as e:
        raise _singular(shape) from e


def _singular(shape: Shape) -> LinAlgError:
    return LinAlgError(f"spsolve: the matrix {shape} is singular; check for empty rows and columns")


def _solve(xp: Any, data: Any, b: Any, indices: Any, indptr: Any, shape: Shape, transposed: bool) -> Any:
    """One matrix, right-hand sides ``(n, k)``."""
    return _factors.of(xp, (data, indices, indptr), shape).solve(b, "T" if transposed else "N")


def _run(xp: Any, data: Any, b: Any, indices: Any, indptr: Any, *, shape: Shape, transposed: bool) -> Any:
    batch = broadcast_shapes("spsolve", data.shape[:-1], b.shape[:-2])
    wide = dtypes.accumulator(b.dtype)
    data, b = data.astype(wide, copy=False), b.astype(wide, copy=False)
    n, k = b.shape[-2:]
    if not prod(batch) * n * k:
        return xp.zeros((*batch, n, k), dtype=wide)
    if data.ndim == 1:
        columns = xp.moveaxis(b, -2, 0)
        found = _solve(xp, data, columns.reshape(n, -1), indices, indptr, shape, transposed)
        return xp.ascontiguousarray(xp.moveaxis(found.reshape((n, *batch, k)), 0, -2))
    data = xp.broadcast_to(data, (*batch, data.shape[-1])).reshape(-1, data.shape[-1])
    b = xp.broadcast_to(b, (*batch, n, k)).reshape(-1, n, k)
    found = [_solve(xp, d, y, indices, indptr, shape, transposed) for d, y in zip(data, b, strict=True)]
    return xp.stack(found).reshape((*batch, n, k))


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


_PLACES = [0, 1, 1, 2, 0, 2], [0, 2, 4, 6]
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
    lift=lambda params, n: params,
    batch=batching("spsolve", 1, 2),
    samples=[
        Sample(_VALUES, (3, 2), *_PLACES, shape=(3, 3), transposed=False),
        Sample(_VALUES, (3, 1), *_PLACES, shape=(3, 3), transposed=True),
        Sample(_VALUES, (2, 3, 1), *_PLACES, shape=(3, 3), transposed=False),
        Sample([_VALUES, _VALUES], (3, 2), *_PLACES, shape=(3, 3), transposed=True),
        Bad(_VALUES, (2, 1), *_PLACES, shape=(3, 3), transposed=False, error=ShapeError),
        Bad((2,), (1, 1), [0, 1], [0, 2], shape=(1, 2), transposed=False, error=ShapeError),
    ],
)  # fmt: skip


def square(op: str, a: Any) -> SparseTensor:
    """``a`` as a square sparse tensor of floats.  Raises ShapeError, DTypeError for integer values."""
    found = asarray(a)
    if found.shape[0] != found.shape[1]:
        raise ShapeError(f"{op}: a matrix {found.shape}; only a square one has an inverse")
    if not dtypes.is_inexact(found.dtype):
        raise DTypeError(f"{op}: values of dtype {found.dtype}; make them floats with astype")
    return found


def spsolve(A: Any, b: Any) -> Tensor:
    """The solution of ``A x = b`` (scipy.sparse.linalg.spsolve), with gradients for ``b`` and the values of ``A``.

    A: a square :class:`SparseTensor`, or a matrix of SciPy's or cupyx'; b: dense, ``(n,)``, ``(n, k)`` or
    ``(..., n, k)``.  The factors, which serve the gradient, too, live as long as the values; the ledger does not count
    them.  Raises ShapeError, DTypeError for integer values of ``A``, LinAlgError.
    """
    a = square("spsolve", A)
    data, x = promote("spsolve", (a.data, b))
    if not x.ndim:
        raise ShapeError("spsolve: the right-hand side is a scalar; need (n,) or (n, k)")
    columns = x if x.ndim > 1 else expand_dims(x, -1)
    params = {"shape": a._stored_shape, "transposed": a._transposed}
    found = barrier(spsolve_p, data, columns, a.indices, a.indptr, **params)
    return found if x.ndim > 1 else squeeze(found, -1)
