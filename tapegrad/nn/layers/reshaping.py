"""Layers that change shapes alone: Flatten, Reshape, Permute.  The first axis, of examples, stays."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tapegrad import ops
from tapegrad.errors import AxisError, ShapeError
from tapegrad.nn.layers.layer import Layer
from tapegrad.tensor import Tensor, TensorLike


class Flatten(Layer):
    """(n, ...) -> (n, product of the rest), in C order; (n,) -> (n, 1).  Raises ShapeError for no axes at all."""

    def call(self, inputs: TensorLike) -> Tensor:
        x = _examples(self, inputs)
        return ops.reshape(x, (x.shape[0], math.prod(x.shape[1:])))


class Reshape(Layer):
    """(n, ...) -> (n, *target_shape), in C order; one size may be -1, for what is left.

    Raises ShapeError for another number of elements.
    """

    def __init__(self, target_shape: Sequence[int], *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.target_shape = tuple(target_shape)
        if self.target_shape.count(-1) > 1 or any(n < -1 for n in self.target_shape):
            raise ShapeError(f"{self}: wanted sizes, at most one of them -1, got {self.target_shape}")

    def call(self, inputs: TensorLike) -> Tensor:
        x = _examples(self, inputs)
        given, known = math.prod(x.shape[1:]), math.prod(n for n in self.target_shape if n >= 0)
        left = given // known if known else 0
        sizes = tuple(left if n == -1 else n for n in self.target_shape)
        if math.prod(sizes) != given:
            raise ShapeError(f"{self}: cannot make {self.target_shape} of the {given} elements of each of {x.shape}")
        return ops.reshape(x, (x.shape[0], *sizes))


class Permute(Layer):
    """The axes after the first in the order ``dims``, counted from 1: ``Permute((2, 1))``: (n, a, b) -> (n, b, a).

    Raises AxisError unless ``dims`` are 1 to as many as there are.
    """

    def __init__(self, dims: Sequence[int], *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.dims = tuple(dims)
        if sorted(self.dims) != list(range(1, len(self.dims) + 1)):
            raise AxisError(f"{self}: wanted the axes from 1 to {len(self.dims)}, got {self.dims}")

    def call(self, inputs: TensorLike) -> Tensor:
        x = _examples(self, inputs)
        if x.ndim != len(self.dims) + 1:
            raise AxisError(f"{self}: wanted inputs of {len(self.dims) + 1} axes, got {x.shape}")
        return ops.permute_dims(x, (0, *self.dims))


def _examples(who: Layer, inputs: TensorLike) -> Tensor:
    x = ops.asarray(inputs)
    if not x.ndim:
        raise ShapeError(f"{who}: wanted inputs (n, ...), got a scalar")
    return x
