"""Numbers that stay on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tapegrad.core.storage import METER
from tapegrad.device.oom_retry import retried

if TYPE_CHECKING:
    from tapegrad.device.base import Device


class HostScalar:
    """A number on the host that stands for a 0-d array on a device: kernels take it as an argument.

    So a learning rate, a Python number or a loss scale costs neither a transfer nor a kernel of its own.
    """

    __slots__ = ("device", "dtype", "itemsize", "nbytes", "value")

    ndim = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    size = 1

    def __init__(self, value: Any, device: Device) -> None:
        self.value = value  # a 0-d NumPy array
        self.dtype = value.dtype
        self.itemsize = self.nbytes = value.dtype.itemsize
        self.device = device

    def on_device(self) -> Any:
        """Return the number as a new 0-d array on the device, without caching it.  Raises DeviceMemoryError."""
        try:
            return self._uploaded()
        except MemoryError as e:
            return retried(e, self.device, f"a number of {self.dtype}", self.nbytes, self._uploaded)

    def _uploaded(self) -> Any:
        with self.device.active():
            return self.device.xp.asarray(self.value)


METER.uncounted[HostScalar] = lambda: True
