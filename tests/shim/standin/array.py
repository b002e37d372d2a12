"""``cupy.ndarray`` over the pool's host bytes, as strict as the real one about what it mixes with."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from . import capturing, cuda, memory, pool, state
from .operators import SCALARS, Operators

IMPLICIT = (
    "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."
)


def supported(dtype: Any) -> np.dtype:
    """The dtype, if a CuPy array may have it."""
    dtype = np.dtype(dtype)
    if dtype.char not in "?bhilqBHILQefdFD" and dtype.name != "bfloat16":
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype


def span(array: ndarray) -> tuple[int, int]:
    """The address and the number of bytes that an array covers."""
    low, high = byte_bounds(array._host)
    return low, high - low if array.size else 0


class ndarray(Operators):
    """An array on a device."""

    __slots__ = ("_host", "data", "base", "__weakref__")
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: Any = "C"):
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(operator.index(n) for n in shape)
        if any(n < 0 for n in shape):
            raise ValueError("Negative dimensions are not allowed")
        if order not in ("C", "F", "c", "f", None):
            raise ValueError(f"order not understood. order={order}")
        if strides is not None and memptr is None:
            raise ValueError("memptr is required if strides is given.")
        dtype, self.base = supported(dtype), None
        self.data = memptr
        if memptr is None:
            size = dtype.itemsize
            for n in shape:
                size *= n
            self.data = pool.alloc(size)
        self._look(shape, dtype, strides, order or "C")

    def _look(self, shape: Any, dtype: Any, strides: Any = None, order: str = "C") -> None:
        if 0 in shape:
            self._host = np.empty(shape, dtype)
            return
        mem = self.data.mem
        offset = self.data.ptr - mem.ptr
        self._host = np.ndarray(shape, dtype, memory.raw(mem.ptr, mem.size), offset, strides, order)  # type: ignore

    def _seen_as(self, host: np.ndarray) -> ndarray:
        view = object.__new__(ndarray)
        view.base = self if self.base is None else self.base
        view.data = (
            memory.MemoryPointer(self.data.mem, host.ctypes.data - self.data.mem.ptr) if host.size else self.data
        )
        view._look(host.shape, host.dtype, host.strides)
        return view

    shape = property(lambda self: self._host.shape, lambda self, new: setattr(self._host, "shape", new))
    dtype = property(lambda self: self._host.dtype)
    strides = property(lambda self: self._host.strides)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    device = property(lambda self: self.data.device)
    T = property(lambda self: self if self.ndim < 2 else self._seen_as(self._host.T))
    mT = property(lambda self: self._seen_as(self._host.mT))

    @property
    def flags(self) -> Any:
        """Contiguity, both ways, and whether the memory is the array's own."""
        flags = self._host.flags
        return SimpleNamespace(c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous, fnc=flags.fnc,
                               forc=flags.forc, owndata=self.base is None)  # fmt: skip

    def _real(self) -> ndarray:
        return self if self.dtype.kind != "c" else self._seen_as(self._host.real)

    def _imag(self) -> ndarray:
        return fresh(np.zeros(self.shape, self.dtype)) if self.dtype.kind != "c" else self._seen_as(self._host.imag)

    real = property(_real, lambda self, value: operator.setitem(self.real, Ellipsis, value))
    imag = property(capturing.recorded(_imag), lambda self, value: operator.setitem(self.imag, Ellipsis, value))

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        """A copy in host memory."""
        capturing.refuse(getattr(stream, "ptr", stream), "a copy to the host", RuntimeError)
        if out is not None:
            if not isinstance(out, np.ndarray):
                raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
            if out.dtype != self.dtype:
                raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
            if out.shape != self.shape:
                raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}")
            if not (out.flags.c_contiguous or out.flags.f_contiguous):
                raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        else:
            order = ("F" if self._host.flags.fnc else "C") if order.upper() == "A" else order
            out = np.empty(self.shape, self.dtype, order=order)  # type: ignore[call-overload]
        out[...] = self._host
        name = "waits" if blocking else "get later"
        if blocking:
            cuda.wait(state.stream_pointer() if stream is None else getattr(stream, "ptr", stream))
        host = ((out.ctypes.data, out.nbytes),)
        with self._at_home():
            state.log("d2h", getattr(stream, "ptr", stream), name=name, reads=(span(self),), host=host)
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        """Copy from host memory."""
        capturing.refuse(getattr(stream, "ptr", stream), "a copy from the host", RuntimeError)
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not (self._host.flags.c_contiguous or self._host.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        self._host[...] = arr
        whole = arr.flags.c_contiguous or arr.flags.f_contiguous  # else CuPy copies it first
        host = ((arr.ctypes.data, arr.nbytes),) if whole else ()
        with self._at_home():
            state.log("h2d", getattr(stream, "ptr", stream), name="set", writes=(span(self),), host=host)

    def _at_home(self) -> cuda.Device:
        """CuPy copies from and to the host on the current stream of the array's own device."""
        return cuda.Device(self.data.device_id if self.data.device_id >= 0 else None)

    def item(self) -> Any:
        """The only element, as a Python number."""
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self.get().tobytes(order)  # type: ignore[arg-type]

    def fill(self, value: Any) -> None:
        """Give every element one value."""
        if isinstance(value, np.ndarray):
            if value.shape:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            value = value.item()
        if isinstance(value, ndarray) and not value.shape:
            value = value._host
        elif not isinstance(value, SCALARS):
            raise TypeError(f"Unsupported type {type(value)}")
        if value != 0:
            state.require_compiler()
        if capturing.written(ndarray.fill, self, value):
            return
        with np.errstate(all="ignore"):
            self._host[...] = np.asarray(value).astype(self.dtype)
        state.log("op", name="fill", writes=(span(self),))

    @capturing.recorded
    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        """A copy of another dtype."""
        dtype = supported(dtype)
        if not copy and dtype == self.dtype:
            return self
        with np.errstate(all="ignore"):
            return fresh(self._host.astype(dtype, order=order, casting=casting or "unsafe"), (self,), "astype", order)

    @capturing.recorded
    def copy(self, order: str = "C") -> ndarray:
        return fresh(self._host.copy(order), (self,), "copy", order)  # type: ignore[arg-type]

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        return self._seen_as(self._host.view() if dtype is None else self._host.view(supported(dtype)))

    @capturing.recorded
    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        host = self._host.reshape(*shape, order=order)  # type: ignore[call-overload]
        return adopt(host, (self,), "reshape") if self.size else self._seen_as(host)  # on the same device, too

    @capturing.recorded
    def ravel(self, order: str = "C") -> ndarray:
        host = self._host.ravel(order)  # type: ignore[arg-type]
        return adopt(host, (self,), "ravel") if self.size else self._seen_as(host)

    @capturing.recorded
    def flatten(self, order: str = "C") -> ndarray:
        return fresh(self._host.flatten(order), (self,), "flatten")  # type: ignore[arg-type]

    def transpose(self, *axes: Any) -> ndarray:
        return self._seen_as(self._host.transpose(*axes))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(IMPLICIT)

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Any:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        if self.size > 1:
            raise ValueError("The truth value of an array with more than one element is ambiguous. "
                             "Use a.any() or a.all()")  # fmt: skip
        return bool(self.size and self.item())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    def __str__(self) -> str:
        return str(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    def __reduce__(self) -> Any:
        return _again, (self.get(),)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, with the current stream; the legacy default stream is called 1."""
        return {
            "shape": self.shape, "typestr": self.dtype.str, "descr": self.dtype.descr, "version": 3,
            "strides": None if self._host.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False), "stream": state.stream_pointer() or 1,
        }  # fmt: skip


def _again(host: np.ndarray) -> ndarray:
    array = ndarray(host.shape, host.dtype)
    array.set(host)
    return array


def fresh(host: Any, operands: tuple = (), name: str = "", order: str = "C") -> ndarray:
    """A new array with these values, C-ordered as what CuPy computes is, unless an order is named."""
    if name not in ("", "copy"):
        state.require_compiler()
    host = np.asarray(host)
    fortran = order == "F" or (order in "KA" and host.flags.fnc)
    array = ndarray(host.shape, host.dtype, order="F" if fortran else "C")
    if state.thread.tracing is None:
        array._host[...] = host
    state.log("op", name=name, reads=tuple(span(one) for one in operands), writes=(span(array),))
    return array


def adopt(result: Any, operands: tuple = (), name: str = "", scalars: bool = True) -> Any:
    """NumPy's result as the device's: a view where it looks into an operand's memory, else a new array."""
    if isinstance(result, np.ndarray):
        for one in operands:
            if result is one._host:
                return one
        if result.size:
            address = result.ctypes.data
            for one in operands:
                if one.size and one.data.mem.ptr <= address < one.data.mem.ptr + one.data.mem.size:
                    return one._seen_as(result)
        return fresh(result, operands, name)
    if isinstance(result, np.generic):
        return fresh(result, operands, name) if scalars else result
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(adopt(one, operands, name, scalars) for one in result))
    if isinstance(result, tuple | list):
        return type(result)(adopt(one, operands, name, scalars) for one in result)
    return result


def unwrap(value: Any, found: list[ndarray]) -> Any:
    """What NumPy is given for an argument; the arrays found in it are noted, and NumPy's own refused."""
    if isinstance(value, ndarray):
        if value.data.device_id not in (-1, state.thread.device):
            raise ValueError(f"Array device must be same as the current device: array device = {value.data.device_id} "
                             f"while current = {state.thread.device}")  # fmt: skip
        found.append(value)
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if type(value) in (tuple, list):
        return type(value)(unwrap(one, found) for one in value)
    return unwrap(value.__cupy_get_ndarray__(), found) if hasattr(value, "__cupy_get_ndarray__") else value
