"""Index vectors, each of which names a slice by its indices along several axes (TensorFlow's): gather_nd."""

from __future__ import annotations

from tapegrad.device import dtypes
from tapegrad.errors import IndexingError, ShapeError
from tapegrad.ops.create.creation import arange
from tapegrad.ops.dispatch import cast, tensor
from tapegrad.ops.index.getitem import getitem
from tapegrad.ops.shape.shape import broadcast_to, reshape
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["gather_nd"]


def gather_nd(params: TensorLike, indices: TensorLike, batch_dims: int = 0, name: str | None = None) -> Tensor:
    """Slices of ``params`` at the vectors along the last axis of ``indices``: ``(..., k)`` integers for ``k`` axes.

    Shape ``indices.shape[:-1] + params.shape[batch_dims + k:]``.  ``batch_dims``: how many leading axes of both go
    together.  A negative index counts from the end, and one out of range is an error (in TensorFlow both are errors on
    the CPU, and zeros on a GPU).  ``name``: ignored, as in TensorFlow's eager mode.  Differentiable to any order;
    repeated slices accumulate.  Raises IndexingError, ShapeError.
    """
    x = tensor("gather_nd", params)
    index = nd_index("gather_nd", x, indices, batch_dims)
    if not index:  # vectors of no indices: each names all of it
        return broadcast_to(x, (*tensor("gather_nd", indices, x).shape[:-1], *x.shape))
    return getitem(x, index, "gather_nd")


def nd_index(op: str, x: Tensor, indices: TensorLike, batch_dims: int = 0) -> tuple[Tensor, ...]:
    """What index vectors for ``x`` name, as an index: an array for each axis."""
    places = tensor(op, indices, x)
    if not dtypes.is_integer(places.dtype):
        if places.size:
            raise IndexingError(f"{op}: indices must be integers, got {places.dtype}; use astype")
        places = cast(places, dtypes.int64)
    if not 0 <= batch_dims < places.ndim or places.shape[:batch_dims] != x.shape[:batch_dims]:
        raise ShapeError(
            f"{op}: indices {places.shape} of {x.shape} with batch_dims={batch_dims}: the first batch_dims axes of "
            "both must be alike, and the last axis of the indices holds the vectors"
        )
    *lead, depth = places.shape
    if batch_dims + depth > x.ndim:
        raise ShapeError(f"{op}: indices {places.shape} are for {batch_dims + depth} axes, but {x.shape} has {x.ndim}")
    own = [
        reshape(arange(n, device=x.device), (n,) + (1,) * (len(lead) - 1 - axis))
        for axis, n in enumerate(lead[:batch_dims])
    ]
    return tuple(broadcast_to(i, tuple(lead)) for i in (*own, *(places[..., k] for k in range(depth))))
