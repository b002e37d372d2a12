"""The memory of a program: one arena, and small places outside of it for live numbers and small variables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from tapegrad.capture import arena
from tapegrad.capture.program import Kind, Program, Slot, View
from tapegrad.core import tracking
from tapegrad.core.aval import Shape, ShapedArray, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import ARENA, NO_PARAMS, Node, leaf
from tapegrad.device import CPU, Device, cuda_types, dtypes
from tapegrad.device.types import Array, DType
from tapegrad.engine.realize import array_of
from tapegrad.tensor import Tensor

_BYTE = dtypes.asdtype("uint8")
ALIGNMENT, GPU_ALIGNMENT = 64, 256
"""Bytes of which offsets in an arena are multiples: a cache line; on a GPU what its own allocations have."""
_NUMBERS_APART = 16
"""Bytes: no number lies across the border of two words."""


def alignment(device: Device) -> int:
    """That of a device's arenas."""
    return GPU_ALIGNMENT if device.lazy else ALIGNMENT


Planning = Callable[[Program, int, Collection[int]], arena.Layout]


class OversizeError(Exception):
    """A program, which needs ``nbytes``, does not fit into the arena that it was to share."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"an arena of {nbytes} bytes is needed")
        self.nbytes = nbytes


class Arena:
    """The arena of programs that never run at once: none keeps anything there between two runs."""

    def __init__(self) -> None:
        self._buffer: Buffer | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return 0 if self._buffer is None else self._buffer.node.aval.nbytes

    def lend(self, nbytes: int, device: Device) -> Buffer:
        """Return at least so many bytes, one entry of the ledger.  Raises OversizeError if there are fewer."""
        if self._buffer is None:
            aval = shaped((nbytes,), _BYTE, device)
            with tracking.current.reserved((aval,), ("function",)):
                self._buffer = _arena(aval)
            tracking.current.label(self._buffer, "activation", "the arena of a captured function")
        elif self.nbytes < nbytes:
            raise OversizeError(nbytes)
        return self._buffer

    def release(self) -> None:
        """Forget the bytes: they go with the programs that lie there."""
        self._buffer = None


class Memory:
    """Where the slots of a program lie, but for those ``outside``; ``shared``: the arena; None: one of its own."""

    def __init__(self, program: Program, plan: Planning, outside: Collection[int], shared: Arena | None = None) -> None:
        self.device = device = program.device
        align = alignment(device)
        self.layout = plan(program, align, outside)
        self.arena = (shared or Arena()).lend(self.layout.nbytes + align, device)
        memory: Array = self.arena.array
        at = cuda_types.address(memory)
        self._bytes = memory[-at % align :][: self.layout.nbytes]
        self._bases: dict[int, Array] = {}
        self._views: dict[Any, Array] = {}  # one array for all views that lie alike: fewer objects stay in the cache

    def own(self, slot: Slot, dtype: DType) -> Array:
        """Memory of a slot's own, outside of the arena."""
        array = self._bases[id(slot)] = (slot.device or self.device).empty((slot.nbytes // dtype.itemsize,), dtype)
        array.fill(0)
        return array

    def put(self, slot: Slot, array: Array) -> None:
        """A large variable lies in ``array`` now."""
        self._bases[id(slot)] = _in_order(array)

    def array(self, view: View) -> Array:
        """The array that is the view."""
        slot = view.slot
        if slot.kind is Kind.CONSTANT:
            return slot.source
        if not arena.in_arena(slot):
            return _on(slot.device or self.device, self._bases[id(slot)], view.offset, view)
        at = self.layout.offsets[id(slot)] + view.offset
        key = (at, *view[2:])
        array = self._views.get(key)
        if array is None:
            array = self._views[key] = _on(self.device, self._bytes, at, view)
        return array


class Numbers:
    """The live numbers of a program, beside each other, so that one copy brings them to the device."""

    def __init__(self, slots: Sequence[Slot], asked: Sequence[Any], memory: Memory) -> None:
        self._device, self._asked = memory.device, asked
        places: list[int] = []
        end = 0
        for slot in slots:
            places.append(end)
            end += -(-slot.nbytes // _NUMBERS_APART) * _NUMBERS_APART
        self._host = CPU.xp.zeros(end, _BYTE)
        self._there = self._host if self._device is CPU else self._device.empty((end,), _BYTE)
        self._targets: list[tuple[Array, Callable[[], Any]]] = []
        for slot, at in zip(slots, places, strict=True):
            now, dtype = slot.source
            self._targets.append((self._host[at : at + slot.nbytes].view(dtype), now))
            memory.put(slot, (self._host if slot.device is CPU else self._there)[at : at + slot.nbytes])

    def fill(self) -> None:
        """All numbers are the present ones."""
        for asked in self._asked:
            asked.cache_clear()
        for target, now in self._targets:
            target[...] = now()
        if self._there is not self._host and self._targets:
            self._device.send(self._there, self._host)


def _on(device: Device, memory: Array, offset: int, view: View) -> Array:
    if 0 in view.shape:
        return device.empty(view.shape, view.dtype)
    return device.placed(memory, offset, view.shape, view.dtype, view.strides)


def _arena(aval: ShapedArray) -> Buffer:
    return Buffer(aval.device.empty(aval.shape, aval.dtype), Node(ARENA, NO_PARAMS, aval))


def fresh(aval: ShapedArray) -> Buffer:
    """A buffer like ``aval`` without contents yet, C-contiguous."""
    return Buffer(aval.device.empty(aval.shape, aval.dtype), leaf(aval))


def laid_like(array: Array, device: Device) -> Array:
    """An array that lies as ``array`` does, or C-contiguous where that would take more memory than the elements do."""
    if array.flags.c_contiguous:
        return device.empty(array.shape, array.dtype)
    reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)] if array.size else []
    before, behind = -sum(s for s in reach if s < 0), sum(s for s in reach if s > 0)
    if before + behind + array.itemsize > array.nbytes:
        return device.empty(array.shape, array.dtype)
    memory = device.empty(((before + behind) // array.itemsize + 1,), array.dtype)
    return device.placed(memory, before, array.shape, array.dtype, array.strides)


def _in_order(array: Array) -> Array:
    """The memory of ``array`` from its lowest address on, in the order of addresses.

    NumPy places arrays in C-contiguous memory alone: there the gaps between elements are part of it, as bytes.
    """
    forward = array[tuple(slice(None, None, -1 if s < 0 else 1) for s in array.strides)]
    once = forward[tuple(slice(0, None if s else 1) for s in array.strides)]
    ordered = once.transpose(sorted(range(array.ndim), key=lambda axis: -once.strides[axis]))
    if ordered.flags.c_contiguous or not isinstance(ordered, CPU.xp.ndarray):
        return ordered
    reach = sum((n - 1) * s for n, s in zip(ordered.shape, ordered.strides, strict=True))
    first: Array = ordered[(slice(0, 1),) * ordered.ndim].reshape(-1).view(_BYTE)
    spanning: Array = CPU.xp.lib.stride_tricks.as_strided(first, (reach + ordered.itemsize,), (1,))
    return spanning


class Bits(NamedTuple):
    """The bits of an array, of which no copy is held."""

    shape: Shape
    dtype: str
    digest: bytes


def bits_of(x: Any) -> Any:
    """Those of a tensor or a buffer; anything else is itself."""
    buffer = x._buffer if type(x) is Tensor else x
    return bits(array_of(buffer), buffer.node.aval) if isinstance(buffer, Buffer) else x


def bits(array: Array, aval: Any) -> Bits:
    """Those of an array, the value of what ``aval`` describes."""
    x = _one_nan(array if isinstance(array, CPU.xp.ndarray) else aval.device.numpy(array))
    return Bits(x.shape, x.dtype.name, blake2b(CPU.xp.ascontiguousarray(x).reshape(-1).view("u1")).digest())


def same_bits(x: Array, y: Array) -> bool:
    """Whether two arrays of NumPy's have the same shape, dtype and bytes, but for which NaN a NaN is."""
    x, y = CPU.xp.ascontiguousarray(_one_nan(x)), CPU.xp.ascontiguousarray(_one_nan(y))
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def _one_nan(x: Array) -> Array:
    """The array with all its NaNs the same: NumPy's own loops differ in which NaN of two operands they return."""
    if x.dtype.kind not in "fcV":
        return x
    nan = x != x
    return CPU.xp.where(nan, CPU.xp.asarray(CPU.xp.nan, x.dtype), x) if nan.any() else x
