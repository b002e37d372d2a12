"""``pad`` with all of NumPy's modes.  Those that read the array again (``edge``, ``wrap``, ...) are gathers."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any

from tapegrad.core.aval import normalize_axis
from tapegrad.device import dtypes
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.ops.create.creation import arange
from tapegrad.ops.create.ranges import linspace
from tapegrad.ops.dispatch import cast, tensor
from tapegrad.ops.elementwise.arithmetic import multiply, subtract
from tapegrad.ops.elementwise.comparison import equal
from tapegrad.ops.elementwise.comparison import round as round_even
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.indexing import take
from tapegrad.ops.reduce.quantiles import median
from tapegrad.ops.reduce.reductions import max, mean, min
from tapegrad.ops.shape import join
from tapegrad.ops.shape.join import concat, flip
from tapegrad.ops.shape.shape import broadcast_to, reshape, squeeze
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["pad"]

Pairs = list[tuple[Any, Any]]
STATISTICS: dict[str, Callable[..., Tensor]] = {"maximum": max, "minimum": min, "mean": mean, "median": median}
INSIDE = ("edge", "reflect", "symmetric", "wrap")
MODES = ("constant", "edge", "empty", "linear_ramp", "maximum", "mean", "median", "minimum", "reflect", "symmetric",
         "wrap")  # fmt: skip


def pad(
    array: TensorLike, pad_width: object, mode: str = "constant", *, constant_values: Any = 0, end_values: object = 0,
    stat_length: object = None, reflect_type: str = "even",
) -> Tensor:  # fmt: skip
    """``array`` with more elements around it (NumPy's ``pad``).

    pad_width: ``(before, after)`` for each dimension; or one pair, or one number, for all; or a dict of axes.  mode:
    ``constant`` (with ``constant_values``), ``edge``, ``empty`` (zeros), ``linear_ramp`` (to ``end_values``),
    ``maximum``, ``mean``, ``median``, ``minimum`` (of ``stat_length`` elements), ``reflect``, ``symmetric`` (both with
    ``reflect_type`` even or odd) or ``wrap``; values and lengths like ``pad_width``.  Gradients go to every element
    read, and to constant and end values that are tensors.  Raises ShapeError for widths and empty axes, TapegradError
    for modes.
    """
    x = tensor("pad", array)
    widths = _widths(pad_width, x.ndim)
    if mode not in MODES:
        raise TapegradError(f"pad: mode {mode!r} is not one of {', '.join(MODES)}")
    if mode in ("constant", "empty"):
        fill = 0 if mode == "empty" else constant_values
        if getattr(fill, "ndim", 0) == 0 and not isinstance(fill, (list, tuple)):
            return join.padded(x, widths, constant_values=fill)
        return _by_axes(x, widths, _pairs(fill, x.ndim, "constant_values"), _constant)
    if any(not n and any(w) for n, w in zip(x.shape, widths, strict=True)):
        raise ShapeError(f"pad: an axis of {x.shape} is empty: mode {mode!r} has nothing to make elements from")
    if mode in INSIDE:
        if reflect_type == "odd" and mode in ("reflect", "symmetric"):
            return _by_axes(x, widths, [(mode, mode)] * x.ndim, _odd)
        return join.padded(x, widths, mode)
    if mode == "linear_ramp":
        return _by_axes(x, widths, _pairs(end_values, x.ndim, "end_values"), _ramp)
    lengths = _pairs(stat_length, x.ndim, "stat_length")
    return _by_axes(x, widths, [(mode, pair) for pair in lengths], _statistic)


def _widths(given: object, ndim: int) -> Pairs:
    if isinstance(given, dict):
        widths: Pairs = [(0, 0)] * ndim
        for axis, width in given.items():
            widths[normalize_axis("pad", axis, ndim)] = width if isinstance(width, tuple) else (width, width)
        given = widths
    if hasattr(given, "tolist"):
        given = given.tolist()
    pairs = _pairs(given, ndim, "pad_width")
    if any(not hasattr(w, "__index__") or w < 0 for pair in pairs for w in pair):
        raise ShapeError(f"pad: pad_width {given!r} must be a pair of numbers >= 0 for each of {ndim} dimensions")
    return [(int(before), int(after)) for before, after in pairs]


def _pairs(given: Any, ndim: int, what: str) -> Pairs:
    """For each dimension what goes before and after: given for all at once, or as one pair, or one by one."""
    if getattr(given, "ndim", 0):
        given = [list(row) if getattr(row, "ndim", 0) else row for row in given]
    if not isinstance(given, (list, tuple)):
        return [(given, given)] * ndim
    rows = [tuple(row) if isinstance(row, (list, tuple)) else row for row in given]
    if all(not isinstance(row, tuple) for row in rows) and len(rows) in (1, 2):
        return [(rows[0], rows[-1])] * ndim
    pairs = [(row[0], row[-1]) for row in rows if isinstance(row, tuple) and 0 < len(row) < 3]
    complete = len(pairs) == len(rows)
    pairs = pairs * ndim if len(pairs) == 1 else pairs
    if len(pairs) != ndim or not complete:
        raise ShapeError(f"pad: {what} {given!r:.60} must be a pair for each of {ndim} dimensions")
    return pairs


def _by_axes(x: Tensor, widths: Pairs, how: Pairs, around: Callable[..., tuple[Tensor, ...]]) -> Tensor:
    """Pad one axis after the other with what ``around`` makes."""
    for a, ((before, after), details) in enumerate(zip(widths, how, strict=True)):
        if before or after:
            front, back = around(x, a, before, after, *details)
            x = concat([cast(front, x.dtype), x, cast(back, x.dtype)], axis=a)
    return x


def _wide(x: Tensor, a: int, n: int) -> tuple[int, ...]:
    return (*x.shape[:a], n, *x.shape[a + 1 :])


def _constant(x: Tensor, a: int, before: int, after: int, low: TensorLike, high: TensorLike) -> tuple[Tensor, ...]:
    return tuple(
        broadcast_to(cast(tensor("pad", v, x), x.dtype), _wide(x, a, n)) for v, n in ((low, before), (high, after))
    )


def _edge(x: Tensor, a: int, last: bool) -> Tensor:
    return x[(slice(None),) * a + (slice(-1, None) if last else slice(0, 1),)]


def _ramp(x: Tensor, a: int, before: int, after: int, low: TensorLike, high: TensorLike) -> tuple[Tensor, Tensor]:
    front, back = (
        linspace(cast(tensor("pad", end, x), x.dtype), squeeze(_edge(x, a, last), a), n, endpoint=False, axis=a)
        for end, n, last in ((low, before, False), (high, after, True))
    )
    return front, flip(back, axis=a)


def _statistic(x: Tensor, a: int, before: int, after: int, mode: str, lengths: Any) -> tuple[Tensor, ...]:
    n = x.shape[a]
    statistics = []
    for length, width, last in ((lengths[0], before, False), (lengths[1], after, True)):
        count = n if length is None or length > n else index(length)
        if not count:
            raise ShapeError("pad: a stat_length of 0 leaves nothing to make elements from")
        part = x[(slice(None),) * a + (slice(n - count, None) if last else slice(count),)]
        value = STATISTICS[mode](part, axis=a, keepdims=True)
        if dtypes.is_integer(x.dtype):
            value = round_even(value)
        statistics.append(broadcast_to(value, _wide(x, a, width)))
    return tuple(statistics)


def _odd(x: Tensor, a: int, before: int, after: int, mode: str, _: str) -> tuple[Tensor, Tensor]:
    """Reflected in position and value about the edge: every second copy reversed, each raised by the whole rise."""
    n = x.shape[a]
    period = n if mode == "symmetric" else n - 1
    if not period:
        front = broadcast_to(_edge(x, a, False), _wide(x, a, before))
        return front, broadcast_to(_edge(x, a, False), _wide(x, a, after))
    at = arange(-before, n + after, device=x.device)
    copies = at // period
    rest = at - copies * period
    turned = equal(copies % 2, 1)
    places = where(turned, (n - 1 if mode == "reflect" else period - 1) - rest, rest)
    column = (-1,) + (1,) * (x.ndim - 1 - a)
    first, last = _edge(x, a, False), _edge(x, a, True)
    copies, turned = reshape(cast(copies, x.dtype), column), reshape(turned, column)
    mirrored = take(x, places, axis=a)
    mirrored = where(turned, subtract(first + last, mirrored), mirrored) + multiply(copies, last - first)
    lead = (slice(None),) * a
    return mirrored[(*lead, slice(before))], mirrored[(*lead, slice(before + n, None))]
