"""Hermitian matrices: Cholesky factors, eigenvalues and eigenvectors.

LAPACK reads one triangle.  Of a matrix that is Hermitian, up to a part in a thousand of its largest element, the mean
of both triangles is taken, and its gradient is Hermitian.  Of any other matrix one triangle is read, and gets the
whole gradient.

Derivatives: I. Murray, *Differentiation of the Cholesky decomposition* (2016); M. B. Giles (2008) for eigenvectors.
"""

from __future__ import annotations

from typing import NamedTuple

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Bad, Primitive, Sample
from tapegrad.device import dtypes
from tapegrad.device.numerics import triangles
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.linalg._common import (
    H,
    check_square,
    column,
    declare,
    floating,
    half_lower,
    half_upper,
    infer_last,
    lower_part,
    on_diagonal,
    over,
    row,
    square,
    stacked,
)
from tapegrad.linalg.solving import solve_triangular, triangular
from tapegrad.ops import concat, real
from tapegrad.ops.dispatch import barrier, cast
from tapegrad.ops.shape.diagonals import diagonal
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["EighResult", "cho_factor", "cho_solve", "cholesky", "eigh", "eigvalsh"]

_NEARLY = 1e-3
_A = [[4.0, 1.0, 0.5], [1.0, 3.0, -1.0], [0.5, -1.0, 2.0]]
_STACK = [_A, [[2.0, 0.5, 0.25], [0.5, 5.0, 1.0], [0.25, 1.0, 3.0]]]
_FACTOR = [[2.0, 0.0, 0.0], [0.5, 1.5, 0.0], [0.25, -0.5, 1.0]]
_SAMPLES = [(_A, False), (_STACK, True), ((0, 0), False), ((0, 2, 2), True)]
_YES, _EITHER = [[True]], [[[True]], [[False]]]


def whole(x: Tensor) -> Tensor:
    """``x``, or the mean of both triangles, so that both get a gradient, if it is Hermitian up to rounding."""
    if not x.size:
        return x
    return _mean_of_triangles(x, barrier(nearly_hermitian_p, x))


def of_lower_triangle(x: Tensor) -> Tensor:
    """Return the Hermitian matrices that have the lower triangles of ``x``; both triangles of Hermitian ones count."""
    half = half_lower(whole(x))
    return half + H(half)


def _mean_of_triangles(x: Tensor, mixed: Tensor) -> Tensor:
    return barrier(hermitian_mean_p, x, mixed)


def _run_mean(xp: Namespace, x: Array, mixed: Array, *, out: Array) -> None:
    triangles.mean(xp, x, mixed, out)


def _run_nearly(xp: Namespace, x: Array, *, out: Array) -> None:
    exactly = triangles.is_mirrored(x)
    if xp.__name__ == "numpy" and exactly.all():  # most are; this takes a fifth of the time
        out.fill(triangles.EXACTLY)
        return
    other = xp.conj(x.swapaxes(-1, -2)) if x.dtype.kind == "c" else x.swapaxes(-1, -2)
    off = xp.abs(x - other).max(axis=(-2, -1), keepdims=True)
    nearly = off <= _NEARLY * xp.abs(x).max(axis=(-2, -1), keepdims=True)
    xp.copyto(out, xp.where(nearly, triangles.NEARLY, triangles.NO), casting="unsafe")
    xp.copyto(out, triangles.EXACTLY, where=exactly)


nearly_hermitian_p: Primitive = declare(
    "is_nearly_hermitian",
    _run_nearly,
    lambda x: x.with_shape((*x.shape[:-2], 1, 1)).with_dtype(dtypes.uint8),
    into=True,
    calls_lapack=False,
    samples=[Sample(_A), Sample(_STACK)],
    doc="``NO``, ``NEARLY`` or ``EXACTLY``, of each matrix.",
)


hermitian_mean_p: Primitive = declare(
    "hermitian_mean",
    _run_mean,
    lambda x, mixed: infer_last(x),
    vjp=[lambda ct, mixed: _mean_of_triangles(ct, mixed), None],
    jvp=[lambda t, mixed: _mean_of_triangles(t, mixed), None],
    into=True,
    calls_lapack=False,
    samples=[
        Sample(_A, _YES),
        Sample(_STACK, _EITHER),
        Sample((0, 0), _YES),
    ],
    doc="``(x + x.mH) / 2`` of each matrix where ``mixed``, (..., 1, 1), is not 0; else the matrix itself.",
)


def mirrored(x: Tensor, upper: bool) -> Tensor:
    """The Hermitian matrix of which one triangle is read."""
    half = half_upper(x) if upper else half_lower(x)
    return half + H(half)


def folded(g: Tensor, upper: bool) -> Tensor:
    """The transpose of :func:`mirrored`: the cotangent of one triangle."""
    both = g + H(g)
    return half_upper(both) if upper else half_lower(both)


def _run_cholesky(xp: Namespace, x: Array, mixed: Array, *, upper: bool, out: Array) -> None:
    triangles.cholesky(xp, x, mixed, upper, out)


def _push_cholesky(t: Tensor, out: Tensor, upper: bool = False) -> Tensor:
    """``t`` is Hermitian, or one triangle of it is read."""
    factor = H(out) if upper else out
    inner = triangular(factor, mirrored(t, upper), lower=True)
    inner = H(triangular(factor, H(inner), lower=True))
    pushed = factor @ half_lower(inner)
    return H(pushed) if upper else pushed


def _pull_cholesky(ct: Tensor, mixed: Tensor, out: Tensor, *, upper: bool) -> Tensor:
    return H(_of_factor(H(ct), H(out), mixed)) if upper else _of_factor(ct, out, mixed)


def _of_factor(ct: Tensor, factor: Tensor, mixed: Tensor) -> Tensor:
    """The cotangent of ``x`` for that of its lower factor."""
    return barrier(cholesky_vjp_p, *stacked("cholesky", ct, factor, mixed))


cholesky_p: Primitive = declare(
    "cholesky",
    _run_cholesky,
    lambda x, mixed, *, upper: infer_last(x),
    vjp=[_pull_cholesky, None],
    jvp=[lambda t, mixed, out, *, upper: _push_cholesky(_mean_of_triangles(t, mixed), out, upper), None],
    into=True,
    flops=0.35,
    samples=[
        Sample(_A, _YES, upper=False), Sample(_STACK, _EITHER, upper=True), Sample(_STACK, _EITHER, upper=False),
        Sample((0, 0), _YES, upper=False), Sample((0, 2, 2), (0, 1, 1), upper=True),
    ],
    doc="Factors of the means of both triangles where ``mixed``, (..., 1, 1), is ``NEARLY``; else of one triangle.",
)  # fmt: skip


def _run_cholesky_vjp(xp: Namespace, g: Array, factor: Array, mixed: Array, *, out: Array) -> None:
    triangles.of_cholesky(xp, g, factor, mixed, out)


def _vjp_pull_factor(ct: Tensor, g: Tensor, factor: Tensor, mixed: Tensor, out: Tensor) -> Tensor:
    both = mirrored(_mean_of_triangles(ct, mixed), False)
    left = triangular(factor, both, lower=True)
    inner = half_lower(H(triangular(factor, H(left), lower=True)))
    return lower_part(lower_part(g) @ H(inner) - (out + H(out)) @ H(left))


def _vjp_push_factor(t: Tensor, g: Tensor, factor: Tensor, mixed: Tensor, out: Tensor) -> Tensor:
    back, t = H(factor), lower_part(t)
    inner = H(triangular(back, H(half_lower(H(t) @ lower_part(g))), lower=False)) - H(t) @ (out + H(out))
    return _mean_of_triangles(folded(triangular(back, inner, lower=False), False), mixed)


cholesky_vjp_p: Primitive = declare(
    "cholesky_vjp",
    _run_cholesky_vjp,
    lambda g, factor, mixed: infer_last(factor),
    vjp=[
        lambda ct, factor, mixed: _push_cholesky(_mean_of_triangles(ct, mixed), lower_part(factor)),
        _vjp_pull_factor,
        None,
    ],
    jvp=[lambda t, factor, mixed: _of_factor(t, factor, mixed), _vjp_push_factor, None],
    into=True,
    flops=1.0,
    samples=[
        Sample((3, 3), _FACTOR, _YES), Sample((2, 3, 3), [_FACTOR, _FACTOR], _EITHER),
        Sample((0, 2, 2), (0, 2, 2), (0, 1, 1)),
    ],
    doc="The cotangent of ``x`` for the cotangent of its lower Cholesky factor: Hermitian where ``mixed`` is not 0.",
)  # fmt: skip


def cholesky(x: TensorLike, *, upper: bool = False) -> Tensor:
    """The lower triangular ``l`` with ``l @ l.mH = x``, or the upper one ``u`` with ``u.mH @ u = x``.

    x: ``(..., n, n)``, positive definite; one triangle is read.  The gradient is Hermitian if ``x`` is.  Raises
    ShapeError, and LinAlgError if ``x`` is not positive definite (on CUDA CuPy raises nothing).
    """
    x = square("cholesky", x)
    return barrier(cholesky_p, x, barrier(nearly_hermitian_p, x), upper=bool(upper))


def cho_factor(a: TensorLike, lower: bool = False) -> tuple[Tensor, bool]:
    """A Cholesky factor for :func:`cho_solve`, and whether it is the lower one (SciPy's ``linalg.cho_factor``).

    The other triangle holds zeros.  Raises as :func:`cholesky`.
    """
    return cholesky(a, upper=not lower), lower


def cho_solve(c_and_lower: tuple[TensorLike, bool], b: TensorLike) -> Tensor:
    """The ``x`` with ``a @ x = b``, given :func:`cho_factor` of ``a`` (SciPy's ``linalg.cho_solve``).

    b: ``(n,)`` or ``(..., n, k)``.  Raises ShapeError, LinAlgError.
    """
    c, lower = c_and_lower
    first = solve_triangular(c, b, trans=0 if lower else 2, lower=lower)
    return solve_triangular(c, first, trans=2 if lower else 0, lower=lower)


class EighResult(NamedTuple):
    """Eigenvalues in ascending order, and eigenvectors in the columns."""

    eigenvalues: Tensor
    eigenvectors: Tensor


def _infer_eigh(x: ShapedArray, *, upper: bool) -> ShapedArray:
    check_square("eigh", x)
    return x.with_shape((*x.shape[:-2], x.shape[-1] + 1, x.shape[-1])).with_dtype(floating(x.dtype))


def _run_eigh(xp: Namespace, x: Array, *, upper: bool) -> Array:
    w, v = xp.linalg.eigh(x, UPLO="U" if upper else "L")
    return xp.concatenate([w[..., None, :].astype(v.dtype), v], axis=-2)


def _parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, a row on top, and eigenvectors below."""
    return real(packed[..., 0, :]), packed[..., 1:, :]


def _rotations(inner: Tensor, w: Tensor) -> Tensor:
    """``inner`` over the differences of eigenvalues; 0 on the diagonal, and where it is 0."""
    return over(inner, cast(row(w) - column(w), inner.dtype), on_diagonal(w))


def _pull_eigh(ct: Tensor, out: Tensor, *, upper: bool) -> Tensor:
    (w, v), (gw, gv) = _parts(out), _parts(ct)
    inner = _rotations(H(v) @ gv, w)
    return folded(v @ inner @ H(v) + (v * row(gw)) @ H(v), upper)


def _push_eigh(t: Tensor, out: Tensor, *, upper: bool) -> Tensor:
    w, v = _parts(out)
    inner = H(v) @ mirrored(t, upper) @ v
    pushed = row(cast(real(diagonal(inner, 0, -2, -1)), out.dtype))
    return concat([pushed, v @ _rotations(inner, w)], axis=-2)


eigh_p: Primitive = declare(
    "eigh",
    _run_eigh,
    _infer_eigh,
    vjp=[_pull_eigh],
    jvp=[_push_eigh],
    flops=9.0,
    samples=[*(Sample(a, upper=upper) for a, upper in _SAMPLES), Bad((2, 3), upper=False, error=ShapeError)],
    doc="Eigenvalues as a first row, eigenvectors below.",
)


def _pull_eigvalsh(ct: Tensor, x: Tensor, *, upper: bool) -> Tensor:
    v = _parts(barrier(eigh_p, x, upper=upper))[1]
    return folded((v * row(ct)) @ H(v), upper)


def _push_eigvalsh(t: Tensor, x: Tensor, *, upper: bool) -> Tensor:
    v = _parts(barrier(eigh_p, x, upper=upper))[1]
    return real(diagonal(H(v) @ mirrored(t, upper) @ v, 0, -2, -1))


eigvalsh_p: Primitive = declare(
    "eigvalsh",
    lambda xp, x, *, upper: xp.linalg.eigvalsh(x, UPLO="U" if upper else "L"),
    lambda x, *, upper: x.with_shape(x.shape[:-1]).with_dtype(dtypes.real_of(floating(x.dtype))),
    vjp=[_pull_eigvalsh],
    jvp=[_push_eigvalsh],
    flops=1.4,
    samples=[Sample(a, upper=upper) for a, upper in _SAMPLES],
)


def _triangle(op: str, UPLO: str) -> bool:
    if UPLO.upper() not in ("L", "U"):
        raise ShapeError(f"{op}: UPLO={UPLO!r}; give 'L' for the lower triangle, 'U' for the upper one")
    return UPLO.upper() == "U"


def eigh(a: TensorLike, UPLO: str = "L") -> EighResult:
    """Eigenvalues, ascending, and orthonormal eigenvectors of Hermitian matrices (NumPy's ``linalg.eigh``).

    x: ``(..., n, n)``, of which triangle ``UPLO`` is read.  The gradient through the eigenvectors divides by the
    differences of eigenvalues: it is infinite or NaN for repeated ones (not if only eigenvalues are used), and of
    complex ones it has a meaning only for functions that do not depend on their phases.  Raises ShapeError,
    LinAlgError.
    """
    upper = _triangle("eigh", UPLO)
    return EighResult(*_parts(barrier(eigh_p, whole(square("eigh", a)), upper=upper)))


def eigvalsh(a: TensorLike, UPLO: str = "L") -> Tensor:
    """The eigenvalues, ascending, of Hermitian matrices (NumPy's ``linalg.eigvalsh``).

    x: ``(..., n, n)``, of which triangle ``UPLO`` is read.  The gradient at repeated eigenvalues is finite,
    and depends on the eigenvectors that LAPACK chose.  Raises ShapeError, LinAlgError.
    """
    upper = _triangle("eigvalsh", UPLO)
    return barrier(eigvalsh_p, whole(square("eigvalsh", a)), upper=upper)
