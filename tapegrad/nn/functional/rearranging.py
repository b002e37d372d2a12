"""Rearrangements of images under torch.nn.functional's names: windows as columns, channels as pixels, shuffles."""

from __future__ import annotations

import math

from tapegrad import ops
from tapegrad.errors import ShapeError
from tapegrad.nn.functional.conv import Lengths, lengths
from tapegrad.ops.products.convolution import Window
from tapegrad.ops.shape.patches import fold_windows, unfold_windows
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["channel_shuffle", "fold", "pixel_shuffle", "pixel_unshuffle", "shift", "unfold"]


def _window(
    op: str, size: tuple[int, ...], kernel_size: Lengths, dilation: Lengths, padding: Lengths, stride: Lengths
) -> Window:
    around = lengths(op, "padding", padding, 2, 0)
    return Window(
        size,
        lengths(op, "kernel_size", kernel_size, 2),
        lengths(op, "stride", stride, 2),
        tuple((p, p) for p in around),
        lengths(op, "dilation", dilation, 2),
    )


def unfold(
    input: TensorLike, kernel_size: Lengths, dilation: Lengths = 1, padding: Lengths = 0, stride: Lengths = 1
) -> Tensor:
    """What each window holds, as a column: (n, c, h, w) -> (n, c * kh * kw, positions), or both without n.

    Raises ShapeError.
    """
    x = ops.asarray(input)
    if x.ndim not in (3, 4):
        raise ShapeError(f"unfold: wanted input (n, c, h, w) or (c, h, w), got {x.shape}")
    window = _window("unfold", x.shape[-2:], kernel_size, dilation, padding, stride)
    columns = unfold_windows(x, window=window)  # (n, c, taps, rows, columns)
    taps, positions = math.prod(window.kernel), math.prod(window.positions)
    return ops.reshape(columns, (*x.shape[:-3], x.shape[-3] * taps, positions))


def fold(
    input: TensorLike, output_size: Lengths, kernel_size: Lengths, dilation: Lengths = 1, padding: Lengths = 0,
    stride: Lengths = 1,
) -> Tensor:  # fmt: skip
    """The transpose of :func:`unfold`: columns added to where they come from, (n, c * kh * kw, positions) -> (n, c,
    *output_size), or both without n.  Raises ShapeError.
    """
    x = ops.asarray(input)
    window = _window("fold", lengths("fold", "output_size", output_size, 2), kernel_size, dilation, padding, stride)
    taps, positions = math.prod(window.kernel), window.positions
    if x.ndim not in (2, 3) or x.shape[-2] % taps or min(positions) < 1 or x.shape[-1] != math.prod(positions):
        raise ShapeError(
            f"fold: wanted input (n, c * {taps}, {math.prod(positions)}) for {positions} positions, got {x.shape}"
        )
    apart = ops.reshape(x, (*x.shape[:-2], x.shape[-2] // taps, taps, *positions))
    return fold_windows(apart, window=window)


def pixel_shuffle(input: TensorLike, upscale_factor: int) -> Tensor:
    """Channels become pixels: (..., c * r * r, h, w) -> (..., c, h * r, w * r) (Shi et al., arXiv 1609.05158).

    Raises ShapeError.
    """
    x, r = ops.asarray(input), upscale_factor
    if x.ndim < 3 or r < 1 or x.shape[-3] % (r * r):
        raise ShapeError(f"pixel_shuffle: wanted (..., c * {r} * {r}, h, w), got {x.shape}")
    *lead, c, h, w = x.shape
    apart = ops.reshape(x, (*lead, c // (r * r), r, r, h, w))
    mixed = _permuted(apart, len(lead), (0, 3, 1, 4, 2))
    return ops.reshape(mixed, (*lead, c // (r * r), h * r, w * r))


def pixel_unshuffle(input: TensorLike, downscale_factor: int) -> Tensor:
    """The inverse of :func:`pixel_shuffle`: (..., c, h * r, w * r) -> (..., c * r * r, h, w).  Raises ShapeError."""
    x, r = ops.asarray(input), downscale_factor
    if x.ndim < 3 or r < 1 or x.shape[-2] % r or x.shape[-1] % r:
        raise ShapeError(f"pixel_unshuffle: wanted (..., c, h * {r}, w * {r}), got {x.shape}")
    *lead, c, h, w = x.shape
    apart = ops.reshape(x, (*lead, c, h // r, r, w // r, r))
    return ops.reshape(_permuted(apart, len(lead), (0, 2, 4, 1, 3)), (*lead, c * r * r, h // r, w // r))


def _permuted(x: Tensor, lead: int, order: tuple[int, ...]) -> Tensor:
    """The axes after the first ``lead`` in another order."""
    return ops.permute_dims(x, (*range(lead), *(lead + a for a in order)))


def channel_shuffle(input: TensorLike, groups: int) -> Tensor:
    """Channels of ``groups`` groups taken in turn from each: (n, c, ...) (Zhang et al., arXiv 1707.01083).

    Raises ShapeError.
    """
    x = ops.asarray(input)
    if x.ndim < 3 or groups < 1 or x.shape[1] % groups:
        raise ShapeError(f"channel_shuffle: wanted (n, c, sizes ...) with c divisible by {groups}, got {x.shape}")
    apart = ops.reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    return ops.reshape(ops.swapaxes(apart, 1, 2), x.shape)


def shift(x: TensorLike, ksize: Lengths = 3, dilate: Lengths = 1) -> Tensor:
    """Groups of channels, one for each tap of a kernel, moved by that tap's offset, with zeros behind them
    (Wu et al., arXiv 1711.08141; Chainer's order of groups).

    x: (n, c, h, w), c at least the number of taps; the group that stays is the last one.  Raises ShapeError.
    """
    x = ops.asarray(x)
    kernel = lengths("shift", "ksize", ksize, 2)
    steps = lengths("shift", "dilate", dilate, 2)
    taps = math.prod(kernel)
    if x.ndim != 4 or not taps % 2 or x.shape[1] < taps:
        raise ShapeError(f"shift: wanted x (n, c, h, w) with c >= {taps}, an odd number of taps, got {x.shape}")
    each, (h, w) = x.shape[1] // taps, x.shape[2:]
    margin = [k // 2 * abs(d) for k, d in zip(kernel, steps)]
    padded = ops.pad(x, ((0, 0), (0, 0), (margin[0],) * 2, (margin[1],) * 2))
    parts, centre = [], taps // 2
    for i in range(taps):
        tap = {centre: taps - 1, taps - 1: centre}.get(i, i)
        top = margin[0] - (tap // kernel[1] - kernel[0] // 2) * steps[0]
        left = margin[1] - (tap % kernel[1] - kernel[1] // 2) * steps[1]
        stop = (i + 1) * each if i < taps - 1 else x.shape[1]
        parts.append(padded[:, i * each : stop, top : top + h, left : left + w])
    return ops.concat(parts, axis=1)
