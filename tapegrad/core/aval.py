"""Abstract values: the shape, dtype and device of an array, known before (or without) its bytes.

Nothing here knows an array library: a dtype is whatever object the device's library uses, asked only for
``itemsize`` and ``name``.  Avals are interned: equal ones are the same object, so comparing and hashing them is free.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from math import prod
from operator import index
from typing import Any, SupportsIndex

from tapegrad.core import locks
from tapegrad.errors import AxisError, ShapeError

Shape = tuple[int, ...]


GRAIN = 512
"""Bytes to which allocations are rounded up, as CuPy's pool rounds them."""


def rounded(nbytes: int) -> int:
    """Return the bytes that an allocation of ``nbytes`` takes."""
    return -(-nbytes // GRAIN) * GRAIN


class ShapedArray:
    """Shape, dtype and device of an array.  Make one with :func:`shaped`."""

    __slots__ = ("__weakref__", "device", "dtype", "footprint", "narrow", "nbytes", "ndim", "shape", "size", "smooth")

    def __init__(self, shape: Shape, dtype: Any, device: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.ndim = len(shape)
        self.size = prod(shape)
        self.nbytes = self.size * dtype.itemsize
        self.footprint = rounded(self.nbytes)  # bytes that it takes when it is allocated
        self.smooth = dtype.kind in "fcV"  # can have derivatives (V: floats from outside NumPy, such as bfloat16)
        self.narrow = dtype.kind in "fV" and dtype.itemsize < 4  # computed in float32, rounded once an operation

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"

    def with_shape(self, shape: Shape) -> ShapedArray:
        """The same dtype and device with another shape."""
        return shaped(shape, self.dtype, self.device)

    def with_dtype(self, dtype: object) -> ShapedArray:
        """The same shape and device with another dtype."""
        return shaped(self.shape, dtype, self.device)


_known: weakref.WeakValueDictionary[tuple[Any, ...], ShapedArray] = weakref.WeakValueDictionary()
_lock = locks.lock()


def shaped(shape: Iterable[int], dtype: object, device: object) -> ShapedArray:
    """Return the interned aval of ``shape``, ``dtype`` (a dtype object), ``device``.  Raises TypeError for floats."""
    key = (tuple(shape), dtype, device)
    found = _known.get(key)
    if found is None:
        key = (tuple(map(index, key[0])), dtype, device)  # 2.0 == 2: a later lookup of 2 would find it
        with _lock:
            found = _known.get(key)
            if found is None:
                found = _known[key] = ShapedArray(*key)
    return found


def broadcast_shapes(op: str, *shapes: Shape) -> Shape:
    """The shape that all ``shapes`` broadcast to.  Raises ShapeError naming ``op``."""
    ndim = max(map(len, shapes), default=0)
    out = [1] * ndim
    for shape in shapes:
        offset = ndim - len(shape)
        for i, n in enumerate(shape):
            if n != 1:
                have = out[offset + i]
                if have == 1:
                    out[offset + i] = n
                elif have != n:
                    listed = " and ".join(map(str, shapes))
                    raise ShapeError(
                        f"{op}: shapes {listed} do not broadcast: axis {offset + i - ndim} is {have} in one and {n} "
                        "in another; reshape or expand_dims one of them"
                    )
    return tuple(out)


def normalize_axis(op: str, axis: SupportsIndex, ndim: int) -> int:
    """``axis`` counted from the front.  Raises AxisError naming ``op``."""
    try:
        axis = axis.__index__()
    except AttributeError:
        raise AxisError(f"{op}: axis must be an integer, got {axis!r}") from None
    if not -ndim <= axis < ndim:
        raise AxisError(f"{op}: axis {axis} is out of range for an array of {ndim} dimensions")
    return axis + ndim if axis < 0 else axis


def counted_axes(op: str, axes: Sequence[SupportsIndex], ndim: int) -> list[int]:
    """Axes counted from the front, in their order.  Raises AxisError naming ``op``."""
    if set(map(type, axes)) == _INTEGERS:  # most often
        numbers: Any = axes
        if -ndim <= min(numbers) and max(numbers) < ndim:
            return [a % ndim for a in numbers]
    return [normalize_axis(op, a, ndim) for a in axes]


_INTEGERS = {int}


def normalize_axes(op: str, axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Axes counted from the front, sorted; None means all.  Raises AxisError for repeats and for axes out of range."""
    if axis is None:
        return tuple(range(ndim))
    axes = [normalize_axis(op, a, ndim) for a in (axis if isinstance(axis, (tuple, list)) else (axis,))]
    if len(set(axes)) != len(axes):
        raise AxisError(f"{op}: axis {axis!r} names a dimension twice")
    return tuple(sorted(axes))
