"""Gathering elements, where libraries differ in how they treat an index out of range."""

from __future__ import annotations

import numpy as np

from tapegrad.device.types import Array, Namespace


def take(xp: Namespace, x: Array, indices: Array, axis: int, out: Array) -> None:
    """Elements of ``x`` at ``indices`` (known to be in range, none negative) along ``axis``, into ``out``."""
    if xp is np:  # NumPy's default mode makes one copy more, to be able to fail without touching ``out``
        np.take(x, indices, axis=axis, out=out, mode="clip")
    else:
        xp.take(x, indices, axis=axis, out=out)
