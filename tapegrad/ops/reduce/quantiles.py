"""Medians and quantiles: elements gathered from the sorted array, and a line between two of them.

NaN in a slice makes its result NaN; the ``nan`` variants leave NaN out, and give NaN only where nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tapegrad.core.aval import normalize_axes
from tapegrad.core.state import unrecorded
from tapegrad.device import CPU, dtypes
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.ops.dispatch import cast, ordered, promote, tensor, whole_in_float64
from tapegrad.ops.elementwise.arithmetic import divide, maximum, minimum
from tapegrad.ops.elementwise.comparison import ceil, equal, floor, isnan, logical_not
from tapegrad.ops.elementwise.comparison import round as round_even
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.indexing import take_along_axis
from tapegrad.ops.index.sort import argsort
from tapegrad.ops.reduce.averages import weights_like
from tapegrad.ops.reduce.cumulative import cumulative_sum
from tapegrad.ops.reduce.reductions import Axis, kept_shape, mean, sum
from tapegrad.ops.reduce.reductions import all as all_of
from tapegrad.ops.shape.join import stack
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, moveaxis, permute_dims, reshape
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["median", "nanmedian", "nanpercentile", "nanquantile", "percentile", "quantile"]

Position = Callable[[Any, Tensor], Tensor]


def _between(alpha: float, beta: float) -> Position:
    return lambda n, q: n * q + (alpha + q * (1 - alpha - beta)) - 1


POSITIONS: dict[str, Position] = {
    "linear": lambda n, q: (n - 1) * q,
    "interpolated_inverted_cdf": _between(0, 1),
    "hazen": _between(0.5, 0.5),
    "weibull": _between(0, 0),
    "median_unbiased": _between(1 / 3.0, 1 / 3.0),
    "normal_unbiased": _between(3 / 8.0, 3 / 8.0),
    "averaged_inverted_cdf": lambda n, q: n * q - 1,
    "inverted_cdf": lambda n, q: _next_unless(n * q - 1, lambda at, low: equal(at, low)),
    "closest_observation": lambda n, q: _next_unless(
        n * q - 1 - 0.5, lambda at, low: equal(at, low) & equal(low % 2, 1)
    ),
    "lower": lambda n, q: floor((n - 1) * q),
    "higher": lambda n, q: ceil((n - 1) * q),
    "midpoint": lambda n, q: 0.5 * (floor((n - 1) * q) + ceil((n - 1) * q)),
    "nearest": lambda n, q: round_even((n - 1) * q),
}
"""For each of NumPy's methods (Hyndman and Fan 1996): where quantile ``q`` lies among ``n`` sorted elements."""

DISCRETE = ("inverted_cdf", "closest_observation", "lower", "higher", "nearest")
"""Those that choose one element, so that a change of ``q`` changes nothing."""


INTEGERS = (dtypes.int64, dtypes.int32)


def _next_unless(at: Tensor, stays: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    low = floor(at)
    return maximum(where(stays(at, low), low, low + 1), 0)


def _rows(op: str, a: TensorLike, axis: Axis) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """``a`` with ``axis`` moved last and made one; those axes; the shape of a result that keeps them."""
    x = ordered(op, a)
    if x.dtype.kind == "b":
        x = cast(x, dtypes.int64)
    axes = normalize_axes(op, axis, x.ndim)
    kept = tuple(i for i in range(x.ndim) if i not in axes)
    lead = tuple(x.shape[i] for i in kept)
    flat = permute_dims(x, (*kept, *axes))
    count = 1
    for i in axes:
        count *= x.shape[i]
    return reshape(flat, (*lead, count)), axes, kept_shape(x.shape, axes)


class _Sorted:
    """Rows, and the order that sorts them: a tape keeps the places of the elements that are asked for, not of all."""

    __slots__ = ("_order", "_skip", "rows")

    def __init__(self, rows: Tensor, skip: bool = False) -> None:
        self.rows, self._skip = rows, skip
        self._order = unrecorded(partial(argsort, axis=-1), rows)

    def at(self, places: Tensor | slice) -> Tensor:
        """Elements at ``places``, integers ``(..., k)``; with ``skip`` 0 for NaN."""
        picked = unrecorded(self._order_at, places)
        values = take_along_axis(self.rows, picked, axis=-1)
        return where(isnan(values), 0, values) if self._skip else values

    def _order_at(self, places: Tensor | slice) -> Tensor:
        order = self._order
        return order[..., places] if isinstance(places, slice) else take_along_axis(order, places, axis=-1)

    def ends_in_nan(self) -> Tensor:
        """Whether each row holds a NaN, ``(..., 1)``."""
        return unrecorded(lambda: isnan(self.at(slice(-1, None))))

    def whole(self) -> Tensor:
        """The sorted values; no tape records this."""
        return unrecorded(self.by, self.rows)

    def by(self, other: Tensor) -> Tensor:
        """``other`` in the same order."""
        return take_along_axis(other, self._order, axis=-1)


def _gather(rows: _Sorted, places: Tensor) -> Tensor:
    """Elements of each row at ``places``, ``(..., k)``, cut to the row; at NaN the first."""
    at = where(isnan(places), 0, places)
    *lead, n = rows.rows.shape
    whole = cast(maximum(minimum(at, n - 1), 0), dtypes.int64)
    return rows.at(broadcast_to(whole, (*lead, whole.shape[-1])))


def _line(before: Tensor, after: Tensor, part: Tensor, weak: bool) -> Tensor:
    """A point between two elements, interpolated and rounded as NumPy does."""
    late, rest = part >= 0.5, 1 - part
    if weak:
        part, rest = cast(part, before.dtype), cast(rest, before.dtype)
    gap = after - before
    return where(late, after - gap * rest, before + gap * part)


def _at(rows: _Sorted, count: Tensor | int, q: Tensor, method: str, weak: bool) -> Tensor:
    """Quantiles ``q`` (k) of sorted ``rows``, of which ``count`` elements (an int, or ``(..., 1)``) are there."""
    at = POSITIONS[method](count, q)
    if method in DISCRETE:
        return _gather(rows, at)
    last = count - 1
    inside = (at >= 0) & (at < last)
    low = where(inside, floor(at), cast(where(at < 0, 0, last), at.dtype))
    part = where(inside, at - low, 0)
    if method == "averaged_inverted_cdf":
        part = cast(where(equal(part, 0), 0.5, 1.0), at.dtype)
    elif method == "midpoint":
        part = cast(where(equal(part, 0), 0.0, 0.5), at.dtype)
    before, after = _gather(rows, low), _gather(rows, where(inside, low + 1, low))
    return _line(before, after, part, weak)


def _prepared(op: str, q: TensorLike, scale: float, rows: Tensor) -> tuple[Tensor, bool]:
    """``q / scale`` as floats in [0, 1], and whether it is a Python number, which takes the data's dtype."""
    weak = type(q) in (int, float)  # not NumPy's float64, which is a float, too
    if isinstance(q, Tensor):
        levels = q
        inside = not levels.size or unrecorded(lambda: bool(all_of((levels >= 0) & (levels <= scale))))
    else:  # checked where it lies: nothing waits for the device
        array = CPU.xp.asarray(q, dtype="float64" if weak or isinstance(q, (list, tuple)) else None)
        inside = bool(((array >= 0) & (array <= scale)).all())
        levels = tensor(op, array, rows)
    if not inside:
        raise TapegradError(f"{op}: {q!r:.60} has elements outside [0, {scale}]")
    (levels,) = promote(op, (levels,), whole_in_float64)
    return (levels if scale == 1 else divide(levels, scale)), weak


def _quantiles(
    op: str, a: TensorLike, q: TensorLike, axis: Axis, method: str, keepdims: bool, weights: TensorLike | None,
    skip: bool, scale: float,
) -> Tensor:  # fmt: skip
    if method not in POSITIONS or (weights is not None and method != "inverted_cdf"):
        usable = "inverted_cdf, with weights" if weights is not None else ", ".join(POSITIONS)
        raise TapegradError(f"{op}: method {method!r} is not one of {usable}")
    rows, axes, kept = _rows(op, a, axis)
    if not rows.shape[-1]:
        raise ShapeError(f"{op}: no elements along axis {axis}; an empty slice has no quantile")
    if method == "linear" and scale == 1 and (isinstance(q, int) or getattr(q, "dtype", None) in INTEGERS):
        method = "lower"  # 0 and 1 are whole places, and NumPy keeps the dtype of integers
    if not dtypes.is_inexact(rows.dtype) and method not in DISCRETE:
        rows = cast(rows, dtypes.float64)
    q, weak = _prepared(op, q, scale, rows)
    flat = reshape(q, (q.size,))
    ordered = _Sorted(rows, skip)
    if weights is not None:
        w, _, _ = _rows(op, weights_like(op, weights, tensor(op, a), axis, axes), axis)
        values = _weighted(ordered, ordered.by(w), flat, skip)
    else:
        values = _of_sorted(ordered, flat, method, weak, skip)
    values = reshape(moveaxis(values, -1, 0), (*q.shape, *rows.shape[:-1]))
    return reshape(values, (*q.shape, *kept)) if keepdims else values


def _of_sorted(rows: _Sorted, q: Tensor, method: str, weak: bool, skip: bool) -> Tensor:
    n = rows.rows.shape[-1]
    if not dtypes.is_inexact(rows.rows.dtype):
        return _at(rows, n, q, method, weak)
    if not skip:
        return where(rows.ends_in_nan(), float("nan"), _at(rows, n, q, method, weak))
    count = _present(rows.rows)
    return where(equal(count, 0), float("nan"), _at(rows, cast(count, q.dtype), q, method, weak))


def _present(rows: Tensor) -> Tensor:
    """How many elements of each row are not NaN, ``(..., 1)``."""
    return sum(logical_not(isnan(rows)), axis=-1, keepdims=True)


def _weighted(rows: _Sorted, w: Tensor, q: Tensor, skip: bool) -> Tensor:
    """The first elements up to which at least the part ``q`` of the weights of their rows lies."""

    def places() -> tuple[Tensor, Tensor]:
        gone = isnan(rows.whole())
        weights = cast(where(gone, 0, w) if skip else w, dtypes.float64)
        reached = cumulative_sum(weights, axis=-1)
        reached = cast(reached / reached[..., -1:], q.dtype)
        reached = where(equal(reached, 0), -1, reached)
        return sum(expand_dims(reached, -1) < q, axis=-2), gone

    at, gone = unrecorded(places)
    values = _gather(rows, cast(at, dtypes.float64))
    return values if skip else where(gone[..., -1:], float("nan"), values)


def quantile(
    a: TensorLike, q: TensorLike, axis: Axis = None, *, method: str = "linear", keepdims: bool = False,
    weights: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The quantiles ``q`` (in [0, 1]) of the elements over ``axis`` (None: all) (NumPy's ``quantile``).

    The shape is that of ``q``, then what is left of that of ``a``.  method: one of NumPy's thirteen.  weights (only
    for ``inverted_cdf``): of the shape of ``a``, or of its ``axis``.  The gradient goes to the one or two elements a
    quantile lies at or between (of equal ones, to those that a stable sort puts there), and to ``q`` for the methods
    that interpolate.  NaN if there is a NaN.  Raises AxisError, ShapeError for an empty axis, DTypeError for complex,
    TapegradError for ``q`` out of range.
    """
    return _quantiles("quantile", a, q, axis, method, keepdims, weights, False, 1)


def percentile(
    a: TensorLike, q: TensorLike, axis: Axis = None, *, method: str = "linear", keepdims: bool = False,
    weights: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """:func:`quantile` of ``q / 100``."""
    return _quantiles("percentile", a, q, axis, method, keepdims, weights, False, 100)


def nanquantile(
    a: TensorLike, q: TensorLike, axis: Axis = None, *, method: str = "linear", keepdims: bool = False,
    weights: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """:func:`quantile` of the elements that are not NaN, whose gradient is 0; NaN where none is left."""
    return _quantiles("nanquantile", a, q, axis, method, keepdims, weights, True, 1)


def nanpercentile(
    a: TensorLike, q: TensorLike, axis: Axis = None, *, method: str = "linear", keepdims: bool = False,
    weights: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """:func:`nanquantile` of ``q / 100``."""
    return _quantiles("nanpercentile", a, q, axis, method, keepdims, weights, True, 100)


def median(a: TensorLike, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The median over ``axis`` (None: all): of an even number of elements the mean of the two in the middle.

    Its gradient goes to the middle element, or half and half to the two.  Integers are averaged in float64.  NaN if
    there is a NaN, or nothing at all.  Raises AxisError, DTypeError for complex.
    """
    rows, _, kept = _rows("median", a, axis)
    n, ordered = rows.shape[-1], _Sorted(rows)
    middle = mean(ordered.at(slice((n - 1) // 2, n // 2 + 1)) if n else rows, axis=-1)
    if n and dtypes.is_inexact(rows.dtype):
        middle = where(ordered.ends_in_nan()[..., 0], float("nan"), middle)
    return reshape(middle, kept) if keepdims else middle


def nanmedian(a: TensorLike, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """:func:`median` of the elements that are not NaN, whose gradient is 0; NaN where none is left."""
    rows, _, kept = _rows("nanmedian", a, axis)
    if not dtypes.is_inexact(rows.dtype) or not rows.shape[-1]:
        return median(a, axis, keepdims)
    count, ordered = _present(rows), _Sorted(rows, skip=True)
    wide = cast(count, dtypes.float64)
    before, after = _gather(ordered, floor((wide - 1) / 2)), _gather(ordered, floor(wide / 2))
    middle = where(equal(count % 2, 1), after, mean(stack([before, after], axis=-1), axis=-1))
    middle = where(equal(count, 0), float("nan"), middle)[..., 0]
    return reshape(middle, kept) if keepdims else middle
