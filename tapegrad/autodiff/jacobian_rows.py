"""Rows of Jacobians: unit cotangents with one more leading axis, and putting results together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from tapegrad.core.aval import Shape, ShapedArray
from tapegrad.ops.create.creation import eye, zeros
from tapegrad.ops.shape.join import concat
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, moveaxis, reshape
from tapegrad.tensor import Tensor

MOST = 2**22
"""Elements of the largest cotangent with rows: what a chunk of rows may take."""


def chunks(count: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut ``count`` rows evenly so that a chunk of cotangents of ``sizes`` stays small; at least one chunk."""
    step = _step(count, -(-count // max(1, MOST // max(1, *sizes))))
    for start in range(0, max(count, 1), step):
        yield start, min(count, start + step)


def _step(count: int, chunks: int) -> int:
    """Rows in all of so many chunks but the last."""
    return max(1, -(-count // max(1, chunks)))


def basis(aval: ShapedArray, start: int, stop: int) -> Tensor:
    """Unit cotangents ``start`` to ``stop`` of a value: shape ``(stop - start, *aval.shape)``."""
    unit = eye(stop - start, aval.size, k=start, dtype=aval.dtype, device=aval.device)
    return reshape(unit, (stop - start, *aval.shape))


def joined(parts: list[dict[int, Tensor]], shape: Shape) -> dict[int, Tensor]:
    """The chunks' cotangents as Jacobians of a target of ``shape``; a value missing in some chunks has zeros there."""
    jacobians = {}
    count = prod(shape)
    step = _step(count, len(parts))
    for index in dict.fromkeys(index for part in parts for index in part):
        some = next(part[index] for part in parts if index in part)
        pieces = [
            part[index]
            if index in part
            else zeros((min(step, count - k * step), *some.shape[1:]), dtype=some.dtype, device=some.device)
            for k, part in enumerate(parts)
        ]
        whole = concat(pieces) if len(pieces) > 1 else some
        jacobians[index] = reshape(whole, (*shape, *whole.shape[1:]))
    return jacobians


def batch_basis(aval: ShapedArray) -> tuple[Tensor, int]:
    """Unit cotangents in all axes but the first, the same for each example, and their number."""
    columns = prod(aval.shape[1:])
    unit = reshape(eye(columns, dtype=aval.dtype, device=aval.device), (columns, *aval.shape[1:]))
    return broadcast_to(expand_dims(unit, 1), (columns, *aval.shape)), columns


def batch_result(grad: Tensor | None, target: ShapedArray, source: ShapedArray, columns: int) -> Tensor:
    """Cotangents ``(columns, *source.shape)`` as ``(batch, *target.shape[1:], *source.shape[1:])``."""
    shape = (*target.shape, *source.shape[1:])
    if grad is None:
        return zeros(shape, dtype=source.dtype, device=source.device)
    return reshape(moveaxis(grad, 0, 1), shape)
