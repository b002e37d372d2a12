"""A convolution with what follows it in most networks: a bias for each output, and ``max(y, 0)``.

On CUDA the kernel that multiplies writes the result once, where otherwise the product is written, read, and written
again.  Bits are those of the three operations one after the other.  On a CPU, whose threads share the region that
follows, they stay apart.  Only a layer knows beforehand what follows, since a convolution runs when it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from tapegrad.core.aval import ShapedArray
from tapegrad.core.primitive import Bad, Primitive, Sample, general
from tapegrad.device.dtypes import is_inexact
from tapegrad.device.numerics.windows import Moves
from tapegrad.device.types import Array, Namespace, Params
from tapegrad.errors import ShapeError
from tapegrad.ops._batched import Companions, for_all
from tapegrad.ops.dispatch import barrier
from tapegrad.ops.elementwise.activation import relu
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.products import _cuda_conv, convolution
from tapegrad.ops.reduce.reductions import sum
from tapegrad.ops.shape.shape import broadcast_to, reshape
from tapegrad.tensor import Tensor

if TYPE_CHECKING:
    from tapegrad.device.cuda import CudaDevice


def _inferred(name: str) -> Callable[..., ShapedArray]:
    def infer(x: ShapedArray, w: ShapedArray, b: ShapedArray, *, moves: Moves) -> ShapedArray:
        axes = len(moves.strides) + 2
        if not x.ndim == w.ndim == axes or b.shape != w.shape[:1]:
            raise ShapeError(
                f"{name}: wanted input (n, channels, sizes), weight (outputs, channels / groups, sizes) and bias "
                f"(outputs,), got {x.shape}, {w.shape} and {b.shape}"
            )
        return convolution.conv_p.infer(x, w, moves=moves)

    return infer


def _along(b: Any, ndim: int) -> tuple[int, ...]:
    """The shape in which a bias broadcasts to a result of ``ndim`` axes."""
    return (*b.shape, *(1,) * (ndim - 2))


def _cuda(clips: bool) -> Callable[..., None]:
    def run(device: CudaDevice, x: Array, w: Array, b: Array, *, out: Array, moves: Moves) -> None:
        convolution.done(device, _cuda_conv.forward(device, x, w, out, moves, b, clips))

    return run


def _scratch(aval: ShapedArray, x: Array, w: Array, b: Array, *, moves: Moves) -> int:
    return convolution.FORWARD.scratch(aval, x, w, moves=moves)


def _run(clips: bool) -> Callable[..., None]:
    def run(xp: Namespace, x: Array, w: Array, b: Array, *, out: Array, moves: Moves) -> None:
        convolution.FORWARD.on_cpu(xp, x, w, out, moves)
        xp.add(out, b.reshape(_along(b, out.ndim)), out=out)
        if clips:
            xp.maximum(out, 0, out=out)

    return run


def _batch(clips: bool) -> Callable[..., Tensor]:
    """One operation after the other: each can have an axis more in front."""

    def batch(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor:
        x, w, b = (for_all(x, c, n) for x, c in zip(operands, companions, strict=True))
        y = barrier(convolution.conv_p, x, w, **params)
        y = y + reshape(b, (n, 1, *_along(b[0], y.ndim - 1)))
        return relu(y) if clips else y

    return batch


def _sum(ct: Tensor) -> Tensor:
    """The cotangent of the bias."""
    return sum(ct, axis=(0, *range(2, ct.ndim)))


def _clipped(ct: Tensor, out: Tensor) -> Tensor:
    return where(out > 0, ct, 0)


def _pull_clipped(
    ct: Tensor, out: Tensor, x: Tensor, w: Tensor, wanted: tuple[int, ...], *, moves: Moves
) -> list[Tensor]:
    """The cotangents of the operands ``wanted``, all made of what of ``ct`` passes the ``max``."""
    g = _clipped(ct, out)
    pull = (
        lambda: convolution.in_x(g, w, moves, x.shape[2:]),
        lambda: convolution.in_w(x, g, moves, w.shape[2:]),
        lambda: _sum(g),
    )
    return [pull[i]() for i in wanted]


def _spread(t: Tensor, out_aval: ShapedArray) -> Tensor:
    """The tangent that one of the bias makes."""
    return broadcast_to(reshape(t, _along(t, out_aval.ndim)), out_aval.shape)


def _declared(name: str, clips: bool, doc: str, **rules: Any) -> Primitive:
    same = Moves((1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    mixed = Moves((2, 1), ((1, 2), (0, 1)), (1, 2), 2)
    line = Moves((3,), ((0, 0),), (1,), 1)
    return general(
        name,
        impl=_run(clips),
        cuda=_cuda(clips),
        infer=_inferred(name),
        into=True,
        scratch=_scratch,
        flops=lambda x, w, b, *, moves: convolution.flops(x, w, moves=moves),
        batch=_batch(clips),
        samples=[
            Sample((2, 3, 5, 4), (2, 3, 3, 3), (2,), moves=same), Sample((2, 4, 5, 5), (2, 2, 3, 2), (2,), moves=mixed),
            Sample((2, 2, 8), (3, 2, 2), (3,), moves=line), Sample((0, 3, 4, 4), (2, 3, 3, 3), (2,), moves=same),
            Sample((2, 0, 4, 4), (2, 0, 3, 3), (2,), moves=same),
            Bad((2, 3, 5, 4), (2, 3, 3, 3), (3,), error=ShapeError, moves=same),
            Bad((1, 2, 3, 5, 4), (2, 3, 3, 3), (2,), error=ShapeError, moves=same),
        ],
        doc=doc,
        **rules,
    )  # fmt: skip


conv_bias_p = _declared(
    "conv_bias",
    False,
    "A convolution, and a bias for each output.",
    vjp=[
        lambda ct, w, x_aval, *, moves: convolution.in_x(ct, w, moves, x_aval.shape[2:]),
        lambda ct, x, w_aval, *, moves: convolution.in_w(x, ct, moves, w_aval.shape[2:]),
        lambda ct, *, moves: _sum(ct),
    ],
    jvp=[
        lambda t, w, *, moves: convolution.of(t, w, moves),
        lambda t, x, *, moves: convolution.of(x, t, moves),
        lambda t, out_aval, *, moves: _spread(t, out_aval),
    ],
)

conv_bias_relu_p = _declared(
    "conv_bias_relu",
    True,
    "A convolution, a bias for each output, and ``max`` of that and 0; rules read the result, not the product.",
    vjp=_pull_clipped,
    jvp=[
        lambda t, out, w, *, moves: _clipped(convolution.of(t, w, moves), out),
        lambda t, out, x, *, moves: _clipped(convolution.of(x, t, moves), out),
        lambda t, out, out_aval, *, moves: _clipped(_spread(t, out_aval), out),
    ],
)


def is_one_kernel(x: Tensor, w: Tensor, b: Tensor, moves: Moves) -> bool:
    """Whether :func:`conv_bias` is worth it: on CUDA, real operands of one dtype, and no product of cuBLAS."""
    if not x.device.lazy or not x.dtype == w.dtype == b.dtype or x.dtype.kind == "c" or not is_inexact(x.dtype):
        return False
    return prod(w.shape[2:]) > 1 or moves.groups > 1


def conv_bias(x: Tensor, w: Tensor, b: Tensor, moves: Moves, clips: bool) -> Tensor:
    """``conv(x, w)``, to each output its number of ``b``, and with ``clips`` the ``max`` of that and 0.

    x: ``(n, channels, *size)``; w: ``(outputs, channels / groups, *kernel)``; b: ``(outputs,)``.  Raises ShapeError.
    """
    return barrier(conv_bias_relu_p if clips else conv_bias_p, x, w, b, moves=convolution.as_chosen(moves, x))
