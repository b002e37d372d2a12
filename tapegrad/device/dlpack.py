"""DLPack: arrays shared with other libraries.

A tensor never changes, but a library that gets its memory may write to it: PyTorch does not heed DLPack's read-only
mark, and JAX does not know it.  So on the CPU a consumer gets a copy, unless it asks for none (``copy=False``): then it
gets the memory itself, marked read-only (as DLPack does since 1.0).  On CUDA memory is shared, as by
``__cuda_array_interface__``, which CuPy and PyTorch take for granted there: a consumer must not write to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tapegrad.device import asdevice, cpu
from tapegrad.device.base import Device
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.types import Array
from tapegrad.errors import DeviceError, DTypeError, NotATensorError

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # whether NumPy makes capsules of DLPack 1.0


def place(device: Device) -> tuple[int, int]:
    """The device as DLPack names it: its type and number."""
    return (_CPU, 0) if device.kind == "cpu" else (_CUDA, device.index)


def capsule(
    array: Any,
    owner: object,
    device: Device,
    stream: Any,
    max_version: tuple[int, int] | None,
    to: Any,
    copy: bool | None,
) -> Any:
    """A DLPack capsule of ``array``, or of a copy; ``to``: the place where the consumer wants it (None: where it is).

    ``owner``: what a capsule of the array itself refers to.  Raises BufferError where that cannot be had, or not
    without a copy.
    """
    wanted = place(device) if to is None else (int(to[0]), int(to[1]))
    if wanted != place(device):
        if wanted[0] != _CPU:
            raise BufferError(f"__dlpack__: the tensor lies on {device}; move it with to_device before it is exported")
        if copy is False:
            raise BufferError(f"__dlpack__: a tensor on {device} goes to the CPU as a copy; leave out copy=False")
        return _of_numpy(device.numpy(array), max_version)
    if device.kind == "cpu":
        return _of_numpy(_shared(array, owner, max_version) if copy is False else array.copy(), max_version)
    with device.active():
        shared = array.copy() if copy and type(array) is not HostScalar else device.shared(array, owner)
        return shared.__dlpack__(stream=stream, max_version=max_version)


def _shared(array: Array, owner: object, max_version: tuple[int, int] | None) -> Any:
    """Its memory, read-only where the capsule can say so; consumers of an older DLPack must not write to it."""
    tells = _VERSIONED and max_version is not None and max_version >= (1, 0)
    if not tells and not array.flags.writeable:
        raise BufferError("__dlpack__: this memory is read-only, which only DLPack 1.0 can say; leave out copy=False")
    return cpu.shared(array, owner, writable=not tells)


def _of_numpy(array: Array, max_version: tuple[int, int] | None) -> Any:
    if array.dtype.kind == "V":  # added to NumPy by another package, such as bfloat16
        raise BufferError(f"__dlpack__: NumPy exports no {array.dtype.name}; use astype to make it float32 first")
    return array.__dlpack__(max_version=max_version) if _VERSIONED else array.__dlpack__()


def imported(x: object) -> tuple[Any, Device]:
    """The memory of ``x`` as an array, and the device on which it lies.

    Raises NotATensorError, DTypeError, DeviceError, and what the producer raises (BufferError).
    """
    if isinstance(x, np.ndarray):  # at once: NumPy does not always export a read-only array
        return cpu.unmasked(x), cpu.CPU
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise NotATensorError(f"from_dlpack: {type(x).__name__} offers no __dlpack__; tg.asarray takes other arrays")
    kind, index = map(int, x.__dlpack_device__())
    try:
        if kind in (_CPU, _CUDA_HOST):
            return np.from_dlpack(x), cpu.CPU
        if kind in (_CUDA, _CUDA_MANAGED):
            device = asdevice(f"cuda:{index}")
            with device.active():
                return device.xp.from_dlpack(x), device
    except RuntimeError as e:  # NumPy and CuPy raise these for a dtype that they do not have
        dtype = getattr(x, "dtype", "this dtype")
        raise DTypeError(f"from_dlpack: {dtype} cannot be imported ({e}); convert it, for example to float32") from None
    raise DeviceError(f"from_dlpack: {type(x).__name__} lies on DLPack device type {kind}; move it to the CPU or CUDA")
