"""Products of matrices under their names in ``linalg``, powers and chains: plain functions."""

from __future__ import annotations

from collections.abc import Sequence

from tapegrad.core.aval import normalize_axis
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import check_square, identity
from tapegrad.linalg.solving import inv
from tapegrad.ops.dispatch import in_float32, own, promote, tensor
from tapegrad.ops.products import products
from tapegrad.ops.products.products import matmul, tensordot, vecdot
from tapegrad.ops.shape import diagonals
from tapegrad.ops.shape.join import stack
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, matrix_transpose, moveaxis, reshape
from tapegrad.tensor import DTypeLike, Tensor, TensorLike

__all__ = [
    "cross", "diagonal", "matmul", "matrix_power", "matrix_transpose", "multi_dot", "outer", "tensordot", "trace",
    "vecdot",
]  # fmt: skip


def outer(x1: TensorLike, x2: TensorLike) -> Tensor:
    """The product of each element of the vector ``x1`` with each of the vector ``x2``.  Raises ShapeError."""
    x, y = promote("outer", (x1, x2))
    if x.ndim != 1 or y.ndim != 1:
        raise ShapeError(f"outer: needs two vectors, got shapes {x.shape} and {y.shape}")
    return products.outer(x, y)


@in_float32
def cross(x1: TensorLike, x2: TensorLike, *, axis: int = -1) -> Tensor:
    """The cross product of vectors of length 3 along ``axis``; other dimensions broadcast.

    axis: negative, counted in both.  Raises ShapeError, AxisError.
    """
    x, y = promote("cross", (x1, x2))
    lines = []
    for t in (x, y):
        a = normalize_axis("cross", axis, t.ndim)
        if t.shape[a] != 3:
            raise ShapeError(f"cross: needs vectors of length 3 along axis {axis}, got shapes {x.shape} and {y.shape}")
        lines.append(moveaxis(t, a, -1))
    u, v = ([line[..., i] for i in range(3)] for line in lines)
    out = stack([u[i - 2] * v[i - 1] - u[i - 1] * v[i - 2] for i in range(3)], axis=-1)
    return moveaxis(out, -1, normalize_axis("cross", axis, out.ndim))


def diagonal(x: TensorLike, *, offset: int = 0) -> Tensor:
    """Diagonal ``offset`` (positive: above the main one) of each matrix: a view.  Raises ShapeError."""
    return diagonals.diagonal(x, offset, -2, -1)


def trace(x: TensorLike, *, offset: int = 0, dtype: DTypeLike | None = None) -> Tensor:
    """The sum of diagonal ``offset`` of each matrix; small integers are summed in 64 bits.  Raises ShapeError."""
    return diagonals.trace(x, offset, -2, -1, dtype)


def matrix_power(a: TensorLike, n: int) -> Tensor:
    """Each square matrix to the integer power ``n``, that of its inverse if negative (NumPy's ``linalg.matrix_power``).

    By squaring, so derivatives take as many products.  Raises ShapeError, LinAlgError.
    """
    base = factor = check_square("matrix_power", tensor("matrix_power", a))
    n = n.__index__()
    if n == 0:
        return broadcast_to(identity(base), base.shape)
    if n < 0:
        factor, n = inv(base), -n
    if n == 3:
        return matmul(matmul(factor, factor), factor)
    out: Tensor | None = None
    while n:
        if n & 1:
            out = factor if out is None else matmul(out, factor)
        n >>= 1
        factor = matmul(factor, factor) if n else factor
    assert out is not None
    return own(out, base)


def multi_dot(arrays: Sequence[TensorLike]) -> Tensor:
    """The product of a chain of matrices, in the order that takes the fewest operations (NumPy's ``linalg.multi_dot``).

    arrays: two or more matrices, the first and the last may be vectors.  Raises ShapeError.
    """
    chain = [tensor("multi_dot", a) for a in arrays]
    if len(chain) < 2:
        raise ShapeError(f"multi_dot: needs two matrices or more, got {len(chain)}")
    if any(a.ndim not in ((1, 2) if i in (0, len(chain) - 1) else (2,)) for i, a in enumerate(chain)):
        raise ShapeError(f"multi_dot: needs matrices (vectors at the ends), got {[a.shape for a in chain]}")
    first, last = chain[0].ndim == 1, chain[-1].ndim == 1
    if first:
        chain[0] = expand_dims(chain[0], 0)
    if last:
        chain[-1] = expand_dims(chain[-1], 1)
    for a, b in zip(chain, chain[1:]):
        if a.shape[1] != b.shape[0]:
            raise ShapeError(f"multi_dot: inner sizes differ: {a.shape} @ {b.shape}")
    sizes = [chain[0].shape[0], *(a.shape[1] for a in chain)]
    out = _multiplied(chain, _splits(sizes), 0, len(chain) - 1)
    return reshape(out, (() if first else out.shape[:1]) + (() if last else out.shape[1:]))


def _splits(sizes: list[int]) -> dict[tuple[int, int], int]:
    """Where to split each part of the chain (Cormen et al., *Introduction to Algorithms*, matrix-chain order)."""
    count = len(sizes) - 1
    cost = {(i, i): 0 for i in range(count)}
    split = {}
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            costs = [(cost[i, k] + cost[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j)]
            cost[i, j], split[i, j] = min(costs)
    return split


def _multiplied(chain: list[Tensor], split: dict[tuple[int, int], int], i: int, j: int) -> Tensor:
    if i == j:
        return chain[i]
    k = split[i, j]
    return matmul(_multiplied(chain, split, i, k), _multiplied(chain, split, k + 1, j))
