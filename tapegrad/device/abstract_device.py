"""Devices of dry runs: they lend abstract arrays, launch nothing, and else answer as the real devices do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from tapegrad.device import abstract_array, cuda_types
from tapegrad.device.base import Device
from tapegrad.device.cpu import CPU, checked, unmasked
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.probe import is_array
from tapegrad.device.types import Array, DType


class AbstractDevice(Device):
    """What stands for ``device``, so that works can tell of their passes over memory.  Its ``xp`` is None."""

    __slots__ = ("_device",)

    def __init__(self, device: Device) -> None:
        super().__init__(device.name, device.kind, None, device.least_pooled, device.lazy, device.index)
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An abstract array."""
        return abstract_array.empty(shape, dtype)

    def array(self, x: Any, dtype: DType | None = None, copy: bool = True) -> Any:
        """Return the user's array itself where that takes no memory, else an abstract one.  Raises NotATensorError."""
        if (
            self._device is not CPU
            and not isinstance(x, HostScalar)
            and (is_array(x) or type(x) is abstract_array.AbstractArray)
        ):
            return abstract_array.adopted(x, x.dtype if dtype is None else dtype)
        array = CPU.array(x, dtype, copy=False) if not isinstance(x, np.ndarray) else unmasked(x)
        array = abstract_array.adopted(array, checked(np.empty(0, array.dtype), type(x).__name__, dtype)[0].dtype)
        if self._device is CPU:
            return array
        cuda_types.known("asarray", array.dtype)
        if not array.ndim:
            return HostScalar(array if type(array) is abstract_array.AbstractArray else np.array(array), self._device)
        return abstract_array.empty(array.shape, array.dtype)

    def numpy(self, x: Array) -> Array:
        """As the real device does."""
        return self._device.numpy(x)

    def shared(self, x: Array, owner: object) -> Array:
        """As the real device does."""
        return self._device.shared(x, owner)

    def save(self, x: Array, into: object) -> None:
        """Nothing is copied."""

    def load(self, x: Array, data: object) -> None:
        """Nothing is copied."""

    def is_view(self, x: Array, of: Array) -> bool:
        """As the real device does."""
        return self._device.is_view(x, of)

    def give_back(self) -> None:
        """Nothing is held."""

    def usage(self) -> tuple[int, int]:
        """As the real device does."""
        return self._device.usage()

    def limit(self, nbytes: int | None) -> None:
        """Nothing is held."""

    def active(self) -> AbstractContextManager[object]:
        """A block without effect."""
        return nullcontext()

    def compile(self, text: str, name: str, options: tuple[str, ...]) -> None:
        """Nothing is compiled."""

    def launch(
        self, function: object, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[object, ...], shared: int = 0
    ) -> None:
        """Nothing runs."""

    @property
    def cudnn(self) -> Any:
        """That of the real device: its plans say what passes there are."""
        return self._device.cudnn  # type: ignore[attr-defined]  # asked of a GPU alone

    @property
    def checks(self) -> AbstractDevice:
        """What kernels would find wrong: nothing."""
        return self

    def argument(self, kind: int, low: int, high: int) -> None:
        """The argument that a kernel would get."""

    def asked(self) -> None:
        """Nothing was launched."""


@cache
def dry(device: Device) -> AbstractDevice:
    """What stands for ``device`` in a dry run."""
    return AbstractDevice(device)
