"""Floating-point numbers taken apart: signs and neighbours."""

from __future__ import annotations

from tapegrad.core.primitive import Bad, Sample, elementwise, general
from tapegrad.ops.dispatch import Binary, barrier, binary, infer_same, promote, real_float
from tapegrad.ops.elementwise.arithmetic import sign
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["copysign", "nextafter"]

copysign_p = elementwise(
    "copysign",
    infer=infer_same,
    partials=[lambda x, y: sign(x) * copysign(1.0, y), 0],
    operands=("x", "y"),
    cxx="copysign({x}, {y})",
    doc="The magnitude of ``x`` with the sign of ``y`` (that of -0.0 and of a NaN, too); at ``x == 0`` the gradient is "
    "0, as that of ``abs``; that of ``y`` is 0 everywhere.",
)
copysign: Binary = binary(copysign_p, real_float("copysign"))

nextafter_p = general(
    "nextafter",
    impl=lambda xp, x, y: xp.nextafter(x, y),
    infer=lambda x, y: infer_same(x, y, name="nextafter"),
    samples=[Sample((2, 3), (3,)), Sample((0,), ()), Bad((2,), (3,), error=ValueError)],
    doc="The next number after ``x`` towards ``y``.",
)


def nextafter(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """The next floating-point number after each ``x1`` in the direction of ``x2``; equal ones give ``x2``.

    Shapes broadcast; real floats (integers become floats).  There is no gradient.  Raises DTypeError, ShapeError.
    """
    return barrier(nextafter_p, *promote("nextafter", (x1, x2), real_float("nextafter")))
