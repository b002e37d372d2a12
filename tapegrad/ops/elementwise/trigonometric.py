"""Circular and hyperbolic functions and their inverses."""

from __future__ import annotations

from tapegrad.core.primitive import elementwise
from tapegrad.device.dtypes import in_float
from tapegrad.ops.dispatch import Unary, binary, infer_same, real_float, unary
from tapegrad.ops.elementwise.arithmetic import reciprocal, sqrt, square

sin_p = elementwise("sin", infer=infer_same, exact=False, partials=[lambda x: cos(x)], cxx="sin({x})", doc="Sine.")
sin: Unary = unary(sin_p, in_float)

cos_p = elementwise("cos", infer=infer_same, exact=False, partials=[lambda x: -sin(x)], cxx="cos({x})", doc="Cosine.")
cos: Unary = unary(cos_p, in_float)

tan_p = elementwise(
    "tan", infer=infer_same, exact=False, partials=[lambda out: 1 + out * out], cxx="tan({x})", domain=(-1.0, 1.0),
    doc="Tangent.",
)  # fmt: skip
tan = unary(tan_p, in_float)

asin_p = elementwise(
    "asin", infer=infer_same, ufunc="arcsin", exact=False, partials=[lambda x: reciprocal(sqrt(1 - square(x)))],
    cxx="asin({x})", domain=(-0.8, 0.8), doc="Inverse sine.",
)  # fmt: skip
asin = unary(asin_p, in_float)

acos_p = elementwise(
    "acos", infer=infer_same, ufunc="arccos", exact=False, partials=[lambda x: -reciprocal(sqrt(1 - square(x)))],
    cxx="acos({x})", domain=(-0.8, 0.8), doc="Inverse cosine.",
)  # fmt: skip
acos = unary(acos_p, in_float)

atan_p = elementwise(
    "atan", infer=infer_same, ufunc="arctan", exact=False, partials=[lambda x: reciprocal(1 + square(x))],
    cxx="atan({x})", doc="Inverse tangent.",
)  # fmt: skip
atan = unary(atan_p, in_float)

atan2_p = elementwise(
    "atan2",
    infer=infer_same,
    ufunc="arctan2",
    exact=False,
    partials=[lambda x, y: y / (square(x) + square(y)), lambda x, y: -x / (square(x) + square(y))],
    operands=("x", "y"),
    cxx="atan2({x}, {y})",
    domain=(0.3, 2.0),
    doc="The angle of the point with ordinate ``x`` and abscissa ``y``.",
)
atan2 = binary(atan2_p, real_float("atan2"))

sinh_p = elementwise(
    "sinh", infer=infer_same, exact=False, partials=[lambda x: cosh(x)], cxx="sinh({x})", doc="Hyperbolic sine."
)
sinh: Unary = unary(sinh_p, in_float)

cosh_p = elementwise(
    "cosh", infer=infer_same, exact=False, partials=[lambda x: sinh(x)], cxx="cosh({x})", doc="Hyperbolic cosine."
)
cosh: Unary = unary(cosh_p, in_float)

asinh_p = elementwise(
    "asinh", infer=infer_same, ufunc="arcsinh", exact=False, partials=[lambda x: reciprocal(sqrt(1 + square(x)))],
    cxx="asinh({x})", doc="Inverse hyperbolic sine.",
)  # fmt: skip
asinh: Unary = unary(asinh_p, in_float)

acosh_p = elementwise(
    "acosh", infer=infer_same, ufunc="arccosh", exact=False, partials=[lambda x: reciprocal(sqrt(square(x) - 1))],
    cxx="acosh({x})", domain=(1.2, 3.0), doc="Inverse hyperbolic cosine.",
)  # fmt: skip
acosh: Unary = unary(acosh_p, in_float)

atanh_p = elementwise(
    "atanh", infer=infer_same, ufunc="arctanh", exact=False, partials=[lambda x: reciprocal(1 - square(x))],
    cxx="atanh({x})", domain=(-0.8, 0.8), doc="Inverse hyperbolic tangent.",
)  # fmt: skip
atanh = unary(atanh_p, in_float)

hypot_p = elementwise(
    "hypot", infer=infer_same, exact=False, partials=[lambda out, x: x / out, lambda out, y: y / out],
    operands=("x", "y"), costly=True,
    cxx="hypot({x}, {y})", domain=(0.3, 2.0), doc="``sqrt(x*x + y*y)`` without overflow.",
)  # fmt: skip
hypot = binary(hypot_p, real_float("hypot"))
