"""Gathering elements, where libraries differ in how they treat an index out of range."""

from __future__ import annotations

from typing import Any

import numpy as np


def take(xp: Any, x: Any, indices: Any, axis: int, out: Any) -> None:
    """Elements of ``x`` at ``indices`` (known to be in range, none negative) along ``axis``, into ``out``."""
    if xp is np:  # NumPy's default mode makes one copy more, to be able to fail without touching ``out``
        np.take(x, indices, axis=axis, out=out, mode="clip")
    else:
        xp.take(x, indices, axis=axis, out=out)
