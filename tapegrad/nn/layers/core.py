"""The layers without attention: Dense, Embedding, LayerNormalization, Dropout, Lambda, and Sequential to chain them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from tapegrad import ops
from tapegrad.errors import AxisError, NotATensorError, ShapeError
from tapegrad.nn import checks, functional, initializers
from tapegrad.nn.layers.layer import Layer, Transparent, unwrapped
from tapegrad.tensor import DTypeLike, Tensor, TensorLike
from tapegrad.variable import Variable

Activation = str | Callable[[Tensor], Tensor] | None
Start = str | initializers.Initializer
"""An initializer of a weight, or Keras' name of one."""


class Affine(Layer):
    """The base of layers with a kernel, a bias and an activation."""

    bias: Variable | None

    def __init__(
        self, activation: Activation, use_bias: bool, kernel_initializer: Start, bias_initializer: Start,
        name: str | None, dtype: DTypeLike | None,
    ) -> None:  # fmt: skip
        super().__init__(name=name, dtype=dtype)
        self.activation = functional.activation(activation)
        self.use_bias = use_bias
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)

    def _add_bias(self, count: int) -> None:
        self.bias = self.add_weight((count,), self.bias_initializer, name="bias") if self.use_bias else None


class Normalization(Layer):
    """The base of layers that normalize, scale by ``gamma`` and add ``beta``."""

    gamma: Variable | None
    beta: Variable | None

    def __init__(
        self, epsilon: float, center: bool, scale: bool, gamma_initializer: Start, beta_initializer: Start,
        name: str | None, dtype: DTypeLike | None,
    ) -> None:  # fmt: skip
        super().__init__(name=name, dtype=dtype)
        self.epsilon = epsilon
        self.center = center
        self.scale = scale
        self.gamma_initializer = initializers.get(gamma_initializer)
        self.beta_initializer = initializers.get(beta_initializer)

    def _add_scale(self, shape: tuple[int, ...]) -> None:
        self.gamma = self.add_weight(shape, self.gamma_initializer, name="gamma") if self.scale else None
        self.beta = self.add_weight(shape, self.beta_initializer, name="beta") if self.center else None


class Dense(Affine):
    """``activation(inputs @ kernel + bias)`` over the last axis.

    inputs: (..., k), kernel: (k, units), bias: (units,), result: (..., units).

    Raises ShapeError where the last axis is missing or differs from the one the layer was built for.
    """

    def __init__(
        self,
        units: int,
        activation: Activation = None,
        use_bias: bool = True,
        *,
        kernel_initializer: str | initializers.Initializer = "glorot_uniform",
        bias_initializer: str | initializers.Initializer = "zeros",
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        super().__init__(activation, use_bias, kernel_initializer, bias_initializer, name, dtype)
        self.units = checks.positive(self, "units", units)

    def build(self, input_shape: tuple[int, ...]) -> None:
        if not input_shape:
            raise ShapeError(f"{self}: wanted inputs (..., k), got a scalar; add an axis")
        self.kernel = self.add_weight((input_shape[-1], self.units), self.kernel_initializer, name="kernel")
        self._add_bias(self.units)

    def call(self, inputs: TensorLike, heads: int | None = None) -> Tensor:
        """``heads`` (of attention): (..., t, k) -> (..., heads, t, units / heads), a view: attention turns it back."""
        x, kernel, bias = self._operands("linear", inputs, self.kernel, self.bias)
        k = self.kernel.shape[0]
        if not x.shape or x.shape[-1] != k:
            raise ShapeError(
                f"{self}: wanted inputs (..., {k}), for which it was built, got {x.shape}; kernel {(k, self.units)}"
            )
        y = ops.matmul(x, kernel)
        y = self.activation(y if bias is None else y + bias)
        if heads is None:
            return y
        return ops.moveaxis(ops.reshape(y, (*y.shape[:-1], heads, self.units // heads)), -2, -3)


class Embedding(Layer):
    """Row ``i`` of a table for every integer ``i``.

    inputs: integers (...), in ``[0, input_dim)``; embeddings: (input_dim, output_dim); result: (..., output_dim).
    ``sparse`` (PyTorch's name): ``tape.gradient`` gives a ``tg.IndexedSlices`` of the rows read, and of the rows alone
    ``optim.SGD``, ``Adagrad`` and ``LazyAdam`` take a step; see ``tg.take``.

    Raises DTypeError for inputs that are not integers, IndexingError for one outside the table (also a negative one).
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *,
        embeddings_initializer: str | initializers.Initializer = "uniform",
        sparse: bool = False,
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.input_dim = checks.positive(self, "input_dim", input_dim)
        self.output_dim = checks.positive(self, "output_dim", output_dim)
        self.embeddings_initializer = initializers.get(embeddings_initializer)
        self.sparse = sparse

    def build(self, input_shape: object = None) -> None:
        shape = (self.input_dim, self.output_dim)
        self.embeddings = self.add_weight(shape, self.embeddings_initializer, name="embeddings")

    def call(self, inputs: TensorLike) -> Tensor:
        indices = ops.asarray(inputs)
        checks.integers(self, "inputs", indices)
        checks.within(self, "integers", indices, self.input_dim)
        return ops.take(self.embeddings, indices, axis=0, sparse_grad=self.sparse)


class LayerNormalization(Normalization):
    """``(x - mean) / sqrt(variance + epsilon) * gamma + beta`` over one or more axes (Ba et al., arXiv 1607.06450).

    inputs: (...), gamma and beta: the sizes of ``axis``, result: as inputs.  ``epsilon`` is 1e-3 as in Keras; PyTorch
    uses 1e-5.

    Raises AxisError for an axis the inputs do not have, ShapeError for other sizes than the layer was built for.
    """

    def __init__(
        self,
        axis: int | Sequence[int] = -1,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        *,
        gamma_initializer: str | initializers.Initializer = "ones",
        beta_initializer: str | initializers.Initializer = "zeros",
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        super().__init__(epsilon, center, scale, gamma_initializer, beta_initializer, name, dtype)
        self.axis = (axis,) if isinstance(axis, (int, Integral)) else tuple(axis)

    def build(self, input_shape: tuple[int, ...]) -> None:
        shape = tuple([input_shape[a] for a in self._axes(len(input_shape))])
        self._add_scale(shape)
        self._shape = shape

    def call(self, inputs: TensorLike) -> Tensor:
        x = self._as_own_dtype(inputs)
        axes = self._axes(x.ndim)
        sizes = tuple([x.shape[a] for a in axes])
        if sizes != self._shape:
            raise ShapeError(f"{self}: wanted sizes {self._shape} on axes {self.axis}, got {sizes} of inputs {x.shape}")
        size = (math.prod(sizes),)
        gamma: TensorLike = ops.ones(size, self.dtype, device=x.device) if self.gamma is None else self.gamma
        beta: TensorLike = ops.zeros(size, self.dtype, device=x.device) if self.beta is None else self.beta
        if axes == (x.ndim - 1,):
            return ops.layer_norm(x, gamma, beta, eps=self.epsilon)
        # The op works on the last axis: merge the normalized axes there, and undo that afterwards.
        order = (*(a for a in range(x.ndim) if a not in axes), *axes)
        gamma, beta, moved = ops.reshape(gamma, size), ops.reshape(beta, size), ops.permute_dims(x, order)
        flat = ops.reshape(moved, (math.prod(moved.shape[: -len(axes)]), *size))
        y = ops.reshape(ops.layer_norm(flat, gamma, beta, eps=self.epsilon), moved.shape)
        return ops.permute_dims(y, tuple(order.index(a) for a in range(x.ndim)))

    def _axes(self, ndim: int) -> tuple[int, ...]:
        wrong = [a for a in self.axis if not -ndim <= a < ndim]
        if wrong:
            raise AxisError(f"{self}: axis {wrong[0]} is out of range for inputs with {ndim} axes")
        axes = tuple([a % ndim for a in self.axis])
        if not axes or len(set(axes)) != len(axes):
            raise AxisError(f"{self}: wanted different axes, at least one, got {self.axis} for {ndim} axes")
        return axes


class Dropout(Layer):
    """With ``training=True`` zeros a share ``rate`` of the inputs and divides the rest by ``1 - rate``; else nothing.

    The mask comes from tapegrad's global stream, so ``recompute_grad`` replays it (Srivastava et al., JMLR 15, 2014).
    """

    def __init__(self, rate: float, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.rate = checks.rate(self, rate)

    def call(self, inputs: TensorLike, training: bool = False) -> Tensor:
        x = ops.asarray(inputs)
        if not training or self.rate == 0:
            return ops.asarray(x, copy=True)
        if "int" in str(x.dtype) or "bool" in str(x.dtype):
            x = ops.astype(x, self.dtype)
        return functional.dropout(x, self.rate, training=True)


class Lambda(Layer):
    """A function as a layer: ``function(inputs, *args, **arguments)``.

    Variables of layers that the function wraps (``recompute_grad(layer)``) or is a method of are found; others are
    not, as in Keras: write a Layer for them.
    """

    def __init__(
        self, function: Callable[..., object], *, arguments: Mapping[str, object] | None = None, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        if not callable(function):
            raise NotATensorError(f"{self}: wanted a function, got {type(function).__name__}")
        self.function = function
        self.arguments = arguments or {}

    def call(self, *args: object, **kwargs: object) -> Any:
        if not isinstance(unwrapped(self.function), Layer):
            kwargs.pop("training", None)
        return self.function(*args, **kwargs, **self.arguments)


class Sequential(Transparent, Layer):
    """Layers one after the other: layers, wrapped layers such as ``recompute_grad(layer)``, or plain functions.

    ``training`` is passed on to the layers, not to plain functions.
    """

    def __init__(self, layers: Sequence[Callable[..., object]] = (), *, name: str | None = None) -> None:
        super().__init__(name=name)
        self._stack: list[Callable[..., Any]] = []
        if not isinstance(layers, Iterable):
            raise NotATensorError(f"{self}: wanted a list of layers, got {type(layers).__name__}")
        for layer in layers:
            self.add(layer)

    def add(self, layer: Callable[..., object]) -> None:
        """Append one.  Raises NotATensorError for something that cannot be called."""
        if not callable(layer):
            raise NotATensorError(f"{self}: wanted layers or functions, got {type(layer).__name__}")
        self._stack.append(layer)

    def pop(self) -> Callable[..., Any]:
        """Remove the last one and return it."""
        return self._stack.pop()

    def call(self, inputs: TensorLike, training: bool = False) -> Any:
        for layer in self._stack:
            inner = unwrapped(layer)
            if training and isinstance(inner, Layer):
                inputs = layer(inputs, training=True)
            else:
                inputs = layer(inputs)
        return inputs

    def __len__(self) -> int:
        return len(self._stack)

    def __getitem__(self, index: int | slice) -> Any:
        return Sequential(self._stack[index]) if isinstance(index, slice) else self._stack[index]

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self._stack)
