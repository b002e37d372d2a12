"""Angles, and complex numbers from and to their parts."""

from __future__ import annotations

import math
from numbers import Integral

from tapegrad.core.aval import ShapedArray, normalize_axis
from tapegrad.core.primitive import elementwise
from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import DTypeError
from tapegrad.ops.dispatch import bind, cast, curve, infer_same, promote, real_float, tensor
from tapegrad.ops.elementwise.arithmetic import abs, multiply, remainder
from tapegrad.ops.elementwise.comparison import equal, isnan, less, logical_and, signbit
from tapegrad.ops.elementwise.complex import imag, real
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.elementwise.trigonometric import atan2, cos, sin
from tapegrad.ops.reduce.cumulative import cumulative_sum, diff
from tapegrad.ops.reduce.reductions import all as all_of
from tapegrad.ops.shape.join import concat
from tapegrad.tensor import Tensor, TensorLike, identity_of

__all__ = ["angle", "deg2rad", "degrees", "polar", "rad2deg", "radians", "real_if_close", "sinc", "unwrap"]


def _infer_complex(x: ShapedArray, y: ShapedArray) -> ShapedArray:
    wide = dtypes.complex128 if x.dtype == dtypes.float64 else dtypes.complex64
    return infer_same(x, y, name="complex").with_dtype(wide)


def _run_complex(xp: Namespace, out: Array, x: Array, y: Array) -> None:
    xp.copyto(out.real, x)
    xp.copyto(out.imag, y)


complex_p = elementwise(
    "complex",
    widens=False,
    infer=_infer_complex,
    impl=_run_complex,
    partials=[lambda ct, x_aval: cast(real(ct), x_aval.dtype), lambda ct, y_aval: cast(-imag(ct), y_aval.dtype)],
    jvp=[lambda t, out_aval: cast(t, out_aval.dtype), lambda t, out_aval: 1j * cast(t, out_aval.dtype)],
    operands=("x", "y"),
    cxx="{out_type}({x}, {y})",
    doc="``x + 1j * y``.",
)


def complex_of(real: TensorLike, imag: TensorLike) -> Tensor:
    """The complex numbers ``real + 1j * imag`` (PyTorch's ``complex``): complex128 of float64, else complex64.

    Raises DTypeError for complex operands, ShapeError.
    """
    return bind(complex_p, *promote("complex", (real, imag), real_float("complex")))


def polar(abs: TensorLike, angle: TensorLike) -> Tensor:
    """The complex numbers of magnitude ``abs`` and phase ``angle`` (PyTorch's ``polar``).  Raises DTypeError."""
    r, phase = promote("polar", (abs, angle), real_float("polar"))
    return complex_of(r * cos(phase), r * sin(phase))


def angle(z: TensorLike, deg: bool = False) -> Tensor:
    """The phase of ``z``, in ``(-pi, pi]``, or in degrees (NumPy's ``angle``).

    Of real numbers 0 or pi, with gradient 0; the gradient at 0 is 0.
    """
    z = tensor("angle", z)
    if z.dtype.kind == "c":
        x, y = real(z), imag(z)
        zero = equal(z, 0)
        phase = atan2(where(zero, 0, y), where(zero, 1, x))
        turned = logical_and(zero, signbit(x))
        phase = where(logical_and(turned, signbit(y)), -math.pi, where(turned, math.pi, phase))
    else:
        z = cast(z, dtypes.in_float(z.dtype))
        phase = where(isnan(z), z, where(signbit(z), math.pi, cast(equal(z, z), z.dtype) * 0))
    return multiply(phase, 180 / math.pi) if deg else phase


def _scaled(op: str, x: TensorLike, over: float, under: float) -> Tensor:
    """``x * (over / under)``, the factor rounded to the dtype as NumPy rounds it; float16 is computed in float32."""
    (t,) = promote(op, (x,), real_float(op))
    kind = dtypes.accumulator(t.dtype)
    return cast(multiply(cast(t, kind), float(kind.type(over) / kind.type(under))), t.dtype)


def deg2rad(x: TensorLike) -> Tensor:
    """Degrees in radians.  Raises DTypeError for complex."""
    return _scaled("deg2rad", x, math.pi, 180)


def rad2deg(x: TensorLike) -> Tensor:
    """Radians in degrees.  Raises DTypeError for complex."""
    return _scaled("rad2deg", x, 180, math.pi)


radians, degrees = deg2rad, rad2deg

_SERIES = 0.25
"""Below it the derivative of ``sinc`` is a power series, since the terms of the formula almost cancel there."""


def _sinc_slope(x: Tensor) -> Tensor:
    """The derivative of ``sin(pi x) / (pi x)``; derivatives of every order are right near 0, too."""
    near = less(abs(x), _SERIES)
    far = where(near, 1, x)
    z = multiply(where(near, x, 0), math.pi)
    square = z * z
    terms = [(-1) ** k * 2 * k / math.factorial(2 * k + 1) for k in range(9, 0, -1)]  # of z**(2k-1)
    total = terms[0] * square + terms[1]
    for term in terms[2:]:
        total = total * square + term
    steep = multiply(far, math.pi)
    return where(near, total * z * math.pi, (cos(steep) - sin(steep) / steep) / far)


def _run_sinc(xp: Namespace, out: Array, x: Array) -> None:
    y = xp.pi * x
    y = xp.where(y == 0, y.dtype.type(1e-20 if y.dtype.itemsize >= 8 else 2.0**-24), y)
    xp.divide(xp.sin(y), y, out=out)


sinc = curve(
    "sinc", lambda x: _sinc_slope(x), run=_run_sinc, costly=True,
    cxx="{x} == {type}(0) ? {type}(1) : sin({type}(3.141592653589793) * {x}) / ({type}(3.141592653589793) * {x})",
    doc="``sin(pi x) / (pi x)``, 1 at 0; every derivative is right at and near 0, too.",
)  # fmt: skip


def real_if_close(a: TensorLike, tol: float = 100) -> Tensor:
    """The real part, if no imaginary part exceeds ``tol`` machine epsilons (``tol > 1``; else: ``tol`` itself).

    Otherwise ``a`` as it is.  It reads the values.  Gradients pass through whichever part is kept.
    """
    a = tensor("real_if_close", a)
    if a.dtype.kind != "c":
        return identity_of(a)
    bound = tol * float(dtypes.finfo(a.dtype).eps) if tol > 1 else tol
    small = unrecorded(lambda: bool(all_of(abs(imag(a)) < bound)))
    return real(a) if small else identity_of(a)


def unwrap(p: TensorLike, discont: float | None = None, axis: int = -1, *, period: float = 2 * math.pi) -> Tensor:
    """``p`` with jumps along ``axis`` of more than ``discont`` (default: half a period) moved by whole periods.

    What is added is constant almost everywhere, so the gradient passes unchanged.  Raises AxisError, DTypeError.
    """
    p = tensor("unwrap", p)
    if p.dtype.kind == "c":
        raise DTypeError("unwrap: not defined for complex numbers; take angle first")
    a = normalize_axis("unwrap", axis, p.ndim)
    whole = dtypes.is_integer(p.dtype) and isinstance(period, (int, Integral))
    if not whole:
        p = cast(p, dtypes.in_float(p.dtype))
    later = (slice(None),) * a + (slice(1, None),)

    def turns() -> Tensor:
        step = diff(p, axis=a)
        high = period // 2 if whole else period / 2
        low = -high
        turned = remainder(step - low, period) + low
        if not (whole and period % 2):
            turned = where(logical_and(equal(turned, low), step > 0), high, turned)
        fixed = where(abs(step) < (period / 2 if discont is None else discont), 0, turned - step)
        return cast(cumulative_sum(fixed, axis=a), p.dtype)

    total = unrecorded(turns)
    return concat([p[(slice(None),) * a + (slice(0, 1),)], p[later] + total], axis=a)
