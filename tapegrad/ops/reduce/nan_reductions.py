"""Reductions that ignore NaN: it does not affect the result, and its gradient is 0."""

from __future__ import annotations

from tapegrad.core.aval import normalize_axes
from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.errors import TapegradError
from tapegrad.ops.dispatch import cast, in_float32, tensor
from tapegrad.ops.elementwise.arithmetic import divide, multiply, root_of_squares, squared_size, subtract
from tapegrad.ops.elementwise.comparison import equal, isnan, logical_not
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index import sort
from tapegrad.ops.index.bounds import every
from tapegrad.ops.reduce import reductions
from tapegrad.ops.reduce._masks import masked
from tapegrad.ops.reduce.cumulative import cumprod, cumsum
from tapegrad.ops.reduce.reductions import Axis, kept_shape, sum
from tapegrad.ops.reduce.reductions import all as all_of
from tapegrad.ops.reduce.reductions import any as any_of
from tapegrad.ops.shape.shape import reshape
from tapegrad.tensor import DTypeLike, Tensor, TensorLike

__all__ = [
    "nanargmax", "nanargmin", "nancumprod", "nancumsum", "nanmax", "nanmean", "nanmin", "nanprod", "nanstd", "nansum",
    "nanvar",
]  # fmt: skip


def _filled(op: str, x: TensorLike, value: float) -> tuple[Tensor, Tensor | None]:
    """``x`` with ``value`` in place of NaN, and where NaN was (None: nowhere, ``x`` holds integers or nothing)."""
    x = tensor(op, x)
    if not dtypes.is_inexact(x.dtype) or not x.size:
        return x, None
    gone = isnan(x)
    return where(gone, value, x), gone


def nansum(
    a: TensorLike, axis: Axis = None, dtype: DTypeLike | None = None, keepdims: bool = False, *,
    initial: TensorLike | None = None, where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The sum over ``axis`` (None: all) of what is not NaN, plus ``initial``; 0 where nothing is.

    ``where``: a mask of the elements that count.  Raises AxisError, and ShapeError and DTypeError for ``initial`` and
    ``where``.
    """
    x = _filled("nansum", a, 0)[0]
    return sum(x, axis=axis, dtype=dtype, keepdims=keepdims, initial=initial, where=where)


def nanprod(
    a: TensorLike, axis: Axis = None, dtype: DTypeLike | None = None, keepdims: bool = False, *,
    initial: TensorLike | None = None, where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The product over ``axis`` (None: all) of what is not NaN, times ``initial``; 1 where nothing is.

    ``where``: a mask of the elements that count.  Raises AxisError, and ShapeError and DTypeError for ``initial`` and
    ``where``.
    """
    x = _filled("nanprod", a, 1)[0]
    return reductions.prod(x, axis=axis, dtype=dtype, keepdims=keepdims, initial=initial, where=where)


def nancumsum(a: TensorLike, axis: int | None = None, dtype: DTypeLike | None = None) -> Tensor:
    """The sums so far along ``axis`` (None: of the flattened array), NaN counting as 0.  Raises AxisError."""
    return cumsum(_filled("nancumsum", a, 0)[0], axis, dtype)


def nancumprod(a: TensorLike, axis: int | None = None, dtype: DTypeLike | None = None) -> Tensor:
    """The products so far along ``axis`` (None: of the flattened array), NaN counting as 1.  Raises AxisError."""
    return cumprod(_filled("nancumprod", a, 1)[0], axis, dtype)


def _extreme(
    op: str, a: TensorLike, axis: Axis, keepdims: bool, worst: float, initial: TensorLike | None,
    selected: TensorLike | None,
) -> Tensor:  # fmt: skip
    x, gone = _filled(op, a, worst)
    f = getattr(reductions, op.removeprefix("nan"))
    extreme = f(x, axis=axis, keepdims=keepdims, initial=initial, where=selected)
    if gone is None or initial is not None:
        return extreme
    return where(all_of(gone, axis=axis, keepdims=keepdims), float("nan"), extreme)


def nanmax(
    a: TensorLike, axis: Axis = None, keepdims: bool = False, *, initial: TensorLike | None = None,
    where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The largest element over ``axis`` (None: all) that is not NaN; NaN where none is and without ``initial``.

    Ties share the gradient equally.  ``initial`` and ``where``: see :func:`max`.  Raises AxisError, ShapeError for an
    empty axis without ``initial``, DTypeError for complex.
    """
    return _extreme("nanmax", a, axis, keepdims, -float("inf"), initial, where)


def nanmin(
    a: TensorLike, axis: Axis = None, keepdims: bool = False, *, initial: TensorLike | None = None,
    where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The smallest element over ``axis`` (None: all) that is not NaN; NaN where none is and without ``initial``.

    Ties share the gradient equally.  ``initial`` and ``where``: see :func:`min`.  Raises AxisError, ShapeError for an
    empty axis without ``initial``, DTypeError for complex.
    """
    return _extreme("nanmin", a, axis, keepdims, float("inf"), initial, where)


def _position(op: str, a: TensorLike, axis: int | None, keepdims: bool, worst: float) -> Tensor:
    x, gone = _filled(op, a, worst)
    if gone is not None and x.size and unrecorded(lambda: bool(any_of(every(all_of(gone, axis=axis))))):
        raise AllNaNError(f"{op}: a slice along axis {axis} of {x.shape} holds nothing but NaN")
    return getattr(sort, op.removeprefix("nan"))(x, axis=axis, keepdims=keepdims)


class AllNaNError(TapegradError, ValueError):
    """A position was asked for in a slice that holds only NaN."""


def nanargmax(a: TensorLike, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
    """Position of the first largest element along ``axis`` (None: in the flattened array), NaN ignored.

    Raises AxisError, ShapeError for an empty axis, AllNaNError (a ValueError; it reads the values).
    """
    return _position("nanargmax", a, axis, keepdims, -float("inf"))


def nanargmin(a: TensorLike, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
    """Position of the first smallest element along ``axis`` (None: in the flattened array), NaN ignored.

    Raises AxisError, ShapeError for an empty axis, AllNaNError (a ValueError; it reads the values).
    """
    return _position("nanargmin", a, axis, keepdims, float("inf"))


def _count(x: Tensor, gone: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    return sum(logical_not(gone), axis=axes, keepdims=keepdims)


def _holed(op: str, a: TensorLike, selected: TensorLike | None) -> TensorLike:
    """``a`` with NaN where ``selected`` is False."""
    if selected is None:
        return a
    x = tensor(op, a)
    return masked(op, x if dtypes.is_inexact(x.dtype) else cast(x, dtypes.float64), selected, float("nan"))


@in_float32
def nanmean(
    a: TensorLike, axis: Axis = None, keepdims: bool = False, *, where: TensorLike | None = None
) -> Tensor:  # fmt: skip
    """The mean over ``axis`` (None: all) of what is not NaN, and in the mask ``where``; NaN where nothing is.

    Raises AxisError, and ShapeError and DTypeError for ``where``.
    """
    return _nanmean(_holed("nanmean", a, where), axis, keepdims)


def _nanmean(a: TensorLike, axis: Axis, keepdims: bool) -> Tensor:
    x, gone = _filled("nanmean", a, 0)
    if gone is None:
        return reductions.mean(x, axis=axis, keepdims=keepdims)
    axes = normalize_axes("nanmean", axis, x.ndim)
    count = _count(x, gone, axes, keepdims)
    total = sum(x, axis=axes, keepdims=keepdims)
    return divide(total, where(equal(count, 0), float("nan"), cast(count, dtypes.real_of(x.dtype))))


@in_float32
def nanvar(
    a: TensorLike, axis: Axis = None, ddof: float = 0, keepdims: bool = False, *, correction: float | None = None,
    where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The variance over ``axis`` (None: all) of what is not NaN: squared deviations, divided by ``count - ddof``.

    NaN where no more than ``ddof`` elements are left.  ``correction``: the standard's name for ``ddof``.  ``where``: a
    mask of the elements that count.  Raises AxisError, and ShapeError and DTypeError for ``where``.
    """
    return _nanvar(_holed("nanvar", a, where), axis, ddof if correction is None else correction, keepdims)


def _nanvar(a: TensorLike, axis: Axis, less: float, keepdims: bool) -> Tensor:
    x, gone = _filled("nanvar", a, 0)
    if gone is None:
        return reductions.var(x, axis=axis, correction=less, keepdims=keepdims)
    axes = normalize_axes("nanvar", axis, x.ndim)
    wide = dtypes.real_of(x.dtype)
    count = _count(x, gone, axes, True)
    middle = divide(sum(x, axis=axes, keepdims=True), cast(where(equal(count, 0), 1, count), wide))
    deviation = multiply(subtract(x, middle), cast(logical_not(gone), wide))
    squares = squared_size(deviation)
    left = cast(count, wide) - less
    variance = divide(sum(squares, axis=axes, keepdims=True), where(left > 0, left, float("nan")))
    shape = kept_shape(x.shape, axes) if keepdims else tuple(n for i, n in enumerate(x.shape) if i not in axes)
    return reshape(variance, shape)


@in_float32
def nanstd(
    a: TensorLike, axis: Axis = None, ddof: float = 0, keepdims: bool = False, *, correction: float | None = None,
    where: TensorLike | None = None,
) -> Tensor:  # fmt: skip
    """The square root of :func:`nanvar`; where that is 0, so is its gradient, as that of :func:`std`.

    Raises AxisError, and ShapeError and DTypeError for ``where``.
    """
    x, less = _holed("nanstd", a, where), ddof if correction is None else correction
    if not tensor("nanstd", x).size:
        return reductions.std(x, axis=axis, correction=less, keepdims=keepdims)
    return root_of_squares(_nanvar(x, axis, less, keepdims))
