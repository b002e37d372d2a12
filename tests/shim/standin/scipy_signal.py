"""``cupyx.scipy.signal``: what is used of it, computed on the host by SciPy."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from . import namespace
from .array import ndarray


def _wrapping(name: str) -> Callable:
    def run(*args: Any, **options: Any) -> Any:
        import scipy.signal

        if not all(isinstance(x, ndarray) for x in args):
            raise TypeError(f"{name} takes device arrays")
        found = getattr(scipy.signal, name)(*(x.get() for x in args), **options)
        return namespace.module.asarray(np.ascontiguousarray(found))

    run.__name__ = name
    return run


def build(module: Callable[..., types.ModuleType], modules: dict[str, types.ModuleType]) -> None:
    """Add ``cupyx.scipy.signal`` to the modules there are."""
    top = module("cupyx.scipy.signal", convolve=_wrapping("convolve"), lfilter=_wrapping("lfilter"))
    scipy = modules.setdefault("cupyx.scipy", module("cupyx.scipy", __path__=[]))
    modules["cupyx"].scipy, scipy.signal = scipy, top  # type: ignore[attr-defined]
    modules[top.__name__] = top
