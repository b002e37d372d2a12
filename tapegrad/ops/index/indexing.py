"""Indexing.  Basic indices are views (``slice``); all others become one gather along one axis (``take``).

The transposes are ``unslice`` (zeros around the cotangent) and ``scatter_add``, which adds rows in the order of the
indices, so its bits are fixed by indices and shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from operator import index
from typing import Any

from tapegrad.core.aval import Shape, ShapedArray, normalize_axis, shaped
from tapegrad.core.primitive import Bad, Primitive, Sample, general, linear
from tapegrad.core.rule import Sliced
from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.device.numerics import gather
from tapegrad.device.types import Array, Namespace, Params
from tapegrad.errors import AxisError, IndexingError, ShapeError
from tapegrad.ops._batched import Companions, for_all
from tapegrad.ops.apply import lift_axis
from tapegrad.ops.create.creation import arange, zeros
from tapegrad.ops.dispatch import barrier, cast, tensor
from tapegrad.ops.elementwise.arithmetic import add, clip, remainder
from tapegrad.ops.elementwise.comparison import equal
from tapegrad.ops.index import _cuda_index
from tapegrad.ops.index.bounds import checked
from tapegrad.ops.shape.blocks import Part, native_index, slice_p, sliced_shape, whole
from tapegrad.ops.shape.shape import broadcast_to, flat_or_along, moveaxis, permute_dims, reshape
from tapegrad.tensor import DTypeLike, Tensor, TensorLike


def _run_put_slice(xp: Namespace, x: Array, v: Array, *, index: tuple[Part, ...], out: Array) -> None:
    for copy, arrays in _copies_of_put_slice(xp, x, v, index=index, out=out):
        copy(*arrays)


def _copies_of_put_slice(xp: Namespace, x: Array, v: Array, *, index: tuple[Part, ...], out: Array) -> list[Any]:
    return [(xp.copyto, (out, x)), (xp.copyto, (out[native_index(index)], v))]


def _pull_put_slice(ct: Tensor, xs_aval: Sequence[ShapedArray], i: int, *, index: tuple[Part, ...]) -> Tensor:
    if i == 1:
        return barrier(slice_p, ct, index=index)
    hole = broadcast_to(zeros((), dtype=ct.dtype, device=ct.device), sliced_shape(index))
    return barrier(put_slice_p, ct, hole, index=index)


put_slice_p = linear(
    "put_slice",
    impl=_run_put_slice,
    calls=_copies_of_put_slice,
    infer=lambda x, v, *, index: x,
    transpose=_pull_put_slice,
    variadic=True,
    into=True,
    lift=lambda params, n: {"index": (*whole((n,)), *params["index"])},
    samples=[
        Sample((4, 5), (3,), index=(1, (4, 3, -2))), Sample((3,), (0,), index=((0, 0, 1),)), Sample((), (), index=()),
    ],
)  # fmt: skip


def _run_take(xp: Namespace, x: Array, indices: Array, *, axis: int, out: Array) -> None:
    if x.size:
        gather.take(xp, x, indices, axis, out)
    elif out.size:
        raise IndexingError(f"take: axis {axis} of {x.shape} has no elements to take")


def _infer_take(x: ShapedArray, indices: ShapedArray, *, axis: int) -> ShapedArray:
    if indices.dtype.kind not in "iu":
        raise IndexingError(f"take: indices must be integers, got {indices.dtype}")
    return x.with_shape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


def _batch_take(
    operands: list[Tensor], companions: Companions, n: int, params: Params, prim: Primitive | None = None
) -> Tensor:
    """``batch`` of ``take``: rows of all examples lie one after the other; ``prim``: of one that all share."""
    axis = params["axis"]
    (x, places), (many, wheres) = operands, companions
    if wheres is None:
        return barrier(take_p, for_all(x, many, n), places, axis=axis + 1)
    if many is None:
        return moveaxis(barrier(prim or take_p, x, wheres, axis=axis), axis, 0)
    m = x.shape[axis]
    rows = moveaxis(many, axis + 1, 1)
    rows = reshape(rows, (n * m, *rows.shape[2:]))
    rows_taken = barrier(take_p, rows, _offset(wheres, n, m), axis=0)
    k = places.ndim
    order = (0, *range(1 + k, 1 + k + axis), *range(1, 1 + k), *range(1 + k + axis, rows_taken.ndim))
    return permute_dims(rows_taken, order)


def _batch_scatter_add(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor:
    """``batch`` of ``scatter_add``, likewise."""
    axis, m = params["axis"], params["n"]
    (x, places), (many, wheres) = operands, companions
    many = for_all(x, many, n)
    if wheres is None:
        return barrier(scatter_add_p, many, places, axis=axis + 1, n=m)
    k = places.ndim
    order = (0, *range(1 + axis, 1 + axis + k), *range(1, 1 + axis), *range(1 + axis + k, many.ndim))
    sums = barrier(scatter_add_p, permute_dims(many, order), _offset(wheres, n, m), axis=0, n=n * m)
    return moveaxis(reshape(sums, (n, m, *sums.shape[1:])), 1, 1 + axis)


def _offset(places: Tensor, n: int, m: int) -> Tensor:
    """Positions in ``n`` runs of ``m`` each, one after the other."""
    starts = arange(n, device=places.device) * m
    return add(places, reshape(starts, (n, *(1,) * (places.ndim - 1))))


take_p: Primitive = linear(
    "take",
    impl=_run_take,
    cuda=_cuda_index.take,
    gathers=True,
    infer=_infer_take,
    transpose=lambda ct, x, indices, *, axis: barrier(scatter_add_p, ct, indices, axis=axis, n=x.shape[axis]),
    into=True,
    batch=_batch_take,
    lift=lift_axis,
    samples=[
        Sample((5, 3), [[0, 2], [2, 2]], axis=0), Sample((2, 4, 3), [3, 0, 3], axis=1), Sample((4,), 2, axis=0),
        Bad((4,), [0.5], axis=0, error=IndexingError),
    ],
)  # fmt: skip


def _pull_rows(ct: Tensor, x: ShapedArray, indices: Tensor, *, axis: int) -> Tensor | Sliced:
    if axis:  # one of several cotangents that are pulled together
        return barrier(scatter_add_p, ct, indices, axis=axis, n=x.shape[axis])
    flat = reshape(ct, (indices.size, *x.shape[1:]))
    return Sliced(flat, reshape(indices, (indices.size,)), x.shape)


take_rows_p: Primitive = linear(
    "take_rows",
    impl=_run_take,
    cuda=_cuda_index.take,
    gathers=True,
    infer=_infer_take,
    transpose=_pull_rows,
    into=True,
    lift=lift_axis,
    samples=[Sample((5, 3), [[0, 2], [2, 2]], axis=0), Sample((4,), 2, axis=0)],
    doc="``take`` whose gradient is the rows taken, not the whole array.",
)
take_rows_p.batch = partial(_batch_take, prim=take_rows_p)

_WIDE = 256
"""Elements from which a row is worth a call of its own.  Measured, 8192 rows of 512 float32: 11 ms, sorting 25 ms."""
_BATCH = 65536


def _run_scatter_add(xp: Namespace, x: Array, indices: Array, *, axis: int, n: int, out: Array) -> None:
    wide = dtypes.accumulator(out.dtype)
    if wide != out.dtype:  # added up in float32, rounded once
        total = xp.empty(out.shape, wide)
        _run_scatter_add(xp, x.astype(wide), indices, axis=axis, n=n, out=total)
        xp.copyto(out, total, casting="same_kind")
        return
    out.fill(0)
    before, count = prod(x.shape[:axis]), indices.size
    width = prod(x.shape[axis + indices.ndim :])
    if not x.size:
        return
    rows, places = x.reshape(before, count, width), indices.reshape(-1)
    if before * width >= _WIDE:
        target = out.reshape(before, n, width)
        for k, position in enumerate(places.tolist()):
            row = target[:, position]
            xp.add(row, rows[:, k], row)
        return
    flat, lanes, step = out.reshape(-1), xp.arange(width), _BATCH // (before * width)
    offsets = xp.arange(before)[:, None, None] * n
    for k in range(0, count, step):
        lines = (offsets + places[k : k + step, None]) * width + lanes
        xp.add.at(flat, lines.reshape(-1), rows[:, k : k + step].reshape(-1))


scatter_add_p: Primitive = linear(
    "scatter_add",
    impl=_run_scatter_add,
    cuda=_cuda_index.scatter_add,
    infer=lambda x, indices, *, axis, n: x.with_shape((*x.shape[:axis], n, *x.shape[axis + indices.ndim :])),
    transpose=lambda ct, indices, *, axis, n: barrier(take_p, ct, indices, axis=axis),
    into=True,
    batch=_batch_scatter_add,
    lift=lift_axis,
    samples=[
        Sample((2, 2, 3), [[0, 2], [2, 2]], axis=0, n=4), Sample((2, 3, 300), [1, 0, 1], axis=1, n=2),
        Sample((3,), 1, axis=0, n=2),
    ],
)  # fmt: skip


def _run_last_place(xp: Namespace, indices: Array, *, n: int) -> Array:
    flat = indices.reshape(-1)
    last = xp.full((n,), -1, dtype=flat.dtype)
    xp.maximum.at(last, flat, xp.arange(flat.size))
    return last


last_place_p = general(
    "last_place",
    impl=_run_last_place,
    cuda=_cuda_index.last_place,
    infer=lambda indices, *, n: shaped((n,), dtypes.int64, indices.device),
    samples=[Sample([2, 0, 2], n=4)],
    doc="For each of ``n`` positions the number of the last index that names it, or -1.",
)


def take(
    a: TensorLike, indices: TensorLike, axis: int | None = None, *, mode: str = "raise", sparse_grad: bool = False
) -> Tensor:
    """Slices of ``a`` along ``axis`` (None: of the flattened ``a``) at integer ``indices`` of any shape.

    mode: indices out of range are an error, or ``clip`` (to the ends, negative ones, too) or ``wrap``.  The gradient of
    repeated indices accumulates.  ``sparse_grad`` (PyTorch's name), for axis 0: ``tape.gradient`` gives for ``a`` an
    :class:`IndexedSlices` of the slices taken, as TensorFlow's does for ``tf.gather``, not an array of its shape.
    Raises AxisError, IndexingError.
    """
    a = tensor("take", a)
    a, dim = flat_or_along("take", a, axis)
    if mode != "raise":
        indices = _brought_in(tensor("take", indices, a), a.shape[dim], mode)
    if sparse_grad and dim:
        raise AxisError(f"take: sparse_grad is for slices along axis 0, not along axis {dim} of {a.shape}")
    return barrier(take_rows_p if sparse_grad else take_p, a, checked("take", indices, a.shape[dim], a), axis=dim)


def _brought_in(places: Tensor, n: int, mode: str) -> Tensor:
    if mode not in ("clip", "wrap"):
        raise IndexingError(f"take: mode {mode!r} is not one of raise, clip, wrap")
    if mode == "clip":
        return unrecorded(clip, places, 0, max(n - 1, 0))
    return unrecorded(remainder, places, max(n, 1))


def take_along_axis(arr: TensorLike, indices: TensorLike, axis: int = -1) -> Tensor:
    """Elements of ``arr`` at ``indices`` along ``axis``; all other dimensions match or broadcast.

    Raises AxisError, IndexingError, and ShapeError if the dimensions do not fit.
    """
    arr = tensor("take_along_axis", arr)
    places = tensor("take_along_axis", indices, arr)
    a = normalize_axis("take_along_axis", axis, arr.ndim)
    n = arr.shape[a]
    places = checked("take_along_axis", places, n, arr)
    others = arr.shape[:a] + arr.shape[a + 1 :]
    if places.ndim != arr.ndim or any(
        m not in (1, s) and s != 1 for i, (m, s) in enumerate(zip(places.shape, arr.shape, strict=True)) if i != a
    ):
        raise ShapeError(f"take_along_axis: indices of shape {places.shape} do not fit {arr.shape} along axis {a}")
    lead = tuple(max(m, s) if m and s else 0 for m, s in zip(_without(places.shape, a), others, strict=True))
    count = places.shape[a]
    arr = broadcast_to(moveaxis(arr, a, -1), (*lead, n))
    places = broadcast_to(moveaxis(places, a, -1), (*lead, count))
    rows = reshape(arange(prod(lead), device=arr.device) * n, (*lead, 1))
    taken = barrier(take_p, reshape(arr, (-1,)), places + rows, axis=0)
    return moveaxis(taken, -1, a)


def _without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]


def one_hot(indices: TensorLike, depth: int, *, axis: int = -1, dtype: DTypeLike | None = None) -> Tensor:
    """1 at each index and 0 elsewhere along a new ``axis`` of length ``depth``; dtype None: the default dtype.

    An index out of range gives zeros (as in TensorFlow).  Raises AxisError, IndexingError for other than integers.
    """
    places, depth = tensor("one_hot", indices), index(depth)
    if not dtypes.is_integer(places.dtype):
        raise IndexingError(f"one_hot: indices must be integers, got {places.dtype}")
    if dtypes.iinfo(places.dtype).max < depth or places.dtype.kind == "u":
        places = cast(places, dtypes.int64)
    a = normalize_axis("one_hot", axis, places.ndim + 1)
    hot = equal(reshape(places, (*places.shape, 1)), arange(depth, dtype=places.dtype, device=places.device))
    return moveaxis(cast(hot, dtypes.asdtype(dtype)), -1, a)
