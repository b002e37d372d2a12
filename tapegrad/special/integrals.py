"""Exponential, trigonometric and other integrals, and functions that solve simple equations."""

from __future__ import annotations

import math
from typing import NamedTuple

from tapegrad.core.primitive import Primitive, Sample
from tapegrad.device.numerics import special
from tapegrad.ops import cos, cosh, exp, sin, sinh, square, where
from tapegrad.ops.dispatch import barrier
from tapegrad.special._declare import Function, barrier_of, pointwise, with_order
from tapegrad.special._series import horner, log_ratio, near_zero, sine_ratio
from tapegrad.special.normal import erf
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["exp1", "expi", "expn", "fresnel", "hyp1f1", "owens_t", "shichi", "sici", "spence"]

exp1 = pointwise(
    "exp1", [lambda x: -exp(-x) / x], domain=(0.3, 3.0),
    doc="The exponential integral, of ``exp(-t) / t`` from ``x`` to infinity: inf at 0.",
)  # fmt: skip
expi = pointwise(
    "expi", [lambda x: exp(x) / x], domain=(0.3, 3.0),
    doc="The exponential integral, of ``exp(t) / t`` up to ``x``: -inf at 0.",
)  # fmt: skip


def _expn_slope(n: Tensor, x: Tensor) -> Tensor:
    """Minus the function of one order less; that of order -1 is elementary."""
    first = n < 1
    safe = where(first, x, 1.0)
    lowest = exp(-safe) * (1 + safe) / square(safe)
    return -where(first, lowest, barrier(_expn_p, where(first, 1.0, n) - 1, x))


_expn_p: Primitive = barrier_of(
    "expn",
    ("n", "x"),
    lambda xp, n, x: special.value(xp, "expn", (n, x)),
    [None, _expn_slope],
    [Sample([[1.0], [3.0]], (2, 3), domain=(0.4, 3.0)), Sample(0.0, 1.5), Sample((1, 3), (0, 3))],
    "The exponential integral of integer order.",
)


def expn(n: TensorLike, x: TensorLike) -> Tensor:
    """The integral of ``exp(-x t) / t**n`` from 1 to infinity (SciPy's ``expn``); no gradient in ``n``.

    n: 0, 1, 2, ...; the gradient at 0 is infinite for ``n < 2``, ``-1 / (n - 2)`` for ``n > 2``.
    """
    return barrier(_expn_p, *with_order("expn", n, x))


_SINH = [1 / math.factorial(2 * k + 1) for k in range(10)]


def _sinh_ratio(x: Tensor) -> Tensor:
    return near_zero(x, 1.0, lambda z: horner(_SINH, z * z), lambda z: sinh(z) / z)


_sine = pointwise("sine_integral", [sine_ratio], scipy="sici", part=0, doc="The integral of ``sin(t) / t`` from 0.")
_cosine = pointwise(
    "cosine_integral", [lambda x: cos(x) / x], scipy="sici", part=1, domain=(0.3, 3.0),
    doc="The integral of ``(cos(t) - 1) / t`` from 0, plus ``log(x)`` and Euler's constant.",
)  # fmt: skip
_sinh_integral = pointwise(
    "sinh_integral", [_sinh_ratio], scipy="shichi", part=0, doc="The integral of ``sinh(t) / t`` from 0."
)
_cosh_integral = pointwise(
    "cosh_integral", [lambda x: cosh(x) / x], scipy="shichi", part=1, domain=(0.3, 3.0),
    doc="The integral of ``(cosh(t) - 1) / t`` from 0, plus ``log(x)`` and Euler's constant.",
)  # fmt: skip
_fresnel_s = pointwise(
    "fresnel_s", [lambda x: sin(square(x) * (math.pi / 2))], scipy="fresnel", part=0,
    doc="The integral of ``sin(pi t**2 / 2)`` from 0.",
)  # fmt: skip
_fresnel_c = pointwise(
    "fresnel_c", [lambda x: cos(square(x) * (math.pi / 2))], scipy="fresnel", part=1,
    doc="The integral of ``cos(pi t**2 / 2)`` from 0.",
)  # fmt: skip


class Integrals(NamedTuple):
    """An integral with a sine and one with a cosine."""

    sine: Tensor
    cosine: Tensor


def sici(x: TensorLike) -> Integrals:
    """The sine and cosine integrals of real numbers (SciPy's ``sici``).

    The cosine integral is -inf at 0 with gradient inf, NaN left of it; the sine integral's gradient at 0 is 1.
    """
    return Integrals(_sine(x), _cosine(x))


def shichi(x: TensorLike) -> Integrals:
    """The hyperbolic sine and cosine integrals of real numbers (SciPy's ``shichi``).

    The gradients at 0 are 1 and inf.
    """
    return Integrals(_sinh_integral(x), _cosh_integral(x))


def fresnel(z: TensorLike) -> Integrals:
    """Fresnel's integrals of ``sin`` and ``cos`` of ``pi t**2 / 2`` from 0 to a real ``z`` (SciPy's ``fresnel``)."""
    return Integrals(_fresnel_s(z), _fresnel_c(z))


def _normal(x: Tensor) -> Tensor:
    return exp(-0.5 * square(x)) * (1 / math.sqrt(2 * math.pi))


owens_t = pointwise(
    "owens_t",
    [
        lambda h, a: -0.5 * _normal(h) * erf(a * h * math.sqrt(0.5)),
        lambda h, a: exp(-0.5 * (square(h) + square(h * a))) / (2 * math.pi * (1 + square(a))),
    ],
    operands=("h", "a"),
    doc="Owen's T function: how likely a normal X > h has beside it a normal Y between 0 and a X.",
)
spence = pointwise(
    "spence", [lambda x: -log_ratio(x)], domain=(0.3, 3.0),
    doc="The dilogarithm as SciPy has it, of ``1 - x``; the gradient at 1 is -1, at 0 -inf; NaN for negative ``x``.",
)  # fmt: skip

hyp1f1: Function = pointwise(
    "hyp1f1",
    [None, None, lambda a, b, x: a / b * hyp1f1(a + 1, b + 1, x)],
    operands=("a", "b", "x"),
    samples=[Sample([0.7, 2.0, 3.0], [1.4, 0.6, 2.5], (3,)), Sample(1.5, 2.0, 0.3), Sample((1, 3), (3,), (0, 3))],
    doc="Kummer's function 1F1; it has a gradient in ``x`` only: asking for others raises NoGradientError.",
)
