"""SciPy beside NumPy, ``cupyx.scipy`` beside CuPy: the modules of either library that go with a namespace.

They are imported at the first use: ``import tapegrad`` loads neither.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def special(xp: Any) -> Any:
    """``scipy.special`` for arrays of namespace ``xp``."""
    if xp is np:
        import scipy.special as found
    else:
        import cupyx.scipy.special as found
    return found


def linalg(xp: Any) -> Any:
    """``scipy.linalg`` for arrays of namespace ``xp``."""
    if xp is np:
        import scipy.linalg as found
    else:
        import cupyx.scipy.linalg as found
    return found


def sparse(xp: Any) -> Any:
    """``scipy.sparse``, with its ``linalg``, for arrays of namespace ``xp``."""
    if xp is np:
        import scipy.sparse as found
        import scipy.sparse.linalg
    else:
        import cupyx.scipy.sparse as found
        import cupyx.scipy.sparse.linalg  # noqa: F401
    return found
