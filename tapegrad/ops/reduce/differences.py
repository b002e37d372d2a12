"""Numerical derivatives and integrals of sampled functions, and interpolation between samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapegrad.core.aval import normalize_axes, normalize_axis
from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.ops.dispatch import barrier, cast, of_floats, precise, promote, tensor
from tapegrad.ops.elementwise.arithmetic import maximum, minimum, remainder
from tapegrad.ops.elementwise.comparison import equal, isnan
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.indexing import take_p
from tapegrad.ops.index.sort import argsort, searchsorted
from tapegrad.ops.reduce.cumulative import cumulative_sum, diff
from tapegrad.ops.reduce.reductions import sum
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import broadcast_to, reshape
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["cumulative_trapezoid", "ediff1d", "gradient", "interp", "trapezoid"]


def _along(x: Tensor, axis: int, *part: int | None) -> Tensor:
    return x[(slice(None),) * axis + (slice(*part),)]


def _spacings(varargs: Sequence[Any], f: Tensor, axes: Sequence[int]) -> list[Any]:
    """For each axis a number, or the differences of its coordinates."""
    given = list(varargs) or [1.0]
    if len(given) == 1:
        given = given * len(axes)
    if len(given) != len(axes):
        raise ShapeError(f"gradient: {len(varargs)} spacings for {len(axes)} axes")
    steps = []
    for h, a in zip(given, axes, strict=True):
        h = h if isinstance(h, (int, float)) else tensor("gradient", h, f)
        if isinstance(h, Tensor) and h.ndim:
            if h.shape != (f.shape[a],):
                raise ShapeError(f"gradient: coordinates of shape {h.shape} for axis {a} of {f.shape}")
            h = diff(cast(h, dtypes.float64) if dtypes.is_integer(h.dtype) else h)
        steps.append(h)
    return steps


def gradient(f: Any, *varargs: object, axis: int | Sequence[int] | None = None, edge_order: int = 1) -> Any:
    """Derivatives of samples along ``axis`` (None: each) by central differences (NumPy's ``gradient``).

    varargs: a spacing (1), or one for each axis: a number, or the samples' coordinates; differentiable in them, too.
    At the ends differences of order ``edge_order`` (1 or 2).  One axis: a tensor, several: a tuple.  Evenly spaced
    coordinates are not treated apart, so last bits may differ from NumPy's.  Raises ShapeError, AxisError.
    """
    x = tensor("gradient", f)
    if not dtypes.is_inexact(x.dtype):
        x = cast(x, dtypes.float64)
    named = range(x.ndim) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = [normalize_axis("gradient", a, x.ndim) for a in named]
    normalize_axes("gradient", axes, x.ndim)  # no axis twice
    if edge_order not in (1, 2):
        raise TapegradError(f"gradient: edge_order={edge_order}; 1 or 2")
    slopes = []
    for a, h in zip(axes, _spacings(varargs, x, axes), strict=True):
        if x.shape[a] < edge_order + 1:
            raise ShapeError(f"gradient: axis {a} of {x.shape} has fewer than {edge_order + 1} elements")
        even = not isinstance(h, Tensor) or not h.ndim
        parts = _even(x, a, h, edge_order) if even else _uneven(x, a, h, edge_order)
        slopes.append(cast(concat(parts, axis=a), x.dtype))
    return slopes[0] if len(slopes) == 1 else tuple(slopes)


def _three(x: Tensor, a: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three neighbours, from ``first`` on."""
    n = x.shape[a]
    first %= n
    p, q, r = (_along(x, a, first + k, first + k + 1) for k in range(3))
    return p, q, r


def _even(x: Tensor, a: int, h: Tensor | float, order: int) -> list[Tensor]:
    inner = (_along(x, a, 2, None) - _along(x, a, None, -2)) / (2.0 * h)
    if order == 1:
        first = (_along(x, a, 1, 2) - _along(x, a, 0, 1)) / h
        last = (_along(x, a, -1, None) - _along(x, a, -2, -1)) / h
        return [first, inner, last]
    p, q, r = _three(x, a, 0)
    first = -1.5 / h * p + 2.0 / h * q + -0.5 / h * r
    p, q, r = _three(x, a, -3)
    return [first, inner, 0.5 / h * p + -2.0 / h * q + 1.5 / h * r]


def _uneven(x: Tensor, a: int, h: Tensor, order: int) -> list[Tensor]:
    column = (1,) * a + (-1,) + (1,) * (x.ndim - 1 - a)
    p, q = (reshape(part, column) if part.size else reshape(part, (1,) * a + (0,) + (1,) * (x.ndim - 1 - a))
            for part in (h[:-1], h[1:]))  # fmt: skip
    left, middle, right = -q / (p * (p + q)), (q - p) / (p * q), p / (q * (p + q))
    inner = left * _along(x, a, None, -2) + middle * _along(x, a, 1, -1) + right * _along(x, a, 2, None)
    if order == 1:
        first = (_along(x, a, 1, 2) - _along(x, a, 0, 1)) / h[0]
        last = (_along(x, a, -1, None) - _along(x, a, -2, -1)) / h[-1]
        return [first, inner, last]
    u, v = h[0], h[1]
    s, t, w = _three(x, a, 0)
    first = -(2.0 * u + v) / (u * (u + v)) * s + (u + v) / (u * v) * t + -u / (v * (u + v)) * w
    u, v = h[-2], h[-1]
    s, t, w = _three(x, a, -3)
    return [first, inner, v / (u * (u + v)) * s + -(v + u) / (u * v) * t + (2.0 * v + u) / (v * (u + v)) * w]


def _steps(op: str, y: Tensor, x: TensorLike | None, dx: TensorLike, a: int) -> Any:
    """Distances between samples along axis ``a``: a number, or a tensor that broadcasts."""
    if x is None:
        return dx
    x = tensor(op, x, y)
    if x.ndim != 1:
        return diff(x, axis=a - y.ndim + x.ndim)
    if x.shape[0] != y.shape[a]:
        raise ShapeError(f"{op}: coordinates of shape {x.shape} for axis {a} of {y.shape}")
    return reshape(diff(x), (max(0, x.size - 1),) + (1,) * (y.ndim - 1 - a))


@of_floats()
def trapezoid(y: TensorLike, x: TensorLike | None = None, dx: TensorLike = 1.0, axis: int = -1) -> Tensor:
    """The integral along ``axis`` by the trapezoidal rule over coordinates ``x``, or steps of ``dx``.

    Differentiable in all three.  Raises AxisError, ShapeError.
    """
    y = tensor("trapezoid", y)
    a = normalize_axis("trapezoid", axis, y.ndim)
    d = _steps("trapezoid", y, x, dx, a)
    return sum(d * (_along(y, a, 1, None) + _along(y, a, None, -1)) / 2.0, axis=a - y.ndim)


@of_floats()
def cumulative_trapezoid(
    y: TensorLike, x: TensorLike | None = None, dx: TensorLike = 1.0, axis: int = -1, initial: TensorLike | None = None
) -> Tensor:
    """The integrals up to each sample along ``axis`` by the trapezoidal rule (SciPy's ``cumulative_trapezoid``).

    initial: put in front (0 in SciPy; None: the result is shorter by 1).  Raises AxisError, ShapeError.
    """
    y = tensor("cumulative_trapezoid", y)
    a = normalize_axis("cumulative_trapezoid", axis, y.ndim)
    d = _steps("cumulative_trapezoid", y, x, dx, a)
    parts = d * (_along(y, a, 1, None) + _along(y, a, None, -1)) / 2.0
    sums = cumulative_sum(parts, axis=a - y.ndim + parts.ndim)
    if initial is None:
        return sums
    first = broadcast_to(tensor("cumulative_trapezoid", initial, y), (*sums.shape[:a], 1, *sums.shape[a + 1 :]))
    return concat([cast(first, sums.dtype), sums], axis=a)


def ediff1d(ary: TensorLike, to_end: TensorLike | None = None, to_begin: TensorLike | None = None) -> Tensor:
    """Differences of neighbours in the flattened array, between ``to_begin`` and ``to_end``, flattened.

    Raises DTypeError for bools.
    """
    x = tensor("ediff1d", ary)
    if x.dtype.kind == "b":
        raise DTypeError("ediff1d: bools have no differences; cast x to an integer dtype first")
    steps = diff(reshape(x, (x.size,)))
    around = [None if part is None else cast(tensor("ediff1d", part, x), x.dtype) for part in (to_begin, to_end)]
    begin, end = ([] if part is None else [reshape(part, (part.size,))] for part in around)
    return concat([*begin, steps, *end]) if begin or end else steps


def interp(
    x: TensorLike, xp: TensorLike, fp: TensorLike, left: TensorLike | None = None, right: TensorLike | None = None,
    period: float | None = None,
) -> Tensor:  # fmt: skip
    """The line through the points ``(xp, fp)``, ``xp`` ascending, at ``x``, in float64 (NumPy's ``interp``).

    Outside: ``left`` and ``right`` (None: the end values); period: ``x`` and ``xp`` are taken modulo it.
    Differentiable in ``x`` (at a point: the slope after it, at the last point before it; outside 0), ``xp`` and ``fp``
    (real or complex).  Raises
    ShapeError.
    """
    at, knots = promote("interp", (precise("interp", x), precise("interp", xp)), lambda d: dtypes.float64)
    values = precise("interp", fp, at)
    values = cast(values, dtypes.complex128 if values.dtype.kind == "c" else dtypes.float64)
    if knots.ndim != 1 or knots.shape != values.shape or not knots.size:
        raise ShapeError(
            f"interp: xp of shape {knots.shape} and fp of shape {values.shape}; need equal vectors, not empty"
        )
    if period is not None:
        period = abs(period)
        at, knots = remainder(at, period), remainder(knots, period)
        order = argsort(knots)
        knots, values = (barrier(take_p, part, order, axis=0) for part in (knots, values))
        knots = concat([knots[-1:] - period, knots, knots[:1] + period])
        values = concat([values[-1:], values, values[:1]])
        left = right = None
    return _interpolated(at, knots, values, left, right)


def _interpolated(
    at: Tensor, knots: Tensor, values: Tensor, left: TensorLike | None, right: TensorLike | None
) -> Tensor:
    n = knots.size
    low, high = (values[0] if left is None else left), (values[-1] if right is None else right)
    last = knots[-1]
    if n == 1:
        line = broadcast_to(values[0], at.shape)
    else:
        interval = unrecorded(lambda: minimum(maximum(searchsorted(knots, at, side="right") - 1, 0), n - 2))
        inside = unrecorded(lambda: (at >= knots[0]) & (at <= last))
        at_last = unrecorded(equal, at, last)
        x0, x1, y0, y1 = (barrier(take_p, part, interval + k, axis=0) for part in (knots, values) for k in (0, 1))
        held = where(inside, at, x0)
        slope = (y1 - y0) / where(equal(x0, x1), 1, x1 - x0)
        line = where(at_last, slope * (held - x1) + y1, slope * (held - x0) + y0)
    line = where(at < knots[0], low, where(at > last, high, line))
    return where(isnan(at), cast(at, line.dtype) if line.dtype != at.dtype else at, line)
