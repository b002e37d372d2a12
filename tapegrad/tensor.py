"""Tensors: the user's handles on values.  A tensor never changes; a handle on a lazy value holds a recipe, not bytes.

``tapegrad.ops`` binds the operators and methods that compute, through :func:`bind_method`.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from tapegrad import nest
from tapegrad.core import tracking
from tapegrad.core.aval import Shape, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import NO_PARAMS, Node, leaf
from tapegrad.core.primitive import Site, elementwise
from tapegrad.core.state import last_refusal, refuse, thread
from tapegrad.device import Device, abstract_array, asdevice, cuda_index, current_device, is_array
from tapegrad.device.types import Array, DType
from tapegrad.engine.realize import array_of, realize, stored
from tapegrad.errors import (
    DetachedError,
    DeviceError,
    DryRunError,
    DTypeError,
    ImmutableError,
    NotATensorError,
    ShapeError,
    TapegradError,
    UnsizedError,
    users_line,
)
from tapegrad.spellings import TENSORS, missing

if TYPE_CHECKING:
    import numpy.typing as npt

    from tapegrad.variable import Variable

TensorLike: TypeAlias = "Tensor | Variable | npt.ArrayLike"
"""What an operation takes: a tensor, a variable, an array, a number, or nested sequences of these."""
T = TypeVar("T")
DTypeLike: TypeAlias = "npt.DTypeLike"
"""What names a dtype: ``"float32"``, ``np.float32``, a dtype itself."""

_LEAST_HELD = 512
"""Bytes; what the ledger counts in."""


if TYPE_CHECKING:

    class Methods:
        """What :func:`bind_method` binds to tensors and variables, for type checkers."""

        T: Tensor
        mT: Tensor
        real: Tensor
        imag: Tensor
        at: Any

        def to_device(self, device: Device | str, *, stream: object = None) -> Tensor: ...
        def __array_namespace__(self, /, *, api_version: str | None = None) -> Any: ...
        def __dlpack__(self, **options: object) -> Any: ...
        def __dlpack_device__(self) -> tuple[int, int]: ...
        def __getitem__(self, index: object) -> Tensor: ...
        def __iter__(self) -> Iterator[Tensor]: ...
        def __add__(self, other: TensorLike) -> Tensor: ...
        def __radd__(self, other: TensorLike) -> Tensor: ...
        def __sub__(self, other: TensorLike) -> Tensor: ...
        def __rsub__(self, other: TensorLike) -> Tensor: ...
        def __mul__(self, other: TensorLike) -> Tensor: ...
        def __rmul__(self, other: TensorLike) -> Tensor: ...
        def __truediv__(self, other: TensorLike) -> Tensor: ...
        def __rtruediv__(self, other: TensorLike) -> Tensor: ...
        def __floordiv__(self, other: TensorLike) -> Tensor: ...
        def __rfloordiv__(self, other: TensorLike) -> Tensor: ...
        def __mod__(self, other: TensorLike) -> Tensor: ...
        def __pow__(self, other: TensorLike) -> Tensor: ...
        def __rpow__(self, other: TensorLike) -> Tensor: ...
        def __matmul__(self, other: TensorLike) -> Tensor: ...
        def __rmatmul__(self, other: TensorLike) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __pos__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
        def __and__(self, other: TensorLike) -> Tensor: ...
        def __or__(self, other: TensorLike) -> Tensor: ...
        def __xor__(self, other: TensorLike) -> Tensor: ...
        def __eq__(self, other: object) -> Tensor: ...  # type: ignore[override]
        def __ne__(self, other: object) -> Tensor: ...  # type: ignore[override]
        def __lt__(self, other: TensorLike) -> Tensor: ...
        def __le__(self, other: TensorLike) -> Tensor: ...
        def __gt__(self, other: TensorLike) -> Tensor: ...
        def __ge__(self, other: TensorLike) -> Tensor: ...
        def __lshift__(self, other: TensorLike) -> Tensor: ...
        def __rshift__(self, other: TensorLike) -> Tensor: ...
        def __rmod__(self, other: TensorLike) -> Tensor: ...
        def __rand__(self, other: TensorLike) -> Tensor: ...
        def __ror__(self, other: TensorLike) -> Tensor: ...
        def __rxor__(self, other: TensorLike) -> Tensor: ...
        def argpartition(self, kth: Any, axis: int | None = -1, kind: str = ...) -> Tensor: ...
        def argsort(
            self, axis: int | None = -1, kind: str | None = None, *, descending: bool = False, stable: bool = True
        ) -> Tensor: ...
        def astype(self, dtype: DTypeLike, *, copy: bool = True, device: Device | str | None = None) -> Tensor: ...
        def choose(self, choices: Sequence[TensorLike], mode: str = "raise") -> Tensor: ...
        def clip(self, min: TensorLike | None = None, max: TensorLike | None = None) -> Tensor: ...
        def compress(self, condition: TensorLike, axis: int | None = None) -> Tensor: ...
        def conj(self) -> Tensor: ...
        def copy(self) -> Tensor: ...
        def cumprod(self, axis: int | None = None, dtype: DTypeLike | None = None) -> Tensor: ...
        def cumsum(self, axis: int | None = None, dtype: DTypeLike | None = None) -> Tensor: ...
        def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor: ...
        def dot(self, b: TensorLike) -> Tensor: ...
        def flatten(self, order: str = "C") -> Tensor: ...
        def nonzero(self) -> tuple[Tensor, ...]: ...
        def ptp(self, axis: Any = None, *, keepdims: bool = False) -> Tensor: ...
        def ravel(self, order: str = "C") -> Tensor: ...
        def repeat(self, repeats: Any, axis: int | None = None) -> Tensor: ...
        def reshape(self, *shape: int | Sequence[int], order: str = "C", copy: bool | None = None) -> Tensor: ...
        def round(self, decimals: int = 0) -> Tensor: ...
        def searchsorted(self, v: TensorLike, side: str = "left", sorter: TensorLike | None = None) -> Tensor: ...
        def squeeze(self, axis: int | Sequence[int] | None = None) -> Tensor: ...
        def swapaxes(self, axis1: int, axis2: int) -> Tensor: ...
        def take(
            self, indices: TensorLike, axis: int | None = None, *, mode: str = "raise", sparse_grad: bool = False
        ) -> Tensor: ...
        def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: DTypeLike | None = None) -> Tensor: ...
        def transpose(self, *axes: int | Sequence[int] | None) -> Tensor: ...
        def sum(
            self, axis: int | Sequence[int] | None = None, dtype: DTypeLike | None = None, *, keepdims: bool = False,
            initial: TensorLike | None = None, where: TensorLike | None = None,
        ) -> Tensor: ...  # fmt: skip
        def prod(
            self, axis: int | Sequence[int] | None = None, dtype: DTypeLike | None = None, *, keepdims: bool = False,
            initial: TensorLike | None = None, where: TensorLike | None = None,
        ) -> Tensor: ...  # fmt: skip
        def mean(
            self, axis: int | Sequence[int] | None = None, dtype: DTypeLike | None = None, *, keepdims: bool = False,
            where: TensorLike | None = None,
        ) -> Tensor: ...  # fmt: skip
        def var(
            self, axis: int | Sequence[int] | None = None, dtype: DTypeLike | None = None, *, correction: float = 0,
            ddof: float | None = None, keepdims: bool = False, where: TensorLike | None = None,
        ) -> Tensor: ...  # fmt: skip
        def std(
            self, axis: int | Sequence[int] | None = None, dtype: DTypeLike | None = None, *, correction: float = 0,
            ddof: float | None = None, keepdims: bool = False, where: TensorLike | None = None,
        ) -> Tensor: ...  # fmt: skip
        def max(
            self, axis: int | Sequence[int] | None = None, *, keepdims: bool = False,
            initial: TensorLike | None = None, where: TensorLike | None = None,
        ) -> Tensor: ...  # fmt: skip
        def min(
            self, axis: int | Sequence[int] | None = None, *, keepdims: bool = False,
            initial: TensorLike | None = None, where: TensorLike | None = None,
        ) -> Tensor: ...  # fmt: skip
        def any(
            self, axis: int | Sequence[int] | None = None, *, keepdims: bool = False, where: TensorLike | None = None
        ) -> Tensor: ...  # fmt: skip
        def all(
            self, axis: int | Sequence[int] | None = None, *, keepdims: bool = False, where: TensorLike | None = None
        ) -> Tensor: ...  # fmt: skip
        def argmax(self, axis: int | None = None, *, keepdims: bool = False) -> Tensor: ...
        def argmin(self, axis: int | None = None, *, keepdims: bool = False) -> Tensor: ...

else:
    Methods = object


@nest.is_leaf
class Tensor(Methods):
    """An n-dimensional array whose derivatives a tape can take.  Make one with :func:`tapegrad.asarray`."""

    __slots__ = ("__weakref__", "_buffer", "_part_of")
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]  # == compares values, as in TensorFlow; use ref() as a key

    _buffer: Buffer
    _part_of: tuple[weakref.ref[Variable], object]
    """Set in ``v[index]`` alone: the variable and the index."""

    def __init__(self, buffer: Buffer) -> None:
        if not isinstance(buffer, Buffer):
            raise NotATensorError(f"Tensor: values become tensors by tg.asarray(x), got {type(buffer).__name__}")
        self._buffer = buffer

    @property
    def shape(self) -> Shape:
        """Length of each dimension."""
        return self._buffer.node.aval.shape

    @property
    def dtype(self) -> DType:
        """The dtype of the elements, as NumPy's object."""
        return self._buffer.node.aval.dtype

    @property
    def device(self) -> Device:
        """Where the bytes live."""
        return self._buffer.node.aval.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._buffer.node.aval.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._buffer.node.aval.size

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, whether or not they exist now."""
        return self._buffer.node.aval.nbytes

    @property
    def _array(self) -> Any:
        """The device's array itself (evaluated if need be), which must not be written to."""
        self.look()
        return abstract_array.real(array_of(self._buffer), self._buffer.node)

    def numpy(self, *, copy: bool | None = None) -> Array:
        """The value as a NumPy array that cannot be written to: on the CPU the tensor's own memory, else a copy.

        The memory counts as held as long as the array, or a view of it, is alive.  With ``copy=True`` the array is the
        caller's own, and can be written to.  Raises ValueError for ``copy=False`` where it takes a copy, and
        DetachedError inside ``grad``, ``jvp`` and the like for a value that is being differentiated.
        """
        refuse_detaching(self._buffer, ".numpy()", ".numpy()")
        if self.device.kind == "cpu":
            return self._read().copy() if copy else self._lent()
        if copy is False:
            raise ValueError(f"a tensor on {self.device} has no NumPy array without a copy; leave out copy=False")
        found = self._read()
        found.flags.writeable = bool(copy)
        return found

    def _read(self) -> Array:
        """The value as a NumPy array, to be read at once: it may be the tensor's memory, which nothing else holds."""
        self.look()
        b = self._buffer
        return self.device.numpy(abstract_array.real(stored(b), b.node))

    def to_numpy(self) -> Array:
        """As :meth:`numpy`: the name under which Matplotlib and others ask for an array."""
        return self.numpy()

    def _lent(self) -> Array:
        """The device's array itself for the user: while that or a view of it is alive, the value is held, and counts.
        The smallest values are not held: holding them would take more bytes than they have.
        """
        array, b = self._array, self._buffer
        if b.root().node.aval.nbytes > _LEAST_HELD or self.device.kind != "cpu":
            return self.device.shared(array, (array, b))
        view = self.device.xp.asarray(array).view()  # an array where NumPy has made a number
        view.flags.writeable = False
        return view

    def look(self) -> None:
        """Tell the recorders that follow one example of many that its value is read."""
        try:
            for batch in thread.batches:
                batch.looked_at(self._buffer)
        except TapegradError as e:
            refuse(users_line("numpy", "scipy"), e)
            raise

    def item(self) -> Any:
        """The value of a tensor of one element as a Python number.

        Raises ShapeError for other sizes, and DetachedError as :meth:`numpy` does.
        """
        refuse_detaching(self._buffer, ".item()")
        return self._number()

    def _number(self) -> Any:
        """Return the value of one element as a Python number, for code whose result does not depend on it smoothly."""
        if self.size != 1:
            raise ShapeError(f"item: a tensor of shape {self.shape} has {self.size} elements, not one")
        return self._read().item()

    def tolist(self) -> Any:
        """The value as nested lists of Python numbers.  Raises DetachedError as :meth:`numpy` does."""
        refuse_detaching(self._buffer, ".tolist()", ".tolist()")
        return self._read().tolist()

    def ref(self) -> Ref[Tensor]:
        """A hashable stand-in, equal for the same value only."""
        return Ref(self, self._buffer.node.index)

    def __len__(self) -> int:
        if not self.ndim:
            raise UnsizedError("len: a tensor of no dimensions has no length")
        return self.shape[0]

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ShapeError(f"the truth of a tensor of shape {self.shape} is ambiguous; use tg.any or tg.all")
        return bool(self._read())

    def __int__(self) -> int:
        refuse_detaching(self._buffer, "int()")
        return int(self._number())

    def __float__(self) -> float:
        refuse_detaching(self._buffer, "float()")
        return float(self._number())

    def __complex__(self) -> complex:
        refuse_detaching(self._buffer, "complex()")
        return complex(self._number())

    def __index__(self) -> int:
        if self.ndim or self.dtype.kind not in "iu":
            raise DTypeError(f"only an integer tensor of no dimensions is an index, not {self.dtype}{list(self.shape)}")
        return self._number()

    def __format__(self, spec: str) -> str:
        array = self._to_show()
        if array is None:
            return str(self)
        return format(array.item() if self.size == 1 and spec else str(array), spec)

    def __repr__(self) -> str:
        array = self._to_show()
        return f"tapegrad.Tensor({self!s})" if array is None else f"tapegrad.Tensor({array!r})"

    def __str__(self) -> str:
        array = self._to_show()
        return f"<{self.dtype}{list(self.shape)}, no single value here>" if array is None else str(array)

    def _to_show(self) -> Array | None:
        """Return the value for a text, where a look at it is always allowed.

        None where there is no value, or one for each example: while a function is captured, predicted or mapped.
        """
        buffer = self._buffer
        if any(batch.whole(buffer) is not buffer for batch in thread.batches):
            return None
        try:
            return self.device.numpy(abstract_array.real(stored(buffer), buffer.node))
        except DryRunError:
            return None

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        refuse_detaching(self._buffer, "a NumPy function or array", ".numpy()")
        if dtype is None or dtype == self.dtype:
            return self.numpy(copy=copy)
        if copy is False:
            raise ValueError(f"a tensor of {self.dtype} is no {dtype} array without a copy; leave out copy=False")
        return self._read().astype(dtype)

    def __setitem__(self, index: object, value: object) -> None:
        raise ImmutableError("a tensor does not change in place; use x = x.at[index].set(value)")

    def __reduce__(self) -> tuple[object, ...]:
        refuse_detaching(self._buffer, "a pickle")
        return _unpickled, (self.numpy(), self.device.name)

    def __copy__(self) -> Tensor:
        return self

    def __deepcopy__(self, memo: dict[str, object]) -> Tensor:
        return self

    if not TYPE_CHECKING:  # an attribute that is not there is an error to a type checker, too

        def __getattr__(self, name):
            if name[:2] == "__":  # NumPy asks for some at each conversion
                raise AttributeError(f"'Tensor' object has no attribute {name!r}", name=name, obj=self)
            raise missing(self, name, TENSORS)


for _name in ("shape", "dtype", "device", "ndim", "size", "nbytes"):
    # As written above, but looked up without a call of a function in Python: operations ask for them all the time.
    _written = getattr(Tensor, _name)
    setattr(Tensor, _name, property(attrgetter(f"_buffer.node.aval.{_name}"), doc=_written.__doc__))


class Ref(Generic[T]):
    """A hashable reference to a tensor or variable (TensorFlow's ``ref()``)."""

    __slots__ = ("_key", "_thing")

    def __init__(self, thing: T, key: int) -> None:
        self._thing = thing
        self._key = (type(thing), key)

    def deref(self) -> T:
        """The tensor or variable."""
        return self._thing

    def __reduce__(self) -> tuple[object, ...]:
        return _ref, (self._thing,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _ref(thing: Tensor | Variable) -> Ref[Tensor] | Ref[Variable]:
    return thing.ref()


def _unpickled(array: Array, device: str) -> Tensor:
    # By its public name, the first use of which loads the operators: another process may have imported nothing else.
    return sys.modules["tapegrad"].asarray(array, device=home(device))


def home(name: str) -> Device:
    """The device where what was pickled on device ``name`` goes: that one, or where it is missing the default."""
    try:
        return asdevice(name)
    except DeviceError:
        return current_device()


def bind_method(name: str, function: Callable[..., object] | property) -> None:
    """Give tensors an operator or method, and variables, too, on their present value."""
    setattr(Tensor, name, function)
    for cls in _readers:
        setattr(cls, name, _reading(function))


class _Reader(Protocol):
    def _content(self) -> Tensor:
        """The present value."""


_readers: tuple[type[_Reader], ...] = ()
_handles: tuple[type, ...] = (Tensor,)


def add_reader(cls: type[_Reader]) -> None:
    """Register a class of handles on a value; operators bound later are given to it, too."""
    global _readers
    _readers = (*_readers, cls)
    add_value(cls)


def add_value(cls: type[_Reader]) -> None:
    """Register a class that operations take as the tensor it stands for; its operators are its own."""
    global _handles
    _handles = (*_handles, cls)


def is_handle(x: object) -> bool:
    """Whether ``x`` is a tensor, or stands for one, and so lies on a device of its own."""
    return isinstance(x, _handles)


def _reading(function: Callable[..., object] | property) -> Callable[..., Any] | property:
    if isinstance(function, property):
        getter: Any = function.fget
        return property(lambda self: getter(self._content()), doc=function.__doc__)

    def method(self: Any, *args: object, **kwargs: object) -> Any:
        return function(self._content(), *args, **kwargs)

    method.__doc__ = function.__doc__
    method.__name__ = getattr(function, "__name__", "method")
    return method


def from_array(array: Any, device: Device | None = None, shared: bool = False) -> Tensor:
    """A tensor on ``array`` itself (not copied), which must not change from now on; ``shared``: the user has it too."""
    return Tensor(Buffer(array, leaf(shaped(array.shape, array.dtype, device or current_device()), shared)))


def refuse_detaching(buffer: Buffer, by: str, remedy: str = ".item()") -> None:
    """Raise DetachedError if ``by`` takes the value of ``buffer`` out of a derivative that is being taken.

    Functional transforms (recorders that are ``strict``) follow the value to its last use, so a number made of it would
    be a silent constant; a tape's block may read what it records.  The rule of a function that brings its own replaces
    one derivative, the innermost: its body may read values for that one.
    """
    following: list[bool] = []
    for r in thread.recorders:
        if getattr(r, "replaces_derivative", False):
            del following[-1:]
        elif r.follows(buffer):
            following.append(getattr(r, "strict", False))
    if any(following) and buffer.node.aval.smooth:
        Tensor(buffer).look()  # where no value may be read at all, that is the error
        line = users_line("numpy", "scipy")
        where = f"{line[0]}:{line[1]}: " if line else ""
        error = DetachedError(
            f"{where}{by} takes the value of {buffer.node.aval!r}, which is being differentiated: its derivative would "
            "end there.  Keep it a tensor: tg.stack([...]) for np.array([...]), y = y.at[i].set(v) for y[i] = v, "
            f"functions of tapegrad for those of math; a value meant as a constant is tg.stop_gradient(x){remedy}"
        )
        refuse(line, error)
        raise error


def unwrapped(f: Callable[..., T], *args: object) -> T:
    """Return ``f(*args)``; where a library hid an error of ours behind one of its own, raise ours.

    NumPy does so where it converts a tensor for ``array[i] = x`` ("setting an array element with a sequence"), and for
    ``array.flat[i] = x`` it does not even keep the error.
    """
    try:
        return f(*args)
    except TapegradError:
        raise
    except Exception as e:
        refused = last_refusal()
        if isinstance(e.__cause__, TapegradError):
            raise e.__cause__.with_traceback(e.__traceback__) from None
        lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(e.__traceback__)]
        if refused is None or refused[0] not in lines:
            raise
        _, error, message = refused
        raise error(message).with_traceback(e.__traceback__) from None


def materialize(*tensors: Tensor) -> None:
    """Evaluate several tensors now, those that share work in one kernel."""
    realize(t._buffer for t in tensors)


identity_p = elementwise(
    "identity",
    infer=lambda x: x,
    impl=lambda xp, out, x: xp.copyto(out, x),
    partials=[1],
    view=True,
    cxx="{x}",
    doc="The same value, followed by tapes as a value of its own.",
)


def identity_of(x: Tensor) -> Tensor:
    """A new tensor of the same value, which tapes follow separately; it takes no kernel and no bytes."""
    buffer = x._buffer
    aval = buffer.node.aval
    site = identity_p.memo.get(aval)
    if site is None:
        site = identity_p.memo[aval] = Site(identity_p, (aval,), aval, False)
    return Tensor(thread.executor.apply(Node(identity_p, NO_PARAMS, aval, site), (buffer,)))


def alias(buffer: Buffer) -> Buffer:
    """A view of all of ``buffer`` (evaluated if need be), with a node of its own."""
    out = Buffer(array_of(buffer), leaf(buffer.node.aval), base=buffer.root())
    tracking.current.made(out.node, (buffer,), out)
    for batch in thread.batches:
        batch.aliased(buffer, out)
    return out


def device_of(x: object) -> Device:
    """The default device of a tensor of ``x``: the device of an array in CUDA memory, else the current device."""
    index = cuda_index(x)
    return current_device() if index is None else asdevice(f"cuda:{index}")


def convert(x: object, dtype: object = None) -> Tensor:
    """``x`` as a tensor: a tensor itself, a variable's present value, or a copy of an array, number or sequence.

    Raises NotATensorError.
    """
    if isinstance(x, Tensor):
        return x
    if isinstance(x, _handles):
        content: Tensor = x._content()  # type: ignore[attr-defined]
        return content
    return operand(x, device_of(x), dtype)


def operand(x: object, device: Device, dtype: object = None, alone: bool = False) -> Tensor:
    """An array, number or nested sequence as a tensor on ``device``; uses of one array with one content share a copy.

    ``alone``: as a value of its own, though in the same memory.  Raises NotATensorError.
    """
    if not is_array(x) or (dtype is not None and x.dtype != dtype):  # type: ignore[attr-defined]
        return upload(x, device, dtype)
    copy, shared = thread.executor.operands.copy(x, device, lambda: upload(x, device)._buffer)
    return Tensor(alias(copy) if shared and alone else copy)


def upload(x: object, device: Device, dtype: object = None, copy: bool = True, shared: bool = False) -> Tensor:
    """An array, number or nested sequence as a tensor on ``device``; ``shared``: the user has access to its memory.

    Raises NotATensorError.
    """
    return from_array(thread.executor.device(device).array(x, dtype, copy), device, shared)
