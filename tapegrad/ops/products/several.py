"""Products and arrangements of several arrays: Kronecker, cross, blocks, combinations, distances."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any

from tapegrad import nest
from tapegrad.core.aval import broadcast_shapes, normalize_axis
from tapegrad.core.state import unrecorded
from tapegrad.device import CPU, dtypes
from tapegrad.errors import AxisError, ShapeError
from tapegrad.ops.create.creation import asarray
from tapegrad.ops.dispatch import cast, in_float32, of_floats, own, promote, tensor, whole_in_float64
from tapegrad.ops.elementwise.arithmetic import abs, multiply, sqrt, square
from tapegrad.ops.elementwise.comparison import equal, not_equal
from tapegrad.ops.elementwise.complex import imag, real
from tapegrad.ops.elementwise.exponential import power
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.indexing import take
from tapegrad.ops.reduce.reductions import Axis, max, sum
from tapegrad.ops.shape.arrange import meshgrid
from tapegrad.ops.shape.join import concat, stack
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, moveaxis, reshape, shape_of
from tapegrad.ops.shape.shape import sum_to as summed_to
from tapegrad.tensor import Tensor, TensorLike, identity_of

__all__ = [
    "as_strided", "batch_l2_norm_squared", "block", "cartesian_prod", "cdist", "combinations", "cross", "dist", "kron",
    "renorm", "rollaxis", "sum_to", "unfold",
]  # fmt: skip


def kron(a: TensorLike, b: TensorLike) -> Tensor:
    """The Kronecker product: blocks of ``b``, each times an element of ``a``; the lower rank gets axes in front."""
    x, y = promote("kron", (a, b))
    n = x.ndim if x.ndim > y.ndim else y.ndim
    p, q = ((1,) * (n - t.ndim) + t.shape for t in (x, y))
    x = reshape(x, tuple(m for k in p for m in (k, 1)))
    y = reshape(y, tuple(m for k in q for m in (1, k)))
    return reshape(multiply(x, y), tuple(i * j for i, j in zip(p, q, strict=True)))


@in_float32
def cross(
    a: TensorLike, b: TensorLike, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None
) -> Tensor:
    """The cross product of vectors along ``axisa`` and ``axisb``, put along ``axisc``; the other dimensions broadcast.

    axis: all three.  Vectors of length 2 lie in a plane: two of them give one number.  Raises ShapeError, AxisError.
    """
    if axis is not None:
        axisa = axisb = axisc = axis
    x, y = promote("cross", (a, b))
    x = moveaxis(x, normalize_axis("cross", axisa, x.ndim), -1)
    y = moveaxis(y, normalize_axis("cross", axisb, y.ndim), -1)
    if x.shape[-1] not in (2, 3) or y.shape[-1] not in (2, 3):
        raise ShapeError(f"cross: vectors of length {x.shape[-1]} and {y.shape[-1]}; need 3 (or 2)")
    lead = broadcast_shapes("cross", x.shape[:-1], y.shape[:-1])
    u, v = ([t[..., k] for k in range(t.shape[-1])] for t in (x, y))
    last = broadcast_to(u[0] * v[1] - u[1] * v[0], lead)
    if len(u) == len(v) == 2:
        return last
    if len(u) == 3 and len(v) == 3:
        first, second = u[1] * v[2] - u[2] * v[1], u[2] * v[0] - u[0] * v[2]
    elif len(u) == 2:
        first, second = u[1] * v[2], -(u[0] * v[2])
    else:
        first, second = -(u[2] * v[1]), u[2] * v[0]
    product = stack([broadcast_to(first, lead), broadcast_to(second, lead), last], axis=-1)
    return moveaxis(product, -1, normalize_axis("cross", axisc, product.ndim))


def block(arrays: object) -> Tensor:
    """An array put together from nested lists of blocks: the innermost along the last axis, then the one before.

    Raises ShapeError for lists of unequal depth, or empty ones.
    """
    levels = _depth(arrays)
    leaves = _tensors(arrays)
    ndim = sorted([levels, *(t.ndim for t in nest.leaves(leaves))])[-1]
    return _joined(leaves, ndim - levels, ndim)


def _depth(part: object) -> int:
    if not isinstance(part, list):
        return 0
    if not part:
        raise ShapeError("block: a list is empty")
    depths = {_depth(p) for p in part}
    if len(depths) > 1:
        raise ShapeError("block: lists are nested to different depths")
    return depths.pop() + 1


def _tensors(part: Any) -> Any:
    return [_tensors(p) for p in part] if isinstance(part, list) else tensor("block", part)


def _joined(part: Any, axis: int, ndim: int) -> Tensor:
    if not isinstance(part, list):
        return reshape(part, (1,) * (ndim - part.ndim) + part.shape)
    return concat([_joined(p, axis + 1, ndim) for p in part], axis=axis)


def cartesian_prod(*tensors: TensorLike) -> Tensor:
    """All choices of one element from each vector, a row for each (PyTorch's).  Raises ShapeError."""
    lines = promote("cartesian_prod", tensors)
    if any(t.ndim != 1 for t in lines):
        raise ShapeError(f"cartesian_prod: needs vectors, got shapes {[t.shape for t in lines]}")
    if len(lines) == 1:
        return identity_of(lines[0])
    rows = prod(t.size for t in lines)
    return reshape(stack(meshgrid(*lines, indexing="ij"), axis=-1), (rows, len(lines)))


def combinations(input: TensorLike, r: int = 2, with_replacement: bool = False) -> Tensor:
    """All choices of ``r`` elements of a vector, in order, a row for each (PyTorch's ``combinations``).

    Raises ShapeError.
    """
    x = tensor("combinations", input)
    if x.ndim != 1 or r < 0:
        raise ShapeError(f"combinations: needs a vector and r >= 0, got shape {x.shape}, r={r}")
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    rows = list(choose(range(x.size), r))
    places = asarray(CPU.xp.asarray(rows, dtype="int64").reshape(len(rows), r), device=x.device)
    return take(x, places, axis=0)


def rollaxis(a: TensorLike, axis: int, start: int = 0) -> Tensor:
    """Dimension ``axis`` moved to stand before ``start`` (NumPy's old name for ``moveaxis``).  Raises AxisError."""
    x = tensor("rollaxis", a)
    source = normalize_axis("rollaxis", axis, x.ndim)
    target = start + x.ndim if start < 0 else start
    if not 0 <= target <= x.ndim:
        raise AxisError(f"rollaxis: start {start} is out of range for an array of {x.ndim} dimensions")
    return moveaxis(x, source, target - 1 if source < target else target)


def as_strided(x: TensorLike, shape: Sequence[int], strides: Sequence[int], storage_offset: int = 0) -> Tensor:
    """Elements of ``x``, in C order, at steps of ``strides`` elements along each dimension of ``shape``.

    A copy (PyTorch's ``as_strided`` counts elements, too; NumPy's counts bytes): the gradient of an element read
    several times accumulates.  Raises ShapeError, IndexingError beyond the last element.
    """
    t = tensor("as_strided", x)
    lengths = shape_of(shape)
    if len(lengths) != len(strides):
        raise ShapeError(f"as_strided: shape {lengths} and strides {tuple(strides)} differ in length")
    xp = CPU.xp
    places = xp.full(lengths, index(storage_offset))
    for k, (n, step) in enumerate(zip(lengths, strides, strict=True)):
        places = places + xp.arange(n).reshape((n,) + (1,) * (len(lengths) - 1 - k)) * step
    return take(reshape(t, (t.size,)), asarray(places, device=t.device), axis=0)


def unfold(input: TensorLike, dimension: int, size: int, step: int = 1) -> Tensor:
    """Windows of ``size`` elements along ``dimension``, every ``step``; their elements are a new last axis (PyTorch's).

    The gradient of an element in several windows accumulates.  Raises AxisError, ShapeError.
    """
    x = tensor("unfold", input)
    a = normalize_axis("unfold", dimension, x.ndim)
    n, size, step = x.shape[a], index(size), index(step)
    if not 0 <= size <= n or step < 1:
        raise ShapeError(f"unfold: windows of {size} every {step} along axis {a} of {x.shape}")
    xp = CPU.xp
    places = xp.arange(0, n - size + 1, step)[:, None] + xp.arange(size)
    return moveaxis(take(x, asarray(places, device=x.device), axis=a), a + 1, -1)


def sum_to(x: TensorLike, shape: Sequence[int]) -> Tensor:
    """Return the sum of ``x`` over what broadcasting to it from ``shape`` would repeat, in the dtype of :func:`sum`.

    Raises ShapeError.
    """
    t = tensor("sum_to", x)
    if broadcast_shapes("sum_to", t.shape, tuple(shape)) != t.shape:
        raise ShapeError(f"sum_to: {tuple(shape)} does not broadcast to {t.shape}")
    return own(summed_to(cast(t, dtypes.sum_dtype(t.dtype)), tuple(shape)), t)


@of_floats()
def batch_l2_norm_squared(x: TensorLike) -> Tensor:
    """For each slice along the first axis the sum of the squares of its elements (Chainer's).  Raises ShapeError."""
    t = tensor("batch_l2_norm_squared", x)
    if not t.ndim:
        raise ShapeError("batch_l2_norm_squared: needs one dimension or more, got a scalar")
    return sum(square(t), axis=tuple(range(1, t.ndim)))


def _norm(gap: Tensor, p: float, axis: Axis, keepdims: bool = False) -> Tensor:
    """The p-norm over ``axis``; its gradient is 0 where the norm is."""
    if p == float("inf"):
        size = abs(gap)
        return max(size, axis=axis, keepdims=keepdims) if gap.size else sum(size, axis=axis, keepdims=keepdims)
    if p == 0:
        differs = not_equal(gap, 0)
        gap = abs(gap)
        return sum(cast(differs, gap.dtype) + gap * 0, axis=axis, keepdims=keepdims)
    if p == 1:
        return sum(abs(gap), axis=axis, keepdims=keepdims)
    if gap.dtype.kind == "c" and p == 2:
        size = square(real(gap)) + square(imag(gap))
    else:
        size = square(gap) if p == 2 else abs(gap)
    nothing = unrecorded(equal, gap, 0)
    powers = size if p == 2 else where(nothing, 0, power(where(nothing, 1, size), p))
    total = sum(powers, axis=axis, keepdims=keepdims)
    zero = unrecorded(equal, total, 0)
    safe = where(zero, 1, total)
    return where(zero, 0, sqrt(safe) if p == 2 else power(safe, 1.0 / p))


@in_float32
def cdist(x1: TensorLike, x2: TensorLike, p: float = 2.0) -> Tensor:
    """The distances in p-norm of every row of ``x1`` from every row of ``x2`` (PyTorch's ``cdist``).

    x1: ``(..., m, k)``, x2: ``(..., n, k)``, the result ``(..., m, n)``; leading dimensions broadcast.  The gradient
    is 0 where a distance is.  Raises ShapeError.
    """
    x, y = promote("cdist", (x1, x2), whole_in_float64)
    if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-1] or p < 0:
        raise ShapeError(f"cdist: rows of {x.shape} and {y.shape} in {p}-norm; need as many columns, and p >= 0")
    return _norm(expand_dims(x, -2) - expand_dims(y, -3), p, -1)


@in_float32
def dist(input: TensorLike, other: TensorLike, p: float = 2) -> Tensor:
    """The p-norm of ``input - other``, a number (PyTorch's ``dist``); its gradient is 0 where it is.

    Raises ShapeError.
    """
    x, y = promote("dist", (input, other), whole_in_float64)
    return _norm(x - y, p, None)


def renorm(input: TensorLike, p: float, dim: int, maxnorm: float) -> Tensor:
    """Slices along ``dim`` with a p-norm above ``maxnorm`` scaled down to it (PyTorch's ``renorm``).

    The scale is ``maxnorm / (norm + 1e-7)``.  Raises AxisError.
    """
    x = tensor("renorm", input)
    a = normalize_axis("renorm", dim, x.ndim)
    norms = _norm(x, p, tuple(i for i in range(x.ndim) if i != a), keepdims=True)
    return x * where(norms > maxnorm, maxnorm / (norms + 1e-7), 1)
