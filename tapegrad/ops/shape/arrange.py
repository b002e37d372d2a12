"""NumPy's many names for arranging arrays, and triangles: plain functions of ``shape``, ``join`` and ``where``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

from tapegrad.core import aval
from tapegrad.core.aval import normalize_axis
from tapegrad.errors import AxisError, ShapeError
from tapegrad.ops.create.creation import arange
from tapegrad.ops.dispatch import own, promote, tensor
from tapegrad.ops.elementwise.comparison import greater_equal, less_equal
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.shape.join import concat, flip, split
from tapegrad.ops.shape.shape import broadcast_to, expand_dims, permute_dims, reshape, swapaxes
from tapegrad.tensor import DTypeLike, Tensor, TensorLike, identity_of


def ravel(a: TensorLike, order: str = "C") -> Tensor:
    """The elements in one dimension; order: C (last index fastest), or F (first).  Raises ShapeError."""
    a = tensor("ravel", a)
    return reshape(a, (a.size,), order)


def _at_least(name: str, ndim: int, doc: str) -> Callable[..., Any]:
    def one(x: TensorLike) -> Tensor:
        x = source = tensor(name, x)
        x = x if x.ndim else reshape(x, (1,))
        x = x if x.ndim >= min(ndim, 2) else expand_dims(x, 0)
        return own(x, source) if x.ndim >= ndim else expand_dims(x, 2)

    def op(*xs: TensorLike) -> Any:
        return one(xs[0]) if len(xs) == 1 else tuple(map(one, xs))

    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"{doc}  Several ``xs``: a tuple of them."
    return op


atleast_1d = _at_least("atleast_1d", 1, "``x``, as an array of one dimension if it has none.")
atleast_2d = _at_least("atleast_2d", 2, "``x`` with new dimensions in front until it has two.")
atleast_3d = _at_least(
    "atleast_3d", 3,
    "``x`` with new dimensions until it has three: ``(n,)`` becomes ``(1, n, 1)``, ``(m, n)`` ``(m, n, 1)``.",
)  # fmt: skip


def hstack(tup: Sequence[TensorLike], *, dtype: DTypeLike | None = None) -> Tensor:
    """Tensors side by side: along the second axis, or the only one.  Raises ShapeError."""
    parts = [atleast_1d(x) for x in tup]
    return concat(parts, axis=0 if parts and parts[0].ndim == 1 else 1, dtype=dtype)


def vstack(tup: Sequence[TensorLike], *, dtype: DTypeLike | None = None) -> Tensor:
    """Tensors on top of each other; those of one dimension are rows.  Raises ShapeError."""
    return concat([atleast_2d(x) for x in tup], axis=0, dtype=dtype)


def dstack(tup: Sequence[TensorLike]) -> Tensor:
    """Tensors behind each other: along the third axis.  Raises ShapeError."""
    return concat([atleast_3d(x) for x in tup], axis=2)


def column_stack(tup: Sequence[TensorLike]) -> Tensor:
    """Tensors side by side; those of one dimension are columns.  Raises ShapeError."""
    parts = [tensor("column_stack", x) for x in tup]
    return concat([reshape(x, (x.size, 1)) if x.ndim < 2 else x for x in parts], axis=1)


def _splitter(name: str, axis: int) -> Callable[[Any, Any], tuple[Tensor, ...]]:
    def op(ary: TensorLike, indices_or_sections: object) -> tuple[Tensor, ...]:
        ary = tensor(name, ary)
        if ary.ndim <= axis and name != "hsplit":
            raise ShapeError(f"{name}: needs {axis + 1} dimensions, got shape {ary.shape}")
        return split(ary, indices_or_sections, axis=axis if ary.ndim > 1 else 0)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = f"``split`` along axis {axis}.  Raises ShapeError, AxisError."
    return op


hsplit, vsplit, dsplit = _splitter("hsplit", 1), _splitter("vsplit", 0), _splitter("dsplit", 2)


def fliplr(m: TensorLike) -> Tensor:
    """The order along the second axis reversed.  Raises AxisError."""
    return flip(m, axis=1)


def flipud(m: TensorLike) -> Tensor:
    """The order along the first axis reversed.  Raises AxisError."""
    return flip(m, axis=0)


def rot90(m: TensorLike, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Tensor:
    """``m`` turned ``k`` times by 90 degrees, from the first of ``axes`` towards the second.  Raises AxisError."""
    m = tensor("rot90", m)
    a, b = (normalize_axis("rot90", i, m.ndim) for i in axes)
    if a == b:
        raise AxisError(f"rot90: axes {axes} name one dimension twice")
    k = index(k)
    if k % 4 == 2:
        return flip(m, axis=(a, b))
    if k % 4 == 0:
        return identity_of(m)
    return swapaxes(flip(m, axis=b), a, b) if k % 4 == 1 else flip(swapaxes(m, a, b), axis=b)


def broadcast_shapes(*shapes: int | Sequence[int]) -> tuple[int, ...]:
    """The shape that all ``shapes`` broadcast to (an integer: a shape of one dimension).  Raises ShapeError."""
    return aval.broadcast_shapes("broadcast_shapes", *(tuple(s) if isinstance(s, Sequence) else (s,) for s in shapes))


def broadcast_arrays(*xs: TensorLike) -> tuple[Tensor, ...]:
    """Each of ``xs`` broadcast to the shape that all broadcast to: views.  Raises ShapeError."""
    tensors = [tensor("broadcast_arrays", x) for x in xs]
    shape = aval.broadcast_shapes("broadcast_arrays", *(t.shape for t in tensors))
    return tuple(broadcast_to(t, shape) for t in tensors)


def meshgrid(*xs: TensorLike, indexing: str = "xy", sparse: bool = False, copy: bool = True) -> tuple[Tensor, ...]:
    """The coordinates of a grid from those along its axes: views, one for each of ``xs``.

    indexing: ``xy`` (the second axis is that of the first of ``xs``) or ``ij``.  sparse: not broadcast.  copy: for
    NumPy's sake; tensors never change.  Raises ShapeError.
    """
    lines = promote("meshgrid", xs) if xs else ()
    if any(t.ndim > 1 for t in lines) or indexing not in ("xy", "ij"):
        raise ShapeError(f"meshgrid: {[t.shape for t in lines]}, indexing={indexing!r}; need vectors, and 'xy' or 'ij'")
    n = len(lines)
    grid = tuple(reshape(t, tuple(t.size if i == k else 1 for i in range(n))) for k, t in enumerate(lines))
    grid = grid if sparse else broadcast_arrays(*grid)
    if indexing == "xy" and n > 1:
        return tuple(permute_dims(g, (1, 0, *range(2, n))) for g in grid)
    return grid


def _triangle(name: str, x: TensorLike, k: int, inside: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    x = tensor(name, x)
    if x.ndim < 2:
        raise ShapeError(f"{name}: needs two dimensions or more, got shape {x.shape}")
    rows, columns = x.shape[-2:]
    mask = inside(arange(columns, device=x.device), reshape(arange(rows, device=x.device), (rows, 1)) + k)
    return where(mask, x, 0)


def tril(m: TensorLike, k: int = 0) -> Tensor:
    """The elements on and below diagonal ``k`` of the last two dimensions, zeros above.  Raises ShapeError."""
    return _triangle("tril", m, k, less_equal)


def triu(m: TensorLike, k: int = 0) -> Tensor:
    """The elements on and above diagonal ``k`` of the last two dimensions, zeros below.  Raises ShapeError."""
    return _triangle("triu", m, k, greater_equal)
