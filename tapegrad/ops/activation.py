"""Activation functions and the error function.

Primitives are those whose derivative, accuracy or speed a composite would lose; the fuser makes one kernel of the rest.
"""

from __future__ import annotations

from typing import Any

from tapegrad.device.dtypes import in_float
from tapegrad.errors import TapegradError
from tapegrad.ops import _erf
from tapegrad.ops.arithmetic import abs, minimum, square
from tapegrad.ops.dispatch import infer_same, no_bool, promote, real_float, unary
from tapegrad.ops.exponential import exp, expm1
from tapegrad.ops.selection import where
from tapegrad.primitive import elementwise
from tapegrad.tensor import Tensor

_SQRT_HALF = 0.7071067811865476
_TWO_OVER_SQRT_PI = 1.1283791670955126
_GELU_A, _GELU_B = 1.5957691216057308, 0.07135481627260025  # sqrt(8 / pi), and 0.044715 times that


def _run_sigmoid(xp: Any, out: Any, x: Any) -> None:
    # 1 / (1 + e**-x) is precise to an ulp or two wherever the result is a normal number; beyond that e**-x overflows
    # to infinity, whose reciprocal is the right 0.
    xp.negative(x, out=out)
    with xp.errstate(over="ignore"):
        xp.exp(out, out=out)
    xp.add(out, 1, out=out)
    xp.reciprocal(out, out=out)


sigmoid_p = elementwise(
    "sigmoid",
    infer=infer_same,
    impl=_run_sigmoid,
    exact=False,
    partials=[lambda out: out * (1 - out)],
    cxx="tg_sigmoid({x})",
    domain=(-4.0, 4.0),
    doc="``1 / (1 + exp(-x))``, without overflow; small results keep their relative precision.",
)
sigmoid = unary(sigmoid_p, in_float)


def _run_softplus(xp: Any, out: Any, x: Any) -> None:
    # Above the cut, e**-x is less than half an ulp of x, and x itself is the answer; below, e**x does not overflow.
    xp.minimum(x, {2: 10, 4: 20}.get(x.dtype.itemsize, 40), out=out)
    xp.exp(out, out=out)
    xp.log1p(out, out=out)
    xp.maximum(out, x, out=out)


softplus_p = elementwise(
    "softplus",
    infer=infer_same,
    impl=_run_softplus,
    exact=False,
    partials=[lambda x: sigmoid(x)],
    cxx="tg_softplus({x})",
    domain=(-4.0, 4.0),
    doc="``log(1 + exp(x))``, without overflow.",
)
softplus = unary(softplus_p, in_float)

relu_p = elementwise(
    "relu",
    infer=infer_same,
    impl=lambda xp, out, x: xp.maximum(x, 0, out=out),
    partials=[lambda ct, out: where(out > 0, ct, 0)],
    operands=("x",),
    cxx="tg_max({x}, {type}(0))",
    doc="``max(x, 0)``; the gradient at 0 is 0.  Its rule reads the result, which the next layer keeps anyway.",
)
relu = unary(relu_p, no_bool("relu"))

erf_p = elementwise(
    "erf",
    infer=infer_same,
    impl=lambda xp, out, x: _erf.erf(xp, out, x),
    exact=False,
    partials=[lambda x: exp(-square(x)) * _TWO_OVER_SQRT_PI],
    cxx="erf({x})",
    doc="The error function, ``2 / sqrt(pi)`` times the integral of ``exp(-t * t)`` from 0 to ``x``.",
)
erf = unary(erf_p, real_float("erf"))

erfc_p = elementwise(
    "erfc",
    infer=infer_same,
    impl=lambda xp, out, x: _erf.erfc(xp, out, x),
    exact=False,
    costly=True,
    partials=[lambda x: exp(-square(x)) * -_TWO_OVER_SQRT_PI],
    cxx="erfc({x})",
    doc="``1 - erf(x)``, precise for large ``x``.",
)
erfc = unary(erfc_p, real_float("erfc"))


def _floating(op: str, x: Any) -> Tensor:
    return promote(op, (x,), in_float)[0]


def gelu(x: Any, /, *, approximate: str = "none") -> Tensor:
    """``x`` times the normal distribution's cumulative function (Hendrycks and Gimpel, 2016).

    ``approximate="tanh"``: their approximation ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3)))``.
    Raises TapegradError for another value of ``approximate``.
    """
    x = _floating("gelu", x)
    if approximate == "none":
        return x * (0.5 + 0.5 * erf(x * _SQRT_HALF))
    if approximate != "tanh":
        raise TapegradError(f'gelu: approximate must be "none" or "tanh", got {approximate!r}')
    return x * sigmoid(x * (_GELU_A + _GELU_B * square(x)))  # (1 + tanh(u)) / 2 = sigmoid(2 u)


def silu(x: Any, /) -> Tensor:
    """``x * sigmoid(x)``, also called swish."""
    x = _floating("silu", x)
    return x * sigmoid(x)


def leaky_relu(x: Any, /, negative_slope: float = 0.01) -> Tensor:
    """``x`` where positive, else ``negative_slope * x``; the gradient at 0 is ``negative_slope``."""
    x = _floating("leaky_relu", x)
    return where(x > 0, x, negative_slope * x)


def elu(x: Any, /, alpha: float = 1.0) -> Tensor:
    """``x`` where positive, else ``alpha * (exp(x) - 1)``; the gradient at 0 is ``alpha``."""
    x = _floating("elu", x)
    return where(x > 0, x, alpha * expm1(minimum(x, 0)))


def softsign(x: Any, /) -> Tensor:
    """``x / (1 + |x|)``."""
    x = _floating("softsign", x)
    return x / (1 + abs(x))


def log_sigmoid(x: Any, /) -> Tensor:
    """``log(sigmoid(x))``, without overflow."""
    return -softplus(-_floating("log_sigmoid", x))
