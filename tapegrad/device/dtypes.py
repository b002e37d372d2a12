"""Dtypes: NumPy 2's promotion, TensorFlow's defaults for Python numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes  # also makes the name "bfloat16" known to NumPy
import numpy as np

from tapegrad.device.types import DType
from tapegrad.errors import DTypeError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

bool_ = np.dtype("bool")
int8, int16, int32, int64 = map(np.dtype, ("int8", "int16", "int32", "int64"))
uint8, uint16, uint32, uint64 = map(np.dtype, ("uint8", "uint16", "uint32", "uint64"))
float16, float32, float64 = map(np.dtype, ("float16", "float32", "float64"))
bfloat16 = np.dtype(ml_dtypes.bfloat16)
complex64, complex128 = map(np.dtype, ("complex64", "complex128"))

_of_python = {"b": bool_, "i": int64, "u": uint64, "f": float32, "c": complex64}
_weak = {bool: bool, int: int, float: float, complex: complex}


def asdtype(spec: DTypeLike | None) -> DType:
    """The dtype object of a name, type or dtype; of None the default float dtype.  Raises DTypeError."""
    if spec is None:
        return _of_python["f"]
    try:
        dtype = np.dtype(getattr(spec, "dtype", spec) if not isinstance(spec, type) else spec)
    except TypeError:
        raise DTypeError(f"{spec!r} is not a dtype") from None
    if dtype.kind in "SUOmM":
        raise DTypeError(f"{spec!r} is not a dtype of numbers or bools")
    return dtype


def of_python(kind: str, otherwise: DType) -> DType:
    """The dtype that Python numbers of ``kind`` become."""
    return _of_python.get(kind, otherwise)


def set_default(dtype: DType) -> None:
    """Let Python floats become ``dtype`` from now on, and complex numbers the complex dtype of its precision."""
    _of_python.update(f=dtype, c=complex128 if dtype == float64 else complex64)


def is_extended(dtype: DType) -> bool:
    """Whether it is a float dtype from outside NumPy, such as ml_dtypes' bfloat16."""
    return dtype.kind == "V" and dtype.name.startswith(("bfloat16", "float8"))


def is_inexact(dtype: DType) -> bool:
    """Whether values of ``dtype`` can have derivatives."""
    return dtype.kind in "fc" or is_extended(dtype)


def is_integer(dtype: DType) -> bool:
    """Whether ``dtype`` is a signed or unsigned integer (bool is not)."""
    return dtype.kind in "iu"


def result_type(*items: DType | complex) -> DType:
    """NumPy 2's promotion of dtypes and Python scalars (scalars are weak).  Raises DTypeError.

    NumPy does not know that a Python number is weak beside a dtype from outside it, such as bfloat16.  Beside float16
    and beside integers of 16 bits or more bfloat16 counts as float32, which holds all its values.
    """
    strong = [x for x in items if not isinstance(x, (bool, int, float, complex))]
    if len(strong) < len(items) and any(is_extended(x) for x in strong):
        if not any(isinstance(x, complex) for x in items):
            items = tuple(strong)
    try:
        try:
            return np.result_type(*items)
        except TypeError:
            return np.result_type(*(float32 if x is bfloat16 else x for x in items))
    except (TypeError, OverflowError) as e:
        raise DTypeError(f"dtypes {', '.join(map(str, items))} do not promote: {e}") from None


def scalar_fits(value: complex, dtype: DType) -> None:
    """Check that a Python integer fits ``dtype``.  Raises OverflowError as NumPy does."""
    if dtype.kind in "iu":
        dtype.type(value)


def in_float(dtype: DType) -> DType:
    """The float dtype in which integers and bools are computed by functions such as exp (NumPy's: float64 for wide)."""
    return dtype if is_inexact(dtype) else np.result_type(dtype, np.float16 if dtype.itemsize == 1 else np.float32)


def accumulator(dtype: DType) -> DType:
    """The dtype in which values of ``dtype`` are summed: at least float32."""
    return float32 if dtype == float16 or is_extended(dtype) else dtype


def sum_dtype(dtype: DType) -> DType:
    """The dtype of a sum or product: small integers widen to 64 bits as the array API standard says."""
    if dtype.kind in "bi":
        return int64
    return uint64 if dtype.kind == "u" else dtype


def finfo(dtype: DType) -> Any:
    """Machine limits of a float dtype."""
    return ml_dtypes.finfo(dtype) if is_extended(dtype) else np.finfo(dtype)


def iinfo(dtype: DType) -> Any:
    """Machine limits of an integer dtype."""
    return np.iinfo(dtype)


def real_of(dtype: DType) -> DType:
    """The dtype of the real part: half as wide as a complex one."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def rank(dtype: DType) -> int:
    """0 to 3 for bool, integers, floats, complex numbers: a kind holds those of lower rank."""
    return {"b": 0, "i": 1, "u": 1, "c": 3}.get(dtype.kind, 2)


def can_cast(a: DType, b: DType, casting: Any = "same_kind") -> bool:
    """Whether dtype ``a`` casts to ``b`` under NumPy's rule."""
    return bool(np.can_cast(a, b, casting))
