"""Triangles of matrices, systems of equations with them, and the cotangent of a matrix for that of its Cholesky factor.

On NumPy one matrix after the other, by BLAS in place: it reads the transpose of what lies in C's order.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tapegrad.device.numerics import scipy
from tapegrad.device.types import Array, Namespace

_MOST_MASKED = 1 << 16
"""Elements of a matrix whose masks are kept: of a larger one it takes longer to use them than to make them."""


def _mask(rows: int, columns: int, lower: bool, k: int) -> Array:
    return np.tri(rows, columns, k, bool) if lower else ~np.tri(rows, columns, k - 1, bool)


_kept_mask = lru_cache(16)(_mask)


def put(xp: Namespace, x: Array, out: Array, lower: bool = True, k: int = 0, half: bool = False) -> None:
    """Write the triangle up to diagonal ``k`` of each matrix into ``out``, zeros elsewhere; ``half``: half of the
    diagonal.
    """
    rows, columns = x.shape[-2:]
    both = min(rows, columns)
    if xp is np:
        mask = (_kept_mask if rows * columns <= _MOST_MASKED else _mask)(rows, columns, lower, k)
        out.fill(0)
        np.copyto(out, x, where=mask, casting="same_kind")
        if half:
            diagonal = np.einsum("...ii->...i", out[..., :both, :both])  # a view
            diagonal *= 0.5
        return
    xp.copyto(out, xp.tril(x, k) if lower else xp.triu(x, k))
    if half:
        at = xp.arange(both)
        out[..., at, at] *= 0.5


def solve(xp: Namespace, a: Array, b: Array, lower: bool, unit: bool, out: Array) -> None:
    """Write the ``x`` with ``a @ x = b`` into ``out``, for stacks of triangular matrices.

    Raises numpy.linalg.LinAlgError for a zero on the diagonal (on CUDA: infinities).
    """
    if not b.size:
        return
    if xp is not np:
        xp.copyto(out, scipy.linalg(xp).solve_triangular(a, b, lower=lower, unit_diagonal=unit))
        return
    one = _solve_columns if b.shape[-1] > 1 else _solve_column
    for place in np.ndindex(*b.shape[:-2]):
        one(a[place], b[place], lower, unit, out[place])


def _solve_column(a: Array, b: Array, lower: bool, unit: bool, out: Array) -> None:
    """LAPACK takes a third of the time for it that BLAS takes from the other side."""
    found = scipy.linalg(np).solve_triangular(a, b, lower=lower, unit_diagonal=unit, check_finite=False)
    np.copyto(out, found, casting="same_kind")


def _solve_columns(a: Array, b: Array, lower: bool, unit: bool, out: Array) -> None:
    """``x' a' = b'``, of the transposes."""
    diagonal = a.diagonal()
    if not unit and not diagonal.all():
        raise np.linalg.LinAlgError(f"singular matrix: element {(diagonal == 0).argmax()} of its diagonal is 0")
    x = out if out.dtype == b.dtype and out.flags.c_contiguous else np.empty(b.shape, b.dtype)
    np.copyto(x, b)
    (by_blas,) = scipy.linalg(np).blas.get_blas_funcs(("trsm",), (x,))
    if a.flags.c_contiguous:
        by_blas(1.0, a.T, x.T, side=1, lower=not lower, diag=unit, overwrite_b=1)
    else:
        by_blas(1.0, a, x.T, side=1, lower=lower, trans_a=1, diag=unit, overwrite_b=1)
    if x is not out:
        np.copyto(out, x, casting="same_kind")


def of_cholesky(xp: Namespace, g: Array, factor: Array, out: Array) -> None:
    """Write the cotangent of matrices for that, ``g``, of their lower Cholesky factors into ``out`` (I. Murray, 2016).

    With P = l' g, the lower triangles of both, and half of P's diagonal, it is that part of s + s', where
    s = l'^-1 P l^-1.
    """
    if xp is np:
        for place in np.ndindex(*g.shape[:-2]):
            _of_one_factor(g[place], factor[place], out[place])
    elif g.size:
        adjoint = lambda x: xp.conj(x.swapaxes(-1, -2))
        back, by_library = adjoint(factor), scipy.linalg(xp).solve_triangular
        inner = adjoint(by_library(back, adjoint(_half(xp, back @ xp.tril(g))), lower=False))
        inner = by_library(back, inner, lower=False)
        xp.copyto(out, _half(xp, inner + adjoint(inner)))


def _of_one_factor(g: Array, factor: Array, out: Array) -> None:
    x, upper = np.empty(g.shape, factor.dtype), np.asfortranarray(factor.T)
    multiply, divide = scipy.linalg(np).blas.get_blas_funcs(("trmm", "trsm"), (x,))
    put(np, g, x)
    multiply(1.0, upper, x.T, side=1, trans_a=2, overwrite_b=1)
    x = _half(np, x)
    divide(1.0, upper, x.T, side=1, trans_a=2, overwrite_b=1)
    divide(1.0, upper, x.T, overwrite_b=1)
    put(np, x + x.T.conj(), out, half=True)


def _half(xp: Namespace, x: Array) -> Array:
    out = xp.empty_like(x)
    put(xp, x, out, half=True)
    return out
