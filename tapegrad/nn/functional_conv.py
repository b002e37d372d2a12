"""Convolution, pooling and batch normalization under torch.nn.functional's names, on (n, channels, sizes ...)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.ops.convolution import Moves, Window, conv, conv_transpose
from tapegrad.ops.pooling import max_pool, sum_pool
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable

Lengths = int | Sequence[int]
Padding = int | str | Sequence[Any]


def lengths(who: Any, name: str, value: Lengths, dims: int, least: int = 1) -> tuple[int, ...]:
    """One integer for each of ``dims`` dimensions.  Raises ShapeError."""
    found = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(found) != dims or any(not isinstance(n, int) or n < least for n in found):
        raise ShapeError(f"{who}: wanted an integer or {dims} of them, at least {least}, for {name}, got {value!r}")
    return found


def pads(
    who: Any, padding: Padding, size: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilation: Any
) -> tuple[tuple[int, int], ...]:
    """Pairs ``(before, after)``: of numbers, of a number for each dimension, or of a word.

    "same": as many positions as ``size / strides``, rounded up, the odd element of padding after the image (the rule of
    TensorFlow, and with strides of 1 of PyTorch).  Raises ShapeError, and TapegradError for another word.
    """
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        missing = [
            max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n) for n, k, s, d in zip(size, kernel, strides, dilation)
        ]
        return tuple((m // 2, m - m // 2) for m in missing)
    if isinstance(padding, str):
        raise TapegradError(f'{who}: wanted padding "same", "valid" or numbers, got {padding!r}')
    each = (padding,) * len(kernel) if isinstance(padding, int) else tuple(padding)
    pairs = tuple((p, p) if isinstance(p, int) else tuple(p) for p in each)
    if len(pairs) != len(kernel) or any(len(p) != 2 or min(p) < 0 for p in pairs):
        raise ShapeError(
            f"{who}: wanted a number >= 0 or a pair of them for each of {len(kernel)} dimensions as padding, "
            f"got {padding!r}"
        )
    return pairs


def _image(op: str, input: Any, dims: int) -> Tensor:
    x = ops.asarray(input)
    if x.ndim != dims + 2:
        raise ShapeError(f"{op}: wanted input (n, channels, {dims} sizes), got {x.shape}; add the missing axes")
    return x


def _bias(op: str, y: Tensor, bias: Any) -> Tensor:
    if bias is None:
        return y
    b = ops.asarray(bias)
    if b.shape != (y.shape[1],):
        raise ShapeError(f"{op}: wanted bias ({y.shape[1]},), one for each output, got {b.shape}")
    return y + ops.reshape(b, (y.shape[1], *(1,) * (y.ndim - 2)))


def convolve(
    op: Any, dims: int, input: Any, weight: Any, bias: Any, stride: Lengths, padding: Padding, dilation: Lengths,
    groups: int,
) -> Tensor:  # fmt: skip
    """What conv1d, conv2d and conv3d do; ``op`` opens the messages."""
    x, w = _image(op, input, dims), ops.asarray(weight)
    if w.ndim != dims + 2:
        raise ShapeError(f"{op}: wanted weight (outputs, channels / groups, {dims} sizes), got {w.shape}")
    strides, spaced = lengths(op, "stride", stride, dims), lengths(op, "dilation", dilation, dims)
    (count,) = lengths(op, "groups", groups, 1)
    around = pads(op, padding, x.shape[2:], w.shape[2:], strides, spaced)
    return _bias(op, conv(x, w, moves=Moves(strides, around, spaced, count)), bias)


def conv1d(
    input: Any, weight: Any, bias: Any = None, stride: Lengths = 1, padding: Padding = 0, dilation: Lengths = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Cross-correlation along one dimension.

    input: (n, c, l), weight: (o, c / groups, k), bias: (o,), result: (n, o, positions).  ``padding``: a number, pairs
    ``(before, after)`` for each dimension, "same" or "valid".  Raises ShapeError.
    """
    return convolve("conv1d", 1, input, weight, bias, stride, padding, dilation, groups)


def conv2d(
    input: Any, weight: Any, bias: Any = None, stride: Lengths = 1, padding: Padding = 0, dilation: Lengths = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Cross-correlation along two dimensions: as :func:`conv1d` with (n, c, h, w) and (o, c / groups, kh, kw)."""
    return convolve("conv2d", 2, input, weight, bias, stride, padding, dilation, groups)


def conv3d(
    input: Any, weight: Any, bias: Any = None, stride: Lengths = 1, padding: Padding = 0, dilation: Lengths = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Cross-correlation along three dimensions: as :func:`conv1d` with (n, c, d, h, w) and (o, c / groups, ...)."""
    return convolve("conv3d", 3, input, weight, bias, stride, padding, dilation, groups)


def conv_transpose2d(
    input: Any, weight: Any, bias: Any = None, stride: Lengths = 1, padding: Lengths = 0,
    output_padding: Lengths = 0, groups: int = 1, dilation: Lengths = 1,
) -> Tensor:  # fmt: skip
    """The transpose of :func:`conv2d` in its input.

    input: (n, c, h, w), weight: (c, o / groups, kh, kw), bias: (o,), result: (n, o, H, W) with
    ``H = (h - 1) * stride - 2 * padding + dilation * (kh - 1) + 1 + output_padding``.  Raises ShapeError.
    """
    op = "conv_transpose2d"
    x, w = _image(op, input, 2), ops.asarray(weight)
    strides, spaced = lengths(op, "stride", stride, 2), lengths(op, "dilation", dilation, 2)
    around, more = lengths(op, "padding", padding, 2, 0), lengths(op, "output_padding", output_padding, 2, 0)
    if w.ndim != 4 or w.shape[0] != x.shape[1]:
        raise ShapeError(f"{op}: wanted weight ({x.shape[1]}, outputs / groups, kh, kw) for {x.shape}, got {w.shape}")
    sizes = zip(x.shape[2:], strides, around, spaced, w.shape[2:], more)
    size = tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + m for n, s, p, d, k, m in sizes)
    moves = Moves(strides, tuple((p, p) for p in around), spaced, groups)
    return _bias(op, conv_transpose(x, w, moves=moves, size=size), bias)


def _window(
    op: Any, x: Tensor, kernel_size: Lengths, stride: Lengths | None, padding: Padding, dilation: Lengths
) -> Window:
    kernel = lengths(op, "kernel_size", kernel_size, 2)
    strides = kernel if stride is None else lengths(op, "stride", stride, 2)
    spaced = lengths(op, "dilation", dilation, 2)
    return Window(x.shape[2:], kernel, strides, pads(op, padding, x.shape[2:], kernel, strides, spaced), spaced)


def max_pool2d(
    input: Any, kernel_size: Lengths, stride: Lengths | None = None, padding: Padding = 0, dilation: Lengths = 1
) -> Tensor:
    """The largest element of each window; the gradient goes to the first of equal ones.

    input: (n, c, h, w), result: (n, c, positions ...); ``stride`` is by default ``kernel_size``.  Raises ShapeError.
    """
    x = _image("max_pool2d", input, 2)
    return max_pool(x, window=_window("max_pool2d", x, kernel_size, stride, padding, dilation))


def avg_pool2d(
    input: Any, kernel_size: Lengths, stride: Lengths | None = None, padding: Padding = 0,
    count_include_pad: bool = True,
) -> Tensor:  # fmt: skip
    """The mean of each window, in which padding counts as zeros unless ``count_include_pad`` is false.

    input: (n, c, h, w), result: (n, c, positions ...); ``stride`` is by default ``kernel_size``.  Raises ShapeError.
    """
    x = _image("avg_pool2d", input, 2)
    window = _window("avg_pool2d", x, kernel_size, stride, padding, 1)
    total = sum_pool(x, window=window)
    if count_include_pad or not any(map(any, window.padding)):
        return total / prod(window.kernel)
    return total / sum_pool(ops.ones(window.size, dtype=total.dtype, device=x.device), window=window)


def batch_norm(
    input: Any, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` for each channel (Ioffe and Szegedy, arXiv 1502.03167).

    input: (n, c, ...), all others (c,).  With ``training`` mean and variance are the batch's, and variables among the
    running ones move by ``momentum`` towards them (the variance without bias); else they are the running ones.

    Raises ShapeError for other shapes, TapegradError where the statistics are missing.
    """
    x = ops.asarray(input)
    if x.ndim < 2:
        raise ShapeError(f"batch_norm: wanted input (n, channels, ...), got {x.shape}; add the missing axes")
    for name, value in (("running_mean", running_mean), ("running_var", running_var), ("weight", weight),
                        ("bias", bias)):  # fmt: skip
        if value is not None and tuple(value.shape) != (x.shape[1],):
            raise ShapeError(f"batch_norm: wanted {name} ({x.shape[1]},) for {x.shape}, got {tuple(value.shape)}")
    if training:
        mean, variance = batch_statistics(x)
        count = x.size // x.shape[1]
        follow(running_mean, mean, momentum)
        follow(running_var, variance * (count / max(1, count - 1)), momentum)
    elif running_mean is None or running_var is None:
        raise TapegradError("batch_norm: without training it wants running_mean and running_var; pass both")
    else:
        mean, variance = running_mean, running_var
    return normalized(x, mean, variance, weight, bias, eps)


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance of each channel of (n, c, ...), as (c,).  Raises ShapeError for no elements."""
    axes = (0, *range(2, x.ndim))
    if not x.size:
        raise ShapeError(f"batch_norm: {x.shape} has no elements to take statistics of; skip empty batches")
    mean = ops.mean(x, axis=axes, keepdims=True)
    return ops.reshape(mean, (x.shape[1],)), ops.mean(ops.square(x - mean), axis=axes)


def follow(running: Any, now: Tensor, momentum: float) -> None:
    """Move a variable by ``momentum`` towards a batch's statistics; anything else stays as it is."""
    if isinstance(running, Variable):
        running.assign(ops.asarray(running) * (1.0 - momentum) + now * momentum)


def normalized(x: Tensor, mean: Any, variance: Any, weight: Any, bias: Any, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``; x: (n, c, ...), all others (c,), the last two or None."""
    column = (x.shape[1], *(1,) * (x.ndim - 2))
    scale = 1.0 / ops.sqrt(ops.asarray(variance) + eps)
    if weight is not None:
        scale = scale * weight
    y = (x - ops.reshape(mean, column)) * ops.reshape(scale, column)
    return y if bias is None else y + ops.reshape(bias, column)
