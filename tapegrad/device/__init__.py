"""Devices: the only package that names an array library.

``base`` says what a device is; ``cpu`` is NumPy's, ``cuda`` CuPy's.  Every other module asks its aval's device.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tapegrad.device import cpu, cuda, probe
from tapegrad.device.base import Device
from tapegrad.device.cpu import CPU
from tapegrad.device.foreign import index as cuda_index
from tapegrad.errors import DeviceError

__all__ = [
    "CPU",
    "Device",
    "asdevice",
    "cuda_count",
    "cuda_index",
    "current_device",
    "device",
    "in_use",
    "is_array",
    "set_default_device",
]


class _Choice(threading.local):
    device: Device | None = None


_choice = _Choice()
_default: list[Device] = []


def asdevice(name: str | Device) -> Device:
    """The device called ``name``: "cpu", "cuda" (the first) or "cuda:N".

    Raises DeviceError saying why it is missing, and what mends that.
    """
    if isinstance(name, Device):
        return name
    if name == "cpu":
        return CPU
    match = re.fullmatch(r"cuda(?::(\d+))?", name) if isinstance(name, str) else None
    if match is None:
        raise DeviceError(f"device {name!r} is not available; devices are 'cpu', 'cuda' and 'cuda:N'")
    return cuda.get(int(match[1] or 0))


def is_array(x: object) -> bool:
    """Whether ``x`` is an array of NumPy's or CuPy's (no tensor), which its owner may change."""
    return cpu.is_array(x) or probe.is_array(x)


def default_device() -> Device:
    """What ``TAPEGRAD_DEVICE`` names, else the first CUDA device on which a kernel can be launched, else the CPU."""
    name = os.environ.get("TAPEGRAD_DEVICE")
    if name:
        return asdevice(name)
    return asdevice("cuda" if cuda.available() else "cpu")


def current_device() -> Device:
    """Where new tensors are made: the innermost :func:`device` block, else the default."""
    if _choice.device is not None:
        return _choice.device
    if not _default:
        _default.append(default_device())
    return _default[0]


def cuda_count() -> int:
    """How many CUDA devices there are."""
    return cuda.probe().count


def in_use() -> list[Device]:
    """The current device, and the others that have been asked for so far."""
    current = current_device()
    return [current, *(d for d in cuda.known() if d is not current)]


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
