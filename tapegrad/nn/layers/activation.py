"""Activations as layers, under Keras' names; the slopes and axes are those of (n, channels, ...)."""

from __future__ import annotations

from typing import Any

from tapegrad import ops
from tapegrad.errors import ShapeError, TapegradError
from tapegrad.nn import functional, initializers
from tapegrad.nn.layers import core
from tapegrad.nn.layers.layer import Layer
from tapegrad.tensor import DTypeLike, Tensor, TensorLike


class Activation(Layer):
    """A function of each number, or Keras' name of one (``"gelu"``).  Raises TapegradError for an unknown name."""

    def __init__(self, activation: core.Activation, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.activation = functional.activation(activation)

    def call(self, inputs: TensorLike) -> Tensor:
        return self.activation(ops.asarray(inputs))


class ReLU(Layer):
    """``x`` from ``threshold`` to ``max_value``; ``max_value`` beyond, ``negative_slope * (x - threshold)`` below.

    Raises TapegradError for a negative argument.
    """

    def __init__(
        self, max_value: float | None = None, negative_slope: float = 0.0, threshold: float = 0.0,
        *, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name=name)
        if min(max_value or 0.0, negative_slope, threshold) < 0:
            raise TapegradError(f"{self}: wanted no negative arguments, got {(max_value, negative_slope, threshold)}")
        self.max_value, self.negative_slope, self.threshold = max_value, negative_slope, threshold

    def call(self, inputs: TensorLike) -> Tensor:
        x = ops.asarray(inputs)
        if self.negative_slope or self.threshold:
            y = ops.where(x >= self.threshold, x, self.negative_slope * (x - self.threshold))
        else:
            y = ops.relu(x)
        return y if self.max_value is None else ops.minimum(y, self.max_value)


class LeakyReLU(Layer):
    """``x`` where positive, else ``negative_slope * x`` (0.3 as in Keras; PyTorch's is 0.01)."""

    def __init__(self, negative_slope: float = 0.3, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.negative_slope = negative_slope

    def call(self, inputs: TensorLike) -> Tensor:
        return functional.leaky_relu(inputs, self.negative_slope)


class ELU(Layer):
    """``x`` where positive, else ``alpha * (exp(x) - 1)`` (Clevert et al., arXiv 1511.07289)."""

    def __init__(self, alpha: float = 1.0, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.alpha = alpha

    def call(self, inputs: TensorLike) -> Tensor:
        return functional.elu(inputs, self.alpha)


class PReLU(Layer):
    """``x`` where positive, else ``alpha * x`` with a trained ``alpha`` for each channel (He et al., arXiv 1502.01852).

    inputs: (n, c, ...), alpha: (c,), 0 at first as in Keras.  Raises ShapeError for other channels.
    """

    def __init__(
        self, alpha_initializer: core.Start = "zeros", *, name: str | None = None, dtype: DTypeLike | None = None
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.alpha_initializer = initializers.get(alpha_initializer)

    def build(self, input_shape: tuple[int, ...]) -> None:
        if len(input_shape) < 2:
            raise ShapeError(f"{self}: wanted inputs (n, channels, ...), got {tuple(input_shape)}")
        self.alpha = self.add_weight((input_shape[1],), self.alpha_initializer, name="alpha")

    def call(self, inputs: TensorLike) -> Tensor:
        x = self._as_own_dtype(inputs)
        if x.shape[1:2] != self.alpha.shape:
            raise ShapeError(
                f"{self}: wanted inputs (n, {self.alpha.size}, ...), for which it was built, got {x.shape}"
            )
        return functional.prelu(x, self.alpha)


class Softmax(Layer):
    """``exp(x) / sum(exp(x))`` along ``axis``; where ``mask`` is false the result is 0, or equal where all is masked.

    Raises AxisError.
    """

    def __init__(self, axis: int = -1, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.axis = axis

    def call(self, inputs: TensorLike, mask: Any = None) -> Tensor:
        x = ops.asarray(inputs)
        if mask is not None:
            x = ops.where(ops.asarray(mask, device=x.device), x, float(ops.finfo(x.dtype).min))
        return ops.softmax(x, axis=self.axis)
