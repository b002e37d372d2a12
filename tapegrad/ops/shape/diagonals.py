"""Diagonals: read, written, summed."""

from __future__ import annotations

from operator import index

from tapegrad.core.aval import Shape, normalize_axis
from tapegrad.errors import AxisError, ShapeError
from tapegrad.ops.dispatch import barrier, cast, tensor
from tapegrad.ops.index.indexing import put_slice_p
from tapegrad.ops.reduce.reductions import sum
from tapegrad.ops.shape.blocks import Part, slice_p, unslice_p, whole
from tapegrad.ops.shape.join import tile
from tapegrad.ops.shape.shape import broadcast_to, moveaxis, reshape
from tapegrad.tensor import DTypeLike, Tensor, TensorLike

__all__ = ["diag", "diag_embed", "diagflat", "diagonal", "fill_diagonal", "make_diagonal", "trace"]


def _steps(rows: int, columns: int, offset: int) -> Part:
    """Where diagonal ``offset`` of a matrix lies among its elements in C order: first, count, step."""
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    first = offset if offset >= 0 else -offset * columns
    return (first if count else 0, count, columns + 1)


def diagonal(a: TensorLike, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """Diagonal ``offset`` (positive: above the main one) of the matrices along ``axis1`` and ``axis2``.

    It becomes the last axis.  The gradient goes back to the diagonal.  Raises AxisError, ShapeError for one dimension.
    """
    a, offset = tensor("diagonal", a), index(offset)
    if a.ndim < 2:
        raise ShapeError(f"diagonal: needs two dimensions or more, got shape {a.shape}")
    one, other = normalize_axis("diagonal", axis1, a.ndim), normalize_axis("diagonal", axis2, a.ndim)
    if one == other:
        raise AxisError(f"diagonal: axes {axis1} and {axis2} are one dimension of {a.shape}")
    a = moveaxis(a, (one, other), (-2, -1))
    *lead, rows, columns = a.shape
    flat = reshape(a, (*lead, rows * columns))
    return barrier(slice_p, flat, index=(*whole(lead), _steps(rows, columns, offset)))


def trace(a: TensorLike, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: DTypeLike | None = None) -> Tensor:
    """The sum of diagonal ``offset`` of the matrices along ``axis1`` and ``axis2`` (NumPy's ``trace``).

    Small integers are summed in 64 bits.  Raises AxisError, ShapeError.
    """
    return sum(diagonal(a, offset, axis1, axis2), axis=-1, dtype=dtype)


def diag_embed(input: TensorLike, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Matrices with the last axis of ``input`` on diagonal ``offset`` and zeros elsewhere (PyTorch's ``diag_embed``).

    dim1, dim2: the axes of the result that the matrices lie along.  Raises AxisError.
    """
    x, offset = tensor("diag_embed", input), index(offset)
    if not x.ndim:
        raise ShapeError("diag_embed: needs one dimension or more, got a scalar")
    one, other = normalize_axis("diag_embed", dim1, x.ndim + 1), normalize_axis("diag_embed", dim2, x.ndim + 1)
    if one == other:
        raise AxisError(f"diag_embed: dim1={dim1} and dim2={dim2} are one dimension")
    *lead, n = x.shape
    side = n + abs(offset)
    places = (*whole(lead), _steps(side, side, offset))
    flat = barrier(unslice_p, x, shape=(*lead, side * side), index=places)
    return moveaxis(reshape(flat, (*lead, side, side)), (-2, -1), (one, other))


def make_diagonal(D: TensorLike, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    """The inverse of :func:`diagonal` (HIPS autograd's): see :func:`diag_embed`.  Raises AxisError."""
    return diag_embed(D, offset, axis1, axis2)


def diag(v: TensorLike, k: int = 0) -> Tensor:
    """Diagonal ``k`` of a matrix, or the matrix with the vector ``v`` on it.  Raises ShapeError for other ranks."""
    v = tensor("diag", v)
    if v.ndim not in (1, 2):
        raise ShapeError(f"diag: needs a vector or a matrix, got shape {v.shape}")
    return diag_embed(v, k) if v.ndim == 1 else diagonal(v, k)


def diagflat(v: TensorLike, k: int = 0) -> Tensor:
    """The matrix with all elements of ``v`` on diagonal ``k``."""
    v = tensor("diagflat", v)
    return diag_embed(reshape(v, (v.size,)), k)


def fill_diagonal(a: TensorLike, val: TensorLike, wrap: bool = False) -> Tensor:
    """``a`` with ``val`` (a number, or values repeated as needed) on its main diagonal: a new tensor.

    wrap: the diagonal starts again below the last column of a tall matrix (NumPy's ``fill_diagonal``).  Gradients pass
    to both operands.  Raises ShapeError for one dimension, or more than two of unequal lengths.
    """
    a = tensor("fill_diagonal", a)
    v = cast(tensor("fill_diagonal", val, a), a.dtype)
    if a.ndim < 2 or (a.ndim > 2 and len(set(a.shape)) > 1):
        raise ShapeError(f"fill_diagonal: needs a matrix, or a cube of any rank, got shape {a.shape}")
    step = a.shape[1] + 1 if a.ndim == 2 else 1 + _strides(a.shape)
    end = a.size if a.ndim > 2 or wrap else min(a.size, a.shape[1] ** 2)
    count = -(-end // step)
    if v.size > 1 or v.ndim:
        v = reshape(v, (v.size,))
        v = tile(v, -(-count // v.size) if v.size else 0)[:count]
    flat = reshape(a, (a.size,))
    return reshape(barrier(put_slice_p, flat, broadcast_to(v, (count,)), index=((0, count, step),)), a.shape)


def _strides(shape: Shape) -> int:
    """Elements from one to the next on the main diagonal of a cube of any rank, less 1."""
    step, total = 1, 0
    for n in reversed(shape[1:]):
        step *= n
        total += step
    return total
