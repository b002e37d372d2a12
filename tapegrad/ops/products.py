"""Products of matrices and tensors."""

from __future__ import annotations

from typing import Any

from tapegrad.aval import ShapedArray, broadcast_shapes, shaped
from tapegrad.errors import ShapeError
from tapegrad.ops.dispatch import barrier, promote
from tapegrad.ops.shape import expand_dims, reshape, squeeze
from tapegrad.primitive import Bad, Sample, bilinear
from tapegrad.tensor import Tensor


def _infer_matmul(x: ShapedArray, y: ShapedArray) -> ShapedArray:
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-2]:
        raise ShapeError(f"matmul: inner sizes differ: {x.shape} @ {y.shape}")
    batch = broadcast_shapes("matmul", x.shape[:-2], y.shape[:-2])
    return shaped((*batch, x.shape[-2], y.shape[-1]), x.dtype, x.device)


def _run_matmul(xp: Any, x: Any, y: Any, *, out: Any) -> None:
    xp.matmul(x, y, out=out)


matmul_p = bilinear(
    "matmul",
    impl=_run_matmul,
    infer=_infer_matmul,
    transposes=[
        lambda ct, y: matmul(ct, y.mT),  # (m,n) (k,n)' -> (m,k)
        lambda ct, x: matmul(x.mT, ct),  # (m,k)' (m,n) -> (k,n)
    ],
    into=True,
    lift=lambda params, n: params,
    samples=[
        Sample((3, 4), (4, 2)), Sample((5, 3, 4), (4, 2)), Sample((2, 1, 3, 4), (5, 4, 2)), Sample((0, 4), (4, 2)),
        Sample((3, 0), (0, 2)), Bad((3, 4), (3, 2), error=ShapeError), Bad((2, 3, 4), (3, 4, 2), error=ShapeError),
    ],
)  # fmt: skip


def matmul(x1: Any, x2: Any, /) -> Tensor:
    """The matrix product; leading dimensions broadcast, a 1-d operand is a row (left) or a column (right).

    x1: ``(..., m, k)`` or ``(k,)``; x2: ``(..., k, n)`` or ``(k,)``.  Raises ShapeError.
    """
    x, y = promote("matmul", (x1, x2))
    if not x.ndim or not y.ndim:
        raise ShapeError(f"matmul: operands of shape {x.shape} and {y.shape}; multiply scalars with *")
    if x.shape[-1] != y.shape[-2 if y.ndim > 1 else 0]:
        raise ShapeError(f"matmul: inner sizes differ: {x.shape} @ {y.shape}")
    if x.ndim == 1:
        return squeeze(matmul(expand_dims(x, 0), y), -2 if y.ndim > 1 else 0)
    if y.ndim == 1:
        return squeeze(matmul(x, expand_dims(y, 1)), -1)
    if x.ndim > 2 and y.ndim == 2:  # one product of tall matrices, and no batch of gradients to sum
        flat = barrier(matmul_p, reshape(x, (-1, x.shape[-1])) if x.size else reshape(x, _rows(x)), y)
        return reshape(flat, (*x.shape[:-1], y.shape[-1]))
    return barrier(matmul_p, x, y)


def _rows(x: Tensor) -> tuple[int, int]:
    rows = 1
    for n in x.shape[:-1]:
        rows *= n
    return rows, x.shape[-1]
