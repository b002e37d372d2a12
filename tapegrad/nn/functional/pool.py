"""Pooling under torch.nn.functional's names, on (n, channels, sizes ...) or, without n, on one image.

Of equal elements the first in C order is the largest one, and a NaN is larger than all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn import checks
from tapegrad.nn.functional._variants import in_dims
from tapegrad.nn.functional.conv import Lengths, Padding, lengths, pads
from tapegrad.ops.products.convolution import Window
from tapegrad.ops.rows.pooling import max_pool, max_pool_places, sum_pool
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "lp_pool1d", "lp_pool2d", "lp_pool3d", "max_pool1d", "max_pool2d",
    "max_pool3d", "max_unpool1d", "max_unpool2d", "max_unpool3d",
]  # fmt: skip


def planes(op: object, input: TensorLike, dims: int) -> Tensor:
    """The input, of which only the trailing axes matter.  Raises ShapeError."""
    x = ops.asarray(input)
    if x.ndim not in (dims + 1, dims + 2):
        sizes = f"{dims} sizes" if dims > 1 else "1 size"
        raise ShapeError(f"{op}: wanted input (n, channels, {sizes}) or (channels, {sizes}), got {x.shape}")
    return x


def _window(
    op: object, dims: int, x: Tensor, kernel_size: Lengths, stride: Lengths | None, padding: Padding,
    dilation: Lengths = 1, ceil_mode: bool = False,
) -> Window:  # fmt: skip
    kernel = lengths(op, "kernel_size", kernel_size, dims)
    strides = kernel if stride is None else lengths(op, "stride", stride, dims)
    spaced = lengths(op, "dilation", dilation, dims)
    size = x.shape[-dims:]
    around = pads(op, padding, size, kernel, strides, spaced)
    if ceil_mode:
        around = tuple(_rounded_up(*each) for each in zip(size, kernel, strides, spaced, around))
    return Window(size, kernel, strides, around, spaced)


def _rounded_up(n: int, k: int, s: int, d: int, around: tuple[int, int]) -> tuple[int, int]:
    """The padding with which a last window fits that starts inside the image or the padding before it."""
    low, high = around
    span, whole = (k - 1) * d + 1, n + low + high
    last = -(-(whole - span) // s)
    if last * s >= n + low:
        last -= 1
    return low, max(high, high + last * s + span - whole)


def _max_pool(
    dims: int, input: TensorLike, kernel_size: Lengths, stride: Lengths | None = None, padding: Padding = 0,
    dilation: Lengths = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> Any:  # fmt: skip
    """The largest element of each window; the gradient goes to the first of equal ones.

    input: (n, c, SIZES), result: (n, c, positions ...); ``stride`` is by default ``kernel_size``.  ``ceil_mode``: a
    last window may hang over the end.  ``return_indices``: the result and where in the flattened (SIZES) each comes
    from.

    Raises ShapeError.
    """
    op = f"max_pool{dims}d"
    x = planes(op, input, dims)
    window = _window(op, dims, x, kernel_size, stride, padding, dilation, ceil_mode)
    return max_pool_places(x, window=window) if return_indices else max_pool(x, window=window)


max_pool1d, max_pool2d, max_pool3d = in_dims("max_pool{}d", _max_pool)


def _avg_pool(
    dims: int, input: TensorLike, kernel_size: Lengths, stride: Lengths | None = None, padding: Padding = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """The mean of each window, in which padding counts as zeros unless ``count_include_pad`` is false.

    input: (n, c, SIZES), result: (n, c, positions ...); ``stride`` is by default ``kernel_size``.  ``ceil_mode``: a
    last window may hang over the end, where nothing counts.  ``divisor_override``: sums are divided by this number
    instead.

    Raises ShapeError.
    """
    op = f"avg_pool{dims}d"
    x = planes(op, input, dims)
    window = _window(op, dims, x, kernel_size, stride, padding, 1, ceil_mode)
    total = sum_pool(x, window=window)
    if divisor_override is not None:
        if not divisor_override:
            raise TapegradError(f"{op}: divisor_override must not be 0")
        return total / divisor_override
    counted = _window(op, dims, x, kernel_size, stride, padding).padding if count_include_pad else ((0, 0),) * dims
    if window.padding == counted:  # every window is full
        return total / math.prod(window.kernel)
    size = tuple(n + low + high for n, (low, high) in zip(window.size, counted))
    around = tuple((low - a, high - b) for (low, high), (a, b) in zip(window.padding, counted))
    ones = ops.ones(size, dtype=total.dtype, device=x.device)
    return total / sum_pool(ones, window=window._replace(size=size, padding=around))


def avg_pool1d(
    input: TensorLike, kernel_size: Lengths, stride: Lengths | None = None, padding: Padding = 0,
    ceil_mode: bool = False, count_include_pad: bool = True,
) -> Tensor:  # fmt: skip
    """The mean of each window: as :func:`avg_pool2d` with (n, c, l)."""
    return _avg_pool(1, input, kernel_size, stride, padding, ceil_mode, count_include_pad)


_, avg_pool2d, avg_pool3d = in_dims("avg_pool{}d", _avg_pool)


def _lp_pool(
    dims: int, input: TensorLike, norm_type: float, kernel_size: Lengths, stride: Lengths | None = None,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """``sum(x**p)**(1/p)`` of each window for ``p = norm_type``; where the sum is 0 the gradient is 0.

    input: (n, c, SIZES), result: (n, c, positions ...).  Raises ShapeError.
    """
    op = f"lp_pool{dims}d"
    x = planes(op, input, dims)
    window = _window(op, dims, x, kernel_size, stride, 0, 1, ceil_mode)
    total = sum_pool(x**norm_type, window=window)
    if ceil_mode:  # a window that hangs over the end counts as if it were full
        ones = sum_pool(ops.ones(window.size, dtype=total.dtype, device=x.device), window=window)
        total = total * (math.prod(window.kernel) / ones)
    none = total == 0  # the root's slope at 0 is infinite
    return ops.where(none, 0, ops.where(none, 1, total) ** (1.0 / norm_type))


lp_pool1d, lp_pool2d, lp_pool3d = in_dims("lp_pool{}d", _lp_pool)


def _max_unpool(
    dims: int, input: TensorLike, indices: TensorLike, kernel_size: Lengths, stride: Lengths | None = None,
    padding: Lengths = 0, output_size: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Elements put back to where the maximum took them from (``return_indices=True``), with zeros elsewhere.

    input and indices: (n, c, positions ...), result: (n, c, SIZES).  Of several with one index the last one counts,
    and it alone gets the gradient.  Raises ShapeError, IndexingError.
    """
    op = f"max_unpool{dims}d"
    x, places = planes(op, input, dims), ops.asarray(indices)
    if places.shape != x.shape:
        raise ShapeError(f"{op}: wanted indices of the shape of input {x.shape}, got {places.shape}")
    kernel = lengths(op, "kernel_size", kernel_size, dims)
    strides = kernel if stride is None else lengths(op, "stride", stride, dims)
    around = lengths(op, "padding", padding, dims, 0)
    usual = tuple((n - 1) * s - 2 * p + k for n, s, p, k in zip(x.shape[-dims:], strides, around, kernel))
    size = usual if output_size is None else tuple(output_size)[-dims:]
    if len(size) != dims or any(not u - s < n < u + s for n, u, s in zip(size, usual, strides)):
        raise ShapeError(f"{op}: output_size {output_size} must be within a stride {strides} of {usual}")
    lead, whole = x.shape[:-dims], math.prod(size)
    checks.within(op, "indices", places, whole)
    places = ops.clip(places, 0, max(0, whole - 1))  # on a GPU the error comes later: write into no other plane
    rows = math.prod(lead)
    first = ops.reshape(ops.arange(rows, device=x.device) * whole, (rows, 1))
    at = ops.reshape(ops.reshape(places, (rows, math.prod(x.shape[-dims:]))) + first, (x.size,))
    empty = ops.zeros((rows * whole,), dtype=x.dtype, device=x.device)
    return ops.reshape(empty.at[at].set(ops.reshape(x, (x.size,))), (*lead, *size))


max_unpool1d, max_unpool2d, max_unpool3d = in_dims("max_unpool{}d", _max_unpool)
