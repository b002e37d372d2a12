"""Bessel functions.  None has a gradient in its order: asking for one raises NoGradientError."""

from __future__ import annotations

import math
from collections.abc import Callable

from tapegrad.core.primitive import Primitive, Sample
from tapegrad.device.numerics import special
from tapegrad.ops import abs, exp, sign
from tapegrad.ops.dispatch import barrier
from tapegrad.special._declare import Function, barrier_of, pointwise, with_order
from tapegrad.special._series import horner, near_zero
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "i0", "i0e", "i1", "i1e", "iv", "ive", "j0", "j1", "jn", "jv", "k0", "k0e", "k1", "k1e", "kn", "kv", "kve", "y0",
    "y1", "yn", "yv",
]  # fmt: skip

_TERMS = [1 / (2 * math.factorial(k) * math.factorial(k + 1)) for k in range(12)]
_ALTERNATING = [c * (-1) ** k for k, c in enumerate(_TERMS)]
_POSITIVE = (0.3, 4.0)

i0 = pointwise("i0", [lambda x: i1(x)], cxx="cyl_bessel_i0({x})", doc="Modified Bessel function of order 0.")
i1: Function = pointwise(
    "i1", [lambda x: i0(x) - _i1_over(x)], cxx="cyl_bessel_i1({x})",
    doc="Modified Bessel function of order 1; the gradient at 0 is 1/2.",
)  # fmt: skip
i0e = pointwise("i0e", [lambda out, x: i1e(x) - sign(x) * out], doc="``exp(-|x|) * i0(x)``; the gradient at 0 is 0.")
i1e: Function = pointwise(
    "i1e", [lambda out, x: i0e(x) - sign(x) * out - _i1e_over(x)],
    doc="``exp(-|x|) * i1(x)``; the gradient at 0 is 1/2.",
)  # fmt: skip
j0 = pointwise("j0", [lambda x: -j1(x)], cxx="tg_bessel_j0({x})", doc="Bessel function of the first kind of order 0.")
j1: Function = pointwise(
    "j1", [lambda x: j0(x) - _j1_over(x)], cxx="tg_bessel_j1({x})",
    doc="Bessel function of the first kind of order 1; the gradient at 0 is 1/2.",
)  # fmt: skip
y0 = pointwise(
    "y0", [lambda x: -y1(x)], cxx="tg_bessel_y0({x})", domain=_POSITIVE,
    doc="Bessel function of the second kind of order 0: -inf at 0, NaN left of it.",
)  # fmt: skip
y1: Function = pointwise(
    "y1", [lambda out, x: y0(x) - out / x], cxx="tg_bessel_y1({x})", domain=_POSITIVE,
    doc="Bessel function of the second kind of order 1: -inf at 0, NaN left of it.",
)  # fmt: skip
k0 = pointwise(
    "k0", [lambda x: -k1(x)], domain=_POSITIVE, doc="Modified Bessel function of the second kind of order 0: inf at 0."
)
k1: Function = pointwise(
    "k1", [lambda out, x: -k0(x) - out / x], domain=_POSITIVE,
    doc="Modified Bessel function of the second kind of order 1: inf at 0.",
)  # fmt: skip
k0e = pointwise("k0e", [lambda out, x: out - k1e(x)], domain=_POSITIVE, doc="``exp(x) * k0(x)``.")
k1e: Function = pointwise("k1e", [lambda out, x: out - k0e(x) - out / x], domain=_POSITIVE, doc="``exp(x) * k1(x)``.")


def _i1_over(x: Tensor) -> Tensor:
    """``i1(x) / x``, by its series near 0."""
    return near_zero(x, 2.0, lambda z: horner(_TERMS, z * z * 0.25), lambda z: i1(z) / z)


def _i1e_over(x: Tensor) -> Tensor:
    return near_zero(x, 2.0, lambda z: exp(-abs(z)) * horner(_TERMS, z * z * 0.25), lambda z: i1e(z) / z)


def _j1_over(x: Tensor) -> Tensor:
    return near_zero(x, 2.0, lambda z: horner(_ALTERNATING, z * z * 0.25), lambda z: j1(z) / z)


def _of_order(name: str, slope: Callable[..., Tensor], doc: str, first: float = 0.7) -> Function:
    """Declare a function of an order and an argument; ``slope(f, v, x, out)``: its derivative in the argument."""

    def partial(out: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return slope(lambda order: barrier(prim, order, x), v, x, out)

    prim: Primitive = barrier_of(
        name,
        ("v", "x"),
        lambda xp, v, x: special.value(xp, name, (v, x)),
        [None, partial],
        [Sample([[first], [2.0]], (2, 3), domain=(0.5, 3.0)), Sample(2.0, 1.5), Sample((1, 3), (0, 3))],
        doc,
    )

    def op(v: TensorLike, x: TensorLike) -> Tensor:
        return barrier(prim, *with_order(name, v, x))

    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"{doc}\n\nv: the order, which has no gradient; x: the argument; they broadcast."
    return op


jv = jn = _of_order(
    "jv", lambda f, v, x, out: (f(v - 1) - f(v + 1)) * 0.5, "Bessel function of the first kind of real order."
)
yv = _of_order(
    "yv", lambda f, v, x, out: (f(v - 1) - f(v + 1)) * 0.5, "Bessel function of the second kind of real order."
)
yn = _of_order(
    "yn", lambda f, v, x, out: f(v - 1) - v * out / x, "Bessel function of the second kind of integer order.", 1.0
)
iv = _of_order("iv", lambda f, v, x, out: (f(v - 1) + f(v + 1)) * 0.5, "Modified Bessel function of real order.")
ive = _of_order("ive", lambda f, v, x, out: (f(v - 1) + f(v + 1)) * 0.5 - sign(x) * out, "``exp(-|x|) * iv(v, x)``.")
kv = kn = _of_order(
    "kv", lambda f, v, x, out: (f(v - 1) + f(v + 1)) * -0.5,
    "Modified Bessel function of the second kind of real order.",
)  # fmt: skip
kve = _of_order("kve", lambda f, v, x, out: out - (f(v - 1) + f(v + 1)) * 0.5, "``exp(x) * kv(v, x)``.")
