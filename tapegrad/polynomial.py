"""Polynomials as vectors of coefficients, the highest power first (NumPy's ``poly1d`` functions)."""

from __future__ import annotations

from typing import Any

from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.linalg import eigvals, inv, lstsq
from tapegrad.ops.create.creation import arange, ones, zeros
from tapegrad.ops.create.ranges import vander
from tapegrad.ops.dispatch import own, promote
from tapegrad.ops.elementwise._numbers import precise
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
from tapegrad.tensor import Tensor

__all__ = ["poly", "polyadd", "polyder", "polydiv", "polyfit", "polyint", "polymul", "polysub", "polyval", "roots"]


def _vector(op: str, p: Any) -> Tensor:
    x = precise(op, p)
    x = reshape(x, (1,)) if not x.ndim else x
    if x.ndim != 1:
        raise ShapeError(f"{op}: coefficients of shape {x.shape}; need a vector")
    return x


def polyval(p: Any, x: Any) -> Tensor:
    """The polynomial with coefficients ``p`` at ``x`` (any shape), by Horner's rule; differentiable in both.

    Raises ShapeError unless ``p`` is a vector.
    """
    c, at = promote("polyval", (_vector("polyval", p), precise("polyval", x)))
    found = zeros(at.shape, dtype=at.dtype, device=at.device)
    for k in range(c.size):
        found = add(multiply(found, at), c[k])
    return found


def _leveled(op: str, a1: Any, a2: Any) -> tuple[Tensor, Tensor]:
    """Both vectors in the longer one's length."""
    x, y = promote(op, (_vector(op, a1), _vector(op, a2)))
    n = x.size if x.size > y.size else y.size
    return pad(x, ((n - x.size, 0),)), pad(y, ((n - y.size, 0),))


def polyadd(a1: Any, a2: Any) -> Tensor:
    """The coefficients of the sum.  Raises ShapeError."""
    return add(*_leveled("polyadd", a1, a2))


def polysub(a1: Any, a2: Any) -> Tensor:
    """The coefficients of the difference.  Raises ShapeError."""
    return subtract(*_leveled("polysub", a1, a2))


def _trimmed(x: Tensor) -> Tensor:
    """Without leading zeros (which are looked for); at least one coefficient."""
    (places,) = unrecorded(lambda: nonzero(not_equal(x, 0)))
    first = int(places[0].item()) if places.size else x.size
    return x[first:] if first < x.size else zeros((1,), dtype=x.dtype, device=x.device)


def polymul(a1: Any, a2: Any) -> Tensor:
    """The coefficients of the product, leading zeros of the factors left out (they are looked at).

    Raises ShapeError.
    """
    return convolve(_trimmed(_vector("polymul", a1)), _trimmed(_vector("polymul", a2)))


def polydiv(u: Any, v: Any) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of ``u / v``; differentiable in both.

    Leading coefficients of the remainder that are almost 0 are left out (they are looked at).  Raises ShapeError.
    """
    rest, by = promote("polydiv", (_vector("polydiv", u), _vector("polydiv", v)), dtypes.in_float)
    n = by.size - 1
    steps = rest.size - by.size + 1
    scale = divide(1.0, by[0])
    found = []
    for k in range(steps):
        found.append(multiply(scale, rest[k]))
        middle = rest[k : k + n + 1] - found[-1] * by
        rest = concat([rest[:k], middle, rest[k + n + 1 :]])
    quotient = concat([reshape(q, (1,)) for q in found]) if found else zeros((1,), dtype=by.dtype, device=by.device)
    sizes = unrecorded(abs, rest).numpy() if rest.size else []
    first = 0
    while first < rest.size - 1 and sizes[first] <= 1e-8:
        first += 1
    return quotient, rest[first:]


def polyder(p: Any, m: int = 1) -> Tensor:
    """The coefficients of the derivative of order ``m``.  Raises ShapeError, TapegradError for ``m < 0``."""
    c = given = _vector("polyder", p)
    if m < 0:
        raise TapegradError(f"polyder: m={m} is negative; use polyint")
    for _ in range(m):
        n = c.size - 1
        c = c[:-1] * arange(n, 0, -1, device=c.device) if n > 0 else c[:0]
    return own(c, given)


def polyint(p: Any, m: int = 1, k: Any = None) -> Tensor:
    """The coefficients of the ``m``-fold integral, with constants ``k`` (one for each, or one for all; None: 0).

    Raises ShapeError, TapegradError for ``m < 0``.
    """
    c = given = _vector("polyint", p)
    if m < 0:
        raise TapegradError(f"polyint: m={m} is negative; use polyder")
    constants = (
        broadcast_to(zeros((1,), dtype=c.dtype, device=c.device) if k is None else _vector("polyint", k), (m,))
        if m
        else None
    )
    for i in range(m):
        c = divide(c, arange(c.size, 0, -1, device=c.device))
        c = concat([c, constants[i : i + 1]])  # type: ignore[index]
    return own(c, given)


def poly(seq_of_zeros: Any) -> Tensor:
    """The coefficients of the polynomial with these roots, or of a square matrix' characteristic polynomial.

    Of complex roots that come in conjugate pairs the coefficients are real (the roots are looked at).  Raises
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
    found = one
    for k in range(x.size):
        found = convolve(found, concat([one, -x[k : k + 1]]), mode="full")
    if found.dtype.kind == "c":
        paired = unrecorded(lambda: bool(all_of(sort_complex(x) == sort_complex(conj(x)))))
        found = real(found) if paired else found
    return found


def roots(p: Any) -> Tensor:
    """The roots of the polynomial with coefficients ``p``, as eigenvalues of its companion matrix.

    Zeros at either end are left out (they are looked at): the last ones make roots that are 0, without gradient.  The
    gradient of a multiple root is infinite.  Raises ShapeError unless ``p`` is a vector.
    """
    c = _vector("roots", p)
    (places,) = unrecorded(lambda: nonzero(not_equal(c, 0)))
    ends = places.numpy()
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
    found = eigvals(companion)
    if found.dtype.kind == "c":
        is_real = c.dtype.kind != "c" and unrecorded(lambda: bool(all_of(imag(found) == 0)))
        found = real(found) if is_real else found
    return concat([found, zeros((zero_roots,), dtype=found.dtype, device=found.device)]) if zero_roots else found


def polyfit(
    x: Any, y: Any, deg: int, rcond: float | None = None, full: bool = False, w: Any = None, cov: bool | str = False
) -> Any:
    """The coefficients of the polynomial of degree ``deg`` nearest to ``y`` at ``x`` by least squares (``polyfit``).

    x: ``(m,)``; y: ``(m,)`` or ``(m, k)``; w: weights of the residuals; rcond: singular values below it, relative to
    the largest, count as 0.  full: also residuals, rank, singular values and ``rcond``; cov: also the covariance of the
    coefficients (``unscaled``: not scaled by the residuals).  Differentiable in ``x``, ``y`` and ``w``; rank and
    singular values are for looking at.  Raises ShapeError, TapegradError.
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
    found = transpose(transpose(solution) / scale)
    if full:
        return found, residuals, rank, singular, rcond
    if not cov:
        return found
    base = inv(transpose(left) @ left) / outer(scale, scale)
    if values.ndim == 2:
        base = reshape(base, (*base.shape, 1))
    if cov == "unscaled":
        return found, base
    if at.size <= deg + 1:
        raise TapegradError(f"polyfit: {at.size} points are too few to scale the covariance of {deg + 1} coefficients")
    return found, base * (residuals / (at.size - deg - 1))
