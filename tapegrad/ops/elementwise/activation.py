"""Activation functions and the error function.

Primitives are those whose derivative, accuracy or speed a composite would lose; the fuser makes one kernel of the rest.
In half types each function is computed in float32 and rounded once, and so is each derivative.
"""

from __future__ import annotations

from tapegrad.core.primitive import Primitive, Sample, elementwise, general
from tapegrad.core.state import unrecorded
from tapegrad.device.dtypes import in_float
from tapegrad.device.numerics import special
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import TapegradError
from tapegrad.ops.apply import barrier, same_params
from tapegrad.ops.dispatch import curve, in_float32, infer_real, infer_same, no_bool, promote, real_float, unary
from tapegrad.ops.elementwise import _erf
from tapegrad.ops.elementwise.arithmetic import abs, maximum, minimum, reciprocal, square
from tapegrad.ops.elementwise.comparison import round
from tapegrad.ops.elementwise.complex import imag, real
from tapegrad.ops.elementwise.exponential import exp, expm1, log1p
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.elementwise.sigmoid import logistic, logistic_of, sigmoid
from tapegrad.tensor import Tensor, TensorLike

_TWO_OVER_SQRT_PI = 1.1283791670955126
_ROOT_OVER_TWO_PI = 0.3989422804014327
_GELU_A, _GELU_B = 1.5957691216057308, 0.07135481627260025  # sqrt(8 / pi), and 0.044715 times that
_TURN = 6.283185307179586
_FAR = 800.0  # beyond it e**-x is 0 in every dtype


def _between(x: Tensor, bound: float) -> Tensor:
    """``x`` held within the bound, so that an infinity meets no 0."""
    return maximum(minimum(x, bound), -bound)


def _silu_of(xp: Namespace, x: Array) -> Array:
    return xp.maximum(x, -_FAR) * logistic_of(xp, x)


def _silu_slope(x: Tensor) -> Tensor:
    x = _between(x, _FAR)
    return logistic(x) * (1 + x * logistic(-x))


_real_silu = curve(
    "silu", _silu_slope, formula=_silu_of, cxx="tg_silu({x})", domain=(-4.0, 4.0), infer=infer_real("silu"),
    to=real_float("silu"), doc="``x * sigmoid(x)``, also called swish.",
)  # fmt: skip


def _mish_of(xp: Namespace, x: Array) -> Array:
    # tanh(log(1 + e)) = n / (n + 2) for n = e * (e + 2), which is 1 where e is cut.
    e = xp.exp(xp.minimum(x, 20 if x.dtype.itemsize == 4 else 40))
    n = (e + 2) * e
    return xp.maximum(x, -_FAR) * (n / (n + 2))


def _mish_slope(x: Tensor) -> Tensor:
    x = _between(x, _FAR)
    s, r = logistic(x), logistic(-x)
    below = reciprocal(1 + square(r))
    return s * (1 + r) * below + 4 * x * s * square(r * below)


mish = curve(
    "mish", _mish_slope, formula=_mish_of, cxx="tg_mish({x})", domain=(-4.0, 4.0), infer=infer_real("mish"),
    to=real_float("mish"), module="tapegrad.nn.functional", doc="``x * tanh(softplus(x))`` (Misra, 2019).",
)  # fmt: skip


def _softsign_of(xp: Namespace, x: Array) -> Array:
    near = xp.maximum(xp.minimum(x, 1e30), -1e30)
    return near / (xp.abs(near) + 1)


softsign = curve(
    "softsign", lambda x: square(reciprocal(1 + abs(x))), formula=_softsign_of, cxx="tg_softsign({x})",
    to=real_float("softsign"), doc="``x / (1 + |x|)``.",
)  # fmt: skip


def _softplus_of(xp: Namespace, x: Array) -> Array:
    # Above the cut, e**-x is less than half an ulp of x, and x itself is the answer; below, e**x does not overflow.
    return xp.maximum(xp.log1p(xp.exp(xp.minimum(x, 20 if x.dtype.itemsize == 4 else 40))), x)


_real_softplus = curve(
    "softplus", lambda x: logistic(x), formula=_softplus_of, cxx="tg_softplus({x})", domain=(-4.0, 4.0),
    infer=infer_real("softplus"), to=real_float("softplus"), doc="``log(1 + exp(x))``, without overflow.",
)  # fmt: skip


def softplus(x: TensorLike) -> Tensor:
    """Return ``log(1 + exp(x))``, without overflow; of complex numbers the principal value."""
    x = _floating("softplus", x)
    if x.dtype.kind != "c":
        return _real_softplus(x)
    right = real(x) > 0
    result = where(right, x, 0) + log1p(exp(where(right, -x, x)))
    turns = unrecorded(lambda: round(imag(result) / _TURN))
    return result - 1j * (turns * _TURN)


relu_p = elementwise(
    "relu",
    widens=False,
    infer=infer_same,
    formula=lambda xp, x: xp.maximum(x, 0),
    partials=[lambda ct, out: where(out > 0, ct, 0)],
    operands=("x",),
    cxx="tg_max({x}, {type}(0))",
    doc="``max(x, 0)``; the gradient at 0 is 0.  Its rule reads the result, which the next layer keeps anyway.",
)
relu = unary(relu_p, no_bool("relu", ordered=True))

_real_erf = curve(
    "erf", lambda x: exp(-square(x)) * _TWO_OVER_SQRT_PI, formula=_erf.erf, infer=infer_real("erf"),
    to=real_float("erf"),
    doc="The error function, ``2 / sqrt(pi)`` times the integral of ``exp(-t * t)`` from 0 to ``x``.",
)  # fmt: skip

_real_erfc = curve(
    "erfc", lambda x: exp(-square(x)) * -_TWO_OVER_SQRT_PI, formula=_erf.erfc, infer=infer_real("erfc"),
    to=real_float("erfc"), costly=True, doc="``1 - erf(x)``, precise for large ``x``.",
)  # fmt: skip


def _complex_error_function(name: str, sign: float) -> Primitive:
    """Declare ``erf`` or ``erfc`` of complex numbers by SciPy: entire functions."""
    return general(
        f"complex_{name}",
        impl=lambda xp, z: special.value(xp, name, (z,)),
        infer=lambda z: z,
        vjp=[lambda ct, z: ct * exp(-square(z)) * (sign * _TWO_OVER_SQRT_PI)],
        jvp=[lambda t, z: t * exp(-square(z)) * (sign * _TWO_OVER_SQRT_PI)],
        lift=same_params,
        samples=[Sample([[0.5 + 0.2j, -0.3 + 1.5j], [2.0 - 0.1j, 0.1j]])],
        doc=f"``{name}`` of complex numbers.",
    )


_complex_erf, _complex_erfc = _complex_error_function("erf", 1.0), _complex_error_function("erfc", -1.0)


def erf(x: TensorLike) -> Tensor:
    """Return the error function, ``2 / sqrt(pi)`` times the integral of ``exp(-t * t)`` from 0 to ``x``.

    Complex numbers are computed by SciPy (on the host, also for a GPU's).
    """
    x = _floating("erf", x)
    return barrier(_complex_erf, x) if x.dtype.kind == "c" else _real_erf(x)


def erfc(x: TensorLike) -> Tensor:
    """Return ``1 - erf(x)``, precise for large ``x``; of complex numbers as :func:`erf`."""
    x = _floating("erfc", x)
    return barrier(_complex_erfc, x) if x.dtype.kind == "c" else _real_erfc(x)


def _bell(x: Tensor) -> Tensor:
    """The normal distribution's density."""
    return exp(square(x) * -0.5) * _ROOT_OVER_TWO_PI


def _gelu_curve(x: Tensor) -> Tensor:
    x = _between(x, 40.0)  # where the density is 0 in every dtype
    return (2 - square(x)) * _bell(x)


_gelu_slope = curve(
    "gelu_slope", _gelu_curve, formula=_erf.gelu_slope, cxx="tg_gelu_slope({x})", domain=(-4.0, 4.0),
    infer=infer_real("gelu_slope"), to=real_float("gelu"), doc="The derivative of ``gelu``.",
)  # fmt: skip

_exact_gelu = curve(
    "gelu", lambda x: _gelu_slope(x), formula=_erf.gelu, cxx="tg_gelu({x})", domain=(-4.0, 4.0),
    infer=infer_real("gelu"), to=real_float("gelu"),
    doc="``x * Phi(x)``, Phi the normal distribution's cumulative function; the tail keeps its relative precision.",
)  # fmt: skip


def _gelu_tanh_of(xp: Namespace, x: Array) -> Array:
    near = xp.maximum(xp.minimum(x, 40.0), -40.0)  # beyond which the factor is 0 or 1 in every dtype
    return xp.maximum(x, -40.0) * logistic_of(xp, (xp.square(near) * _GELU_B + _GELU_A) * near)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    x = _between(x, 40.0)
    inner = x * (_GELU_A + _GELU_B * square(x))
    return logistic(inner) * (1 + x * (_GELU_A + 3 * _GELU_B * square(x)) * logistic(-inner))


_tanh_gelu = curve(
    "gelu_tanh", _gelu_tanh_slope, formula=_gelu_tanh_of, cxx="tg_gelu_tanh({x})", domain=(-4.0, 4.0),
    infer=infer_real("gelu_tanh"), to=real_float("gelu"),
    doc="``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3)))``.",
)  # fmt: skip


def _floating(op: str, x: TensorLike) -> Tensor:
    return promote(op, (x,), in_float)[0]


def gelu(x: TensorLike, *, approximate: str = "none") -> Tensor:
    """``x`` times the normal distribution's cumulative function (Hendrycks and Gimpel, 2016).

    ``approximate="tanh"``: their approximation ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3)))``.
    Raises TapegradError for another value of ``approximate``, DTypeError for complex numbers.
    """
    if approximate == "none":
        return _exact_gelu(x)
    if approximate != "tanh":
        raise TapegradError(f'gelu: approximate must be "none" or "tanh", got {approximate!r}')
    return _tanh_gelu(x)


def silu(input: TensorLike) -> Tensor:
    """``input * sigmoid(input)``, also called swish."""
    input = _floating("silu", input)
    return input * sigmoid(input) if input.dtype.kind == "c" else _real_silu(input)


@in_float32
def leaky_relu(x: TensorLike, negative_slope: float = 0.01) -> Tensor:
    """``x`` where positive, else ``negative_slope * x``; the gradient at 0 is ``negative_slope``."""
    (x,) = promote("leaky_relu", (x,), real_float("leaky_relu"))
    return where(x > 0, x, negative_slope * x)


@in_float32
def elu(x: TensorLike, alpha: float = 1.0) -> Tensor:
    """``x`` where positive, else ``alpha * (exp(x) - 1)``; the gradient at 0 is ``alpha``."""
    (x,) = promote("elu", (x,), real_float("elu"))
    return where(x > 0, x, alpha * expm1(minimum(x, 0)))


def log_sigmoid(x: TensorLike) -> Tensor:
    """``log(sigmoid(x))``, without overflow."""
    return -softplus(-_floating("log_sigmoid", x))
