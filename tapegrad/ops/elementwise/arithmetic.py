"""Arithmetic of elements.  Partials: see ``primitive.elementwise``.

At ties ``maximum`` and ``minimum`` give the whole gradient to the first operand; ``abs`` and ``sign`` have gradient 0
at 0 (all as TensorFlow does).
"""

from __future__ import annotations

from tapegrad.core.primitive import elementwise
from tapegrad.device import dtypes
from tapegrad.device.types import DType
from tapegrad.ops.dispatch import (
    bind,
    cast,
    curve,
    infer_same,
    no_bool,
    of_two,
    own,
    promote,
    tensor,
    unary,
    whole_in_float64,
)
from tapegrad.ops.elementwise.comparison import equal, logical_and
from tapegrad.ops.elementwise.comparison import round as rint
from tapegrad.ops.elementwise.complex import conj, imag, real
from tapegrad.ops.elementwise.selection import where
from tapegrad.tensor import Tensor, TensorLike, identity_of

add = of_two("add", [1, 1], cxx="tg_plus({x}, {y})", doc="``x + y``.")
subtract = of_two("subtract", [1, -1], cxx="tg_minus({x}, {y})", to=no_bool("subtract"), doc="``x - y``.")
multiply = of_two(
    "multiply",
    [lambda y: y, lambda x: x],
    widens=False,
    cxx="tg_times({x}, {y})",
    doc="``x * y``.",
)

divide = of_two(
    "divide",
    [lambda ct, y: ct / y, lambda ct, out, y: ct * (out / -y)],
    cxx="{x} / {y}",
    domain=(0.5, 2.0),
    doc="``x / y``; integers are divided in float64.",
    to=whole_in_float64,
)

negative = curve("negative", -1, exact=True, cxx="tg_negate({x})", to=no_bool("negative"), doc="``-x``.")
positive = curve("positive", 1, exact=True, cxx="{x}", to=no_bool("positive"), doc="``+x``.")

sign_p = elementwise("sign", infer=infer_same, partials=[0], cxx="tg_sign({x})", doc="-1, 0 or 1; gradient 0.")
_real_sign = unary(sign_p, no_bool("sign"))


def _turned(g: Tensor, out: Tensor, x: Tensor) -> Tensor:
    """The part of a (co)tangent perpendicular to ``out``, the direction of ``x``, over ``abs(x)``: self-adjoint."""
    r = abs(x)
    return where(r == 0, 0, (g - out * real(conj(out) * g)) / where(r == 0, 1, r))


complex_sign_p = elementwise(
    "complex_sign",
    infer=infer_same,
    ufunc="sign",
    partials=[lambda ct, out, x: _turned(ct, out, x)],
    jvp=[lambda t, out, x: _turned(t, out, x)],
    cxx="tg_sign({x})",
    holomorphic=False,
)


def sign(x: TensorLike) -> Tensor:
    """-1, 0 or 1, with gradient 0; of complex numbers ``x / abs(x)`` (0 at 0, where its gradient is 0)."""
    x = tensor("sign", x)
    return bind(complex_sign_p, x) if x.dtype.kind == "c" else _real_sign(x)


sign.primitive = sign_p  # type: ignore[attr-defined]


abs_p = elementwise(
    "abs",
    infer=lambda x: x.with_dtype(dtypes.real_of(x.dtype)),
    ufunc="absolute",
    widens=False,
    partials=[lambda x: sign(x)],
    jvp=[lambda t, x: real(conj(sign(x)) * t)],
    cxx="tg_abs({x})",
    doc="Magnitude; the gradient at 0 is 0.",
)
abs = unary(abs_p)


def _to_number(dtype: DType) -> DType:
    """Return int8 for bool, as NumPy's ``square`` does."""
    return dtypes.int8 if dtype.kind == "b" else dtype


square = curve("square", lambda x: 2 * x, exact=True, cxx="tg_times({x}, {x})", to=_to_number, doc="``x * x``.")


def squared_size(x: Tensor) -> Tensor:
    """``abs(x) ** 2``, smooth at 0, too."""
    return square(real(x)) + square(imag(x)) if x.dtype.kind == "c" else square(x)


reciprocal = curve(
    "reciprocal", lambda ct, out: -(ct * out) * out, exact=True, cxx="{out_type}(1) / {x}", domain=(0.5, 2.0),
    to=whole_in_float64, doc="``1 / x``.",
)  # fmt: skip


def both_zero(x: Tensor, y: Tensor) -> Tensor:
    """Where both are 0."""
    return logical_and(equal(x, 0), equal(y, 0))


def _half_over(ct: Tensor, out: Tensor) -> Tensor:
    """``ct / (2 out)``, but 0 / 0 is 0 (and makes no warning)."""
    return 0.5 * ct / where(both_zero(ct, out), 1, out)


sqrt = curve(
    "sqrt", _half_over, exact=True, cxx="sqrt({x})", domain=(0.2, 3.0),
    doc="Square root; the gradient at 0 is inf, but 0 where the cotangent is: ``where(x > 0, sqrt(x), 0)`` is safe.",
)  # fmt: skip


def root_of_squares(x: Tensor) -> Tensor:
    """The square root of a sum of squares: its gradient at 0 is 0, the smallest subgradient of a norm."""
    zero = equal(x, 0)
    return where(zero, 0, sqrt(where(zero, 1, x)))


maximum = of_two(
    "maximum",
    [lambda ct, x, y: where(x >= y, ct, 0), lambda ct, x, y: where(x >= y, 0, ct)],
    widens=False,
    cxx="tg_max({x}, {y})",
    doc="The larger element (NaN if either is); a tie gives the whole gradient to ``x``.",
)

minimum = of_two(
    "minimum",
    [lambda ct, x, y: where(x <= y, ct, 0), lambda ct, x, y: where(x <= y, 0, ct)],
    widens=False,
    cxx="tg_min({x}, {y})",
    doc="The smaller element (NaN if either is); a tie gives the whole gradient to ``x``.",
)

floor_divide = of_two(
    "floor_divide", [0, 0], cxx="tg_floordiv({x}, {y})", domain=(0.5, 2.0), exact=False, costly=True,
    to=no_bool("floor_divide", ordered=True), doc="``floor(x / y)``; gradient 0.",
)  # fmt: skip

remainder = of_two(
    "remainder",
    [1, lambda ct, x, y: -ct * floor_divide(x, y)],
    exact=False,
    costly=True,
    cxx="tg_remainder({x}, {y})",
    domain=(0.5, 2.0),
    doc="``x - floor(x / y) * y``, with the sign of ``y``.",
    to=no_bool("remainder", ordered=True),
)


def round(a: TensorLike, decimals: int = 0) -> Tensor:
    """``a`` rounded to ``decimals`` digits after the point (negative: before it), halves to even; gradient 0.

    As NumPy's ``round``: scaled by a power of ten, rounded, scaled back.
    """
    if not decimals:
        return rint(a)
    a = tensor("round", a)
    if a.dtype.kind == "c":
        return round(real(a), decimals) + 1j * round(imag(a), decimals)
    if not dtypes.is_inexact(a.dtype):
        return identity_of(a) if decimals > 0 else cast(rint(divide(a, 10.0**-decimals)) * 10.0**-decimals, a.dtype)
    if decimals > 0:
        return divide(rint(multiply(a, 10.0**decimals)), 10.0**decimals)
    return multiply(rint(divide(a, 10.0**-decimals)), 10.0**-decimals)


def clip(
    a: TensorLike, min: TensorLike | None = None, max: TensorLike | None = None, *,
    a_min: TensorLike | None = None, a_max: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """``a`` held within ``[min, max]`` (None: no bound), in the dtype of ``a``; the gradient passes at both bounds.

    a_min, a_max: NumPy's older names for the bounds.
    """
    min, max = a_min if min is None else min, a_max if max is None else max
    (out,) = promote("clip", (a,))
    if min is not None:
        out = maximum(out, min)
    if max is not None:
        out = minimum(out, max)
    return own(out, a)
