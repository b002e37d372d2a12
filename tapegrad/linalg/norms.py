"""Norms and condition numbers: plain functions.  Where a norm is 0 its gradient is 0, one of its subgradients."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence

from tapegrad.core.aval import normalize_axis
from tapegrad.device import dtypes
from tapegrad.errors import LinAlgError, ShapeError
from tapegrad.linalg._common import floating, matrix
from tapegrad.linalg.singular import svdvals
from tapegrad.linalg.solving import inv
from tapegrad.ops.create.creation import full
from tapegrad.ops.dispatch import in_float32, promote
from tapegrad.ops.elementwise.arithmetic import abs, root_of_squares, sign, square
from tapegrad.ops.elementwise.comparison import equal, isnan, logical_and, logical_not
from tapegrad.ops.elementwise.complex import conj, real
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.reduce.reductions import any as any_of
from tapegrad.ops.reduce.reductions import max, min, sum
from tapegrad.ops.shape.join import stack
from tapegrad.ops.shape.shape import expand_dims, moveaxis, reshape
from tapegrad.tensor import Tensor, TensorLike

__all__ = ["cond", "matrix_norm", "norm", "vector_norm"]

Axis = int | Sequence[int] | None
Order = float | str | None


def _floats(op: str, x: TensorLike) -> Tensor:
    if isinstance(x, (list, tuple)) and builtins.any(isinstance(part, Tensor) for part in x):
        x = stack(x)
    return promote(op, (x,), to=floating)[0]


def _axes(op: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    wanted = range(ndim) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
    return tuple(normalize_axis(op, a, ndim) for a in wanted)


def _squares(x: Tensor) -> Tensor:
    return square(x) if x.dtype.kind != "c" else real(conj(x) * x)


def _power_norm(x: Tensor, p: float, axis: tuple[int, ...], keepdims: bool) -> Tensor:
    magnitude = abs(x)
    zero = equal(magnitude, 0)
    if p < 0:
        none = logical_not(any_of(zero, axis=axis, keepdims=keepdims))
        s = sum(where(zero, 1, magnitude) ** p, axis=axis, keepdims=keepdims)
        return where(none, s, 1) ** (1.0 / p) * none
    s = sum(where(zero, 0, where(zero, 1, magnitude) ** p), axis=axis, keepdims=keepdims)
    zero = equal(s, 0)
    return where(zero, 0, where(zero, 1, s) ** (1.0 / p))


def _count(x: Tensor, axis: tuple[int, ...], keepdims: bool) -> Tensor:
    """How many elements are not 0, as a number with gradient 0."""
    magnitude = abs(x)
    return sum(where(isnan(magnitude), 1, sign(magnitude)), axis=axis, keepdims=keepdims)


def _vector(op: str, x: Tensor, ord: Order, axis: tuple[int, ...], keepdims: bool) -> Tensor:
    if isinstance(ord, str):
        raise ShapeError(f"{op}: ord={ord!r} is a norm of matrices; give a number for vectors")
    if ord is None or ord == 2:
        return root_of_squares(sum(_squares(x), axis=axis, keepdims=keepdims))
    if ord == math.inf:
        return max(abs(x), axis=axis, keepdims=keepdims)
    if ord == -math.inf:
        return min(abs(x), axis=axis, keepdims=keepdims)
    if ord == 0:
        return _count(x, axis, keepdims)
    if ord == 1:
        return sum(abs(x), axis=axis, keepdims=keepdims)
    return _power_norm(x, ord, axis, keepdims)


def _matrix(op: str, x: Tensor, ord: Order) -> Tensor:
    """A norm of the last two dimensions."""
    if ord in (None, "fro", "f"):
        return root_of_squares(sum(_squares(x), axis=(-2, -1)))
    if ord == "nuc":
        return sum(svdvals(x), axis=-1)
    if ord in (2, -2):
        return max(svdvals(x), axis=-1) if ord > 0 else min(svdvals(x), axis=-1)
    if ord in (1, -1, math.inf, -math.inf):
        sums = sum(abs(x), axis=-2 if ord in (1, -1) else -1)
        return max(sums, axis=-1) if ord > 0 else min(sums, axis=-1)
    raise ShapeError(f"{op}: ord={ord!r} is no norm of matrices; give 'fro', 'nuc', 1, -1, 2, -2, inf or -inf")


@in_float32
def norm(x: TensorLike, ord: Order = None, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The norm of vectors (one axis) or matrices (two), or of all elements (NumPy's ``linalg.norm``).

    ord: for vectors None or 2 (Euclidean), inf, -inf, 0 (how many are not 0), 1, any power; for matrices None or
    "fro", "nuc", 1, -1, 2, -2, inf, -inf.  The gradient is 0 where the norm is; ties share it equally; that of an
    element 0 is 0.  Raises ShapeError, AxisError, LinAlgError.
    """
    x = _floats("norm", x)
    if axis is None and (ord is None or (ord in ("f", "fro") and x.ndim == 2) or (ord == 2 and x.ndim == 1)):
        return _vector("norm", x, None, tuple(range(x.ndim)), keepdims)
    axes = _axes("norm", axis, x.ndim)
    if len(axes) == 1:
        return _vector("norm", x, ord, axes, keepdims)
    if len(axes) != 2 or axes[0] == axes[1]:
        raise ShapeError(f"norm: axis={axis!r} of shape {x.shape}; give one axis for vectors, two for matrices")
    out = _matrix("norm", moveaxis(x, axes, (-2, -1)), ord)
    return expand_dims(out, axes) if keepdims else out


@in_float32
def vector_norm(x: TensorLike, *, axis: Axis = None, keepdims: bool = False, ord: Order = 2) -> Tensor:
    """The norm of the elements along ``axis`` (one or more; None: all), as :func:`norm` of vectors.

    Raises ShapeError, AxisError.
    """
    x = _floats("vector_norm", x)
    return _vector("vector_norm", x, ord, _axes("vector_norm", axis, x.ndim), keepdims)


def matrix_norm(x: TensorLike, *, keepdims: bool = False, ord: Order = "fro") -> Tensor:
    """The norm of each matrix along the last two axes, as :func:`norm` of matrices.  Raises ShapeError, LinAlgError."""
    x = matrix("matrix_norm", x)
    out = _matrix("matrix_norm", x, ord)
    return reshape(out, (*out.shape, 1, 1)) if keepdims else out


def cond(x: TensorLike, p: Order = None) -> Tensor:
    """The condition number of each matrix in norm ``p`` (NumPy's ``linalg.cond``); inf for a singular one.

    p: None or 2: the largest singular value over the smallest, -2: the inverse of that; else an ord of :func:`norm`,
    for square matrices (a singular one in a stack of several raises LinAlgError).  Raises ShapeError.
    """
    x = matrix("cond", x)
    if not x.size:
        raise LinAlgError(f"cond: not defined for empty matrices, of shape {x.shape}")
    if p in (None, 2, -2):
        s = svdvals(x)
        above, below = (s[..., 0], s[..., -1]) if p != -2 else (s[..., -1], s[..., 0])
        zero = equal(below, 0)
        unknown = logical_and(zero, logical_not(any_of(isnan(x), axis=(-2, -1))))
        return where(unknown, math.inf, above / where(zero, 1, below))
    try:
        inverse = inv(x)
    except LinAlgError:
        if x.ndim > 2:
            raise
        return full((), math.inf, dtype=dtypes.real_of(x.dtype), device=x.device)
    return _matrix("cond", x, p) * _matrix("cond", inverse, p)
