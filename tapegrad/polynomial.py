"""Polynomials as vectors of coefficients, the highest power first (NumPy's ``poly1d`` functions)."""

from __future__ import annotations

from typing import Any

from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.device.types import Array
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.linalg import eigvals, inv, lstsq
from tapegrad.ops.create.creation import arange, ones, zeros
from tapegrad.ops.create.ranges import vander
from tapegrad.ops.dispatch import of_floats, own, precise, promote
from tapegrad.ops.elementwise.arithmetic import abs, add, divide, multiply, sqrt, square, subtract
from tapegrad.ops.elementwise.comparison import not_equal
from tapegrad.ops.elementwise.complex import conj, imag, real
from tapegrad.ops.elementwise.selection import nonzero
from tapegrad.ops.index.partial_sort import sort_complex
from tapegrad.ops.products.correlation import convolve
from tapegrad.ops.products.products import outer
from tapegrad.ops.reduce.reductions import all as all_of
from tapegrad.ops.reduce.reductions import sum
from tapegrad.ops.shape.diagonals import diag
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.padding import pad
from tapegrad.ops.shape.shape import broadcast_to, reshape, transpose
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["poly", "polyadd", "polyder", "polydiv", "polyfit", "polyint", "polymul", "polysub", "polyval", "roots"]


def _vector(op: str, p: TensorLike) -> Tensor:
    x = precise(op, p)
    x = reshape(x, (1,)) if not x.ndim else x
    if x.ndim != 1:
        raise ShapeError(f"{op}: coefficients of shape {x.shape}; need a vector")
    return x


def polyval(p: TensorLike, x: TensorLike) -> Tensor:
    """The polynomial with coefficients ``p`` at ``x`` (any shape), by Horner's rule; differentiable in both.

    Raises ShapeError unless ``p`` is a vector.
    """
    c, at = promote("polyval", (_vector("polyval", p), precise("polyval", x)))
    value = zeros(at.shape, dtype=at.dtype, device=at.device)
    for k in range(c.size):
        value = add(multiply(value, at), c[k])
    return value


def _leveled(op: str, a1: TensorLike, a2: TensorLike) -> tuple[Tensor, Tensor]:
    """Both vectors in the longer one's length."""
    x, y = promote(op, (_vector(op, a1), _vector(op, a2)))
    n = x.size if x.size > y.size else y.size
    return pad(x, ((n - x.size, 0),)), pad(y, ((n - y.size, 0),))


def polyadd(a1: TensorLike, a2: TensorLike) -> Tensor:
    """The coefficients of the sum.  Raises ShapeError."""
    return add(*_leveled("polyadd", a1, a2))


def polysub(a1: TensorLike, a2: TensorLike) -> Tensor:
    """The coefficients of the difference.  Raises ShapeError."""
    return subtract(*_leveled("polysub", a1, a2))


def _trimmed(x: Tensor) -> Tensor:
    """Without leading zeros, for which the values are read; at least one coefficient."""
    (indices,) = unrecorded(lambda: nonzero(not_equal(x, 0)))
    first = int(indices[0].item()) if indices.size else x.size
    return x[first:] if first < x.size else zeros((1,), dtype=x.dtype, device=x.device)


def polymul(a1: TensorLike, a2: TensorLike) -> Tensor:
    """The coefficients of the product, leading zeros of the factors left out (their values are read).

    Raises ShapeError.
    """
    return convolve(_trimmed(_vector("polymul", a1)), _trimmed(_vector("polymul", a2)))


@of_floats()
def polydiv(u: TensorLike, v: TensorLike) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of ``u / v``; differentiable in both.

    Leading coefficients of the remainder that are almost 0 are left out (their values are read).  Raises ShapeError.
    """
    rest, by = promote("polydiv", (_vector("polydiv", u), _vector("polydiv", v)), dtypes.in_float)
    n = by.size - 1
    steps = rest.size - by.size + 1
    scale = divide(1.0, by[0])
    quotients = []
    for k in range(steps):
        quotients.append(multiply(scale, rest[k]))
        middle = rest[k : k + n + 1] - quotients[-1] * by
        rest = concat([rest[:k], middle, rest[k + n + 1 :]])
    quotient = (
        concat([reshape(q, (1,)) for q in quotients]) if quotients else zeros((1,), dtype=by.dtype, device=by.device)
    )
    sizes: Array | list[float] = unrecorded(abs, rest).numpy() if rest.size else []
    first = 0
    while first < rest.size - 1 and sizes[first] <= 1e-8:
        first += 1
    return quotient, rest[first:]


def polyder(p: TensorLike, m: int = 1) -> Tensor:
    """The coefficients of the derivative of order ``m``.  Raises ShapeError, TapegradError for ``m < 0``."""
    c = start = _vector("polyder", p)
    if m < 0:
        raise TapegradError(f"polyder: m={m} is negative; use polyint")
    for _ in range(m):
        n = c.size - 1
        c = c[:-1] * arange(n, 0, -1, device=c.device) if n > 0 else c[:0]
    return own(c, start)


def polyint(p: TensorLike, m: int = 1, k: TensorLike | None = None) -> Tensor:
    """The coefficients of the ``m``-fold integral, with constants ``k`` (one for each, or one for all; None: 0).

    Raises ShapeError, TapegradError for ``m < 0``.
    """
    c = _vector("polyint", p)
    if m < 0:
        raise TapegradError(f"polyint: m={m} is negative; use polyder")
    if not m:
        return own(c, c)
    constants = zeros((1,), dtype=c.dtype, device=c.device) if k is None else _vector("polyint", k)
    constants = broadcast_to(constants, (m,))
    for i in range(m):
        c = concat([divide(c, arange(c.size, 0, -1, device=c.device)), constants[i : i + 1]])
    return c


def poly(seq_of_zeros: TensorLike) -> Tensor:
    """The coefficients of the polynomial with these roots, or of a square matrix' characteristic polynomial.

    Of complex roots that come in conjugate pairs the coefficients are real (the roots are read).  Raises
    ShapeError.
    """
    x = precise("poly", seq_of_zeros)
    if x.ndim == 2 and x.shape[0] == x.shape[1] and x.size:
        x = eigvals(x)
    if x.ndim > 1:
        raise ShapeError(f"poly: needs a vector or a square matrix, got shape {x.shape}")
    x = reshape(x, (x.size,))
    (x,) = promote("poly", (x,), dtypes.in_float)
    one = ones((1,), dtype=x.dtype, device=x.device)
    coefficients = one
    for k in range(x.size):
        coefficients = convolve(coefficients, concat([one, -x[k : k + 1]]), mode="full")
    if coefficients.dtype.kind == "c":
        paired = unrecorded(lambda: bool(all_of(sort_complex(x) == sort_complex(conj(x)))))
        coefficients = real(coefficients) if paired else coefficients
    return coefficients


@of_floats()
def roots(p: TensorLike) -> Tensor:
    """The roots of the polynomial with coefficients ``p``, as eigenvalues of its companion matrix.

    Zeros at either end are left out (values are read): the last ones make roots that are 0, without gradient.  The
    gradient of a multiple root is infinite.  Raises ShapeError unless ``p`` is a vector.
    """
    c = _vector("roots", p)
    (indices,) = unrecorded(lambda: nonzero(not_equal(c, 0)))
    ends = indices.numpy()
    if not len(ends):
        return zeros((0,), dtype=dtypes.in_float(c.dtype), device=c.device)
    zero_roots = c.size - 1 - int(ends[-1])
    c = c[int(ends[0]) : int(ends[-1]) + 1]
    (c,) = promote("roots", (c,), dtypes.in_float)
    n = c.size - 1
    if not n:
        return zeros((zero_roots,), dtype=c.dtype, device=c.device)
    row = reshape(-c[1:] / c[0], (1, n))
    below = diag(ones((n - 1,), dtype=c.dtype, device=c.device), -1) if n > 1 else None
    companion = row if below is None else concat([row, below[1:]], axis=0)
    values = eigvals(companion)
    if values.dtype.kind == "c":
        is_real = c.dtype.kind != "c" and unrecorded(lambda: bool(all_of(imag(values) == 0)))
        values = real(values) if is_real else values
    return concat([values, zeros((zero_roots,), dtype=values.dtype, device=values.device)]) if zero_roots else values


@of_floats()
def polyfit(
    x: TensorLike,
    y: TensorLike,
    deg: int,
    rcond: float | None = None,
    full: bool = False,
    w: TensorLike | None = None,
    cov: bool | str = False,
) -> Tensor | tuple[Any, ...]:
    """The coefficients of the polynomial of degree ``deg`` nearest to ``y`` at ``x`` by least squares (``polyfit``).

    x: ``(m,)``; y: ``(m,)`` or ``(m, k)``; w: weights of the residuals; rcond: singular values below it, relative to
    the largest, count as 0.  full: also residuals, rank, singular values and ``rcond``; cov: also the covariance of the
    coefficients (``unscaled``: not scaled by the residuals).  Differentiable in ``x``, ``y`` and ``w``; rank and
    singular values are information only.  Raises ShapeError, TapegradError.
    """
    at, values = promote("polyfit", (precise("polyfit", x), precise("polyfit", y)), dtypes.in_float)
    if at.ndim != 1 or not at.size or values.ndim not in (1, 2) or values.shape[0] != at.size:
        raise ShapeError(f"polyfit: x of shape {at.shape}, y of shape {values.shape}; need (m,) and (m,) or (m, k)")
    if deg < 0:
        raise TapegradError(f"polyfit: deg={deg} is negative")
    if rcond is None:
        rcond = at.size * float(dtypes.finfo(at.dtype).eps)
    left = vander(at, deg + 1)
    if w is not None:
        weights = precise("polyfit", w, at)
        if weights.shape != at.shape:
            raise ShapeError(f"polyfit: weights of shape {weights.shape} for {at.size} points")
        column = reshape(weights, (at.size, 1))
        left, values = left * column, values * (column if values.ndim == 2 else weights)
    scale = sqrt(sum(square(left), axis=0))
    left = left / scale
    solution, residuals, rank, singular = lstsq(left, values, rcond)
    coefficients = transpose(transpose(solution) / scale)
    if full:
        return coefficients, residuals, rank, singular, rcond
    if not cov:
        return coefficients
    base = inv(transpose(left) @ left) / outer(scale, scale)
    if values.ndim == 2:
        base = reshape(base, (*base.shape, 1))
    if cov == "unscaled":
        return coefficients, base
    if at.size <= deg + 1:
        raise TapegradError(f"polyfit: {at.size} points are too few to scale the covariance of {deg + 1} coefficients")
    return coefficients, base * (residuals / (at.size - deg - 1))
