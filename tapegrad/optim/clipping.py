"""Clipping of gradients: number by number, gradient by gradient, or all together, under TensorFlow's names.

``tg.IndexedSlices`` stay such.  Rows that are named twice count by their sums, as in the array for which they stand;
TensorFlow takes each for itself, and so limits another norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tapegrad import ops
from tapegrad.errors import DTypeError, ShapeError, TapegradError
from tapegrad.ops.index.slices import IndexedSlices, summed
from tapegrad.tensor import Tensor, TensorLike


def clip_by_value(t: TensorLike | IndexedSlices, clip_value_min: TensorLike, clip_value_max: TensorLike) -> Any:
    """Every number of ``t`` that is outside of [clip_value_min, clip_value_max] replaced by the nearer limit.

    The limits are numbers, or broadcast to the shape of ``t``.  What is not a number stays so; the gradient is 0
    where a limit was taken.  IndexedSlices are coalesced first, and become a tensor where 0 is outside of the limits,
    or these are arrays.  Raises TapegradError for limits that are numbers in the wrong order.
    """
    if isinstance(clip_value_min, (int, float)) and isinstance(clip_value_max, (int, float)):
        if not clip_value_min <= clip_value_max:
            raise TapegradError(f"clip_by_value: the limits {clip_value_min} and {clip_value_max} are in wrong order")
        if isinstance(t, IndexedSlices) and clip_value_min <= 0 <= clip_value_max:
            t = t.coalesce()
            return t.with_values(ops.clip(t.values, clip_value_min, clip_value_max))
    return ops.clip(t, clip_value_min, clip_value_max)


def clip_by_norm(t: TensorLike | IndexedSlices, clip_norm: float, axes: int | Sequence[int] | None = None) -> Any:
    """``t`` times ``clip_norm / max(norm, clip_norm)``, where ``norm`` is its Euclidean norm, or that along ``axes``.

    A norm that is infinite or not a number makes all that it scales not a number.  Half types are squared and added
    in float32.  Raises TapegradError unless ``clip_norm`` is positive, DTypeError unless ``t`` holds real floats,
    AxisError.
    """
    _positive("clip_by_norm", clip_norm)
    t = t if isinstance(t, IndexedSlices) and axes is None else ops.asarray(t)
    if "float" not in str(t.dtype):
        raise DTypeError(f"clip_by_norm: wanted real floats, got {t.dtype}")
    axis = tuple(axes) if isinstance(axes, Sequence) else axes
    norm = ops.sqrt(sum_of_squares(_with_sums(t), axis=axis, keepdims=axes is not None))
    return t * ops.astype(_scale(norm, clip_norm), t.dtype)


def each_by_norm(
    grads: Sequence[Tensor], clip_norm: float, total: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """``clip_by_norm`` of each gradient.  ``total``: of their sums of squares, a vector, those of all processes."""
    squares: Sequence[Tensor] = [sum_of_squares(g) for g in grads]
    if total is not None:
        every = total(ops.stack(squares))
        squares = [every[i] for i in range(len(grads))]
    return [g * ops.astype(_scale(ops.sqrt(s), clip_norm), g.dtype) for g, s in zip(grads, squares)]


def clip_by_global_norm(
    grads: Sequence[TensorLike | IndexedSlices | None],
    clip_norm: float,
    total: Callable[[Tensor], Tensor] | None = None,
) -> tuple[list[Any], Tensor]:
    """All gradients times ``clip_norm / max(norm, clip_norm)``, and ``norm``, the root of the sum of all squares.

    ``total``: of the sum of squares of these gradients the sum of all, where they are a part of them.
    None among the gradients stays None (Pascanu et al., "On the difficulty of training recurrent neural networks",
    ICML 2013).  A norm that is infinite or not a number makes every gradient not a number.

    Raises ShapeError if there is no gradient, TapegradError unless ``clip_norm`` is positive.
    """
    _positive("clip_by_global_norm", clip_norm)
    tensors: list[Any] = [g if g is None or isinstance(g, IndexedSlices) else ops.asarray(g) for g in grads]
    squares = [ops.sum(t * t) for t in map(_with_sums, tensors) if t is not None]
    if not squares:
        raise ShapeError("clip_by_global_norm: there is no gradient")
    square = ops.sum(ops.stack(squares))
    norm = ops.sqrt(square if total is None else total(square))
    scale = _scale(norm, clip_norm)
    return [None if t is None else t * ops.astype(scale, t.dtype) for t in tensors], norm


def _with_sums(t: Any) -> Any:
    """Of slices the values, those of one row added; anything else is itself."""
    return summed(t)[0] if isinstance(t, IndexedSlices) else t


def sum_of_squares(t: Tensor, **options: Any) -> Tensor:
    """The sum of the squares of a real tensor, of half types in float32; ``options``: those of ``sum``."""
    wide = ops.astype(t, "float32") if t.dtype.itemsize == 2 else t
    return ops.sum(wide * wide, **options)


def _scale(norm: Tensor, clip_norm: float) -> Tensor:
    # Not clip_norm / inf: a step of zeros would hide that the gradients overflowed.
    return ops.where(ops.isfinite(norm), clip_norm / ops.maximum(norm, clip_norm), math.nan)


def _positive(who: str, clip_norm: float) -> None:
    if not clip_norm > 0:
        raise TapegradError(f"{who}: wanted a positive clip_norm, got {clip_norm!r}")
