"""Cotangents of slices, collected until the cotangent of the whole is needed."""

from __future__ import annotations

from tapegrad.core.aval import ShapedArray
from tapegrad.engine.realize import realize
from tapegrad.ops.dispatch import barrier
from tapegrad.ops.shape.blocks import Part, unslice_p, unslice_sum_p, whole
from tapegrad.tensor import Tensor


class Windows:
    """The cotangent of a value: what has come for windows of it, in the order in which it is to be added.

    A loop that reads ``x[i]`` has a window for each step.  Were each made an array of the shape of ``x`` and added,
    time would grow with the square of the number of steps.  Here one operation adds as many bytes as ``x`` has.
    """

    __slots__ = ("_aval", "_before", "_indices", "_nbytes", "_values")

    def __init__(self, aval: ShapedArray, before: Tensor | None) -> None:
        """``aval``: of the value; ``before``: what has come for all of it."""
        self._aval, self._before = aval, before
        self._values: list[Tensor] = []
        self._indices: list[tuple[Part, ...]] = []
        self._nbytes = 0

    def add(self, value: Tensor, index: tuple[Part, ...]) -> None:
        """Add to the elements at ``index``."""
        realize([value._buffer])  # a lazy value would keep alive what it is computed from
        if not self._values or value._buffer is not self._values[-1]._buffer:  # a stencil's are all one value
            self._nbytes += value._buffer.node.aval.nbytes
        self._values.append(value)
        self._indices.append(index)
        if self._nbytes > self._aval.nbytes:
            self._before = self.dense()
            self._values, self._indices, self._nbytes = [], [], 0

    def dense(self) -> Tensor:
        """Return the whole cotangent."""
        shape, before = self._aval.shape, self._before
        values, indices = self._values, self._indices
        if before is not None:
            values, indices = [before, *values], [whole(shape), *indices]
        if len(values) > 1:
            return barrier(unslice_sum_p, *values, shape=shape, indices=tuple(indices))
        return values[0] if before is not None else barrier(unslice_p, values[0], shape=shape, index=indices[0])
