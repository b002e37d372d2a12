"""Writing some rows of a variable: in its own memory if nobody else can see its value, else in a copy.

A value never changes while anything refers to it: a tensor, an array lent to the user, a tape's record, a node that
waits, a snapshot for a rerun.  So a table of which optimizers change two rows moves two rows; the first time, or while
such a reference lives, it is copied, and the copy is changed from then on.

Another thread that reads the variable in the very moment of a step may find some rows new and others old, where
otherwise it finds the one value or the other: let threads that share a table take a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from tapegrad.core.buffer import Buffer
from tapegrad.core.cell import Cell
from tapegrad.core.node import SHARED
from tapegrad.core.references import elsewhere
from tapegrad.core.state import thread
from tapegrad.device import Device, abstract_array, cuda_types, multi_tensor, traffic
from tapegrad.device.types import Array
from tapegrad.engine.lowering import Change, Function
from tapegrad.engine.realize import array_of
from tapegrad.ops.dispatch import barrier
from tapegrad.ops.elementwise.arithmetic import maximum
from tapegrad.ops.index import _cuda_index
from tapegrad.ops.index.indexing import take_p
from tapegrad.ops.updates import Formula, of_tensors, with_decay
from tapegrad.tensor import Tensor, materialize
from tapegrad.variable import Variable

_LEAST = 512
"""Bytes.  The memory of smaller values may be lent without a reference (``Tensor.numpy``)."""


def update_rows(
    formula: Formula, tables: Sequence[Variable], rows: Tensor, gradient: Tensor, shrink: float | None
) -> None:
    """Give rows of a variable and of its slots, ``tables``, new values: ``gradient[k]`` is that of row ``rows[k]``.

    A row of -1 is none, others occur once.  On CUDA one kernel reads and writes these rows alone; else they are read,
    updated as a tensor, and written.
    """
    if not _by_kernel(formula, tables, rows, gradient, shrink):
        x, *state = (read_rows(t, rows) for t in tables)
        for table, new in zip(tables, of_tensors(formula, (x, gradient, *state), shrink), strict=True):
            write_rows(table, rows, new)


def _by_kernel(
    formula: Formula, tables: Sequence[Variable], rows: Tensor, gradient: Tensor, shrink: float | None
) -> bool:
    """The same in one launch; False: it is not for these tables."""
    here, kernel, numbers = tables[0].device, formula.of_rows, with_decay(formula.numbers, shrink)
    if kernel is None or here.kind != "cuda" or not thread.executor.changes:
        return False
    if not all(isinstance(x, (int, float)) for x in numbers):  # some come from the device
        return False
    if any(t.nbytes <= _LEAST or t.dtype != gradient.dtype for t in tables) or not gradient.size:
        return False
    materialize(rows, gradient)
    owners = [owner for t in tables if (owner := _owner(t._cell) or _copied(t)) is not None]
    if len(owners) < len(tables):
        return False
    given = [traffic.contiguous(here.xp, array_of(x._buffer)) for x in (gradient, rows)]
    count, width, dtype = rows.size, prod(tables[0].shape[1:]), gradient.dtype

    def launch(*arrays: Array) -> None:
        args = (*arrays, *multi_tensor.scalars(numbers, dtype), cuda_types.long(count))
        _cuda_index.run(thread.executor.device(here), kernel, count, width, dtype, *args)

    g, own = given[0], [owner.array for owner in owners]
    moved = [*given, *(g[...] for _ in own)], [g] * len(own)  # of each table as many bytes as of the gradient
    thread.executor.change(Change(formula.name, here, launch, own, given, moved))
    for table, owner in zip(tables, owners, strict=True):
        table.assign(Tensor(owner))
    return True


def _copied(v: Variable) -> Buffer | None:
    """The owner of the bytes of a variable, which has a copy of its value from now on."""

    def made() -> Tensor:
        content = v._cell.get(v)
        call = lambda out, x: v.device.xp.copyto(out, x)
        copy = Function("copy", [content.node.aval], call, [array_of(content)])
        return Tensor(thread.executor.values(copy)[0])

    v.assign(made())
    return _owner(v._cell)


def read_rows(v: Variable, rows: Tensor) -> Tensor:
    """Rows of a variable's value; of the number -1, which stands for none, any."""
    return barrier(take_p, Tensor(v._cell.get(v)), maximum(rows, 0), axis=0)


def write_rows(v: Variable, rows: Tensor, new: Tensor) -> None:
    """Assign ``v`` its value with ``new[k]`` in place of row ``rows[k]``; a row of -1 is none, others occur once."""
    materialize(rows, new)
    reads = [array_of(rows._buffer), array_of(new._buffer)]
    device, aval = v.device, v._cell.get(v).node.aval
    owner = _owner(v._cell) if thread.executor.changes else None
    over = partial(_writing, device)
    if owner is not None:
        write = lambda table, rows, new: over(rows, new)(table)
        thread.executor.change(Change("rows_update", device, write, [owner.array], reads, (reads, reads[1:])))
        v.assign(Tensor(owner))
        return

    def copied(out: Array, table: Array, rows: Array, new: Array) -> None:
        device.xp.copyto(out, table)
        over(rows, new)(out)

    task = Function("rows_update", [aval], copied, [array_of(v._cell.get(v)), *reads], over=over)
    v.assign(Tensor(thread.executor.values(task)[0]))


def _writing(device: Device, rows: Array, new: Array) -> Callable[[Array], object]:
    """What writes rows into a table."""
    if device.kind == "cuda":
        return lambda table: _cuda_index.put_rows(thread.executor.device(device), table, rows, new)
    there = rows >= 0
    places, values = rows[there], new[there]

    def write(table: Array) -> None:
        table[places] = values

    return write


def _owner(cell: Cell) -> Buffer | None:
    """The buffer that owns the bytes of a cell's content, if nothing but the cell refers to them."""
    is_view = cell.get().base is not None
    if not _is_whole(cell.get()) or _references(cell) != _ALONE[is_view]:
        return None
    owner: Buffer = cell.get().root()
    return owner


def _is_whole(content: Buffer) -> bool:
    """Whether a variable's content is all of the memory of an array of the engine's own."""
    if content.array is None:
        return False
    root, array, aval = content.root(), content.array, content.node.aval
    if root.array is not array or root.node.params is SHARED or aval.nbytes <= _LEAST:
        return False
    if root.is_recomputable:  # and so would lose what is written
        return False
    if not array.flags.c_contiguous or abstract_array.is_abstract(array) or aval.device.kind != "cpu":
        return bool(array.flags.c_contiguous)
    return bool(array.flags.writeable) and not hasattr(array.base, "shape")  # no part of another array


def _references(cell: Cell) -> list[int]:
    """How often the content of a cell, the owner of its bytes, which may be itself, and the array are referred to."""
    content = cell.get()
    root = content.base or content
    return elsewhere((content, root, root.array))


class _Stand:
    """As buffers look."""

    def __init__(self, array: object, base: object) -> None:
        self.array, self.base = array, base


def _held_once(is_view: bool) -> Cell:
    array = object()
    return Cell(_Stand(array, _Stand(array, None) if is_view else None))


_ALONE = {is_view: _references(_held_once(is_view)) for is_view in (False, True)}
"""The same of a content to which only its cell refers: of one that owns its bytes, and of a view of all of another."""
