"""Devices: the only package that names an array library.

A :class:`Device` offers a namespace (``xp``), memory, and conversion from foreign arrays.  Today there is the CPU
through NumPy; every other module asks its aval's device and so needs no change for another one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tapegrad.device import dtypes
from tapegrad.device.pool import LEAST, POOL
from tapegrad.errors import DeviceError, NotATensorError

__all__ = ["CPU", "Device", "asdevice", "current_device", "device", "set_default_device"]


class Device:
    """One place where arrays live: its name (``"cpu"``), its namespace ``xp`` and its memory."""

    __slots__ = ("least_pooled", "name", "xp")

    def __init__(self, name: str, xp: Any) -> None:
        self.name = name
        self.xp = xp
        self.least_pooled = LEAST

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple:
        return asdevice, (self.name,)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised C-contiguous array from the device's pool."""
        return POOL.empty(shape, dtype)

    def owns(self, x: object) -> bool:
        """Whether ``x`` is an array (not a scalar) of this device's library."""
        return isinstance(x, np.ndarray)

    def array(self, x: Any, dtype: Any = None, copy: bool = True) -> Any:
        """``x`` (array, number, nested sequence) as an array (a copy is C-contiguous); Python floats become float32.

        Raises NotATensorError for objects that are no numbers.
        """
        if isinstance(x, np.ndarray):
            found = x
        elif hasattr(x, "__array__") or hasattr(x, "__dlpack__"):
            found = np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
        else:
            found, copy = _from_python(x, dtype), False
        if found.dtype.kind not in "biufc" and not dtypes.is_extended(found.dtype):
            raise NotATensorError(f"asarray: cannot make a tensor of {type(x).__name__} with dtype {found.dtype}")
        if dtype is not None and found.dtype != dtype:
            found, copy = found.astype(dtype), False
        if not found.dtype.isnative:
            found, copy = found.astype(found.dtype.newbyteorder("=")), False
        return np.array(found, order="C") if copy else found

    def is_view(self, x: Any, of: Any) -> bool:
        """Whether array ``x`` shares memory bounds with array ``of``."""
        return np.may_share_memory(x, of)


def _from_python(x: Any, dtype: Any) -> np.ndarray:
    """Numbers and nested sequences of them, by the rule of TensorFlow: float -> float32, int -> int64."""
    try:
        if dtype is not None:
            return np.array(x, dtype=dtype)
        found = np.array(x)
    except (TypeError, ValueError) as e:
        raise NotATensorError(f"asarray: cannot make a tensor of {type(x).__name__} {x!r:.80}: {e}") from None
    if not isinstance(x, np.generic) and not _has_dtype(x):
        found = found.astype(dtypes.of_python(found.dtype.kind, found.dtype), copy=False)
    return found


def _has_dtype(x: Any) -> bool:
    """Whether some leaf of the nested sequence carries a dtype of its own."""
    if isinstance(x, (list, tuple)):
        return any(map(_has_dtype, x))
    return hasattr(x, "dtype")


CPU = Device("cpu", np)


class _Choice(threading.local):
    device: Device | None = None


_choice = _Choice()
_default: list[Device] = []


def asdevice(name: str | Device) -> Device:
    """The device called ``name``.  Raises DeviceError if there is none."""
    if isinstance(name, Device):
        return name
    if name == "cpu":
        return CPU
    raise DeviceError(f"device {name!r} is not available; available: 'cpu'")


def current_device() -> Device:
    """Where new tensors are made: the innermost :func:`device` block, else the default."""
    if _choice.device is not None:
        return _choice.device
    if not _default:
        _default.append(asdevice(os.environ.get("TAPEGRAD_DEVICE", "cpu")))
    return _default[0]


def set_default_device(name: str | Device) -> None:
    """Make new tensors on ``name`` from now on, in every thread.  Raises DeviceError if it is not available."""
    _default[:] = [asdevice(name)]


@contextmanager
def device(name: str | Device) -> Iterator[Device]:
    """Make new tensors on ``name`` inside the block, in this thread.  Raises DeviceError if it is not available."""
    before = _choice.device
    _choice.device = asdevice(name)
    try:
        yield _choice.device
    finally:
        _choice.device = before
