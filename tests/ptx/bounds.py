"""How far PTX and host may be apart in CUDA's mathematical functions, in units in the last place.

NVIDIA's bound on the error of a function is in the CUDA C++ Programming Guide ("Mathematical Functions"), for most at
most 2 units, for some 4; the host's functions err by less than 1.  Expressions of several functions add these up, and a
function of a rounded argument multiplies its error by how steep it is: those are listed, with the reason.
"""

from __future__ import annotations

from .twin import Bound

FUNCTION = Bound(4)
"""Of one function, and of most expressions."""
ROWS = Bound(8, None)
"""Of whole kernels and regions, in units of the largest result: differences of functions lose digits."""

_LISTED = {
    # The Bessel functions oscillate; their guaranteed error is absolute: 2.2e-7 (float64 5e-12), and near zeros of the
    # functions nothing is said of digits.
    **{name: Bound(65536, 1.0) for name in ("j0", "j1", "y0", "y1")},
    "gammaln": Bound(20),  # near its zeros at 1 and 2 the error is absolute; the guide says 6, elsewhere
    "digamma": Bound(16),  # near its zero the sum cancels
    "logaddexp": Bound(8), "logaddexp2": Bound(8),  # a maximum and a logarithm that cancel
    "gelu": Bound(24), "ndtr": Bound(24),  # erfc(x) is as steep as 2 x^2, and x was rounded
    "power": Bound(256),  # of complex numbers: exp(y log x), as steep as y log x
}  # fmt: skip


def of(kernel: str) -> Bound:
    """The bound of a kernel ``k_NAME`` made of a primitive's expression."""
    return _LISTED.get(kernel.removeprefix("k_"), FUNCTION)
