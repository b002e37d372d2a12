"""The error function and its complement in NumPy's ufuncs, which include neither.

Every element passes through the same operations whatever its neighbours are, so a value recomputed in another tiling
has the same bits.  All but float64's ``erf`` are formulas of ufuncs alone, which regions take in step by step.

``erf``, float32: ``tanh(x + x * S(x * x))`` with a rational ``S`` of degree (3, 3), fitted here: minimax in the error
of the result, then moved among neighbouring float32 coefficients for the least rounding error.  ``x + small`` keeps the
rounding error of ``S`` out of the result.

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
from functools import cache

from tapegrad.device.types import Array, Namespace

_BLOCK = 1 << 15
"""Elements of float64's ``erf`` at a time: many more leave the cache of a core."""

# Adding then subtracting this rounds to a multiple of 1/1024; in between, the low bits of the sum count the steps.
_GRID = 1.5 * 2.0**42
_GRID_POINTS = 1 << 14
# 2, less a correction that balances the neglected h**4 / 360 (it matters at g = 0 only) over abs(h) <= 1/2048.
_BETA = 2.0 - 24.0 * 0.83 / 2048**2 / 360.0

# Per item size: a factor that splits a significand in half, bound beyond which erfc is zero, P and Q from the highest
# power down (the 1.0 that leads Q is left out).
_ERFC = {
    4: (
        2.0**12 + 1,
        10.4,
        (0.564196061, 3.93659653, 12.5490327, 21.2202193, 17.1121648),
        (6.97787381, 22.7353745, 41.1690527, 40.5292396, 17.1121648),
    ),
    8: (
        2.0**27 + 1,
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


def erf(xp: Namespace, x: Array) -> Array:
    """Return the error function of ``x``, within 2.5 ulp (float64) or 3.5 ulp (float32).

    The largest float32 error, of all values, is 2.40 ulp with AVX-512; without fused multiply-add, 3.1 has been seen.

    x: float32 or wider (long doubles are computed as float64).
    Exact at 0 (with its sign) and infinity; NaN stays NaN.
    """
    return _erf32(xp, x) if x.dtype.itemsize == 4 else _erf64(xp, x)


def _erf32(xp: Namespace, x: Array) -> Array:
    x = xp.maximum(xp.minimum(x, 9.0), -9.0)  # where the result is 1
    t = x * x
    w = t - 14.620383262634277 * t / (t + 18.696910858154297) + 2.5647852420806885
    w = -5.477768421173096 / w + t + 3.578474760055542
    w = 10.9847993850708 / w + 0.17544151842594147
    return xp.tanh(x / w + x)


@cache
def _erf_on_grid(xp: Namespace) -> Array:
    """erf(k / 1024) at index k; negative k count from the end, as the low bits of ``x + _GRID`` do."""
    half = _GRID_POINTS // 2
    values = [math.erf(k / 1024) for k in (*range(half), *range(-half, 0))]
    values[0] = -0.0  # added to a difference of either sign of zero, it keeps that sign
    return xp.asarray(values, dtype=xp.float64)


def _erf64(xp: Namespace, x: Array) -> Array:
    """By blocks, since an array as large as ``x`` for each step would leave the cache."""
    result = xp.empty(x.shape, x.dtype)
    flat, source = result.reshape(-1), x.reshape(-1)
    for start in range(0, x.size, _BLOCK):
        rows = slice(start, start + _BLOCK)
        flat[rows] = _near_grid(xp, source[rows].astype(xp.float64, copy=False))
    return result


def _near_grid(xp: Namespace, x: Array) -> Array:
    c = xp.clip(x, -6.0, 6.0)
    u = c + _GRID
    at_grid = xp.take(_erf_on_grid(xp), u.view(xp.int64) & (_GRID_POINTS - 1))
    u -= _GRID
    h, s = c - u, c + u
    exponent = (s * s - _BETA) * (h * h * (1 / 24) - 0.25) + (math.log(2.0 / math.sqrt(math.pi)) - _BETA / 4)
    return at_grid + xp.exp(exponent) * h


def erfc(xp: Namespace, x: Array) -> Array:
    """Return ``1 - erf(x)``, within 12 ulp (float64) or 9 ulp (float32) of the result, also in the tail.

    x: float32 or float64 (of long doubles the result is as precise as float64's).
    Exact at 0 and infinity; NaN stays NaN.
    """
    halving, bound, above, below = _ERFC[min(x.dtype.itemsize, 8)]
    a = xp.minimum(xp.abs(x), bound)
    ratio = _ratio(a, above, below)
    # With a = b + c, where b has half of the bits and so an exact square, a * a - s = (b * b - s) + c * (a + b).
    s = a * a
    far = halving * a
    b = far - (far - a)
    rounded = (b * b - s) + (a + b) * (a - b)
    tail = xp.exp(-s) * ratio
    tail = tail - rounded * tail
    return xp.abs((1.0 - xp.copysign(1.0, x)) - tail)  # 2 - tail where x is negative


def _ratio(a: Array, above: tuple[float, ...], below: tuple[float, ...], leads: float = 1.0) -> Array:
    """``P(a) / Q(a)``, of coefficients from the highest power down; ``leads`` is Q's first."""
    p = a * above[0]
    for coefficient in above[1:-1]:
        p = (p + coefficient) * a
    q = a if leads == 1.0 else a * leads
    q = q + below[0]
    for coefficient in below[1:]:
        q = q * a + coefficient
    return (p + above[-1]) / q


_ROOT_2 = math.sqrt(2.0)
# Phi(-a) = exp(-a * a / 2) * P(a) / Q(a) in float64: the coefficients of _ERFC put into a instead of a / sqrt(2), and
# P halved; the coefficient that leads Q is apart.
_ABOVE, _BELOW = (tuple(c / _ROOT_2**k for k, c in zip(range(len(row) - 1, -1, -1), row)) for row in _ERFC[8][2:])
_ABOVE, _LEADS = tuple(c / 2 for c in _ABOVE), _ROOT_2 ** -len(_BELOW)
# In float32 it is exp(-a * a / 2) * c0 / (a + b0 + c1 / (a + b1 + ...)), here the pairs (b, c) of each level: minimax
# in the error relative to Phi(-a) and to what the exponential's argument rounds, 1 + a * a / 4; fitted here.
_LEVELS = (
    (-0.011123516067167875, 0.3988372438469435),
    (1.958228314893402, 1.2080507253018762),
    (4.399543745480583, -9.91357361806605),
    (1.052552489609707, 17.82889520000344),
)


def _tail(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """``a = abs(x)`` (limited to where the tail is 0) and ``exp(a * a / 2) * Phi(-a)``."""
    if x.dtype.itemsize > 4:
        a = xp.minimum(xp.abs(x), 27.5 * _ROOT_2)
        return a, _ratio(a, _ABOVE, _BELOW, _LEADS)
    a = xp.minimum(xp.abs(x), 10.4 * _ROOT_2)
    (b, c), *inner = _LEVELS[::-1]
    p = a + b
    for b, next_c in inner:
        p = c / p + a + b
        c = next_c
    return a, c / p


def gelu(xp: Namespace, x: Array) -> Array:
    """Return ``x * Phi(x)``, Phi the normal distribution's cumulative function.

    The error is a few ulp and, in the tail, that of ``exp(-x * x / 2)``: half an ulp of the exponent, so ``x * x / 4``
    ulp.  -0 at minus infinity.  x: as of :func:`erfc`.
    """
    a, p = _tail(xp, x)
    return xp.maximum(x, 0.0) - p * xp.exp(a * a * -0.5) * a


def gelu_slope(xp: Namespace, x: Array) -> Array:
    """Return the derivative of :func:`gelu`, ``Phi(x) + x * phi(x)``; errors and operand as there."""
    a, p = _tail(xp, x)
    p = (p - a * (1 / math.sqrt(2 * math.pi))) * xp.exp(a * a * -0.5)
    sign = xp.copysign(1.0, x)
    return xp.maximum(sign, 0.0) - p * sign  # p where x is negative and 1 - p elsewhere, both without cancellation
