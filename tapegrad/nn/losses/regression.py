"""Losses of numbers against numbers, with torch's and Chainer's names, argument order and defaults."""

from __future__ import annotations

import math

from tapegrad import ops
from tapegrad.autodiff.custom_gradient import stop_gradient
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn.losses.classification import reduced, same_shape
from tapegrad.ops.dispatch import in_float32, of_floats, real_only
from tapegrad.ops.elementwise import elementary
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "bernoulli_nll", "gaussian_kl_divergence", "gaussian_nll_loss", "huber_loss", "l1_loss", "mse_loss",
    "poisson_nll_loss", "smooth_l1_loss", "squared_difference",
]  # fmt: skip


def _weighted(who: str, losses: Tensor, weight: TensorLike | None, reduction: str) -> Tensor:
    """The mean of weighted losses is their sum over the sum of weights."""
    if weight is None:
        return reduced(who, losses, reduction)
    w = _fitting(who, weight, losses)
    return ops.sum(losses * w) / ops.sum(w) if reduction == "mean" else reduced(who, losses * w, reduction)


def _fitting(who: str, weight: TensorLike, losses: Tensor) -> Tensor:
    w = ops.asarray(weight)
    if w.shape != losses.shape:
        raise ShapeError(f"{who}: wanted weight of the shape of input {losses.shape}, got {w.shape}")
    return w


@real_only
@of_floats()
@in_float32
def mse_loss(
    input: TensorLike, target: TensorLike, reduction: str = "mean", *, weight: TensorLike | None = None
) -> Tensor:
    """``(input - target)**2``; ``weight``: of each, shaped as input.

    Raises ShapeError unless input and target have one shape: no broadcasting by accident.
    """
    x, y = same_shape("mse_loss", input, target)
    return _weighted("mse_loss", (x - y) ** 2, weight, reduction)


@of_floats()
def squared_difference(x1: TensorLike, x2: TensorLike) -> Tensor:
    """``(x1 - x2)**2`` of each element (Chainer), as :func:`tapegrad.squared_difference`.

    Raises ShapeError unless both have one shape.
    """
    return elementary.squared_difference(*same_shape("squared_difference", x1, x2))


@of_floats()
@in_float32
def l1_loss(
    input: TensorLike, target: TensorLike, reduction: str = "mean", *, weight: TensorLike | None = None
) -> Tensor:
    """``|input - target|`` with gradient 0 where they are equal; ``weight``: of each.  Raises ShapeError."""
    x, y = same_shape("l1_loss", input, target)
    return _weighted("l1_loss", ops.abs(x - y), weight, reduction)


@real_only
@of_floats()
@in_float32
def huber_loss(
    input: TensorLike, target: TensorLike, reduction: str = "mean", delta: float = 1.0, weight: TensorLike | None = None
) -> Tensor:
    """``d**2 / 2`` for ``|d| <= delta``, else ``delta * (|d| - delta / 2)``.

    ``weight``: of each, shaped as input; as in PyTorch the mean is not divided by it.
    Raises ShapeError, TapegradError unless ``delta`` is positive.
    """
    if not delta > 0:
        raise TapegradError(f"huber_loss: delta must be positive, got {delta!r}")
    x, y = same_shape("huber_loss", input, target)
    d = x - y
    near = ops.clip(d, -delta, delta)  # not |d|: its second derivative at 0 would be lost
    losses = near * (d - 0.5 * near)
    if weight is None:
        return reduced("huber_loss", losses, reduction)
    w = _fitting("huber_loss", weight, losses)
    return reduced("huber_loss", losses * w, reduction)


@real_only
@of_floats()
@in_float32
def smooth_l1_loss(input: TensorLike, target: TensorLike, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """``huber_loss(delta=beta) / beta``; for beta 0 it is ``l1_loss``.

    Raises ShapeError, TapegradError for a negative ``beta``.
    """
    if not beta >= 0:
        raise TapegradError(f"smooth_l1_loss: beta must not be negative, got {beta!r}")
    if beta == 0:
        return l1_loss(input, target, reduction)
    return huber_loss(input, target, reduction, delta=beta) / beta


@real_only
@of_floats()
@in_float32
def poisson_nll_loss(
    input: TensorLike, target: TensorLike, log_input: bool = True, full: bool = False, eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """``exp(x) - target * x`` for the logarithm of a rate, or of a rate itself ``x - target * log(x + eps)``.

    ``full``: with Stirling's approximation of ``log(target!)`` for targets above 1.  Raises ShapeError.
    """
    x, t = same_shape("poisson_nll_loss", input, target)
    loss = ops.exp(x) - t * x if log_input else x - t * ops.log(x + eps)
    if full:
        large = t > 1
        safe = ops.where(large, t, 1)
        loss = loss + ops.where(large, safe * ops.log(safe) - safe + 0.5 * ops.log(2 * math.pi * safe), 0)
    return reduced("poisson_nll_loss", loss, reduction)


@real_only
@of_floats()
@in_float32
def gaussian_nll_loss(
    input: TensorLike, target: TensorLike, var: TensorLike, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """``(log(var) + (input - target)**2 / var) / 2``; a variance below ``eps`` counts as that, also in gradients.

    var: a number, shaped as input, or with a last axis of length 1 or none instead of input's (Nix and Weigend, 1994).
    ``full``: with ``log(2 pi) / 2``.  Raises ShapeError.
    """
    x, t = ops.asarray(input), ops.asarray(target)
    v = ops.asarray(var)
    if v.ndim and v.shape != x.shape:
        if v.shape == x.shape[:-1]:
            v = ops.expand_dims(v, axis=-1)
        elif v.shape != (*x.shape[:-1], 1):
            raise ShapeError(f"gaussian_nll_loss: var {v.shape} does not fit input {x.shape}")
    v = v + stop_gradient(ops.maximum(v, eps) - v)
    loss = 0.5 * (ops.log(v) + ops.square(x - t) / v)
    return reduced("gaussian_nll_loss", loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


@real_only
@of_floats()
@in_float32
def bernoulli_nll(x: TensorLike, y: TensorLike, reduce: str = "sum") -> Tensor:
    """``softplus(y) - x * y``: of outcomes x (0 or 1) for log-odds y (Chainer).  Raises ShapeError, TapegradError."""
    a, b = same_shape("bernoulli_nll", x, y)
    return reduced("bernoulli_nll", ops.softplus(b) - a * b, chainers(reduce))


@real_only
@of_floats()
@in_float32
def gaussian_kl_divergence(mean: TensorLike, ln_var: TensorLike, reduce: str = "sum") -> Tensor:
    """``(mean**2 + exp(ln_var) - ln_var - 1) / 2``: from N(mean, exp(ln_var)) to N(0, 1) (Chainer).

    Raises ShapeError, TapegradError.
    """
    m, v = same_shape("gaussian_kl_divergence", mean, ln_var)
    return reduced("gaussian_kl_divergence", 0.5 * (ops.square(m) + ops.exp(v) - v - 1), chainers(reduce))


def chainers(reduce: str) -> str:
    """Chainer's word for a reduction as PyTorch's."""
    return "none" if reduce == "no" else reduce
