"""Access to what has no public name and more than one test needs: a tensor's slot, its array, whether its value lives.

A test that states a contract by public names needs none of these.  What is renamed in the package is renamed here once.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import tapegrad as tg
from tapegrad.core.aval import GRAIN, ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.device.host_scalar import HostScalar
from tapegrad.distributed import group
from tapegrad.engine import executor
from tapegrad.nn.layers import layer

devices = importlib.import_module("tapegrad.device")  # not the function of that name


def buffer_of(t: tg.Tensor) -> Buffer:
    """Return the slot behind a tensor."""
    return t._buffer


def aval_of(t: tg.Tensor) -> ShapedArray:
    """Return the shape, dtype and device of a tensor, as rules are given them."""
    return buffer_of(t).node.aval


def array_of(t: tg.Tensor) -> Any:
    """Return the device's array itself, which ``t.numpy()`` copies from a GPU; computes a lazy value."""
    return t._array


def content_of(v: tg.Variable) -> Any:
    """Return the device's array in a variable, of which reading would make another reference."""
    return v._cell.get().array


def is_lazy(t: tg.Tensor) -> bool:
    """Return whether the slot is empty: the value has not been computed, or was dropped."""
    return buffer_of(t).array is None


def weak(t: tg.Tensor) -> weakref.ref[Buffer]:
    """Return a weak reference to the value of a tensor, which dies when nothing requires the value any more."""
    return weakref.ref(buffer_of(t))


def bytes_of_slots() -> int:
    """Return the bytes of all values on devices that the collector knows, each rounded up as the ledger counts it."""
    slots = (thing for thing in gc.get_objects() if type(thing) is Buffer and thing.array is not None)
    own = (slot for slot in slots if slot.base is None and type(slot.array) is not HostScalar)
    return sum(-(-slot.node.aval.nbytes // GRAIN) * GRAIN for slot in own)


def forget_constants() -> None:
    """Free the constants that operations share: what runs next makes its own."""
    executor.CONSTANTS.clear()


@contextmanager
def default_as(name: str | None) -> Iterator[None]:
    """Set the default device in the block; None: the first tensor chooses it, as in a new process."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(devices, "_default", [] if name is None else [devices.asdevice(name)])
        yield


@contextmanager
def as_in_a_new_process() -> Iterator[None]:
    """In the block no default device is chosen, no group of ranks is made, and no layer has a name."""
    with default_as(None), pytest.MonkeyPatch.context() as changed:
        changed.setattr(group, "_world", None)
        changed.setattr(layer, "_serial", defaultdict(itertools.count))
        yield
