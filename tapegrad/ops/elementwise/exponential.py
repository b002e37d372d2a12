"""Exponentials, logarithms, powers.

``x ** y`` differentiates in ``y`` only where ``x > 0`` (as TensorFlow does).
"""

from __future__ import annotations

from tapegrad.core.primitive import elementwise
from tapegrad.device.dtypes import is_inexact
from tapegrad.device.types import Array, Namespace
from tapegrad.ops.dispatch import SCALARS, binary, curve, infer_same, no_bool, of_two, real_float
from tapegrad.ops.elementwise.arithmetic import both_zero, positive, reciprocal, sqrt, square
from tapegrad.ops.elementwise.comparison import equal, not_equal
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.elementwise.sigmoid import logistic
from tapegrad.tensor import Tensor, TensorLike

exp = curve("exp", lambda out: out, widens=False, doc="``e ** x``.")
expm1 = curve("expm1", lambda x: exp(x), doc="``exp(x) - 1``, precise near 0.")
exp2 = curve("exp2", lambda out: out * 0.6931471805599453, doc="``2 ** x``.")
log = curve("log", lambda ct, x: ct / x, domain=(0.2, 3.0), doc="Natural logarithm.")
log2 = curve("log2", lambda x: 1.4426950408889634 / x, domain=(0.2, 3.0), doc="Logarithm to base 2.")
log10 = curve("log10", lambda x: 0.4342944819032518 / x, domain=(0.2, 3.0), doc="Logarithm to base 10.")
log1p = curve("log1p", lambda x: reciprocal(1 + x), domain=(-0.5, 2.0), doc="``log(1 + x)``, precise near 0.")


def _run_difference(xp: Namespace, out: Array, x: Array, y: Array) -> None:
    with xp.errstate(invalid="ignore"):
        xp.subtract(x, y, out=out)
    xp.copyto(out, 0, where=xp.equal(x, y))


difference = binary(
    elementwise(
        "difference",
        infer=infer_same,
        impl=_run_difference,
        partials=[1, -1],
        operands=("x", "y"),
        cxx="{x} == {y} ? {out_type}(0) : tg_minus({x}, {y})",
        doc="``x - y``, and 0 of equal infinities: the exponents less the largest, of which one may be infinite.",
    )
)

logaddexp = of_two(
    "logaddexp",
    # The softmax of both operands, of their difference: where they are large, `exp(x - out)` has no digits left.
    [lambda x, y: logistic(difference(x, y)), lambda x, y: logistic(difference(y, x))],
    exact=False,
    costly=True,
    cxx="tg_logaddexp({x}, {y})",
    doc="``log(exp(x) + exp(y))`` without overflow.  Equal operands share the gradient, two of -inf or inf as well.",
    to=real_float("logaddexp"),
)

power = of_two(
    "power",
    [lambda x, y: y * x ** where(both_zero(x, y), 1, y - 1), lambda out, x: _power_in_exponent(out, x)],
    exact=False,
    cxx="tg_pow({x}, {y})",
    domain=(0.3, 2.0),
    doc="``x ** y``; the gradient of ``x ** 0`` in ``x`` is 0 at 0, too.  An integer to a negative power is an error on"
    " the CPU (NumPy's ValueError), and on a GPU the whole part of the result: 0, 1 or -1.",
    to=no_bool("power"),
)


def _power_in_exponent(out: Tensor, x: Tensor) -> Tensor:
    """``out * log(x)``, and where there is no logarithm 0, also of an infinite ``out``; NaN stays NaN."""
    known = not_equal(x, 0) if x.dtype.kind == "c" else x > 0
    return where(known, out, where(equal(out, out), 0, out)) * log(where(known, x, 1))


def pow_operator(x: Tensor, y: TensorLike) -> Tensor:
    """``x ** y``: a Python exponent of 1, 2, 0.5 or -1 becomes the simpler function, as in NumPy."""
    if isinstance(y, SCALARS) and is_inexact(x.dtype):
        if y == 2:
            return square(x)
        if y == 1:
            return positive(x)
        if y == 0.5:
            return sqrt(x)
        if y == -1:
            return reciprocal(x)
    return power(x, y)
