"""Tests of elements and arrays; their results have no derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tapegrad.core.aval import broadcast_shapes
from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError, ShapeError
from tapegrad.ops.create.creation import zeros
from tapegrad.ops.dispatch import promote, tensor
from tapegrad.ops.elementwise.arithmetic import abs, subtract
from tapegrad.ops.elementwise.comparison import (
    equal,
    greater,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    logical_and,
    logical_or,
)
from tapegrad.ops.elementwise.complex import imag
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.reduce.reductions import all as all_of
from tapegrad.tensor import Tensor, TensorLike

__all__ = [
    "allclose", "array_equal", "array_equiv", "isclose", "iscomplex", "iscomplexobj", "isneginf", "isposinf", "isreal",
    "isrealobj",
]  # fmt: skip


def _infinite(name: str, x: TensorLike, side: Callable[[TensorLike, TensorLike], Tensor]) -> Tensor:
    x = tensor(name, x)
    if x.dtype.kind == "c":
        raise DTypeError(f"{name}: not defined for complex numbers; take real or imag first")
    return logical_and(isinf(x), side(x, 0))


def isposinf(x: TensorLike) -> Tensor:
    """Whether elements are positive infinity.  Raises DTypeError for complex."""
    return _infinite("isposinf", x, greater)


def isneginf(x: TensorLike) -> Tensor:
    """Whether elements are negative infinity.  Raises DTypeError for complex."""
    return _infinite("isneginf", x, less)


def isreal(x: TensorLike) -> Tensor:
    """Whether elements have no imaginary part, or one of 0."""
    x = tensor("isreal", x)
    if x.dtype.kind == "c":
        return equal(imag(x), 0)
    return ~zeros(x.shape, dtype=dtypes.bool_, device=x.device)


def iscomplex(x: TensorLike) -> Tensor:
    """Whether elements have an imaginary part that is not 0."""
    return ~isreal(x)


def iscomplexobj(x: TensorLike) -> bool:
    """Whether the dtype is complex."""
    return bool(tensor("iscomplexobj", x).dtype.kind == "c")


def isrealobj(x: TensorLike) -> bool:
    """Whether the dtype is not complex."""
    return not iscomplexobj(x)


def ndim(a: TensorLike) -> int:
    """Number of dimensions."""
    return tensor("ndim", a).ndim


def shape(a: TensorLike) -> tuple[int, ...]:
    """Length of each dimension."""
    return tensor("shape", a).shape


def size(a: TensorLike, axis: int | None = None) -> int:
    """Number of elements, or length of one dimension."""
    a = tensor("size", a)
    return a.size if axis is None else a.shape[axis]


def isclose(
    a: TensorLike, b: TensorLike, rtol: TensorLike = 1e-05, atol: TensorLike = 1e-08, equal_nan: bool = False
) -> Tensor:
    """Whether ``abs(a - b) <= atol + rtol * abs(b)``, or equal infinities, or with ``equal_nan`` both NaN.

    Raises ShapeError.
    """
    return unrecorded(_isclose, a, b, rtol, atol, equal_nan)


def _isclose(a: TensorLike, b: TensorLike, rtol: Any, atol: Any, equal_nan: bool) -> Tensor:
    x, y = promote("isclose", (a, b))
    if dtypes.is_integer(y.dtype) or y.dtype.kind == "b":  # so that no integer's magnitude overflows
        y = promote("isclose", (y, 1.0))[0] if y.dtype.kind == "b" else y * 1.0
    finite = isfinite(y)
    safe = where(finite, y, 0)
    near = less_equal(abs(subtract(where(isfinite(x), x, 0) * 1.0, safe)), atol + rtol * abs(safe))
    near = where(logical_and(isfinite(x), finite), near, equal(x, y))
    return logical_or(near, logical_and(isnan(x), isnan(y))) if equal_nan else near


def allclose(
    a: TensorLike, b: TensorLike, rtol: TensorLike = 1e-05, atol: TensorLike = 1e-08, equal_nan: bool = False
) -> bool:
    """Whether all elements are close as :func:`isclose` says: a Python bool, so it waits for the values."""
    return bool(all_of(isclose(a, b, rtol, atol, equal_nan)))


def array_equal(a1: TensorLike, a2: TensorLike, equal_nan: bool = False) -> bool:
    """Whether shapes and all elements are equal (with ``equal_nan``, NaN equals NaN): a Python bool."""
    x, y = tensor("array_equal", a1), tensor("array_equal", a2)
    return x.shape == y.shape and unrecorded(_same, x, y, equal_nan)


def array_equiv(a1: TensorLike, a2: TensorLike) -> bool:
    """Whether the operands broadcast and then are equal everywhere: a Python bool."""
    x, y = tensor("array_equiv", a1), tensor("array_equiv", a2)
    try:
        broadcast_shapes("array_equiv", x.shape, y.shape)
    except ShapeError:
        return False
    return unrecorded(_same, x, y, False)


def _same(x: Tensor, y: Tensor, equal_nan: bool) -> bool:
    x, y = promote("array_equal", (x, y))
    same = equal(x, y)
    return bool(all_of(logical_or(same, logical_and(isnan(x), isnan(y))) if equal_nan else same))
