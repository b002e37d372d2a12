"""What a replay tells the ledger: the kernels that it runs, what they move, and what lies in its arena at the peak."""

from __future__ import annotations

from collections import Counter

from tapegrad.memory.ledger.figures import Replayed
from tapegrad.memory.ledger.phase import BACKWARD, OPTIMIZER
from tapegrad.program.arena import in_arena
from tapegrad.program.program import Kind, Program, Slot, Step, results


def report_of(program: Program) -> Replayed:
    """The figures of one replay of ``program``, as an eager run is counted."""
    kernels = nbytes = again = 0
    nodes: Counter[str] = Counter()
    seen: set[int] = set()
    for step in program.steps:
        if step.moves:
            nodes.update(step.names)
            kernels += len(step.moves)
            nbytes += sum(read + written for read, written in step.moves)
            again += step.number in seen
            seen.add(step.number)
    return Replayed(kernels, nbytes, nodes, again, at_the_peak(program))


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
    seen: set[int] = set()
    again: set[int] = set()
    slots: dict[int, Slot] = {}
    for step in program.steps:
        for views in (step.reads, step.writes, step.temporaries):
            slots.update((id(v.slot), v.slot) for v in views)
        scratch.update(id(v.slot) for v in step.temporaries)
        read.update((id(v.slot), step) for v in step.reads)
        for v in step.writes:
            made.setdefault(id(v.slot), step)
            if step.number in seen:
                again.add(id(v.slot))
        seen.add(step.number)
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
