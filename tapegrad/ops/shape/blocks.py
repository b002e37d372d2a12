"""Blocks of arrays: the primitives that reshape, cut out, put between zeros and join.

``reshape``, ``concat`` and ``stack`` are made of them, basic indices are ``slice``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache, partial
from types import EllipsisType
from typing import Any

from tapegrad.core.aval import Shape, ShapedArray
from tapegrad.core.primitive import Bad, Primitive, Sample, linear
from tapegrad.device.dtypes import is_inexact
from tapegrad.device.types import Array, Namespace
from tapegrad.engine.task import into
from tapegrad.errors import ShapeError
from tapegrad.ops.apply import barrier, lift_axis, lift_shape, remembered
from tapegrad.tensor import Tensor

Part = int | tuple[int, int, int]
"""What a basic index takes of one axis: a position (the axis goes), or (first, count, step)."""

reshape_p = linear(
    "reshape",
    impl=lambda xp, x, *, shape: x.reshape(shape),
    infer=remembered(lambda x, *, shape: x.with_shape(shape)),
    transpose=lambda ct, x: reshaped(ct, x.shape),
    view=True,
    copies=True,
    lift=lift_shape,
    samples=[Sample((2, 6), shape=(3, 4)), Sample((), shape=(1, 1)), Sample((0, 3), shape=(3, 0))],
)


def reshaped(x: Tensor, shape: Shape) -> Tensor:
    """``x`` in another shape, which fits; for use inside an operation: ``x`` itself if it has that shape."""
    return x if shape == x._buffer.node.aval.shape else barrier(reshape_p, x, shape=shape)


@lru_cache(256)
def native_index(index: tuple[Part, ...]) -> tuple[int | slice | EllipsisType, ...]:
    """The parts as Python's own index; the Ellipsis keeps 0-d results arrays."""
    items: list[int | slice] = []
    for part in index:
        if isinstance(part, int):
            items.append(part)
        else:
            first, count, step = part
            stop = first + count * step
            items.append(slice(first, None if stop < 0 else stop, step))
    return (*items, ...)


def sliced_shape(index: tuple[Part, ...]) -> Shape:
    """The shape a basic index yields."""
    return tuple(part[1] for part in index if not isinstance(part, int))


def whole(shape: Sequence[int]) -> tuple[Part, ...]:
    """The index of all elements."""
    return tuple([(0, n, 1) for n in shape])


slice_p: Primitive = linear(
    "slice",
    impl=lambda xp, x, *, index: x[native_index(index)],
    infer=remembered(lambda x, *, index: x.with_shape(sliced_shape(index))),
    transpose=lambda ct, x, *, index: barrier(unslice_p, ct, shape=x.shape, index=index),
    view=True,
    lift=lambda params, n: {"index": (*whole((n,)), *params["index"])},
    samples=[
        Sample((4, 5), index=(1, (4, 3, -2))), Sample((3, 4), index=((0, 0, 1), (1, 2, 1))), Sample((), index=()),
        Sample((3,), index=(2,)), Sample((3,), index=((2, 3, -1),)),
    ],
)  # fmt: skip


def _run_unslice(xp: Namespace, x: Array, *, shape: Shape, index: tuple[Part, ...], out: Array) -> None:
    for copy, arrays in _copies_of_unslice(xp, x, shape=shape, index=index, out=out):
        copy(*arrays)


def _copies_of_unslice(xp: Namespace, x: Array, *, shape: Shape, index: tuple[Part, ...], out: Array) -> list[Any]:
    copied = xp.copyto, (out[native_index(index)], x)
    return [copied] if x.size == out.size else [(xp.copyto, (out, xp.zeros((), x.dtype))), copied]


unslice_p: Primitive = linear(
    "unslice",
    impl=_run_unslice,
    calls=_copies_of_unslice,
    infer=remembered(lambda x, *, shape, index: x.with_shape(shape)),
    transpose=lambda ct, x, *, shape, index: barrier(slice_p, ct, index=index),
    into=True,
    lift=lambda params, n: {"shape": (n, *params["shape"]), "index": (*whole((n,)), *params["index"])},
    samples=[
        Sample((2,), shape=(4, 5), index=(1, (4, 2, -2))), Sample((), shape=(), index=()),
        Sample((0, 2), shape=(3, 4), index=((0, 0, 1), (1, 2, 1))),
    ],
)  # fmt: skip


@lru_cache(256)
def _in_all(indices: tuple[tuple[Part, ...], ...]) -> tuple[Part, ...] | None:
    """The index of the elements that all of these windows have; None: there are none."""
    parts: list[Part] = []
    for column in zip(*indices, strict=True):
        ranges = [range(p, p + 1) if isinstance(p, int) else range(p[0], p[0] + p[1] * p[2], p[2]) for p in set(column)]
        if all(r.step == 1 for r in ranges):
            places: Sequence[int] = range(max(r.start for r in ranges), min(r.stop for r in ranges))
        else:
            places = sorted(set(ranges[0]).intersection(*ranges[1:]))
        if not places:
            return None
        parts.append((places[0], len(places), places[1] - places[0] if len(places) > 1 else 1))
    return tuple(parts)


def _calls_of_sum(
    xp: Namespace, *xs: Array, shape: Shape, indices: tuple[tuple[Part, ...], ...], out: Array
) -> list[Any]:
    """Zeros, to which all is added; -0.0, to which nothing else adds 0.0, where each operand has an element."""
    calls: list[Any] = [(xp.copyto, (out, xp.zeros((), out.dtype)))]
    shared = _in_all(indices) if is_inexact(out.dtype) else None
    if shared is not None:
        minus = complex(-0.0, -0.0) if out.dtype.kind == "c" else -0.0
        calls.append((xp.copyto, (out[native_index(shared)], xp.full((), minus, out.dtype))))
    windows = [out[native_index(index)] for index in indices]
    return calls + [into(xp.add, (w, x), w) for w, x in zip(windows, xs, strict=True)]


def _run_sum(xp: Namespace, *xs: Array, **params: Any) -> None:
    for call, arrays in _calls_of_sum(xp, *xs, **params):
        call(*arrays)


unslice_sum_p: Primitive = linear(
    "unslice_sum",
    impl=_run_sum,
    calls=_calls_of_sum,
    infer=lambda *xs, shape, indices: xs[0].with_shape(shape),
    transpose=lambda ct, xs_aval, i, *, shape, indices: barrier(slice_p, ct, index=indices[i]),
    variadic=True,
    into=True,
    lift=lambda params, n: {
        "shape": (n, *params["shape"]),
        "indices": tuple([(*whole((n,)), *index) for index in params["indices"]]),
    },
    samples=[
        Sample((2,), (4, 3), (2,), shape=(4, 5), indices=((1, (4, 2, -2)), ((0, 4, 1), (1, 3, 1)), (1, (0, 2, 1)))),
        Sample((), (), shape=(2,), indices=((0,), (1,))),
        Sample((3,), (0,), shape=(3,), indices=(((0, 3, 1),), ((0, 0, 1),))),
    ],
)  # fmt: skip
"""The sum of arrays that lie in windows of zeros, with the bits that ``unslice`` and ``add`` give, one by one."""


def stretch(x: Tensor, axis: int, first: int, count: int) -> Tensor:
    """A view of ``count`` positions of one axis, from ``first`` on; of all of them: ``x`` itself."""
    if count == x.shape[axis]:
        return x
    return barrier(slice_p, x, index=(*whole(x.shape[:axis]), (first, count, 1), *whole(x.shape[axis + 1 :])))


def _infer_concat(*xs: ShapedArray, axis: int) -> ShapedArray:
    first = xs[0]
    for x in xs[1:]:
        if x.ndim != first.ndim or any(
            m != n for i, (m, n) in enumerate(zip(x.shape, first.shape, strict=True)) if i != axis
        ):
            raise ShapeError(
                f"concat: {x.shape} does not continue {first.shape} along axis {axis}: all other lengths must be equal"
            )
    return first.with_shape((*first.shape[:axis], sum(x.shape[axis] for x in xs), *first.shape[axis + 1 :]))


_starts: tuple[Sequence[ShapedArray], int, list[int]] = ([], 0, [])
"""Of the concatenation that was pulled last: its avals, its axis, and where each operand begins."""


def _pull_concat(ct: Tensor, xs_aval: Sequence[ShapedArray], i: int, *, axis: int) -> Tensor:
    global _starts
    avals, known, starts = _starts
    if avals is not xs_aval or known != axis:  # once for all operands, so that time does not grow with their square
        starts = [0, *itertools.accumulate(x.shape[axis] for x in xs_aval)]
        _starts = xs_aval, axis, starts
    return stretch(ct, axis, starts[i], xs_aval[i].shape[axis])


_MOST_COPIES = 8
"""A replay copies up to so many operands one by one; for more of them, one call costs less where it is interpreted."""


def _calls_of_concat(xp: Namespace, *xs: Array, axis: int, out: Array) -> list[Any]:
    if len(xs) > _MOST_COPIES:
        return [(partial(xp.concatenate, axis=axis, out=out), (xs,))]
    ends = itertools.accumulate([x.shape[axis] for x in xs], initial=0)
    before = (slice(None),) * axis
    parts = [out[(*before, slice(start, end))] for start, end in itertools.pairwise(ends)]
    return [(xp.copyto, (part, x)) for part, x in zip(parts, xs, strict=True) if x.size]


concat_p = linear(
    "concat",
    impl=lambda xp, *xs, axis, out: xp.concatenate(xs, axis=axis, out=out),
    calls=_calls_of_concat,
    infer=_infer_concat,
    transpose=_pull_concat,
    variadic=True,
    into=True,
    lift=lift_axis,
    samples=[
        Sample((2, 3), (4, 3), axis=0), Sample((2, 3), (2, 0), (2, 1), axis=1), Sample((0,), axis=0),
        Bad((2, 3), (4, 2), axis=0, error=ShapeError), Bad((2, 3), (2,), axis=0, error=ShapeError),
    ],
)  # fmt: skip
