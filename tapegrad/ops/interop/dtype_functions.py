"""Dtypes: their kinds, promotion, casting, and limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tapegrad.device import dtypes
from tapegrad.device.types import DType
from tapegrad.errors import DTypeError
from tapegrad.ops.dispatch import SCALARS
from tapegrad.tensor import DTypeLike, Tensor, convert

__all__ = ["can_cast", "finfo", "get_default_dtype", "iinfo", "isdtype", "result_type", "set_default_dtype"]

_KINDS = {
    "bool": "b", "signed integer": "i", "unsigned integer": "u", "integral": "iu", "real floating": "f",
    "complex floating": "c", "numeric": "iufc",
}  # fmt: skip


def _dtype_of(x: Any) -> DType:
    """The dtype of a tensor, variable or array, or the dtype that ``x`` names."""
    return x.dtype if isinstance(x, Tensor) or hasattr(x, "__array__") else dtypes.asdtype(x)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The dtype that operands promote to: tensors, arrays, dtypes, and Python numbers, which are weak.

    Numbers alone promote to the dtype of their widest kind, for example float32.  Raises DTypeError where dtypes do not
    promote, and without operands.  NumPy 2's ``result_type``.
    """
    if not arrays_and_dtypes:
        raise DTypeError("result_type: needs at least one array, dtype or number")
    items = [x if type(x) in SCALARS else _dtype_of(x) for x in arrays_and_dtypes]
    if all(type(x) in SCALARS for x in items):
        return convert(max(items, key=lambda x: SCALARS.index(type(x)))).dtype
    try:
        return dtypes.result_type(*items)
    except DTypeError as e:
        raise DTypeError(f"result_type: {e}") from None


def can_cast(from_: object, to: Any, casting: str = "safe") -> bool:
    """Whether the dtype ``from_`` (or that of an array) can be cast to ``to`` by the rule ``casting``.

    casting: NumPy's ``no``, ``equiv``, ``safe`` (no value is lost), ``same_kind``, ``unsafe``.  Raises DTypeError.
    """
    if type(from_) in SCALARS:
        raise DTypeError(f"can_cast: {from_!r} is a Python number, whose dtype depends on its operation; give one")
    return dtypes.can_cast(_dtype_of(from_), dtypes.asdtype(to), casting)


def isdtype(dtype: DTypeLike, kind: Any) -> bool:
    """Whether ``dtype`` is of a kind: a dtype, a kind's name, or a tuple of them (any of which will do).

    kind: ``bool``, ``signed integer``, ``unsigned integer``, ``integral``, ``real floating`` (bfloat16, too),
    ``complex floating``, ``numeric``.  Raises DTypeError for what is no dtype or no kind.
    """
    known = dtypes.asdtype(dtype)
    if isinstance(kind, tuple):
        return any(isdtype(known, one) for one in kind)
    if not isinstance(kind, str):
        return bool(known == dtypes.asdtype(kind))
    if kind not in _KINDS:
        raise DTypeError(f"isdtype: {kind!r} is not a kind of dtype; kinds are {', '.join(map(repr, _KINDS))}")
    return ("f" if dtypes.is_extended(known) else known.kind) in _KINDS[kind]


@dataclass(frozen=True)
class FloatInfo:
    """Limits of a float dtype, as Python floats: see :func:`finfo`."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    smallest_subnormal: float
    dtype: DType

    @property
    def tiny(self) -> float:
        """NumPy's other name of ``smallest_normal``."""
        return self.smallest_normal


@dataclass(frozen=True)
class IntegerInfo:
    """Limits of an integer dtype: see :func:`iinfo`."""

    bits: int
    max: int
    min: int
    dtype: DType


def set_default_dtype(dtype: DTypeLike) -> None:
    """Set the float dtype of what has none of its own: float32 (from the start) or float64.

    From now on, in every thread, it is the dtype of Python floats and lists of them, of ``zeros``, ``ones``, ``eye``,
    ``linspace`` and the other functions that create values, of ``tg.random``'s numbers and of new layers; complex
    numbers have the same precision.  Arrays, and what is there already, keep their dtypes; a Python number beside a
    tensor takes the tensor's.  A captured function is captured for each default dtype.  Set it at the beginning of a
    program: a checkpointed function that is rerun after a change raises RecomputeError if dtypes differ.

    Raises DTypeError for another dtype.
    """
    default = dtypes.asdtype(dtype)
    if dtype is None or default not in (dtypes.float32, dtypes.float64):
        raise DTypeError(f"set_default_dtype: dtype must be float32 or float64, got {dtype!r}")
    dtypes.set_default(default)


def get_default_dtype() -> DType:
    """Return the float dtype of what has none of its own; see :func:`set_default_dtype`."""
    return dtypes.asdtype(None)


def finfo(dtype: object) -> FloatInfo:
    """Limits of a float dtype, or of the parts of a complex one; an array stands for its dtype.  The numbers are Python
    floats, so a float32 stays a float32 beside them.  Raises DTypeError.
    """
    real = dtypes.real_of(_dtype_of(dtype))
    if real.kind != "f" and not dtypes.is_extended(real):
        raise DTypeError(f"finfo: {real} is no float dtype; iinfo has the limits of integers")
    limits = dtypes.finfo(real)
    return FloatInfo(
        bits=int(limits.bits),
        eps=float(limits.eps),
        max=float(limits.max),
        min=float(limits.min),
        smallest_normal=float(limits.smallest_normal),
        smallest_subnormal=float(limits.smallest_subnormal),
        dtype=real,
    )


def iinfo(int_type: object) -> IntegerInfo:
    """Limits of an integer dtype; an array stands for its dtype.  Raises DTypeError."""
    dtype = _dtype_of(int_type)
    if dtype.kind not in "iu":
        raise DTypeError(f"iinfo: {dtype} is no integer dtype; finfo has the limits of floats")
    limits = dtypes.iinfo(dtype)
    return IntegerInfo(bits=int(limits.bits), max=int(limits.max), min=int(limits.min), dtype=dtype)
