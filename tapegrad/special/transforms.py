"""Power transforms, relative exponentials, and the elementary functions that SciPy has names for."""

from __future__ import annotations

import math

from tapegrad.ops import exp, exp2, expm1, log, log1p, power, sin, square
from tapegrad.ops.dispatch import Tensor
from tapegrad.ops.elementwise.comparison import round
from tapegrad.ops.elementwise.complex_parts import sinc
from tapegrad.ops.elementwise.elementary import cbrt
from tapegrad.special._declare import pointwise
from tapegrad.special._series import box_ratio, exprel_slope

__all__ = [
    "boxcox", "boxcox1p", "cbrt", "cosm1", "exp10", "exp2", "expm1", "exprel", "inv_boxcox", "inv_boxcox1p", "log1p",
    "round", "sinc",
]  # fmt: skip


def _box_in_lambda(logarithm: Tensor, lmbda: Tensor) -> Tensor:
    """``logarithm**2`` times the slope of ``(exp(z) - 1) / z``: smooth at ``lmbda = 0``."""
    return square(logarithm) * exprel_slope(lmbda * logarithm)


boxcox = pointwise(
    "boxcox",
    [lambda x, lmbda: power(x, lmbda - 1), lambda x, lmbda: _box_in_lambda(log(x), lmbda)],
    doc="``(x**lmbda - 1) / lmbda``, ``log(x)`` where ``lmbda`` is 0, and smooth there.",
    operands=("x", "lmbda"),
    domain=(0.3, 2.0),
)
boxcox1p = pointwise(
    "boxcox1p",
    [lambda x, lmbda: exp((lmbda - 1) * log1p(x)), lambda x, lmbda: _box_in_lambda(log1p(x), lmbda)],
    doc="``boxcox(1 + x, lmbda)``, precise for small ``x``.",
    operands=("x", "lmbda"),
    domain=(0.3, 2.0),
)


def _unbox_in_lambda(y: Tensor, lmbda: Tensor, whole: Tensor) -> Tensor:
    return whole * square(y) * box_ratio(lmbda * y)


inv_boxcox = pointwise(
    "inv_boxcox",
    [lambda out, y, lmbda: out / (1 + lmbda * y), lambda out, y, lmbda: _unbox_in_lambda(y, lmbda, out)],
    operands=("y", "lmbda"), domain=(0.3, 2.0),
    doc="The ``x`` with ``boxcox(x, lmbda) = y``; smooth at ``lmbda = 0``.",
)  # fmt: skip
inv_boxcox1p = pointwise(
    "inv_boxcox1p",
    [
        lambda y, lmbda: inv_boxcox(y, lmbda) / (1 + lmbda * y),
        lambda y, lmbda: _unbox_in_lambda(y, lmbda, inv_boxcox(y, lmbda)),
    ],
    operands=("y", "lmbda"), domain=(0.3, 2.0),
    doc="The ``x`` with ``boxcox1p(x, lmbda) = y``; smooth at ``lmbda = 0``.",
)  # fmt: skip
exprel = pointwise(
    "exprel", [lambda x: exprel_slope(x)], doc="``(exp(x) - 1) / x``, 1 at 0, where the gradient is 1/2."
)
cosm1 = pointwise("cosm1", [lambda x: -sin(x)], doc="``cos(x) - 1``, precise near 0.")
exp10 = pointwise("exp10", [lambda out: out * math.log(10)], cxx="exp10({x})", doc="``10 ** x``.")
