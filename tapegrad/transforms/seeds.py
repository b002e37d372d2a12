"""What a backward walk starts from: the cotangents of its targets, checked."""

from __future__ import annotations

from typing import Any

from tapegrad import nest
from tapegrad.aval import ShapedArray
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError, GradientError, ShapeError
from tapegrad.ops.creation import asarray, ones
from tapegrad.ops.dispatch import cast
from tapegrad.ops.shape import broadcast_to
from tapegrad.tensor import Tensor
from tapegrad.variable import Variable


def wants_zeros(mode: Any) -> bool:
    """Whether unconnected sources get zeros.  Raises GradientError for an unknown mode."""
    name = getattr(mode, "value", mode)
    if name not in ("none", "zero"):
        raise GradientError(f"unconnected_gradients is 'none' or 'zero', not {mode!r}")
    return name == "zero"


def weights_of(targets: list[Any], given: Any) -> list[Tensor]:
    """A cotangent for each target."""
    if given is None:
        return [_ones(t) for t in targets]
    weights = nest.flatten(given)
    if len(weights) != len(targets):
        raise GradientError(f"output_gradients: {len(weights)} given for {len(targets)} targets")
    return [_weight(i, t, w) for i, (t, w) in enumerate(zip(targets, weights, strict=True))]


def _weight(i: int, target: Any, weight: Any) -> Tensor:
    aval: ShapedArray = (target._cell.get() if isinstance(target, Variable) else target._buffer).node.aval
    if weight is None:
        return _ones(target)
    strict = isinstance(weight, (Tensor, Variable))
    found = asarray(weight)
    if found.dtype != aval.dtype:
        if strict or not dtypes.can_cast(found.dtype, aval.dtype):
            raise DTypeError(f"output_gradients: number {i} is {found.dtype}, its target {aval.dtype}; use tg.astype")
        found = cast(found, aval.dtype)
    if found.shape == aval.shape:
        return found
    if found.ndim == 0:
        return broadcast_to(found, aval.shape)
    raise ShapeError(f"output_gradients: number {i} has shape {found.shape}, its target {aval.shape}")


def _ones(x: Any) -> Tensor:
    """Ones of the shape of ``x``, of which only one exists."""
    return broadcast_to(ones((), dtype=x.dtype, device=x.device), x.shape)
