"""The Faddeeva function, the one special function here that is complex."""

from __future__ import annotations

import math

from tapegrad.core.primitive import Sample
from tapegrad.device import dtypes
from tapegrad.device.numerics import special
from tapegrad.device.types import DType
from tapegrad.ops.dispatch import barrier, promote
from tapegrad.special._declare import barrier_of
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["wofz"]

_wofz_p = barrier_of(
    "wofz",
    ("z",),
    lambda xp, z: special.value(xp, "wofz", (z,)),
    [lambda out, z: -2 * z * out + 2j / math.sqrt(math.pi)],
    [Sample([[0.5 + 0.2j, -0.3 + 1.5j], [2.0 - 0.1j, 0.1j]])],
    "``exp(-z * z) * erfc(-i z)``.",
)


def wofz(z: TensorLike, /) -> Tensor:
    """The Faddeeva function ``exp(-z * z) * erfc(-i z)`` of complex numbers (SciPy's ``wofz``); holomorphic.

    Real numbers are made complex.
    """

    def to(dtype: DType) -> DType:
        dtype = dtypes.in_float(dtype)
        if dtype.kind == "c":
            return dtype
        return dtypes.complex128 if dtype.itemsize > 4 else dtypes.complex64

    return barrier(_wofz_p, *promote("wofz", (z,), to))
