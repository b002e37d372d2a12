"""Continuous distributions whose quantile function is elementary: smooth in their parameters, number by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tapegrad.ops.elementwise.arithmetic import sqrt
from tapegrad.ops.elementwise.exponential import exp, expm1, log, log1p
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.elementwise.trigonometric import tan
from tapegrad.random.drawing import Draw
from tapegrad.random.stream import Generator
from tapegrad.tensor import Tensor


def exponential(
    shape: int | Sequence[int] = (),
    scale: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Exponential numbers of mean ``scale``, differentiable in it.  Raises DTypeError, ShapeError."""
    d = Draw("exponential", shape, (scale,), dtype, generator, device)
    (scale,) = d.parameters
    return d.done(scale * d.exponential())


def laplace(
    shape: int | Sequence[int] = (),
    loc: Any = 0.0,
    scale: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Laplace numbers about ``loc``, differentiable in both.  Raises DTypeError, ShapeError."""
    d = Draw("laplace", shape, (loc, scale), dtype, generator, device)
    loc, scale = d.parameters
    size = d.exponential()
    return d.done(loc + scale * where(d.unit() < 0.5, -size, size))


def logistic(
    shape: int | Sequence[int] = (),
    loc: Any = 0.0,
    scale: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Logistic numbers about ``loc``, differentiable in both.  Raises DTypeError, ShapeError."""
    d = Draw("logistic", shape, (loc, scale), dtype, generator, device)
    loc, scale = d.parameters
    u = d.open()
    return d.done(loc + scale * (log(u) - log1p(-u)))


def gumbel(
    shape: int | Sequence[int] = (),
    loc: Any = 0.0,
    scale: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Gumbel numbers (of the largest value), differentiable in both.  Raises DTypeError, ShapeError."""
    d = Draw("gumbel", shape, (loc, scale), dtype, generator, device)
    loc, scale = d.parameters
    return d.done(loc - scale * log(d.exponential()))


def cauchy(
    shape: int | Sequence[int] = (),
    loc: Any = 0.0,
    scale: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Cauchy numbers about ``loc``, differentiable in both.  Raises DTypeError, ShapeError."""
    d = Draw("cauchy", shape, (loc, scale), dtype, generator, device)
    loc, scale = d.parameters
    return d.done(loc + scale * tan(math.pi * (d.open() - 0.5)))


def weibull(
    shape: int | Sequence[int] = (),
    a: Any = 1.0,
    scale: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Weibull numbers of shape ``a``, differentiable in both.  Raises DTypeError, ShapeError."""
    d = Draw("weibull", shape, (a, scale), dtype, generator, device)
    a, scale = d.parameters
    return d.done(scale * exp(log(d.exponential()) / a))


def pareto(
    shape: int | Sequence[int] = (),
    a: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Pareto II (Lomax) numbers, as NumPy's ``pareto``, of shape ``a``; differentiable in it.

    Add 1 for the classical distribution.  Raises DTypeError, ShapeError.
    """
    d = Draw("pareto", shape, (a,), dtype, generator, device)
    (a,) = d.parameters
    return d.done(expm1(d.exponential() / a))


def power(
    shape: int | Sequence[int] = (),
    a: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Numbers in [0, 1] with density ``a * x**(a - 1)``, differentiable in ``a``.  Raises DTypeError, ShapeError."""
    d = Draw("power", shape, (a,), dtype, generator, device)
    (a,) = d.parameters
    return d.done(exp(-d.exponential() / a))


def rayleigh(
    shape: int | Sequence[int] = (),
    scale: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Rayleigh numbers, differentiable in ``scale``.  Raises DTypeError, ShapeError."""
    d = Draw("rayleigh", shape, (scale,), dtype, generator, device)
    (scale,) = d.parameters
    return d.done(scale * sqrt(2 * d.exponential()))


def triangular(
    shape: int | Sequence[int] = (),
    left: Any = 0.0,
    mode: Any = 0.5,
    right: Any = 1.0,
    dtype: Any = "float32",
    generator: Generator | None = None,
    device: Any = None,
) -> Tensor:
    """Triangular numbers between ``left`` and ``right``, likeliest at ``mode``; differentiable in all three.

    Raises DTypeError, ShapeError.
    """
    d = Draw("triangular", shape, (left, mode, right), dtype, generator, device)
    left, mode, right = d.parameters
    u = d.open()
    width = right - left
    below = u * width < mode - left
    up = where(below, u * width * (mode - left), 1.0)
    down = where(below, 1.0, (1 - u) * width * (right - mode))
    return d.done(where(below, left + sqrt(up), right - sqrt(down)))
