"""The memory of a program: one arena, and small places outside of it for live numbers and small variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tapegrad.core import account
from tapegrad.core.aval import ShapedArray, shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import leaf
from tapegrad.device import CPU, dtypes
from tapegrad.device.types import Array, DType
from tapegrad.program import arena
from tapegrad.program.program import Kind, Program, Slot, View

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""


class Memory:
    """Where the slots of a program lie.  The ledger counts the arena as one entry."""

    def __init__(self, program: Program, plan: Callable[[Program, int], arena.Layout] = arena.plan) -> None:
        self.layout = plan(program, ALIGNMENT)
        aval = shaped((self.layout.nbytes + ALIGNMENT,), dtypes.asdtype("uint8"), CPU)
        self._arena: Buffer = account.current.in_room((aval,), ("function",), _bytes, aval)
        account.current.labelled(self._arena, "activation", "the arena of a captured function")
        memory: Array = self._arena.array
        self._bytes = memory[-memory.ctypes.data % ALIGNMENT :][: self.layout.nbytes]
        self._bases: dict[int, Array] = {}
        self._views: dict[Any, Array] = {}  # one array for all views that lie alike: fewer objects stay in the cache

    def own(self, slot: Slot, dtype: DType) -> Array:
        """Memory of a slot's own, outside of the arena."""
        array = self._bases[id(slot)] = CPU.xp.zeros(slot.nbytes // dtype.itemsize, dtype)
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
            return _on(self._bases[id(slot)], view.offset, view)
        at = self.layout.offsets[id(slot)] + view.offset
        key = (at, *view[2:])
        array = self._views.get(key)
        if array is None:
            array = self._views[key] = _on(self._bytes, at, view)
        return array


def _bytes(aval: ShapedArray) -> Buffer:
    return Buffer(CPU.empty(aval.shape, aval.dtype), leaf(aval))


def laid_like(array: Array) -> Array:
    """An array that lies as ``array`` does, or C-contiguous where that would take more memory than the elements do."""
    reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)] if array.size else []
    before, behind = -sum(s for s in reach if s < 0), sum(s for s in reach if s > 0)
    if array.flags.c_contiguous or before + behind + array.itemsize > array.nbytes:
        return CPU.empty(array.shape, array.dtype)
    memory = CPU.empty(((before + behind) // array.itemsize + 1,), array.dtype)
    return CPU.xp.ndarray(array.shape, array.dtype, memory, before, array.strides)


def _in_order(array: Array) -> Array:
    """The same memory from its lowest address on, C-contiguous where ``array`` has no gaps."""
    forward = array[tuple(slice(None, None, -1 if s < 0 else 1) for s in array.strides)]
    once = forward[tuple(slice(0, None if s else 1) for s in array.strides)]
    return once.transpose(sorted(range(array.ndim), key=lambda axis: -once.strides[axis]))


def _on(memory: Array, offset: int, view: View) -> Array:
    if 0 in view.shape:
        return CPU.xp.empty(view.shape, view.dtype)
    return CPU.xp.ndarray(view.shape, view.dtype, memory, offset, view.strides)
