"""Arrays of the user's, which he may change: where their elements are, and whether a copy still equals them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from tapegrad.device import probe
from tapegrad.device.abstract_array import AbstractArray
from tapegrad.device.base import Device
from tapegrad.device.types import Array

_LEAST = 2**14
"""Bytes; to copy less takes less time than to look whether there is a copy."""
_BLOCK = 2**20


def location(x: object, device: Device) -> tuple[Array, Hashable] | None:
    """Return the array that owns the memory of ``x``, and where its elements are, whatever view it is.

    None where uses on ``device`` need not share a copy: ``x`` is small, has a mask, or is no array of NumPy's or of the
    device.
    """
    array: Any = x
    if isinstance(x, np.ndarray):
        if x.nbytes < _LEAST or isinstance(x, (np.ma.MaskedArray, AbstractArray)):
            return None
        address = array.__array_interface__["data"][0]
    elif probe.is_array(x) and array.nbytes >= _LEAST and device.kind == "cuda" and array.device.id == device.index:
        address = array.data.ptr
    else:
        return None
    owner = array
    while isinstance(owner.base, np.ndarray) or probe.is_array(owner.base):
        owner = owner.base
    return owner, (device.name, id(owner), address, array.shape, array.strides, array.dtype)


def same(device: Device, copy: Array, x: Array) -> bool:
    """Whether every bit of ``x`` is that of ``copy``, which ``device`` has."""
    if copy.dtype != x.dtype or copy.shape != x.shape or copy.real.dtype.itemsize > 8:
        return False
    if not isinstance(x, np.ndarray):
        with device.active():
            return all(bool((a == b).all()) for a, b in zip(_words(copy), _words(x), strict=True))
    copy, x = device.numpy(copy), x.view(np.ndarray)
    rows = max(1, _BLOCK * len(x) // x.nbytes)
    return all(
        bool((a == b).all())
        for start in range(0, len(x), rows)
        for a, b in zip(_words(copy[start : start + rows]), _words(x[start : start + rows]), strict=True)
    )


def _words(x: Array) -> list[Array]:
    """The elements as integers of their bits, by which NaNs are equal, and zeros of another sign are not."""
    parts = [x.real, x.imag] if x.dtype.kind == "c" else [x]
    return [part.view(f"u{part.dtype.itemsize}") for part in parts]
