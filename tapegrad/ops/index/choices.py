"""Choosing elements by conditions, numbers and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapegrad.core.aval import broadcast_shapes, normalize_axis
from tapegrad.core.state import unrecorded
from tapegrad.device import dtypes
from tapegrad.errors import IndexingError, ShapeError, TapegradError
from tapegrad.ops.dispatch import cast, promote, tensor
from tapegrad.ops.elementwise.arithmetic import maximum, minimum, remainder
from tapegrad.ops.elementwise.comparison import equal, logical_or, not_equal
from tapegrad.ops.elementwise.selection import nonzero, where
from tapegrad.ops.index.bounds import every
from tapegrad.ops.index.getitem import At, getitem
from tapegrad.ops.index.grid_indices import within
from tapegrad.ops.index.indexing import take
from tapegrad.ops.reduce.reductions import any as any_of
from tapegrad.ops.shape.join import stack
from tapegrad.ops.shape.shape import broadcast_to, flat_or_along, reshape
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["argwhere", "choose", "compress", "extract", "flatnonzero", "piecewise", "select", "trim_zeros"]


def select(condlist: Sequence[TensorLike], choicelist: Sequence[TensorLike], default: TensorLike = 0) -> Tensor:
    """Elements of the first of ``choicelist`` whose condition (bool) holds, else of ``default``; all broadcast.

    What is not chosen has gradient 0.  Raises ShapeError, DTypeError.
    """
    if len(condlist) != len(choicelist) or not len(condlist):
        raise ShapeError(f"select: {len(condlist)} conditions for {len(choicelist)} choices; need as many, at least 1")
    *choices, chosen = promote("select", (*choicelist, default))
    conditions = [tensor("select", c, chosen) for c in condlist]
    shape = broadcast_shapes("select", *(t.shape for t in (*conditions, *choices, chosen)))
    for condition, choice in zip(reversed(conditions), reversed(choices), strict=True):
        chosen = where(condition, choice, chosen)
    return broadcast_to(chosen, shape)


def choose(a: TensorLike, choices: Sequence[TensorLike], mode: str = "raise") -> Tensor:
    """For each element of ``a`` (integers) the element of ``choices[a]`` at its position; all broadcast.

    mode: numbers out of range ``raise`` (it reads them), ``wrap`` or ``clip``.  What is not chosen has gradient 0.
    Raises IndexingError, ShapeError.
    """
    options = promote("choose", tuple(choices))
    places = tensor("choose", a, options[0] if options else None)
    if not options or not dtypes.is_integer(places.dtype):
        raise IndexingError(f"choose: {places.dtype} numbers of {len(options)} choices; need integers, and a choice")
    n = len(options)
    if mode == "raise":
        if places.size and not within(every(places), n):
            raise IndexingError(f"choose: a number is out of range for {n} choices; use mode='wrap' or 'clip'")
    elif mode not in ("wrap", "clip"):
        raise TapegradError(f"choose: mode {mode!r} is not one of raise, wrap, clip")
    else:
        places = remainder(places, n) if mode == "wrap" else minimum(maximum(places, 0), n - 1)
    shape = broadcast_shapes("choose", places.shape, *(t.shape for t in options))
    chosen = options[0]
    for k, option in enumerate(options[1:], 1):
        chosen = where(equal(places, k), option, chosen)
    return broadcast_to(chosen, shape)


def _mask(op: str, condition: TensorLike, beside: Tensor) -> Tensor:
    """``condition`` as a vector of bools."""
    mask = tensor(op, condition, beside)
    mask = mask if mask.dtype == dtypes.bool_ else not_equal(mask, 0)
    return reshape(mask, (mask.size,))


def compress(condition: TensorLike, a: TensorLike, axis: int | None = None) -> Tensor:
    """The slices of ``a`` along ``axis`` (None: elements of the flattened array) where ``condition``, a vector, holds.

    Their number depends on the values, so ``condition`` is evaluated.  Raises AxisError, IndexingError, ShapeError.
    """
    x = tensor("compress", a)
    mask = tensor("compress", condition, x)
    if mask.ndim != 1:
        raise ShapeError(f"compress: a condition of shape {mask.shape}; need a vector")
    (places,) = nonzero(_mask("compress", mask, x))
    x, a = flat_or_along("compress", x, axis)
    return take(x, places, axis=a)


def extract(condition: TensorLike, arr: TensorLike) -> Tensor:
    """The elements of ``arr``, flattened, where ``condition`` is not 0.

    Their number depends on the values, so ``condition`` is evaluated.  Raises IndexingError.
    """
    x = tensor("extract", arr)
    (places,) = nonzero(_mask("extract", condition, x))
    return take(reshape(x, (x.size,)), places, axis=0)


def flatnonzero(a: TensorLike) -> Tensor:
    """Positions in the flattened array of the elements that are not 0; it is evaluated."""
    a = tensor("flatnonzero", a)
    return nonzero(reshape(a, (a.size,)))[0]


def argwhere(a: TensorLike) -> Tensor:
    """Indices of the elements that are not 0, one row for each; it is evaluated."""
    a = tensor("argwhere", a)
    if not a.ndim:
        return reshape(nonzero(reshape(a, (1,)))[0], (-1, 1))[:, :0]
    return stack(nonzero(a), axis=1)


def piecewise(x: TensorLike, condlist: Any, funclist: Sequence[object], *args: object, **kw: object) -> Tensor:
    """Functions, or numbers, on the parts of ``x`` where conditions hold (NumPy's ``piecewise``).

    Where several conditions hold, the last one counts; one more function than conditions is for all other elements,
    else they are 0.  Each function is called with its own elements only, in one dimension, so that other elements
    cannot make the gradient NaN; conditions are evaluated.  The result has the dtype of ``x``.  Raises ShapeError.
    """
    x = tensor("piecewise", x)
    if not isinstance(condlist, (list, tuple)) or (x.ndim and condlist and not _is_array(condlist[0])):
        condlist = [condlist]
    conditions = [_over("piecewise", tensor("piecewise", c, x), x) for c in condlist]
    if len(funclist) == len(conditions) + 1:
        held = conditions[0]
        for c in conditions[1:]:
            held = logical_or(held, c)
        conditions = [~held, *conditions]
        funclist = [funclist[-1], *funclist[:-1]]
    if len(funclist) != len(conditions):
        raise ShapeError(f"piecewise: {len(funclist)} functions for {len(conditions)} conditions")
    values = where(equal(x, x), 0, 0 * x) if dtypes.is_inexact(x.dtype) else x * 0
    for condition, f in zip(conditions, funclist, strict=True):
        values = cast(_on_part(values, x, condition, f, args, kw), x.dtype)
    return values


def _over(op: str, condition: Tensor, x: Tensor) -> Tensor:
    """Return a condition for each element of ``x``; one of fewer axes is of the first ones.  Raises ShapeError."""
    if condition.shape != x.shape[: condition.ndim]:
        raise ShapeError(
            f"{op}: a condition of shape {condition.shape} for x {x.shape}; it must have x's first lengths"
        )
    return broadcast_to(reshape(condition, condition.shape + (1,) * (x.ndim - condition.ndim)), x.shape)


def _is_array(x: TensorLike) -> bool:
    return isinstance(x, (list, tuple)) or bool(getattr(x, "ndim", 0))


def _on_part(values: Tensor, x: Tensor, condition: Tensor, f: Any, args: Any, kw: Any) -> Tensor:
    if not callable(f):
        return where(condition, f, values) if isinstance(f, (int, float, complex)) else At(values)[condition].set(f)
    (places,) = nonzero(_mask("piecewise", condition, x))
    if not places.size:
        return values
    part = take(reshape(x, (x.size,)), places, axis=0)
    flat = At(reshape(values, (x.size,)))[places].set(f(part, *args, **kw))
    return reshape(flat, x.shape)


def trim_zeros(filt: TensorLike, trim: str = "fb", axis: int | Sequence[int] | None = None) -> Tensor:
    """Without the slices of zeros at the front (``f``) and back (``b``) of each ``axis`` (None: all).

    It reads the values.  Raises AxisError, TapegradError for another ``trim``.
    """
    x = tensor("trim_zeros", filt)
    sides = trim.lower()
    if not set(sides) <= {"f", "b"}:
        raise TapegradError(f"trim_zeros: trim={trim!r} holds letters other than f and b")
    axes = range(x.ndim) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    index = [slice(None)] * x.ndim
    for a in axes:
        a = normalize_axis("trim_zeros", a, x.ndim)
        index[a] = unrecorded(_trimmed, x, a, sides)
    return getitem(x, tuple(index))


def _trimmed(x: Tensor, a: int, sides: str) -> slice:
    kept = any_of(not_equal(x, 0), axis=tuple(i for i in range(x.ndim) if i != a))
    (places,) = nonzero(kept)
    if not places.size:
        return slice(0, 0) if sides else slice(None)
    return slice(int(places[0]) if "f" in sides else 0, int(places[-1]) + 1 if "b" in sides else None)
