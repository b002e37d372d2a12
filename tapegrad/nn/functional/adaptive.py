"""Pooling to a given number of positions: adaptive, fractional, in a pyramid; and Chainer's unpooling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import tapegrad.random as random
from tapegrad import ops
from tapegrad.errors import ShapeError
from tapegrad.nn.functional._variants import in_dims
from tapegrad.nn.functional.conv import Lengths, lengths
from tapegrad.nn.functional.pool import planes
from tapegrad.ops.products.convolution import Window
from tapegrad.ops.rows.pooling import max_pool, spread_pool
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d", "spatial_pyramid_pooling_2d",
    "unpooling_1d", "unpooling_2d", "unpooling_3d", "unpooling_nd",
]  # fmt: skip

Size = int | Sequence[int | None] | None
"""Positions along each dimension; None: as many as the input has."""


def _sizes(op: str, x: Tensor, output_size: Size, dims: int) -> tuple[int, ...]:
    wanted = (
        (output_size,) * dims if isinstance(output_size, (int, Integral)) or output_size is None else tuple(output_size)
    )
    sizes: tuple[int, ...] = tuple(n if m is None else m for n, m in zip(x.shape[-dims:], wanted))
    if len(wanted) != dims or any(not isinstance(m, (int, Integral)) or m < 0 for m in sizes):
        raise ShapeError(f"{op}: wanted an integer, or {dims} of them or None, for output_size, got {output_size!r}")
    if not all(x.shape[-dims:]) and all(sizes):
        raise ShapeError(f"{op}: the planes of {x.shape} have no elements to pool")
    return tuple(map(int, sizes))


def _bins(n: int, count: int) -> tuple[list[list[int]], list[list[bool]], list[int]]:
    """For ``count`` bins over ``n`` elements: the positions each reads (equally many), which count, how many."""
    ends = [(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]
    most = max((stop - start for start, stop in ends), default=1)
    places = [[min(start + j, n - 1) for j in range(most)] for start, _ in ends]
    kept = [[start + j < stop for j in range(most)] for start, stop in ends]
    return places, kept, [stop - start for start, stop in ends]


def _gathered(x: Tensor, axis: int, count: int, fill: float) -> tuple[Tensor, Tensor]:
    """``x`` with ``axis`` (negative) split into bins and their elements (``fill`` for missing ones); the positions."""
    places, kept, sizes = _bins(x.shape[axis], count)
    at = (
        ops.asarray(places, dtype="int64", device=x.device)
        if count
        else ops.zeros((0, 1), dtype="int64", device=x.device)
    )
    cells = ops.take(x, at, axis=axis)
    if len(set(sizes)) > 1:
        mask = ops.asarray(kept, dtype="bool", device=x.device)
        cells = ops.where(ops.reshape(mask, (*mask.shape, *(1,) * (-1 - axis))), cells, fill)
    return cells, at


def _adaptive_avg(dims: int, input: TensorLike, output_size: Size) -> Tensor:
    """Means of ``output_size`` bins along each size; bin i of m over n: from ``i * n // m`` to ``(i + 1) * n / m``.

    input: (n, c, SIZES), result: (n, c, *output_size); None keeps a size.  Raises ShapeError.
    """
    op = f"adaptive_avg_pool{dims}d"
    x = planes(op, input, dims)
    x = x if "float" in str(x.dtype) else ops.astype(x, "float64")
    for axis, count in zip(range(-dims, 0), _sizes(op, x, output_size, dims)):
        sizes = _bins(x.shape[axis], count)[2]
        cells, _ = _gathered(x, axis, count, 0.0)
        lengths = ops.asarray(sizes, dtype=x.dtype, device=x.device)
        x = ops.sum(cells, axis=axis) / ops.reshape(lengths, (-1, *(1,) * (-1 - axis)))
    return x


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = in_dims("adaptive_avg_pool{}d", _adaptive_avg)


def _adaptive_max(dims: int, input: TensorLike, output_size: Size, return_indices: bool = False) -> Any:
    """The largest of each of ``output_size`` bins (see ``adaptive_avg_pool2d``); gradient to the first of equals.

    input: (n, c, SIZES), result: (n, c, *output_size); ``return_indices``: also where in the flattened (SIZES) it was.
    Raises ShapeError.
    """
    op = f"adaptive_max_pool{dims}d"
    x = planes(op, input, dims)
    size = x.shape[-dims:]
    flat = None
    # One axis after the other, the last one first: of equal elements the first in C order remains.
    for axis, count in reversed(list(zip(range(-dims, 0), _sizes(op, x, output_size, dims)))):
        cells, at = _gathered(x, axis, count, -math.inf)
        x, flat = _largest(cells, at, axis, flat, math.prod(size[axis + 1 :]) if axis < -1 else 1)
    return (x, flat) if return_indices else x


def _largest(cells: Tensor, at: Tensor, axis: int, flat: Tensor | None, stride: int) -> tuple[Tensor, Tensor]:
    """The largest of each bin (the axis ``axis``), and its position in the flattened plane."""
    best = ops.argmax(cells, axis=axis, keepdims=True)
    values = ops.squeeze(ops.take_along_axis(cells, best, axis=axis), axis=axis)
    spread = ops.reshape(at * stride, (*at.shape, *(1,) * (-1 - axis)))
    if flat is not None:
        spread = spread + ops.take(flat, at, axis=axis)
    spread = ops.broadcast_to(spread, cells.shape)
    return values, ops.squeeze(ops.take_along_axis(spread, best, axis=axis), axis=axis)


adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = in_dims("adaptive_max_pool{}d", _adaptive_max)


def _fractional(
    dims: int, input: TensorLike, kernel_size: Lengths, output_size: Lengths | None, output_ratio: Any,
    return_indices: bool, samples: TensorLike | None,
) -> Any:  # fmt: skip
    op = f"fractional_max_pool{dims}d"
    x = planes(op, input, dims)
    kernel = lengths(op, "kernel_size", kernel_size, dims)
    if (output_size is None) == (output_ratio is None):
        raise ShapeError(f"{op}: give either output_size or output_ratio")
    if output_size is None:
        ratios = (output_ratio,) * dims if isinstance(output_ratio, float) else tuple(output_ratio)
        output_size = tuple(int(n * r) for n, r in zip(x.shape[-dims:], ratios))
    counts = lengths(op, "output_size", output_size, dims)
    if any(m + k - 1 > n for n, m, k in zip(x.shape[-dims:], counts, kernel)):
        raise ShapeError(f"{op}: {counts} windows of size {kernel} do not fit into {x.shape}")
    single = x.ndim == dims + 1
    batch = ops.expand_dims(x, axis=0) if single else x
    drawn = random.uniform((*batch.shape[:2], dims), dtype="float64", device=x.device) if samples is None else samples
    places = _fractional_places(batch, ops.asarray(drawn), counts, kernel)
    n, c, size = *batch.shape[:2], batch.shape[2:]
    columns = ops.reshape(places, (n, c, math.prod(counts), math.prod(kernel)))
    flat = ops.reshape(batch, (n, c, math.prod(size)))
    cells = ops.take_along_axis(flat, ops.reshape(columns, (n, c, math.prod(columns.shape[2:]))), axis=-1)
    cells = ops.reshape(cells, columns.shape)
    best = ops.argmax(cells, axis=-1, keepdims=True)
    y, at = (ops.reshape(ops.take_along_axis(a, best, axis=-1), (n, c, *counts)) for a in (cells, columns))
    if single:
        y, at = ops.squeeze(y, axis=0), ops.squeeze(at, axis=0)
    return (y, at) if return_indices else y


def _fractional_places(x: Tensor, samples: Tensor, counts: tuple[int, ...], kernel: tuple[int, ...]) -> Tensor:
    """Flat places of the elements of each window: (n, c, *counts, *kernel)."""
    dims, places = len(counts), ops.zeros((), dtype="int64", device=x.device)
    for a, (n, m, k) in enumerate(zip(x.shape[2:], counts, kernel)):
        # PyTorch's samples are in the order (w, h) or (d, h, w) of Graham's paper and of its own 3-d kernel.
        u = samples[..., dims - 1 - a if dims == 2 else a][..., None]
        step = (n - k) / (m - 1) if m > 1 else 0.0
        i = ops.arange(m, device=x.device)
        start = ops.astype(ops.floor((i + u) * step), "int64") - ops.astype(ops.floor(u * step), "int64")
        start = ops.where(i == m - 1, n - k, start)
        at = ops.expand_dims(start, axis=-1) + ops.arange(k, device=x.device)
        apart = [*x.shape[:2], *(1,) * (2 * dims)]
        apart[2 + a], apart[2 + dims + a] = m, k
        places = places * n + ops.reshape(at, tuple(apart))
    return places


def fractional_max_pool2d(
    input: TensorLike, kernel_size: Lengths, output_size: Lengths | None = None,
    output_ratio: float | Sequence[float] | None = None,
    return_indices: bool = False, _random_samples: TensorLike | None = None,
) -> Any:  # fmt: skip
    """The largest element of windows at random places that follow each other evenly (Graham, arXiv 1412.6071).

    input: (n, c, h, w), result: (n, c, *output_size); ``output_ratio``: of the sizes, instead.  ``_random_samples``:
    (n, c, 2) in [0, 1), drawn if not given.  ``return_indices``: see :func:`max_pool2d`.  Raises ShapeError.
    """
    return _fractional(2, input, kernel_size, output_size, output_ratio, return_indices, _random_samples)


def fractional_max_pool3d(
    input: TensorLike, kernel_size: Lengths, output_size: Lengths | None = None,
    output_ratio: float | Sequence[float] | None = None,
    return_indices: bool = False, _random_samples: TensorLike | None = None,
) -> Any:  # fmt: skip
    """As :func:`fractional_max_pool2d` with (n, c, d, h, w) and samples (n, c, 3)."""
    return _fractional(3, input, kernel_size, output_size, output_ratio, return_indices, _random_samples)


def spatial_pyramid_pooling_2d(x: TensorLike, pyramid_height: int) -> Tensor:
    """Maxima over 1, 4, 16, ... bins of each channel, one after the other (He et al., arXiv 1406.4729; Chainer).

    x: (n, c, h, w), result: (n, c * (4**pyramid_height - 1) / 3, 1, 1).  Raises ShapeError.
    """
    x = ops.asarray(x)
    if x.ndim != 4 or pyramid_height < 1:
        raise ShapeError(f"spatial_pyramid_pooling_2d: wanted (n, c, h, w) and a height >= 1, got {x.shape}")
    levels = []
    for level in range(pyramid_height):
        kernel = tuple(-(-n // 2**level) for n in x.shape[2:])
        more = tuple(k * 2**level - n for k, n in zip(kernel, x.shape[2:]))
        around = tuple((m // 2, m - m // 2) for m in more)
        pooled = max_pool(x, window=Window(x.shape[2:], kernel, kernel, around, (1, 1)))
        levels.append(ops.reshape(pooled, (x.shape[0], x.shape[1] * 4**level, 1, 1)))
    return ops.concat(levels, axis=1)


def unpooling_nd(
    x: TensorLike, ksize: Lengths, stride: Lengths | None = None, pad: Lengths = 0,
    outsize: Lengths | None = None, cover_all: bool = True,
) -> Tensor:  # fmt: skip
    """Each element spread over its window, overlapping ones added up (Chainer's function): avg_pool's transpose.

    x: (n, c, positions ...), result: (n, c, *outsize).  Raises ShapeError.
    """
    x = ops.asarray(x)
    dims = x.ndim - 2
    if dims < 1:
        raise ShapeError(f"unpooling_nd: wanted (n, channels, sizes ...), got {x.shape}")
    kernel = lengths("unpooling_nd", "ksize", ksize, dims)
    strides = kernel if stride is None else lengths("unpooling_nd", "stride", stride, dims)
    around = lengths("unpooling_nd", "pad", pad, dims, 0)
    reach = [(n - 1) * s + k for n, s, k in zip(x.shape[2:], strides, kernel)]
    if outsize is None:
        size = tuple(r - 2 * p - (s - 1 if cover_all else 0) for r, p, s in zip(reach, around, strides))
    else:
        size = lengths("unpooling_nd", "outsize", outsize, dims)
    pairs = tuple((p, max(0, r - n - p)) for p, r, n in zip(around, reach, size))
    return spread_pool(x, window=Window(size, kernel, strides, pairs, (1,) * dims))


def _unpooling(
    dims: int, x: TensorLike, ksize: Lengths, stride: Lengths | None = None, pad: Lengths = 0,
    outsize: Lengths | None = None, cover_all: bool = True,
) -> Tensor:  # fmt: skip
    """:func:`unpooling_nd` of (n, c, SIZES)."""
    return unpooling_nd(planes(f"unpooling_{dims}d", x, dims), ksize, stride, pad, outsize, cover_all)


unpooling_1d, unpooling_2d, unpooling_3d = in_dims("unpooling_{}d", _unpooling)
