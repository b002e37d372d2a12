"""The error function and its complement in array operations: NumPy has neither, and this package compiles nothing.

Every element passes through the same operations whatever its neighbours are, so a value recomputed in another tiling
has the same bits.  What costs time is a pass over the data, not an operation: the formulas below were chosen for few
passes.

``erf``, float32: ``tanh(x + x * S(x * x))`` with a rational ``S`` of degree (3, 3), fitted here: minimax in the error
of the result, then moved among neighbouring float32 coefficients for the least rounding error. A hyperbolic tangent
saturates as erf does, so nothing is clamped; ``x + small`` keeps the rounding error of ``S`` out of the result.

``erf``, float64: with ``g`` the point of a grid of step 1/1024 nearest to ``x``, ``h = x - g`` and ``s = x + g``,
expanding the logarithm of the mean of ``exp(-t**2)`` over the step about its midpoint gives

    erf(x) - erf(g) = h * exp(log(2 / sqrt(pi)) - s**2 / 4 + (s**2 / 24 - 1 / 12) * h**2 + O(h**4))

and what is left out stays below a quarter of an ulp. ``erf(g)`` comes from a table made with ``math.erf``.

``erfc``: ``exp(-a * a) * P(a) / Q(a)`` with ``a = abs(x)``, reflected for negative ``x``. P / Q replaces
``exp(a * a) * erfc(a)`` as in W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23
(1969), but is one fit for all ``a``, with positive coefficients only. The rounding error of ``a * a``, which the
exponential would magnify, is found by splitting ``a`` (T. J. Dekker, Numer. Math. 18, 1971) and taken out afterwards.
"""

import math
from collections.abc import Callable
from functools import cache

from tapegrad.device.types import Array, Namespace

# Bytes in a row of scratch: much more leaves the cache of a core, much less and the calls themselves cost the most.
_BLOCK_BYTES = 1 << 18

# Adding then subtracting this rounds to a multiple of 1/1024; in between, the low bits of the sum count the steps.
_GRID = 1.5 * 2.0**42
_GRID_POINTS = 1 << 14
# 2, less a correction that balances the neglected h**4 / 360 (it matters at g = 0 only) over abs(h) <= 1/2048.
_BETA = 2.0 - 24.0 * 0.83 / 2048**2 / 360.0

# Per item size: bits that only the value 2.0 has, last bit of the sign shift, mask leaving half of the significand,
# bound beyond which erfc is zero, P and Q from the highest power down (the 1.0 that leads Q is left out).
_ERFC = {
    4: (
        0x40000000,
        31,
        -(1 << 12),
        10.4,
        (0.564196061, 3.93659653, 12.5490327, 21.2202193, 17.1121648),
        (6.97787381, 22.7353745, 41.1690527, 40.5292396, 17.1121648),
    ),
    8: (
        0x4000000000000000,
        63,
        -(1 << 27),
        27.5,
        (
            0.56418958354601436,
            10.730852216369134,
            99.92919080175645,
            589.41487744112006,
            2408.3708913730215,
            7045.4276023407987,
            14757.816862101138,
            21431.371500895251,
            19772.747748916502,
            9024.5904096476345,
        ),
        (
            19.019940333951787,
            177.61987908398865,
            1054.220638300824,
            4356.7862316408071,
            13000.540042070605,
            28204.611442761367,
            43731.281926105957,
            46208.403111966339,
            29955.907558732724,
            9024.5904096476345,
        ),
    ),
}


def erf(xp: Namespace, out: Array, x: Array) -> None:
    """Write the error function of ``x`` into ``out``, within 2.5 ulp (float64) or 3.5 ulp (float32).

    The largest float32 error, of all values, is 2.40 ulp with AVX-512; without fused multiply-add, 3.1 has been seen.

    x, out: C-contiguous, of one shape and one dtype: float32 or float64.
    ``out`` may be ``x``. ``xp`` is the NumPy namespace. Exact at 0 (with its sign) and infinity; NaN stays NaN.
    """
    if x.dtype.itemsize <= 4:
        _blockwise(xp, out, x, _erf32, 2)
    else:
        _blockwise(xp, out, x, _erf64, 3)


def erfc(xp: Namespace, out: Array, x: Array) -> None:
    """Write ``1 - erf(x)`` into ``out``, within 12 ulp (float64) or 9 ulp (float32) of the result, also in the tail.

    x, out: C-contiguous, of one shape and one dtype: float32 or float64.
    ``out`` may be ``x``. ``xp`` is the NumPy namespace. Exact at 0 and infinity; NaN stays NaN.
    """
    _blockwise(xp, out, x, _erfc, 5)


def gelu(xp: Namespace, out: Array, x: Array) -> None:
    """Write ``x * Phi(x)`` into ``out``, Phi the normal distribution's cumulative function.

    The error is a few ulp and, in the tail, that of ``exp(-x * x / 2)``: half an ulp of the exponent, so ``x * x / 4``
    ulp.  -0 at minus infinity.  x, out: as of :func:`erfc`, but ``out`` may not be ``x``.
    """
    _blockwise(xp, out, x, _gelu, 3)


def gelu_slope(xp: Namespace, out: Array, x: Array) -> None:
    """Write the derivative of :func:`gelu`, ``Phi(x) + x * phi(x)``; errors and operands as there."""
    _blockwise(xp, out, x, _gelu_slope, 3)


def _blockwise(xp: Namespace, out: Array, x: Array, formula: Callable[..., None], rows: int) -> None:
    """Apply ``formula(xp, out, x, scratch)`` to one block after the other; scratch has ``rows`` rows of a block.

    Long doubles are computed as float64.
    """
    if x.dtype.itemsize > 8:
        narrow = x.astype(xp.float64)
        _blockwise(xp, narrow, narrow.copy(), formula, rows)
        out[...] = narrow
        return
    x, out = x.reshape(-1), out.reshape(-1)
    block = max(1, min(x.size, _BLOCK_BYTES // x.itemsize))
    scratch = xp.empty((rows, block), x.dtype)
    with xp.errstate(all="ignore"):  # infinities and underflows on the way are intended
        for start in range(0, x.size, block):
            part, result = x[start : start + block], out[start : start + block]
            formula(xp, result, part, scratch[:, : part.size])


def _erf32(xp: Namespace, out: Array, x: Array, scratch: Array) -> None:
    t, w = scratch[0], scratch[1]
    xp.multiply(x, x, out=t)
    # 1 / S(t) as a continued fraction. 1 + constant / t is well conditioned near t = 0 and has no inf / inf.
    xp.divide(18.696910858154297, t, out=w)
    xp.add(w, 1.0, out=w)
    xp.divide(14.620383262634277, w, out=w)
    xp.subtract(t, w, out=w)
    xp.add(w, 2.5647852420806885, out=w)
    xp.divide(-5.477768421173096, w, out=w)
    xp.add(w, t, out=w)
    xp.add(w, 3.578474760055542, out=w)
    xp.divide(10.9847993850708, w, out=w)
    xp.add(w, 0.17544151842594147, out=w)
    xp.divide(x, w, out=w)
    xp.add(w, x, out=w)
    xp.tanh(w, out=out)


@cache
def _erf_on_grid(xp: Namespace) -> Array:
    """erf(k / 1024) at index k; negative k count from the end, as the low bits of ``x + _GRID`` do."""
    half = _GRID_POINTS // 2
    values = [math.erf(k / 1024) for k in (*range(half), *range(-half, 0))]
    values[0] = -0.0  # added to a difference of either sign of zero, it keeps that sign
    return xp.asarray(values, dtype=xp.float64)


def _erf64(xp: Namespace, out: Array, x: Array, scratch: Array) -> None:
    c, u, h = scratch[0], scratch[1], scratch[2]
    xp.clip(x, -6.0, 6.0, out=c)
    xp.add(c, _GRID, out=u)
    step = h.view(xp.int64)
    xp.bitwise_and(u.view(xp.int64), _GRID_POINTS - 1, out=step)
    xp.take(_erf_on_grid(xp), step, out=out, mode="wrap")  # the mode that copies least; every index is in range
    xp.subtract(u, _GRID, out=u)
    xp.subtract(c, u, out=h)
    xp.add(c, u, out=u)
    # The exponent is (s**2 - _BETA) * (h**2 / 24 - 1 / 4) + log(2 / sqrt(pi)) - _BETA / 4.
    xp.multiply(h, h, out=c)
    xp.multiply(c, 1 / 24, out=c)
    xp.subtract(c, 0.25, out=c)
    xp.multiply(u, u, out=u)
    xp.subtract(u, _BETA, out=u)
    xp.multiply(u, c, out=u)
    xp.add(u, math.log(2.0 / math.sqrt(math.pi)) - _BETA / 4, out=u)
    xp.exp(u, out=u)
    xp.multiply(u, h, out=u)
    xp.add(out, u, out=out)


def _erfc(xp: Namespace, out: Array, x: Array, scratch: Array) -> None:
    a, s, p, q, r = scratch[0], scratch[1], scratch[2], scratch[3], scratch[4]
    itemsize = a.dtype.itemsize
    two, sign_shift, high_half, bound, above, below = _ERFC[itemsize]
    bits = xp.int32 if itemsize == 4 else xp.int64
    xp.clip(x, -bound, bound, out=a)
    xp.abs(a, out=a)
    xp.multiply(a, above[0], out=p)
    xp.add(a, below[0], out=q)
    for coefficient in above[1:-1]:
        xp.add(p, coefficient, out=p)
        xp.multiply(p, a, out=p)
    xp.add(p, above[-1], out=p)
    for coefficient in below[1:]:
        xp.multiply(q, a, out=q)
        xp.add(q, coefficient, out=q)
    xp.divide(p, q, out=p)
    # With a = b + c, where b has half of the bits and so an exact square, a * a - s = (b * b - s) + c * (a + b).
    xp.multiply(a, a, out=s)
    xp.bitwise_and(a.view(bits), high_half, out=q.view(bits))
    xp.add(a, q, out=r)
    xp.subtract(a, q, out=a)
    xp.multiply(r, a, out=r)
    xp.multiply(q, q, out=q)
    xp.subtract(q, s, out=q)
    xp.add(q, r, out=q)
    xp.negative(s, out=s)
    xp.exp(s, out=s)
    xp.multiply(s, p, out=s)
    xp.multiply(q, s, out=q)
    xp.subtract(s, q, out=s)
    # abs(0 - y) where x > 0 and abs(2 - y) where x < 0, the 0 or 2 made from the sign bit.
    xp.right_shift(x.view(bits), sign_shift, out=q.view(bits))
    xp.bitwise_and(q.view(bits), two, out=q.view(bits))
    xp.subtract(q, s, out=s)
    xp.abs(s, out=out)


_ROOT_2 = math.sqrt(2.0)
_FARTHEST = {4: 10.4 * _ROOT_2, 8: 27.5 * _ROOT_2}
"""Per item size: where Phi(-a), the normal distribution's tail, is 0."""
# Phi(-a) = exp(-a * a / 2) * P(a) / Q(a) in float64: the coefficients of _ERFC put into a instead of a / sqrt(2), and
# P halved; the coefficient that leads Q is apart.
_ABOVE, _BELOW = (tuple(c / _ROOT_2**k for k, c in zip(range(len(row) - 1, -1, -1), row)) for row in _ERFC[8][4:])
_ABOVE, _LEADS = tuple(c / 2 for c in _ABOVE), _ROOT_2 ** -len(_BELOW)
# In float32 it is exp(-a * a / 2) * c0 / (a + b0 + c1 / (a + b1 + ...)), here the pairs (b, c) of each level: minimax
# in the error relative to Phi(-a) and to what the exponential's argument rounds, 1 + a * a / 4; fitted here.
_LEVELS = (
    (-0.011123516067167875, 0.3988372438469435),
    (1.958228314893402, 1.2080507253018762),
    (4.399543745480583, -9.91357361806605),
    (1.052552489609707, 17.82889520000344),
)


def _tail(xp: Namespace, x: Array, a: Array, p: Array, q: Array) -> None:
    """``a = abs(x)`` (limited to where the tail is 0) and ``p = exp(a * a / 2) * Phi(-a)``; q: scratch."""
    far = _FARTHEST[x.itemsize]
    xp.clip(x, -far, far, out=a)  # in a third of the time of ``minimum`` with a number
    xp.abs(a, out=a)
    if x.itemsize == 4:
        *outer, (b, c) = _LEVELS
        xp.add(a, b, out=p)
        for b, next_c in reversed(outer):
            xp.divide(c, p, out=p)
            xp.add(p, a, out=p)
            xp.add(p, b, out=p)
            c = next_c
        xp.divide(c, p, out=p)
        return
    xp.multiply(a, _ABOVE[0], out=p)
    xp.multiply(a, _LEADS, out=q)
    for coefficient in _ABOVE[1:-1]:
        xp.add(p, coefficient, out=p)
        xp.multiply(p, a, out=p)
    xp.add(p, _ABOVE[-1], out=p)
    xp.add(q, _BELOW[0], out=q)
    for coefficient in _BELOW[1:]:
        xp.multiply(q, a, out=q)
        xp.add(q, coefficient, out=q)
    xp.divide(p, q, out=p)


def _bell(xp: Namespace, a: Array, out: Array) -> None:
    """``exp(-a * a / 2)``."""
    xp.multiply(a, a, out=out)
    xp.multiply(out, -0.5, out=out)
    xp.exp(out, out=out)


def _gelu(xp: Namespace, out: Array, x: Array, scratch: Array) -> None:
    a, p, q = scratch[0], scratch[1], scratch[2]
    _tail(xp, x, a, p, q)
    _bell(xp, a, q)
    xp.multiply(p, q, out=p)
    xp.multiply(p, a, out=p)
    xp.clip(x, 0, math.inf, out=out)
    xp.subtract(out, p, out=out)


def _gelu_slope(xp: Namespace, out: Array, x: Array, scratch: Array) -> None:
    a, p, q = scratch[0], scratch[1], scratch[2]
    _tail(xp, x, a, p, q)
    _bell(xp, a, q)
    xp.multiply(a, 1 / math.sqrt(2 * math.pi), out=a)
    xp.subtract(p, a, out=p)
    xp.multiply(p, q, out=p)
    # p where x < 0 and 1 - p elsewhere, both without cancellation: q is 1 with the sign of x.
    sign, one, bits = (-1 << 31, 0x3F800000, xp.int32) if x.itemsize == 4 else (-1 << 63, 0x3FF0000000000000, xp.int64)
    xp.bitwise_and(x.view(bits), bits(sign), out=q.view(bits))
    xp.bitwise_or(q.view(bits), bits(one), out=q.view(bits))
    xp.multiply(p, q, out=p)
    xp.clip(q, 0, 1, out=q)
    xp.subtract(q, p, out=out)
