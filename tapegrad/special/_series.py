"""Smooth functions that divide by something small: a power series near 0, the formula elsewhere.

The formulas lose digits near 0, and their derivatives more; the series has all derivatives there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import factorial
from typing import Any

from tapegrad.ops import abs, exp, expm1, log, log1p, sin, where
from tapegrad.tensor import Tensor


def horner(coefficients: Sequence[float | Tensor], x: Tensor) -> Tensor:
    """The polynomial with ``coefficients`` from the lowest power up."""
    total: Any = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def near_zero(
    x: Tensor, reach: float, series: Callable[[Tensor], Tensor], formula: Callable[[Tensor], Tensor]
) -> Tensor:
    """``series`` where ``x`` is within ``reach`` of 0, else ``formula``; each is computed on its own numbers only."""
    small = abs(x) < reach
    return where(small, series(where(small, x, 0)), formula(where(small, 1, x)))


_SINE = [(-1) ** k / factorial(2 * k + 1) for k in range(10)]
_EXPREL_SLOPE = [(k + 1) / factorial(k + 2) for k in range(18)]
_LOG1P = [(-1) ** k / (k + 1) for k in range(11)]
_BOX = [(-1) ** (k + 1) * (k + 1) / (k + 2) for k in range(11)]


def sine_ratio(x: Tensor) -> Tensor:
    """``sin(x) / x``."""
    return near_zero(x, 1.0, lambda z: horner(_SINE, z * z), lambda z: sin(z) / z)


def exprel_slope(x: Tensor) -> Tensor:
    """The derivative of ``(exp(x) - 1) / x``."""
    return near_zero(x, 1.0, lambda z: horner(_EXPREL_SLOPE, z), lambda z: (exp(z) - expm1(z) / z) / z)


def log_ratio(x: Tensor) -> Tensor:
    """``log(x) / (x - 1)``."""
    near = abs(x - 1) < 0.03
    far = where(near, 2, x)
    return where(near, horner(_LOG1P, where(near, x - 1, 0)), log(far) / (far - 1))


def box_ratio(x: Tensor) -> Tensor:
    """``1 / (x (1 + x)) - log(1 + x) / x**2``."""
    return near_zero(x, 0.03, lambda z: horner(_BOX, z), lambda z: (1 / (1 + z) - log1p(z) / z) / z)
