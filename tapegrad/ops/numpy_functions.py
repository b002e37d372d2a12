"""NumPy's functions beyond the array API standard, and PyTorch's and JAX's of the same kind, from their files."""

from tapegrad.ops import (
    averages,
    choosing,
    combining,
    correlation,
    diagonals,
    differences,
    distinct,
    elementary,
    histograms,
    locating,
    mapping,
    nan_reductions,
    padding,
    partitioning,
    parts,
    placing,
    predicates,
    quantiles,
    ranges,
    scans,
    segments,
    sequences,
)
from tapegrad.ops.averages import *  # noqa: F403
from tapegrad.ops.choosing import *  # noqa: F403
from tapegrad.ops.combining import *  # noqa: F403
from tapegrad.ops.correlation import *  # noqa: F403
from tapegrad.ops.diagonals import *  # noqa: F403
from tapegrad.ops.differences import *  # noqa: F403
from tapegrad.ops.distinct import *  # noqa: F403
from tapegrad.ops.elementary import *  # noqa: F403
from tapegrad.ops.histograms import *  # noqa: F403
from tapegrad.ops.locating import *  # noqa: F403
from tapegrad.ops.mapping import *  # noqa: F403
from tapegrad.ops.nan_reductions import *  # noqa: F403
from tapegrad.ops.padding import *  # noqa: F403
from tapegrad.ops.partitioning import *  # noqa: F403
from tapegrad.ops.parts import *  # noqa: F403
from tapegrad.ops.placing import *  # noqa: F403
from tapegrad.ops.predicates import *  # noqa: F403
from tapegrad.ops.quantiles import *  # noqa: F403
from tapegrad.ops.ranges import *  # noqa: F403
from tapegrad.ops.scans import *  # noqa: F403
from tapegrad.ops.segments import *  # noqa: F403
from tapegrad.ops.sequences import *  # noqa: F403

__all__: list[str] = []
__all__ += averages.__all__
__all__ += choosing.__all__
__all__ += combining.__all__
__all__ += correlation.__all__
__all__ += diagonals.__all__
__all__ += differences.__all__
__all__ += distinct.__all__
__all__ += elementary.__all__
__all__ += histograms.__all__
__all__ += locating.__all__
__all__ += mapping.__all__
__all__ += nan_reductions.__all__
__all__ += padding.__all__
__all__ += partitioning.__all__
__all__ += parts.__all__
__all__ += placing.__all__
__all__ += predicates.__all__
__all__ += quantiles.__all__
__all__ += ranges.__all__
__all__ += scans.__all__
__all__ += segments.__all__
__all__ += sequences.__all__
