"""NumPy's functions beyond the array API standard, and PyTorch's and JAX's of the same kind, from their files."""

from tapegrad.ops.create import mapping, ranges, sequences
from tapegrad.ops.create.mapping import *  # noqa: F403
from tapegrad.ops.create.ranges import *  # noqa: F403
from tapegrad.ops.create.sequences import *  # noqa: F403
from tapegrad.ops.elementwise import complex_parts, elementary, predicates
from tapegrad.ops.elementwise.complex_parts import *  # noqa: F403
from tapegrad.ops.elementwise.elementary import *  # noqa: F403
from tapegrad.ops.elementwise.predicates import *  # noqa: F403
from tapegrad.ops.index import choices, distinct, grid_indices, index_vectors, insertion, partial_sort
from tapegrad.ops.index.choices import *  # noqa: F403
from tapegrad.ops.index.distinct import *  # noqa: F403
from tapegrad.ops.index.grid_indices import *  # noqa: F403
from tapegrad.ops.index.index_vectors import *  # noqa: F403
from tapegrad.ops.index.insertion import *  # noqa: F403
from tapegrad.ops.index.partial_sort import *  # noqa: F403
from tapegrad.ops.products import correlation, several
from tapegrad.ops.products.correlation import *  # noqa: F403
from tapegrad.ops.products.several import *  # noqa: F403
from tapegrad.ops.reduce import averages, differences, histograms, nan_reductions, quantiles, scans, segments
from tapegrad.ops.reduce.averages import *  # noqa: F403
from tapegrad.ops.reduce.differences import *  # noqa: F403
from tapegrad.ops.reduce.histograms import *  # noqa: F403
from tapegrad.ops.reduce.nan_reductions import *  # noqa: F403
from tapegrad.ops.reduce.quantiles import *  # noqa: F403
from tapegrad.ops.reduce.scans import *  # noqa: F403
from tapegrad.ops.reduce.segments import *  # noqa: F403
from tapegrad.ops.shape import diagonals, padding
from tapegrad.ops.shape.diagonals import *  # noqa: F403
from tapegrad.ops.shape.padding import *  # noqa: F403

_MODULES = (
    averages, choices, complex_parts, correlation, diagonals, differences, distinct, elementary, grid_indices,
    index_vectors,
    histograms, insertion, mapping, nan_reductions, padding, partial_sort, predicates, quantiles, ranges, scans,
    segments, sequences, several,
)  # fmt: skip
__all__: list[str] = []
for _module in _MODULES:
    __all__ += _module.__all__
