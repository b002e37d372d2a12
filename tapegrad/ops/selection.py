"""Choosing between elements."""

from __future__ import annotations

from typing import Any

from tapegrad.aval import ShapedArray, broadcast_shapes, shaped
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError
from tapegrad.ops.dispatch import bind, cast, promote, tensor
from tapegrad.primitive import elementwise
from tapegrad.tensor import Tensor


def _infer_where(condition: ShapedArray, x: ShapedArray, y: ShapedArray) -> ShapedArray:
    return shaped(broadcast_shapes("where", condition.shape, x.shape, y.shape), x.dtype, x.device)


def _run_where(xp: Any, out: Any, condition: Any, x: Any, y: Any) -> None:
    xp.copyto(out, y)
    xp.copyto(out, x, where=condition)


where_p = elementwise(
    "where",
    infer=_infer_where,
    impl=_run_where,
    operands=("condition", "x", "y"),
    partials=[None, lambda ct, condition: where(condition, ct, 0), lambda ct, condition: where(condition, 0, ct)],
    cxx="{condition} ? {x} : {y}",
    doc="``x`` where the condition holds, else ``y``.",
)


def where(condition: Any, x: Any, y: Any, /) -> Tensor:
    """``x`` where ``condition`` (bool) holds, else ``y``; the three broadcast.

    The side not chosen gets gradient 0; but a NaN or infinite derivative inside it times that 0 is NaN: choose safe
    operands first (the "double where").  Raises DTypeError for a condition that is not bool.
    """
    chosen = tensor("where", condition)
    if chosen.dtype != dtypes.bool_:
        if chosen.dtype.kind not in "iu":
            raise DTypeError(f"where: the condition is {chosen.dtype}, not bool; compare it with something")
        chosen = cast(chosen, dtypes.bool_)
    return bind(where_p, chosen, *promote("where", (x, y)))
