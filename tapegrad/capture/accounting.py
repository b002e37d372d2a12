"""What a replay tells the ledger: the kernels that it runs, what they move, and what lies in its arena at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import partial
from itertools import count
from math import prod
from typing import Any
from weakref import ref

from tapegrad.capture.arena import in_arena
from tapegrad.capture.program import Kind, Program, Slot, Step, View, results
from tapegrad.core.buffer import Buffer
from tapegrad.tracing.metrics import Replayed
from tapegrad.tracing.phase import BACKWARD, OPTIMIZER
from tapegrad.tracing.program_summary import Contents, Part, Task
from tapegrad.tracing.program_summary import Slot as ContentsSlot

_numbers = count()
_BOUND = {Kind.VARIABLE: "parameter", Kind.CONSTANT: "input", Kind.NUMBER: "temporary"}


def report_of(
    program: Program, replayed: Program, memory: Buffer, outside: Collection[int], nbytes: int, align: int
) -> Replayed:
    """The figures of one replay of ``program``, as an eager run is counted.

    ``replayed``: what is done (see ``lower``), in the arena ``memory``, of ``nbytes``, in which the slots ``outside``,
    by their ids, do not lie; offsets there are multiples of ``align``.
    """
    kernels = moved = again = 0
    nodes: Counter[str] = Counter()
    for step in program.steps:
        if step.moves:
            nodes.update(step.names)
            kernels += len(step.moves)
            moved += sum(read + written for read, written in step.moves)
            again += step.again
    for over in (write.over for write in program.writes if write.over is not None):  # of which there are no steps
        given = [prod(v.shape) * v.dtype.itemsize for v in over.reads]
        nodes.update(over.names)
        kernels += 1
        moved += sum(given) + given[-1]
    plain = program if program.plain is None else program.plain
    contents = partial(contents_of, replayed, align, None if plain is replayed else plain, outside, nbytes)
    return Replayed(kernels, moved, nodes, again, at_the_peak(program), next(_numbers), ref(memory), contents)


def contents_of(
    program: Program, align: int, plain: Program | None = None, outside: Collection[int] = (), nbytes: int = 0
) -> Contents:
    """What a program, made of ``plain``, consists of; for ``outside`` and ``nbytes`` see ``report_of``."""
    categories = _categories(program)
    numbers: dict[int, int] = {}
    listed: list[Slot] = []
    parts: dict[Any, int] = {}

    def part(view: View) -> Part:
        number = numbers.setdefault(id(view.slot), len(listed))
        if number == len(listed):
            listed.append(view.slot)
        return number, parts.setdefault(view[1:], len(parts))

    tasks = [
        Task(s.names, s.again, s.phase, s.cost, s.place, s.shares, s.effect, s.once,
             *([part(v) for v in views] for views in (s.reads, s.writes, s.temporaries)))
        for s in program.steps
    ]  # fmt: skip
    given_out = [part(v) for v in results(program)]
    maker: dict[int, int] = {}
    for i, task in enumerate(tasks):
        for number, _ in (*task.writes, *task.temporaries):
            maker.setdefault(number, i)
    slots = [
        ContentsSlot(
            slot.nbytes, slot.kind.value, categories[id(slot)][1] if id(slot) in categories else _BOUND[slot.kind],
            slot.first, _end(program, slot), maker.get(i, -1), id(slot) in outside,
        )
        for i, slot in enumerate(listed)
    ]  # fmt: skip
    before = None if plain is None else contents_of(plain, align)
    return Contents(program.name, program.device.name, nbytes, align, tasks, slots, given_out, before)


def at_the_peak(program: Program) -> dict[str, int]:
    """Bytes of slots of the arena alive where most are, by the ledger's categories."""
    categories = _categories(program)
    slots = {id(slot): slot for slot, _ in categories.values()}
    changes: dict[int, int] = {}
    ends = {key: _end(program, slot) for key, slot in slots.items()}
    for key, slot in slots.items():
        changes[slot.first] = changes.get(slot.first, 0) + slot.nbytes
        changes[ends[key]] = changes.get(ends[key], 0) - slot.nbytes
    live = most = peak = 0
    for at in sorted(changes):
        live += changes[at]
        if live > most:
            most, peak = live, at
    found: dict[str, int] = {}
    for key, (slot, category) in categories.items():
        if slot.first <= peak < ends[key]:
            found[category] = found.get(category, 0) + slot.nbytes
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _end(program: Program, slot: Slot) -> int:
    """The step at which the slot is gone; its last one already, if what that makes may take its place."""
    last = slot.last
    return last if slot.first < last < len(program.steps) and program.steps[last].shares else last + 1


def _categories(program: Program) -> dict[int, tuple[Slot, str]]:
    """Of each slot of the arena, what it is for: by who makes it, and who reads it last."""
    made: dict[int, Step] = {}
    read: dict[int, Step] = {}
    scratch: set[int] = set()
    again: set[int] = set()
    slots: dict[int, Slot] = {}
    for step in program.steps:
        for views in (step.reads, step.writes, step.temporaries):
            slots.update((id(v.slot), v.slot) for v in views)
        scratch.update(id(v.slot) for v in step.temporaries)
        read.update((id(v.slot), step) for v in step.reads)
        for v in step.writes:
            made.setdefault(id(v.slot), step)
            if step.again:
                again.add(id(v.slot))
    given = {id(v.slot) for v in results(program)}
    slots.update((id(v.slot), v.slot) for v in results(program))
    found: dict[int, tuple[Slot, str]] = {}
    for key, slot in slots.items():
        if in_arena(slot):
            found[key] = slot, _category(slot, key, made, read, scratch, again, given)
    return found


def _category(
    slot: Slot, key: int, made: dict[int, Step], read: dict[int, Step], scratch: set[int], again: set[int],
    given: set[int],
) -> str:  # fmt: skip
    if slot.kind is Kind.ARGUMENT:
        return "input"
    if key in again:
        return "rematerialized"
    if key in scratch or key not in made:
        return "temporary"
    by, last = made[key].phase, read[key].phase if key in read else None
    if by == OPTIMIZER:
        return "optimizer"
    if by == BACKWARD:
        return "gradient" if last == OPTIMIZER or key in given else "temporary"
    return "activation" if last in (BACKWARD, OPTIMIZER) or key in given else "temporary"
