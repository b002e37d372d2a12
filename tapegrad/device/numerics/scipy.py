"""SciPy beside NumPy, ``cupyx.scipy`` beside CuPy: the modules of either library that go with a namespace.

They are imported at the first use: ``import tapegrad`` loads neither; by statements, which the check of layers reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def on_host(xp: Any, name: str, *first: Any) -> Callable[..., Any]:
    """Function ``name`` of ``scipy.linalg``, its ``first`` arguments given, where CuPy has none: it is given copies."""
    import scipy.linalg

    run = partial(getattr(scipy.linalg, name), *first)
    if xp is np:
        return run
    return lambda *arrays, **options: xp.asarray(run(*map(xp.asnumpy, arrays), **options))


def sparse(xp: Any) -> Any:
    """``scipy.sparse``, with its ``linalg``, for arrays of namespace ``xp``."""
    if xp is np:
        import scipy.sparse as found
    else:
        import cupyx.scipy.sparse as found
        import cupyx.scipy.sparse.linalg  # noqa: F401
    return found


def signal(xp: Any) -> Any:
    """``scipy.signal`` for arrays of namespace ``xp``."""
    if xp is np:
        import scipy.signal as found
    else:
        import cupyx.scipy.signal as found
    return found
