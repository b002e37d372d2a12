"""The arena: one allocation for all that a program makes; slots whose lifetimes do not meet share bytes.

Offsets are found by greedy placement, each slot at the lowest gap that is free while it lives, in several orders; the
smallest arena wins.  Training steps are nearly stacks, so the best of few orders is within a percent of the lower bound
(Pisarchyk and Lee, "Efficient memory management for deep neural net inference", arXiv 2001.03288).  In steps that do
much again it is not; then what came to lie above the bound is placed first, again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from tapegrad.capture.program import Kind, Program, Slot, View, results
from tapegrad.device import CPU

_XP = CPU.xp


class Block(NamedTuple):
    """What gets bytes of the arena: one slot, or several of which each takes the place of the one before."""

    slots: tuple[Slot, ...]
    nbytes: int
    first: int
    last: int


class Layout(NamedTuple):
    """Where each slot lies, by its id; ``lower_bound``: the most bytes that live at once, less than which none can."""

    offsets: dict[int, int]
    nbytes: int
    lower_bound: int


_ORDERS: tuple[Callable[[Block], int], ...] = (lambda b: -b.nbytes, lambda b: -b.nbytes * (b.last - b.first + 1))
_RAISES = 8
"""Orders tried in which is first what lay too high in the one before."""
_ENOUGH = 1.002
"""So much above the bound that no other order is tried."""


def plan(program: Program, alignment: int, outside: Collection[int] = (), enough: int = 0) -> Layout:
    """Offsets, multiples of ``alignment`` (bytes), for arguments and all that the program makes.

    ``outside``: the ids of the slots that lie elsewhere.  With ``enough`` bytes no smaller arena is looked for.
    """
    blocks = _blocks(program, alignment, outside)
    bound = _lower_bound(blocks)
    enough = max(enough, int(_ENOUGH * bound))
    ordered: list[Block] = []
    best: tuple[int, dict[int, int]] | None = None
    for order in _ORDERS:
        this = sorted(blocks, key=order)
        placed = _placed(this)
        if best is None or placed[0] < best[0]:
            best, ordered = placed, this
        if best[0] <= enough:
            return Layout(best[1], best[0], bound)
    assert best is not None
    placed = best
    for _ in range(_RAISES):
        high = [b for b in ordered if placed[1][id(b.slots[0])] + b.nbytes > bound]
        raised = {id(b) for b in high}
        ordered = high + [b for b in ordered if id(b) not in raised]
        placed = _placed(ordered)
        best = min(best, placed, key=lambda x: x[0])
        if best[0] <= enough:
            break
    return Layout(best[1], best[0], bound)


def apart(program: Program, alignment: int, outside: Collection[int] = ()) -> Layout:
    """A layout in which no two slots share bytes: what a plan is checked against."""
    blocks = _blocks(program, alignment, outside)
    offsets: dict[int, int] = {}
    total = 0
    for slot in (slot for b in blocks for slot in b.slots):
        offsets[id(slot)] = total
        total += -(-slot.nbytes // alignment) * alignment
    return Layout(offsets, total, _lower_bound(blocks))


def in_arena(slot: Slot) -> bool:
    """Whether the slot's bytes are the arena's: arguments are copied there."""
    return slot.kind in (Kind.MADE, Kind.ARGUMENT)


def _blocks(program: Program, alignment: int, outside: Collection[int]) -> list[Block]:
    """Slots of the program, of which those that can take the place of one another are together."""
    slots: dict[int, Slot] = {}
    for step in program.steps:
        for v in (*step.reads, *step.writes, *step.temporaries):
            slots.setdefault(id(v.slot), v.slot)
    for view in results(program):
        slots.setdefault(id(view.slot), view.slot)
    groups = {key: [slot] for key, slot in slots.items() if in_arena(slot) and key not in outside}
    for i, step in enumerate(program.steps):
        if step.shares and len(step.writes) == 1:
            _join(groups, i, step.reads, step.writes[0])
    return [
        Block(tuple(group), -(-max(s.nbytes for s in group) // alignment) * alignment, group[0].first, group[-1].last)
        for group in {id(g): g for g in groups.values()}.values()
    ]


def _join(groups: dict[int, list[Slot]], i: int, reads: Sequence[View], write: View) -> None:
    """Let what step ``i`` writes take the place of something that is read there for the last time, lying alike."""
    if id(write.slot) not in groups or write.slot.first != i or len(groups[id(write.slot)]) > 1:
        return
    for v in reads:
        group = groups.get(id(v.slot))
        alike = v[1:] == write[1:] and v.slot.nbytes == write.slot.nbytes
        if group is None or not alike or group[-1] is not v.slot or v.slot.last != i:
            continue
        if all(o[1:] == v[1:] for o in reads if o.slot is v.slot):
            group.append(write.slot)
            groups[id(write.slot)] = group
            return


def _placed(blocks: Sequence[Block]) -> tuple[int, dict[int, int]]:
    """Bytes taken, and the offset of each slot, where blocks are placed in this order."""
    offsets: dict[int, int] = {}
    there = _XP.empty((4, len(blocks)), _XP.int64)  # first, last, begin, end
    count = total = 0
    for b in blocks:
        at = 0
        first, last, begin, end = there[:, :count]
        meets = _XP.flatnonzero((first <= b.last) & (last >= b.first))
        if len(meets):
            meets = meets[begin[meets].argsort(kind="stable")]
            begins, ends = begin[meets], _XP.maximum.accumulate(end[meets])
            if begins[0] < b.nbytes:
                gaps = _XP.flatnonzero(begins[1:] >= ends[:-1] + b.nbytes)
                at = int(ends[gaps[0]] if len(gaps) else ends[-1])
        if b.nbytes:
            there[:, count] = b.first, b.last, at, at + b.nbytes
            count += 1
        total = max(total, at + b.nbytes)
        for slot in b.slots:
            offsets[id(slot)] = at
    return total, offsets


def _lower_bound(blocks: Sequence[Block]) -> int:
    """The most bytes that live at one step."""
    changes: dict[int, int] = {}
    for b in blocks:
        changes[b.first] = changes.get(b.first, 0) + b.nbytes
        changes[b.last + 1] = changes.get(b.last + 1, 0) - b.nbytes
    live = most = 0
    for at in sorted(changes):
        live += changes[at]
        most = max(most, live)
    return most
