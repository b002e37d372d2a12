"""Normalizations under torch.nn.functional's names, and JAX' ``standardize``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from numbers import Integral
from operator import index
from typing import Any

from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.ops.casting import by_policy
from tapegrad.ops.dispatch import in_float32, of_floats, real_only
from tapegrad.tensor import Tensor, TensorLike
from tapegrad.variable import Variable

__all__ = [
    "batch_norm", "group_norm", "instance_norm", "layer_norm", "local_response_norm", "normalize", "rms_norm",
    "standardize",
]  # fmt: skip


def _channels(op: str, x: Tensor, **parameters: Any) -> None:
    """Raises ShapeError unless ``x`` is (n, c, ...) and each parameter, where there is one, (c,)."""
    if x.ndim < 2:
        raise ShapeError(f"{op}: wanted input (n, channels, ...), got {x.shape}; add the missing axes")
    for name, value in parameters.items():
        if value is not None and shape_of(value) != (x.shape[1],):
            raise ShapeError(f"{op}: wanted {name} ({x.shape[1]},) for {x.shape}, got {shape_of(value)}")


@real_only
@functools.partial(in_float32, beside=("running_mean", "running_var"))
def batch_norm(
    input: TensorLike, running_mean: TensorLike | None, running_var: TensorLike | None,
    weight: TensorLike | None = None, bias: TensorLike | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` for each channel (Ioffe and Szegedy, arXiv 1502.03167).

    input: (n, c, ...), all others (c,).  With ``training`` mean and variance are the batch's, and variables among the
    running ones move by ``momentum`` towards them (the variance without bias); else they are the running ones.

    Raises ShapeError for other shapes, TapegradError where the statistics are missing.
    """
    x = ops.asarray(input)
    _channels("batch_norm", x, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    if not training:
        if running_mean is None or running_var is None:
            raise TapegradError("batch_norm: without training it wants running_mean and running_var; pass both")
        return normalized(x, running_mean, running_var, weight, bias, eps)
    mean, variance = batch_statistics(x)
    count = x.size // x.shape[1]
    follow(running_mean, mean, momentum)
    follow(running_var, variance * (count / max(1, count - 1)), momentum)
    return normalized(x, mean, variance, weight, bias, eps)


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, a variable (which is not read for it), an array or a nested sequence."""
    return tuple(value.shape) if hasattr(value, "shape") else ops.asarray(value).shape


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance of each channel of (n, c, ...), as (c,).  Raises ShapeError for no elements."""
    axes = (0, *range(2, x.ndim))
    if not x.size:
        raise ShapeError(f"batch_norm: {x.shape} has no elements to take statistics of; skip empty batches")
    mean = ops.mean(x, axis=axes, keepdims=True)
    return ops.reshape(mean, (x.shape[1],)), ops.mean(ops.square(x - mean), axis=axes)


def follow(running: object, current: Tensor, momentum: float) -> None:
    """Move a variable by ``momentum`` towards a batch's statistics; anything else stays as it is."""
    if isinstance(running, Variable):
        moved = ops.asarray(running) * (1.0 - momentum) + current * momentum
        running.assign(ops.astype(moved, running.dtype))


def column(value: TensorLike, ndim: int) -> Tensor:
    """A vector of channels as it broadcasts against (n, c, ...) with ``ndim`` axes."""
    return ops.reshape(value, (-1, *(1,) * (ndim - 2)))


@in_float32
def normalized(
    x: Tensor, mean: TensorLike, variance: TensorLike, weight: TensorLike | None, bias: TensorLike | None, eps: float
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``; x: (n, c, ...), all others (c,), the last two or None."""
    scale = 1.0 / ops.sqrt(ops.asarray(variance) + eps)
    if weight is not None:
        scale = scale * weight
    y = (x - column(mean, x.ndim)) * column(scale, x.ndim)
    return y if bias is None else y + column(bias, x.ndim)


@real_only
@functools.partial(in_float32, beside=("running_mean", "running_var"))
def instance_norm(
    input: TensorLike, running_mean: TensorLike | None = None, running_var: TensorLike | None = None,
    weight: TensorLike | None = None, bias: TensorLike | None = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """As :func:`batch_norm`, but each image by its own statistics (Ulyanov et al., arXiv 1607.08022).

    input: (n, c, sizes ...), all others (c,).  Without ``use_input_stats`` by the running ones; with it, variables
    among them move by ``momentum`` towards the mean over the images.  Raises ShapeError, TapegradError.
    """
    x = ops.asarray(input)
    _channels("instance_norm", x, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise TapegradError("instance_norm: without use_input_stats it wants running_mean and running_var")
        return normalized(x, running_mean, running_var, weight, bias, eps)
    if x.ndim < 3 or not math.prod(x.shape[2:]):
        raise ShapeError(f"instance_norm: wanted input (n, channels, sizes ...) with elements, got {x.shape}")
    axes, count = tuple(range(2, x.ndim)), math.prod(x.shape[2:])
    mean = ops.mean(x, axis=axes, keepdims=True)
    variance = ops.mean(ops.square(x - mean), axis=axes, keepdims=True)
    if x.shape[0]:
        whole = (0, *axes)
        follow(running_mean, ops.mean(mean, axis=whole), momentum)
        follow(running_var, ops.mean(variance, axis=whole) * (count / max(1, count - 1)), momentum)
    return _scaled((x - mean) / ops.sqrt(variance + eps), weight, bias)


def _scaled(x: Tensor, weight: TensorLike | None, bias: TensorLike | None) -> Tensor:
    """``x * weight + bias`` for each channel of (n, c, ...)."""
    x = x if weight is None else x * column(weight, x.ndim)
    return x if bias is None else x + column(bias, x.ndim)


@real_only
@in_float32
def group_norm(
    input: TensorLike, num_groups: int, weight: TensorLike | None = None, bias: TensorLike | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Each image by the statistics of each of ``num_groups`` groups of channels (Wu and He, arXiv 1803.08494).

    input: (n, c, ...), weight and bias: (c,).  Raises ShapeError, also unless the channels divide into the groups.
    """
    x = ops.asarray(input)
    _channels("group_norm", x, weight=weight, bias=bias)
    if num_groups < 1 or x.shape[1] % num_groups:
        raise ShapeError(f"group_norm: the {x.shape[1]} channels of {x.shape} do not divide into {num_groups} groups")
    groups = ops.reshape(x, (x.shape[0], num_groups, x.shape[1] // num_groups * math.prod(x.shape[2:])))
    centred = groups - ops.mean(groups, axis=-1, keepdims=True)
    y = centred / ops.sqrt(ops.mean(ops.square(centred), axis=-1, keepdims=True) + eps)
    return _scaled(ops.reshape(y, x.shape), weight, bias)


def _trailing(op: str, x: Tensor, normalized_shape: Sequence[int] | int) -> tuple[int, ...]:
    sizes = (normalized_shape,) if isinstance(normalized_shape, (int, Integral)) else normalized_shape
    try:
        shape = tuple(map(index, sizes))
    except TypeError:
        raise ShapeError(
            f"{op}: normalized_shape is an integer or several, the sizes of the trailing axes, got "
            f"{type(normalized_shape).__name__} {normalized_shape!r:.60}; pass a scale as weight="
        ) from None
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ShapeError(f"{op}: wanted input (..., {', '.join(map(str, shape))}), got {x.shape}")
    return shape


@real_only
@of_floats()
def layer_norm(
    input: TensorLike, normalized_shape: Sequence[int], weight: TensorLike | None = None,
    bias: TensorLike | None = None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalized over the trailing axes, whose sizes are ``normalized_shape``.  Raises ShapeError if they are not."""
    x = ops.asarray(input)
    shape = _trailing("layer_norm", x, normalized_shape)
    size = math.prod(shape)
    gamma = ops.ones((size,), dtype=x.dtype, device=x.device) if weight is None else ops.reshape(weight, (size,))
    beta = ops.zeros((size,), dtype=x.dtype, device=x.device) if bias is None else ops.reshape(bias, (size,))
    flat = ops.reshape(x, (*x.shape[: -len(shape)], size))
    return ops.reshape(ops.layer_norm(flat, gamma, beta, eps=eps), x.shape)


@real_only
@of_floats()
def rms_norm(
    input: TensorLike, normalized_shape: Sequence[int], weight: TensorLike | None = None, eps: float | None = None
) -> Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` over the trailing axes (Zhang and Sennrich, arXiv 1910.07467).

    ``eps`` is by default the dtype's own, as in PyTorch.  Raises ShapeError unless the trailing axes have the sizes
    ``normalized_shape``.
    """
    (x,) = by_policy("rms_norm", (ops.asarray(input),))
    shape = _trailing("rms_norm", x, normalized_shape)
    least = _EPS.get(str(x.dtype), 2.0**-23) if eps is None else eps
    return _over_root_mean_square(x, tuple(range(-len(shape), 0)), weight, least)


@in_float32
def _over_root_mean_square(x: Tensor, axes: tuple[int, ...], weight: TensorLike, eps: float) -> Tensor:
    y = x / ops.sqrt(ops.mean(ops.square(x), axis=axes, keepdims=True) + eps)
    return y if weight is None else y * weight


_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@real_only
@of_floats()
@in_float32
def local_response_norm(
    input: TensorLike, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """``x / (k + alpha * mean of x**2 over size neighbouring channels)**beta`` (Krizhevsky et al., 2012).

    input: (n, c, sizes ...); channels outside count as 0.  Raises ShapeError.
    """
    x = ops.asarray(input)
    if x.ndim < 3 or size < 1:
        raise ShapeError(f"local_response_norm: wanted (n, channels, sizes ...) and size >= 1, got {x.shape}, {size}")
    count, low = x.shape[1], size // 2
    widths = [(0, 0)] * x.ndim
    widths[1] = (low, size - 1 - low)
    squares = ops.pad(ops.square(x), widths)
    total = squares[:, :count]
    for tap in range(1, size):
        total = total + squares[:, tap : tap + count]
    return x / (k + (alpha / size) * total) ** beta


@of_floats()
@in_float32
def normalize(input: TensorLike, p: float = 2.0, dim: int | tuple[int, ...] = 1, eps: float = 1e-12) -> Tensor:
    """``x / max(norm, eps)`` with the p-norm along ``dim``; where all is 0 the result and its gradient are finite.

    Raises AxisError.
    """
    x = ops.asarray(input)
    norm = p_norm(x, p, dim)
    return x / ops.maximum(norm, eps)


@in_float32
def p_norm(x: Tensor, p: float, axis: int | tuple[int, ...], keepdims: bool = True) -> Tensor:
    """``sum(|x|**p)**(1/p)`` along ``axis``, for p 0 the number of elements that are not 0.

    The gradient of the norm 0 is 0, as in PyTorch.
    """
    size = ops.abs(x)
    if p == math.inf:
        return ops.max(size, axis=axis, keepdims=keepdims)
    if p == 1:
        return ops.sum(size, axis=axis, keepdims=keepdims)
    if p == 0:
        return ops.sum(ops.astype(x != 0, size.dtype) + 0 * size, axis=axis, keepdims=keepdims)
    powers = ops.square(x) if p == 2 and x.dtype.kind != "c" else size**p
    total = ops.sum(powers, axis=axis, keepdims=keepdims)
    some = total > 0
    safe = ops.where(some, total, 1)  # otherwise the root's infinite slope times 0 is NaN
    return ops.where(some, ops.sqrt(safe) if p == 2 else safe ** (1.0 / p), 0)


@real_only
@in_float32
def standardize(
    x: TensorLike, axis: int | tuple[int, ...] = -1, mean: TensorLike | None = None,
    variance: TensorLike | None = None, epsilon: float = 1e-5,
) -> Tensor:  # fmt: skip
    """``(x - mean) / sqrt(variance + epsilon)`` along ``axis``, by its own statistics if none are given (JAX).

    Raises AxisError.
    """
    x = ops.asarray(x)
    middle = ops.mean(x, axis=axis, keepdims=True) if mean is None else ops.asarray(mean)
    if variance is None:
        variance = ops.mean(ops.square(x - middle), axis=axis, keepdims=True)
    return (x - middle) / ops.sqrt(ops.asarray(variance) + epsilon)
