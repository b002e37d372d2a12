"""Passes over memory that a barrier makes besides reading its operands and writing its result: the ledger counts them.

Code that makes a pass notes it here, in its thread; evaluation collects the notes.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from tapegrad.device import abstract_array
from tapegrad.device.cuda_types import extent
from tapegrad.device.types import Namespace


class _Said(threading.local):
    def __init__(self) -> None:
        self.passes: list[tuple[int, int]] = []


said = _Said()
"""The ``passes`` that this thread has noted so far."""


def passed(read: int, written: int) -> None:
    """One more kernel has read and written so many bytes."""
    said.passes.append((read, written))


def taken() -> list[tuple[int, int]]:
    """The passes noted since the last call."""
    passes = said.passes
    if passes:
        said.passes = []
    return passes


def spread(xp: Namespace, x: Any, shape: tuple[int, ...]) -> Any:
    """``x`` broadcast to ``shape``: a view."""
    return (np if xp is None else xp).broadcast_to(x, shape)


def contiguous(xp: Namespace, x: Any, into: Any = None) -> Any:
    """Return ``x`` in C order: itself, or a copy, in ``into`` if given (in a dry run an abstract array)."""
    if x.flags.c_contiguous:
        return x
    passed(extent(x), x.nbytes)
    if into is not None:
        xp.copyto(into, x)
        return into
    return abstract_array.empty(x.shape, x.dtype) if xp is None else xp.ascontiguousarray(x)
