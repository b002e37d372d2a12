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


def run_sigmoid(xp: Namespace, out: Array, x: Array) -> None:
    """Write ``1 / (1 + exp(-x))`` into ``out``."""
    # 1 / (1 + e**-x) is precise to an ulp or two wherever the result is a normal number; beyond that e**-x overflows
    # to infinity, and the result is e**x.
    xp.negative(x, out=out)
    with xp.errstate(over="ignore", invalid="ignore"):
        xp.exp(out, out=out)
        xp.add(out, 1, out=out)
        xp.reciprocal(out, out=out)
        tail = {4: -87, 8: -708}.get(x.itemsize) if x.dtype.kind == "f" else None
        if tail is not None and x.size and not xp.minimum.reduce(x, axis=None) >= tail:
            xp.exp(x, out=out, where=x < tail)


def _run_sigmoid_slope(xp: Namespace, out: Array, x: Array) -> None:
    if x.dtype.kind == "c":  # no test of the sign, so it stays holomorphic
        run_sigmoid(xp, out, x)
        xp.subtract(out, xp.square(out), out=out)
        return
    power = xp.empty(x.shape, x.dtype)
    xp.abs(x, out=power)
    xp.negative(power, out=power)
    xp.exp(power, out=power)
    xp.add(power, 1, out=out)
    xp.square(out, out=out)
    xp.divide(power, out, out=out)


sigmoid_slope: Unary = curve(
    "sigmoid_slope", lambda out, x: -out * tanh(0.5 * x), run=_run_sigmoid_slope, cxx="tg_sigmoid_slope({x})",
    domain=(-4.0, 4.0), doc="The derivative of ``sigmoid``, precise in both tails.",
)  # fmt: skip
logistic = curve(
    "logistic", lambda x: sigmoid_slope(x), run=run_sigmoid, cxx="tg_sigmoid({x})", domain=(-4.0, 4.0),
    doc="``sigmoid`` with a derivative that reads ``x``, not the result, which says nothing more once it is near 1: for"
    " half types, whose 1 begins at 6, and for rules.",
)  # fmt: skip
sigmoid = curve(
    "sigmoid", lambda out: out * (1 - out), run=run_sigmoid, cxx="tg_sigmoid({x})", domain=(-4.0, 4.0),
    narrow=logistic,
    doc="``1 / (1 + exp(-x))``, without overflow; small results keep their relative precision.",
)  # fmt: skip
