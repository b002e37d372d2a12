"""Shape and order of elements: views where the memory allows, so they cost nothing and own no bytes.

``reshape``, ``permute_dims``, ``broadcast_to`` and basic slicing (``ops.index.indexing``) are the primitives; the
rest are plain functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from operator import index
from typing import Any, SupportsIndex

from tapegrad.core.aval import Shape, ShapedArray, broadcast_shapes, counted_axes, normalize_axes, normalize_axis
from tapegrad.core.primitive import Sample, linear
from tapegrad.device.types import Params
from tapegrad.errors import AxisError, ShapeError
from tapegrad.ops.apply import lift_shape, remembered
from tapegrad.ops.dispatch import barrier, tensor
from tapegrad.ops.shape.blocks import reshape_p, reshaped
from tapegrad.tensor import Tensor, TensorLike, identity_of


def reshape(x: TensorLike, shape: int | Sequence[int], order: str = "C", *, copy: bool | None = None) -> Tensor:
    """The elements in another shape, of which one length may be -1; order: C (last index fastest), or F (first).

    Raises ShapeError if the sizes differ.
    """
    x = x if type(x) is Tensor else tensor("reshape", x)
    lengths = shape if type(shape) is tuple and _INTEGERS.issuperset(map(type, shape)) else _lengths(shape)
    if order != "C":
        if order != "F":
            raise ShapeError(f"reshape: order {order!r} is not C or F")
        return transpose(reshape(transpose(x), lengths[::-1]))
    aval = x._buffer.node.aval
    if -1 in lengths:
        known = -prod(lengths)
        if lengths.count(-1) > 1 or known <= 0 or aval.size % known:
            raise ShapeError(f"reshape: cannot fill in -1 in {lengths} for an array of shape {aval.shape}")
        lengths = tuple([aval.size // known if n == -1 else n for n in lengths])
    if prod(lengths) != aval.size or min(lengths, default=0) < 0:
        raise ShapeError(f"reshape: {aval.shape} has {aval.size} elements, {lengths} has {prod(lengths)}")
    return identity_of(x) if lengths == aval.shape else barrier(reshape_p, x, shape=lengths)


_INTEGERS = {int}
_MOST_ORDERS = 4096


def flat_or_along(op: str, x: Tensor, axis: int | None) -> tuple[Tensor, int]:
    """``x``, and ``axis`` counted from the first; of None ``x`` in one dimension, and 0.  Raises AxisError."""
    return (reshape(x, (x.size,)), 0) if axis is None else (x, normalize_axis(op, axis, x.ndim))


def shape_of(shape: Any) -> tuple[int, ...]:
    """Return the shape that users give as one length, as a sequence or as an array of integers.

    Raises TypeError for other numbers, of which public functions make an error that names them.
    """
    lengths = shape.tolist() if hasattr(shape, "tolist") else shape
    return tuple(map(index, lengths)) if isinstance(lengths, (tuple, list)) else (index(lengths),)


def _lengths(shape: Any) -> tuple[int, ...]:
    """Return a shape as :func:`shape_of` does.  Raises ShapeError."""
    try:
        return shape_of(shape)
    except TypeError:
        raise ShapeError(f"reshape: a shape is made of integers, got {shape!r:.60}") from None


permute_p = linear(
    "permute_dims",
    impl=lambda xp, x, *, axes: x.transpose(axes),
    infer=remembered(lambda x, *, axes: x.with_shape(tuple(map(x.shape.__getitem__, axes)))),
    transpose=lambda ct, x, *, axes: permute_dims(ct, tuple(map(axes.index, range(len(axes))))),
    view=True,
    lift=lambda params, n: {"axes": (0, *(a + 1 for a in params["axes"]))},
    samples=[Sample((2, 3, 4), axes=(2, 0, 1)), Sample((), axes=()), Sample((0, 2), axes=(1, 0))],
)


def permute_dims(a: TensorLike, axes: Sequence[int]) -> Tensor:
    """The dimensions in the order ``axes``.  Raises AxisError unless it names each dimension once."""
    a = a if type(a) is Tensor else tensor("permute_dims", a)
    aval = a._buffer.node.aval
    order = (_order if _INTEGERS.issuperset(map(type, axes)) else _order.__wrapped__)(aval.shape, *axes)
    return identity_of(a) if order is None else barrier(permute_p, a, axes=order)


@lru_cache(_MOST_ORDERS)
def _order(shape: Shape, *axes: SupportsIndex) -> tuple[int, ...] | None:
    """The axes of an array of ``shape`` counted from the first; None where they keep its order.  Raises AxisError."""
    order = counted_axes("permute_dims", axes, len(shape))
    if sorted(order) != list(range(len(shape))):
        raise AxisError(f"permute_dims: axes {axes} are not an order of the {len(shape)} dimensions of {shape}")
    return None if order == list(range(len(shape))) else tuple(order)


broadcast_p = linear(
    "broadcast_to",
    impl=lambda xp, x, *, shape: xp.broadcast_to(x, shape),
    infer=remembered(lambda x, *, shape: x.with_shape(shape)),
    transpose=lambda ct, x: sum_to(ct, x.shape),
    view=True,
    lift=lift_shape,
    samples=[Sample((1, 3), shape=(2, 3)), Sample((2, 1, 1), shape=(2, 3, 0))],
)


def broadcast_to(array: TensorLike, shape: int | Sequence[int]) -> Tensor:
    """``array`` repeated along new dimensions and those of length 1.  Raises ShapeError if it does not fit."""
    array = tensor("broadcast_to", array)
    lengths = shape if type(shape) is tuple else shape_of(shape)
    if broadcast_shapes("broadcast_to", array.shape, lengths) != lengths:
        raise ShapeError(f"broadcast_to: {array.shape} does not broadcast to {lengths}")
    if lengths == array.shape:
        return identity_of(array)
    # Of equal rank, so that one more leading axis changes nothing (see Primitive.lift).
    return barrier(broadcast_p, reshaped(array, (1,) * (len(lengths) - array.ndim) + array.shape), shape=lengths)


@remembered
def infer_reduction(x: ShapedArray, *, axis: tuple[int, ...], keepdims: bool = False) -> ShapedArray:
    """The axes removed, or kept with length 1."""
    if keepdims:
        return x.with_shape(kept_shape(x.shape, axis))
    kept = list(x.shape)
    for i in sorted(axis, reverse=True):
        del kept[i]
    return x.with_shape(tuple(kept))


def lift_axes(params: Params, n: int) -> Params:
    """The same axes under one more leading axis."""
    return {**params, "axis": tuple(a + 1 for a in params["axis"])}


def kept_shape(shape: tuple[int, ...], axis: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` with length 1 in place of each reduced axis."""
    return tuple(1 if i in axis else n for i, n in enumerate(shape))


sum_p = linear(
    "sum",
    infer=infer_reduction,
    transpose=lambda ct, x, *, axis: broadcast_to(reshaped(ct, kept_shape(x.shape, axis)), x.shape),
    reduce="add",
    lift=lift_axes,
    samples=[
        Sample((3, 4), axis=(1,)), Sample((3, 4), axis=(0, 1)), Sample((0, 4), axis=(0,)), Sample((), axis=()),
        Sample((2, 3, 4), axis=(0, 2)), Sample((150, 120), axis=(1,)), Sample((150, 120), axis=(0, 1)),
    ],
)  # fmt: skip


def sum_to(x: Tensor, shape: Shape, lead: int = 0) -> Tensor:
    """Sum ``x`` down to ``shape``, which broadcasts to it: the transpose of broadcasting.

    The first ``lead`` axes of both are left alone.
    """
    lengths = x._buffer.node.aval.shape
    if lengths == shape:
        return x
    extra = len(lengths) - len(shape)
    padded = shape[:lead] + (1,) * extra + shape[lead:]
    axes = list(range(lead, lead + extra))
    for i in range(lead + extra, len(lengths)):
        if padded[i] != lengths[i]:
            axes.append(i)
    return reshaped(barrier(sum_p, x, axis=tuple(axes), keepdims=not extra), shape)


def expand_dims(a: TensorLike, axis: int | Sequence[int] = 0) -> Tensor:
    """A dimension of length 1 inserted before each ``axis`` (counted in the result).  Raises AxisError."""
    a = tensor("expand_dims", a)
    count = len(axis) if isinstance(axis, (tuple, list)) else 1
    axes = normalize_axes("expand_dims", axis, a.ndim + count)
    rest = iter(a.shape)
    return reshape(a, tuple(1 if i in axes else next(rest) for i in range(a.ndim + count)))


def squeeze(a: TensorLike, axis: int | Sequence[int] | None = None) -> Tensor:
    """Dimensions of length 1 removed: those of ``axis``, or all.  Raises ShapeError for a longer one."""
    a = tensor("squeeze", a)
    ones = tuple(i for i, n in enumerate(a.shape) if n == 1)
    axes = ones if axis is None else normalize_axes("squeeze", axis, a.ndim)
    for dim in axes:
        if a.shape[dim] != 1:
            raise ShapeError(f"squeeze: axis {dim} of {a.shape} has length {a.shape[dim]}, not 1")
    return reshape(a, tuple(n for i, n in enumerate(a.shape) if i not in axes))


def matrix_transpose(x: TensorLike) -> Tensor:
    """The last two dimensions exchanged.  Raises ShapeError for fewer than two."""
    x = x if type(x) is Tensor else tensor("matrix_transpose", x)
    ndim = x._buffer.node.aval.ndim
    if ndim < 2:
        raise ShapeError(f"matrix_transpose: needs two dimensions or more, got shape {x.shape}")
    return barrier(permute_p, x, axes=(*range(ndim - 2), ndim - 1, ndim - 2))


def transpose(a: TensorLike, axes: Sequence[int] | None = None) -> Tensor:
    """The dimensions in reverse order, or in the order ``axes`` (NumPy's ``transpose``)."""
    a = tensor("transpose", a)
    return permute_dims(a, tuple(reversed(range(a.ndim))) if axes is None else axes)


def moveaxis(a: TensorLike, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """The dimensions ``source`` moved to the places ``destination``.  Raises AxisError."""
    a = a if type(a) is Tensor else tensor("moveaxis", a)
    sources = source if isinstance(source, (tuple, list)) else (source,)
    places = destination if isinstance(destination, (tuple, list)) else (destination,)
    if len(sources) != len(places):
        raise AxisError(f"moveaxis: {len(sources)} sources for {len(places)} destinations")
    axes, ndim = (*sources, *places), a._buffer.node.aval.ndim
    order = (_moved if _INTEGERS.issuperset(map(type, axes)) else _moved.__wrapped__)(ndim, *axes)
    return identity_of(a) if order is None else barrier(permute_p, a, axes=order)


@lru_cache(_MOST_ORDERS)
def _moved(ndim: int, *axes: SupportsIndex) -> tuple[int, ...] | None:
    """The order of axes after the first half of ``axes`` has moved to the places of the second; None: as before."""
    half = len(axes) // 2
    moved, places = counted_axes("moveaxis", axes[:half], ndim), counted_axes("moveaxis", axes[half:], ndim)
    if len(set(places)) != half or len(set(moved)) != half:
        raise AxisError(f"moveaxis: {list(axes[:half])} to {list(axes[half:])} names a dimension twice")
    origin = dict(zip(places, moved, strict=True))
    rest = iter([a for a in range(ndim) if a not in moved])
    order = tuple([origin[i] if i in origin else next(rest) for i in range(ndim)])
    return None if order == tuple(range(ndim)) else order


def swapaxes(a: TensorLike, axis1: int, axis2: int) -> Tensor:
    """Two dimensions exchanged.  Raises AxisError."""
    a = tensor("swapaxes", a)
    order = list(range(a.ndim))
    first, second = (normalize_axis("swapaxes", i, a.ndim) for i in (axis1, axis2))
    order[first], order[second] = second, first
    return permute_dims(a, order)
