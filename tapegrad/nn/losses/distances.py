"""Distances and similarities under torch.nn.functional's names.

Where a distance is 0 its gradient is 0, as in PyTorch.
"""

from __future__ import annotations

import math

from tapegrad import ops
from tapegrad.errors import ShapeError
from tapegrad.nn.functional.norm import p_norm
from tapegrad.ops.dispatch import in_float32, of_floats, real_only
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["cdist", "cosine_similarity", "pairwise_distance", "pdist"]


@real_only
@of_floats()
@in_float32
def cosine_similarity(x1: TensorLike, x2: TensorLike, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """``x1 . x2 / (max(|x1|, eps) * max(|x2|, eps))`` along ``dim``.  Raises AxisError, ShapeError."""
    x, y = ops.broadcast_arrays(ops.asarray(x1), ops.asarray(x2))
    x, y = (a / ops.maximum(p_norm(a, 2, dim), eps) for a in (x, y))
    return ops.sum(x * y, axis=dim)


def _distance(difference: Tensor, p: float, keepdims: bool) -> Tensor:
    """The p-norm over the last axis."""
    if math.isinf(p) and not difference.shape[-1]:
        return ops.zeros(difference.shape[:-1], dtype=difference.dtype, device=difference.device)
    return p_norm(difference, p, -1, keepdims)


@of_floats()
@in_float32
def pairwise_distance(
    x1: TensorLike, x2: TensorLike, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    """The p-norm over the last axis of ``x1 - x2 + eps``; the two broadcast.  Raises ShapeError."""
    return _distance(ops.asarray(x1) - ops.asarray(x2) + eps, p, keepdim)


@of_floats()
def pdist(input: TensorLike, p: float = 2.0) -> Tensor:
    """The p-norm distances of all pairs of rows, (n, k) -> (n * (n - 1) / 2,), in the order of SciPy's ``pdist``.

    Raises ShapeError.
    """
    x = ops.asarray(input)
    if x.ndim != 2 or p < 0:
        raise ShapeError(f"pdist: wanted input (n, k) and p >= 0, got {x.shape}, {p}")
    n = x.shape[0]
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    at = ops.reshape(ops.asarray(pairs, dtype="int64", device=x.device), (-1, 2))
    return _distance(ops.take(x, at[:, 0], axis=0) - ops.take(x, at[:, 1], axis=0), p, False)


@of_floats()
def cdist(x1: TensorLike, x2: TensorLike, p: float = 2.0) -> Tensor:
    """The p-norm distances of all rows of one to all of the other: (..., n, k), (..., m, k) -> (..., n, m).

    Raises ShapeError.
    """
    x, y = ops.asarray(x1), ops.asarray(x2)
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-1] or p < 0:
        raise ShapeError(f"cdist: wanted (..., n, k), (..., m, k) and p >= 0, got {x.shape}, {y.shape}, {p}")
    return _distance(ops.expand_dims(x, axis=-2) - ops.expand_dims(y, axis=-3), p, False)
