"""NumPy's other functions of elements: rounding, floats taken apart, products with a third operand."""

from __future__ import annotations

from tapegrad.core.aval import ShapedArray, broadcast_shapes
from tapegrad.core.primitive import Bad, Primitive, Sample, general
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError
from tapegrad.ops.apply import same_params
from tapegrad.ops.dispatch import (
    Binary,
    barrier,
    cast,
    curve,
    in_float32,
    infer_same,
    of_floats,
    of_two,
    promote,
    real_float,
    tensor,
)
from tapegrad.ops.elementwise import arithmetic
from tapegrad.ops.elementwise.arithmetic import (
    divide,
    floor_divide,
    maximum,
    minimum,
    multiply,
    reciprocal,
    remainder,
    sign,
    sqrt,
)
from tapegrad.ops.elementwise.comparison import equal, isfinite, isinf, isnan, less, signbit, trunc
from tapegrad.ops.elementwise.comparison import round as round_even
from tapegrad.ops.elementwise.complex import conj, imag, real
from tapegrad.ops.elementwise.complex_parts import complex_of
from tapegrad.ops.elementwise.exponential import difference, power
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.elementwise.sigmoid import logistic
from tapegrad.ops.shape.shape import broadcast_to
from tapegrad.tensor import Tensor, TensorLike, identity_of

__all__ = [
    "addcdiv", "addcmul", "around", "cbrt", "copysign", "divmod", "fabs", "fix", "float_power", "fmax", "fmin", "fmod",
    "frexp", "gcd", "heaviside", "lcm", "ldexp", "lerp", "linear_interpolate", "logaddexp2", "modf", "nan_to_num",
    "nextafter", "rsqrt", "squared_difference",
]  # fmt: skip

_LN2 = 0.6931471805599453

cbrt = curve(
    "cbrt", lambda out: reciprocal(3 * out * out), to=real_float("cbrt"), domain=(0.3, 3.0),
    doc="Cube root, negative for a negative number; the gradient at 0 is inf.",
)  # fmt: skip

logaddexp2 = of_two(
    "logaddexp2",
    [lambda x, y: logistic(_LN2 * difference(x, y)), lambda x, y: logistic(_LN2 * difference(y, x))],
    exact=False,
    costly=True,
    cxx="tg_logaddexp({x} * {type}(0.6931471805599453), {y} * {type}(0.6931471805599453)) * {type}(1.4426950408889634)",
    doc="``log2(2**x + 2**y)`` without overflow.  Equal operands share the gradient, two of -inf or inf as well.",
    to=real_float("logaddexp2"),
)


def fmax(x1: TensorLike, x2: TensorLike) -> Tensor:
    """The larger element; a NaN loses to a number (NumPy's ``fmax``).

    A tie gives the whole gradient to ``x1``, as :func:`maximum` does; the gradient of an ignored NaN is 0.
    """
    x, y = promote("fmax", (x1, x2))
    return where(isnan(x), y, where(isnan(y), x, maximum(x, y)))


def fmin(x1: TensorLike, x2: TensorLike) -> Tensor:
    """The smaller element; a NaN loses to a number (NumPy's ``fmin``).

    A tie gives the whole gradient to ``x1``, as :func:`minimum` does; the gradient of an ignored NaN is 0.
    """
    x, y = promote("fmin", (x1, x2))
    return where(isnan(x), y, where(isnan(y), x, minimum(x, y)))


def _size(x: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``x`` is negative, and its magnitude, whose derivative at 0 is 1 (at -0.0: -1)."""
    below = less(x, 0) if dtypes.is_integer(x.dtype) else signbit(x)
    return below, x if x.dtype.kind == "u" else where(below, -x, x)


def fmod(x1: TensorLike, x2: TensorLike) -> Tensor:
    """The remainder of ``x1 / x2`` with the sign of ``x1`` (C's ``fmod``): ``x1 - trunc(x1 / x2) * x2``, exactly.

    Gradient 1 in ``x1``, ``-trunc(x1 / x2)`` in ``x2``, also where it jumps.  Raises DTypeError for bool and complex.
    """
    x, y = promote("fmod", (x1, x2))
    if x.dtype.kind in "bc":
        raise DTypeError(f"fmod: not defined for {x.dtype}")
    (below, x), (_, y) = _size(x), _size(y)
    rest = remainder(x, y)
    return rest if x.dtype.kind == "u" else where(below, -rest, rest)


def divmod(x1: TensorLike, x2: TensorLike) -> tuple[Tensor, Tensor]:
    """``(floor_divide(x1, x2), remainder(x1, x2))``.  Raises DTypeError for bool and complex."""
    return floor_divide(x1, x2), remainder(x1, x2)


def modf(x: TensorLike) -> tuple[Tensor, Tensor]:
    """The fractional and the whole part, both with the sign of ``x``.

    Gradient 1 of the fraction, 0 of the whole part.  Raises DTypeError for complex.
    """
    (x,) = promote("modf", (x,), real_float("modf"))
    below, size = _size(x)
    rest = where(isinf(x), 0, size - trunc(where(isinf(x), 0, size)))
    return where(below, -rest, rest), trunc(x)


def fabs(x: TensorLike) -> Tensor:
    """The magnitude of real numbers as floats; the gradient at 0 is 0.  Raises DTypeError for complex."""
    (x,) = promote("fabs", (x,), real_float("fabs"))
    return arithmetic.abs(x)


def fix(x: TensorLike) -> Tensor:
    """NumPy's other name for :func:`trunc`; gradient 0."""
    return trunc(x)


def around(a: TensorLike, decimals: int = 0) -> Tensor:
    """``a`` rounded to ``decimals`` places, halves to even (NumPy's ``around``); gradient 0."""
    a = tensor("around", a)
    if not decimals or (dtypes.is_integer(a.dtype) and decimals > 0):
        return round_even(a)
    if a.dtype.kind == "c":
        return complex_of(around(real(a), decimals), around(imag(a), decimals))
    scale = 10.0 ** abs(decimals)
    if dtypes.is_integer(a.dtype):
        return cast(multiply(round_even(divide(a, scale)), scale), a.dtype)
    up, down = (multiply, divide) if decimals > 0 else (divide, multiply)
    return down(round_even(up(a, scale)), scale)


def float_power(x1: TensorLike, x2: TensorLike) -> Tensor:
    """``x1 ** x2`` in float64 (complex: complex128), whatever the operands' dtypes (NumPy's ``float_power``).

    Gradients are those of :func:`power`.
    """
    x, y = promote("float_power", (x1, x2), lambda d: dtypes.complex128 if d.kind == "c" else dtypes.float64)
    return power(x, y)


def nan_to_num(
    x: TensorLike, copy: bool = True, nan: TensorLike = 0.0, posinf: TensorLike | None = None,
    neginf: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """NaN replaced by ``nan``, infinities by ``posinf`` and ``neginf`` (None: the largest finite numbers).

    What is replaced has gradient 0.  ``copy`` is accepted for NumPy's sake: tensors never change.
    """
    x = tensor("nan_to_num", x)
    if x.dtype.kind == "c":
        return complex_of(*(nan_to_num(part, True, nan, posinf, neginf) for part in (real(x), imag(x))))
    if not dtypes.is_inexact(x.dtype):
        return identity_of(x)
    most = float(dtypes.finfo(x.dtype).max)
    known = where(isnan(x), nan, x)
    known = where(equal(known, float("inf")), most if posinf is None else posinf, known)
    return where(equal(known, -float("inf")), -most if neginf is None else neginf, known)


def heaviside(x1: TensorLike, x2: TensorLike) -> Tensor:
    """0 where ``x1 < 0``, ``x2`` where it is 0, 1 above.

    Gradient 0 in ``x1``; in ``x2`` it passes where ``x1`` is 0.  Raises DTypeError for complex.
    """
    x, y = promote("heaviside", (x1, x2), real_float("heaviside"))
    return where(equal(x, 0), y, where(isnan(x), x, cast(x > 0, x.dtype)))


@in_float32
def rsqrt(x: TensorLike) -> Tensor:
    """``1 / sqrt(x)``; value and gradient at 0 are infinite."""
    return reciprocal(sqrt(x))


@in_float32
def squared_difference(x1: TensorLike, x2: TensorLike) -> Tensor:
    """Return ``(x1 - x2) ** 2``; of complex numbers ``(x1 - x2) * conj(x1 - x2)`` (TensorFlow's)."""
    gap = arithmetic.subtract(x1, x2)
    return gap * conj(gap) if gap.dtype.kind == "c" else arithmetic.square(gap)


@of_floats()
@in_float32
def lerp(input: TensorLike, end: TensorLike, weight: TensorLike) -> Tensor:
    """``input + weight * (end - input)``, exact at both ends (PyTorch's ``lerp``); differentiable in all three."""
    start, stop, part = promote("lerp", (input, end, weight))
    gap = stop - start
    return where(part < 0.5, start + part * gap, stop - gap * (1 - part))


@of_floats()
@in_float32
def linear_interpolate(p: TensorLike, x: TensorLike, y: TensorLike) -> Tensor:
    """``p * x + (1 - p) * y`` (Chainer's ``linear_interpolate``)."""
    p, x, y = promote("linear_interpolate", (p, x, y))
    return p * x + (1 - p) * y


@in_float32
def addcmul(input: TensorLike, tensor1: TensorLike, tensor2: TensorLike, *, value: float = 1) -> Tensor:
    """``input + value * tensor1 * tensor2`` (PyTorch's ``addcmul``)."""
    return arithmetic.add(input, multiply(multiply(tensor1, tensor2), value))


@in_float32
def addcdiv(input: TensorLike, tensor1: TensorLike, tensor2: TensorLike, *, value: float = 1) -> Tensor:
    """``input + value * tensor1 / tensor2`` (PyTorch's ``addcdiv``)."""
    return arithmetic.add(input, multiply(divide(tensor1, tensor2), value))


def _infer_exponents(x: ShapedArray) -> ShapedArray:
    if x.dtype.kind == "c":
        raise DTypeError("frexp: not defined for complex numbers")
    return x.with_dtype(dtypes.int32)


frexp_exponent_p = general(
    "frexp_exponent",
    impl=lambda xp, x: xp.frexp(x)[1],
    infer=_infer_exponents,
    lift=same_params,
    samples=[Sample((3, 4)), Sample(()), Sample((0,))],
    doc="The exponents of 2 that ``frexp`` gives.",
)
ldexp_p: Primitive = general(
    "ldexp",
    impl=lambda xp, x, places: xp.ldexp(x, places),
    infer=lambda x, places: x,
    vjp=[lambda ct, places: barrier(ldexp_p, ct, broadcast_to(places, ct.shape)), None],
    jvp=[lambda t, places: barrier(ldexp_p, t, places), None],
    samples=[Sample((2, 3), [[-1, 0, 3], [2, 1, 5]]), Sample((), 2)],
    doc="``x * 2**places``, of operands of one shape.",
)


def frexp(x: TensorLike) -> tuple[Tensor, Tensor]:
    """Mantissa, in ``[0.5, 1)`` or 0, and exponent of 2 (int32): ``x = mantissa * 2**exponent``.

    The exponent is constant almost everywhere, so the mantissa's gradient is ``2**-exponent``; the exponent has none.
    Raises DTypeError for complex.
    """
    (x,) = promote("frexp", (x,), real_float("frexp"))
    exponent = barrier(frexp_exponent_p, x)
    usual = where(isfinite(x), x, 0)  # of infinities and NaN the exponent is left open
    return where(isfinite(x), barrier(ldexp_p, usual, -exponent), x), exponent


def ldexp(x1: TensorLike, x2: TensorLike) -> Tensor:
    """``x1 * 2**x2``; differentiable in ``x1``.  Raises DTypeError unless ``x2`` holds integers."""
    (x,) = promote("ldexp", (x1,), real_float("ldexp"))
    places = tensor("ldexp", x2, x)
    if not dtypes.is_integer(places.dtype):
        raise DTypeError(f"ldexp: exponents must be integers, got {places.dtype}; use x1 * exp2(x2)")
    places = cast(minimum(maximum(places, -(2**30)), 2**30) if places.dtype.itemsize > 4 else places, dtypes.int32)
    shape = broadcast_shapes("ldexp", x.shape, places.shape)
    return barrier(ldexp_p, broadcast_to(x, shape), broadcast_to(places, shape))


def _of_integers(name: str, doc: str) -> Binary:
    def infer(x: ShapedArray, y: ShapedArray) -> ShapedArray:
        if not dtypes.is_integer(x.dtype):
            raise DTypeError(f"{name}: needs integers, got {x.dtype}")
        return x.with_shape(broadcast_shapes(name, x.shape, y.shape))

    prim = general(
        name,
        impl=lambda xp, x, y: getattr(xp, name)(x, y),
        infer=infer,
        samples=[Sample([[12, 18], [0, 7]], [8, 6]), Sample(4, 6), Bad((2,), (2,), error=DTypeError)],
        doc=doc,
    )

    def op(x1: TensorLike, x2: TensorLike) -> Tensor:
        return barrier(prim, *promote(name, (x1, x2)))

    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"{doc}  Integers, broadcast; no derivative.  Raises DTypeError for other dtypes, ShapeError."
    return op


gcd = _of_integers("gcd", "The greatest common divisor.")
lcm = _of_integers("lcm", "The least common multiple of the magnitudes.")


copysign: Binary = of_two(
    "copysign",
    [lambda x, y: sign(x) * copysign(1.0, y), 0],
    cxx="copysign({x}, {y})",
    doc="The magnitude of ``x`` with the sign of ``y`` (that of -0.0 and of a NaN, too); at ``x == 0`` the gradient is "
    "0, as that of ``abs``; that of ``y`` is 0 everywhere.",
    to=real_float("copysign"),
)

nextafter_p = general(
    "nextafter",
    impl=lambda xp, x, y: xp.nextafter(x, y),
    infer=lambda x, y: infer_same(x, y, name="nextafter"),
    samples=[Sample((2, 3), (3,)), Sample((0,), ()), Bad((2,), (3,), error=ValueError)],
    doc="The next number after ``x`` towards ``y``.",
)


def nextafter(x1: TensorLike, x2: TensorLike) -> Tensor:
    """The next floating-point number after each ``x1`` in the direction of ``x2``; equal ones give ``x2``.

    Shapes broadcast; real floats (integers become floats).  There is no gradient.  Raises DTypeError, ShapeError.
    """
    return barrier(nextafter_p, *promote("nextafter", (x1, x2), real_float("nextafter")))
