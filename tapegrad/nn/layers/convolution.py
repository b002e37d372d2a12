"""Layers on images (n, channels, sizes ...): convolutions, pooling, normalization of channels.

The names and arguments are Keras', the layout is PyTorch's: ``data_format="channels_first"`` always.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tapegrad import ops
from tapegrad.errors import ShapeError
from tapegrad.nn import checks, initializers
from tapegrad.nn.functional import activations, conv, norm
from tapegrad.nn.functional import pool as functional_pool
from tapegrad.nn.functional.conv import Lengths, Padding
from tapegrad.nn.layers.core import Activation, Affine, Normalization
from tapegrad.nn.layers.layer import Layer
from tapegrad.tensor import DTypeLike, Tensor, TensorLike
from tapegrad.variable import Variable


class _Conv(Affine):
    """``activation(conv(inputs, kernel) + bias)`` with as many sizes as ``dims``."""

    dims: int

    def __init__(
        self,
        filters: int,
        kernel_size: Lengths,
        strides: Lengths = 1,
        padding: Padding = "valid",
        dilation_rate: Lengths = 1,
        groups: int = 1,
        activation: Activation = None,
        use_bias: bool = True,
        *,
        kernel_initializer: str | initializers.Initializer = "glorot_uniform",
        bias_initializer: str | initializers.Initializer = "zeros",
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        super().__init__(activation, use_bias, kernel_initializer, bias_initializer, name, dtype)
        self.filters = checks.positive(self, "filters", filters)
        self.kernel_size = conv.lengths(self, "kernel_size", kernel_size, self.dims)
        self.strides = conv.lengths(self, "strides", strides, self.dims)
        self.padding = padding
        self.dilation_rate = conv.lengths(self, "dilation_rate", dilation_rate, self.dims)
        self.groups = checks.positive(self, "groups", groups)
        if filters % groups:
            raise ShapeError(f"{self}: {filters} filters do not divide into {groups} groups")

    def build(self, input_shape: tuple[int, ...]) -> None:
        if len(input_shape) != self.dims + 2 or input_shape[1] % self.groups:
            sizes = ("l", "h, w", "d, h, w")[self.dims - 1]
            raise ShapeError(
                f"{self}: wanted inputs (n, channels, {sizes}), channels divisible by groups={self.groups}, "
                f"got {tuple(input_shape)}"
            )
        channels = input_shape[1] // self.groups
        # Initializers count a unit's inputs and outputs on the last two axes.
        drawn = lambda shape, dtype, generator: ops.permute_dims(
            self.kernel_initializer((*shape[2:], *shape[1::-1]), dtype, generator),
            (self.dims + 1, self.dims, *range(self.dims)),
        )
        self.kernel = self.add_weight((self.filters, channels, *self.kernel_size), drawn, name="kernel")
        self._add_bias(self.filters)

    def call(self, inputs: TensorLike) -> Tensor:
        x, kernel, bias = self._operands("conv", inputs, self.kernel, self.bias)
        if x.ndim != self.dims + 2:
            raise ShapeError(f"{self}: wanted inputs of {self.dims + 2} axes, for which it was built, got {x.shape}")
        clips = self.activation in (ops.relu, activations.relu)  # which the convolution's kernel can do
        y = conv.convolve(
            self, self.dims, x, kernel, bias, self.strides, self.padding, self.dilation_rate, self.groups, clips
        )
        return y if clips else self.activation(y)


class Conv1D(_Conv):
    """``activation(conv1d(inputs, kernel) + bias)``: as :class:`Conv2D` with inputs (n, c, l)."""

    dims = 1


class Conv2D(_Conv):
    """``activation(conv2d(inputs, kernel) + bias)``.

    inputs: (n, c, h, w), kernel: (filters, c / groups, kh, kw), bias: (filters,), result: (n, filters, positions ...).
    ``padding``: "valid", "same" (positions = size / strides, rounded up), numbers, or pairs ``(before, after)``.

    Raises ShapeError for other inputs than it was built for.
    """

    dims = 2


class Conv3D(_Conv):
    """``activation(conv3d(inputs, kernel) + bias)``: as :class:`Conv2D` with inputs (n, c, d, h, w)."""

    dims = 3


class _Pooling(Layer):
    """One number for each window of images with as many sizes as ``dims``."""

    dims: int
    function: str
    options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        pool_size: Lengths = 2,
        strides: Lengths | None = None,
        padding: Padding = "valid",
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.pool_size = conv.lengths(self, "pool_size", pool_size, self.dims)
        self.strides = strides
        self.padding = padding

    def call(self, inputs: TensorLike) -> Tensor:
        x = ops.asarray(inputs)
        if x.ndim != self.dims + 2:
            raise ShapeError(f"{self}: wanted inputs of {self.dims + 2} axes, (n, channels, ...), got {x.shape}")
        pool = getattr(functional_pool, self.function)
        return pool(x, self.pool_size, self.strides, self.padding, **self.options)


class MaxPool1D(_Pooling):
    """The largest element of each window; inputs: (n, c, l).  Raises ShapeError."""

    dims, function = 1, "max_pool1d"


class MaxPool2D(_Pooling):
    """The largest element of each window; inputs: (n, c, h, w).  Raises ShapeError."""

    dims, function = 2, "max_pool2d"


class MaxPool3D(_Pooling):
    """The largest element of each window; inputs: (n, c, d, h, w).  Raises ShapeError."""

    dims, function = 3, "max_pool3d"


class AveragePooling1D(_Pooling):
    """The mean of each window, without what padding adds; inputs: (n, c, l).  Raises ShapeError."""

    dims, function, options = 1, "avg_pool1d", {"count_include_pad": False}


class AveragePooling2D(_Pooling):
    """The mean of each window, without what padding adds; inputs: (n, c, h, w).  Raises ShapeError."""

    dims, function, options = 2, "avg_pool2d", {"count_include_pad": False}


class AveragePooling3D(_Pooling):
    """The mean of each window, without what padding adds; inputs: (n, c, d, h, w).  Raises ShapeError."""

    dims, function, options = 3, "avg_pool3d", {"count_include_pad": False}


class _GlobalPooling(Layer):
    """One number for each channel of images with as many sizes as ``dims``."""

    dims: int
    function: str

    def __init__(self, keepdims: bool = False, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.keepdims = keepdims

    def call(self, inputs: TensorLike) -> Tensor:
        x = ops.asarray(inputs)
        if x.ndim != self.dims + 2:
            sizes = ("l", "h, w", "d, h, w")[self.dims - 1]
            raise ShapeError(f"{self}: wanted inputs (n, channels, {sizes}), got {x.shape}")
        return getattr(ops, self.function)(x, axis=tuple(range(2, x.ndim)), keepdims=self.keepdims)


class GlobalAveragePooling1D(_GlobalPooling):
    """The mean of each channel; (n, c, l) -> (n, c), with ``keepdims`` (n, c, 1).  Raises ShapeError."""

    dims, function = 1, "mean"


class GlobalAveragePooling2D(_GlobalPooling):
    """The mean of each channel; (n, c, h, w) -> (n, c), with ``keepdims`` (n, c, 1, 1).  Raises ShapeError."""

    dims, function = 2, "mean"


class GlobalAveragePooling3D(_GlobalPooling):
    """The mean of each channel; (n, c, d, h, w) -> (n, c), with ``keepdims`` (n, c, 1, 1, 1).  Raises ShapeError."""

    dims, function = 3, "mean"


class GlobalMaxPooling1D(_GlobalPooling):
    """The largest of each channel; (n, c, l) -> (n, c), with ``keepdims`` (n, c, 1).  Raises ShapeError."""

    dims, function = 1, "max"


class GlobalMaxPooling2D(_GlobalPooling):
    """The largest of each channel; (n, c, h, w) -> (n, c), with ``keepdims`` (n, c, 1, 1).  Raises ShapeError."""

    dims, function = 2, "max"


class GlobalMaxPooling3D(_GlobalPooling):
    """The largest of each channel; (n, c, d, h, w) -> (n, c), with ``keepdims`` (n, c, 1, 1, 1).  Raises ShapeError."""

    dims, function = 3, "max"


class BatchNormalization(Normalization):
    """``(x - mean) / sqrt(variance + epsilon) * gamma + beta`` for each channel (Ioffe and Szegedy, arXiv 1502.03167).

    inputs: (n, c, ...), gamma and beta: (c,).  With ``training=True`` by the batch's statistics, towards which the
    moving ones go by ``1 - momentum`` (once, also where the layer is rerun to differentiate it); else by the moving
    ones.  ``epsilon`` is 1e-3 as in Keras; PyTorch uses 1e-5.

    Raises ShapeError for other channels than it was built for.
    """

    def __init__(
        self,
        momentum: float = 0.99,
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
        self.momentum = checks.rate(self, momentum)

    def build(self, input_shape: tuple[int, ...]) -> None:
        if len(input_shape) < 2:
            raise ShapeError(f"{self}: wanted inputs (n, channels, ...), got {tuple(input_shape)}")
        shape = (input_shape[1],)
        self._add_scale(shape)
        self.moving_mean = self.add_weight(shape, "zeros", name="moving_mean", trainable=False)
        self.moving_variance = self.add_weight(shape, "ones", name="moving_variance", trainable=False)

    def call(self, inputs: TensorLike, training: bool = False) -> Tensor:
        x = self._as_own_dtype(inputs)
        channels = self.moving_mean.shape
        if x.ndim < 2 or x.shape[1:2] != channels:
            raise ShapeError(f"{self}: wanted inputs (n, {channels[0]}, ...), for which it was built, got {x.shape}")
        mean: Tensor | Variable = self.moving_mean
        variance: Tensor | Variable = self.moving_variance
        if training:
            mean, variance = norm.batch_statistics(x)
            norm.follow(self.moving_mean, mean, 1.0 - self.momentum)
            norm.follow(self.moving_variance, variance, 1.0 - self.momentum)
        return norm.normalized(x, mean, variance, self.gamma, self.beta, self.epsilon)


class GroupNormalization(Normalization):
    """Each example by the statistics of each of ``groups`` groups of its channels (Wu and He, arXiv 1803.08494).

    inputs: (n, c, ...), gamma and beta: (c,).  ``groups=-1``: as many as channels (instance normalization); 1: one
    (over all of an example).  ``epsilon`` is 1e-3 as in Keras; PyTorch uses 1e-5.

    Raises ShapeError where the channels do not divide into the groups, or for other channels than it was built for.
    """

    def __init__(
        self,
        groups: int = 32,
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
        self.groups = groups if groups == -1 else checks.positive(self, "groups", groups)

    def build(self, input_shape: tuple[int, ...]) -> None:
        if len(input_shape) < 2 or input_shape[1] % self.groups:
            raise ShapeError(
                f"{self}: wanted inputs (n, channels, ...), channels divisible by groups={self.groups}, "
                f"got {tuple(input_shape)}"
            )
        self._add_scale((input_shape[1],))
        self._channels = input_shape[1]

    def call(self, inputs: TensorLike) -> Tensor:
        x = self._as_own_dtype(inputs)
        if x.ndim < 2 or x.shape[1] != self._channels:
            raise ShapeError(f"{self}: wanted inputs (n, {self._channels}, ...), for which it was built, got {x.shape}")
        groups = self._channels if self.groups == -1 else self.groups
        return norm.group_norm(x, groups, self.gamma, self.beta, self.epsilon)
