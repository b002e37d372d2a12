"""Sorting in part, by several keys, and what is most frequent.  Values are gathered, so they have gradients."""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

from tapegrad.core.aval import ShapedArray, normalize_axis
from tapegrad.core.primitive import Bad, Sample, general
from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.errors import ShapeError
from tapegrad.ops.apply import lift_axis
from tapegrad.ops.create.creation import arange, ones
from tapegrad.ops.dispatch import barrier, cast, ordered, sortable, tensor
from tapegrad.ops.elementwise.comparison import equal, isnan, logical_and, logical_not, logical_or
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.indexing import take_along_axis
from tapegrad.ops.index.sort import argmax, argsort, sort
from tapegrad.ops.reduce.scans import cummax
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import flat_or_along, moveaxis, reshape, squeeze
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["argpartition", "kthvalue", "lexsort", "mode", "msort", "partition", "sort_complex", "topk"]


def _infer_partition(x: ShapedArray, *, kth: tuple[int, ...], axis: int) -> ShapedArray:
    for k in kth:
        if not -x.shape[axis] <= k < x.shape[axis]:
            raise ShapeError(f"argpartition: kth={k} is out of range for axis {axis} of {x.shape}")
    return x.with_dtype(dtypes.int64)


argpartition_p = general(
    "argpartition",
    impl=lambda xp, x, *, kth, axis: xp.argpartition(x, list(kth) if len(kth) > 1 else kth[0], axis=axis),
    infer=_infer_partition,
    lift=lift_axis,
    samples=[Sample((3, 5), kth=(2,), axis=1), Bad((3,), kth=(3,), axis=0, error=ShapeError)],
    doc="A permutation that puts the elements ``kth`` in order, smaller ones before them, larger ones behind.",
)


def argpartition(a: TensorLike, kth: Any, axis: int | None = -1, kind: str = "introselect") -> Tensor:
    """Positions in an order in which elements ``kth`` (a number or several) stand as if sorted along ``axis``.

    Smaller ones come before, larger ones (NaN as the largest) behind; axis None: of the flattened array; kind: NumPy's
    name of an algorithm, of no effect.  Raises AxisError, ShapeError for ``kth`` out of range, DTypeError for complex.
    """
    x = sortable(ordered("argpartition", a))
    x, a = flat_or_along("argpartition", x, axis)
    several = isinstance(kth, (tuple, list)) or bool(getattr(kth, "ndim", False))
    wanted = tuple(map(index, kth)) if several else (index(kth),)
    if not wanted:
        raise ShapeError(f"argpartition: kth={kth!r} names no element; give a position or several")
    return barrier(argpartition_p, x, kth=wanted, axis=a)


def partition(a: TensorLike, kth: object, axis: int | None = -1, kind: str = "introselect") -> Tensor:
    """The elements in the order of :func:`argpartition`; each takes its gradient along.  Raises as that does."""
    x = ordered("partition", a)
    x, i = flat_or_along("partition", x, axis)
    return take_along_axis(x, argpartition(x, kth, i), axis=i)


def msort(a: TensorLike) -> Tensor:
    """:func:`sort` along the first axis (the name NumPy had for it)."""
    return sort(a, axis=0)


def sort_complex(a: TensorLike) -> Tensor:
    """The elements as complex numbers in order along the last axis, real parts first; each takes its gradient along."""
    x = tensor("sort_complex", a)
    wide = dtypes.complex64 if x.dtype.itemsize <= 4 and x.dtype.kind != "c" else dtypes.complex128
    x = x if x.dtype.kind == "c" else cast(x, wide)
    return take_along_axis(x, lexsort((x.imag, x.real)), axis=-1)


def lexsort(keys: Any, axis: int = -1) -> Tensor:
    """Positions of the elements in the order of the last of ``keys``, of equal ones that of the last but one, ...

    Raises ShapeError, AxisError, DTypeError for complex.
    """
    each = list(keys) if isinstance(keys, (tuple, list)) else [keys[k] for k in range(len(keys))]
    if not each:
        raise ShapeError("lexsort: needs at least one key")
    tensors = [ordered("lexsort", k) for k in each]
    a = normalize_axis("lexsort", axis, tensors[0].ndim)
    order = argsort(tensors[0], axis=a)
    for k in tensors[1:]:
        order = take_along_axis(order, argsort(take_along_axis(k, order, axis=a), axis=a), axis=a)
    return order


class Chosen(NamedTuple):
    """Elements, and where they stand."""

    values: Tensor
    indices: Tensor


def _cut(x: Tensor, dim: int, keepdim: bool, places: Tensor) -> Chosen:
    """The elements at ``places``, which has length 1 along ``dim``."""
    values = take_along_axis(x, places, axis=dim)
    return Chosen(values, places) if keepdim else Chosen(squeeze(values, dim), squeeze(places, dim))


def kthvalue(input: TensorLike, k: int, dim: int = -1, keepdim: bool = False) -> Chosen:
    """The ``k``-th smallest element (from 1) along ``dim`` and its position (PyTorch's ``kthvalue``).

    The gradient goes to that element.  Raises AxisError, ShapeError for ``k`` out of range, DTypeError for complex.
    """
    x = ordered("kthvalue", input)
    if not x.ndim:
        return Chosen(*(reshape(t, ()) for t in kthvalue(reshape(x, (1,)), k)))
    a = normalize_axis("kthvalue", dim, x.ndim)
    if not 1 <= k <= x.shape[a]:
        raise ShapeError(f"kthvalue: k={k}, but axis {a} of {x.shape} has {x.shape[a]} elements")
    order = argsort(x, axis=a)
    return _cut(x, a, keepdim, order[(slice(None),) * a + (slice(k - 1, k),)])


def topk(input: TensorLike, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Chosen:
    """The ``k`` largest (or smallest) elements along ``dim``, in order, and their positions (PyTorch's ``topk``).

    Each takes its gradient along.  Raises AxisError, ShapeError, DTypeError for complex.
    """
    x = ordered("topk", input)
    a = normalize_axis("topk", dim, x.ndim)
    if not 0 <= k <= x.shape[a]:
        raise ShapeError(f"topk: k={k}, but axis {a} of {x.shape} has {x.shape[a]} elements")
    places = argsort(x, axis=a, descending=largest)[(slice(None),) * a + (slice(k),)]
    return Chosen(take_along_axis(x, places, axis=a), places)


def mode(input: TensorLike, dim: int = -1, keepdim: bool = False) -> Chosen:
    """The most frequent element along ``dim``, the smallest of several, and its last position (PyTorch's ``mode``).

    The gradient goes to the element at that position.  Raises AxisError, ShapeError for an empty axis, DTypeError for
    complex.
    """
    x = ordered("mode", input)
    if not x.ndim:
        return Chosen(*(reshape(t, ()) for t in mode(reshape(x, (1,)))))
    a = normalize_axis("mode", dim, x.ndim)
    if not x.shape[a]:
        raise ShapeError(f"mode: {x.shape} is empty along axis {a}; there is no mode of nothing")
    places = unrecorded(_places_of_modes, x, a)
    return _cut(x, a, keepdim, moveaxis(places, -1, a))


def _places_of_modes(x: Tensor, a: int) -> Tensor:
    """The position of the mode of each row, along the last axis."""
    rows = moveaxis(x, a, -1)
    order = argsort(rows, axis=-1)
    rows = take_along_axis(rows, order, axis=-1)
    same = logical_or(equal(rows[..., 1:], rows[..., :-1]), logical_and(isnan(rows[..., 1:]), isnan(rows[..., :-1])))
    first = ones((*rows.shape[:-1], 1), dtype=dtypes.bool_, device=x.device)
    at = arange(rows.shape[-1], device=x.device)
    begins = cummax(where(concat([first, logical_not(same)], axis=-1), at, 0)).values
    return take_along_axis(order, argmax(at - begins, axis=-1, keepdims=True), axis=-1)
