"""Choosing between elements, and the indices of elements that are not 0."""

from __future__ import annotations

from typing import Any

from tapegrad.core.aval import ShapedArray, broadcast_shapes, shaped
from tapegrad.core.primitive import elementwise
from tapegrad.device import dtypes
from tapegrad.device.numerics.elements import select
from tapegrad.errors import DTypeError, ShapeError
from tapegrad.ops.dispatch import bind, cast, promote, tensor
from tapegrad.tensor import Tensor, TensorLike, from_array


def _infer_where(condition: ShapedArray, x: ShapedArray, y: ShapedArray) -> ShapedArray:
    return shaped(broadcast_shapes("where", condition.shape, x.shape, y.shape), x.dtype, x.device)


where_p = elementwise(
    "where",
    widens=False,
    infer=_infer_where,
    impl=select,
    operands=("condition", "x", "y"),
    partials=[None, lambda ct, condition: where(condition, ct, 0), lambda ct, condition: where(condition, 0, ct)],
    cxx="{condition} ? {x} : {y}",
    doc="``x`` where the condition holds, else ``y``.",
)


def where(condition: TensorLike, x: Any = None, y: Any = None) -> Any:
    """``x`` where ``condition`` (bool) holds, else ``y``; the three broadcast.  Of a condition alone: :func:`nonzero`.

    The side not chosen gets gradient 0; but a NaN or infinite derivative inside it times that 0 is NaN: choose safe
    operands first (the "double where").  Raises DTypeError for a condition that is not bool.
    """
    if x is None and y is None:
        return nonzero(condition)
    chosen = tensor("where", condition, next((t for t in (x, y) if isinstance(t, Tensor)), None))
    if chosen.dtype != dtypes.bool_:
        if chosen.dtype.kind not in "iu":
            raise DTypeError(f"where: the condition is {chosen.dtype}, not bool; compare it with something")
        chosen = cast(chosen, dtypes.bool_)
    return bind(where_p, chosen, *promote("where", (x, y), beside=chosen))


def nonzero(a: TensorLike) -> tuple[Tensor, ...]:
    """For each dimension the indices of the elements that are not 0, in C order.  Raises ShapeError for 0-d ``a``.

    Their number depends on the values, so ``a`` is evaluated.
    """
    a = tensor("nonzero", a)
    if not a.ndim:
        raise ShapeError("nonzero: a tensor of no dimensions; reshape it to (1,) first")
    return tuple(from_array(a.device.xp.ascontiguousarray(i), a.device) for i in a._array.nonzero())
