"""Convolution (cross-correlation, as neural networks say it) and its two transposes.

The three are bilinear, and each is what transposing another gives, so that derivatives of every order are among them.
Operands may have more axes in front, which broadcast: rows of a Jacobian, or the calls of a batched function.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from tapegrad.core.aval import Shape, ShapedArray, broadcast_shapes
from tapegrad.core.primitive import Bad, Primitive, Sample, bilinear
from tapegrad.device import Device
from tapegrad.device.numerics import blas, conv_cpu, conv_lead, conv_onednn
from tapegrad.device.numerics.conv_lead import Prepared, Unmade
from tapegrad.device.numerics.windows import Moves, Window
from tapegrad.device.traffic import passed
from tapegrad.device.types import Array, Namespace
from tapegrad.errors import ShapeError
from tapegrad.ops.apply import same_params
from tapegrad.ops.casting import rounds_products
from tapegrad.ops.dispatch import barrier, promote, whole_in_float64
from tapegrad.ops.products import _cuda_conv
from tapegrad.tensor import Tensor, TensorLike


def fitted(op: str, window: Window) -> Shape:
    """The positions of a window that fits into its padded image.  Raises ShapeError naming ``op``."""
    if not all(window.kernel):
        raise ShapeError(f"{op}: a kernel of size {window.kernel} is empty; every length must be at least 1")
    positions = window.positions
    if min(positions) < 1:
        reach = tuple((k - 1) * d + 1 for k, d in zip(window.kernel, window.dilation))
        padded = tuple(n + low + high for n, (low, high) in zip(window.size, window.padding))
        raise ShapeError(
            f"{op}: a kernel of size {window.kernel} with dilation {window.dilation} covers {reach}, but the padded "
            f"input is {padded}; pad more, or take a smaller kernel"
        )
    return positions


def _lead(op: str, x: ShapedArray, w: ShapedArray, own: int) -> Shape:
    """The axes in front of the ``own`` last ones, broadcast."""
    return broadcast_shapes(op, x.shape[: x.ndim - own], w.shape[: w.ndim - own])


def _infer_conv(x: ShapedArray, w: ShapedArray, *, moves: Moves) -> ShapedArray:
    sizes = len(moves.strides)
    own = sizes + 2
    if x.ndim < own or w.ndim < own:
        raise ShapeError(
            f"conv: input {x.shape} and weight {w.shape}; wanted (n, channels, {sizes} sizes) and "
            f"(outputs, channels / groups, {sizes} sizes); add the missing axes"
        )
    outputs, channels = w.shape[-own : 2 - own]
    if x.shape[1 - own] != channels * moves.groups:
        raise ShapeError(
            f"conv: input {x.shape} has {x.shape[1 - own]} channels, but weight {w.shape} with groups={moves.groups} "
            f"wants {channels * moves.groups}; weight is (outputs, channels / groups, *kernel)"
        )
    if outputs % moves.groups:
        raise ShapeError(
            f"conv: the {outputs} outputs of weight {w.shape} do not divide into {moves.groups} groups; change one"
        )
    positions = fitted("conv", moves.over(x.shape[-sizes:], w.shape[-sizes:]))
    return x.with_shape((*_lead("conv", x, w, own), x.shape[-own], outputs, *positions))


def _infer_in_x(g: ShapedArray, w: ShapedArray, *, moves: Moves, size: Shape) -> ShapedArray:
    own = len(size) + 2
    aval = g.with_shape((g.shape[-own], w.shape[1 - own] * moves.groups, *size))
    _check("conv_in_x", _infer_conv(aval, w.with_shape(w.shape[-own:]), moves=moves), g)
    return g.with_shape((*_lead("conv_in_x", g, w, own), *aval.shape))


def _infer_in_w(x: ShapedArray, g: ShapedArray, *, moves: Moves, kernel: Shape) -> ShapedArray:
    own = len(kernel) + 2
    aval = x.with_shape((g.shape[1 - own], x.shape[1 - own] // moves.groups, *kernel))
    _check("conv_in_w", _infer_conv(x.with_shape(x.shape[-own:]), aval, moves=moves), g)
    return x.with_shape((*_lead("conv_in_w", x, g, own), *aval.shape))


def _check(op: str, wanted: ShapedArray, g: ShapedArray) -> None:
    if g.shape[-wanted.ndim :] != wanted.shape:
        raise ShapeError(f"{op}: the cotangent has shape {g.shape}, but the convolution's result {wanted.shape}")


_ROUNDING = 4
"""Copies of an operand that rounding it to 10 bits of fraction takes on a CPU, at most."""


class _Kind:
    """One of the three on each device.

    :mod:`conv_onednn`, :mod:`conv_cpu` and :mod:`_cuda_conv` have a function of its ``name``.
    """

    def __init__(self, name: str) -> None:
        self.name, self.lead = name, getattr(conv_lead, name)

    def on_cpu(self, xp: Namespace, x: Array, y: Array, out: Array, moves: Moves) -> None:
        x, y = (blas.in_tf32(a) if moves.tf32 else a for a in (x, y))
        self.lead(self._body, xp, x, y, out, moves).run()

    def _body(self, x: Array, y: Array, out: Array, moves: Moves) -> Prepared:
        """On a CPU: by oneDNN, where it is installed and has something for the operands; else by products."""
        first: Prepared | None = getattr(conv_onednn, self.name)(x, y, out, moves)
        return first or getattr(conv_cpu, self.name)(x, y, out, moves)

    def on_cuda(self, device: Device, x: Array, y: Array, *, out: Array, moves: Moves, **sizes: Shape) -> None:
        """By cuDNN, where it is installed and has something for the operands; else by kernels of ours, or cuBLAS."""
        done(device, self._prepared(device, x, y, out, moves))

    def scratch(self, aval: ShapedArray, x: Array, y: Array, *, moves: Moves, **sizes: Shape) -> int:
        """The bytes that it takes for itself."""
        out = Unmade(aval.shape, aval.dtype)
        if aval.device.lazy:
            return self._prepared(aval.device, x, y, out, moves).nbytes
        prepared: Prepared = self.lead(self._body, aval.device.xp, x, y, out, moves)
        return prepared.nbytes + (_ROUNDING * max(x.nbytes, y.nbytes) + x.nbytes + y.nbytes if moves.tf32 else 0)

    def _prepared(self, device: Device, x: Array, y: Array, out: Any, moves: Moves) -> Prepared:
        body = partial(getattr(_cuda_conv, self.name), device)
        prepared: Prepared = self.lead(body, device.xp, x, y, out, moves)
        return prepared


def done(device: Device, prepared: Prepared) -> None:
    """Compute it, unless the device is that of a dry run, and tell of its passes."""
    if device.xp is not None:
        prepared.run()
    if prepared.parts:
        passed(prepared.parts, prepared.parts)


FORWARD, _IN_IMAGE, _IN_KERNEL = _Kind("forward"), _Kind("in_image"), _Kind("in_kernel")


def _run_conv(xp: Namespace, x: Array, w: Array, *, out: Array, moves: Moves) -> None:
    FORWARD.on_cpu(xp, x, w, out, moves)


def _run_in_x(xp: Namespace, g: Array, w: Array, *, out: Array, moves: Moves, size: Shape) -> None:
    _IN_IMAGE.on_cpu(xp, g, w, out, moves)


def _run_in_w(xp: Namespace, x: Array, g: Array, *, out: Array, moves: Moves, kernel: Shape) -> None:
    _IN_KERNEL.on_cpu(xp, x, g, out, moves)


def _flops(x: Shape, w: Shape, positions: Shape, weight: Shape) -> int:
    """``x`` and ``w``: shapes of the operands; ``weight``: that of the kernel, axes in front aside."""
    own = len(positions) + 2
    images = x[-own] * prod(broadcast_shapes("conv", x[: len(x) - own], w[: len(w) - own]))
    return 2 * images * prod(positions) * prod(weight)


def flops(x: ShapedArray, w: ShapedArray, *, moves: Moves) -> int:
    """Arithmetic of a convolution."""
    positions = moves.over(_sizes(x, moves), _sizes(w, moves)).positions
    return _flops(x.shape, w.shape, positions, w.shape[-len(moves.strides) - 2 :])


def _sizes(x: ShapedArray, moves: Moves) -> Shape:
    """The spatial sizes: of an image, a kernel or a result."""
    return x.shape[-len(moves.strides) :]


def of(x: Tensor, w: Tensor, moves: Moves) -> Tensor:
    """The convolution."""
    return barrier(conv_p, x, w, moves=moves)


def in_x(g: Tensor, w: Tensor, moves: Moves, size: Shape) -> Tensor:
    """The cotangent of its image, of spatial shape ``size``."""
    return barrier(conv_in_x_p, g, w, moves=moves, size=size)


def in_w(x: Tensor, g: Tensor, moves: Moves, kernel: Shape) -> Tensor:
    """The cotangent of its kernel, of spatial shape ``kernel``."""
    return barrier(conv_in_w_p, x, g, moves=moves, kernel=kernel)


_PLAIN = Moves((1, 1), ((0, 0), (0, 0)), (1, 1), 1)
_MIXED = Moves((2, 1), ((1, 2), (0, 1)), (1, 2), 2)
_SPARSE = Moves((3,), ((0, 0),), (1,), 1)  # every third element is in no window
_SOLID = Moves((1, 2, 1), ((1, 0), (0, 1), (0, 0)), (1, 1, 1), 1)

conv_p: Primitive = bilinear(
    "conv",
    impl=_run_conv,
    cuda=FORWARD.on_cuda,
    scratch=FORWARD.scratch,
    infer=_infer_conv,
    transposes=[
        lambda ct, w, x_aval, *, moves: in_x(ct, w, moves, _sizes(x_aval, moves)),
        lambda ct, x, w_aval, *, moves: in_w(x, ct, moves, _sizes(w_aval, moves)),
    ],
    into=True,
    flops=flops,
    lift=same_params,
    samples=[
        Sample((2, 3, 5, 4), (2, 3, 3, 2), moves=_PLAIN), Sample((2, 4, 5, 5), (2, 2, 3, 2), moves=_MIXED),
        Sample((2, 2, 8), (3, 2, 2), moves=_SPARSE), Sample((2, 3, 2, 2), (4, 3, 1, 1), moves=_PLAIN),
        Sample((3, 2, 4, 5, 5), (2, 2, 3, 2), moves=_MIXED), Sample((2, 4, 5, 5), (3, 2, 2, 3, 2), moves=_MIXED),
        Sample((3, 1, 2, 8), (3, 3, 2, 2), moves=_SPARSE), Sample((2, 1, 2, 8), (3, 1, 2, 2, 2), moves=_SPARSE),
        Sample((1, 1, 2, 3, 3), (2, 1, 2, 2, 2), moves=_SOLID), Sample((0, 3, 4, 4), (2, 3, 3, 3), moves=_PLAIN),
        Bad((2, 3, 5, 4), (2, 2, 3, 2), error=ShapeError, moves=_PLAIN),
        Bad((2, 4, 5, 5), (3, 2, 3, 2), error=ShapeError, moves=_MIXED),
        Bad((2, 3, 2, 4), (2, 3, 3, 2), error=ShapeError, moves=_PLAIN),
        Bad((2, 3, 5), (2, 3, 3, 2), error=ShapeError, moves=_PLAIN),
        Bad((2, 3, 5, 4), (2, 3, 0, 2), error=ShapeError, moves=_PLAIN),
    ],
    doc="Products of a kernel with the windows of an image, summed over channels.",
)  # fmt: skip

conv_in_x_p: Primitive = bilinear(
    "conv_in_x",
    impl=_run_in_x,
    cuda=_IN_IMAGE.on_cuda,
    scratch=_IN_IMAGE.scratch,
    infer=_infer_in_x,
    transposes=[
        lambda ct, w, *, moves, size: of(ct, w, moves),
        lambda ct, g, w_aval, *, moves, size: in_w(ct, g, moves, _sizes(w_aval, moves)),
    ],
    into=True,
    flops=lambda g, w, *, moves, size: _flops(g.shape, w.shape, _sizes(g, moves), w.shape[-len(size) - 2 :]),
    lift=same_params,
    samples=[
        Sample((2, 2, 3, 3), (2, 3, 3, 2), moves=_PLAIN, size=(5, 4)),
        Sample((2, 2, 3, 4), (2, 2, 3, 2), moves=_MIXED, size=(5, 5)),
        Sample((2, 3, 3), (3, 2, 2), moves=_SPARSE, size=(9,)),
        Sample((3, 1, 2, 3, 4), (2, 2, 3, 2), moves=_MIXED, size=(5, 5)),
        Sample((2, 2, 3, 4), (3, 2, 2, 3, 2), moves=_MIXED, size=(5, 5)),
        Sample((3, 2, 2, 3, 4), (3, 2, 2, 3, 2), moves=_MIXED, size=(5, 5)),
        Sample((2, 0, 3, 3), (0, 3, 3, 2), moves=_PLAIN, size=(5, 4)),
        Bad((2, 2, 3, 3), (2, 3, 3, 2), error=ShapeError, moves=_PLAIN, size=(5, 5)),
    ],
    doc="The cotangent of a convolution's image from the result's ``g``; by itself the transposed convolution.",
)

conv_in_w_p: Primitive = bilinear(
    "conv_in_w",
    impl=_run_in_w,
    cuda=_IN_KERNEL.on_cuda,
    scratch=_IN_KERNEL.scratch,
    infer=_infer_in_w,
    transposes=[
        lambda ct, g, x_aval, *, moves, kernel: in_x(g, ct, moves, _sizes(x_aval, moves)),
        lambda ct, x, *, moves, kernel: of(x, ct, moves),
    ],
    into=True,
    flops=lambda x, g, *, moves, kernel: _flops(
        x.shape,
        g.shape,
        _sizes(g, moves),
        (g.shape[-len(kernel) - 1], x.shape[-len(kernel) - 1] // moves.groups, *kernel),
    ),
    lift=same_params,
    samples=[
        Sample((2, 3, 5, 4), (2, 2, 3, 3), moves=_PLAIN, kernel=(3, 2)),
        Sample((2, 4, 5, 5), (2, 2, 3, 4), moves=_MIXED, kernel=(3, 2)),
        Sample((2, 2, 8), (2, 3, 3), moves=_SPARSE, kernel=(2,)),
        Sample((3, 2, 4, 5, 5), (2, 2, 3, 4), moves=_MIXED, kernel=(3, 2)),
        Sample((2, 4, 5, 5), (3, 2, 2, 3, 4), moves=_MIXED, kernel=(3, 2)),
        Sample((3, 2, 4, 5, 5), (3, 2, 2, 3, 4), moves=_MIXED, kernel=(3, 2)),
        Sample((0, 3, 4, 4), (0, 2, 2, 2), moves=_PLAIN, kernel=(3, 3)),
        Bad((2, 3, 5, 4), (2, 2, 3, 3), error=ShapeError, moves=_PLAIN, kernel=(3, 3)),
    ],
    doc="The cotangent of a convolution's kernel from the result's ``g``.",
)


def conv(x: TensorLike, w: TensorLike, /, *, moves: Moves) -> Tensor:
    """The sum over channels and taps of ``x`` at strided, dilated places times ``w``.

    x: ``(n, channels, *size)``; w: ``(outputs, channels / groups, *kernel)``; result: ``(n, outputs, *positions)``.
    Raises ShapeError.
    """
    x, w = promote("conv", (x, w), whole_in_float64)
    return of(x, w, as_chosen(moves, x))


def conv_transpose(x: TensorLike, w: TensorLike, /, *, moves: Moves, size: Shape) -> Tensor:
    """The transpose of :func:`conv` in its image of spatial shape ``size``.

    x: ``(n, outputs, *positions)``; w: ``(outputs, channels / groups, *kernel)``; result: ``(n, channels, *size)``.
    Raises ShapeError.
    """
    g, w = promote("conv_in_x", (x, w), whole_in_float64)
    return in_x(g, w, as_chosen(moves, g), size)


def as_chosen(moves: Moves, x: Tensor) -> Moves:
    """``moves`` with the precision that is in force for products."""
    return moves._replace(tf32=rounds_products(x.dtype))
