"""Products of matrices and tensors.  Everything but ``matmul`` is a plain function; see also ``ops.einsum``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from numbers import Integral
from typing import Any

from tapegrad.core.aval import ShapedArray, broadcast_shapes, normalize_axes, normalize_axis, shaped
from tapegrad.core.primitive import Bad, Primitive, Sample, bilinear
from tapegrad.device import Device, gemm
from tapegrad.device.dtypes import accumulator
from tapegrad.device.numerics import blas
from tapegrad.device.types import Array, Params
from tapegrad.errors import ShapeError
from tapegrad.ops._batched import Companions, widened
from tapegrad.ops.apply import remembered, same_params
from tapegrad.ops.casting import rounds_products
from tapegrad.ops.dispatch import barrier, cast, promote
from tapegrad.ops.elementwise.complex import conj
from tapegrad.ops.reduce.reductions import sum
from tapegrad.ops.shape.shape import expand_dims, moveaxis, permute_dims, reshape, squeeze
from tapegrad.tensor import Tensor, TensorLike


@remembered
def _infer_matmul(x: ShapedArray, y: ShapedArray) -> ShapedArray:
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-2]:
        raise ShapeError(f"matmul: inner sizes differ: {x.shape} @ {y.shape}")
    batch = broadcast_shapes("matmul", x.shape[:-2], y.shape[:-2]) if x.ndim > 2 or y.ndim > 2 else ()
    return shaped((*batch, x.shape[-2], y.shape[-1]), x.dtype, x.device)


def _declared(name: str, tf32: bool, samples: Sequence[Sample]) -> Primitive:
    """A product of matrices, and its derivatives of the same kind; ``tf32``: float32 operands are rounded."""

    def batched(operands: list[Tensor], companions: Companions, n: int, params: Params) -> Tensor:
        """Leading axes are broadcast, so one matrix for all examples is not repeated."""
        ndim = max(x.ndim for x in operands)
        pairs = zip(operands, companions, strict=True)
        return barrier(prim, *(x if c is None else widened(x, c, ndim) for x, c in pairs))

    def on_cuda(device: Device, x: Array, y: Array, *, out: Array, temporaries: Sequence[Array] = ()) -> None:
        gemm.matmul(device.xp, x, y, out, temporaries, tf32)

    prim = bilinear(
        name,
        impl=lambda xp, x, y, *, out: blas.matmul(xp, x, y, out, tf32),
        infer=_infer_matmul,
        transposes=[
            lambda ct, y: _product(prim, ct, y.mT),  # (m,n) (k,n)' -> (m,k)
            lambda ct, x: _product(prim, x.mT, ct),  # (m,k)' (m,n) -> (k,n)
        ],
        into=True,
        bound=lambda x, y, *, out: blas.bound(x, y, out, tf32),
        cuda=on_cuda,
        temporaries=gemm.temporaries,
        flops=_flops,
        lift=same_params,
        batch=batched,
        samples=samples,
    )
    return prim


def _flops(x: ShapedArray, y: ShapedArray) -> int:
    return 2 * prod(broadcast_shapes("matmul", x.shape[:-1], (*y.shape[:-2], 1))) * prod(y.shape[-2:])


matmul_p = _declared(
    "matmul",
    False,
    [
        Sample((3, 4), (4, 2)), Sample((5, 3, 4), (4, 2)), Sample((2, 1, 3, 4), (5, 4, 2)), Sample((0, 4), (4, 2)),
        Sample((3, 0), (0, 2)), Bad((3, 4), (3, 2), error=ShapeError), Bad((2, 3, 4), (3, 4, 2), error=ShapeError),
    ],
)  # fmt: skip
matmul_tf32_p = _declared("matmul_tf32", True, [Sample([[1.0, 2.5], [-3.0, 0.5]], [[0.25, 4.0], [1.5, -2.0]])])


def matmul(x1: TensorLike, x2: TensorLike) -> Tensor:
    """The matrix product; leading dimensions broadcast, a 1-d operand is a row (left) or a column (right).

    x1: ``(..., m, k)`` or ``(k,)``; x2: ``(..., k, n)`` or ``(k,)``.  Raises ShapeError.
    """
    x, y = promote("matmul", (x1, x2))
    return _product(matmul_tf32_p if rounds_products(x.dtype) else matmul_p, x, y)


def _product(prim: Primitive, x: Tensor, y: Tensor) -> Tensor:
    left, right = x._buffer.node.aval.shape, y._buffer.node.aval.shape
    if not left or not right:
        raise ShapeError(f"matmul: operands of shape {left} and {right}; multiply scalars with *")
    if left[-1] != right[-2 if len(right) > 1 else 0]:
        raise ShapeError(f"matmul: inner sizes differ: {left} @ {right}")
    if len(left) == 1:
        return squeeze(_product(prim, expand_dims(x, 0), y), -2 if len(right) > 1 else 0)
    if len(right) == 1:
        return squeeze(_product(prim, x, expand_dims(y, 1)), -1)
    if len(left) > 2 and len(right) == 2:  # one product of tall matrices, and no batch of gradients to sum
        flat = barrier(prim, reshape(x, (prod(left[:-1]), left[-1])), y)
        return reshape(flat, (*left[:-1], right[-1]))
    return barrier(prim, x, y)


def tensordot(a: TensorLike, b: TensorLike, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Tensor:
    """The sum of products over ``axes``: the last so many of ``a`` with the first of ``b``, or a list for each.

    The result has the other axes of ``a``, then those of ``b``.  Raises ShapeError and AxisError.
    """
    x, y = promote("tensordot", (a, b))
    left, right = _paired_axes(x, y, axes)
    for i, j in zip(left, right, strict=True):
        if x.shape[i] != y.shape[j]:
            raise ShapeError(f"tensordot: axis {i} of {x.shape} and axis {j} of {y.shape} differ in length")
    rows = [i for i in range(x.ndim) if i not in left]
    columns = [j for j in range(y.ndim) if j not in right]
    shape = (*(x.shape[i] for i in rows), *(y.shape[j] for j in columns))
    inner = prod(x.shape[i] for i in left)
    flat_x = reshape(permute_dims(x, (*rows, *left)), (prod(x.shape[i] for i in rows), inner))
    flat_y = reshape(permute_dims(y, (*right, *columns)), (inner, prod(y.shape[j] for j in columns)))
    return reshape(matmul(flat_x, flat_y), shape)


def _paired_axes(x: Tensor, y: Tensor, axes: Any) -> tuple[list[int], list[int]]:
    if isinstance(axes, (int, Integral)):
        axes = int(axes)
        if not 0 <= axes <= min(x.ndim, y.ndim):
            raise ShapeError(f"tensordot: cannot pair {axes} axes of {x.shape} and {y.shape}")
        return list(range(x.ndim - axes, x.ndim)), list(range(axes))
    both = [a if isinstance(a, (tuple, list)) else (a,) for a in axes]
    if len(both) != 2 or len(both[0]) != len(both[1]):
        raise ShapeError(f"tensordot: axes must be a number or two lists of one length, got {axes!r}")
    for t, named in zip((x, y), both, strict=True):
        normalize_axes("tensordot", tuple(named), t.ndim)  # no axis twice
    left, right = ([normalize_axis("tensordot", a, t.ndim) for a in named] for t, named in zip((x, y), both))
    return left, right


def vecdot(x1: TensorLike, x2: TensorLike, *, axis: int = -1) -> Tensor:
    """The sum of ``conj(x1) * x2`` along ``axis`` (negative, counted in both); the other dimensions broadcast.

    Products and sum of half types are in float32, rounded once.  Raises ShapeError and AxisError.
    """
    x, y = promote("vecdot", (x1, x2))
    a, b = normalize_axis("vecdot", axis, x.ndim), normalize_axis("vecdot", axis, y.ndim)
    if x.shape[a] != y.shape[b]:
        raise ShapeError(f"vecdot: axis {axis} has length {x.shape[a]} in {x.shape} and {y.shape[b]} in {y.shape}")
    dtype, wide = x.dtype, accumulator(x.dtype)
    x, y = cast(moveaxis(x, a, -1), wide), cast(moveaxis(y, b, -1), wide)
    return cast(sum(conj(x) * y, axis=-1, dtype=wide), dtype)


def matvec(x1: TensorLike, x2: TensorLike) -> Tensor:
    """The product of matrices ``(..., m, n)`` with vectors ``(..., n)``; leading dimensions broadcast.

    Raises ShapeError.
    """
    x, y = promote("matvec", (x1, x2))
    if x.ndim < 2 or not y.ndim or x.shape[-1] != y.shape[-1]:
        raise ShapeError(f"matvec: a matrix of shape {x.shape} does not fit a vector of shape {y.shape}")
    return squeeze(matmul(x, expand_dims(y, -1)), -1)


def vecmat(x1: TensorLike, x2: TensorLike) -> Tensor:
    """The conjugates of vectors ``(..., n)`` times matrices ``(..., n, m)``; leading dimensions broadcast.

    Raises ShapeError.
    """
    x, y = promote("vecmat", (x1, x2))
    if y.ndim < 2 or not x.ndim or x.shape[-1] != y.shape[-2]:
        raise ShapeError(f"vecmat: a vector of shape {x.shape} does not fit a matrix of shape {y.shape}")
    return squeeze(matmul(expand_dims(conj(x), -2), y), -2)


def outer(a: TensorLike, b: TensorLike) -> Tensor:
    """The product of every element of ``a`` with every one of ``b``, shape ``(a.size, b.size)``."""
    x, y = promote("outer", (a, b))
    return reshape(x, (x.size, 1)) * reshape(y, (y.size,))


def inner(x1: TensorLike, x2: TensorLike) -> Tensor:
    """The sum of products over the last axes of both (NumPy's ``inner``).  Raises ShapeError."""
    x, y = promote("inner", (x1, x2))
    if not x.ndim or not y.ndim:
        return x * y
    if x.shape[-1] != y.shape[-1]:
        raise ShapeError(f"inner: last axes differ in length: {x.shape} and {y.shape}")
    return tensordot(x, y, axes=([-1], [-1]))


def dot(a: TensorLike, b: TensorLike) -> Tensor:
    """The sum of products over the last axis of ``a`` and the last but one (or only) of ``b`` (NumPy's ``dot``).

    Raises ShapeError.
    """
    x, y = promote("dot", (a, b))
    if not x.ndim or not y.ndim:
        return x * y
    axis = max(y.ndim - 2, 0)
    if x.shape[-1] != y.shape[axis]:
        raise ShapeError(f"dot: inner sizes differ: {x.shape} and {y.shape}")
    return tensordot(x, y, axes=([-1], [axis]))


def vdot(x1: TensorLike, x2: TensorLike) -> Tensor:
    """The sum of ``conj(x1) * x2`` over all elements of two arrays of one size.  Raises ShapeError."""
    x, y = promote("vdot", (x1, x2))
    if x.size != y.size:
        raise ShapeError(f"vdot: sizes differ: {x.shape} and {y.shape}")
    return vecdot(reshape(x, (x.size,)), reshape(y, (y.size,)))
