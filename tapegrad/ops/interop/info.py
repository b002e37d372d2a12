"""What the array API standard asks a namespace about itself."""

from __future__ import annotations

from typing import Any

from tapegrad.device import CPU, Device, asdevice, current_device, dtypes
from tapegrad.device.types import DType
from tapegrad.errors import DeviceError
from tapegrad.ops.interop.dtype_functions import isdtype

API_VERSION = "2025.12"
KNOWN_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")
"""Versions of the standard that the namespace serves: each contains the earlier ones."""

_DTYPES = {
    name: dtypes.asdtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64",
        "complex64", "complex128",
    )
}  # fmt: skip
_MOST_DIMENSIONS = {"cpu": 64, "cuda": 32}


class Info:
    """The answers of ``tapegrad.__array_namespace_info__()``."""

    def capabilities(self) -> dict[str, object]:
        """What the namespace can do: boolean indexing, shapes that depend on values, how many dimensions."""
        return {
            "boolean indexing": True,
            "data-dependent shapes": True,
            "max dimensions": _MOST_DIMENSIONS[current_device().kind],
        }

    def default_device(self) -> Device:
        """Where new tensors are made now."""
        return current_device()

    def devices(self) -> tuple[Device, ...]:
        """The CPU, and every CUDA device on which a kernel can be launched."""
        devices: list[Device] = [CPU]
        while True:
            try:
                devices.append(asdevice(f"cuda:{len(devices) - 1}"))
            except DeviceError:  # there is no such device, so the list is complete
                return tuple(devices)

    def default_dtypes(self, *, device: Device | str | None = None) -> dict[str, DType]:
        """What Python numbers become, and the dtype of positions; the same on every device.  Raises DeviceError."""
        _check(device)
        return {
            "real floating": dtypes.of_python("f", dtypes.float32),
            "complex floating": dtypes.of_python("c", dtypes.complex64),
            "integral": dtypes.int64,
            "indexing": dtypes.int64,
        }

    def dtypes(
        self, *, device: Device | str | None = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, Any]:
        """The standard's dtypes by name, of a kind or of any in a tuple (see :func:`tapegrad.isdtype`).

        They are the same on every device.  Raises DeviceError, DTypeError.
        """
        _check(device)
        return {name: dtype for name, dtype in _DTYPES.items() if kind is None or isdtype(dtype, kind)}


def _check(device: Device | str | None) -> None:
    if device is not None:
        asdevice(device)


def namespace_info() -> Info:
    """Devices, dtypes and capabilities of the namespace, as the array API standard asks."""
    return Info()


def check_version(api_version: str | None) -> None:
    """Raises ValueError for a version of the standard that the namespace does not serve."""
    if api_version is not None and api_version not in KNOWN_VERSIONS:
        raise ValueError(
            f"__array_namespace__: the array API standard {api_version!r} is not served; tapegrad has {API_VERSION}"
        )
