"""Pseudo-inverses, least squares and ranks, all by singular values.

Derivatives: G. H. Golub and V. Pereyra, *The differentiation of pseudo-inverses and nonlinear least squares problems
whose variables separate* (1973), for matrices of constant rank.
"""

from __future__ import annotations

from typing import NamedTuple

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Primitive, Sample
from tapegrad.core.state import thread, unrecorded
from tapegrad.device import dtypes
from tapegrad.device.types import Array, DType, Namespace
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import TALL, WIDE, H, column, declare, floating, matrix, one_by_one
from tapegrad.linalg.hermitian import of_lower_triangle
from tapegrad.linalg.singular import svdvals
from tapegrad.ops import (
    abs,
    broadcast_to,
    equal,
    greater,
    max,
    maximum,
    not_equal,
    reshape,
    square,
    squeeze,
    stack,
    sum,
    where,
    zeros,
)
from tapegrad.ops.dispatch import barrier, cast, promote, tensor
from tapegrad.ops.index.bounds import every
from tapegrad.ops.reduce.reductions import all as all_of
from tapegrad.ops.reduce.reductions import any as any_of
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["LstsqResult", "lstsq", "matrix_rank", "pinv"]

_STACK = [[[2.0, 1.0], [-1.0, 3.0]], [[1.5, 0.5], [0.25, -2.5]]]


def _pull_pinv(g: Tensor, x: Tensor, p: Tensor) -> Tensor:
    """The cotangent of ``x``, given the conjugate transpose of that of its pseudo-inverse ``p``."""
    ph = H(p)
    tall, wide = g @ (p @ ph), (ph @ p) @ g
    return (tall - x @ (p @ tall)) + (wide - (wide @ p) @ x) - ph @ H(g) @ ph


def _push_pinv(t: Tensor, x: Tensor, p: Tensor) -> Tensor:
    ph, th = H(p), H(t)
    tall, wide = (p @ ph) @ th, th @ (ph @ p)
    return (tall - (tall @ x) @ p) + (wide - p @ (x @ wide)) - p @ t @ p


def _infer_pinv(x: ShapedArray, *, rtol: float) -> ShapedArray:
    *batch, m, n = x.shape
    return x.with_shape((*batch, n, m)).with_dtype(floating(x.dtype))


pinv_p: Primitive = declare(
    "pinv",
    lambda xp, x, *, rtol: xp.linalg.pinv(x, rtol),
    _infer_pinv,
    vjp=[lambda ct, x, out: _pull_pinv(H(ct), x, out)],
    jvp=[lambda t, x, out: _push_pinv(t, x, out)],
    flops=22.0,
    samples=[Sample(a, rtol=1e-15) for a in (TALL, WIDE, _STACK, (0, 3), (2, 0), (0, 2, 2))],
)


def _cutoff(op: str, x: Tensor, rtol: TensorLike | None) -> float:
    """``rtol`` as a number; None: the rounding error of the larger dimension."""
    if rtol is None:
        return max_side(x) * float(dtypes.finfo(_narrow(x.dtype)).eps)
    if isinstance(rtol, (int, float)):
        return float(rtol)
    share = tensor(op, rtol)
    if share.size != 1:
        raise ShapeError(f"{op}: rtol of shape {share.shape}; one number serves all matrices")
    return float(share.item())


def _narrow(dtype: DType) -> DType:
    """The real dtype in which singular values are computed."""
    real = dtypes.real_of(dtype)
    return dtypes.float32 if real.itemsize < 4 else real


def max_side(x: Tensor) -> int:
    """The larger of the last two dimensions."""
    return x.shape[-1] if x.shape[-1] > x.shape[-2] else x.shape[-2]


def pinv(
    a: TensorLike, rcond: TensorLike | None = None, hermitian: bool = False, *, rtol: TensorLike | None = None,
    atol: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """Return the pseudo-inverse of each matrix, ``(..., n, m)`` for ``(..., m, n)`` (NumPy's ``linalg.pinv``).

    rtol (NumPy's older name: rcond): singular values of at most this fraction of the largest count as 0, one number,
    or one for each matrix; None: the rounding error of the dtype times the larger dimension, as the array API standard
    says (NumPy: 1e-15), or 0 if ``atol`` is given; atol: so do those of at most this size, whichever bound is larger
    (PyTorch's); hermitian: only the lower triangle is read.  The gradient takes the rank for constant.  Raises
    ShapeError, LinAlgError.
    """
    a = matrix("pinv", a)
    a = of_lower_triangle(a) if hermitian else a
    rtol = rcond if rtol is None else rtol
    if atol is not None:
        largest = unrecorded(lambda: max(svdvals(a), axis=-1)) if max_side(a) and a.size else tensor("pinv", 0.0, a)
        share = where(largest > 0, tensor("pinv", atol, a) / where(largest > 0, largest, 1), 0)
        rtol = unrecorded(lambda: share if rtol is None else maximum(share, tensor("pinv", rtol, a)))
    if rtol is not None and getattr(rtol, "size", 1) != 1 and a.ndim > 2:
        return _pinv_of_each(a, rtol)
    return barrier(pinv_p, a, rtol=_cutoff("pinv", a, rtol))


def _pinv_of_each(x: Tensor, rtol: TensorLike) -> Tensor:
    """The pseudo-inverses, one by one: each with an ``rtol`` of its own."""
    *batch, m, n = x.shape
    shares = broadcast_to(tensor("pinv", rtol), batch).numpy().ravel()
    if not shares.size:
        return barrier(pinv_p, x, rtol=0.0)
    each = [barrier(pinv_p, a, rtol=float(share)) for a, share in zip(reshape(x, (-1, m, n)), shares, strict=True)]
    return reshape(stack(each), (*batch, n, m))


def matrix_rank(
    A: TensorLike, tol: TensorLike | None = None, hermitian: bool = False, *, rtol: TensorLike | None = None,
    atol: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """Return how many singular values of each matrix exceed ``atol`` and ``rtol`` times the largest (no derivative).

    rtol None: the rounding error of the dtype times the larger dimension, or 0 if ``atol`` (NumPy's name: ``tol``) is
    given.  A vector has rank 1 unless it is 0; hermitian: only the lower triangle is read (NumPy's
    ``linalg.matrix_rank``).  Raises LinAlgError.
    """
    A = tensor("matrix_rank", A)
    if A.ndim < 2:
        return cast(any_of(not_equal(A, 0)), dtypes.int64)
    A = matrix("matrix_rank", A)
    return unrecorded(_matrix_rank, of_lower_triangle(A) if hermitian else A, rtol, tol if atol is None else atol)


def _matrix_rank(x: Tensor, rtol: TensorLike | None, atol: TensorLike | None) -> Tensor:
    s = svdvals(x)
    if not s.shape[-1]:
        return zeros(s.shape[:-1], dtype=dtypes.int64, device=x.device)
    if atol is None and rtol is None:
        rtol = _cutoff("matrix_rank", x, None)
    bound = tensor("matrix_rank", 0.0 if atol is None else atol, x)[..., None]
    if rtol is not None:
        bound = maximum(bound, max(s, axis=-1, keepdims=True) * tensor("matrix_rank", rtol, x)[..., None])
    return sum(cast(greater(s, bound), dtypes.int64), axis=-1)


class LstsqResult(NamedTuple):
    """The solution, the sums of squared residuals, the rank and the singular values."""

    x: Tensor
    residuals: Tensor
    rank: Tensor
    s: Tensor


def _run_lstsq(xp: Namespace, a: Array, b: Array, *, rcond: float) -> Array:
    shape = (a.shape[-1], b.shape[-1])
    return one_by_one(xp, lambda a, b: xp.linalg.lstsq(a, b, rcond=rcond)[0], (a, b), shape, b.dtype)


lstsq_p: Primitive = declare(
    "lstsq",
    _run_lstsq,
    lambda a, b, *, rcond: b.with_shape((*b.shape[:-2], a.shape[-1], b.shape[-1])).with_dtype(floating(b.dtype)),
    vjp=[
        lambda ct, a, b, *, rcond: _pull_pinv(b @ H(ct), a, barrier(pinv_p, a, rtol=rcond)),
        lambda ct, a, *, rcond: H(barrier(pinv_p, a, rtol=rcond)) @ ct,
    ],
    jvp=[
        lambda t, a, b, *, rcond: _push_pinv(t, a, barrier(pinv_p, a, rtol=rcond)) @ b,
        lambda t, a, *, rcond: barrier(pinv_p, a, rtol=rcond) @ t,
    ],
    flops=12.0,
    samples=[Sample(TALL, (3, 2), rcond=1e-15), Sample(WIDE, (2, 1), rcond=1e-15)],
)


def lstsq(a: TensorLike, b: TensorLike, rcond: TensorLike | None = None) -> LstsqResult:
    """The ``x`` of least norm that minimizes ``|a @ x - b|`` (NumPy's ``linalg.lstsq``).

    a: ``(m, n)``; b: ``(m,)`` or ``(m, k)``; rcond: singular values of at most this fraction of the largest count as 0
    (None: the rounding error of the dtype times the larger dimension, -1: that of the dtype).  The residuals are
    empty unless ``m > n`` and the rank is ``n`` (under ``vmap``, that of all matrices), so where ``m > n`` the rank is
    evaluated.  Gradients, of the solution and of the residuals, take the rank for constant.  Raises ShapeError,
    LinAlgError.
    """
    a, b = promote("lstsq", (a, b), to=floating)
    if a.ndim != 2 or b.ndim not in (1, 2) or a.shape[0] != b.shape[0]:
        raise ShapeError(f"lstsq: needs a matrix and as many right sides as it has rows, got {a.shape} and {b.shape}")
    vector = b.ndim == 1
    right = column(b) if vector else b
    m, n = a.shape
    eps = float(dtypes.finfo(_narrow(a.dtype)).eps)
    share = eps if rcond == -1 else _cutoff("lstsq", a, rcond)
    x = barrier(lstsq_p, a, right, rcond=share)
    s = svdvals(a)
    rank = matrix_rank(a, rtol=share)
    residuals = zeros((0,), dtype=s.dtype, device=a.device)
    if m > n:
        full = unrecorded(lambda: all_of(equal(every(rank), n)))
        if thread.executor.decided(lambda: bool(full), True):
            residuals = sum(square(abs(right - a @ x)), axis=-2)
    return LstsqResult(squeeze(x, -1) if vector else x, residuals, rank, s)
