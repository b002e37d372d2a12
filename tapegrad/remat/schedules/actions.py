"""The words of a schedule: what to do next with the states and tapes of a chain of steps.

A schedule is an iterable of actions.  Whoever executes it holds a *current state*; state ``i`` goes into step ``i``,
and state ``i + 1`` comes out.  State 0 is the current one at the start.  The first ``Reverse`` (of the last step) is
where the gradient starts: what comes before it happens in the forward run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tapegrad.errors import RecomputeError

RAM, DISK = "ram", "disk"


class Advance(NamedTuple):
    """Run steps ``start`` to ``stop - 1``, recording nothing; the current state becomes state ``stop``."""

    start: int
    stop: int


class Store(NamedTuple):
    """Keep the current state, which is state ``step``, in ``where`` (``"ram"`` or ``"disk"``)."""

    step: int
    where: str = RAM


class Restore(NamedTuple):
    """The stored state ``step`` becomes the current one; it stays stored."""

    step: int


class Drop(NamedTuple):
    """Forget the stored state ``step``."""

    step: int


class Tape(NamedTuple):
    """Run ``step`` and keep its tape; the current state becomes state ``step + 1``."""

    step: int


class Reverse(NamedTuple):
    """Pull the gradient through the tape of ``step``, which is used up by it."""

    step: int


Action = Advance | Store | Restore | Drop | Tape | Reverse


@dataclass
class Counts:
    """What a schedule costs; steps are counted in runs of a step, memory in states and tapes."""

    steps: int = 0
    """Runs of a step, recorded or not."""
    advanced: int = 0
    """Runs of a step with nothing recorded."""
    ram: int = 0
    """The most states held in memory at once."""
    disk: int = 0
    """The most states held on disk at once."""
    tapes: int = 0
    """The most tapes of one step held at once."""
    units: int = 0
    """The most states in memory plus tapes held at once, where each weighs one (see ``mixed``)."""
    writes: int = 0
    """States written to disk."""
    reads: int = 0
    """States read from disk."""


def count(actions: Iterable[Action], n: int) -> Counts:
    """Follow the actions of a chain of ``n`` steps and count.

    Raises RecomputeError if they do not reverse each step once, last first, from data that exist.
    """
    counts = Counts()
    current: int | None = 0
    stored: dict[int, str] = {}
    taped: set[int] = set()
    left = n
    for a in actions:
        match a:
            case Advance(start, stop):
                _need(current == start < stop < n + 1, a, current)
                counts.steps += stop - start
                counts.advanced += stop - start
                current = stop
            case Store(step, where):
                _need(current == step and step not in stored, a, current)
                stored[step] = where
                counts.writes += where == DISK
            case Restore(step):
                _need(step in stored, a, current)
                counts.reads += stored[step] == DISK
                current = step
            case Drop(step):
                _need(step in stored, a, current)
                del stored[step]
            case Tape(step):
                _need(current == step < n and step not in taped, a, current)
                taped.add(step)
                counts.steps += 1
                current = step + 1
            case Reverse(step):
                _need(step in taped and step == left - 1, a, current)
                taped.remove(step)
                left, current = step, None
        held = sum(where == RAM for where in stored.values())
        counts.ram, counts.tapes = max(counts.ram, held), max(counts.tapes, len(taped))
        counts.disk = max(counts.disk, len(stored) - held)
        # The tape of the step that is reversed next is what every schedule needs; it takes no unit.
        counts.units = max(counts.units, held + len(taped - {left - 1}))
    _need(not left and not stored and not taped, "the end", current)
    return counts


def _need(good: bool, action: object, current: int | None) -> None:
    if not good:
        raise RecomputeError(f"a schedule is wrong: {action} with state {current} at hand")
