"""Assignments to some elements of a variable: the ``scatter`` methods, and ``v[index].assign``.

TensorFlow's names and results.  The ``scatter_*`` take one IndexedSlices, as TensorFlow's do, or what that holds, an
index of ``v[...]`` (integers in an array of any shape, slices, masks) and the updates, which broadcast.  Of an element
named twice every change counts; of those that replace, the last.  No gradient passes through an assignment.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tapegrad.core.state import unrecorded
from tapegrad.errors import ImmutableError, IndexingError, NotATensorError
from tapegrad.ops.index.getitem import At, getitem
from tapegrad.ops.index.index_vectors import gather_nd, nd_index
from tapegrad.ops.index.indexing import take
from tapegrad.ops.index.slices import IndexedSlices
from tapegrad.ops.shape.shape import expand_dims
from tapegrad.tensor import Tensor, TensorLike
from tapegrad.variable import Variable

METHODS = {
    "add": ("add", "added to"), "sub": ("subtract", "subtracted from"), "update": ("set", "in place of"),
    "max": ("max", "where larger in place of"), "min": ("min", "where smaller in place of"),
    "mul": ("multiply", "multiplied with"), "div": ("divide", "dividing"),
}  # fmt: skip
"""TensorFlow's name of a change, the method of ``x.at[index]``, and words for the documentation."""
ND = ("add", "sub", "update", "max", "min")
Index = Callable[[str, Tensor], object]


def _changed(op: str, v: Variable, method: str, index: Index, updates: TensorLike, read_value: bool) -> Any:
    """Assign ``v`` its value changed by ``method`` of ``x.at[index(op, x)]``."""

    def new() -> Tensor:
        x, values = Tensor(v._cell.get(v)), Tensor(v._fitting(op, updates))
        return getattr(At(x, index(op, x), op), method)(values)

    return v.assign(unrecorded(new), read_value=read_value)


def _scatter(change: str) -> Callable[..., Any]:
    method, words = METHODS[change]

    def scatter(
        self: Variable, indices: Any, updates: TensorLike | None = None, use_locking: bool = False,
        name: str | None = None, read_value: bool = True,
    ) -> Any:  # fmt: skip
        if isinstance(indices, IndexedSlices) and updates is None:
            indices, updates = indices.indices, indices.values
        if updates is None:
            raise NotATensorError(f"{scatter.__name__}: wanted indices and updates, or IndexedSlices, which hold both")
        return _changed(scatter.__name__, self, method, lambda op, x: indices, updates, read_value)

    scatter.__name__ = scatter.__qualname__ = f"scatter_{change}"
    scatter.__doc__ = f"""Assign the variable with ``updates`` {words} the elements ``v[indices]``.

    ``updates``: of the variable's dtype; they broadcast to the shape of ``v[indices]``.  Or one IndexedSlices, which
    holds both.  ``use_locking``, ``name``: ignored, as in TensorFlow's eager mode.  Returns the variable (None without
    ``read_value``).  Raises IndexingError, ShapeError, DTypeError, NotATensorError.
    """
    return scatter


def _scatter_nd(change: str) -> Callable[..., Any]:
    method, words = METHODS[change]

    def scatter_nd(
        self: Variable, indices: TensorLike, updates: TensorLike, name: str | None = None, read_value: bool = True
    ) -> Any:
        return _changed(scatter_nd.__name__, self, method, lambda op, x: _named(op, x, indices), updates, read_value)

    scatter_nd.__name__ = scatter_nd.__qualname__ = f"scatter_nd_{change}"
    scatter_nd.__doc__ = f"""Assign the variable with ``updates`` {words} the slices that index vectors name.

    ``indices``: ``(..., k)`` integers, for the first ``k`` axes; ``updates``: what ``v.gather_nd(indices)`` is shaped
    as, or broadcasts to it.  Returns the variable (None without ``read_value``).  Raises IndexingError, ShapeError,
    DTypeError.
    """
    return scatter_nd


def _named(op: str, x: Tensor, indices: TensorLike, batch_dims: int = 0) -> object:
    index = nd_index(op, x, indices, batch_dims)
    if not index:
        raise IndexingError(f"{op}: index vectors of length 0 name no part of {x.shape}; use assign")
    return index


def _batch_scatter_update(
    self: Variable, indices: TensorLike, updates: TensorLike, use_locking: bool = False, name: str | None = None,
    read_value: bool = True,
) -> Any:  # fmt: skip
    """Assign the variable with ``updates`` in place of the slices ``v[b, indices[b, j]]``, for all leading ``b``.

    ``indices``: integers; all their axes but the last are those of the variable.  TensorFlow takes both as one
    IndexedSlices.  Returns and raises as the other ``scatter`` methods.
    """

    def index(op: str, x: Tensor) -> object:
        vectors = expand_dims(indices, -1)
        return _named(op, x, vectors, vectors.ndim - 2)

    return _changed("batch_scatter_update", self, "set", index, updates, read_value)


def _sparse_read(self: Variable, indices: TensorLike, name: str | None = None) -> Tensor:
    """The slices along the first axis at ``indices``: ``tg.take(v, indices, axis=0, sparse_grad=True)``.

    So the gradient of the variable that ``tape.gradient`` gives is an IndexedSlices, as TensorFlow's.
    """
    return take(self._content(), indices, axis=0, sparse_grad=True)


def _gather_nd(self: Variable, indices: TensorLike, name: str | None = None) -> Tensor:
    """``tg.gather_nd(v, indices)``: slices at index vectors, with gradients."""
    return gather_nd(self._content(), indices)


def _element(self: Variable, index: object, /) -> Tensor:
    """``v[index]``, with gradients; of positions and slices ``v[index].assign`` changes the variable."""
    part = getitem(self._content(), index)
    if all(_is_basic(item) for item in (index if isinstance(index, tuple) else (index,))):
        part._part_of = weakref.ref(self), index  # arrays would stay alive with the tensor
    return part


def _is_basic(item: object) -> bool:
    return item is None or item is ... or isinstance(item, (int, slice))


def _part(method: str, how: str) -> property:
    """The attribute of a tensor made by ``v[index]`` that assigns to the elements of ``v``."""

    def assigning(self: Tensor) -> Callable[..., Any]:
        variable, index = self._part_of  # AttributeError for any other tensor

        def assign(
            value: TensorLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
        ) -> Any:
            v = variable()
            if v is None:
                raise ImmutableError(f"v[...].{how}: the variable is not there any more")
            return _changed(f"v[...].{how}", v, method, lambda op, x: index, value, read_value)

        assign.__name__ = assign.__qualname__ = how
        return assign

    return property(assigning, doc=f"Of ``v[index]``: ``{how}`` to these elements of the variable; returns it.")


def bind_assignments() -> None:
    """Give variables, and tensors read from them by an index, the methods of this module."""
    named = {f.__name__: f for f in (*map(_scatter, METHODS), *map(_scatter_nd, ND))}
    named |= {f.__name__[1:]: f for f in (_batch_scatter_update, _sparse_read, _gather_nd)}
    named["__getitem__"] = _element  # in place of the one that all readers of a value have
    for name, f in named.items():
        setattr(Variable, name, f)
    for how, method in (("assign", "set"), ("assign_add", "add"), ("assign_sub", "subtract")):
        setattr(Tensor, how, _part(method, how))
