"""Products and solves with sparse matrices of SciPy and cupyx.

``matmul`` takes their matrices as constants; :func:`csr` and :func:`asarray` make a :class:`SparseTensor`, whose stored
values are a tensor and get gradients.
"""

from __future__ import annotations

from tapegrad.sparse import interop
from tapegrad.sparse.array import SparseTensor, asarray, coo, csr, matmul
from tapegrad.sparse.direct import spsolve
from tapegrad.sparse.krylov import cg, gmres
from tapegrad.spellings import explain

__all__ = ["SparseTensor", "asarray", "cg", "coo", "csr", "gmres", "matmul", "spsolve"]

interop.bind()
explain(globals(), __name__)
