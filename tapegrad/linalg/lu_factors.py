"""LU factors.

The derivative of both factors follows from ``inv(l) @ da @ inv(u)``: its lower triangle is that of ``l``, the rest that
of ``u`` (M. B. Giles, 2008).
"""

from __future__ import annotations

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Primitive, Sample
from tapegrad.device import dtypes
from tapegrad.device.numerics import scipy
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import TALL, WIDE, H, declare, floating, lower_part, matrix, one_by_one, upper_part
from tapegrad.linalg.solving import solve_triangular, triangular
from tapegrad.ops.create.creation import arange, eye, zeros
from tapegrad.ops.dispatch import barrier, cast, tensor
from tapegrad.ops.elementwise.comparison import equal
from tapegrad.ops.elementwise.complex import real
from tapegrad.ops.index.indexing import take_along_axis
from tapegrad.ops.index.sort import argsort
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import broadcast_to, reshape, squeeze
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["lu", "lu_factor", "lu_solve"]

_STACK = [[[2.0, 1.0], [-1.0, 3.0]], [[0.5, 1.5], [1.25, -2.5]]]


def _order(pivots: Array, m: int) -> list[int]:
    """The order of ``m`` rows after each has been exchanged with the one that is named."""
    order = list(range(m))
    for i, p in enumerate(map(int, pivots.ravel().tolist())):
        order[i], order[p] = order[p], order[i]
    return order


def _run_lu(xp: Namespace, x: Array) -> Array:
    m, n = x.shape[-2:]
    k = min(m, n)

    def one(a: Array) -> Array:
        packed, pivots = scipy.linalg(xp).lu_factor(a, check_finite=False)
        order = _order(pivots, m)
        out = xp.zeros((m + 2, max(m, n)), dtype=a.dtype)
        out[:m, :n], out[m, :m], out[m + 1, :k] = packed, xp.asarray(order), pivots
        return out

    return one_by_one(xp, one, (x,), (m + 2, max(m, n)), x.dtype)


def _infer_lu(x: ShapedArray) -> ShapedArray:
    *batch, m, n = x.shape
    return x.with_shape((*batch, m + 2, max(m, n))).with_dtype(floating(x.dtype))


def _lu_parts(packed: Tensor, m: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Both factors in one matrix, the order of the rows, the exchanges of rows."""
    order, pivots = (cast(real(packed[..., m + i, :]), dtypes.int64) for i in (0, 1))
    return packed[..., :m, :n], order[..., :m], pivots[..., : min(m, n)]


def _padded(factors: Tensor, m: int, n: int) -> tuple[Tensor, Tensor]:
    """The factors as square triangles of ``m`` and ``n`` rows, completed by a unit matrix."""
    k = min(m, n)
    batch = factors.shape[:-2]

    def blank(rows: int, columns: int) -> Tensor:
        return zeros((*batch, rows, columns), dtype=factors.dtype, device=factors.device)

    lower = lower_part(factors[..., :k], -1)
    lower = (concat([lower, blank(m, m - k)], axis=-1) if m > k else lower) + eye(
        m, dtype=factors.dtype, device=factors.device
    )
    upper = upper_part(factors[..., :k, :])
    if n > k:
        below = eye(n - k, n, k=k, dtype=factors.dtype, device=factors.device)
        upper = concat([upper, broadcast_to(below, (*batch, n - k, n))], axis=-2)
    return lower, upper


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """The rows of each matrix in ``order``; a leading dimension more than that of ``order`` is allowed."""
    index = broadcast_to(reshape(order, (*order.shape, 1)), x.shape)
    return take_along_axis(x, index, axis=-2)


def _wide(x: Tensor, m: int, n: int) -> Tensor:
    """Zeros where the order and the exchanges of rows stand."""
    if m > n:
        x = concat([x, zeros((*x.shape[:-1], m - n), dtype=x.dtype, device=x.device)], axis=-1)
    return concat([x, zeros((*x.shape[:-2], 2, x.shape[-1]), dtype=x.dtype, device=x.device)], axis=-2)


def _pull_lu(ct: Tensor, out: Tensor, x_aval: ShapedArray) -> Tensor:
    m, n = x_aval.shape[-2:]
    factors, order, _ = _lu_parts(out, m, n)
    lower, upper = _padded(factors, m, n)
    g = ct[..., :m, :n]
    inner = lower_part(H(lower) @ g, -1) + upper_part(g @ H(upper))
    inner = triangular(H(lower), inner, lower=False, unit=True)
    return _rows(H(triangular(upper, H(inner), lower=False)), argsort(order, axis=-1))


def _push_lu(t: Tensor, out: Tensor) -> Tensor:
    m, n = t.shape[-2:]
    factors, order, _ = _lu_parts(out, m, n)
    lower, upper = _padded(factors, m, n)
    inner = triangular(lower, _rows(t, order), lower=True, unit=True)
    inner = H(triangular(H(upper), H(inner), lower=True))
    return _wide(lower @ lower_part(inner, -1) + upper_part(inner) @ upper, m, n)


lu_p: Primitive = declare(
    "lu",
    _run_lu,
    _infer_lu,
    vjp=[_pull_lu],
    jvp=[_push_lu],
    flops=0.7,
    samples=[Sample(TALL), Sample(WIDE), Sample(_STACK), Sample((0, 0)), Sample((0, 2, 2))],
    doc="Both factors in one matrix; below it the order of the rows, and the exchanges that lead to it.",
)


def _factored(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factors, order, exchanges; computed in at least float32, which holds positions that shorter floats do not."""
    factors, order, pivots = _lu_parts(barrier(lu_p, cast(a, dtypes.accumulator(a.dtype))), *a.shape[-2:])
    return cast(factors, a.dtype), order, pivots


def lu_factor(a: TensorLike) -> tuple[Tensor, Tensor]:
    """Both factors of each matrix in one, and the exchanges of rows, for :func:`lu_solve` (SciPy's ``lu_factor``).

    a: ``(..., m, n)``; exchanges: ``(..., min(m, n))``, int64.  Raises ShapeError.
    """
    a = matrix("lu_factor", a)
    factors, _, pivots = _factored(a)
    return factors, pivots


def lu(a: TensorLike, permute_l: bool = False, p_indices: bool = False) -> tuple[Tensor, ...]:
    """``p, l, u`` with ``a = p @ l @ u``: a permutation, a unit lower triangle, an upper one (SciPy's ``linalg.lu``).

    a: ``(..., m, n)``; permute_l: ``p @ l`` and ``u``; p_indices: ``p`` as indices, ``a = l[p] @ u``.  The
    permutation has no derivative; the gradient needs the first ``min(m, n)`` columns to be independent.  Raises
    ShapeError.
    """
    a = matrix("lu", a)
    m, n = a.shape[-2:]
    k = min(m, n)
    factors, order, _ = _factored(a)
    lower = lower_part(factors[..., :k], -1) + eye(m, k, dtype=a.dtype, device=a.device)
    upper = upper_part(factors[..., :k, :])
    back = argsort(order, axis=-1)
    if permute_l:
        return _rows(lower, back), upper
    if p_indices:
        return back, lower, upper
    at = arange(m, device=a.device)
    dtype = dtypes.real_of(a.dtype)
    return cast(equal(reshape(back, (*back.shape, 1)), at), dtype), lower, upper


def _run_order(xp: Namespace, x: Array, *, m: int) -> Array:
    def one(pivots: Array) -> Array:
        return xp.asarray(_order(pivots, m), dtype=dtypes.int64)[None]

    return one_by_one(xp, one, (x[..., None, :],), (1, m), dtypes.int64)[..., 0, :]


order_p: Primitive = declare(
    "order_of_exchanges",
    _run_order,
    lambda x, *, m: x.with_shape((*x.shape[:-1], m)).with_dtype(dtypes.int64),
    samples=[Sample([1, 1], m=3)],
    doc="The order of ``m`` rows after each has been exchanged with the one that is named.",
)


def lu_solve(lu_and_piv: tuple[TensorLike, TensorLike], b: TensorLike, trans: int = 0) -> Tensor:
    """The ``x`` with ``a @ x = b``, given :func:`lu_factor` of ``a`` (SciPy's ``linalg.lu_solve``).

    b: ``(n,)`` or ``(..., n, k)``; trans: 1 solves with the transpose of ``a``, 2 with the conjugate transpose.  Raises
    ShapeError.
    """
    factors, pivots = tensor("lu_solve", lu_and_piv[0]), tensor("lu_solve", lu_and_piv[1])
    if trans not in (0, 1, 2):
        raise ShapeError(f"lu_solve: trans={trans!r}; give 0, 1 for the transpose or 2 for the conjugate transpose")
    b = tensor("lu_solve", b, factors)
    vector = b.ndim == 1
    b = reshape(b, (b.size, 1)) if vector else b
    order = barrier(order_p, cast(pivots, dtypes.int64), m=factors.shape[-1])
    batch = tuple(b.shape[:-2]) if b.ndim > factors.ndim else tuple(factors.shape[:-2])
    b = broadcast_to(b, (*batch, *b.shape[-2:]))
    if not trans:
        out = solve_triangular(factors, _rows(b, order), lower=True, unit_diagonal=True)
        out = solve_triangular(factors, out)
    else:
        out = solve_triangular(factors, b, trans=trans)
        out = solve_triangular(factors, out, trans=trans, lower=True, unit_diagonal=True)
        out = _rows(out, argsort(order, axis=-1))
    return squeeze(out, -1) if vector else out
