"""Triangles of matrices, systems of equations with them, Cholesky factors, and the cotangent of a matrix for theirs.

On NumPy one matrix after the other, by LAPACK and BLAS in place: they read the transpose of what lies in C's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from tapegrad.device.numerics import blas, scipy
from tapegrad.device.types import Array, DType, Namespace

_MOST_MASKED, _ROWS = 1 << 14, 64
"""Elements of a matrix that is masked as a whole (of a larger one, only the squares of so many rows that the diagonal
crosses)."""
_LEAST_BY_LAPACK = 32
"""Rows of a matrix whose factor pays for a call of its own: of a stack of smaller ones NumPy calls LAPACK itself."""
_LEAST_CUT = 64
"""Rows up to which the cotangent of a matrix is not cut into blocks: smaller products would take longer."""


@lru_cache(32)
def _mask(rows: int, columns: int, lower: bool, k: int, dtype: DType) -> Array:
    """True in the triangle; of integers, all bits are set there and none elsewhere."""
    inside = np.tri(rows, columns, k, bool) if lower else ~np.tri(rows, columns, k - 1, bool)
    return inside if dtype.kind == "b" else -inside.astype(dtype)


def _crossed(rows: int, columns: int, k: int) -> Iterator[tuple[slice, int, int]]:
    """Rows together, and from which column to which diagonal ``k`` crosses them."""
    step = max(1, rows) if rows * columns <= _MOST_MASKED else _ROWS
    for first in range(0, rows, step):
        end = min(rows, first + step)
        whole = step >= rows
        low, high = (0, columns) if whole else (min(columns, max(0, at + k)) for at in (first, end))
        yield slice(first, end), low, high


def put(xp: Namespace, x: Array, out: Array, lower: bool = True, k: int = 0, half: bool = False) -> None:
    """Write the triangle up to diagonal ``k`` of each matrix into ``out`` (which may be ``x``), zeros elsewhere;
    ``half``: half of the diagonal.
    """
    rows, columns = x.shape[-2:]
    both = min(rows, columns)
    if xp is not np:
        xp.copyto(out, xp.tril(x, k) if lower else xp.triu(x, k))
        if half:
            at = xp.arange(both)
            out[..., at, at] *= 0.5
        return
    bits = _bits(x.dtype) if x.dtype == out.dtype else None
    if bits is not None and rows * columns <= _MOST_MASKED:
        np.bitwise_and(x.view(bits), _mask(rows, columns, lower, k, bits), out=out.view(bits))
    else:
        _put_by_rows(x, out, lower, k, bits)
    if half:
        diagonal = np.einsum("...ii->...i", out[..., :both, :both])  # a view
        diagonal *= 0.5


@lru_cache(16)
def _bits(dtype: DType) -> DType | None:
    """Integers of as many bits: with a mask they take a third of the time that ``copyto(where=)`` takes."""
    return np.dtype(f"i{dtype.itemsize}") if dtype.itemsize in (2, 4, 8) else None


def _put_by_rows(x: Array, out: Array, lower: bool, k: int, bits: DType | None) -> None:
    rows, columns = x.shape[-2:]
    for some, low, high in _crossed(rows, columns, k):
        kept, dropped = (slice(0, low), slice(high, columns)) if lower else (slice(high, columns), slice(0, low))
        if low > 0 or high < columns:
            if x is not out:
                np.copyto(out[..., some, kept], x[..., some, kept], casting="same_kind")
            out[..., some, dropped] = 0
        crossed = (..., some, slice(low, high))
        shape = some.stop - some.start, high - low, lower, some.start + k - low
        if bits is not None:
            np.bitwise_and(x[crossed].view(bits), _mask(*shape, bits), out=out[crossed].view(bits))
        elif x is out:
            np.copyto(out[crossed], 0, where=~_mask(*shape, np.dtype(bool)))
        else:
            out[crossed] = 0
            np.copyto(out[crossed], x[crossed], where=_mask(*shape, np.dtype(bool)), casting="same_kind")


def product(xp: Namespace, x: Array, y: Array, out: Array, lower: bool, k: int) -> None:
    """Write the triangle up to diagonal ``k`` of ``x @ y`` into ``out``, zeros elsewhere, for stacks of matrices.

    Of a large product what lies beyond the triangle is not computed.
    """
    rows, columns = out.shape[-2:]
    if xp is np and rows * columns > _MOST_MASKED:
        for some, low, high in _crossed(rows, columns, k):
            kept = slice(0, high) if lower else slice(low, columns)
            if kept.start < kept.stop:
                blas.matmul(np, x[..., some, :], y[..., kept], out[..., some, kept])
    else:
        whole = out if out.dtype == x.dtype else xp.empty(out.shape, x.dtype)  # of half types, which are widened
        blas.matmul(xp, x, y, whole)
        put(xp, whole, out, lower, k)
        return
    put(xp, out, out, lower, k)


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
    for place in _places(b):
        one(a[place], b[place], lower, unit, out[place])


def _places(x: Array) -> Iterable[tuple[int, ...]]:
    """The indices of the matrices of a stack."""
    return np.ndindex(*x.shape[:-2]) if x.ndim > 2 else ((),)


@lru_cache(32)
def _functions(dtype: DType, *names: str) -> tuple[Callable[..., Any], ...]:
    """SciPy's functions of LAPACK and BLAS for arrays of ``dtype``."""
    library = scipy.linalg(np)
    found = []
    for name in names:
        get = library.lapack.get_lapack_funcs if name in ("potrf", "trtrs") else library.blas.get_blas_funcs
        found.append(get(name, dtype=dtype))
    return tuple(found)


def _solve_column(a: Array, b: Array, lower: bool, unit: bool, out: Array) -> None:
    """LAPACK takes a third of the time for it that BLAS takes from the other side."""
    (by_lapack,) = _functions(b.dtype, "trtrs")
    if a.flags.f_contiguous:
        x, info = by_lapack(a, b, lower=lower, unitdiag=unit)
    else:
        x, info = by_lapack(a.T, b, lower=not lower, trans=1, unitdiag=unit)
    if info:
        raise np.linalg.LinAlgError(f"singular matrix: element {info - 1} of its diagonal is 0")
    np.copyto(out, x, casting="same_kind")


def _solve_columns(a: Array, b: Array, lower: bool, unit: bool, out: Array) -> None:
    """``x' a' = b'``, of the transposes."""
    diagonal = a.diagonal()
    if not unit and not diagonal.all():
        raise np.linalg.LinAlgError(f"singular matrix: element {(diagonal == 0).argmax()} of its diagonal is 0")
    x = out if out.dtype == b.dtype and out.flags.c_contiguous else np.empty(b.shape, b.dtype)
    np.copyto(x, b)
    (by_blas,) = _functions(x.dtype, "trsm")
    if a.flags.c_contiguous:
        by_blas(1.0, a.T, x.T, side=1, lower=not lower, diag=unit, overwrite_b=1)
    else:
        by_blas(1.0, a, x.T, side=1, lower=lower, trans_a=1, diag=unit, overwrite_b=1)
    if x is not out:
        np.copyto(out, x, casting="same_kind")


def is_mirrored(x: Array) -> Array:
    """Whether each matrix is its own conjugate transpose, to the bit: (..., 1, 1)."""
    same = x == (x.swapaxes(-1, -2).conj() if x.dtype.kind == "c" else x.swapaxes(-1, -2))
    return same.all(axis=(-2, -1), keepdims=True) if x.ndim > 2 else same.all().reshape(1, 1)


def mean(xp: Namespace, x: Array, mixed: Array, out: Array) -> None:
    """Write the mean of both triangles of matrices into ``out`` where ``mixed``, (..., 1, 1), is not 0; else itself."""
    half = x * 0.5
    other = half.swapaxes(-1, -2)
    xp.add(half, xp.conj(other) if x.dtype.kind == "c" else other, out=out, casting="same_kind")
    if xp is not np or not mixed.all():
        xp.copyto(out, x, where=mixed == 0, casting="same_kind")


NO, NEARLY, EXACTLY = 0, 1, 2
"""Whether a matrix is Hermitian."""


def cholesky(xp: Namespace, x: Array, mixed: Array, upper: bool, out: Array) -> None:
    """Write the Cholesky factors into ``out``: of one triangle where ``mixed``, (..., 1, 1), is ``NO``, where it is
    ``NEARLY`` of the mean of both.

    Raises numpy.linalg.LinAlgError for a matrix that is not positive definite (on CUDA nothing).
    """
    if xp is np and x.shape[-1] >= _LEAST_BY_LAPACK:
        for place in _places(x):
            _one_factor(x[place], mixed[place].item() == NEARLY, upper, out[place])
        return
    if xp is not np or (mixed == NEARLY).any():
        both = xp.empty(x.shape, x.dtype)
        mean(xp, x, mixed, both)
        x = both
    if not upper:
        factor = xp.linalg.cholesky(x)
    elif xp is np:
        factor = np.linalg.cholesky(x, upper=True)
    else:  # CuPy reads the lower triangle only
        factor = xp.linalg.cholesky(x.swapaxes(-1, -2).conj()).swapaxes(-1, -2).conj()
    xp.copyto(out, factor, casting="same_kind")


def _one_factor(x: Array, averaged: bool, upper: bool, out: Array) -> None:
    """NumPy's function takes 1.2 times as long for 100 rows and three times for 500: it sets zeros column by column."""
    factor = out if out.dtype == x.dtype and out.flags.c_contiguous else np.empty(x.shape, x.dtype)
    if averaged:
        mean(np, x, np.ones((1, 1), bool), factor)
    else:
        np.copyto(factor, x)
    (by_lapack,) = _functions(x.dtype, "potrf")
    _, info = by_lapack(factor.T, lower=upper, clean=0, overwrite_a=1)
    if info:
        raise np.linalg.LinAlgError("Matrix is not positive definite")
    put(np, factor, factor, not upper)
    if factor is not out:
        np.copyto(out, factor, casting="same_kind")


def of_cholesky(xp: Namespace, g: Array, factor: Array, mixed: Array, out: Array) -> None:
    """Write the cotangent of matrices for that, ``g``, of their lower Cholesky factors into ``out`` (I. Murray, 2016).

    With P = l' g, the lower triangles of both, and half of P's diagonal, it is s + s', where s = l'^-1 P l^-1: of that
    the lower triangle with half of the diagonal, or where ``mixed``, (..., 1, 1), is not 0, half of all.
    """
    if xp is np:
        for place in _places(g):
            _of_one_factor(g[place], factor[place], mixed[place].item() != NO, out[place])
    elif g.size:
        adjoint = lambda x: xp.conj(x.swapaxes(-1, -2))
        back, by_library = adjoint(factor), scipy.linalg(xp).solve_triangular
        inner = adjoint(by_library(back, adjoint(_half(xp, back @ xp.tril(g))), lower=False))
        inner = by_library(back, inner, lower=False)
        mean(xp, _half(xp, inner + adjoint(inner)), mixed, out)


def _of_one_factor(g: Array, factor: Array, mixed: bool, out: Array) -> None:
    both = out if out.dtype == factor.dtype else np.empty(out.shape, factor.dtype)
    _both_triangles(g, factor, both)
    if mixed:
        np.multiply(both, 0.5, out=out, casting="same_kind")
    else:
        put(np, both, out, half=True)


def _both_triangles(g: Array, factor: Array, out: Array) -> None:
    """Write s + s' (see :func:`of_cholesky`) into ``out``.

    By blocks, backwards through the factorization of two rows of blocks: 5/6 n^3 operations where s takes 3 n^3.
    """
    n = len(factor)
    if n <= _LEAST_CUT:
        _whole(np.ascontiguousarray(factor), g, out)
        return
    k = -(-n // 2)
    first, last = slice(k), slice(k, n)
    a, b = np.ascontiguousarray(factor[first, first]), np.ascontiguousarray(factor[last, first])
    add, divide = _functions(factor.dtype, "gemm", "trsm")
    low, z = out[last, last], np.empty((n - k, n - k), factor.dtype)
    _both_triangles(g[last, last], factor[last, last], z)
    low[...] = z
    w = np.array(g[last, first], factor.dtype, order="C")
    add(-1.0, b.T, z.T, 1.0, w.T, overwrite_c=1)
    divide(1.0, a.T, w.T, overwrite_b=1)
    out[last, first], out[first, last] = w, w.T.conj() if w.dtype.kind == "c" else w.T
    rest = np.array(g[first, first], factor.dtype, order="C")
    add(-1.0, b.T, w.T, 1.0, rest.T, trans_b=2, overwrite_c=1)
    _both_triangles(rest, a, out[first, first])


def _whole(factor: Array, g: Array, out: Array) -> None:
    """As :func:`_both_triangles`, of a small matrix at once."""
    bits, lower, halving = _small(len(factor), factor.dtype)
    multiply, divide = _functions(factor.dtype, "trmm", "trsm")
    upper, x = factor.T, np.empty(g.shape, factor.dtype)
    turned = x.T
    if bits is None or g.dtype != factor.dtype:
        put(np, g, x)
    else:
        np.bitwise_and(g.view(bits), lower, out=x.view(bits))
    multiply(1.0, upper, turned, side=1, trans_a=2, overwrite_b=1)
    np.multiply(x, halving, out=x)
    divide(1.0, upper, turned, side=1, trans_a=2, overwrite_b=1)
    divide(1.0, upper, turned, overwrite_b=1)
    np.add(x, turned.conj() if x.dtype.kind == "c" else turned, out=out)


@lru_cache(16)
def _small(n: int, dtype: DType) -> tuple[DType | None, Array, Array]:
    """Masks of the lower triangle: of bits, and as factors, which halve the diagonal."""
    bits = _bits(dtype)
    lower = _mask(n, n, True, 0, np.dtype(bool) if bits is None else bits)
    halving = np.tri(n, dtype=np.zeros(0, dtype).real.dtype)
    halving.reshape(-1)[:: n + 1] = 0.5
    return bits, lower, halving


def _half(xp: Namespace, x: Array) -> Array:
    out = xp.empty_like(x)
    put(xp, x, out, half=True)
    return out
