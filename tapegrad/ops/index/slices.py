"""``IndexedSlices``: slices of an array along its first axis, by their positions; the rest of the array is zeros.

It is what the gradient of a gather costs: as many rows as were taken, not the whole table.  The backward walk makes one
where an operation with ``sparse=True`` asks for it, joins those of one value, and makes an array of it as soon as
anything but the caller's source needs one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from tapegrad.core.aval import Shape
from tapegrad.core.rule import Sliced
from tapegrad.core.state import unrecorded
from tapegrad.device import Device, dtypes
from tapegrad.device.types import Array, DType
from tapegrad.errors import DeviceError, IndexingError, ShapeError
from tapegrad.nest import Composite
from tapegrad.ops.create.creation import arange
from tapegrad.ops.dispatch import barrier, cast, tensor
from tapegrad.ops.elementwise.arithmetic import add, divide, multiply, negative, subtract
from tapegrad.ops.elementwise.comparison import equal
from tapegrad.ops.elementwise.selection import where
from tapegrad.ops.index.bounds import checked
from tapegrad.ops.index.indexing import scatter_add_p
from tapegrad.ops.index.sort import searchsorted, sort, unique_values
from tapegrad.ops.shape.join import concat
from tapegrad.tensor import DTypeLike, Tensor, TensorLike, add_value


class IndexedSlices(Composite):
    """``values[k]`` at row ``indices[k]`` of zeros of ``dense_shape`` (TensorFlow's class of that name).

    values: ``(n, ...)``; indices: integers ``(n,)`` in ``[0, dense_shape[0])``, negative ones count from the end;
    dense_shape: that of the whole array, whose other axes are those of the values; None: not known, as a variable or an
    optimizer does not need it.  Rows named twice add up.

    Optimizers and the clipping functions take it as it is; with a number it is multiplied and divided, with another one
    added, as such.  Every other operation, ``np.asarray`` and ``tg.asarray`` take it as the whole array,
    :meth:`to_dense`.

    Raises ShapeError, IndexingError, DeviceError, NotATensorError.
    """

    __slots__ = ("__weakref__", "_indices", "_shape", "_values")
    __array_priority__ = 1001
    fields = ("values", "indices")

    def __init__(self, values: TensorLike, indices: TensorLike, dense_shape: Sequence[int] | None = None) -> None:
        op = "IndexedSlices"
        rows = tensor(op, values)
        places = tensor(op, indices, rows)
        shape = None if dense_shape is None else tuple(int(n) for n in dense_shape)
        fits = places.ndim == 1 and rows.ndim > 0 and rows.shape[:1] == places.shape
        if not fits or (shape is not None and (not shape or shape[1:] != rows.shape[1:])):
            raise ShapeError(
                f"{op}: wanted values (n, ...), indices (n,) and a dense_shape (m, ...) with the same axes after the "
                f"first; got {rows.shape}, {places.shape} and {shape}"
            )
        if places.device is not rows.device:
            raise DeviceError(f"{op}: values on {rows.device}, indices on {places.device}; use to_device")
        if shape is not None:
            places = checked(op, places, shape[0], rows)
        elif places.dtype.kind not in "iu":
            raise IndexingError(f"{op}: indices must be integers, got {places.dtype}")
        self._values, self._indices, self._shape = rows, places, shape

    @classmethod
    def of(cls, values: Tensor, indices: Tensor, shape: Shape | None) -> Self:
        """Slices whose parts are known to fit, the indices to be in range."""
        made = cls.__new__(cls)
        made._values, made._indices, made._shape = values, indices, shape
        return made

    @property
    def values(self) -> Tensor:
        """The rows, ``(n, ...)``."""
        return self._values

    @property
    def indices(self) -> Tensor:
        """Where each row belongs, ``(n,)`` integers (int64), in the order in which they were named."""
        return self._indices

    @property
    def dense_shape(self) -> Shape | None:
        """The shape of the whole array; None where it is not known."""
        return self._shape

    @property
    def shape(self) -> Shape:
        """The shape of the whole array.  Raises ShapeError where it is not known."""
        if self._shape is None:
            raise ShapeError(
                "IndexedSlices: the whole array is needed, and its shape is not known; give dense_shape, or apply the "
                "slices to a variable, whose shape they take"
            )
        return self._shape

    def within(self, shape: Shape) -> IndexedSlices:
        """Return the slices as of an array of ``shape``, if theirs is not known.  Raises as the constructor."""
        return self if self._shape is not None else IndexedSlices(self._values, self._indices, shape)

    @property
    def dtype(self) -> DType:
        """The dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> Device:
        """Where values and indices lie."""
        return self._values.device

    @property
    def ndim(self) -> int:
        """Number of dimensions of the whole array."""
        return self._values.ndim

    def __repr__(self) -> str:
        values, indices = self._values._read(), self._indices._read()
        return f"tapegrad.IndexedSlices(values={values!r}, indices={indices!r}, dense_shape={self._shape})"

    def to_dense(self) -> Tensor:
        """The whole array as a tensor, through which gradients pass; rows named twice are added in their order."""
        return barrier(scatter_add_p, self._values, self._indices, axis=0, n=self.shape[0])

    def coalesce(self) -> IndexedSlices:
        """The same with each row once, in ascending order (PyTorch's name); the values of equal indices are added.

        How many there are depends on the values, so a GPU is waited for, and a captured function cannot do it.
        """
        rows = unrecorded(unique_values, self._indices)
        places = unrecorded(searchsorted, rows, self._indices)
        sums = barrier(scatter_add_p, self._values, places, axis=0, n=rows.shape[0])
        return IndexedSlices.of(sums, rows, self._shape)

    def astype(self, dtype: DTypeLike) -> IndexedSlices:
        """The same with values of another dtype."""
        return IndexedSlices.of(cast(self._values, dtypes.asdtype(dtype)), self._indices, self._shape)

    def numpy(self) -> Array:
        """The whole array as a NumPy array."""
        return self.to_dense().numpy()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        return self.to_dense().__array__(dtype, copy)

    def _content(self) -> Tensor:
        return self.to_dense()

    # In nested structures ------------------------------------------------------------------------------------------

    def form(self) -> Shape | None:
        """Return the shape of the whole array, if it is known."""
        return self._shape

    def rebuilt(self, parts: list[Any]) -> Any:
        """Other values and indices; where they are no tensors that fit, what was given stays as it is."""
        values, indices = parts
        if isinstance(values, Tensor) and isinstance(indices, Tensor):
            return IndexedSlices.of(values, indices, self._shape)
        return _Parts(values, indices)

    def whole(self) -> Tensor:
        """The whole array."""
        return self.to_dense()

    # Arithmetic: what is linear stays as it is, all else makes the whole array -----------------------------------

    def with_values(self, values: Tensor) -> IndexedSlices:
        """Other values, of one shape with these, for the same rows."""
        return IndexedSlices.of(values, self._indices, self._shape)

    def __neg__(self) -> IndexedSlices:
        return self.with_values(negative(self._values))

    def __mul__(self, other: TensorLike | IndexedSlices) -> Any:
        return self.with_values(multiply(self._values, other)) if _is_number(other) else multiply(self, other)

    def __rmul__(self, other: TensorLike) -> Any:
        return self.with_values(multiply(other, self._values)) if _is_number(other) else multiply(other, self)

    def __truediv__(self, other: TensorLike | IndexedSlices) -> Any:
        return self.with_values(divide(self._values, other)) if _is_number(other) else divide(self, other)

    def __add__(self, other: TensorLike | IndexedSlices) -> Any:
        if type(other) is IndexedSlices and other._shape == self._shape and other.dtype == self.dtype:
            return joined(self, other)
        return add(self, other)

    def __radd__(self, other: TensorLike) -> Any:
        return self if type(other) is int and not other else add(other, self)  # 0: where Python's sum begins

    def __sub__(self, other: TensorLike | IndexedSlices) -> Any:
        return self + -other if type(other) is IndexedSlices else subtract(self, other)

    def __rsub__(self, other: TensorLike) -> Tensor:
        return subtract(other, self)


class _Parts(NamedTuple):
    """Whatever was given in place of values and indices."""

    values: Any
    indices: Any


add_value(IndexedSlices)


def _is_number(x: object) -> bool:
    """Whether a product with ``x`` leaves zeros zeros (but for infinities, which no gradient is scaled by)."""
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and not x.ndim)


def from_rule(found: Sliced) -> IndexedSlices:
    """What a transpose has found."""
    return IndexedSlices.of(*found)


def joined(a: IndexedSlices, b: IndexedSlices) -> IndexedSlices:
    """The sum of two: both lists, the first one's rows first."""
    return IndexedSlices.of(concat([a.values, b.values]), concat([a.indices, b.indices]), a.dense_shape)


def summed(slices: IndexedSlices) -> tuple[Tensor, Tensor]:
    """The values with those of equal indices added, and the rows, ascending, as many of both as before.

    Of a row that is named more than once the first place has the sum; the others have zeros and the row -1.  So shapes
    do not depend on values: nobody waits for a GPU.
    """
    ordered = sort(slices.indices)
    firsts = searchsorted(ordered, ordered)
    count = ordered.shape[0]
    rows = where(equal(firsts, arange(count, device=ordered.device)), ordered, -1)
    places = searchsorted(ordered, slices.indices)
    return barrier(scatter_add_p, slices.values, places, axis=0, n=count), rows
