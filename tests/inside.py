"""Access to what has no public name and more than one test needs: a tensor's slot, its array, whether its value lives.

A test that states a contract by public names needs none of these.  What is renamed in the package is renamed here once.
"""

from __future__ import annotations

import weakref
from typing import Any

import tapegrad as tg
from tapegrad.core.aval import ShapedArray
from tapegrad.core.buffer import Buffer


def buffer_of(t: tg.Tensor) -> Buffer:
    """Return the slot behind a tensor."""
    return t._buffer


def aval_of(t: tg.Tensor) -> ShapedArray:
    """Return the shape, dtype and device of a tensor, as rules are given them."""
    return buffer_of(t).node.aval


def array_of(t: tg.Tensor) -> Any:
    """Return the device's array itself, which ``t.numpy()`` copies from a GPU; computes a lazy value."""
    return t._array


def is_lazy(t: tg.Tensor) -> bool:
    """Return whether the slot is empty: the value has not been computed, or was dropped."""
    return buffer_of(t).array is None


def weak(t: tg.Tensor) -> weakref.ref[Buffer]:
    """Return a weak reference to the value of a tensor, which dies when nothing requires the value any more."""
    return weakref.ref(buffer_of(t))
