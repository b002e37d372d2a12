"""Abstract arrays: shape, dtype and strides without memory, to follow a program without computing it.

In a *dry run* of a thread (``engine/abstract_evaluation.py``) every array that the engine would compute is an abstract
array: an array in one region of address space that is mapped read-only and never backed by memory.  Code that reads
shapes and strides only (views, the cost rule, layouts of kernels) works on abstract arrays unchanged; code that would
compute with one raises DryRunError.  Abstract arrays stand for the arrays of every device.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tapegrad.core.storage import METER
from tapegrad.device.host_scalar import HostScalar
from tapegrad.device.types import Array, DType, Params
from tapegrad.errors import DryRunError

if TYPE_CHECKING:
    from tapegrad.core.aval import ShapedArray
    from tapegrad.core.primitive import View

_MOST, _LEAST = 2**44, 2**30
_GRAIN = 512  # what device memory is aligned to, at least


class _Here(threading.local):
    at = 0
    """Where in the region the next abstract array of this thread lies."""
    counted = False
    """Whether abstract arrays stand for memory: their bytes are predicted."""


here = _Here()


class AbstractArray(np.ndarray):
    """An array without contents."""

    __slots__ = ()

    def __array_ufunc__(self, *args: object, **kwargs: object) -> Any:
        raise unread("an array")

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        if func in (np.may_share_memory, np.broadcast_to):
            return super().__array_function__(func, types, args, kwargs)
        raise unread("an array")

    def __repr__(self) -> str:
        return f"AbstractArray({self.dtype.name}{list(self.shape)})"

    def fill(self, value: object) -> None:
        """Nothing is written."""


METER.uncounted[AbstractArray] = lambda: not here.counted


def begin() -> None:
    """A dry run begins: the region is free."""
    here.at = 0


def real(array: Any, node: object) -> Any:
    """``array``, the value of ``node``, which is to be read.  Raises DryRunError if it is an abstract array."""
    if is_abstract(array):
        raise unread(repr(node))
    return array


def unread(what: str) -> DryRunError:
    """The error for reading a value that was never computed."""
    return DryRunError(
        f"the value of {what} is read, but it comes from a dry run (predict_peak, or a captured function that is being "
        "written down), which computes none: what the function does may not depend on values (`if`, .item(), .numpy(), "
        "masks as indices), and nothing that it makes can be used afterwards, but for its results"
    )


def is_abstract(x: object) -> bool:
    """Whether ``x``, what a buffer holds, has no contents."""
    return type(x) is AbstractArray or (type(x) is HostScalar and type(x.value) is AbstractArray)


@cache
def region() -> Any:
    """Read-only address space: as much as the system lends, up to 16 TiB; none of it is ever committed."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    size = _MOST
    while True:
        try:
            return mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ)
        except (OSError, ValueError, OverflowError):
            if size <= _LEAST:
                raise
            size //= 4


@cache
def _start() -> int:
    return np.frombuffer(region(), np.uint8, 1).ctypes.data % _GRAIN


def _lying(shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...] | None, address: int = 0) -> AbstractArray:
    """An abstract array at a place of its own; ``address``: where it begins, modulo the alignment of device memory."""
    below, above = 0, prod(shape) * dtype.itemsize
    if strides is not None:
        reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True) if n]
        below, above = sum(s for s in reach if s < 0), sum(s for s in reach if s > 0) + dtype.itemsize
    room = above - below + 3 * _GRAIN
    if here.at + room > len(region()):
        here.at = 0
    if room > len(region()):
        raise DryRunError(f"an array of {above - below} bytes is larger than the address space of {len(region())}")
    offset = here.at - below
    offset += (address - _start() - offset) % _GRAIN
    here.at += -(-room // _GRAIN) * _GRAIN
    return np.ndarray.__new__(AbstractArray, shape, dtype, region(), offset, strides)


def empty(shape: tuple[int, ...], dtype: DType) -> AbstractArray:
    """A C-contiguous abstract array."""
    return _lying(tuple(shape), dtype, None)


def strided(shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...]) -> AbstractArray:
    """An abstract array of these strides (bytes)."""
    return _lying(shape, dtype, strides)


def like(x: Array) -> Array:
    """An abstract array that lies as the array ``x`` does (an abstract array is itself)."""
    if type(x) is AbstractArray:
        return x
    address = x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr
    return _lying(x.shape, x.dtype, x.strides, address)


def adopted(x: Any, dtype: DType) -> Any:
    """An array given by the user as one of ``dtype``: itself where that takes no memory, else an abstract array."""
    if type(x) is not AbstractArray and x.dtype == dtype and x.flags.c_contiguous:
        return x
    return empty(x.shape, dtype)


def viewed(prim: View, x: Any, params: Params, aval: ShapedArray) -> Any:
    """Apply a view primitive to ``x``: return a view, or an abstract array where it has to copy."""
    near = like(x)
    if prim.copies:
        view = reshaped(near, aval.shape)
        if view is None:
            fresh = empty(aval.shape, aval.dtype)
            while np.may_share_memory(fresh, near):
                fresh = empty(aval.shape, aval.dtype)
            return fresh
    if near is not x:
        return prim.impl(aval.device.xp, x, **params)
    return prim.impl(np, x.view(np.ndarray), **params).view(AbstractArray)


def reshaped(x: Array, shape: tuple[int, ...]) -> Any:
    """A view of ``x`` in another shape, in C order; None if only a copy has it."""
    try:
        if _COPY:
            return x.reshape(shape, copy=False)
        view = x.view()
        view.shape = shape  # the only way that does not copy before NumPy 2.1
        return view
    except (ValueError, AttributeError):
        return None


_COPY = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


def of_ufunc(arrays: Sequence[Array], aval: ShapedArray) -> AbstractArray:
    """What a ufunc makes of small arrays where it chooses the layout: NumPy keeps the order of the operands' axes."""
    if all(x.flags.c_contiguous for x in arrays):
        return empty(aval.shape, aval.dtype)
    operands = [like(x).view(np.ndarray) for x in arrays]
    flags = [*[["readonly"]] * len(operands), ["writeonly", "allocate"]]
    walk = np.nditer(  # type: ignore[call-overload]
        [*operands, None], ["zerosize_ok"], flags, [*[None] * len(operands), aval.dtype], order="K", casting="unsafe"
    )
    return _lying(aval.shape, aval.dtype, walk.operands[-1].strides)


def reduced(reduce: Callable[[Array], Array], x: Array, aval: ShapedArray) -> AbstractArray:
    """What ``reduce(x)`` makes of a small array on the CPU: it runs, on zeros, since NumPy chooses the layout."""
    return _lying(aval.shape, aval.dtype, reduce(x.view(np.ndarray)).strides)
