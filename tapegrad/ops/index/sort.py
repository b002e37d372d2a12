"""Sorting and searching.  Permutations and positions have no derivative; ``sort`` gathers by a permutation."""

from __future__ import annotations

from operator import index
from typing import NamedTuple

from tapegrad.core.aval import ShapedArray, normalize_axis, shaped
from tapegrad.core.primitive import Bad, Primitive, Sample, general
from tapegrad.device import dtypes
from tapegrad.errors import ShapeError
from tapegrad.ops._batched import all_but
from tapegrad.ops.apply import lift_axis
from tapegrad.ops.dispatch import barrier, ordered, promote, sortable, tensor
from tapegrad.ops.index.indexing import take_along_axis
from tapegrad.ops.shape.join import flip
from tapegrad.ops.shape.shape import expand_dims, flat_or_along, reshape
from tapegrad.tensor import Tensor, TensorLike, from_array


def _positions(name: str) -> Primitive:
    def infer(x: ShapedArray, *, axis: int) -> ShapedArray:
        if not x.shape[axis]:
            raise ShapeError(f"{name}: {x.shape} is empty along axis {axis}; there is no {name} of nothing")
        return shaped((*x.shape[:axis], *x.shape[axis + 1 :]), dtypes.int64, x.device)

    return general(
        name,
        impl=lambda xp, x, *, axis: getattr(xp, name)(x, axis=axis),
        infer=infer,
        lift=lift_axis,
        samples=[Sample((3, 4), axis=1), Sample((2,), axis=0), Bad((0, 3), axis=0, error=ShapeError)],
    )


argmax_p = _positions("argmax")
argmin_p = _positions("argmin")


def _extreme(prim: Primitive, x: TensorLike, axis: int | None, keepdims: bool) -> Tensor:
    x = ordered(prim.name, x)
    if axis is None:
        out = barrier(prim, reshape(x, (x.size,)), axis=0)
        return reshape(out, (1,) * x.ndim) if keepdims else out
    a = normalize_axis(prim.name, axis, x.ndim)
    out = barrier(prim, x, axis=a)
    return expand_dims(out, a) if keepdims else out


def argmax(a: TensorLike, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
    """Position of the first largest element along ``axis`` (None: in the flattened array); a NaN counts as largest.

    Raises AxisError, ShapeError for an empty axis, DTypeError for complex.
    """
    return _extreme(argmax_p, a, axis, keepdims)


def argmin(a: TensorLike, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
    """Position of the first smallest element along ``axis`` (None: in the flattened array); a NaN counts as smallest.

    Raises AxisError, ShapeError for an empty axis, DTypeError for complex.
    """
    return _extreme(argmin_p, a, axis, keepdims)


argsort_p = general(
    "argsort",
    impl=lambda xp, x, *, axis: xp.argsort(x, axis=axis, kind="stable"),
    infer=lambda x, *, axis: x.with_dtype(dtypes.int64),
    lift=lift_axis,
    samples=[Sample((3, 4), axis=0), Sample((0,), axis=0)],
    doc="The permutation that sorts; equal elements keep their order.",
)


def argsort(
    a: TensorLike, axis: int | None = -1, kind: str | None = None, *, descending: bool = False, stable: bool = True
) -> Tensor:
    """Positions of the elements in order along ``axis`` (None: of the flattened array).  NaN sorts as the largest.

    Equal elements keep their order, whatever ``kind`` or ``stable`` say (they are NumPy's and the standard's).  Raises
    AxisError, DTypeError for complex.
    """
    a = sortable(ordered("argsort", a))
    a, dim = flat_or_along("argsort", a, axis)
    if not descending:
        return barrier(argsort_p, a, axis=dim)
    return a.shape[dim] - 1 - flip(barrier(argsort_p, flip(a, axis=dim), axis=dim), axis=dim)


def sort(
    a: TensorLike, axis: int | None = -1, kind: str | None = None, *, descending: bool = False, stable: bool = True
) -> Tensor:
    """The elements in order along ``axis`` (None: flattened), NaN as the largest; each takes its gradient along.

    kind, stable: see :func:`argsort`.  Raises AxisError, DTypeError for complex.
    """
    a = ordered("sort", a)
    a, dim = flat_or_along("sort", a, axis)
    return take_along_axis(a, argsort(a, axis=dim, descending=descending), axis=dim)


class TopK(NamedTuple):
    """The largest elements and where they were."""

    values: Tensor
    indices: Tensor


def top_k(x: TensorLike, k: int, *, axis: int = -1) -> TopK:
    """The ``k`` largest elements along ``axis``, largest first, and their positions.  Raises AxisError, ShapeError."""
    x, k = ordered("top_k", x), index(k)
    a = normalize_axis("top_k", axis, x.ndim)
    if not 0 <= k <= x.shape[a]:
        raise ShapeError(f"top_k: k={k}, but axis {a} of {x.shape} has {x.shape[a]} elements")
    first = (slice(None),) * a + (slice(k),)
    places = argsort(x, axis=a, descending=True)[first]
    return TopK(take_along_axis(x, places, axis=a), places)


searchsorted_p = general(
    "searchsorted",
    impl=lambda xp, x, y, *, side: xp.searchsorted(x, y, side=side),
    infer=lambda x, y, *, side: y.with_dtype(dtypes.int64),
    batch=all_but("searchsorted", 0),
    samples=[Sample([0.0, 1.0, 1.0, 2.0], [[1.0, 3.0]], side="left"), Sample([0.0, 1.0], 1.0, side="right")],
)


def searchsorted(a: TensorLike, v: TensorLike, side: str = "left", sorter: TensorLike | None = None) -> Tensor:
    """Where to insert each element of ``v`` in the sorted ``a`` so that it stays sorted.

    side: ``left`` of equal elements or ``right``; sorter: a permutation that sorts ``a``.  Raises ShapeError unless
    ``a`` has one dimension.
    """
    x, y = promote("searchsorted", (a, v))
    if x.ndim != 1 or side not in ("left", "right"):
        raise ShapeError(f"searchsorted: x1 of shape {x.shape} and side {side!r}; need one dimension, left or right")
    if sorter is not None:
        x = take_along_axis(x, sorter, axis=0)
    return barrier(searchsorted_p, sortable(x), sortable(y), side=side)


class UniqueAll(NamedTuple):
    """Distinct values, ascending; where each first stands; which one each element is; how often each occurs."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCounts(NamedTuple):
    """Distinct values, ascending, and how often each occurs."""

    values: Tensor
    counts: Tensor


class UniqueInverse(NamedTuple):
    """Distinct values, ascending, and which one each element is."""

    values: Tensor
    inverse_indices: Tensor


def unique_all(x: TensorLike) -> UniqueAll:
    """The distinct values of ``x`` and all about them.  Their number depends on the values, so ``x`` is evaluated.

    Every NaN is distinct.  There is no derivative.
    """
    x = tensor("unique", x)
    with x.device.active():
        values, first, inverse, counts = x.device.xp.unique(
            sortable(x)._array, return_index=True, return_inverse=True, return_counts=True, equal_nan=False
        )
        values = values.astype(x.dtype, copy=False)
    arrays = (values, first, inverse.reshape(x.shape), counts)
    return UniqueAll(*(from_array(a, x.device) for a in arrays))


def unique_counts(x: TensorLike) -> UniqueCounts:
    """The distinct values of ``x`` and how often each occurs; see :func:`unique_all`."""
    distinct = unique_all(x)
    return UniqueCounts(distinct.values, distinct.counts)


def unique_inverse(x: TensorLike) -> UniqueInverse:
    """The distinct values of ``x`` and which one each element is; see :func:`unique_all`."""
    distinct = unique_all(x)
    return UniqueInverse(distinct.values, distinct.inverse_indices)


def unique_values(x: TensorLike) -> Tensor:
    """The distinct values of ``x``; see :func:`unique_all`."""
    return unique_all(x).values
