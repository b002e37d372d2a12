"""The CPU, through NumPy."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from tapegrad.device import dtypes, foreign
from tapegrad.device.base import Device
from tapegrad.device.oom_retry import retried
from tapegrad.device.pool import LEAST, POOL
from tapegrad.device.types import Array, DType
from tapegrad.errors import DTypeError, NotATensorError


class CPUDevice(Device):
    """Host memory, NumPy's functions."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("cpu", "cpu", np, LEAST, lazy=False)

    def __reduce__(self) -> str:
        return "CPU"

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An uninitialised C-contiguous array from the host pool."""
        try:
            return POOL.empty(shape, dtype)
        except MemoryError as e:
            what = f"{dtype.name}{list(shape)}"
            return retried(e, self, what, prod(shape) * dtype.itemsize, lambda: POOL.empty(shape, dtype))

    def give_back(self) -> None:
        """Idle blocks of the pool go back to the system."""
        POOL.free_all_blocks()

    def usage(self) -> tuple[int, int]:
        """-1, since small arrays do not come from the pool; and its idle bytes."""
        return -1, POOL.idle_bytes

    def limit(self, nbytes: int | None) -> None:
        """Free idle blocks of the host pool, which heeds the meter's limit; it refuses no request."""
        POOL.free_idle(0)

    def free_idle(self, nbytes: int) -> None:
        """Free idle blocks of the pool if ``nbytes`` do not fit beside them."""
        if nbytes >= LEAST:
            POOL.free_idle(nbytes)

    def array(self, x: Any, dtype: DType | None = None, copy: bool = True) -> Array:
        """``x`` as a NumPy array; an array on another device is fetched.  Raises NotATensorError."""
        if isinstance(x, np.ndarray):
            array = unmasked(x)
        elif foreign.index(x) is not None:
            array, copy = fetch(x), False
        elif hasattr(x, "__array__") or hasattr(x, "__dlpack__"):
            foreign.refuse_gradients(x)
            array = np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
        else:
            array, copy = from_python(x, dtype), False
        array, fresh = checked(array, type(x).__name__, dtype)
        if fresh or not copy:
            return array
        self.free_idle(array.nbytes)
        return np.array(array, order="C")

    def numpy(self, x: Array) -> Array:
        """The array itself."""
        return x

    def shared(self, x: Array, owner: object) -> Array:
        """A read-only array on the memory of ``x``."""
        return shared(x, owner)

    def save(self, x: Array, into: Any) -> None:
        """A copy into the buffer, whatever the strides of ``x``."""
        np.ndarray(x.shape, x.dtype, into)[...] = x

    def load(self, x: Array, data: Any) -> None:
        """A copy out of the buffer."""
        x[...] = np.ndarray(x.shape, x.dtype, data)

    def is_view(self, x: Array, of: Array) -> bool:
        """Whether the two arrays share memory bounds."""
        return np.may_share_memory(x, of)


class _Lent:
    """The base of an exported array and of every view of it: it refers to the owner of the memory."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, x: np.ndarray, owner: object, writable: bool) -> None:
        self.owner = owner
        self.__array_interface__ = interface = x.__array_interface__
        interface["data"] = interface["data"][0], not writable


def shared(x: np.ndarray, owner: object, writable: bool = False) -> np.ndarray:
    """An array on the memory of ``x`` that refers, as its views do, to ``owner``.

    A NumPy view cannot: the base of a view of a view is the array that owns the memory, not the view in between.
    """
    array = np.asarray(_Lent(x, owner, writable))
    return array if array.dtype == x.dtype else array.view(x.dtype)  # the interface cannot name extension dtypes


def is_array(x: object) -> bool:
    """Whether ``x`` is a NumPy array."""
    return isinstance(x, np.ndarray)


def fetch(x: object) -> np.ndarray:
    """A NumPy copy of an array, of any library, that lies in a CUDA device's memory."""
    import cupy

    array = x if isinstance(x, cupy.ndarray) else foreign.imported(cupy, x)
    return array.get()


def checked(array: Array, kind: str, dtype: DType | None) -> tuple[Array, bool]:
    """A NumPy array of numbers in native byte order, cast to ``dtype``; and whether that made a copy.

    Raises NotATensorError.
    """
    fresh = False
    if array.dtype.kind not in "biufc" and not dtypes.is_extended(array.dtype):
        raise NotATensorError(f"asarray: cannot make a tensor of {kind} with dtype {array.dtype}")
    if dtype is not None and array.dtype != dtype:
        array, fresh = array.astype(dtype), True
    if not array.dtype.isnative:
        array, fresh = array.astype(array.dtype.newbyteorder("=")), True
    return array, fresh


def from_python(x: object, dtype: DType | None) -> np.ndarray:
    """Numbers and nested sequences of them, by the rule of TensorFlow: float -> float32, int -> int64.

    Raises NotATensorError.
    """
    _refuse_masked(x)
    try:
        if dtype is not None:
            return np.array(x, dtype=dtype)
        array = np.array(x)
    except (TypeError, ValueError) as e:
        raise NotATensorError(f"asarray: cannot make a tensor of {type(x).__name__} {x!r:.80}: {e}") from None
    if not isinstance(x, np.generic) and not _has_dtype(x):
        array = array.astype(dtypes.of_python(array.dtype.kind, array.dtype), copy=False)
    return array


def unmasked(x: np.ndarray) -> np.ndarray:
    """Return ``x``.  Raises DTypeError for a masked array with a masked element: a tensor has no mask."""
    if type(x) is not np.ndarray and np.ma.is_masked(x):
        raise DTypeError(
            f"asarray: cannot make a tensor of {type(x).__name__} {x.dtype}{list(x.shape)}; a tensor has no mask: "
            "pass x.filled(value), and leave the masked elements out by tg.where(~np.ma.getmaskarray(x), ..., 0) or by "
            "where= of tg.sum, tg.mean and the like"
        )
    return x


def _refuse_masked(x: object) -> None:
    """Raise DTypeError for a masked array in a nested sequence."""
    if isinstance(x, (list, tuple)):
        for item in x:
            if isinstance(item, (list, tuple)):
                _refuse_masked(item)
            elif isinstance(item, np.ndarray):
                unmasked(item)


def _has_dtype(x: object) -> bool:
    """Whether some leaf of the nested sequence carries a dtype of its own."""
    if isinstance(x, (list, tuple)):
        return any(map(_has_dtype, x))
    return hasattr(x, "dtype")


CPU = CPUDevice()
