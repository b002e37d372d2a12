"""Chainer's kinds of batch normalization: by fixed statistics, renormalized, decorrelated."""

from __future__ import annotations

from typing import Any

import tapegrad.linalg as linalg
from tapegrad import ops
from tapegrad.autodiff.custom_gradient import stop_gradient
from tapegrad.errors import ShapeError
from tapegrad.nn.functional.norm import batch_statistics, column, follow, normalized, shape_of
from tapegrad.ops.dispatch import of_floats, real_only
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "batch_renormalization", "decorrelated_batch_normalization", "fixed_batch_normalization",
    "fixed_batch_renormalization", "fixed_decorrelated_batch_normalization",
]  # fmt: skip


def _checked(op: str, x: TensorLike, *parameters: Any) -> Tensor:
    x = ops.asarray(x)
    shapes = [None if p is None else shape_of(p) for p in parameters]
    if x.ndim < 2 or any(s not in (None, x.shape[1:2]) for s in shapes):
        raise ShapeError(f"{op}: wanted x (n, channels, ...) and all others (channels,), got {x.shape} and {shapes}")
    return x


@real_only
@of_floats()
def fixed_batch_normalization(
    x: TensorLike, gamma: TensorLike, beta: TensorLike, mean: TensorLike, var: TensorLike, eps: float = 2e-5
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * gamma + beta`` for each channel; x: (n, c, ...), all others (c,).

    Raises ShapeError.
    """
    x = _checked("fixed_batch_normalization", x, gamma, beta, mean, var)
    return normalized(x, mean, var, gamma, beta, eps)


@real_only
def batch_renormalization(
    x: TensorLike, gamma: TensorLike, beta: TensorLike, rmax: float, dmax: float, eps: float = 2e-5,
    running_mean: TensorLike | None = None, running_var: TensorLike | None = None, decay: float = 0.9,
) -> Tensor:  # fmt: skip
    """Batch normalization corrected towards the running statistics, within limits (Ioffe, arXiv 1702.03275).

    ``((x - mean) / deviation * r + d) * gamma + beta`` with r, the ratio of the deviations, in [1 / rmax, rmax] and d,
    the distance of the means, in [-dmax, dmax]; both count as constants in gradients.  Running statistics that are
    variables then move by ``1 - decay``.  x: (n, c, ...), all others (c,).  Raises ShapeError.
    """
    op = "batch_renormalization"
    x = _checked(op, x, gamma, beta, running_mean, running_var)
    mean, variance = batch_statistics(x)
    deviation = ops.sqrt(variance + eps)
    known_mean = ops.zeros_like(mean) if running_mean is None else ops.asarray(running_mean)
    known = ops.sqrt((ops.ones_like(variance) if running_var is None else ops.asarray(running_var)) + eps)
    r = stop_gradient(ops.clip(deviation / known, 1.0 / rmax, rmax))
    d = stop_gradient(ops.clip((mean - known_mean) / known, -dmax, dmax))
    y = (x - column(mean, x.ndim)) * column(r / deviation, x.ndim) + column(d, x.ndim)
    count = x.size // x.shape[1]
    follow(running_mean, mean, 1 - decay)
    follow(running_var, variance * (count / max(1, count - 1)), 1 - decay)
    return y * column(gamma, x.ndim) + column(beta, x.ndim)


@real_only
@of_floats()
def fixed_batch_renormalization(
    x: TensorLike, gamma: TensorLike, beta: TensorLike, mean: TensorLike, var: TensorLike, eps: float = 2e-5
) -> Tensor:
    """:func:`batch_renormalization` by the running statistics alone: ``fixed_batch_normalization``."""
    x = _checked("fixed_batch_renormalization", x, gamma, beta, mean, var)
    return normalized(x, mean, var, gamma, beta, eps)


def _grouped(op: str, x: TensorLike, groups: int) -> tuple[Tensor, Tensor]:
    """``x``, and its channels as (groups, channels / groups, n * sizes)."""
    x = ops.asarray(x)
    if x.ndim < 2 or groups < 1 or x.shape[1] % groups or not x.size:
        raise ShapeError(f"{op}: wanted x (n, c, ...) with elements, c divisible by {groups} groups, got {x.shape}")
    rows = ops.reshape(ops.swapaxes(x, 0, 1), (groups, x.shape[1] // groups, x.size // x.shape[1]))
    return x, rows


def _projected(x: Tensor, rows: Tensor, mean: Tensor, projection: Tensor) -> Tensor:
    y = ops.matmul(projection, rows - ops.expand_dims(mean, axis=-1))
    return ops.swapaxes(ops.reshape(y, (x.shape[1], x.shape[0], *x.shape[2:])), 0, 1)


@real_only
def decorrelated_batch_normalization(
    x: TensorLike, groups: int = 16, eps: float = 2e-5, running_mean: TensorLike | None = None,
    running_projection: TensorLike | None = None, decay: float = 0.9,
) -> Tensor:  # fmt: skip
    """Channels of each group whitened: ``covariance**(-1/2) (x - mean)`` (Huang et al., arXiv 1804.08450).

    x: (n, c, ...); running_mean: (groups, c / groups), running_projection: (groups, c / groups, c / groups); variables
    among them move by ``1 - decay``.  The gradient is NaN where a covariance has equal eigenvalues.  Raises ShapeError.
    """
    x, rows = _grouped("decorrelated_batch_normalization", x, groups)
    mean = ops.mean(rows, axis=-1)
    centred = rows - ops.expand_dims(mean, axis=-1)
    count = rows.shape[-1]
    identity = ops.eye(rows.shape[1], dtype=x.dtype, device=x.device)
    values, vectors = linalg.eigh(ops.matmul(centred, centred.mT) / count + eps * identity)
    projection = ops.matmul(vectors / ops.expand_dims(ops.sqrt(values), axis=-2), vectors.mT)
    follow(running_mean, mean, 1 - decay)
    follow(running_projection, projection, 1 - decay)
    return _projected(x, rows, mean, projection)


@real_only
@of_floats()
def fixed_decorrelated_batch_normalization(
    x: TensorLike, mean: TensorLike, projection: TensorLike, groups: int = 16
) -> Tensor:
    """``projection (x - mean)`` for the channels of each group, as :func:`decorrelated_batch_normalization` keeps them.

    mean: (groups, c / groups), projection: (groups, c / groups, c / groups).  Raises ShapeError.
    """
    op = "fixed_decorrelated_batch_normalization"
    x, rows = _grouped(op, x, groups)
    m, p = ops.asarray(mean), ops.asarray(projection)
    each = rows.shape[1]
    if m.shape != (groups, each) or p.shape != (groups, each, each):
        raise ShapeError(
            f"{op}: wanted mean {(groups, each)}, projection {(groups, each, each)}, got {m.shape}, {p.shape}"
        )
    return _projected(x, rows, m, p)
