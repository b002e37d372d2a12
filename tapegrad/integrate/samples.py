"""Integrals of samples."""

from __future__ import annotations

from tapegrad.core.aval import normalize_axis
from tapegrad.device import dtypes
from tapegrad.errors import ShapeError
from tapegrad.ops import moveaxis, sum
from tapegrad.ops.dispatch import promote, tensor, whole_in_float64
from tapegrad.tensor import Tensor, TensorLike


def simpson(y: TensorLike, x: TensorLike | None = None, *, dx: float = 1.0, axis: int = -1) -> Tensor:
    """The integral of samples along ``axis`` by Simpson's rule (scipy.integrate.simpson).

    x: where the samples lie, ``(n,)`` or shaped as ``y`` (default: ``dx`` apart).  An even number of samples takes
    Cartwright's correction for the last interval.  Raises ShapeError, AxisError.
    """
    (values,) = promote("simpson", (y,), whole_in_float64)
    at = normalize_axis("simpson", axis, values.ndim)
    values = moveaxis(values, at, -1)
    n = values.shape[-1]
    if not n:
        raise ShapeError(f"simpson: {values.shape} has no samples")
    gaps = _gaps(x, dx, values, at)
    if n < 3:
        return sum(gaps * (values[..., 1:] + values[..., :-1]) / 2, axis=-1)
    odd = n if n % 2 else n - 1
    integral = _parabolas(values[..., :odd], gaps[..., : odd - 1])
    return integral if n % 2 else integral + _last_interval(values[..., -3:], gaps[..., -2:])


def _gaps(x: TensorLike | None, dx: float, y: Tensor, at: int) -> Tensor:
    """The distances between neighbours, with the axis last."""
    n = y.shape[-1]
    if x is None:
        return tensor("simpson", y.device.array([dx] * (n - 1), dtype=dtypes.real_of(y.dtype)), y)
    (points,) = promote("simpson", (x,), whole_in_float64, y)
    if points.ndim > 1:
        points = moveaxis(points, at, -1)
    if not points.ndim or points.shape[-1] != n or points.ndim not in (1, y.ndim):
        raise ShapeError(f"simpson: x {points.shape} for samples {y.shape}, both with the axis {at} last")
    return points[..., 1:] - points[..., :-1]


def _parabolas(y: Tensor, h: Tensor) -> Tensor:
    """An odd number of samples: the parabola through every three."""
    one, two = h[..., 0::2], h[..., 1::2]
    both = one + two
    parts = y[..., 0:-2:2] * (2 - two / one) + y[..., 1:-1:2] * (both * both / (one * two))
    return sum(both / 6 * (parts + y[..., 2::2] * (2 - one / two)), axis=-1)


def _last_interval(y: Tensor, h: Tensor) -> Tensor:
    """The last of three samples' two intervals: Cartwright, "Simpson's rule cumulative integration" (2017)."""
    a, b = h[..., 0], h[..., 1]
    last = (2 * b * b + 3 * a * b) / (6 * (a + b))
    middle = (b * b + 3 * a * b) / (6 * a)
    return last * y[..., 2] + middle * y[..., 1] - b**3 / (6 * a * (a + b)) * y[..., 0]
