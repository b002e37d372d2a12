"""Reductions of groups: each element, or slice, belongs to the segment that an integer names (JAX's ``segment_*``).

An id outside ``[0, num_segments)`` drops its slice.  Sums add in the order of the data, so their bits are fixed.
"""

from __future__ import annotations

from operator import index

from tapegrad.core.aval import normalize_axis
from tapegrad.core.primitive import Primitive, Sample, general
from tapegrad.core.state import thread, unrecorded
from tapegrad.device import dtypes
from tapegrad.device.numerics import scans
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import DTypeError, IndexingError, ShapeError, TapegradError
from tapegrad.ops.create.creation import arange, ones, zeros
from tapegrad.ops.dispatch import barrier, cast, promote, tensor
from tapegrad.ops.elementwise.arithmetic import divide, maximum, multiply
from tapegrad.ops.elementwise.comparison import equal, floor, logical_or
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.bounds import checked, every
from tapegrad.ops.index.indexing import scatter_add_p, take_p
from tapegrad.ops.index.sort import argsort
from tapegrad.ops.reduce._masks import worst
from tapegrad.ops.reduce.cumulative import cumulative_sum
from tapegrad.ops.reduce.reductions import max as max_of
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import broadcast_to, moveaxis, reshape
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "index_add", "index_reduce", "scatter_reduce", "segment_max", "segment_mean", "segment_min", "segment_prod",
    "segment_sum",
]  # fmt: skip


def _prepared(
    op: str, data: TensorLike, segment_ids: TensorLike, num_segments: int | None
) -> tuple[Tensor, Tensor, int]:
    """Data with the segmented axis first, an id in ``[0, n]`` for each slice (n: none), and n.

    Ids of several dimensions name slices of as many leading axes, which become one.
    """
    x = tensor(op, data)
    ids = tensor(op, segment_ids, x)
    if not dtypes.is_integer(ids.dtype):
        raise IndexingError(f"{op}: segment ids must be integers, got {ids.dtype}")
    if not ids.ndim or ids.shape != x.shape[: ids.ndim]:
        raise ShapeError(f"{op}: ids of shape {ids.shape} for data of shape {x.shape}: one for each leading element")
    x = reshape(x, (ids.size, *x.shape[ids.ndim :]))
    ids = cast(reshape(ids, (ids.size,)), dtypes.int64)
    if num_segments is None:
        n = max(0, int(unrecorded(max_of, ids).item()) + 1) if ids.size else 0
    else:
        n = index(num_segments)
    if n < 0:
        raise ShapeError(f"{op}: num_segments={n} is negative")
    return x, unrecorded(lambda: where(logical_or(ids < 0, ids >= n), n, ids)), n


def segment_sum(data: TensorLike, segment_ids: TensorLike, num_segments: int | None = None) -> Tensor:
    """The sum of the slices of ``data`` in each segment, along the first axis; 0 for a segment of nothing.

    num_segments: the result's length (None: one more than the largest id, whose value is then read).  A slice whose id
    is negative or beyond the length belongs to no segment, as in JAX.  Small integers are summed in 64 bits.  Raises
    ShapeError, IndexingError for ids that are not integers.
    """
    x, ids, n = _prepared("segment_sum", data, segment_ids, num_segments)
    x = cast(x, dtypes.sum_dtype(x.dtype))
    return barrier(scatter_add_p, x, ids, axis=0, n=n + 1)[:n]


def _counts(ids: Tensor, n: int, like: Tensor) -> Tensor:
    """How many slices each segment has, shaped to go with the segments of ``like``."""
    one = ones(ids.shape, dtype=dtypes.accumulator(dtypes.real_of(like.dtype)), device=ids.device)
    return reshape(barrier(scatter_add_p, one, ids, axis=0, n=n + 1)[:n], (n,) + (1,) * (like.ndim - 1))


def segment_mean(data: TensorLike, segment_ids: TensorLike, num_segments: int | None = None) -> Tensor:
    """The mean of the slices in each segment; 0 for a segment of nothing.  See :func:`segment_sum`."""
    x, ids, n = _prepared("segment_mean", data, segment_ids, num_segments)
    x = x if dtypes.is_inexact(x.dtype) else cast(x, dtypes.float64)
    total = barrier(scatter_add_p, x, ids, axis=0, n=n + 1)[:n]
    return cast(divide(total, maximum(unrecorded(_counts, ids, n, x), 1)), x.dtype)


def _ties(x: Tensor, ids: Tensor, out: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Which elements are their segment's extreme one (as numbers), and how many share it."""
    mask = cast(equal(x, barrier(take_p, out, ids, axis=0)), dtypes.accumulator(x.dtype))
    return mask, maximum(barrier(scatter_add_p, mask, ids, axis=0, n=n), 1)


def _pull_extreme(ct: Tensor, out: Tensor, x: Tensor, ids: Tensor, *, n: int) -> Tensor:
    mask, count = _ties(x, ids, out, n)
    return mask * barrier(take_p, ct / count, ids, axis=0)


def _push_extreme(t: Tensor, out: Tensor, x: Tensor, ids: Tensor, *, n: int) -> Tensor:
    mask, count = _ties(x, ids, out, n)
    return barrier(scatter_add_p, mask * t, ids, axis=0, n=n) / count


def _extreme(name: str, ufunc: str) -> Primitive:
    def run(xp: Namespace, x: Array, ids: Array, *, n: int) -> Array:
        return scans.extreme_of_groups(xp, x, ids, n, ufunc, worst(x.dtype, ufunc == "maximum"))

    return general(
        name,
        impl=run,
        infer=lambda x, ids, *, n: x.with_shape((n, *x.shape[1:])),
        vjp=[_pull_extreme, None],
        jvp=[_push_extreme, None],
        samples=[
            Sample((5, 2), [0, 2, 0, 1, 2], n=3),
            Sample((4,), [1, 1, 1, 0], n=2),
        ],
        doc="Elements that tie share the gradient equally.",
    )


segment_max_p = _extreme("segment_max", "maximum")
segment_min_p = _extreme("segment_min", "minimum")


def _extreme_of(prim: Primitive, data: TensorLike, segment_ids: TensorLike, num_segments: int | None) -> Tensor:
    x, ids, n = _prepared(prim.name, data, segment_ids, num_segments)
    if x.dtype.kind in "bc":
        raise DTypeError(f"{prim.name}: not defined for {x.dtype}")
    return barrier(prim, x, ids, n=n + 1)[:n]


def segment_max(data: TensorLike, segment_ids: TensorLike, num_segments: int | None = None) -> Tensor:
    """The largest element of each segment, NaN if there is one; -inf (the least integer) for a segment of nothing.

    Ties share the gradient equally.  See :func:`segment_sum`; raises DTypeError for bool and complex, too.
    """
    return _extreme_of(segment_max_p, data, segment_ids, num_segments)


def segment_min(data: TensorLike, segment_ids: TensorLike, num_segments: int | None = None) -> Tensor:
    """The smallest element of each segment, NaN if there is one; inf (the largest integer) for a segment of nothing.

    Ties share the gradient equally.  See :func:`segment_sum`; raises DTypeError for bool and complex, too.
    """
    return _extreme_of(segment_min_p, data, segment_ids, num_segments)


def segment_prod(data: TensorLike, segment_ids: TensorLike, num_segments: int | None = None) -> Tensor:
    """The product of the slices of each segment; 1 for a segment of nothing; its gradient is right at zeros.

    Computed by doubling: log n products of whole arrays in the order of the segments.  Small integers are multiplied in
    64 bits.  See :func:`segment_sum`.
    """
    x, ids, n = _prepared("segment_prod", data, segment_ids, num_segments)
    x = cast(x, dtypes.sum_dtype(x.dtype))
    count, column = ids.size, (-1,) + (1,) * (x.ndim - 1)
    one = ones((1, *x.shape[1:]), dtype=x.dtype, device=x.device)
    if not count:
        return broadcast_to(one, (n, *x.shape[1:]))

    def sorted_ids() -> tuple[Tensor, Tensor, int, Tensor]:
        order = argsort(ids)
        ordered = barrier(take_p, ids, order, axis=0)
        tally = barrier(scatter_add_p, ones(ids.shape, dtype=dtypes.int64, device=ids.device), ordered, axis=0, n=n + 1)
        # More steps than needed multiply by 1, so a captured step, which reads no values, has the same bits.
        longest = thread.executor.in_earnest(lambda: int(max_of(every(tally)).item()), count)
        return ordered, order, longest, where(tally > 0, cumulative_sum(tally) - 1, count)[:n]

    ids, order, longest, places = unrecorded(sorted_ids)
    x, reach = barrier(take_p, x, order, axis=0), 1
    while reach < longest:
        same = reshape(equal(ids[reach:], ids[:-reach]), column)
        x = concat([x[:reach], multiply(x[reach:], where(same, x[:-reach], 1))], axis=0)
        reach *= 2
    return barrier(take_p, concat([x, one], axis=0), places, axis=0)


def _sliced(
    op: str, input: TensorLike, dim: int, index: TensorLike, source: TensorLike
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Both operands with axis ``dim`` first, the index in range, and ``dim`` counted from the front."""
    x, y = promote(op, (input, source))
    a = normalize_axis(op, dim, x.ndim)
    x, y = moveaxis(x, a, 0), moveaxis(y, normalize_axis(op, dim, y.ndim), 0)
    places = checked(op, index, x.shape[0], x)
    if places.shape != y.shape[:1] or x.shape[1:] != y.shape[1:]:
        raise ShapeError(
            f"{op}: {places.shape} indices, source {y.shape}, input {x.shape} (axis {dim} first) do not fit"
        )
    return x, places, y, a


def index_add(input: TensorLike, dim: int, index: TensorLike, source: TensorLike, *, alpha: float = 1) -> Tensor:
    """``input`` with ``alpha`` times the slices of ``source`` along ``dim`` added where ``index`` says (PyTorch's).

    Repeated indices accumulate.  Raises ShapeError, AxisError, IndexingError.
    """
    x, places, y, a = _sliced("index_add", input, dim, index, source)
    added = barrier(scatter_add_p, y if alpha == 1 else y * alpha, places, axis=0, n=x.shape[0])
    return moveaxis(x + added, 0, a)


def index_reduce(
    input: TensorLike, dim: int, index: TensorLike, source: TensorLike, reduce: str, *, include_self: bool = True
) -> Tensor:
    """``input`` with slices along ``dim`` reduced together with those of ``source`` that ``index`` sends there.

    reduce: ``prod``, ``mean``, ``amax`` or ``amin``; include_self: whether the slice of ``input`` itself counts (one
    that no index names stays as it is).  Ties of ``amax`` and ``amin`` share the gradient equally; that of ``prod`` is
    right at zeros.  The mean of integers is rounded down.  PyTorch's ``index_reduce``.  Raises ShapeError, AxisError,
    IndexingError.
    """
    reductions = {"prod": segment_prod, "mean": segment_mean, "amax": segment_max, "amin": segment_min}
    if reduce not in reductions:
        raise TapegradError(f"index_reduce: reduce={reduce!r} is not one of {', '.join(reductions)}; index_add sums")
    x, places, y, a = _sliced("index_reduce", input, dim, index, source)
    n = x.shape[0]
    if include_self:
        own = arange(n, device=x.device)
        reduced = reductions[reduce](concat([x, y], axis=0), concat([own, places], axis=0), n)
    else:
        reduced = where(_named(places, n, x), reductions[reduce](y, places, n), x)
    whole = reduced if dtypes.is_inexact(x.dtype) else floor(reduced)
    return moveaxis(cast(whole, x.dtype), 0, a)


def scatter_reduce(
    input: TensorLike, dim: int, index: TensorLike, src: TensorLike, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Return ``input`` with elements reduced with those of ``src`` that ``index`` sends there along ``dim``.

    index: integers of as many dimensions as ``input``, no longer than ``src`` in any, and than ``input`` in any but
    ``dim``; reduce: ``sum``, ``prod``, ``mean``, ``amax`` or ``amin``; include_self: whether the element of ``input``
    itself counts (one that no index names stays as it is).  Gradients as of :func:`index_reduce`.  PyTorch's
    ``scatter_reduce``.  Raises ShapeError, AxisError, IndexingError.
    """
    op = "scatter_reduce"
    x, y = promote(op, (input, src))
    a = normalize_axis(op, dim, x.ndim)
    rows = checked(op, index, x.shape[a], x)
    longest = tuple(n if d == a else min(n, m) for d, (n, m) in enumerate(zip(y.shape, x.shape, strict=False)))
    if not x.ndim == y.ndim == rows.ndim or any(n > m for n, m in zip(rows.shape, longest, strict=True)):
        raise ShapeError(f"{op}: indices {rows.shape} and source {y.shape} do not fit an array {x.shape}")
    y = reshape(y[tuple(slice(n) for n in rows.shape)], (-1,))
    flat = zeros(rows.shape, dtype=dtypes.int64, device=x.device)
    for d, n in enumerate(x.shape):
        along = rows if d == a else reshape(arange(rows.shape[d], device=x.device), (-1,) + (1,) * (x.ndim - 1 - d))
        flat = flat * n + along
    flat, values = reshape(flat, (-1,)), reshape(x, (-1,))
    if reduce == "sum":
        kept = values if include_self else where(_named(flat, x.size, values), 0, values)
        return reshape(index_add(kept, 0, flat, y), x.shape)
    return reshape(index_reduce(values, 0, flat, y, reduce, include_self=include_self), x.shape)


def _named(places: Tensor, n: int, x: Tensor) -> Tensor:
    """Return a mask of the ``n`` positions that ``places`` holds."""
    return unrecorded(_counts, places, n, x) > 0
