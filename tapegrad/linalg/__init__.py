"""Linear algebra under the names of the array API standard, NumPy and scipy.linalg.

Matrices are the last two dimensions of their operands, those before them a stack.  Integers are computed in float64,
half precision in float32 and rounded.  Gradients of complex matrices follow TensorFlow's convention.
"""

from __future__ import annotations

from tapegrad.errors import LinAlgError
from tapegrad.linalg import (
    banded,
    determinants,
    eigen,
    functions,
    hermitian,
    least_squares,
    lu_factors,
    matrix_products,
    norms,
    polar_factors,
    qr_factors,
    singular,
    solving,
    structured,
)
from tapegrad.linalg.banded import *  # noqa: F403
from tapegrad.linalg.determinants import *  # noqa: F403
from tapegrad.linalg.eigen import *  # noqa: F403
from tapegrad.linalg.functions import *  # noqa: F403
from tapegrad.linalg.hermitian import *  # noqa: F403
from tapegrad.linalg.least_squares import *  # noqa: F403
from tapegrad.linalg.lu_factors import *  # noqa: F403
from tapegrad.linalg.matrix_products import *  # noqa: F403
from tapegrad.linalg.norms import *  # noqa: F403
from tapegrad.linalg.polar_factors import *  # noqa: F403
from tapegrad.linalg.qr_factors import *  # noqa: F403
from tapegrad.linalg.singular import *  # noqa: F403
from tapegrad.linalg.solving import *  # noqa: F403
from tapegrad.linalg.structured import *  # noqa: F403
from tapegrad.spellings import explain

_PARTS = (
    banded, determinants, eigen, functions, hermitian, least_squares, lu_factors, matrix_products, norms,
    polar_factors, qr_factors, singular, solving, structured,
)  # fmt: skip
__all__ = ["LinAlgError", *(name for part in _PARTS for name in part.__all__)]
explain(globals(), __name__)
