"""Sparse tensors: a tensor of stored values in a fixed pattern, in compressed rows (CSR)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from tapegrad.core.primitive import Primitive
from tapegrad.core.state import thread, unrecorded
from tapegrad.device import Device, dtypes
from tapegrad.device.types import DType
from tapegrad.engine.realize import array_of
from tapegrad.errors import IndexingError, NotATensorError, ShapeError
from tapegrad.ops.create.creation import arange, ones
from tapegrad.ops.dispatch import SCALARS, barrier, cast, promote, tensor
from tapegrad.ops.elementwise.arithmetic import divide, multiply, negative
from tapegrad.ops.elementwise.complex import conj
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.bounds import require
from tapegrad.ops.index.indexing import scatter_add_p, take
from tapegrad.ops.index.sort import argsort, searchsorted
from tapegrad.ops.shape.shape import expand_dims, permute_dims, reshape, squeeze
from tapegrad.sparse.products import LibraryMatrix, matrix, sparse_matmul_p
from tapegrad.tensor import DTypeLike, Tensor, TensorLike, convert

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class SparseTensor:
    """A matrix whose stored values, ``data``, are a tensor; their pattern (``indices``, ``indptr``) never changes.

    Made by :func:`csr` and :func:`asarray`.  ``data[indptr[i]:indptr[i + 1]]`` are the values of row ``i``, ``indices``
    their columns, in any order; values stored twice are added.  Gradients are asked of ``data``.
    """

    __slots__ = ("_transposed", "data", "indices", "indptr", "shape")
    __array_priority__ = 1001
    __array_ufunc__ = None  # so NumPy arrays return NotImplemented
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Tensor, indices: Tensor, indptr: Tensor, shape: tuple[int, int], transposed: bool) -> None:
        self.data, self.indices, self.indptr = data, indices, indptr
        self.shape = shape[::-1] if transposed else shape
        self._transposed = transposed

    def __reduce__(self) -> tuple[type[SparseTensor], tuple[object, ...]]:
        return SparseTensor, (self.data, self.indices, self.indptr, self._stored_shape, self._transposed)

    @property
    def dtype(self) -> DType:
        """The dtype of the stored values."""
        return self.data.dtype

    @property
    def device(self) -> Device:
        """Where the bytes live."""
        return self.data.device

    @property
    def ndim(self) -> int:
        """Two."""
        return 2

    @property
    def nnz(self) -> int:
        """Number of stored values."""
        return self.data.size

    @property
    def T(self) -> SparseTensor:
        """The transposed matrix, on the same values."""
        return SparseTensor(self.data, self.indices, self.indptr, self._stored_shape, not self._transposed)

    mT = T

    @property
    def _stored_shape(self) -> tuple[int, int]:
        return self.shape[::-1] if self._transposed else self.shape

    def _with(self, data: Tensor) -> SparseTensor:
        return SparseTensor(data, self.indices, self.indptr, self._stored_shape, self._transposed)

    def __repr__(self) -> str:
        return f"tapegrad.sparse.SparseTensor({self.shape}, {self.nnz} values of {self.dtype} on {self.device})"

    def conj(self) -> SparseTensor:
        """The complex conjugate."""
        return self._with(conj(self.data))

    def astype(self, dtype: DTypeLike) -> SparseTensor:
        """The values in another dtype."""
        return self._with(cast(self.data, dtypes.asdtype(dtype)))

    def todense(self) -> Tensor:
        """The whole matrix as a tensor."""
        rows, columns = self._stored_shape
        at = unrecorded(lambda: _rows(self) * columns + self.indices)
        stored = reshape(barrier(scatter_add_p, self.data, at, axis=0, n=rows * columns), (rows, columns))
        return permute_dims(stored, (1, 0)) if self._transposed else stored

    toarray = todense

    def to_library(self) -> LibraryMatrix:
        """The value as SciPy's (on CUDA cupyx') CSR matrix, a copy without gradient."""
        data, indices, indptr = (array_of(t._buffer) for t in (self.data, self.indices, self.indptr))
        with self.device.active():
            stored = matrix(self.device.xp, data, indices, indptr, self._stored_shape, self._transposed)
            return stored.tocsr().copy()

    def sum(self, axis: int | None = None) -> Tensor:
        """The sum of all values, or of each column (``axis`` 0) or row (``axis`` 1)."""
        if axis is None:
            return self.data.sum()
        if axis not in (0, 1, -1, -2):
            raise ShapeError(f"sparse.sum: axis {axis} of a matrix; take 0, 1 or None")
        ours = self.T if axis in (0, -2) else self
        return matmul(ours, ones(ours.shape[1], dtype=self.dtype, device=self.device))

    def diagonal(self) -> Tensor:
        """The elements ``[i, i]``."""
        rows = unrecorded(_rows, self)
        inside = unrecorded(rows.__eq__, self.indices)
        n = self._stored_shape[0]
        return barrier(scatter_add_p, where(inside, self.data, 0), rows, axis=0, n=n)[: min(self.shape)]

    def __matmul__(self, other: TensorLike) -> Tensor:
        if not _is_operand(other):
            raise TypeError(f"sparse @ {type(other).__name__}: there is no product of two sparse matrices; densify one")
        return matmul(self, other)

    def __rmatmul__(self, other: TensorLike) -> Tensor:
        return matmul(other, self) if _is_operand(other) else NotImplemented

    def __mul__(self, other: TensorLike) -> SparseTensor:
        return self._scaled("multiply", multiply, other)

    __rmul__ = __mul__

    def __truediv__(self, other: TensorLike) -> SparseTensor:
        return self._scaled("divide", divide, other)

    def _scaled(self, op: str, f: Callable[[Tensor, TensorLike], Tensor], other: TensorLike) -> SparseTensor:
        if not _is_operand(other):
            return NotImplemented
        factor = other if isinstance(other, SCALARS) else tensor(op, other, self.data)
        if isinstance(factor, Tensor) and factor.ndim:
            raise ShapeError(f"{op}: a sparse matrix {self.shape} by {factor.shape}; take a number, or todense()")
        return self._with(f(self.data, factor))

    def __neg__(self) -> SparseTensor:
        return self._with(negative(self.data))

    def __add__(self, other: SparseTensor) -> SparseTensor:
        if not isinstance(other, SparseTensor):
            return NotImplemented
        if not _same_pattern(self, other):
            raise ShapeError(
                f"add: sparse matrices {self.shape} and {other.shape} store different elements; make both from one "
                "indices and indptr, or add them dense"
            )
        return self._with(self.data + other.data)

    def __sub__(self, other: SparseTensor) -> SparseTensor:
        return self + -other if isinstance(other, SparseTensor) else NotImplemented


SparseLike: TypeAlias = "SparseTensor | LibraryMatrix"
"""What functions accept as a sparse matrix."""


def _is_operand(x: object) -> bool:
    return not isinstance(x, SparseTensor) and not is_foreign(x)


def _rows(a: SparseTensor) -> Tensor:
    """The row of each stored value."""
    return searchsorted(a.indptr, arange(a.nnz, device=a.device), side="right") - 1


def _same_pattern(a: SparseTensor, b: SparseTensor) -> bool:
    if a.shape != b.shape or a._transposed != b._transposed or a.nnz != b.nnz or a.device is not b.device:
        return False
    pairs = ((a.indices, b.indices), (a.indptr, b.indptr))
    return unrecorded(lambda: all(x._buffer is y._buffer or bool((x == y).all()) for x, y in pairs))


def is_foreign(x: object) -> TypeIs[LibraryMatrix]:
    """Whether ``x`` is a sparse matrix of SciPy's or cupyx'."""
    return type(x).__module__.partition(".")[0] in ("scipy", "cupyx") and hasattr(x, "tocsr")


def csr(data: TensorLike, indices: TensorLike, indptr: TensorLike, shape: tuple[int, int]) -> SparseTensor:
    """A sparse tensor from its values and pattern (``scipy.sparse.csr_matrix((data, indices, indptr), shape)``).

    data: ``(nnz,)``; indices: the columns, ``(nnz,)``; indptr: where each row begins and the last ends,
    ``(rows + 1,)``.  Raises ShapeError, and IndexingError for columns or starts out of range, or that are no integers.
    """
    values = tensor("sparse.csr", data)
    columns, starts = _integers("indices", indices, values), _integers("indptr", indptr, values)
    if len(shape) != 2:
        raise ShapeError(f"sparse.csr: shape {tuple(shape)}; a sparse tensor has two dimensions")
    rows, width = int(shape[0]), int(shape[1])
    if values.ndim != 1 or columns.shape != values.shape or starts.shape != (rows + 1,):
        raise ShapeError(
            f"sparse.csr: data {values.shape}, indices {columns.shape} and indptr {starts.shape} for shape "
            f"{(rows, width)}; need (nnz,), (nnz,) and ({rows + 1},)"
        )
    thread.executor.decided(lambda: unrecorded(_check_pattern, columns, starts, width), None)
    return SparseTensor(values, columns, starts, (rows, width), False)


def _check_pattern(columns: Tensor, starts: Tensor, width: int) -> None:
    count = columns.size
    require(columns, 0, width - 1, *_wrong("column {wrong} for {count} columns"))
    require(starts[1:] - starts[:-1], 0, count, *_wrong("indptr decreases, or skips values"))
    require(starts[:1], 0, 0, *_wrong("indptr begins with {wrong}, not 0"))
    require(starts[-1:], count, count, *_wrong("indptr ends with {wrong}, not {high}, the number of values"))


def _wrong(what: str, op: str = "sparse.csr") -> tuple[str, Callable[[int, int, int], IndexingError]]:
    """The name of a check, and its error."""
    text = f"{op}: {what}"
    return text, lambda wrong, low, high: IndexingError(text.format(wrong=wrong, high=high, count=high + 1))


def _integers(name: str, x: TensorLike, beside: Tensor) -> Tensor:
    indices = tensor("sparse.csr", x, beside)
    if not dtypes.is_integer(indices.dtype):
        raise IndexingError(f"sparse.csr: {name} must be integers, got {indices.dtype}")
    return cast(indices, dtypes.int64)


def coo(data: TensorLike, row: TensorLike, col: TensorLike, shape: tuple[int, int]) -> SparseTensor:
    """A sparse tensor from values and the row and column of each, in any order.  Raises ShapeError, IndexingError."""
    values = tensor("sparse.coo", data)
    rows, columns = _integers("row", row, values), _integers("col", col, values)
    if rows.shape != values.shape or values.ndim != 1 or len(shape) != 2:
        raise ShapeError(
            f"sparse.coo: data {values.shape}, row {rows.shape}, col {columns.shape}, shape {tuple(shape)}"
        )
    out_of_range = _wrong("row {wrong} for {count} rows", "sparse.coo")
    thread.executor.decided(lambda: require(rows, 0, shape[0] - 1, *out_of_range), None)
    order = unrecorded(argsort, rows)
    starts = unrecorded(lambda: searchsorted(take(rows, order), arange(shape[0] + 1, device=values.device)))
    return csr(take(values, order), unrecorded(take, columns, order), starts, shape)


def asarray(a: SparseLike, dtype: DTypeLike | None = None) -> SparseTensor:
    """A sparse matrix of SciPy's or cupyx' (any format) as a sparse tensor; the values are copied.

    Raises NotATensorError for anything else, ShapeError unless it has two dimensions.
    """
    if not isinstance(a, SparseTensor):
        if not is_foreign(a):
            raise NotATensorError(
                f"sparse.asarray: {type(a).__name__} is no sparse matrix of SciPy's or cupyx'; use sparse.csr(data, "
                "indices, indptr, shape)"
            )
        if len(a.shape) != 2:
            raise ShapeError(f"sparse.asarray: a sparse array of shape {a.shape}; reshape it to two dimensions")
        rows = a.tocsr()
        a = csr(convert(rows.data), rows.indices, rows.indptr, rows.shape)
    return a if dtype is None else a.astype(dtype)


def matmul(a: TensorLike | SparseLike, b: TensorLike | SparseLike) -> Tensor:
    """The product of a sparse matrix with a dense array, one on either side; the result is dense.

    The sparse one is a :class:`SparseTensor`, or a matrix of SciPy's or cupyx' (whose values are constants); the dense
    one has shape ``(k,)``, ``(k, n)`` or ``(..., k, n)``, and only the stored values get a gradient.
    Raises NotATensorError for none or two sparse operands, ShapeError, and DeviceError on two devices.
    """
    if is_sparse(a) and not is_sparse(b):
        return _product(asarray(a), b)
    if is_sparse(b) and not is_sparse(a):
        x = tensor("sparse.matmul", a)
        return _product(asarray(b).T, x) if x.ndim < 2 else _product(asarray(b).T, x.mT).mT
    raise NotATensorError(
        f"sparse.matmul: wanted one sparse operand, got {type(a).__name__} and {type(b).__name__}; "
        + ("make one dense with todense()" if is_sparse(a) else "use tg.matmul for dense ones")
    )


def is_sparse(x: object) -> TypeIs[SparseLike]:
    """Whether ``x`` is a sparse tensor, or a sparse matrix of SciPy's or cupyx'."""
    return isinstance(x, SparseTensor) or is_foreign(x)


def _product(a: SparseTensor, b: TensorLike) -> Tensor:
    data, x = promote("sparse.matmul", (a.data, b))
    if not x.ndim:
        raise ShapeError("sparse.matmul: the dense operand is a scalar; multiply with *")
    if x.shape[-2 if x.ndim > 1 else 0] != a.shape[1]:
        raise ShapeError(f"sparse.matmul: inner sizes differ: {a.shape} @ {x.shape}")
    return apply_to_columns(sparse_matmul_p, a, data, x)


def apply_to_columns(prim: Primitive, a: SparseTensor, data: Tensor, x: Tensor) -> Tensor:
    """A primitive of a matrix with the values ``data`` and the pattern of ``a``, and of a vector or columns ``x``."""
    columns = x if x.ndim > 1 else expand_dims(x, -1)
    params = {"shape": a._stored_shape, "transposed": a._transposed}
    result = barrier(prim, data, columns, a.indices, a.indptr, **params)
    return result if x.ndim > 1 else squeeze(result, -1)
