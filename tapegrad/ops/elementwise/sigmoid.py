"""The hyperbolic tangent and the logistic function: one curve, so each has its derivative from the other."""

from __future__ import annotations

from tapegrad.device.types import Array, Namespace
from tapegrad.ops.dispatch import Unary, curve

_narrow_tanh = curve(
    "hyperbolic_tangent", lambda x: 4 * sigmoid_slope(2 * x), ufunc="tanh", cxx="tanh({x})", domain=(-3.0, 3.0),
    doc="``tanh`` with a derivative that reads ``x``, not the result, which in half types is 1 from 4 on.",
)  # fmt: skip
tanh: Unary = curve(
    "tanh", lambda out: 1 - out * out, domain=(-3.0, 3.0), narrow=_narrow_tanh,
    doc="Hyperbolic tangent.",
)  # fmt: skip


def logistic_of(xp: Namespace, x: Array) -> Array:
    """Return ``1 / (1 + exp(-x))``; small results keep their relative precision."""
    if x.dtype.kind == "c":  # no test of the sign, so it stays holomorphic
        return xp.reciprocal(xp.exp(-x) + 1)
    below = xp.exp(-xp.abs(x))
    return xp.maximum(below, xp.sign(x)) / (below + 1)  # the numerator is 1 unless x is negative


def _logistic_slope(xp: Namespace, x: Array) -> Array:
    if x.dtype.kind == "c":
        s = logistic_of(xp, x)
        return s - xp.square(s)
    below = xp.exp(-xp.abs(x))
    return below / xp.square(below + 1)


sigmoid_slope: Unary = curve(
    "sigmoid_slope", lambda out, x: -out * tanh(0.5 * x), formula=_logistic_slope, cxx="tg_sigmoid_slope({x})",
    domain=(-4.0, 4.0), doc="The derivative of ``sigmoid``, precise in both tails.",
)  # fmt: skip
logistic = curve(
    "logistic", lambda x: sigmoid_slope(x), formula=logistic_of, cxx="tg_sigmoid({x})", domain=(-4.0, 4.0),
    doc="``sigmoid`` with a derivative that reads ``x``, not the result, which says nothing more once it is near 1: for"
    " half types, whose 1 begins at 6, and for rules.",
)  # fmt: skip
sigmoid = curve(
    "sigmoid", lambda out: out * (1 - out), formula=logistic_of, cxx="tg_sigmoid({x})", domain=(-4.0, 4.0),
    narrow=logistic,
    doc="``1 / (1 + exp(-x))``, without overflow; small results keep their relative precision.",
)  # fmt: skip
