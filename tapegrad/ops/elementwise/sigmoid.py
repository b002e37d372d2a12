"""The hyperbolic tangent and the logistic function: one curve, so each has its derivative from the other."""

from __future__ import annotations

from tapegrad.core.primitive import elementwise
from tapegrad.device.dtypes import in_float
from tapegrad.device.types import Array, Namespace
from tapegrad.ops.dispatch import Unary, infer_same, unary

tanh_p = elementwise(
    "tanh", infer=infer_same, exact=False, partials=[lambda out: 1 - out * out], cxx="tanh({x})", domain=(-3.0, 3.0),
    doc="Hyperbolic tangent.",
)  # fmt: skip
hyperbolic_tangent_p = elementwise(
    "hyperbolic_tangent", infer=infer_same, ufunc="tanh", exact=False, partials=[lambda x: 4 * sigmoid_slope(2 * x)],
    cxx="tanh({x})", domain=(-3.0, 3.0),
    doc="``tanh`` with a derivative that reads ``x``, not the result, which in half types is 1 from 4 on.",
)  # fmt: skip
tanh: Unary = unary(tanh_p, in_float, narrow=hyperbolic_tangent_p)


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


sigmoid_p = elementwise(
    "sigmoid",
    infer=infer_same,
    impl=run_sigmoid,
    exact=False,
    partials=[lambda out: out * (1 - out)],
    cxx="tg_sigmoid({x})",
    domain=(-4.0, 4.0),
    doc="``1 / (1 + exp(-x))``, without overflow; small results keep their relative precision.",
)


def _run_sigmoid_slope(xp: Namespace, out: Array, x: Array) -> None:
    if x.dtype.kind == "c":  # which side of 0 a number lies on is not asked, so it stays holomorphic
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


sigmoid_slope_p = elementwise(
    "sigmoid_slope",
    infer=infer_same,
    impl=_run_sigmoid_slope,
    exact=False,
    partials=[lambda out, x: -out * tanh(0.5 * x)],
    operands=("x",),
    cxx="tg_sigmoid_slope({x})",
    domain=(-4.0, 4.0),
    doc="The derivative of ``sigmoid``, precise in both tails.",
)
sigmoid_slope: Unary = unary(sigmoid_slope_p, in_float)

logistic_p = elementwise(
    "logistic",
    infer=infer_same,
    impl=run_sigmoid,
    exact=False,
    partials=[lambda x: sigmoid_slope(x)],
    cxx="tg_sigmoid({x})",
    domain=(-4.0, 4.0),
    doc="``sigmoid`` with a derivative that reads ``x``, not the result, which says nothing more once it is near 1: for"
    " half types, whose 1 begins at 6, and for rules.",
)
logistic: Unary = unary(logistic_p, in_float)
sigmoid: Unary = unary(sigmoid_p, in_float, narrow=logistic_p)
