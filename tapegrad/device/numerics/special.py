"""Special functions of arrays: SciPy's beside NumPy, ``cupyx.scipy.special``'s beside CuPy.

What only SciPy has is computed by it on the host for a CuPy array, too: right everywhere, and slow there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from tapegrad.device.numerics import scipy
from tapegrad.device.types import Array, Namespace


@cache
def _function(xp: Namespace, name: str) -> Callable[..., Any]:
    """The function ``name`` for arrays of namespace ``xp``."""
    if xp is np:
        return _quietly(getattr(scipy.special(np), name))
    own = getattr(scipy.special(xp), name, None)
    return _hosted(xp, name) if own is None else own


@cache
def _hosted(xp: Namespace, name: str) -> Callable[..., Any]:
    """SciPy's function ``name`` for arrays of another namespace."""
    hosted = _quietly(getattr(scipy.special(np), name))

    def call(*arrays: Any) -> Any:
        results = hosted(*(x.get() for x in arrays))
        return tuple(map(xp.asarray, results)) if isinstance(results, tuple) else xp.asarray(results)

    return call


def _quietly(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` without warnings of arithmetic: poles and overflow are values here."""

    def call(*arrays: Array) -> Array:
        with np.errstate(all="ignore"):
            return f(*arrays)

    return call


def quiet(xp: Namespace) -> AbstractContextManager[None]:
    """A block without NumPy's warnings of arithmetic; CuPy has none."""
    return np.errstate(all="ignore") if xp is np else nullcontext()


def value(xp: Namespace, name: str, arrays: tuple[Array, ...], part: int | None = None) -> Array:
    """The function ``name`` of ``arrays``; ``part``: which of its results.  Short floats are computed in float32."""
    narrow = arrays[-1].dtype
    if narrow.itemsize == 2:
        arrays = tuple(x.astype(xp.float32) for x in arrays)
    # CuPy's functions of complex numbers are few, and some of real numbers have the names of SciPy's of both.
    of_complex = xp is not np and any(x.dtype.kind == "c" for x in arrays)
    result = (_hosted if of_complex else _function)(xp, name)(*arrays)
    result = result if part is None else result[part]
    return result if narrow.itemsize > 2 else result.astype(narrow)


def write(xp: Namespace, name: str, out: Array, arrays: tuple[Array, ...]) -> None:
    """The same, over the elements of ``out``, in float32 or float64."""
    with np.errstate(all="ignore"):
        getattr(scipy.special(xp), name)(*arrays, out=out)


def riemann_zeta(xp: Namespace, x: Array) -> Array:
    """Riemann's zeta function; CuPy has it less 1 only."""
    return value(xp, "zeta", (x,)) if xp is np else value(xp, "zetac", (x,)) + 1
