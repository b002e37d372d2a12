"""``x[index]`` and ``x.at[index]``, with NumPy's rules of indexing.

An index is read once, left to right, into a basic part (positions, slices: a view) and arrays for some axes (at most
one gather).  ``None`` and 0-d masks become axes of length 1 first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from numbers import Integral
from typing import Any

from tapegrad.core.aval import Shape, broadcast_shapes
from tapegrad.core.state import thread, unrecorded
from tapegrad.device import dtypes
from tapegrad.errors import DTypeError, IndexingError, NotATensorError, ShapeError
from tapegrad.ops.create.creation import ones, zeros
from tapegrad.ops.dispatch import barrier, cast, own, stack, tensor
from tapegrad.ops.elementwise.arithmetic import add, divide, maximum, multiply, negative
from tapegrad.ops.elementwise.comparison import greater_equal
from tapegrad.ops.elementwise.exponential import power
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.bounds import checked, every
from tapegrad.ops.index.indexing import last_place_p, put_slice_p, scatter_add_p, take_p
from tapegrad.ops.reduce.reductions import max as max_of
from tapegrad.ops.reduce.reductions import min as min_of
from tapegrad.ops.reduce.segments import index_reduce, segment_prod
from tapegrad.ops.shape.blocks import Part, reshaped, slice_p, sliced_shape, unslice_p, whole
from tapegrad.ops.shape.shape import broadcast_to, moveaxis, permute_dims, reshape
from tapegrad.tensor import Tensor, TensorLike, from_array


@dataclass
class _Index:
    """An index that has been read: what it does to an array of ``shape``."""

    shape: Shape
    """The array's shape with the axes of length 1 that the index makes."""
    basic: tuple[Part, ...]
    """For each axis of ``shape``; of an axis with an array everything is taken."""
    arrays: dict[int, Tensor] = field(default_factory=dict)
    """Indices for axes of the basic part's result; all of one shape."""
    target: int = 0
    """Where the arrays' dimensions stand in the result."""

    @property
    def is_whole(self) -> bool:
        """Whether the basic part is the whole array."""
        return self.basic == whole(self.shape)


def _items(op: str, index: object, shape: Shape, x: Tensor) -> list[Any]:
    """The items of an index, arrays as tensors, the Ellipsis and missing axes as full slices."""
    items = [_item(op, i, x) for i in (index if isinstance(index, tuple) else (index,))]
    used = sum(map(_axes_of, items))
    if used > len(shape):
        raise IndexingError(f"{op}: {used} indices for a tensor of shape {shape}")
    dots = [k for k, i in enumerate(items) if i is ...]
    if len(dots) > 1:
        raise IndexingError(f"{op}: an index can have only one Ellipsis (...)")
    at = dots[0] if dots else len(items)
    return [*items[:at], *[slice(None)] * (len(shape) - used), *items[at + 1 :]]


def _item(op: str, item: Any, x: Tensor) -> Any:
    """An item of an index of ``x`` as an int, a slice, None, the Ellipsis or a tensor of integers or bools."""
    if item is None or item is ... or isinstance(item, slice):
        return item
    if isinstance(item, (int, Integral)) and not isinstance(item, bool):
        return int(item)
    if isinstance(item, (float, complex, str)):
        raise IndexingError(f"{op}: {item!r} is no index; use integers, slices, None, ..., arrays of integers or bools")
    try:
        t = tensor(op, item, x)
    except NotATensorError as e:
        raise IndexingError(f"{op}: {item!r:.60} is no index") from e
    if isinstance(item, list) and not t.size:
        t = cast(t, dtypes.int64)
    if t.dtype.kind not in "biu":
        raise IndexingError(f"{op}: an array of {t.dtype} is no index; use integers (astype) or a mask of bools")
    if t.dtype.kind == "b" or t.ndim or any(batch.follows(t._buffer) for batch in thread.batches):
        return t
    return thread.executor.index(t)


def _axes_of(item: object) -> int:
    """How many axes an item is for."""
    if item is None or item is ...:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype.kind == "b" else 1


def _read(op: str, index: object, x: Tensor) -> _Index:
    """Read an index of ``x``.  Raises IndexingError naming ``op``."""
    reader = _Reader(op, x)
    for item in _items(op, index, x.shape, x):
        reader.take(item)
    return reader.result()


class _Reader:
    """Takes the items of an index one by one."""

    def __init__(self, op: str, x: Tensor) -> None:
        self.op, self.x, self.given, self.axis = op, x, x.shape, 0
        self.lengths: list[int] = []
        self.parts: list[Part] = []
        self.arrays: dict[int, Tensor] = {}
        self.advanced: list[int] = []

    def take(self, item: Any) -> None:
        """One item, for the next axis or axes."""
        if item is None:
            self._part((0, 1, 1), 1)
        elif isinstance(item, int):
            n = self._next()
            if not -n <= item < n:
                raise IndexingError(f"{self.op}: index {item} is out of range for axis {self.axis - 1} of {self.given}")
            self.advanced.append(len(self.parts))
            self._part(item % n, n)
        elif isinstance(item, slice):
            n = self._next()
            first, stop, step = self._bounds(item, n)
            self._part((first, count, step) if (count := len(range(first, stop, step))) else (0, 0, 1), n)
        elif item.dtype.kind == "b":
            self._mask(item)
        else:
            self._array(checked(self.op, item, self.given[self.axis], self.x), self._next())

    def _bounds(self, item: slice, n: int) -> tuple[int, int, int]:
        try:
            return item.indices(n)
        except (TypeError, ValueError) as e:
            raise IndexingError(f"{self.op}: {item} is no index: {e}") from None

    def _next(self) -> int:
        self.axis += 1
        return self.given[self.axis - 1]

    def _part(self, part: Part, length: int) -> None:
        self.parts.append(part)
        self.lengths.append(length)

    def _array(self, places: Tensor, length: int) -> None:
        self.advanced.append(len(self.parts))
        self.arrays[len(self.parts)] = places
        self._part((0, length, 1), length)

    def _mask(self, mask: Tensor) -> None:
        """A mask becomes positions, an array for each of its axes; one of length 0 fits any, as in NumPy."""
        have = self.given[self.axis : self.axis + mask.ndim]
        if any(m not in (0, n) for m, n in zip(mask.shape, have, strict=True)):
            raise IndexingError(f"{self.op}: a mask of shape {mask.shape} for axes of lengths {have} of {self.given}")
        array, device = mask._array, mask.device
        if not mask.ndim:
            self._array(zeros((int(bool(array)),), dtype=dtypes.int64, device=device), 1)
        for places in array.nonzero() if mask.ndim else ():
            self._array(from_array(device.xp.ascontiguousarray(places), device), self._next())

    def result(self) -> _Index:
        """What was read.  Arrays that stand apart put their dimensions first, as in NumPy."""
        shape, parts = tuple(self.lengths), tuple(self.parts)
        if not self.arrays:
            return _Index(shape, parts)
        kept = [k for k, part in enumerate(parts) if not isinstance(part, int)]
        first, last = self.advanced[0], self.advanced[-1]
        together = last - first + 1 == len(self.advanced)
        target = sum(k < first for k in kept) if together else 0
        try:
            common = broadcast_shapes(self.op, *(a.shape for a in self.arrays.values()))
        except ShapeError as e:
            raise IndexingError(str(e)) from None
        arrays = {kept.index(k): broadcast_to(a, common) for k, a in self.arrays.items()}
        return _Index(shape, parts, arrays, target)


def _gather_axis(index: _Index, shape: Shape) -> tuple[tuple[int, ...], Shape, int, Tensor]:
    """The one gather of an index: the order of axes, their shape with the arrays' axes as one, that axis, its indices.

    shape: of the basic part's result.
    """
    axes = tuple(index.arrays)
    adjacent = axes[-1] - axes[0] + 1 == len(axes)
    at = axes[0] if adjacent else 0
    rest = [a for a in range(len(shape)) if a not in axes]
    order = (*rest[:at], *axes, *rest[at:])
    places, *others = index.arrays.values()
    for a, more in zip(axes[1:], others, strict=True):
        places = places * shape[a] + more
    merged = (*(shape[a] for a in rest[:at]), prod(shape[a] for a in axes), *(shape[a] for a in rest[at:]))
    return order, merged, at, places


def getitem(x: TensorLike, index: object, /, op: str = "x[...]") -> Tensor:
    """``x[index]`` by NumPy's rules: a view for positions and slices, a copy for arrays and masks.

    ``op``: what messages call it.  Raises IndexingError (an IndexError).
    """
    x = tensor(op, x)
    if type(index) is int and x.ndim and -x.shape[0] <= index < x.shape[0]:  # the usual loop over a first axis
        index = index % x.shape[0]
        return barrier(slice_p, x, index=(index, *[(0, n, 1) for n in x.shape[1:]]))
    if type(index) is Tensor and index.ndim and x.ndim and index.dtype.kind in "iu":
        return barrier(take_p, x, checked(op, index, x.shape[0], x), axis=0)
    parts = _read(op, index, x)
    source, x = x, reshaped(x, parts.shape)
    if not parts.is_whole:
        x = barrier(slice_p, x, index=parts.basic)
    if not parts.arrays:
        return own(x, source)
    order, merged, at, places = _gather_axis(parts, x.shape)
    out = barrier(take_p, reshaped(permute_dims(x, order), merged), places, axis=at)
    if at == parts.target:
        return out
    n = places.ndim
    return moveaxis(out, tuple(range(at, at + n)), tuple(range(parts.target, parts.target + n)))


class At:
    """``x.at[index]``: its methods make a new tensor with some elements changed; gradients pass (JAX's ``.at``).

    Values broadcast to what the index selects and are cast to the dtype of ``x``.  Of an element named twice every
    change counts, as of NumPy's ``ufunc.at``; only :meth:`set` keeps the last one.  Raises IndexingError, ShapeError.
    """

    __slots__ = ("_index", "_name", "_x")

    def __init__(self, x: Tensor, index: object = (), name: str | None = None) -> None:
        self._x = x
        self._index = index
        self._name = name
        """What messages call the operation; None: ``x.at[...]`` and the method's name."""

    def __getitem__(self, index: object) -> At:
        return At(self._x, index, self._name)

    def get(self) -> Tensor:
        """The elements themselves: ``x[index]``."""
        return self._selected("get")

    def _selected(self, method: str) -> Tensor:
        return getitem(self._x, self._index, self._called(method))

    def set(self, values: TensorLike) -> Tensor:
        """``x`` with the elements replaced by ``values``; an element named twice gets the last value."""
        return self._change("set", values)

    def add(self, values: TensorLike) -> Tensor:
        """``x`` with ``values`` added to the elements."""
        return self._change("add", values)

    def subtract(self, values: TensorLike) -> Tensor:
        """``x`` with ``values`` subtracted from the elements."""
        return self._change("add", negative(tensor(self._called("subtract"), values, self._x)))

    def multiply(self, values: TensorLike) -> Tensor:
        """``x`` with the elements multiplied by ``values``; the gradient is right at zeros, too."""
        return self._change("multiply", values)

    def divide(self, values: TensorLike) -> Tensor:
        """``x`` with the elements divided by ``values``.  Raises DTypeError for integers."""
        if not dtypes.is_inexact(self._x.dtype):
            raise DTypeError(f"{self._called('divide')}: not defined for {self._x.dtype}; use astype first")
        return self.set(divide(self._selected("divide"), self._joint("divide", values)))

    def power(self, values: TensorLike) -> Tensor:
        """``x`` with the elements raised to ``values``; of an element named twice the exponents multiply."""
        return self.set(power(self._selected("power"), self._joint("power", values)))

    def max(self, values: TensorLike) -> Tensor:
        """``x`` with the larger of each element and ``values``; what ties shares the gradient equally.

        NaN wins.  Raises DTypeError for bool and complex.
        """
        return self._change("max", values)

    def min(self, values: TensorLike) -> Tensor:
        """``x`` with the smaller of each element and ``values``; what ties shares the gradient equally.

        NaN wins.  Raises DTypeError for bool and complex.
        """
        return self._change("min", values)

    def apply(self, f: Callable[[Tensor], TensorLike]) -> Tensor:
        """``x`` with ``f`` of the elements in their place; an element named twice gets ``f`` of ``f`` of it.

        ``f``: an elementwise function; it is called with the selected elements only.
        """
        op = self._called("apply")
        new = _applied(op, f, self._selected("apply"))
        for again in unrecorded(self._repeats):
            new = At(new, again).set(_applied(op, f, new[again]))
        return self.set(new)

    def _repeats(self) -> Iterator[Tensor]:
        """Masks of the selected elements that are named at least twice, at least three times, and so on."""
        if not _read(self._called("apply"), self._index, self._x).arrays:
            return iter(())
        one = ones((), dtype=dtypes.int64, device=self._x.device)
        counted = At(zeros(self._x.shape, dtype=dtypes.int64, device=self._x.device), self._index).add(one)
        times = getitem(counted, self._index)
        most = thread.executor.decided(lambda: int(every(times).numpy().max(initial=1)), 1)
        return iter([greater_equal(times, k) for k in range(2, most + 1)])

    def _called(self, method: str) -> str:
        return self._name or f"x.at[...].{method}"

    def _joint(self, method: str, values: TensorLike) -> Tensor:
        """For each selected element the product of the ``values`` for it."""
        ones_of_x = ones(self._x.shape, dtype=self._x.dtype, device=self._x.device)
        return getitem(At(ones_of_x, self._index, self._called(method)).multiply(values), self._index)

    def _change(self, how: str, values: TensorLike) -> Tensor:
        x, op = self._x, self._called(how)
        if how in ("max", "min") and x.dtype.kind in "bc":
            raise DTypeError(f"{op}: not defined for {x.dtype}")
        index = _read(op, self._index, x)
        v = cast(tensor(op, values, x), x.dtype)
        if index.arrays:
            return reshape(_change_places(op, reshape(x, index.shape), v, index, how), x.shape)
        v = _fitted(op, v, sliced_shape(index.basic))
        if how == "add":
            return add(x, reshape(barrier(unslice_p, v, shape=index.shape, index=index.basic), x.shape))
        x, shape = reshape(x, index.shape), x.shape
        if how != "set":
            v = _together(how, barrier(slice_p, x, index=index.basic), v)
        return reshape(barrier(put_slice_p, x, v, index=index.basic), shape)


def _applied(op: str, f: Callable[[Tensor], TensorLike], x: Tensor) -> Tensor:
    new = tensor(op, f(x), x)
    if new.shape != x.shape:
        raise ShapeError(f"{op}: the function made shape {new.shape} of elements of shape {x.shape}")
    return new


def _together(how: str, have: Tensor, v: Tensor) -> Tensor:
    """Elements and the values for them, one for each."""
    if how == "multiply":
        return multiply(have, v)
    extreme = max_of if how == "max" else min_of
    return extreme(stack([have, v]), axis=0)


def _joined(how: str, have: Tensor, v: Tensor, places: Tensor, axis: int) -> Tensor:
    """Slices of ``have`` along ``axis`` and, together with each, those of ``v`` whose ``places`` name it."""
    if how != "multiply":
        return index_reduce(have, axis, places, v, f"a{how}")
    factors = segment_prod(moveaxis(v, axis, 0), places, have.shape[axis])
    return multiply(have, moveaxis(cast(factors, have.dtype), 0, axis))


def _fitted(op: str, v: Tensor, shape: Shape) -> Tensor:
    """``v`` broadcast to the shape of what it goes to."""
    while v.ndim > len(shape) and v.shape[0] == 1:  # as in NumPy's assignment
        v = reshape(v, v.shape[1:])
    if broadcast_shapes(op, v.shape, shape) != shape:
        raise ShapeError(f"{op}: values of shape {v.shape} do not broadcast to the {shape} that the index selects")
    return broadcast_to(v, shape)


def _change_places(op: str, x: Tensor, v: Tensor, index: _Index, how: str) -> Tensor:
    """Change the elements at arrays of indices; ``x`` has the shape ``index.shape``."""
    shape, adding = sliced_shape(index.basic), how == "add"
    order, merged, at, places = _gather_axis(index, shape)
    n = places.ndim
    rest = (*merged[:at], *merged[at + 1 :])
    wanted = (*rest[: index.target], *places.shape, *rest[index.target :])
    v = _fitted(op, v, wanted)
    v = moveaxis(v, tuple(range(index.target, index.target + n)), tuple(range(at, at + n)))
    if adding:
        change = barrier(scatter_add_p, v, places, axis=at, n=merged[at])
    else:
        inner = barrier(slice_p, x, index=index.basic)
        have = reshape(permute_dims(inner, order), merged)
        if not places.size:
            return x
        flat = reshape(v, (*merged[:at], places.size, *merged[at + 1 :]))
        if how == "set":
            change = _replaced(have, flat, places, at)
        else:
            change = _joined(how, have, flat, reshape(places, (places.size,)), at)
    back = tuple(order.index(a) for a in range(len(order)))
    change = permute_dims(reshape(change, tuple(shape[a] for a in order)), back)
    if index.is_whole:
        return add(x, change) if adding else change
    if adding:
        return add(x, barrier(unslice_p, change, shape=x.shape, index=index.basic))
    return barrier(put_slice_p, x, change, index=index.basic)


def _replaced(have: Tensor, flat: Tensor, places: Tensor, at: int) -> Tensor:
    """Slices of ``have`` along axis ``at``, those that ``places`` name replaced by the last of ``flat`` for them."""
    count = have.shape[at]
    source = barrier(last_place_p, places, n=count)
    chosen = barrier(take_p, flat, maximum(source, 0), axis=at)
    column = reshape(source, (count, *[1] * (have.ndim - at - 1)))
    return where(column >= 0, chosen, have)
