"""Memory shared with other libraries: DLPack both ways, and CUDA's protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tapegrad.device import Device, asdevice, dlpack
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.create.transfer import to_device
from tapegrad.tensor import Tensor, TensorLike, refuse_detaching, upload
from tapegrad.variable import Variable

__all__ = ["from_dlpack"]


def from_dlpack(x: TensorLike, *, device: Device | str | None = None, copy: bool | None = None) -> Tensor:
    """The array of another library (NumPy, CuPy, PyTorch, JAX, ...) as a tensor, through DLPack.

    Without ``copy=True`` the tensor shares the array's memory: **the array must not be changed while the tensor is in
    use**, since a tensor is a value (``tg.asarray`` copies).  device: where the tensor shall lie; default: where the
    array does.  Gradients do not pass into the other library.  A tensor is
    returned as it is where it lies there.

    Raises NotATensorError for what offers no DLPack, DTypeError for a dtype that NumPy or CuPy does not have,
    DeviceError for a device that is not available, ValueError where ``copy=False`` cannot be kept, and BufferError
    where the producer refuses.
    """
    if isinstance(x, (Tensor, Variable)):
        t = asarray(x)
    else:
        array, source = dlpack.imported(x)
        t = upload(array, source, copy=bool(copy), shared=not copy)
    target = t.device if device is None else asdevice(device)
    if copy is False and target is not t.device:
        raise ValueError(f"from_dlpack: from {t.device} to {target} takes a copy; leave out copy=False")
    return t if target is t.device else to_device(t, target)


def _dlpack(
    self: Tensor | Variable,
    /,
    *,
    stream: object = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """A DLPack capsule: on the CPU of a copy, with ``copy=False`` of the memory itself, marked read-only.

    On CUDA the memory is shared, and ``copy=True`` asks for a copy: the consumer must not write to shared memory.
    ``dl_device`` may ask for the CPU.  Raises BufferError where that cannot be had, and DetachedError as
    ``Tensor.numpy`` does.
    """
    value = _value(self)
    refuse_detaching(value._buffer, "DLPack", "")
    array = value._array
    return dlpack.capsule(array, (array, value._buffer), self.device, stream, max_version, dl_device, copy)


def _dlpack_device(self: Tensor | Variable) -> tuple[int, int]:
    """DLPack's type and number of the device."""
    return dlpack.place(self.device)


def _cuda_array_interface(self: Tensor) -> dict[str, object]:
    """Numba's protocol, on CUDA only."""
    with _on_gpu(self, "__cuda_array_interface__").active():
        refuse_detaching(self._buffer, "__cuda_array_interface__", "")
        return self._array.__cuda_array_interface__


def _cupy_get_ndarray(self: Tensor) -> Callable[[], Any]:
    """CuPy's protocol, on CUDA only: CuPy's functions and kernels take the tensor's array."""
    _on_gpu(self, "__cupy_get_ndarray__")

    def lent() -> Any:
        refuse_detaching(self._buffer, "CuPy", "")
        return self._lent()

    return lent


def _on_gpu(x: Tensor, attribute: str) -> Device:
    """The device; on the CPU the tensor has no such attribute (so that ``hasattr`` says so)."""
    if x.device.kind != "cuda":
        raise AttributeError(f"a tensor on {x.device} has no {attribute}")
    return x.device


def _value(x: Tensor | Variable) -> Tensor:
    """The tensor, or a variable's present value (sharing its memory is no use that a tape records)."""
    return x if isinstance(x, Tensor) else Tensor(x._cell.get())


def bind_protocols() -> None:
    """Called once, when the ops are imported."""
    for name, method in (("__dlpack__", _dlpack), ("__dlpack_device__", _dlpack_device)):
        for cls in (Tensor, Variable):
            setattr(cls, name, method)
    for f in (_cuda_array_interface, _cupy_get_ndarray):
        setattr(Tensor, f"_{f.__name__}__", property(f))
