"""Variables: tensors that change, by assignment only.  A variable is a cell (see ``cell``) that holds a buffer."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from numbers import Integral
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

from tapegrad import nest
from tapegrad.core import cell, tracking
from tapegrad.core.aval import Shape, ShapedArray
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Cell, Seen
from tapegrad.core.live_numbers import LiveNumber
from tapegrad.core.state import thread, unrecorded
from tapegrad.device import Device, dtypes
from tapegrad.device.types import Array, DType
from tapegrad.errors import DeviceError, DTypeError, ImmutableError, ShapeError
from tapegrad.spellings import TENSORS, Named, missing
from tapegrad.tensor import (
    DTypeLike,
    Methods,
    Ref,
    Tensor,
    TensorLike,
    add_reader,
    alias,
    convert,
    device_of,
    identity_of,
    is_handle,
    upload,
)

_number = itertools.count().__next__


def trainables(seen: Seen) -> list[Variable]:
    """The trainable variables among the cells seen, in the order of their construction."""
    found = [owner for _, owner in seen.values() if owner is not None and owner.trainable]
    return sorted(found, key=lambda v: v.construction_number)


def last_number() -> int:
    """The construction number of a variable made now; every variable made before has a smaller one."""
    return _number()


@nest.is_leaf
class Variable(Named, Methods):
    """A trainable tensor that changes only by assignment (TensorFlow's ``Variable``).

    ``initial_value``: array, number, tensor or variable, copied in value, or a function of no arguments that returns
    one; Python floats become float32.  ``shape``: the shape that it must have.  A tape watches a trainable variable
    when it reads it.  Arithmetic reads the variable and gives tensors.

    Raises NotATensorError for other values, ShapeError where ``shape`` differs.
    """

    __slots__ = ("__weakref__", "_aval", "_cell", "_name", "_number", "_trainable", "category")
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]  # == compares values; use ref() as a key

    def __init__(
        self,
        initial_value: TensorLike | Callable[[], TensorLike],
        trainable: bool | None = True,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        category: str | None = None,
        shape: Sequence[int] | int | None = None,
    ) -> None:
        dtype = None if dtype is None else dtypes.asdtype(dtype)
        value = unrecorded(initial_value) if callable(initial_value) else initial_value
        content = self._content_of(value, dtype)
        if shape is not None:
            _require_shape(name, content.node.aval.shape, shape)
        self._cell = Cell(content)
        self._aval: ShapedArray = content.node.aval
        self._trainable = trainable is None or bool(trainable)
        self._number = _number()
        self._name = name if name is not None else f"variable_{self._number}"
        self.category = category or "parameter"
        everyone[self._number] = self
        tracking.current.label(content, self.category, self._name)

    @staticmethod
    def _content_of(x: TensorLike, dtype: DTypeLike | None, device: Device | None = None) -> Buffer:
        if isinstance(x, Variable):
            x = Tensor(x._cell.get())
        if isinstance(x, Tensor):
            x.look()
            if dtype is not None and x.dtype != dtype:
                x = unrecorded(x.astype, dtype)
            found = alias(x._buffer)
            if found.root().node.aval.nbytes <= found.node.aval.nbytes:
                return found
            return upload(found.array, x.device)._buffer  # a slice must not keep the whole array alive
        return upload(x, device or device_of(x), dtype)._buffer

    @property
    def shape(self) -> Shape:
        """Length of each dimension; assignment cannot change it."""
        return self._aval.shape

    @property
    def dtype(self) -> DType:
        """The dtype of the elements; assignment cannot change it."""
        return self._aval.dtype

    @property
    def device(self) -> Device:
        """Where the value lives."""
        return self._aval.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._aval.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._aval.size

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self._aval.nbytes

    @property
    def trainable(self) -> bool:
        """Whether tapes watch it by themselves."""
        return self._trainable

    @property
    def name(self) -> str:
        """The given name, or ``variable_N``."""
        return self._name

    @property
    def construction_number(self) -> int:
        """The construction number: each variable has a larger one than those made before."""
        return self._number

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (Tensor(self._cell.get()), self.trainable, self.name, self.category)

    def read(self) -> Tensor:
        """The present value, as a new tensor at each reading.  Active tapes note the reading."""
        return identity_of(self._content())

    def _content(self) -> Tensor:
        """The present value, for an operation that reads it; active tapes note the reading."""
        content = self._cell.get(self)
        for recorder in thread.recorders:
            recorder.read(self, content)
        out = _new(Tensor)
        out._buffer = content
        return out

    value = read_value = read

    def numpy(self, *, copy: bool | None = None) -> Array:
        """The present value as a NumPy array, which a later assignment does not change; see :meth:`Tensor.numpy`."""
        return Tensor(self._cell.get()).numpy(copy=copy)

    def to_numpy(self) -> Array:
        """As :meth:`numpy`: the name under which Matplotlib and others ask for an array."""
        return self.numpy()

    def assign(
        self, value: TensorLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Exchange the value; a gradient does not pass through.  Returns the variable (None without ``read_value``).

        ``use_locking``, ``name``: ignored, as in TensorFlow's eager mode.  Raises ShapeError for another shape (nothing
        broadcasts), DTypeError for a tensor of another dtype and for numbers that the variable's dtype cannot hold,
        such as 2.5 for an integer.
        """
        content = self._fitting("assign", value)
        if content.node.aval.shape != self._aval.shape:
            raise ShapeError(
                f"assign: variable {self.name!r} has shape {self._aval.shape}, the value {content.node.aval.shape}; "
                "assignment does not broadcast"
            )
        self._cell.set(content, self)
        tracking.current.label(content, self.category, self._name)
        return self if read_value else None

    def assign_add(
        self, delta: TensorLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Add ``delta`` of the same shape to the value.  Arguments, result and errors as of :meth:`assign`."""
        return self._update("assign_add", delta, 1, read_value)

    def assign_sub(
        self, delta: TensorLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Subtract ``delta`` of the same shape from the value.  Arguments, result and errors as of :meth:`assign`."""
        return self._update("assign_sub", delta, -1, read_value)

    def _fitting(self, how: str, x: TensorLike) -> Buffer:
        """``x`` as a buffer of the variable's dtype."""
        if is_handle(x) and not isinstance(x, Variable):
            x = convert(x)
        if isinstance(x, (Tensor, Variable)):
            if x.dtype != self.dtype:
                raise DTypeError(f"{how}: variable {self.name!r} is {self.dtype}, not {x.dtype}; use tg.astype")
            if x.device is not self.device:
                raise DeviceError(
                    f"{how}: variable {self.name!r} is on {self.device}, not {x.device}; move the value with to_device"
                )
        elif not isinstance(x, LiveNumber):
            kind, mine = (dtypes.rank(d) for d in (self.device.array(x, copy=False).dtype, self.dtype))
            if kind > mine:
                raise DTypeError(f"{how}: variable {self.name!r} is {self.dtype} and cannot hold {x!r:.60}; convert it")
        return self._content_of(x, self.dtype, self.device)

    def _update(self, how: str, delta: TensorLike, sign: int, read_value: bool) -> Any:
        return unrecorded(self._update_now, how, delta, sign, read_value)

    def _update_now(self, how: str, delta: TensorLike, sign: int, read_value: bool) -> Any:
        change = Tensor(self._fitting(how, delta))
        if change.shape != self._aval.shape:
            raise ShapeError(f"{how}: variable {self.name!r} has shape {self._aval.shape}, the value {change.shape}")
        now = Tensor(self._cell.get(self))
        return self.assign(now + change if sign > 0 else now - change, read_value=read_value)

    def ref(self) -> Ref[Variable]:
        """A hashable stand-in for the variable."""
        return Ref(self, self._number)

    def __repr__(self) -> str:
        value = Tensor(self._cell.get())._read()
        return f"<tapegrad.Variable {self.name!r} shape={self.shape} dtype={self.dtype} value={value!r}>"

    def __len__(self) -> int:
        return len(Tensor(self._cell.get()))

    def __bool__(self) -> bool:
        return bool(Tensor(self._cell.get()))

    def __float__(self) -> float:
        return float(Tensor(self._cell.get()))

    def __int__(self) -> int:
        return int(Tensor(self._cell.get()))

    def __complex__(self) -> complex:
        return complex(Tensor(self._cell.get()))

    def __index__(self) -> int:
        return Tensor(self._cell.get()).__index__()

    def item(self) -> Any:
        """The value of a variable of one element as a Python number."""
        return Tensor(self._cell.get()).item()

    def tolist(self) -> Any:
        """The value as nested lists of Python numbers."""
        return Tensor(self._cell.get()).tolist()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        return Tensor(self._cell.get()).__array__(dtype, copy)

    def __setitem__(self, index: object, value: object) -> None:
        raise ImmutableError("v[index] = value: a variable's elements are assigned by v[index].assign(value)")

    def __copy__(self) -> Variable:
        return Variable(self, self.trainable, self.name, category=self.category)

    def __deepcopy__(self, memo: dict[str, object]) -> Variable:
        return self.__copy__()

    def _refuse(self, other: object) -> NoReturn:
        raise ImmutableError(
            f"variable {self.name!r} is not updated by operators; use assign_add, assign_sub or assign"
        )

    if not TYPE_CHECKING:  # an attribute that is not there is an error to a type checker, too

        def __getattr__(self, name):
            raise missing(self, name, TENSORS)

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __imatmul__ = _refuse
    __iand__ = __ior__ = __ixor__ = _refuse


_cell_of = attrgetter("_cell")
_new = object.__new__


def contents(variables: Sequence[Variable]) -> list[Buffer]:
    """The present values of many variables, for an operation that reads them all."""
    if thread.recorders:
        return [v._content()._buffer for v in variables]
    return cell.contents(map(_cell_of, variables), variables)


def held(variables: Sequence[Variable]) -> list[Buffer]:
    """The same, for what is no operation: tapes do not note the reading."""
    return cell.contents(map(_cell_of, variables), itertools.repeat(None, len(variables)))


def give(variables: Sequence[Variable], values: Sequence[Buffer]) -> None:
    """Exchange the values of many variables for new ones of their avals, which nothing else refers to or records.

    So, other than an assigned tensor's, they need no node of their own.
    """
    cell.exchange(list(map(_cell_of, variables)), values, variables)
    for b, v in zip(values, variables, strict=True):
        tracking.current.label(b, v.category, v._name)


def _require_shape(name: str | None, got: Shape, wanted: Sequence[int] | int) -> None:
    shape = (wanted,) if isinstance(wanted, (int, Integral)) else tuple(wanted)
    if shape != got:
        raise ShapeError(
            f"Variable: {'the variable' if name is None else repr(name)} is to have shape {shape}, its initial value "
            f"has {got}; a variable's shape is that of its value and does not change: give tg.full(shape, value), say"
        )


def _unpickled(value: TensorLike, trainable: bool, name: str, category: str) -> Variable:
    return Variable(value, trainable, name, category=category)


everyone: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
add_reader(Variable)
