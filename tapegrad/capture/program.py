"""Programs: the tasks of one call of a function, in order, and the memory that they read and write.

A *slot* is an allocation of the call: an argument, what a variable holds, a constant, a live number, or what a task
made.  A *view* is a part of a slot.  Views that share bytes name one slot: nobody has to follow who is a view of what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any, NamedTuple

from tapegrad.core.aval import Shape, ShapedArray
from tapegrad.core.cell import Cell
from tapegrad.device import CPU, Device
from tapegrad.device.types import Array, DType
from tapegrad.engine.task import Call, Task

SMALL = 32 * 1024
"""Bytes: arguments, results and variables of at most so many are copied for each replay."""


class Kind(Enum):
    """Where the bytes of a slot come from."""

    ARGUMENT = "argument"
    VARIABLE = "variable"
    CONSTANT = "constant"
    NUMBER = "number"
    MADE = "made"


@dataclass(eq=False)
class Slot:
    """One allocation of ``nbytes``.

    ``source``: of an argument its position among the tensors given, of a variable its cell, of a constant the array,
    of a live number who tells it, and its dtype.  ``first``, ``last``: the steps that use it first and last.
    ``device``: where it lies, if not where the program does: numbers that a program on a GPU leaves on the host.
    """

    kind: Kind
    nbytes: int
    source: Any = None
    first: int = 0
    last: int = -1
    device: Device | None = None


class View(NamedTuple):
    """A part of a slot: where it begins (bytes from the slot's beginning), and how it lies."""

    slot: Slot
    offset: int
    shape: Shape
    strides: tuple[int, ...]
    dtype: DType

    @property
    def order(self) -> tuple[int, ...] | None:
        """The strides; None: C-contiguous."""
        expected = self.dtype.itemsize
        for n, s in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and s != expected:
                return self.strides if 0 not in self.shape else None
            expected *= n
        return None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its slot, C-contiguous."""
        return not self.offset and self.order is None and prod(self.shape) * self.dtype.itemsize == self.slot.nbytes


@dataclass(eq=False)
class Step:
    """One task of the program.

    ``calls(reads, writes, temporaries)``: what does it on arrays.  ``shares``: whether a write may take the place of a
    read that ends here.  ``effect``: whether it is done though nobody reads what it writes (a check of values).
    ``once``: whether it is done once and no more (it calls a function of the user's).  ``cost``: what it takes, in
    bytes moved (``costs.py``).  ``number``: which task of the captured call it is; a step that does it
    again has the same.
    """

    names: tuple[str, ...]
    reads: Sequence[View]
    writes: Sequence[View]
    temporaries: Sequence[View]
    calls: Callable[[Sequence[Array], list[Array], list[Array]], list[Call]]
    shares: bool = False
    effect: bool = False
    place: tuple[str, int] | None = None
    made: tuple[int, Task] | None = None
    """The number and the task of results of which only the library knows how they lie (see ``Layouts``)."""
    errors: Any = None
    """How floating-point errors are treated (see ``device/float_errors.py``); None: as the caller treats them."""
    once: bool = False
    cost: float = 1.0
    number: int = 0
    again: bool = False
    """Whether it was done before."""
    same: Hashable = None
    """The function that it applies: what is equal gives equal bits of equal values.  None: it is not known."""
    moves: Sequence[tuple[int, int]] = ()
    """Of each kernel, as the ledger counts them: the bytes that it reads and writes."""
    phase: int = 0
    """What the captured call was doing (``tracing/phase.py``)."""
    over: Callable[..., Callable[[Array], object]] | None = None
    """Where the result is the first array read, but for some elements: see ``Function`` (``engine/lowering.py``)."""
    outside: str = ""
    """Why its calls are no part of a CUDA graph; empty: they may be."""


Layouts = dict[int, dict[int, tuple[int, ...]]]
"""Strides of results that do not lie as a dry run expects: by the number of the task, and of the result."""


class Output(NamedTuple):
    """A leaf of the result: a view to copy out, or what is given as it is."""

    view: View | None
    aval: ShapedArray | None
    value: Any = None
    argument: int | None = None

    def moved(self, now: Callable[[View], View]) -> Output:
        """The same, of what ``now`` tells of its view."""
        return self if self.view is None else self._replace(view=now(self.view))


class Over(NamedTuple):
    """Some elements of a variable that are new: ``call`` on ``reads`` gives what writes them into its memory.

    The new elements are read last.
    """

    names: tuple[str, ...]
    call: Callable[..., Callable[[Array], object]]
    reads: tuple[View, ...]


class Write(NamedTuple):
    """What the call leaves in a cell: a variable's new value, or a random stream's key and position.

    ``over``: the value is that of ``view``, the variable's old one, but for some elements.
    """

    cell: Cell
    owner: Any
    view: View | None
    aval: ShapedArray | None
    content: Any = None
    over: Over | None = None

    @property
    def views(self) -> tuple[View, ...]:
        """What it reads of the program."""
        given = () if self.view is None else (self.view,)
        return given if self.over is None else (*given, *self.over.reads)

    def moved(self, now: Callable[[View], View]) -> Write:
        """The same, of what ``now`` tells of each of ``views``, in their order."""
        view = None if self.view is None else now(self.view)
        over = None if self.over is None else self.over._replace(reads=tuple(map(now, self.over.reads)))
        return self._replace(view=view, over=over)


@dataclass(eq=False)
class Program:
    """What a call does: its steps, the structure and leaves of its result, and what it writes to cells."""

    steps: list[Step]
    result: Any
    outputs: list[Output]
    writes: list[Write]
    arguments: list[View]
    reads: list[tuple[Cell, Any, View]]
    """The variables that it reads: cell, owner, and how they lie."""
    streams: list[Any] = field(default_factory=list)
    """The random streams that it draws from."""
    asked: Sequence[Any] = ()
    """What its live numbers ask for, each with the answer (``functools.cache``) that a replay begins by dropping."""
    device: Device = CPU
    """Where all of it lies."""
    afterwards: Sequence[Callable[[], object]] = ()
    """What each call tells of, once its tasks are done: that a step of an optimizer has ended."""
    name: str = ""
    """That of the function."""
    plain: Program | None = None
    """The program that a plan has made this one of, to keep a budget."""
    limited: bool = False
    """Whether a budget limits what it takes, so that lowering must not make its arena larger."""

    @property
    def communicates(self) -> bool:
        """Whether other processes take part in a step: it is done once, also where nobody reads what it writes."""
        return any(step.effect and step.once for step in self.steps)


def pruned(program: Program) -> Program:
    """The program without steps whose results nobody reads; lifetimes of slots are those of its steps."""
    needed = {id(v.slot) for v in results(program)}
    steps: list[Step] = []
    for step in reversed(program.steps):
        if step.effect or any(id(v.slot) in needed for v in step.writes):
            steps.append(step)
            needed.update(id(v.slot) for v in step.reads)
            needed.update(id(v.slot) for v in step.writes)
    program.steps = steps[::-1]
    _find_lifetimes(program)
    return program


def in_place(program: Program) -> Program:
    """The program that writes some elements of large variables, where it would write a copy with them.

    They are written with all else, when the tasks are done; so nobody else may read the copy.
    """
    uses = Counter(id(v.slot) for step in program.steps for v in step.reads)
    uses.update(id(v.slot) for v in results(program))
    makers = {id(step.writes[0].slot): step for step in program.steps if step.over is not None}
    for i, write in enumerate(program.writes):
        step = None if write.view is None or not write.view.is_whole else makers.get(id(write.view.slot))
        if step is None or uses[id(step.writes[0].slot)] > 1:
            continue
        table, *others = step.reads
        call: Any = step.over
        if table.slot.kind is Kind.VARIABLE and table.slot.source is write.cell and table.slot.nbytes > SMALL:
            program.writes[i] = write._replace(view=table, over=Over(step.names, call, tuple(others)))
    return program


def results(program: Program) -> Iterable[View]:
    """What is copied out of the program: leaves of the result, and new values of variables."""
    yield from (o.view for o in program.outputs if o.view is not None)
    for write in program.writes:
        yield from write.views


def _find_lifetimes(program: Program) -> None:
    """A slot lives from the first step that uses it to the last one; what is given out, to the end."""
    end = len(program.steps)
    seen: set[int] = set()
    for i, step in enumerate(program.steps):
        for v in (*step.reads, *step.writes, *step.temporaries):
            slot = v.slot
            if id(slot) not in seen:
                seen.add(id(slot))
                slot.first = -1 if slot.kind is Kind.ARGUMENT else i
            slot.last = i
    for v in results(program):
        if id(v.slot) not in seen:
            v.slot.first = -1
        v.slot.last = end
