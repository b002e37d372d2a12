"""Floating point as the PTX ISA defines it: one rounding, in the direction asked for, and subnormal numbers as zeros.

A fused product and sum is computed exactly in two doubles whose sum is rounded to odd, which a second rounding cannot
spoil: S. Boldo and G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to
odd", IEEE Transactions on Computers 57 (2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

F32, F64, U32, U64 = np.float32, np.float64, np.uint32, np.uint64
_SIGN, _MAGNITUDE = U32(0x80000000), U32(0x7FFFFFFF)


def flushed(x: np.ndarray) -> np.ndarray:
    """float32 with subnormal numbers replaced by zeros of their sign (``.ftz``)."""
    bits = x.view(U32)
    small = (bits + bits - U32(1)) < U32(0x00FFFFFF)
    return np.where(small, bits & _SIGN, bits).view(F32) if small.any() else x


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum rounded, and what rounding took away."""
    s = a + b
    kept = s - a
    return s, (a - (s - kept)) + (b - kept)


def to_odd(s: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """s + rest, where s is that sum to nearest, rounded to the neighbour whose last bit is odd unless it is exact."""
    bits = s.view(U64)
    odd = (bits & U64(1)).astype(bool) | (rest == 0) | ~np.isfinite(s) | ~np.isfinite(rest)
    away = (rest > 0) == (s > 0)
    return np.where(odd, bits, np.where(away, bits + U64(1), bits - U64(1))).view(F64)


def to_float32(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """float64 to float32 in a direction: rn nearest even, rz to zero, rm down, rp up."""
    near = x.astype(F32)
    if mode == "rn":
        return near
    back = near.astype(F64)
    down, up = F32(-np.inf), F32(np.inf)
    if mode == "rm":
        return np.where(back > x, np.nextafter(near, down), near)
    if mode == "rp":
        return np.where(back < x, np.nextafter(near, up), near)
    if mode == "rz":
        return np.where(np.abs(back) > np.abs(x), np.nextafter(near, F32(0)), near)
    raise KeyError(mode)


def sum32(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a + b of float32 in a direction."""
    if mode == "rn":
        return a + b
    s, rest = two_sum(a.astype(F64), b.astype(F64))
    return to_float32(to_odd(s, rest), mode)


def product32(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a * b of float32 in a direction."""
    return a * b if mode == "rn" else to_float32(a.astype(F64) * b.astype(F64), mode)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str = "rn") -> np.ndarray:
    """a * b + c of float32 with one rounding: the product is exact in float64."""
    s, rest = two_sum(a.astype(F64) * b.astype(F64), c.astype(F64))
    return to_float32(to_odd(s, rest), mode)


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scaled = x * 134217729.0
    high = scaled - (scaled - x)
    return high, x - high


def _two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    p = a * b
    (ah, al), (bh, bl) = _split(a), _split(b)
    return p, al * bl - (((p - ah * bh) - al * bh) - ah * bl)


def _exponent(x: np.ndarray) -> np.ndarray:
    return (x.view(U64) >> U64(52)).astype(np.int64) & 0x7FF


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float64 with one rounding; where an exponent is extreme, by exact fractions."""
    a, b, c = (np.ascontiguousarray(x) for x in np.broadcast_arrays(a, b, c))
    uh, ul = _two_product(a, b)
    th, tl = two_sum(c, ul)
    vh, vl = two_sum(uh, th)
    z, rest = two_sum(tl, vl)
    out = vh + to_odd(z, rest)
    product, addend = _exponent(a) + _exponent(b), _exponent(c)
    hard = (product < 1023 + 120) | (product > 3000) | (addend > 1980) | (a == 0) | (b == 0)
    hard |= ((addend < 120) & (c != 0)) | (_exponent(a) > 2000) | (_exponent(b) > 2000)
    if hard.any():
        out = out.copy()
        plain = hard & ((a == 0) | (b == 0) | ~np.isfinite(a) | ~np.isfinite(b) | ~np.isfinite(c))
        out[plain] = a[plain] * b[plain] + c[plain]
        for i in np.flatnonzero(hard & ~plain):
            exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
            out[i] = _nearest(exact) if exact else a[i] * b[i] + c[i]
    return out


def _nearest(exact: Fraction) -> float:
    try:
        return exact.numerator / exact.denominator  # Python's division of integers rounds once
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def smaller(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min as PTX has it: a NaN loses, and -0 is below +0."""
    out = np.fmin(a, b)
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), out)


def larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max as PTX has it: a NaN loses, and +0 is above -0."""
    out = np.fmax(a, b)
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), out)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16, nearest even; NaN is 0x7fff."""
    bits = x.view(U32).astype(U64)
    out = ((bits + U64(0x7FFF) + ((bits >> U64(16)) & U64(1))) >> U64(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), out)


def to_float16(x: np.ndarray) -> np.ndarray:
    """float32 or float64 to the bits of float16, nearest even; NaN is 0x7fff."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


def to_tf32(x: np.ndarray) -> np.ndarray:
    """float32 to its 10 leading bits, nearest with ties away from zero (``cvt.rna.tf32.f32``)."""
    bits = x.view(U32)
    out = (bits + U32(0x1000)) & U32(0xFFFFE000)
    return np.where(np.isnan(x), U32(0x7FFFFFFF), np.where(np.isinf(x), bits, out))


def _by_double(f: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: f(x.astype(F64)).astype(F32)


def _turn(f: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.where(np.isinf(x), F32(np.nan), f(x.astype(F64)).astype(F32))


APPROXIMATE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rcp": _by_double(lambda x: 1 / x),  # within 1 ulp
    "rsqrt": _by_double(lambda x: 1 / np.sqrt(x)),  # relative error 2**-22.9
    "sqrt": _by_double(np.sqrt),  # relative error 2**-23
    "ex2": _by_double(np.exp2),  # 2 ulp
    "lg2": _by_double(np.log2),  # absolute error 2**-22 near 1, relative 2**-22.6 elsewhere
    "sin": _turn(np.sin),  # absolute error 2**-20.5 in [-pi, pi]
    "cos": _turn(np.cos),  # absolute error 2**-20.5 in [-pi, pi]
    "tanh": _by_double(np.tanh),  # relative error 2**-11
}
"""The approximate functions of float32, here rounded once: a device's differ by up to what each comment says (PTX ISA,
section 9.7.3)."""


def coarse(name: str, x: np.ndarray) -> np.ndarray:
    """``rcp.approx.ftz.f64`` and ``rsqrt.approx.ftz.f64``: the upper 32 bits of the result, the others are 0."""
    bits = x.view(U64)
    tiny = (bits & U64(0x7FF0000000000000)) == 0
    x = np.where(tiny, bits & U64(0x8000000000000000), bits).view(F64)
    out = (1 / x if name == "rcp" else 1 / np.sqrt(x)).view(U64) & U64(0xFFFFFFFF00000000)
    return np.where(np.isnan(x), U64(0x7FFFFFFF00000000), out).view(F64)
