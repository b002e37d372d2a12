"""SciPy beside NumPy, ``cupyx.scipy`` beside CuPy: the modules of either library that go with a namespace.

They are imported at the first use: ``import tapegrad`` loads neither; by import statements, which the check of layers
reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tapegrad.device.types import Namespace


def special(xp: Namespace) -> Namespace:
    """``scipy.special`` for arrays of namespace ``xp``."""
    if xp is np:
        import scipy.special as module
    else:
        import cupyx.scipy.special as module
    return module


def linalg(xp: Namespace) -> Namespace:
    """``scipy.linalg`` for arrays of namespace ``xp``."""
    if xp is np:
        import scipy.linalg as module
    else:
        import cupyx.scipy.linalg as module
    return module


def on_host(xp: Namespace, name: str, *first: object) -> Callable[..., Any]:
    """Function ``name`` of ``scipy.linalg``, its ``first`` arguments given, where CuPy has none: it is given copies."""
    import scipy.linalg

    run = partial(getattr(scipy.linalg, name), *first)
    if xp is np:
        return run
    return lambda *arrays, **options: xp.asarray(run(*map(xp.asnumpy, arrays), **options))


def sparse(xp: Namespace) -> Namespace:
    """``scipy.sparse``, with its ``linalg``, for arrays of namespace ``xp``."""
    if xp is np:
        import scipy.sparse as module
    else:
        import cupyx.scipy.sparse as module
        import cupyx.scipy.sparse.linalg  # noqa: F401
    return module


def signal(xp: Namespace) -> Namespace:
    """``scipy.signal`` for arrays of namespace ``xp``."""
    if xp is np:
        import scipy.signal as module
    else:
        import cupyx.scipy.signal as module
    return module
