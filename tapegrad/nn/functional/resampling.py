"""Images at other resolutions: torch.nn.functional's interpolate, one axis after the other.

Places and weights are computed in double precision, so that results differ from PyTorch's in float32 by roundings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn.functional.adaptive import adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d
from tapegrad.nn.functional.conv import lengths
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["interpolate", "upsample"]

_DIMS = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2}
_AREA = (adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d)


def interpolate(
    input: TensorLike, size: int | Sequence[int] | None = None, scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest", align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
) -> Tensor:  # fmt: skip
    """``input`` at another size: (n, c, sizes ...) -> (n, c, *size), or ``scale_factor`` times the sizes, rounded down.

    mode: "nearest", "nearest-exact", "linear" (1 size), "bilinear", "bicubic" (2; Keys' kernel with -0.75), "trilinear"
    (3) or "area".  ``align_corners``: the outer pixels' centres, not edges, coincide.  ``recompute_scale_factor``: the
    scale is that of the rounded sizes.  Raises ShapeError, TapegradError.
    """
    x = source = ops.asarray(input)
    dims = x.ndim - 2
    if dims not in (1, 2, 3) or _DIMS.get(mode, dims) != dims:
        raise ShapeError(f"interpolate: mode {mode!r} does not fit input {x.shape}; wanted (n, c, 1 to 3 sizes)")
    if mode not in ("nearest", "nearest-exact", "area", *_DIMS):
        raise TapegradError(f"interpolate: unknown mode {mode!r}")
    if align_corners is not None and mode not in _DIMS:
        raise TapegradError(f"interpolate: align_corners is for modes {', '.join(_DIMS)}, not {mode!r}")
    wanted, scales = _sizes(x.shape[2:], size, scale_factor, bool(recompute_scale_factor))
    if not all(wanted) or not math.prod(x.shape[2:]):
        raise ShapeError(f"interpolate: {x.shape} to {wanted}: sizes must be positive")
    if mode == "area":
        return _AREA[dims - 1](x, wanted)
    rules: dict[str, Callable[..., Tensor]] = {
        "nearest": _nearest, "nearest-exact": functools.partial(_nearest, within=0.5), "bicubic": _cubic,
    }  # fmt: skip
    rule = rules.get(mode, _linear)
    for axis, (n, scale) in enumerate(zip(wanted, scales), 2):
        x = rule(x, axis, n, scale, bool(align_corners))
    return ops.asarray(x, copy=True) if x is source else x


upsample = interpolate


def _sizes(
    size: tuple[int, ...], wanted: Any, factor: Any, recompute: bool
) -> tuple[tuple[int, ...], tuple[float | None, ...]]:
    """The result's sizes, and the factors to use instead of their ratios."""
    dims = len(size)
    if (wanted is None) == (factor is None):
        raise ShapeError("interpolate: give either size or scale_factor")
    if factor is None:
        return lengths("interpolate", "size", wanted, dims, 0), (None,) * dims
    factors = (float(factor),) * dims if isinstance(factor, (int, float, Real)) else tuple(factor)
    if len(factors) != dims:
        raise ShapeError(f"interpolate: wanted {dims} scale factors, got {factor!r}")
    sizes = tuple(math.floor(n * f) for n, f in zip(size, factors))
    return sizes, (None,) * dims if recompute else factors


def _taken(x: Tensor, axis: int, places: Sequence[int]) -> Tensor:
    if list(places) == list(range(x.shape[axis])):
        return x
    return ops.take(x, ops.asarray(list(places), dtype="int64", device=x.device), axis=axis)


def _step(n: int, m: int, scale: float | None) -> float:
    """The distance of the result's pixels on the input."""
    return 1.0 / scale if scale else n / m


def _nearest(x: Tensor, axis: int, m: int, scale: float | None, align: bool, within: float = 0.0) -> Tensor:
    """``within``: which point of a pixel of the result counts, from 0 to 1."""
    n = x.shape[axis]
    step = _step(n, m, scale)
    return _taken(x, axis, [min(math.floor((i + within) * step), n - 1) for i in range(m)])


def _centres(n: int, m: int, scale: float | None, align: bool) -> list[float]:
    """Where the result's pixels lie on the input."""
    if align:
        return [i * (n - 1) / (m - 1) if m > 1 else 0.0 for i in range(m)]
    step = _step(n, m, scale)
    return [(i + 0.5) * step - 0.5 for i in range(m)]


def _weighed(x: Tensor, axis: int, taps: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Tensor:
    """The sum of elements along ``axis`` at the places of each tap times its weights."""
    x = x if "float" in str(x.dtype) or "complex" in str(x.dtype) else ops.astype(x, "float64")
    shape, total = (-1, *(1,) * (x.ndim - 1 - axis)), None
    for places, weights in taps:
        part = _taken(x, axis, places) * ops.reshape(ops.asarray(weights, dtype=x.dtype, device=x.device), shape)
        total = part if total is None else total + part
    assert total is not None  # there is a tap
    return total


def _linear(x: Tensor, axis: int, m: int, scale: float | None, align: bool) -> Tensor:
    n = x.shape[axis]
    at = [max(c, 0.0) for c in _centres(n, m, scale, align)]
    low = [min(int(c), n - 1) for c in at]
    share = [min(max(c - p, 0.0), 1.0) for c, p in zip(at, low)]
    if not any(share):
        return _taken(x, axis, low)
    high = [min(p + 1, n - 1) for p in low]
    return _weighed(x, axis, [(low, [1.0 - s for s in share]), (high, share)])


T = TypeVar("T", float, Tensor)


def cubic_weights(t: T) -> tuple[T, T, T, T]:
    """Keys' weights (1981) with -0.75, as PyTorch, of the four neighbours of a point ``t`` after the second."""
    a = -0.75
    near = lambda d: ((a + 2) * d - (a + 3)) * d * d + 1
    far = lambda d: ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return far(t + 1), near(t), near(1 - t), far(2 - t)


def _cubic(x: Tensor, axis: int, m: int, scale: float | None, align: bool) -> Tensor:
    n = x.shape[axis]
    at = _centres(n, m, scale, align)
    base = [math.floor(c) for c in at]
    weights = list(zip(*(cubic_weights(c - p) for c, p in zip(at, base))))
    places = [[min(max(p + k, 0), n - 1) for p in base] for k in range(-1, 3)]
    return _weighed(x, axis, list(zip(places, weights)))
