"""Activations under the names of torch.nn.functional.

At a kink the gradient is PyTorch's: that of the flat side for limits (0 at both ends of ``hardtanh``), 0 of ``relu``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral

import tapegrad.random as random
from tapegrad import ops
from tapegrad.autodiff.custom_gradient import stop_gradient
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.ops.dispatch import in_float32, of_floats, real_only
from tapegrad.ops.elementwise import activation as activation_ops
from tapegrad.tensor import DTypeLike, Tensor, TensorLike

__all__ = [
    "celu", "elu", "gelu", "hard_tanh", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu",
    "log_softmax", "logsigmoid", "mish", "prelu", "relu", "relu6", "rrelu", "selu", "sigmoid", "silu", "softmax",
    "softmin", "softplus", "softshrink", "softsign", "swish", "tanh", "tanhshrink", "threshold",
]  # fmt: skip


def _of_input(f: Callable[[TensorLike], Tensor]) -> Callable[[TensorLike], Tensor]:
    """``f`` under PyTorch's name of its argument."""

    def op(input: TensorLike) -> Tensor:
        return f(input)

    vars(op).update(vars(f))
    op.__doc__, op.__name__, op.__qualname__, op.__module__ = (
        f.__doc__,
        f.__name__,
        f.__name__,
        "tapegrad.nn.functional",
    )
    return op


silu = ops.silu
swish = silu
relu, sigmoid, tanh, mish, softsign = map(
    _of_input, (ops.relu, ops.sigmoid, ops.tanh, activation_ops.mish, ops.softsign)
)


def floating(input: TensorLike) -> Tensor:
    """The input as a tensor of floats."""
    x = ops.asarray(input)
    return ops.astype(x, "float64") if "int" in str(x.dtype) or "bool" in str(x.dtype) else x


def limited(x: Tensor, low: float, high: float) -> Tensor:
    """``x`` limited to [low, high] with gradient 0 at both ends, unlike that of ``clip``."""
    return ops.where(x <= low, low, ops.where(x >= high, high, x))


def gelu(input: TensorLike, approximate: str = "none") -> Tensor:
    """``x * Phi(x)`` with the normal distribution's Phi, or its tanh approximation (Hendrycks and Gimpel, 2016).

    Raises TapegradError unless ``approximate`` is "none" or "tanh".
    """
    return ops.gelu(input, approximate=approximate)


@in_float32
def softplus(input: TensorLike, beta: float = 1.0, threshold: float | None = None) -> Tensor:
    """``log(1 + exp(beta * x)) / beta``, exact for large arguments too.

    ``threshold``: where ``beta * x`` is above it, ``x`` itself (PyTorch's, by default from 20 on: off by 2e-9).
    """
    x = ops.asarray(input)
    y = ops.softplus(x) if beta == 1 else ops.softplus(beta * x) / beta
    return y if threshold is None else ops.where(ops.real(beta * x) > threshold, x, y)


def logsigmoid(input: TensorLike) -> Tensor:
    """``log(sigmoid(x))`` without overflow."""
    return ops.log_sigmoid(input)


@real_only
@in_float32
def elu(input: TensorLike, alpha: float = 1.0) -> Tensor:
    """``x`` where positive, else ``alpha * (exp(x) - 1)``."""
    x = ops.asarray(input)
    return ops.where(x > 0, x, alpha * ops.expm1(ops.minimum(x, 0)))


@real_only
@in_float32
def selu(input: TensorLike) -> Tensor:
    """The self-normalizing scaled ``elu`` (Klambauer et al., 2017)."""
    return 1.0507009873554805 * elu(input, 1.6732632423543772)


@real_only
@in_float32
def celu(input: TensorLike, alpha: float = 1.0) -> Tensor:
    """``x`` where positive, else ``alpha * (exp(x / alpha) - 1)``, smooth for any alpha (Barron, arXiv 1704.07483).

    Raises TapegradError for alpha 0.
    """
    if not alpha:
        raise TapegradError("celu: alpha must not be 0")
    x = floating(input)
    return ops.where(x > 0, x, alpha * ops.expm1(ops.minimum(x, 0) / alpha))


@real_only
@in_float32
def leaky_relu(input: TensorLike, negative_slope: float = 0.01) -> Tensor:
    """``x`` where positive, else ``negative_slope * x``."""
    x = ops.asarray(input)
    return ops.where(x > 0, x, negative_slope * x)


@real_only
@in_float32
def prelu(input: TensorLike, weight: TensorLike) -> Tensor:
    """``x`` where positive, else ``weight * x`` (He et al., arXiv 1502.01852).

    input: (n, c, ...), weight: one number or (c,).  Raises ShapeError.
    """
    x, w = floating(input), ops.asarray(weight)
    channels = x.shape[1] if x.ndim > 1 else 1
    if w.ndim > 1 or w.size not in (1, channels):
        raise ShapeError(f"prelu: wanted a weight of 1 or {channels} numbers for {x.shape}, got {w.shape}")
    slope = ops.reshape(w, (-1, *(1,) * (x.ndim - 2))) if w.size > 1 else ops.reshape(w, ())
    return ops.where(x > 0, x, slope * x)


@real_only
def rrelu(input: TensorLike, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Tensor:
    """``x`` where positive, else ``slope * x``: a random slope in [lower, upper) each, or without ``training`` their
    mean (Xu et al., arXiv 1505.00853).
    """
    x = floating(input)
    if not training:
        return leaky_relu(x, (lower + upper) / 2)
    slope = random.uniform(x.shape, lower, upper, dtype=x.dtype, device=x.device)
    return ops.where(x > 0, x, slope * x)


@real_only
def hardtanh(input: TensorLike, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """``x`` limited to [min_val, max_val], with gradient 0 at both.  Raises TapegradError if min_val is the larger."""
    if min_val > max_val:
        raise TapegradError(f"hardtanh: min_val {min_val} must not be above max_val {max_val}")
    return limited(ops.asarray(input), min_val, max_val)


hard_tanh = hardtanh


@real_only
def relu6(input: TensorLike) -> Tensor:
    """``x`` limited to [0, 6]; the gradient at both is 0."""
    return limited(ops.asarray(input), 0, 6)


@real_only
@in_float32
def hardsigmoid(input: TensorLike) -> Tensor:
    """``x / 6 + 1 / 2`` limited to [0, 1]; the gradient at both ends is 0."""
    return limited(ops.asarray(input) / 6.0 + 0.5, 0.0, 1.0)


@real_only
@in_float32
def hardswish(input: TensorLike) -> Tensor:
    """``x * hardsigmoid(x)`` (Howard et al., arXiv 1905.02244)."""
    x = floating(input)
    inner = ops.clip(x, -3.0, 3.0)  # so that infinities make no NaN in the part that is not taken
    return ops.where(x <= -3, 0, ops.where(x >= 3, x, inner * (inner + 3.0) / 6.0))


@real_only
@in_float32
def hardshrink(input: TensorLike, lambd: float = 0.5) -> Tensor:
    """``x`` where ``|x| > lambd``, else 0."""
    x = ops.asarray(input)
    return ops.where(ops.logical_and(x >= -lambd, x <= lambd), 0, x)


@real_only
@in_float32
def softshrink(input: TensorLike, lambd: float = 0.5) -> Tensor:
    """``x`` moved by ``lambd`` towards 0, where it stays.  Raises TapegradError for negative ``lambd``."""
    if lambd < 0:
        raise TapegradError(f"softshrink: lambd must not be negative, got {lambd}")
    x = floating(input)
    return ops.where(x > lambd, x - lambd, ops.where(x < -lambd, x + lambd, x * 0))


@in_float32
def tanhshrink(input: TensorLike) -> Tensor:
    """``x - tanh(x)``."""
    x = floating(input)
    return x - ops.tanh(x)


@real_only
def threshold(input: TensorLike, threshold: float, value: float) -> Tensor:
    """``x`` where above ``threshold``, else ``value``."""
    x = ops.asarray(input)
    return ops.where(x <= threshold, value, x)


def softmax(input: TensorLike, dim: int = -1, *, dtype: DTypeLike | None = None) -> Tensor:
    """``exp(x) / sum(exp(x))`` along ``dim``; ``dtype``: to compute in.  Raises AxisError."""
    return ops.softmax(_in(input, dtype), axis=dim)


@of_floats()
def softmin(input: TensorLike, dim: int = -1, *, dtype: DTypeLike | None = None) -> Tensor:
    """``softmax(-x)`` along ``dim``.  Raises AxisError."""
    return ops.softmax(-_in(input, dtype), axis=dim)


def log_softmax(input: TensorLike, dim: int = -1, *, dtype: DTypeLike | None = None) -> Tensor:
    """``log(softmax(x))`` along ``dim`` without overflow; ``dtype``: to compute in.  Raises AxisError."""
    return ops.log_softmax(_in(input, dtype), axis=dim)


def _in(input: TensorLike, dtype: DTypeLike | None) -> Tensor:
    return ops.asarray(input) if dtype is None else ops.astype(ops.asarray(input), dtype)


def linear(x: Tensor) -> Tensor:
    """``x`` itself."""
    return x


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": linear,
    "exponential": ops.exp,
    "hard_sigmoid": hardsigmoid,
    "hard_swish": hardswish,
    "log_sigmoid": logsigmoid,
    **{
        f.__name__: f
        for f in (
            celu, elu, gelu, leaky_relu, log_softmax, mish, relu6, selu, softmax, softplus, softsign,
        )
    },
    "relu": relu,
    "silu": silu,
    "swish": silu,
    "sigmoid": sigmoid,
    "tanh": tanh,
}  # fmt: skip


def activation(spec: str | Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor]:
    """The activation of that name; None means none; a function is itself.  Raises TapegradError."""
    if spec is None:
        return _ACTIVATIONS["linear"]
    if callable(spec):
        return spec
    function = _ACTIVATIONS.get(spec) if isinstance(spec, str) else None
    if function is None:
        raise TapegradError(f"activation: wanted None, a function or one of {', '.join(_ACTIVATIONS)}; got {spec!r}")
    return function


# Activations of several elements at once, and those that jax.nn or Chainer alone have.

__all__ += [
    "crelu", "glu", "gumbel_softmax", "log1mexp", "logmeanexp", "maxout", "sparse_plus", "sparse_sigmoid",
    "squareplus",
]  # fmt: skip


@in_float32
def squareplus(x: TensorLike, b: TensorLike = 4) -> Tensor:
    """``(x + sqrt(x**2 + b)) / 2``, a softplus without exponentials (Barron, arXiv 2112.11687)."""
    x = floating(x)
    return 0.5 * (x + ops.sqrt(ops.square(x) + b))


@real_only
@in_float32
def sparse_plus(x: TensorLike) -> Tensor:
    """0 up to -1, ``(x + 1)**2 / 4`` up to 1, then ``x``: the integral of :func:`sparse_sigmoid`."""
    x = floating(x)
    return ops.where(x <= -1, 0, ops.where(x >= 1, x, 0.25 * ops.square(x + 1)))


@real_only
@in_float32
def sparse_sigmoid(x: TensorLike) -> Tensor:
    """``(x + 1) / 2`` limited to [0, 1]; the gradient at both ends is 0."""
    return limited(0.5 * (floating(x) + 1), 0, 1)


@real_only
def gumbel_softmax(logits: TensorLike, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """Softmax of ``(logits + Gumbel noise) / tau``: a relaxed draw of a class (Jang et al., arXiv 1611.01144).

    ``hard``: a one-hot vector, with the gradient of the relaxed one.  ``eps`` is accepted for PyTorch, and ignored.
    Raises AxisError.
    """
    x = floating(logits)
    u = random.uniform(x.shape, dtype=x.dtype, device=x.device)
    noise = -ops.log(-ops.log1p(-ops.maximum(u, 2.0**-24)))  # at u = 0 it would be infinite
    soft = ops.softmax((x + noise) / tau, axis=dim)
    if not hard:
        return soft
    chosen = ops.one_hot(ops.argmax(soft, axis=dim), soft.shape[dim], axis=dim, dtype=soft.dtype)
    return stop_gradient(chosen - soft) + soft


@in_float32
def glu(input: TensorLike, dim: int = -1) -> Tensor:
    """The first half along ``dim`` times the sigmoid of the second (Dauphin et al., arXiv 1612.08083).

    Raises AxisError, and ShapeError where it cannot be halved.
    """
    x = floating(input)
    if not x.ndim or x.shape[dim] % 2:
        raise ShapeError(f"glu: wanted an axis of even length, got {x.shape} along {dim}")
    a, b = ops.split(x, 2, axis=dim)
    return a * ops.sigmoid(b)


@real_only
def crelu(x: TensorLike, axis: int = 1) -> Tensor:
    """``relu(x)`` and ``relu(-x)``, one after the other along ``axis`` (Shang et al., arXiv 1603.05201; Chainer)."""
    x = floating(x)
    return ops.concat([ops.relu(x), ops.relu(-x)], axis=axis)


@real_only
def maxout(x: TensorLike, pool_size: int, axis: int = 1) -> Tensor:
    """The largest of every ``pool_size`` elements along ``axis`` (Goodfellow et al., arXiv 1302.4389; Chainer).

    Equal ones share the gradient.  Raises ShapeError unless the axis divides.
    """
    x = ops.asarray(x)
    if not -x.ndim <= axis < x.ndim or pool_size < 1 or x.shape[axis] % pool_size:
        raise ShapeError(f"maxout: axis {axis} of {x.shape} does not divide into parts of {pool_size}")
    a = axis % x.ndim
    apart = ops.reshape(x, (*x.shape[:a], x.shape[a] // pool_size, pool_size, *x.shape[a + 1 :]))
    return ops.max(apart, axis=a + 1)


@real_only
@in_float32
def log1mexp(x: TensorLike) -> Tensor:
    """``log(1 - exp(-x))`` for x > 0, precise everywhere (Machler, 2012); -inf at 0, NaN below (JAX)."""
    x = floating(x)
    near = x < math.log(2)
    small, large = ops.where(near, x, 1), ops.where(near, 1, x)
    return ops.where(near, ops.log(-ops.expm1(-small)), ops.log1p(-ops.exp(-large)))


@in_float32
def logmeanexp(x: TensorLike, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """``log(mean(exp(x)))`` over ``axis`` (None: all) without overflow (JAX).  Raises AxisError."""
    x = floating(x)
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, (int, Integral)) else axis
    total = ops.logsumexp(x, axis=axis, keepdims=keepdims)
    count = math.prod(x.shape[a] for a in axes)
    return total - (math.log(count) if count else math.nan)
