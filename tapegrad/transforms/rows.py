"""Rows of Jacobians: unit cotangents with one more leading axis, and putting results together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from tapegrad.aval import Shape, ShapedArray
from tapegrad.ops.creation import eye, zeros
from tapegrad.ops.joining import concat
from tapegrad.ops.shape import broadcast_to, expand_dims, moveaxis, reshape
from tapegrad.tensor import Tensor

MOST = 2**22
"""Elements of the largest cotangent with rows: what a chunk of rows may take."""


def chunks(count: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut ``count`` rows so that a chunk of cotangents of ``sizes`` stays small; at least one chunk."""
    step = max(1, min(max(count, 1), MOST // max(1, *sizes)))
    for start in range(0, max(count, 1), step):
        yield start, min(count, start + step)


def basis(aval: ShapedArray, start: int, stop: int) -> Tensor:
    """Unit cotangents ``start`` to ``stop`` of a value: shape ``(stop - start, *aval.shape)``."""
    unit = eye(stop - start, aval.size, k=start, dtype=aval.dtype, device=aval.device)
    return reshape(unit, (stop - start, *aval.shape))


def joined(parts: list[dict[int, Tensor]], shape: Shape) -> dict[int, Tensor]:
    """The chunks' cotangents as Jacobians of a target of ``shape``."""
    found = {}
    for index in parts[0]:
        whole = concat([p[index] for p in parts]) if len(parts) > 1 else parts[0][index]
        found[index] = reshape(whole, (*shape, *whole.shape[1:]))
    return found


def batch_basis(aval: ShapedArray) -> tuple[Tensor, int]:
    """Unit cotangents in all axes but the first, the same for each example, and their number."""
    columns = prod(aval.shape[1:])
    unit = reshape(eye(columns, dtype=aval.dtype, device=aval.device), (columns, *aval.shape[1:]))
    return broadcast_to(expand_dims(unit, 1), (columns, *aval.shape)), columns


def batch_result(found: Tensor | None, target: ShapedArray, source: ShapedArray, columns: int) -> Tensor:
    """Cotangents ``(columns, *source.shape)`` as ``(batch, *target.shape[1:], *source.shape[1:])``."""
    shape = (*target.shape, *source.shape[1:])
    if found is None:
        return zeros(shape, dtype=source.dtype, device=source.device)
    return reshape(moveaxis(found, 0, 1), shape)
