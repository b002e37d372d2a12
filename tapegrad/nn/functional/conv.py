"""Convolutions under torch.nn.functional's names, on (n, channels, sizes ...), and Chainer's other kinds of them.

As in PyTorch, an input without the axis n is an image by itself, and so is its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn.functional._variants import in_dims
from tapegrad.ops.casting import by_policy
from tapegrad.ops.dispatch import of_floats
from tapegrad.ops.products.convolution import Moves, Window, conv, conv_transpose
from tapegrad.ops.products.convolution_bias import conv_bias, is_one_kernel
from tapegrad.ops.shape.patches import unfold_windows
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "depthwise_convolution_2d", "local_convolution_2d",
]  # fmt: skip

Lengths = int | Sequence[int]
Padding = int | str | Sequence[Any]


def lengths(who: object, name: str, value: Lengths, dims: int, least: int = 1) -> tuple[int, ...]:
    """One integer for each of ``dims`` dimensions.  Raises ShapeError."""
    sizes: tuple[Any, ...] = tuple(value) if isinstance(value, (tuple, list)) else (value,) * dims
    if len(sizes) != dims or any(not isinstance(n, Integral) or n < least for n in sizes):
        raise ShapeError(f"{who}: wanted an integer or {dims} of them, at least {least}, for {name}, got {value!r}")
    return tuple(map(int, sizes))


def pads(
    who: object, padding: Padding, size: Sequence[int], kernel: Sequence[int], strides: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, int], ...]:  # fmt: skip
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
    each = (padding,) * len(kernel) if isinstance(padding, (int, Integral)) else tuple(padding)
    pairs = tuple((int(p), int(p)) if isinstance(p, (int, Integral)) else tuple(p) for p in each)
    if len(pairs) != len(kernel) or any(len(p) != 2 or min(p) < 0 for p in pairs):
        raise ShapeError(
            f"{who}: wanted a number >= 0 or a pair of them for each of {len(kernel)} dimensions as padding, "
            f"got {padding!r}"
        )
    return pairs


def by_image(op: object, input: TensorLike, dims: int, body: Callable[[Tensor], Tensor]) -> Tensor:
    """``body`` of (n, channels, sizes ...), or of one image without the axis n.  Raises ShapeError."""
    x = ops.asarray(input)
    if x.ndim == dims + 1:
        return ops.squeeze(body(ops.expand_dims(x, axis=0)), axis=0)
    if x.ndim != dims + 2:
        sizes = f"{dims} sizes" if dims > 1 else "1 size"
        raise ShapeError(f"{op}: wanted input (n, channels, {sizes}) or (channels, {sizes}), got {x.shape}")
    return body(x)


def _bias(op: object, y: Tensor, bias: TensorLike | None) -> Tensor:
    if bias is None:
        return y
    b = ops.asarray(bias)
    if b.shape != (y.shape[1],):
        raise ShapeError(f"{op}: wanted bias ({y.shape[1]},), one for each output, got {b.shape}")
    return y + ops.reshape(b, (y.shape[1], *(1,) * (y.ndim - 2)))


def convolve(
    op: object, dims: int, input: TensorLike, weight: TensorLike, bias: TensorLike | None, stride: Lengths,
    padding: Padding, dilation: Lengths, groups: int, clips: bool = False,
) -> Tensor:  # fmt: skip
    """What conv1d, conv2d and conv3d do; ``op`` opens the messages; ``clips``: ``relu`` of that."""
    input, w, bias = by_policy("conv", (input, ops.asarray(weight), bias))
    if w.ndim != dims + 2:
        raise ShapeError(f"{op}: wanted weight (outputs, channels / groups, {dims} sizes), got {w.shape}")
    strides, spaced = lengths(op, "stride", stride, dims), lengths(op, "dilation", dilation, dims)
    (count,) = lengths(op, "groups", groups, 1)

    def body(x: Tensor) -> Tensor:
        around = pads(op, padding, x.shape[2:], w.shape[2:], strides, spaced)
        moves = Moves(strides, around, spaced, count)
        if bias is not None and (b := ops.asarray(bias)).shape == w.shape[:1] and is_one_kernel(x, w, b, moves):
            return conv_bias(x, w, b, moves, clips)
        y = _bias(op, conv(x, w, moves=moves), bias)
        return ops.relu(y) if clips else y

    return by_image(op, input, dims, body)


def _conv(
    dims: int, input: TensorLike, weight: TensorLike, bias: TensorLike | None = None, stride: Lengths = 1,
    padding: Padding = 0, dilation: Lengths = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Cross-correlation along the sizes of an image.

    input: (n, c, SIZES), weight: (o, c / groups, ...), bias: (o,), result: (n, o, positions ...).  ``padding``: a
    number, pairs ``(before, after)`` for each dimension, "same" or "valid".  Raises ShapeError.
    """
    return convolve(f"conv{dims}d", dims, input, weight, bias, stride, padding, dilation, groups)


conv1d, conv2d, conv3d = in_dims("conv{}d", _conv)


def _transposed(
    dims: int, input: TensorLike, weight: TensorLike, bias: TensorLike | None = None, stride: Lengths = 1,
    padding: Lengths = 0, output_padding: Lengths = 0, groups: int = 1, dilation: Lengths = 1,
) -> Tensor:  # fmt: skip
    """The transpose of a convolution in its input.

    input: (n, c, SIZES), weight: (c, o / groups, ...), bias: (o,), result: (n, o, ...), where of a size h and a kernel
    k ``(h - 1) * stride - 2 * padding + dilation * (k - 1) + 1 + output_padding`` are made.  Raises ShapeError.
    """
    op = f"conv_transpose{dims}d"
    strides, spaced = lengths(op, "stride", stride, dims), lengths(op, "dilation", dilation, dims)
    around, more = lengths(op, "padding", padding, dims, 0), lengths(op, "output_padding", output_padding, dims, 0)
    (count,) = lengths(op, "groups", groups, 1)
    input, w, bias = by_policy("conv", (input, ops.asarray(weight), bias))
    if any(m >= max(s, d) for m, s, d in zip(more, strides, spaced)):
        raise ShapeError(f"{op}: output_padding {more} must be smaller than the stride {strides} or dilation {spaced}")

    def body(x: Tensor) -> Tensor:
        if w.ndim != dims + 2 or w.shape[0] != x.shape[1]:
            raise ShapeError(
                f"{op}: wanted weight ({x.shape[1]}, outputs / groups, {dims} sizes) for {x.shape}, got {w.shape}"
            )
        # What output_padding adds at the end was cropped as padding, or lies beyond all that the kernel reaches.
        pairs = tuple((p, max(0, p - m)) for p, m in zip(around, more))
        beyond = tuple(max(0, m - p) for p, m in zip(around, more))
        each = zip(x.shape[2:], strides, pairs, spaced, w.shape[2:])
        size = tuple((n - 1) * s - low - high + d * (k - 1) + 1 for n, s, (low, high), d, k in each)
        if any(n + b < 1 for n, b in zip(size, beyond)):
            raise ShapeError(f"{op}: padding {around} leaves nothing of a result of {x.shape}; pad less")
        y = conv_transpose(x, w, moves=Moves(strides, pairs, spaced, count), size=size)
        return _bias(op, ops.pad(y, ((0, 0), (0, 0), *((0, b) for b in beyond))) if any(beyond) else y, bias)

    return by_image(op, input, dims, body)


conv_transpose1d, conv_transpose2d, conv_transpose3d = in_dims("conv_transpose{}d", _transposed)


def depthwise_convolution_2d(
    x: TensorLike, W: TensorLike, b: TensorLike | None = None, stride: Lengths = 1, pad: Padding = 0
) -> Tensor:
    """Each channel convolved by kernels of its own (Chainer's function).

    x: (n, c, h, w), W: (multiplier, c, kh, kw), b: (c * multiplier,), result: (n, c * multiplier, ...).
    Raises ShapeError.
    """
    w = ops.asarray(W)
    if w.ndim != 4:
        raise ShapeError(f"depthwise_convolution_2d: wanted W (multiplier, channels, kh, kw), got {w.shape}")
    channels = w.shape[1]
    apart = ops.reshape(ops.permute_dims(w, (1, 0, 2, 3)), (channels * w.shape[0], 1, *w.shape[2:]))
    return convolve("depthwise_convolution_2d", 2, x, apart, b, stride, pad, 1, channels)


@of_floats()
def local_convolution_2d(x: TensorLike, W: TensorLike, b: TensorLike | None = None, stride: Lengths = 1) -> Tensor:
    """A convolution whose kernel differs from position to position (Chainer's function).

    x: (n, c, h, w), W: (o, H, W, c, kh, kw), b: (o, H, W), result: (n, o, H, W).  Raises ShapeError.
    """
    op = "local_convolution_2d"
    image, w, strides = ops.asarray(x), ops.asarray(W), lengths(op, "stride", stride, 2)
    if w.ndim != 6 or image.ndim != 4 or image.shape[1] != w.shape[3]:
        raise ShapeError(f"{op}: wanted x (n, c, h, w), W (o, H, W, c, kh, kw), got {image.shape}, {w.shape}")
    o, high, wide, c, kh, kw = w.shape
    window = Window(image.shape[2:], (kh, kw), strides, ((0, 0), (0, 0)), (1, 1))
    if window.positions != (high, wide):
        raise ShapeError(f"{op}: x {image.shape} has {window.positions} positions, but W {w.shape} is for others")
    columns = unfold_windows(image, window=window)  # (n, c, taps, H, W)
    y = ops.einsum("nckhw,ohwck->nohw", columns, ops.reshape(w, (o, high, wide, c, kh * kw)))
    return y if b is None else y + b
