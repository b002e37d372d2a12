"""Indices of grids, diagonals and triangles: integers, without derivatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

from tapegrad.core.aval import Shape
from tapegrad.core.state import thread, unrecorded
from tapegrad.device import Device, dtypes
from tapegrad.errors import IndexingError, ShapeError, TapegradError
from tapegrad.ops.create.creation import arange, zeros
from tapegrad.ops.create.ranges import tri
from tapegrad.ops.dispatch import cast, promote, tensor
from tapegrad.ops.elementwise.arithmetic import floor_divide, maximum, minimum, remainder
from tapegrad.ops.elementwise.comparison import logical_not
from tapegrad.ops.elementwise.selection import nonzero
from tapegrad.ops.reduce.reductions import max as max_of
from tapegrad.ops.reduce.reductions import min as min_of
from tapegrad.ops.shape.join import stack
from tapegrad.ops.shape.shape import broadcast_to, reshape, shape_of
from tapegrad.tensor import DTypeLike, Tensor, TensorLike

__all__ = [
    "diag_indices", "diag_indices_from", "indices", "ix_", "ravel_multi_index", "tril_indices", "tril_indices_from",
    "triu_indices", "triu_indices_from", "unravel_index",
]  # fmt: skip


def indices(
    dimensions: Sequence[int], dtype: DTypeLike | None = None, sparse: bool = False, *,
    device: Device | str | None = None,
) -> Any:  # fmt: skip
    """For each dimension the index along it at every point of a grid, stacked; sparse: a tuple that broadcasts.

    int64 unless said otherwise.  NumPy's ``indices``.
    """
    lengths = shape_of(dimensions)
    wanted = dtypes.int64 if dtype is None else dtypes.asdtype(dtype)
    lines = [
        reshape(arange(n, dtype=wanted, device=device), tuple(n if i == k else 1 for i in range(len(lengths))))
        for k, n in enumerate(lengths)
    ]
    if sparse:
        return tuple(lines)
    if not lines:
        return zeros((0,), dtype=wanted, device=device)
    return stack([broadcast_to(line, lengths) for line in lines])


def ix_(*args: TensorLike) -> tuple[Tensor, ...]:
    """Vectors (a mask becomes positions) shaped so that, as an index, they choose their outer product.

    Raises ShapeError unless all are vectors.
    """
    axes = []
    for k, vector in enumerate(args):
        x = tensor("ix_", vector)
        if x.ndim != 1:
            raise ShapeError(f"ix_: needs vectors, got shape {x.shape}")
        if x.dtype.kind == "b":
            (x,) = nonzero(x)
        elif not x.size:
            x = cast(x, dtypes.int64)
        axes.append(reshape(x, (1,) * k + (x.size,) + (1,) * (len(args) - k - 1)))
    return tuple(axes)


def diag_indices(n: int, ndim: int = 2) -> tuple[Tensor, ...]:
    """The indices of the main diagonal of an array of ``ndim`` dimensions of length ``n``."""
    return tuple(arange(index(n)) for _ in range(ndim))


def diag_indices_from(arr: TensorLike) -> tuple[Tensor, ...]:
    """The indices of the main diagonal of ``arr``.  Raises ShapeError unless its lengths are equal, and two or more."""
    x = tensor("diag_indices_from", arr)
    if x.ndim < 2 or len(set(x.shape)) > 1:
        raise ShapeError(f"diag_indices_from: needs equal lengths, got shape {x.shape}")
    return diag_indices(x.shape[0], x.ndim)


def tril_indices(n: int, k: int = 0, m: int | None = None) -> tuple[Tensor, ...]:
    """The indices of the elements on and below diagonal ``k`` of an ``n x m`` matrix."""
    return nonzero(tri(n, m, k, dtypes.bool_))


def triu_indices(n: int, k: int = 0, m: int | None = None) -> tuple[Tensor, ...]:
    """The indices of the elements on and above diagonal ``k`` of an ``n x m`` matrix."""
    return nonzero(logical_not(tri(n, m, k - 1, dtypes.bool_)))


def _matrix(op: str, arr: TensorLike) -> Shape:
    x = tensor(op, arr)
    if x.ndim != 2:
        raise ShapeError(f"{op}: needs a matrix, got shape {x.shape}")
    return x.shape


def tril_indices_from(arr: TensorLike, k: int = 0) -> tuple[Tensor, ...]:
    """The indices of the elements on and below diagonal ``k`` of the matrix ``arr``.  Raises ShapeError."""
    rows, columns = _matrix("tril_indices_from", arr)
    return tril_indices(rows, k, columns)


def triu_indices_from(arr: TensorLike, k: int = 0) -> tuple[Tensor, ...]:
    """The indices of the elements on and above diagonal ``k`` of the matrix ``arr``.  Raises ShapeError."""
    rows, columns = _matrix("triu_indices_from", arr)
    return triu_indices(rows, k, columns)


def _order(op: str, order: str) -> int:
    if order not in ("C", "F"):
        raise TapegradError(f"{op}: order {order!r} is neither C nor F")
    return -1 if order == "C" else 1


def within(places: Tensor, n: int) -> bool:
    """Whether all of ``places``, at least one, lie in ``[0, n)``; in a dry run, which does the works, that they do."""
    least, most = unrecorded(min_of, places), unrecorded(max_of, places)
    return thread.executor.decided(lambda: 0 <= int(least.item()) <= int(most.item()) < n, True)


def unravel_index(indices: TensorLike, shape: int | Sequence[int], order: str = "C") -> tuple[Tensor, ...]:
    """For flat positions in an array of ``shape`` the index along each dimension.

    Raises IndexingError out of range (it reads the values) and for other than integers.
    """
    lengths = shape_of(shape)
    places = tensor("unravel_index", indices)
    if not dtypes.is_integer(places.dtype):
        raise IndexingError(f"unravel_index: positions must be integers, got {places.dtype}")
    n = math.prod(lengths)
    if places.size and not within(places, n):
        raise IndexingError(f"unravel_index: a position is out of range for an array of shape {lengths}")
    places = cast(places, dtypes.int64)
    coordinates = []
    for length in lengths[:: _order("unravel_index", order)]:
        coordinates.append(remainder(places, length))
        places = floor_divide(places, length)
    return tuple(coordinates[:: _order("unravel_index", order)])


def ravel_multi_index(multi_index: Any, dims: Sequence[int], mode: Any = "raise", order: str = "C") -> Tensor:
    """The flat positions in an array of shape ``dims`` of indices, one integer array for each dimension.

    mode: indices out of range ``raise`` (their values are read), ``wrap`` or ``clip``; or one for each.  Raises
    IndexingError, ShapeError.
    """
    places, dims = promote("ravel_multi_index", tuple(multi_index)), shape_of(dims)
    modes = (mode,) * len(places) if isinstance(mode, str) else tuple(mode)
    if not len(places) == len(dims) == len(modes):
        raise ShapeError(f"ravel_multi_index: {len(places)} index arrays for dimensions {dims}, mode {mode!r}")
    if not dtypes.is_integer(places[0].dtype):
        raise IndexingError(f"ravel_multi_index: indices must be integers, got {places[0].dtype}")
    step = _order("ravel_multi_index", order)
    flat: Any = 0
    for x, n, how in list(zip(places, dims, modes, strict=True))[::-step]:
        flat = flat * n + _held(cast(x, dtypes.int64), n, how)
    return flat


def _held(x: Tensor, n: int, mode: str) -> Tensor:
    """Indices of an axis of length ``n`` by one of the modes."""
    if mode == "wrap":
        return remainder(x, n)
    if mode == "clip":
        return minimum(maximum(x, 0), n - 1)
    if mode != "raise":
        raise TapegradError(f"ravel_multi_index: mode {mode!r} is not one of raise, wrap, clip")
    if x.size and not within(x, n):
        raise IndexingError(f"ravel_multi_index: an index is out of range for an axis of length {n}")
    return x
