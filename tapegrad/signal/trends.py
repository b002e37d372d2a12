"""Taking trends away."""

from __future__ import annotations

from collections.abc import Sequence

from tapegrad.core.aval import normalize_axis
from tapegrad.device import dtypes
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.ops import arange, concat, mean, moveaxis, sum
from tapegrad.ops.dispatch import promote, whole_in_float64
from tapegrad.ops.shape.shape import shape_of
from tapegrad.tensor import Tensor, TensorLike


def detrend(data: TensorLike, axis: int = -1, type: str = "linear", bp: int | Sequence[int] = 0) -> Tensor:
    """``data`` less its mean (``constant``) or its least-squares line (``linear``) along ``axis``
    (scipy.signal.detrend).

    bp: positions at which a new line begins.  Raises TapegradError for a type, ShapeError for positions beyond the
    end, AxisError.
    """
    (x,) = promote("detrend", (data,), whole_in_float64)
    at = normalize_axis("detrend", axis, x.ndim)
    if type in ("constant", "c"):
        return x - mean(x, axis=at, keepdims=True)
    if type not in ("linear", "l"):
        raise TapegradError(f"detrend: type {type!r}; take 'linear' or 'constant'")
    n = x.shape[at]
    breaks = sorted({0, n, *shape_of(bp)})
    if breaks[-1] > n or breaks[0] < 0:
        raise ShapeError(f"detrend: break points {bp} for a length of {n}")
    last = moveaxis(x, at, -1)
    parts = [_without_line(last[..., a:b]) for a, b in zip(breaks, breaks[1:])]
    return moveaxis(concat(parts, axis=-1) if parts else last, -1, at)


def _without_line(x: Tensor) -> Tensor:
    n = x.shape[-1]
    rest = x - mean(x, axis=-1, keepdims=True)
    if n == 1:
        return rest
    t = arange(n, dtype=dtypes.real_of(x.dtype), device=x.device) - (n - 1) / 2
    return rest - t * (12.0 / (n * (n * n - 1.0)) * sum(rest * t, axis=-1, keepdims=True))
