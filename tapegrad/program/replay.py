"""Replay: a program bound to memory, as straight-line code over pre-made calls.

Nothing is decided in a replay: each line calls a function on arrays that lie where the plan has put them.  Arguments
and small variables are copied to places of their own, large variables are read where they lie; only when one has got
other memory, the calls that read it are made anew.  What the program writes to variables comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tapegrad.core import account
from tapegrad.core.aval import shaped
from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Cell
from tapegrad.core.live import LiveInt
from tapegrad.core.node import leaf
from tapegrad.device import CPU, dtypes
from tapegrad.device.types import Array, DType
from tapegrad.engine.evaluate import array_of
from tapegrad.engine.work import Call
from tapegrad.program import arena
from tapegrad.program.program import Kind, Program, Slot, View, Write, results
from tapegrad.tensor import Tensor

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""
_SMALL = 32 * 1024
"""Bytes of a variable that is copied for each replay."""
_LINES = 1000
"""Lines of one generated function; compiling takes longer than in proportion to its lines."""


class Replay:
    """A program with its arena and its code."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.layout = arena.plan(program, ALIGNMENT)
        self.runs = 0
        aval = shaped((self.layout.nbytes + ALIGNMENT,), dtypes.asdtype("uint8"), CPU)
        self._arena: Buffer = account.current.in_room((aval,), ("function",), _bytes, aval)
        account.current.labelled(self._arena, "activation", "the arena of a captured function")
        memory: Array = self._arena.array
        self._memory = memory[-memory.ctypes.data % ALIGNMENT :][: self.layout.nbytes]
        self._arrays: dict[int, Array] = {}
        self._numbers = [(self._own(slot, slot.source[1]), slot.source[0]) for slot in self._slots(Kind.NUMBER)]
        used = {id(slot) for slot in self._slots(Kind.ARGUMENT)}
        self._arguments = [(i, self._array(view)) for i, view in enumerate(program.arguments) if id(view.slot) in used]
        small = [(cell, slot) for cell, slot in program.reads if slot.nbytes <= _SMALL]
        self._small = [(cell, self._own(slot, np.dtype(np.uint8))) for cell, slot in small]
        self._large = [(cell, slot) for cell, slot in program.reads if slot.nbytes > _SMALL]
        self._contents: dict[Cell, Buffer] = {}
        self._readers = self._find_readers()
        self._names: dict[str, Any] = {}
        self._bind_variables()
        calls = [self._bind(i) for i in range(len(program.steps))]
        self._blocks = _compiled(calls, self._names)
        self._outputs = [None if o.view is None else self._array(o.view) for o in program.outputs]

    def _slots(self, kind: Kind) -> list[Slot]:
        views = (v for s in self.program.steps for v in (*s.reads, *s.writes))
        return list({id(v.slot): v.slot for v in (*views, *results(self.program)) if v.slot.kind is kind}.values())

    # Binding -------------------------------------------------------------------------------------------------------

    def _own(self, slot: Slot, dtype: DType) -> Array:
        """Memory of a slot's own, outside of the arena."""
        array = self._arrays[id(slot)] = np.zeros(slot.nbytes // dtype.itemsize, dtype)
        return array

    def _array(self, view: View) -> Array:
        """The array that is the view."""
        slot = view.slot
        if slot.kind is Kind.CONSTANT:
            return slot.source
        if arena.in_arena(slot):
            return _on(self._memory, self.layout.offsets[id(slot)] + view.offset, view)
        base = self._arrays[id(slot)]
        if slot.kind is Kind.VARIABLE and not view.offset and (base.shape, base.strides) == (view.shape, view.strides):
            return base
        return _on(base, view.offset, view)

    def _find_readers(self) -> dict[int, list[int]]:
        """The steps that read each variable's slot."""
        readers: dict[int, list[int]] = {}
        for i, step in enumerate(self.program.steps):
            for slot in {id(v.slot): v.slot for v in step.reads if v.slot.kind is Kind.VARIABLE}.values():
                readers.setdefault(id(slot), []).append(i)
        return readers

    def _bind(self, i: int) -> list[Call]:
        """The calls of step ``i``; their functions and arguments get names for the code."""
        step = self.program.steps[i]
        arrays = ([self._array(v) for v in views] for views in (step.reads, step.writes, step.temporaries))
        calls = step.calls(*arrays)
        for k, (f, args) in enumerate(calls):
            self._names[f"f{i}_{k}"] = f
            for n, x in enumerate(args):
                self._names[f"a{i}_{k}_{n}"] = x
        return calls

    def _bind_variables(self) -> list[int]:
        """Variables are read where they lie now; the steps that read one which has moved."""
        moved: list[int] = []
        for cell, slot in self._large:
            content = cell.get()
            if content is not self._contents.get(cell):
                array = array_of(content)
                if not array.flags.c_contiguous:
                    array = np.ascontiguousarray(array)
                if self._arrays.get(id(slot)) is not array:
                    self._arrays[id(slot)] = array
                    moved += self._readers.get(id(slot), ())
                self._contents[cell] = content
        return moved

    # Running -------------------------------------------------------------------------------------------------------

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Any], list[tuple[Write, Any]]]:
        """The leaves of the result, and what is to be written to cells; nothing is written yet."""
        for i in self._bind_variables():
            self._bind(i)
        for cell, target in self._small:
            array = array_of(cell.get())
            target.view(array.dtype).reshape(array.shape)[...] = array
        for position, target in self._arguments:
            target[...] = array_of(tensors[position]._buffer)
        for target, now in self._numbers:
            target[0] = now()
        for stream in self.program.streams:
            stream.key, stream.position = stream.cell.get()
        for block in self._blocks:
            block()
        self.runs += 1
        return self._results(tensors), [(w, self._content(w)) for w in self.program.writes]

    def commit(self, writes: Sequence[tuple[Write, Any]]) -> None:
        """Write to cells, all or none."""
        for write, content in writes:
            write.cell.set(content, write.owner)
            if isinstance(content, Buffer) and write.owner is not None:
                account.current.labelled(content, write.owner.category, write.owner.name)

    def _results(self, tensors: Sequence[Tensor]) -> list[Any]:
        leaves: list[Any] = []
        for output, array in zip(self.program.outputs, self._outputs, strict=True):
            if output.argument is not None:
                leaves.append(tensors[output.argument])
            elif array is None:
                leaves.append(output.value)
            else:
                leaves.append(Tensor(_copied(array, output.aval)))
        return leaves

    def _content(self, write: Write) -> Any:
        if write.view is None:
            return tuple(n.now() if isinstance(n, LiveInt) else n for n in write.content)
        return _copied(self._array(write.view), write.aval)


def _bytes(aval: Any) -> Buffer:
    return Buffer(CPU.empty(aval.shape, aval.dtype), leaf(aval))


def _copied(array: Array, aval: Any) -> Buffer:
    """A buffer of the caller's own with the value of ``array``."""
    return account.current.in_room((aval,), ("function",), _copy, array, aval)


def _copy(array: Array, aval: Any) -> Buffer:
    out = CPU.empty(aval.shape, aval.dtype)
    np.copyto(out, array)
    return Buffer(out, leaf(aval))


def _on(memory: Array, offset: int, view: View) -> Array:
    if not view.nbytes and 0 in view.shape:
        return np.empty(view.shape, view.dtype)
    return np.ndarray(view.shape, view.dtype, memory, offset, view.strides)


def _compiled(calls: Sequence[list[Call]], names: dict[str, Any]) -> list[Callable[[], None]]:
    """Functions that make all calls in order, of so many lines each."""
    lines = [
        f" f{i}_{k}({', '.join(f'a{i}_{k}_{n}' for n in range(len(args)))})"
        for i, made in enumerate(calls)
        for k, (_, args) in enumerate(made)
    ]
    blocks: list[Callable[[], None]] = []
    for start in range(0, len(lines), _LINES):
        code = compile("def block():\n" + "\n".join(lines[start : start + _LINES]), "<program>", "exec")
        exec(code, names)
        blocks.append(names.pop("block"))
    return blocks
