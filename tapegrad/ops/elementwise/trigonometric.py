"""Circular and hyperbolic functions and their inverses."""

from __future__ import annotations

from tapegrad.ops.dispatch import Binary, Unary, curve, of_two, real_float
from tapegrad.ops.elementwise.arithmetic import reciprocal, sqrt, square
from tapegrad.tensor import Tensor


def _one_less_square(x: Tensor) -> Tensor:
    """``1 - x**2``, precise near 1."""
    return (1 - x) * (1 + x)


def _over_square(x: Tensor, size: Tensor) -> Tensor:
    """``x / size**2``, where the square may be too large or too small for the dtype."""
    return x / size / size


sin: Unary = curve("sin", lambda x: cos(x), doc="Sine.")
cos: Unary = curve("cos", lambda x: -sin(x), doc="Cosine.")
tan = curve("tan", lambda out: 1 + out * out, domain=(-1.0, 1.0), doc="Tangent.")
asin = curve(
    "asin", lambda x: reciprocal(sqrt(_one_less_square(x))), ufunc="arcsin", domain=(-0.8, 0.8), doc="Inverse sine."
)
acos = curve(
    "acos", lambda x: -reciprocal(sqrt(_one_less_square(x))), ufunc="arccos", domain=(-0.8, 0.8), doc="Inverse cosine."
)
atan = curve("atan", lambda x: reciprocal(1 + square(x)), ufunc="arctan", doc="Inverse tangent.")

atan2 = of_two(
    "atan2",
    [lambda x, y: _over_square(y, hypot(x, y)), lambda x, y: -_over_square(x, hypot(x, y))],
    ufunc="arctan2",
    exact=False,
    cxx="atan2({x}, {y})",
    domain=(0.3, 2.0),
    doc="The angle of the point with ordinate ``x`` and abscissa ``y``.",
    to=real_float("atan2"),
)

sinh: Unary = curve("sinh", lambda x: cosh(x), doc="Hyperbolic sine.")
cosh: Unary = curve("cosh", lambda x: sinh(x), doc="Hyperbolic cosine.")
asinh = curve(
    "asinh", lambda x: reciprocal(sqrt(1 + square(x)) if x.dtype.kind == "c" else hypot(x, 1)), ufunc="arcsinh",
    doc="Inverse hyperbolic sine.",
)  # fmt: skip
acosh = curve(
    "acosh", lambda x: reciprocal(sqrt(x - 1) * sqrt(x + 1)), ufunc="arccosh", domain=(1.2, 3.0),
    doc="Inverse hyperbolic cosine.",
)  # fmt: skip
atanh = curve(
    "atanh", lambda x: reciprocal(_one_less_square(x)), ufunc="arctanh", domain=(-0.8, 0.8),
    doc="Inverse hyperbolic tangent.",
)  # fmt: skip

hypot: Binary = of_two(
    "hypot", [lambda out, x: x / out, lambda out, y: y / out], cxx="hypot({x}, {y})", domain=(0.3, 2.0), exact=False,
    costly=True, to=real_float("hypot"), doc="``sqrt(x*x + y*y)`` without overflow.",
)  # fmt: skip
