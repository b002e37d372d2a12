"""Continuous distributions whose quantile function is elementary: smooth in their parameters, number by number."""

from __future__ import annotations

import math

from tapegrad.ops import exp, expm1, log, log1p, sqrt, tan, where
from tapegrad.random.drawing import NONNEGATIVE_SCALE, Draw, distribution
from tapegrad.tensor import Tensor

_NOT_POSITIVE = lambda a: a <= 0


@distribution(NONNEGATIVE_SCALE, scale=1.0)
def exponential(d: Draw, scale: Tensor) -> Tensor:
    """Exponential numbers of mean ``scale``, differentiable in it.  Raises DomainError, DTypeError, ShapeError."""
    return scale * d.exponential()


@distribution(NONNEGATIVE_SCALE, loc=0.0, scale=1.0)
def laplace(d: Draw, loc: Tensor, scale: Tensor) -> Tensor:
    """Laplace numbers about ``loc``, differentiable in both.  Raises DomainError, DTypeError, ShapeError."""
    size = d.exponential()
    return loc + scale * where(d.unit() < 0.5, -size, size)


@distribution(NONNEGATIVE_SCALE, loc=0.0, scale=1.0)
def logistic(d: Draw, loc: Tensor, scale: Tensor) -> Tensor:
    """Logistic numbers about ``loc``, differentiable in both.  Raises DomainError, DTypeError, ShapeError."""
    u = d.open()
    return loc + scale * (log(u) - log1p(-u))


@distribution(NONNEGATIVE_SCALE, loc=0.0, scale=1.0)
def gumbel(d: Draw, loc: Tensor, scale: Tensor) -> Tensor:
    """Gumbel numbers (of the largest value), differentiable in both.  Raises DomainError, DTypeError, ShapeError."""
    return loc - scale * log(d.exponential())


@distribution(NONNEGATIVE_SCALE, loc=0.0, scale=1.0)
def cauchy(d: Draw, loc: Tensor, scale: Tensor) -> Tensor:
    """Cauchy numbers about ``loc``, differentiable in both.  Raises DomainError, DTypeError, ShapeError."""
    return loc + scale * tan(math.pi * (d.open() - 0.5))


@distribution({"a > 0": _NOT_POSITIVE, **NONNEGATIVE_SCALE}, a=1.0, scale=1.0)
def weibull(d: Draw, a: Tensor, scale: Tensor) -> Tensor:
    """Weibull numbers of shape ``a``, differentiable in both.  Raises DomainError, DTypeError, ShapeError."""
    return scale * exp(log(d.exponential()) / a)


@distribution({"a > 0": _NOT_POSITIVE}, a=1.0)
def pareto(d: Draw, a: Tensor) -> Tensor:
    """Pareto II (Lomax) numbers, as NumPy's ``pareto``, of shape ``a``; differentiable in it.

    Add 1 for the classical distribution.  Raises DomainError, DTypeError, ShapeError.
    """
    return expm1(d.exponential() / a)


@distribution({"a > 0": _NOT_POSITIVE}, a=1.0)
def power(d: Draw, a: Tensor) -> Tensor:
    """Numbers in [0, 1] with density ``a * x**(a - 1)``, differentiable in ``a``.

    Raises DomainError, DTypeError, ShapeError.
    """
    return exp(-d.exponential() / a)


@distribution(NONNEGATIVE_SCALE, scale=1.0)
def rayleigh(d: Draw, scale: Tensor) -> Tensor:
    """Rayleigh numbers, differentiable in ``scale``.  Raises DomainError, DTypeError, ShapeError."""
    return scale * sqrt(2 * d.exponential())


@distribution(
    {
        "left <= mode <= right": lambda left, mode, right: (left > mode) | (mode > right),
        "left < right": lambda left, right: left >= right,
    },
    left=0.0, mode=0.5, right=1.0,
)  # fmt: skip
def triangular(d: Draw, left: Tensor, mode: Tensor, right: Tensor) -> Tensor:
    """Triangular numbers between ``left`` and ``right``, likeliest at ``mode``; differentiable in all three.

    Raises DomainError, DTypeError, ShapeError.
    """
    u = d.open()
    width = right - left
    below = u * width < mode - left
    up = where(below, u * width * (mode - left), 1.0)
    down = where(below, 1.0, (1 - u) * width * (right - mode))
    return where(below, left + sqrt(up), right - sqrt(down))
