"""Error functions, with the Faddeeva function, which is complex; the normal distribution's, and the logistic ones."""

from __future__ import annotations

import math

from tapegrad.core.primitive import Sample
from tapegrad.device import dtypes
from tapegrad.device.numerics import special
from tapegrad.device.types import DType
from tapegrad.ops import erf, erfc, exp, expm1, log, log1p, log_sigmoid, sigmoid, square, where
from tapegrad.ops.dispatch import barrier, promote
from tapegrad.special._declare import barrier_of, pointwise, together
from tapegrad.special._series import horner
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "dawsn", "erf", "erfc", "erfcinv", "erfcx", "erfi", "erfinv", "expit", "log1mexp", "log_expit", "log_ndtr",
    "logit", "ndtr", "ndtri", "wofz",
]  # fmt: skip

_HALF_SQRT_PI = math.sqrt(math.pi) / 2
_TWO_OVER_SQRT_PI = 2 / math.sqrt(math.pi)
_SQRT_TWO_PI = math.sqrt(2 * math.pi)

erfinv = pointwise(
    "erfinv", [lambda out: _HALF_SQRT_PI * exp(square(out))], cxx="erfinv({x})", domain=(-0.9, 0.9),
    doc="The inverse of ``erf``: infinite at -1 and 1, where the gradient is inf.",
)  # fmt: skip
erfcinv = pointwise(
    "erfcinv", [lambda out: -_HALF_SQRT_PI * exp(square(out))], cxx="erfcinv({x})", domain=(0.1, 1.9),
    doc="The inverse of ``erfc``: infinite at 0 and 2, where the gradient is -inf.",
)  # fmt: skip


def _tail(x: Tensor, terms: list[float]) -> Tensor:
    """``sum of terms[k] / x**(2 k + 2)``."""
    y = 1 / square(x)
    return y * horner(terms, y)


_FAR = 25.0
_ERFCX_FAR = [(-1) ** (k + 1) * math.prod(range(1, 2 * k + 2, 2)) / 2.0**k for k in range(8)]
_DAWSN_FAR = [-math.prod(range(1, 2 * k + 2, 2)) / 2.0 ** (k + 1) for k in range(8)]


def _erfcx_slope(out: Tensor, x: Tensor) -> Tensor:
    """``2 x erfcx(x) - 2 / sqrt(pi)``, by its asymptotic series where that cancels."""
    far = x > _FAR
    series = _tail(where(far, x, _FAR), _ERFCX_FAR) * (_TWO_OVER_SQRT_PI / 2)
    near = where(far, 0.0, x)
    return where(far, series, 2 * near * where(far, 1.0, out) - _TWO_OVER_SQRT_PI)


erfcx = pointwise("erfcx", [_erfcx_slope], cxx="erfcx({x})", doc="``exp(x * x) * erfc(x)``, without overflow.")
erfi = pointwise("erfi", [lambda x: _TWO_OVER_SQRT_PI * exp(square(x))], doc="``-i * erf(i x)``.")


def _dawsn_slope(out: Tensor, x: Tensor) -> Tensor:
    far = (x > _FAR) | (x < -_FAR)
    return where(far, _tail(where(far, x, _FAR), _DAWSN_FAR), 1 - 2 * where(far, 0.0, x) * where(far, 0.0, out))


dawsn = pointwise("dawsn", [_dawsn_slope], doc="Dawson's integral, ``sqrt(pi) / 2 * exp(-x * x) * erfi(x)``.")
ndtr = pointwise(
    "ndtr", [lambda x: exp(-0.5 * square(x)) * (1 / _SQRT_TWO_PI)], cxx="normcdf({x})",
    doc="The normal distribution's cumulative function.",
)  # fmt: skip
ndtri = pointwise(
    "ndtri", [lambda out: _SQRT_TWO_PI * exp(0.5 * square(out))], cxx="normcdfinv({x})", domain=(0.1, 0.9),
    doc="The inverse of ``ndtr``: infinite at 0 and 1, where the gradient is inf.",
)  # fmt: skip


def _mills(x: Tensor) -> Tensor:
    """The density over the cumulative function; left of 0, where both vanish, by ``erfcx``."""
    left = x < 0
    low, high = where(left, x, 0.0), where(left, 0.0, x)
    below = math.sqrt(2 / math.pi) / erfcx(low * -math.sqrt(0.5))
    return where(left, below, exp(-0.5 * square(high)) / (_SQRT_TWO_PI * ndtr(high)))


log_ndtr = pointwise("log_ndtr", [_mills], domain=(-4.0, 2.0), doc="``log(ndtr(x))``, precise far left, too.")


def _logit_slope(x: Tensor) -> Tensor:
    return where((x >= 0) & (x <= 1), 1 / (x * (1 - x)), float("nan"))


logit = pointwise(
    "logit", [_logit_slope], cxx="tg_logit({x})", domain=(0.1, 0.9),
    doc="``log(x / (1 - x))``: infinite at 0 and 1, where the gradient is inf; NaN outside.",
)  # fmt: skip
expit = sigmoid
log_expit = log_sigmoid


def log1mexp(x: float | Tensor) -> Tensor:
    """``log(1 - exp(-x))`` for ``x > 0``, precise near 0 and far from it (Maechler 2012); -inf at 0, gradient inf.

    The name is jax.nn's.
    """
    (x,) = together("log1mexp", (x,))
    near = x < math.log(2)
    return where(near, log(-expm1(-where(near, x, 1.0))), log1p(-exp(-where(near, 1.0, x))))


_wofz_p = barrier_of(
    "wofz",
    ("z",),
    lambda xp, z: special.value(xp, "wofz", (z,)),
    [lambda out, z: -2 * z * out + 2j / math.sqrt(math.pi)],
    [Sample([[0.5 + 0.2j, -0.3 + 1.5j], [2.0 - 0.1j, 0.1j]])],
    "``exp(-z * z) * erfc(-i z)``.",
)


def wofz(z: TensorLike) -> Tensor:
    """The Faddeeva function ``exp(-z * z) * erfc(-i z)`` of complex numbers (SciPy's ``wofz``); holomorphic.

    Real numbers are made complex.
    """

    def to(dtype: DType) -> DType:
        dtype = dtypes.in_float(dtype)
        if dtype.kind == "c":
            return dtype
        return dtypes.complex128 if dtype.itemsize > 4 else dtypes.complex64

    return barrier(_wofz_p, *promote("wofz", (z,), to))
