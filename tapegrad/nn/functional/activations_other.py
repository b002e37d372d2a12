"""Activations of several elements at once, and those that jax.nn or Chainer alone have."""

from __future__ import annotations

import math
from typing import Any

from tapegrad import ops, random
from tapegrad.autodiff.custom_gradient import stop_gradient
from tapegrad.errors import ShapeError
from tapegrad.nn.functional.activations import floating, limited
from tapegrad.ops.dispatch import in_float32
from tapegrad.tensor import Tensor

__all__ = [
    "crelu", "glu", "gumbel_softmax", "log1mexp", "logmeanexp", "maxout", "sparse_plus", "sparse_sigmoid",
    "squareplus",
]  # fmt: skip


@in_float32
def squareplus(x: Any, b: Any = 4) -> Tensor:
    """``(x + sqrt(x**2 + b)) / 2``, a softplus without exponentials (Barron, arXiv 2112.11687)."""
    x = floating(x)
    return 0.5 * (x + ops.sqrt(ops.square(x) + b))


@in_float32
def sparse_plus(x: Any) -> Tensor:
    """0 up to -1, ``(x + 1)**2 / 4`` up to 1, then ``x``: the integral of :func:`sparse_sigmoid`."""
    x = floating(x)
    return ops.where(x <= -1, 0, ops.where(x >= 1, x, 0.25 * ops.square(x + 1)))


@in_float32
def sparse_sigmoid(x: Any) -> Tensor:
    """``(x + 1) / 2`` limited to [0, 1]; the gradient at both ends is 0."""
    return limited(0.5 * (floating(x) + 1), 0, 1)


def gumbel_softmax(logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """Softmax of ``(logits + Gumbel noise) / tau``: a relaxed draw of a class (Jang et al., arXiv 1611.01144).

    ``hard``: a one-hot vector, with the gradient of the relaxed one.  ``eps`` is there for PyTorch's sake.
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
def glu(input: Any, dim: int = -1) -> Tensor:
    """The first half along ``dim`` times the sigmoid of the second (Dauphin et al., arXiv 1612.08083).

    Raises AxisError, and ShapeError where it cannot be halved.
    """
    x = floating(input)
    if not x.ndim or x.shape[dim] % 2:
        raise ShapeError(f"glu: wanted an axis of even length, got {x.shape} along {dim}")
    a, b = ops.split(x, 2, axis=dim)
    return a * ops.sigmoid(b)


def crelu(x: Any, axis: int = 1) -> Tensor:
    """``relu(x)`` and ``relu(-x)``, one after the other along ``axis`` (Shang et al., arXiv 1603.05201; Chainer)."""
    x = floating(x)
    return ops.concat([ops.relu(x), ops.relu(-x)], axis=axis)


def maxout(x: Any, pool_size: int, axis: int = 1) -> Tensor:
    """The largest of every ``pool_size`` elements along ``axis`` (Goodfellow et al., arXiv 1302.4389; Chainer).

    Equal ones share the gradient.  Raises ShapeError unless the axis divides.
    """
    x = ops.asarray(x)
    if not -x.ndim <= axis < x.ndim or pool_size < 1 or x.shape[axis] % pool_size:
        raise ShapeError(f"maxout: axis {axis} of {x.shape} does not divide into parts of {pool_size}")
    a = axis % x.ndim
    apart = ops.reshape(x, (*x.shape[:a], x.shape[a] // pool_size, pool_size, *x.shape[a + 1 :]))
    return ops.max(apart, axis=a + 1)


@in_float32
def log1mexp(x: Any) -> Tensor:
    """``log(1 - exp(-x))`` for x > 0, precise everywhere (Machler, 2012); -inf at 0, NaN below (JAX)."""
    x = floating(x)
    near = x < math.log(2)
    small, large = ops.where(near, x, 1), ops.where(near, 1, x)
    return ops.where(near, ops.log(-ops.expm1(-small)), ops.log1p(-ops.exp(-large)))


@in_float32
def logmeanexp(x: Any, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Tensor:
    """``log(mean(exp(x)))`` over ``axis`` (None: all) without overflow (JAX).  Raises AxisError."""
    x = floating(x)
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    total = ops.logsumexp(x, axis=axis, keepdims=keepdims)
    return total - math.log(math.prod(x.shape[a] for a in axes))
