"""``where=`` and ``initial=`` of reductions: which elements count, and what a result begins with."""

from __future__ import annotations

import math

from tapegrad.core.aval import broadcast_shapes
from tapegrad.device import dtypes
from tapegrad.device.types import DType
from tapegrad.errors import DTypeError, ShapeError
from tapegrad.ops.dispatch import asarray, cast, tensor
from tapegrad.ops.elementwise.selection import where
from tapegrad.tensor import Tensor, TensorLike


def mask_of(op: str, selected: TensorLike, x: Tensor) -> Tensor:
    """The mask ``where=`` as bools that broadcast to the shape of ``x``.  Raises DTypeError, ShapeError."""
    mask, shape = tensor(op, selected, x), x.shape
    if mask.dtype != dtypes.bool_:
        raise DTypeError(f"{op}: where= takes bools, got {mask.dtype}; use where=mask != 0")
    if broadcast_shapes(op, mask.shape, shape) != shape:
        raise ShapeError(f"{op}: where= of shape {mask.shape} does not broadcast to the array's {shape}")
    return mask


def masked(op: str, x: Tensor, selected: TensorLike | None, fill: float) -> Tensor:
    """``x`` with ``fill`` where ``selected`` is False; what is left out has gradient 0, whatever it is."""
    return x if selected is None else where(mask_of(op, selected, x), x, fill)


def start_of(op: str, initial: TensorLike, x: Tensor) -> Tensor:
    """``initial``, a number, as a tensor of the dtype of ``x``.  Raises DTypeError where that cannot hold it."""
    t = tensor(op, initial, x)
    if t.ndim:
        raise ShapeError(f"{op}: initial= is one number, got shape {t.shape}")
    if dtypes.rank(t.dtype) > dtypes.rank(x.dtype):
        raise DTypeError(f"{op}: {x.dtype} cannot hold initial={initial!r:.60}; use astype first")
    return cast(t, x.dtype) if hasattr(initial, "dtype") else asarray(initial, dtype=x.dtype, device=x.device)


def worst(dtype: DType, largest: bool) -> float:
    """The value of nothing: every element is at least as large (``largest``), or as small."""
    if dtype.kind == "b":
        return not largest
    if dtype.kind in "iu":
        return int(dtypes.iinfo(dtype).min if largest else dtypes.iinfo(dtype).max)
    return -math.inf if largest else math.inf
