"""Bessel functions.  None has a gradient in its order: asking for one raises NoGradientError."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

from tapegrad.core.primitive import Primitive, Sample
from tapegrad.device.dtypes import accumulator
from tapegrad.device.numerics import special
from tapegrad.ops import abs, exp, sign, sqrt, where
from tapegrad.ops.dispatch import barrier, cast
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
i0e = pointwise(
    "i0e", [lambda out, x: _scaled_slope(0, abs(x), out, x, lambda out, x: i1e(x) - sign(x) * out)],
    doc="``exp(-|x|) * i0(x)``; the gradient at 0 is 0.",
)  # fmt: skip
i1e: Function = pointwise(
    "i1e", [lambda out, x: _scaled_slope(1, abs(x), out, x, lambda out, x: i0e(x) - sign(x) * out - _i1e_over(x))],
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
k0e = pointwise(
    "k0e", [lambda out, x: _scaled_slope(0, -x, out, x, lambda out, x: out - k1e(x))], domain=_POSITIVE,
    doc="``exp(x) * k0(x)``.",
)  # fmt: skip
k1e: Function = pointwise(
    "k1e", [lambda out, x: _scaled_slope(1, -x, out, x, lambda out, x: out - k0e(x) - out / x)], domain=_POSITIVE,
    doc="``exp(x) * k1(x)``.",
)  # fmt: skip


def _debye(count: int) -> list[list[float]]:
    """The polynomials ``P`` in ``s = x**2 / r**2``, where ``r**2 = x**2 + v**2``, of the expansion for large ``r``

        x I'(x) / I(x) = r + P[0](s) + P[1](s) / r + P[2](s) / r**2 + ...,

    which solves ``x y' + y**2 = r**2``, Bessel's equation for ``y = x I' / I``; that of ``K`` has ``-r`` for ``r``.
    """
    all_of = [[1.0]]
    for m in range(1, count + 1):
        last = [*all_of[-1], 0.0]
        terms = [2 * j * c + (4 - m - 2 * j) * d for j, (c, d) in enumerate(zip(last, [0.0, *last]))]
        for first, second in zip(all_of[1:], reversed(all_of[1:])):
            for (i, c), (j, d) in product(enumerate(first), enumerate(second)):
                terms[i + j] += c * d
        all_of.append([-0.5 * t for t in terms])
    return all_of[1:]


_LARGE, _DEBYE = 50.0, _debye(12)


def _scaled_slope(
    v: Tensor | int, w: Tensor, out: Tensor, x: Tensor, formula: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The derivative ``formula(out, x)`` of ``ive`` (``w = abs(x)``) or ``kve`` (``w = -x``) of order ``v``.

    For large ``x``, where its terms cancel to ``out / x``, it is ``out`` times the series of ``ive' / ive`` or that of
    ``kve' / kve``.
    """
    large = abs(x) > _LARGE
    w = cast(where(large, w, 1), accumulator(x.dtype))  # float16 does not hold the coefficients
    ratio = v / w
    s = 1 / (1 + ratio * ratio)
    rest = v * ratio / (1 + sqrt(1 + ratio * ratio)) + horner([horner(p, s) for p in _DEBYE], sqrt(s) / w)
    near = formula(where(large, 0, out), where(large, 1, x))
    return where(large, out * (cast(rest, x.dtype) / where(large, x, 1)), near)


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
        return slope(lambda order, x=x: barrier(prim, order, x), v, x, out)

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
ive = _of_order(
    "ive",
    lambda f, v, x, out: _scaled_slope(
        v, abs(x), out, x, lambda out, x: (f(v - 1, x) + f(v + 1, x)) * 0.5 - sign(x) * out
    ),
    "``exp(-|x|) * iv(v, x)``.",
)
kv = kn = _of_order(
    "kv", lambda f, v, x, out: (f(v - 1) + f(v + 1)) * -0.5,
    "Modified Bessel function of the second kind of real order.",
)  # fmt: skip
kve = _of_order(
    "kve",
    lambda f, v, x, out: _scaled_slope(v, -x, out, x, lambda out, x: out - (f(v - 1, x) + f(v + 1, x)) * 0.5),
    "``exp(x) * kv(v, x)``.",
)
