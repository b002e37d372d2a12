"""Special functions under scipy.special's names.

Values on the CPU are SciPy's, bit for bit, except for ``erf``, ``erfc``, ``expit``, ``log_expit`` and the reductions,
which are the package's own.  On CUDA functions with a CUDA expression of their own are fused, the others are of
``cupyx.scipy.special``, and what only SciPy has is computed on the host.
"""

from __future__ import annotations

from tapegrad.special import bessel, entropies, gammas, incomplete, integrals, normal, reductions, transforms
from tapegrad.special.bessel import *  # noqa: F403
from tapegrad.special.entropies import *  # noqa: F403
from tapegrad.special.gammas import *  # noqa: F403
from tapegrad.special.incomplete import *  # noqa: F403
from tapegrad.special.integrals import *  # noqa: F403
from tapegrad.special.normal import *  # noqa: F403
from tapegrad.special.reductions import *  # noqa: F403
from tapegrad.special.transforms import *  # noqa: F403
from tapegrad.spellings import explain

_PARTS = (bessel, entropies, gammas, incomplete, integrals, normal, reductions, transforms)
__all__ = [name for part in _PARTS for name in part.__all__]
explain(globals(), __name__)
