"""The names that kernels have for dtypes (``kernels/scalar.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np

from tapegrad.device import abstract_array
from tapegrad.device.types import DType
from tapegrad.errors import DTypeError, KernelError

_WIDE = {"float16": "float", "bfloat16": "float", "float32": "float", "float64": "double"}
_KNOWN = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip


def known(op: str, dtype: DType) -> None:
    """Raises DTypeError, naming ``op``, for a dtype that no kernel knows."""
    if dtype.name not in _KNOWN:
        raise DTypeError(f"{op}: no CUDA kernel knows dtype {dtype.name}; cast to one of {', '.join(sorted(_KNOWN))}")


@cache
def storage(dtype: DType) -> str:
    """The type of an element in memory.  Raises KernelError for a dtype that kernels do not know."""
    if dtype.name not in _KNOWN:
        raise KernelError(f"no CUDA kernel knows dtype {dtype.name}; cast to one of {', '.join(sorted(_KNOWN))}")
    return f"tg_{dtype.name}"


@cache
def is_half(dtype: DType) -> bool:
    """Whether elements are computed wider than they lie in memory, and so rounded after each operation."""
    return dtype.name in ("float16", "bfloat16")


@cache
def compute(dtype: DType) -> str:
    """The type in which an element is computed."""
    name = storage(dtype)
    return _WIDE.get(dtype.name, name)


def index(n: int, wide: bool) -> Any:
    """An index or a length as a kernel's argument of 32 or 64 bits."""
    return np.int64(n) if wide else np.int32(n)


def is_argument(x: Any) -> bool:
    """Whether a leaf is a number on the host, which a kernel takes by value (so is a 0-d array of the CPU's)."""
    return (
        not x.ndim
        and type(x) is not abstract_array.AbstractArray
        and (isinstance(x, np.ndarray) or hasattr(x, "on_device"))
    )


def address(x: Any) -> int:
    """Where an array begins."""
    if not isinstance(x, np.ndarray):
        return x.data.ptr
    return x.ctypes.data


def addresses(xs: Sequence[Any]) -> list[int]:
    """The same of many arrays."""
    return [x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr for x in xs]


def long(n: int) -> Any:
    """A size as a kernel's argument of type ``long long``."""
    return np.int64(n)


def real(x: float, dtype: DType) -> Any:
    """A number as a kernel's argument of the compute type of a float ``dtype``."""
    return np.float64(x) if compute(dtype) == "double" else np.float32(x)


def argument(value: Any) -> Any:
    """A 0-d NumPy array as a kernel's argument, in its compute type."""
    return np.float32(value) if compute(value.dtype) == "float" else value[()]


def key(number: int, counter: int) -> list[np.generic]:
    """A Philox key of 128 bits and a position as kernel arguments."""
    return [np.uint64(number % 2**64), np.uint64(number >> 64), np.uint64(counter)]


def offset(counter: int) -> np.generic:
    """How far a position is from that of its stream at the begin of a captured step, as a kernel's argument."""
    return np.uint64(getattr(counter, "offset", 0))


def structure(fields: Sequence[tuple[str, str] | tuple[str, str, int]]) -> Any:
    """A struct full of zeros that a kernel gets by value; ``fields``: name, dtype, and how many of it."""
    return np.zeros((), np.dtype(list(fields), align=True))


def extent(x: Any) -> int:
    """Bytes of an array, what broadcasting repeats counted once."""
    if type(x) is np.ndarray and x.flags.c_contiguous:
        return x.nbytes
    return prod(n for n, stride in zip(x.shape, x.strides, strict=True) if stride) * x.itemsize if x.size else 0
