"""Singular values and vectors.

Derivatives: M. B. Giles (2008); Z. Wan and S. Zhang, *Automatic differentiation for complex valued SVD* (2019).
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Primitive, Sample, general
from tapegrad.device import dtypes
from tapegrad.device.types import Array, DType, Namespace
from tapegrad.errors import NoGradientError
from tapegrad.linalg._common import TALL, WIDE, H, column, declare, floating, matrix, on_diagonal, over, row
from tapegrad.linalg.hermitian import of_lower_triangle
from tapegrad.ops import concat, conj, imag, real, reshape, sum, zeros
from tapegrad.ops.dispatch import barrier, cast
from tapegrad.ops.shape.diagonals import diagonal
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["SVDResult", "svd", "svdvals"]

_SQUARE = [[[2.0, 1.0], [-1.0, 3.0]], [[1.5, 0.5], [0.25, -2.5]]]
_SAMPLES = [TALL, WIDE, _SQUARE, (0, 3), (2, 0), (0, 2, 2)]


class SVDResult(NamedTuple):
    """``x = U @ diag(S) @ Vh``; ``S`` descends."""

    U: Tensor
    S: Tensor
    Vh: Tensor


def _infer_svd(x: ShapedArray) -> ShapedArray:
    *batch, m, n = x.shape
    return x.with_shape((*batch, m + 1 + n, min(m, n))).with_dtype(floating(x.dtype))


def _run_svd(xp: Namespace, x: Array) -> Array:
    u, s, vh = xp.linalg.svd(x, full_matrices=False)
    return xp.concatenate([u, s[..., None, :].astype(u.dtype), vh.swapaxes(-1, -2)], axis=-2)


def _parts(packed: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """``U``, the singular values and ``V`` from their rows."""
    return packed[..., :m, :], real(packed[..., m, :]), conj(packed[..., m + 1 :, :])


def _gaps(s: Tensor, dtype: DType) -> Tensor:
    """``s_j^2 - s_i^2``, as a product, since a difference of squares would round a small difference away."""
    return cast((row(s) - column(s)) * (row(s) + column(s)), dtype)


def _pull_svd(ct: Tensor, out: Tensor, x_aval: ShapedArray) -> Tensor:
    m, n = x_aval.shape[-2:]
    (u, s, v), (gu, gs, gv) = _parts(out, m), _parts(ct, m)
    inner_u, inner_v = H(u) @ gu, H(v) @ gv
    skew_u, skew_v = inner_u - H(inner_u), inner_v - H(inner_v)
    eye = on_diagonal(s)
    inner = over(skew_u * row(s) + column(s) * skew_v, _gaps(s, u.dtype), eye)
    middle = cast(gs, u.dtype)
    if u.dtype.kind == "c":
        middle = middle + over(diagonal(skew_u - skew_v, 0, -2, -1), cast(4 * s, u.dtype))
    g = (u @ inner + u * row(middle)) @ H(v)
    if m > n:
        g = g + over(gu - u @ inner_u, cast(row(s), u.dtype)) @ H(v)
    if n > m:
        g = g + u @ H(over(gv - v @ inner_v, cast(row(s), u.dtype)))
    return g


def _push_svd(t: Tensor, out: Tensor) -> Tensor:
    m, n = t.shape[-2:]
    u, s, v = _parts(out, m)
    tv, tu = t @ v, H(t) @ u
    inner = H(u) @ tv
    eye, gaps = on_diagonal(s), _gaps(s, u.dtype)
    du = u @ over(inner * row(s) + column(s) * H(inner), gaps, eye)
    dv = v @ over(column(s) * inner + H(inner) * row(s), gaps, eye)
    if u.dtype.kind == "c":
        phase = over(1j * cast(imag(diagonal(inner, 0, -2, -1)), u.dtype), cast(2 * s, u.dtype))
        du, dv = du + u * row(phase), dv - v * row(phase)
    if m > n:
        du = du + over(tv - u @ inner, cast(row(s), u.dtype))
    if n > m:
        dv = dv + over(tu - v @ H(inner), cast(row(s), u.dtype))
    ds = row(cast(real(diagonal(inner, 0, -2, -1)), u.dtype))
    return concat([du, ds, conj(dv)], axis=-2)


svd_p: Primitive = declare(
    "svd",
    _run_svd,
    _infer_svd,
    vjp=[_pull_svd],
    jvp=[_push_svd],
    flops=20.0,
    samples=[Sample(a) for a in _SAMPLES],
    doc="U's rows, the singular values, the rows of the transpose of Vh.",
)


def _svd_rule(ct: Tensor) -> Tensor:
    raise NoGradientError(
        "svd: the additional columns of U and rows of Vh that full_matrices=True gives have no derivative; take "
        "svd(x, full_matrices=False), or svdvals(x)"
    )


full_part_p = general(
    "svd_full_matrices",
    impl=lambda xp, x: x,
    infer=lambda x: x,
    vjp=[_svd_rule],
    jvp=[lambda t: _svd_rule(t)],
    view=True,
    samples=[Sample([[1, 0], [0, 1]])],
    doc="U or Vh of a full decomposition of a matrix that is not square.",
)


def _run_full(xp: Namespace, x: Array) -> Array:
    u, s, vh = xp.linalg.svd(x, full_matrices=True)
    flat = [a.reshape(*x.shape[:-2], prod(a.shape[x.ndim - 2 :])) for a in (u, s.astype(u.dtype), vh)]
    return xp.concatenate(flat, axis=-1)


def _infer_full(x: ShapedArray) -> ShapedArray:
    *batch, m, n = x.shape
    return x.with_shape((*batch, m * m + min(m, n) + n * n)).with_dtype(floating(x.dtype))


svd_full_p: Primitive = declare(
    "svd_full",
    _run_full,
    _infer_full,
    vjp=[lambda ct, x: _pull_values(real(_full_parts(ct, x)[1]), x)],
    jvp=[lambda t, x, out: _push_full(t, x, out)],
    flops=25.0,
    samples=[Sample([[2, 1], [-1, 3], [1, -1]]), Sample([[2, -1, 1], [1, 3, -1]])],
    doc="U, the singular values and Vh, each flattened; the derivative is that of the singular values.",
)


def _full_parts(packed: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m, n = x.shape[-2:]
    batch, k = packed.shape[:-1], min(m, n)
    u = reshape(packed[..., : m * m], (*batch, m, m))
    return u, packed[..., m * m : m * m + k], reshape(packed[..., m * m + k :], (*batch, n, n))


def _push_full(t: Tensor, x: Tensor, out: Tensor) -> Tensor:
    m, n = x.shape[-2:]
    blank = [zeros((*x.shape[:-2], k * k), dtype=out.dtype, device=x.device) for k in (m, n)]
    return concat([blank[0], cast(_push_values(t, x), out.dtype), blank[1]], axis=-1)


def _pull_values(ct: Tensor, x: Tensor) -> Tensor:
    u, _, v = _parts(barrier(svd_p, x), x.shape[-2])
    return (u * row(ct)) @ H(v)


def _push_values(t: Tensor, x: Tensor) -> Tensor:
    u, _, v = _parts(barrier(svd_p, x), x.shape[-2])
    return real(sum(conj(u) * (t @ v), axis=-2))


svdvals_p: Primitive = declare(
    "svdvals",
    lambda xp, x: xp.linalg.svd(x, compute_uv=False),
    lambda x: x.with_shape((*x.shape[:-2], min(x.shape[-2:]))).with_dtype(dtypes.real_of(floating(x.dtype))),
    vjp=[_pull_values],
    jvp=[_push_values],
    flops=4.0,
    samples=[Sample(a) for a in _SAMPLES],
)


def svdvals(x: TensorLike) -> Tensor:
    """The singular values of each matrix, descending (NumPy's ``linalg.svdvals``).

    The gradient is finite at repeated values and at 0, and depends there on the vectors that LAPACK chose.  Raises
    ShapeError, and LinAlgError if LAPACK does not converge.
    """
    return barrier(svdvals_p, matrix("svdvals", x))


def svd(
    a: TensorLike, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False
) -> Tensor | SVDResult:
    """The singular value decomposition ``a = U @ diag(S) @ Vh`` (NumPy's ``linalg.svd``).

    x: ``(..., m, n)``; U: ``(..., m, m)``, Vh: ``(..., n, n)``, or with ``full_matrices=False`` only ``min(m, n)``
    columns and rows.  compute_uv=False: ``S`` alone; hermitian: only the lower triangle is read.  The gradient
    through U and Vh is infinite or NaN at repeated singular values, and of complex ones it has a meaning only for
    functions that do not depend on their common phases; if more of them than ``min(m, n)`` are asked for it raises
    NoGradientError.  Raises ShapeError, LinAlgError.
    """
    a = matrix("svd", a)
    a = of_lower_triangle(a) if hermitian else a
    m, n = a.shape[-2:]
    if not compute_uv:
        return svdvals(a)
    if full_matrices and m != n:
        u, s, vh = _full_parts(barrier(svd_full_p, a), a)
        return SVDResult(barrier(full_part_p, u), real(s), barrier(full_part_p, vh))
    u, s, v = _parts(barrier(svd_p, a), m)
    return SVDResult(u, s, H(v))
