"""What a captured program consists of, without arrays or code: a journal keeps it, and may outlive the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Part = tuple[int, int]
"""A part of a slot: its number, and a number that parts which lie alike in their slots have in common."""


class Slot(NamedTuple):
    """An allocation of a call: what it is for, and the tasks from ``begin`` to before ``end`` during which it is there.

    ``kind``: where its bytes come from, as in ``capture/program.py``; ``maker``: the task that writes it first, or -1.
    ``outside``: it lies in memory of its own in each call, not in the arena.
    """

    nbytes: int
    kind: str
    category: str
    begin: int
    end: int
    maker: int
    outside: bool


class Task(NamedTuple):
    """One task of a call; see ``capture/program.py``."""

    names: tuple[str, ...]
    again: bool
    phase: int
    cost: float
    place: tuple[str, int] | None
    shares: bool
    effect: bool
    once: bool
    reads: Sequence[Part]
    writes: Sequence[Part]
    temporaries: Sequence[Part]


@dataclass(frozen=True)
class Contents:
    """A program: its tasks in order, its slots, and which parts of these it gives out.

    ``nbytes``: of its arena, whose offsets are multiples of ``alignment``.  ``plain``: the program from which a plan
    has made it, to keep a budget (None: no plan has).
    """

    name: str
    device: str
    nbytes: int
    alignment: int
    tasks: Sequence[Task]
    slots: Sequence[Slot]
    results: Sequence[Part]
    plain: Contents | None = None
