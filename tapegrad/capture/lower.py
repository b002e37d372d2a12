"""Lowering: the functions that evaluate a tile become steps of their own, and what is there already is not recomputed.

A region's interior is computed in each region that needs it, since no eager run knows who will read it.  A program
knows: two steps that apply the same function to the same values give the same bits, so the second is left out, if there
is room to keep the value until then without a larger arena, or in a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from tapegrad.capture import arena
from tapegrad.capture.external_buffers import Outside
from tapegrad.capture.program import Kind, Program, Slot, Step, View, pruned, results
from tapegrad.device import CPU
from tapegrad.device.abstract_array import AbstractArray
from tapegrad.device.types import Array
from tapegrad.engine.task import Call, into
from tapegrad.errors import DryRunError

_XP = CPU.xp
_UNPLANNED = 2**20
"""Bytes of values in all: smaller arenas are not compared, but for a budget's."""
FREE = 2**22
"""Bytes that an arena may grow to so that nothing is made twice, but for a budget's: what a core's caches hold."""


def lowered(program: Program, alignment: int, outside: Callable[[Program], Collection[int]]) -> Program:
    """A program of the same bits, with slots and lifetimes of its own, whose arena is not larger, or small.

    ``outside``: which slots of a program do not lie in its arena.
    """
    lowering = _Lowering(program)
    apart = pruned(lowering.program())
    if not program.limited and sum(slot.nbytes for slot in lowering.made) < _UNPLANNED:
        return _without_repeats(apart, inf, alignment, ())
    most = arena.plan(program, alignment).nbytes
    most = most if program.limited else max(most, FREE)
    for room in (inf, most, 0):
        candidate = _without_repeats(pruned(apart), room, alignment, outside(apart))
        if arena.plan(candidate, alignment, outside(candidate), most).nbytes <= most:
            return candidate
    return pruned(program)


class _Part(NamedTuple):
    """One function of a tile: what it reads and writes, the calls on other arrays, and what is equal for equal ones."""

    reads: Sequence[Any]
    write: Any
    calls: Callable[[Sequence[Array], list[Array], list[Array]], list[Call]]
    same: Hashable
    in_place: bool


class _Lowering:
    """Walks the steps of a program once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._slots: dict[int, Slot] = {}
        self._constants: dict[Any, Slot] = {}
        self.made: list[Slot] = []
        self._steps: list[Step] = []

    def program(self) -> Program:
        """The lowered program."""
        program = self._program
        arguments = [self._view(v) if id(v.slot) in self._slots else self._new(v) for v in program.arguments]
        for step in program.steps:
            self._add(step)
        outputs = [o.moved(self._view) for o in program.outputs]
        writes = [w.moved(self._view) for w in program.writes]
        return replace(program, steps=self._steps, outputs=outputs, writes=writes, arguments=arguments)

    def _view(self, v: View) -> View:
        slot = self._slots.get(id(v.slot))
        return v if slot is None else v._replace(slot=slot)

    def _new(self, v: View) -> View:
        slot = self._slots[id(v.slot)] = Slot(v.slot.kind, v.slot.nbytes, v.slot.source, device=v.slot.device)
        self.made.append(slot)
        return v._replace(slot=slot)

    def _add(self, step: Step) -> None:
        parts = self._parts(step)
        if parts is None:
            reads = [self._view(v) for v in step.reads]
            writes, own = [self._new(v) for v in step.writes], [self._new(v) for v in step.temporaries]
            self._steps.append(replace(step, reads=reads, writes=writes, temporaries=own, number=len(self._steps)))
            return
        for reads, write, part in parts:
            self._steps.append(replace(
                step, reads=reads, writes=[write], temporaries=(), calls=part.calls, shares=part.in_place,
                cost=step.cost / len(parts), number=len(self._steps), same=part.same,
            ))  # fmt: skip

    def _parts(self, step: Step) -> list[tuple[list[View], View, _Part]] | None:
        """The steps of which a step consists; None: it stays whole."""
        if step.effect or step.once or step.made is not None:
            return None
        slots = {id(v.slot): v.slot for v in (*step.reads, *step.writes, *step.temporaries)}
        there = [slot for slot in slots.values() if slot.kind is not Kind.CONSTANT]
        standing = Outside(there)
        arrays = [
            [v.slot.source if v.slot.kind is Kind.CONSTANT else standing.stand_in(v) for v in views]
            for views in (step.reads, step.writes, step.temporaries)
        ]
        try:
            calls = step.calls(*arrays)
        except DryRunError:  # it looks into the arrays when the calls are made
            return None
        parts = [_part(f, args) for f, args in calls]
        lowered, written = [], dict[int, Slot]()

        def view(x: Any) -> View:
            if type(x) is not AbstractArray:
                lies = x.ctypes.data, x.shape, x.strides, x.dtype
                slot = self._constants.setdefault(lies, Slot(Kind.CONSTANT, x.nbytes, x))
                return View(slot, 0, x.shape, x.strides, x.dtype)
            number, offset = standing.place(x)
            slot = written.get(number) or self._slots.get(id(there[number]), there[number])
            return View(slot, offset, x.shape, x.strides, x.dtype)

        owned = {id(v.slot) for v in step.temporaries}
        for part in parts:
            if part is None:
                return None
            reads, write = [view(x) for x in part.reads], view(part.write)
            number, _ = standing.place(part.write)
            old = there[number]
            if not write._replace(slot=old).is_whole or (number in written and id(old) not in owned):
                return None
            slot = written[number] = Slot(Kind.MADE, old.nbytes)
            lowered.append((reads, write._replace(slot=slot), part))
        for number, slot in written.items():
            self._slots[id(there[number])] = slot
            self.made.append(slot)
        return lowered


def _part(f: Any, args: tuple[Any, ...]) -> _Part | None:
    """What a call does; None: it is not known, or NumPy may round otherwise where the result overwrites an operand."""
    if isinstance(f, _XP.ufunc):
        part = _applied(f, args[:-1], args[-1])
    elif isinstance(f, partial) and not f.args and list(f.keywords) == ["out"]:
        part = _applied(f.func, args, f.keywords["out"])
    elif isinstance(getattr(f, "__self__", None), _XP.ufunc) and f.__name__ == "reduce" and len(args) == 5:
        x, axes, dtype, out, keepdims = args
        reduce = lambda reads, writes, _: [(f, (*reads, axes, dtype, *writes, keepdims))]
        part = _Part((x,), out, reduce, (f.__self__, axes, dtype, keepdims), False)
    else:
        return None
    arrays = (*part.reads, part.write)
    known = type(part.write) is AbstractArray and all(
        isinstance(x, _XP.ndarray) and x.dtype.kind != "c" for x in arrays
    )
    return part if known and (part.write.size > 1 or not part.in_place) else None


def _applied(f: Any, reads: Sequence[Any], out: Any) -> _Part:
    """An elementwise function; arrays that lie alike without gaps have one axis, as in any other region."""
    if all(not x.ndim or (x.shape == out.shape and x.flags.c_contiguous) for x in (*reads, out)) and out.ndim:
        reads, out = [x.reshape(-1) if x.ndim else x for x in reads], out.reshape(-1)
    return _Part(reads, out, lambda reads, writes, _: [into(f, reads, writes[0])], f, isinstance(f, _XP.ufunc))


def _without_repeats(program: Program, most: float, alignment: int, outside: Collection[int]) -> Program:
    """The program without steps whose value is there, or can be kept until then with ``most`` bytes alive at once."""
    end = len(program.steps)
    live = _XP.zeros(end + 3, _XP.int64)
    slots = {id(v.slot): v.slot for s in program.steps for v in (*s.reads, *s.writes, *s.temporaries)}
    size = lambda slot: -(-slot.nbytes // alignment) * alignment
    for slot in [*slots.values(), *(v.slot for v in results(program))]:
        if arena.in_arena(slot) and slots.pop(id(slot), None) is not None and id(slot) not in outside:
            live[slot.first + 1] += size(slot)
            live[slot.last + 2] -= size(slot)
    live = _XP.cumsum(live)
    instead: dict[int, Slot] = {}
    known: dict[Hashable, Slot] = {}
    steps: list[Step] = []

    def now(v: View) -> View:
        slot = instead.get(id(v.slot))
        return v if slot is None else v._replace(slot=slot)

    for step in program.steps:
        reads = [now(v) for v in step.reads]
        if step.same is not None:
            (write,) = step.writes
            key = step.same, repr(step.errors), write[1:], tuple((_value(v), *v[1:]) for v in reads)
            there = known.get(key)
            if there is not None:
                kept = slice(there.last + 2, write.slot.first + 1)
                if kept.stop <= kept.start or live[kept].max() + size(there) <= most:
                    live[kept] += size(there)
                    there.last = max(there.last, write.slot.last)
                    instead[id(write.slot)] = there
                    continue
            known[key] = write.slot
        steps.append(replace(step, reads=reads))
    outputs = [o.moved(now) for o in program.outputs]
    writes = [w.moved(now) for w in program.writes]
    return pruned(replace(program, steps=steps, outputs=outputs, writes=writes))


def _value(v: View) -> Hashable:
    """What tells a value: its slot, or, of a number that is a constant, its bytes."""
    return v.slot.source.tobytes() if v.slot.kind is Kind.CONSTANT and not v.shape else id(v.slot)
