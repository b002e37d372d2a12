"""How arrays come to be: from nothing, from host values, from another library's device memory."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import numpy as np

from . import capturing, memory, state
from .array import fresh, ndarray, supported
from .cuda import Device as _device
from .cuda import ExternalStream
from .namespace import module, ranges

#: DLPack's codes of dtypes.
UNSIGNED, BFLOAT = 1, 4


@capturing.recorded
def array(obj: Any, dtype: Any = None, copy: Any = True, order: Any = "K", subok: bool = False, ndmin: int = 0, *,
          blocking: bool = False) -> ndarray:  # fmt: skip
    """A device array of anything: only here do host values cross over."""
    if hasattr(obj, "__cupy_get_ndarray__"):
        obj = obj.__cupy_get_ndarray__()
    if hasattr(obj, "__cuda_array_interface__") and not isinstance(obj, ndarray):
        obj = _imported(obj)
    dtype = None if dtype is None else supported(dtype)
    if isinstance(obj, ndarray):
        elsewhere = obj.data.device_id != state.thread.device and obj.size
        same = dtype in (None, obj.dtype) and not elsewhere
        fits = order in ("K", "A", None) or getattr(obj._host.flags, f"{order.lower()}_contiguous")
        if same and fits and not copy:
            result = obj
        elif copy is False and elsewhere:
            raise ValueError("Unable to avoid copy while creating an array as requested.")
        elif elsewhere:
            result = _from_another_device(obj, order or "K").astype(dtype or obj.dtype, copy=False)
        else:
            result = fresh(obj._host.astype(dtype or obj.dtype), (obj,), "copy", order or "K")
    else:
        if _holds_arrays(obj):
            return module.stack([array(one) for one in obj]).astype(dtype or _common(obj), copy=False)
        if copy is False and isinstance(obj, np.ndarray):
            raise ValueError("Unable to avoid copy while creating an array as requested.")
        capturing.refuse(None, "a copy from the host", RuntimeError)
        host = np.array(obj, dtype)
        supported(host.dtype)
        result = fresh(host, (), "", order or "K")
        state.log("h2d", name="array", writes=ranges([result]))
    return result if result.ndim >= ndmin else result.reshape((1,) * (ndmin - result.ndim) + result.shape)


def _from_another_device(x: ndarray, order: str) -> ndarray:
    """A copy here: CuPy makes it contiguous there and copies on the stream here; nobody waits for a stream there."""
    with _device(x.data.device_id):
        fits = x._host.flags.c_contiguous or (order in "KAF" and x._host.flags.f_contiguous)
        near = x if fits else x.copy("C" if order in "KA" else order)
    result = ndarray(near.shape, near.dtype, order="C" if near._host.flags.c_contiguous else "F")
    result.data.copy_from_device_async(near.data, near.nbytes)
    return result


def _holds_arrays(obj: Any) -> bool:
    return isinstance(obj, list | tuple) and any(isinstance(one, ndarray) or _holds_arrays(one) for one in obj)


def _common(obj: Any) -> Any:
    return np.result_type(*(array(one).dtype for one in obj))


def _imported(obj: Any) -> ndarray:
    face = obj.__cuda_array_interface__
    if face.get("version", 0) >= 3 and face.get("stream") is not None:
        ExternalStream(face["stream"]).synchronize()
    pointer, dtype = face["data"][0], np.dtype(face["typestr"])
    strides = face.get("strides") or None
    size = sum((n - 1) * abs(s) for n, s in zip(face["shape"], strides)) + dtype.itemsize if strides else (
        int(np.prod(face["shape"])) * dtype.itemsize)  # fmt: skip
    mem = memory.UnownedMemory(pointer, size, obj)
    return ndarray(face["shape"], dtype, memory.MemoryPointer(mem, 0), strides)


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    """The array itself where it is one already."""
    return array(a, dtype, copy, order, blocking=blocking)


def asnumpy(a: Any, stream: Any = None, order: Any = "C", out: Any = None, *, blocking: bool = True) -> np.ndarray:
    """A NumPy array of anything."""
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    return np.asarray(a, order=order) if out is None else np.copyto(out, a) or out


def get_array_module(*args: Any) -> Any:
    """This module if any argument is a device array, else NumPy."""
    return module if any(isinstance(one, ndarray) for one in args) else np


def from_dlpack(array: Any, *, device: Any = None, copy: Any = None) -> ndarray:
    """A view of another library's device array."""
    kind, number = array.__dlpack_device__()
    if int(kind) == 1:
        raise TypeError("CPU arrays cannot be directly imported to CuPy. "
                        "Use `cupy.array(numpy.from_dlpack(input))` instead.")  # fmt: skip
    if int(kind) not in (2, 13):
        raise TypeError(f"Unsupported array type: {int(kind)}")
    with _device(number):
        capsule = array.__dlpack__(stream=state.stream_pointer() or 1, max_version=(1, 0), copy=copy)
        narrow = relabel(capsule, 1, 0, {BFLOAT: UNSIGNED}) == BFLOAT
        held = _Held(capsule)
        host = np.from_dlpack(held)  # type: ignore[arg-type]
        mem = memory.UnownedMemory(host.ctypes.data, _extent(host), (array, host), number)
        dtype = _bfloat16() if narrow else host.dtype
        return ndarray(host.shape, dtype, memory.MemoryPointer(mem, 0), host.strides)


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


def relabel(capsule: Any, kind: int, number: int, codes: dict[int, int]) -> int:
    """Write another device, and maybe dtype code, into a DLPack capsule; returns the code that was there."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = b"dltensor_versioned" if "versioned" in repr(capsule) else b"dltensor"
    place = get(capsule, name) + (32 if name.endswith(b"versioned") else 0) + 8
    ctypes.c_int32.from_address(place).value = kind
    ctypes.c_int32.from_address(place + 4).value = number
    code = ctypes.c_uint8.from_address(place + 12)
    before, code.value = code.value, codes.get(code.value, code.value)
    return before


def _extent(host: np.ndarray) -> int:
    low, high = np.lib.array_utils.byte_bounds(host)
    return high - low if host.size else 0


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def _filled(shape: Any, value: Any, dtype: Any, order: str) -> ndarray:
    result = ndarray(shape, dtype, order=order)
    result.fill(value)
    return result


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return _filled(shape, 0, dtype, order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return _filled(shape, 1, dtype, order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    dtype = dtype or (fill_value.dtype if isinstance(fill_value, ndarray) else np.asarray(fill_value).dtype)
    return _filled(shape, fill_value, dtype, order)


def empty_like(
    prototype: ndarray, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None
) -> ndarray:
    if subok is not None:
        raise TypeError("subok is not supported yet")
    if not isinstance(prototype, ndarray):
        raise TypeError(f"Unsupported type {type(prototype)}")
    host = np.empty_like(prototype._host, dtype, order, shape=shape)  # type: ignore[call-overload]
    return ndarray(host.shape, host.dtype, order="F" if host.flags.fnc else "C")


def zeros_like(a: ndarray, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    result = empty_like(a, dtype, order, subok, shape)
    result.fill(0)
    return result


def ones_like(a: ndarray, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    result = empty_like(a, dtype, order, subok, shape)
    result.fill(1)
    return result


def full_like(a: ndarray, fill_value: Any, dtype: Any = None, order: str = "K", subok: None = None,
              shape: Any = None) -> ndarray:  # fmt: skip
    result = empty_like(a, dtype, order, subok, shape)
    result.fill(fill_value)
    return result


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, None, "C", ndmin=1)


def asfortranarray(a: Any, dtype: Any = None) -> ndarray:
    if isinstance(a, ndarray) and a.ndim == 2 and a.dtype.char in "fdFD" and not a.flags.f_contiguous:
        capturing.refuse(None, "calling cuBLAS API", NotImplementedError)
    return array(a, dtype, None, "F", ndmin=1)


def copy(a: ndarray, order: str = "K") -> ndarray:
    return a.copy(order)


class _Held:
    """A capsule as an object that NumPy imports: 2.0 looks the methods up in the class."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def dlpack(
    self: ndarray, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
) -> Any:
    """A capsule of the array on its device; or, where the host is asked for, of a copy there."""
    options = {"max_version": max_version} if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1) else {}
    if dl_device is not None and int(dl_device[0]) == 1:
        if copy is False:
            raise ValueError("GPU memory cannot be exported to CPU without copy.")
        return self.get().__dlpack__(**options)
    if copy:
        raise BufferError("copy=True only supported for copy to CPU.")
    if stream is not None and (not isinstance(stream, int) or stream < -1 or stream == 0):
        raise ValueError(f"On CUDA, the valid stream for the DLPack protocol is -1, 1, 2, or any larger value, "
                         f"but {stream} was provided")  # fmt: skip
    if stream != -1 and (stream or 1) != (state.stream_pointer() or 1):
        from .cuda import ExternalStream, get_current_stream

        ExternalStream(stream or 1).wait_event(get_current_stream().record())
    # NumPy exports no bfloat16: it is given the bits, and the capsule then the name.
    codes = {UNSIGNED: BFLOAT} if self.dtype.name == "bfloat16" else {}
    face = {"shape": self.shape, "strides": self.strides, "typestr": "<u2" if codes else self.dtype.str, "version": 3,
            "data": (self._host.ctypes.data, False)}  # fmt: skip
    capsule = np.asarray(types.SimpleNamespace(__array_interface__=face, held=self)).__dlpack__(**options)
    relabel(capsule, 2, self.data.device_id, codes)
    return capsule


def build() -> None:
    """Put the creation functions into the module, and DLPack into the array."""
    for one in (array, asarray, asnumpy, get_array_module, from_dlpack, empty, zeros, ones, full, empty_like,
                zeros_like, ones_like, full_like, ascontiguousarray, asfortranarray, copy):  # fmt: skip
        setattr(module, one.__name__, one)
    module.asanyarray = asarray  # type: ignore[attr-defined]
    ndarray.__dlpack__ = dlpack  # type: ignore[attr-defined]
    ndarray.__dlpack_device__ = lambda self: (2, self.data.device_id)  # type: ignore[attr-defined]
