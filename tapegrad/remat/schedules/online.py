"""Online: a loop of unknown length, with at most so many stored states at any time.

Up to ``(c + 1) (c + 2) / 2`` steps the stored states are those of an optimal schedule whenever the loop ends (algorithm
I of Stumm and Walther, "New algorithms for optimal online checkpointing", SIAM J. Sci. Comput. 32 (2010)); after that
they are thinned out by levels (Wang, Moin and Iaccarino, "Minimal repetition dynamic checkpointing algorithm for
unsteady adjoint calculation", SIAM J. Sci. Comput. 31 (2009)).  Once the end is known, each stretch between two stored
states is reversed by ``revolve`` with the places that are free by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import inf

from tapegrad.errors import RecomputeError
from tapegrad.remat.schedules.actions import Action, Advance, Drop, Restore, Reverse, Store, Tape
from tapegrad.remat.schedules.revolve import reverse_segment


class Online:
    """Decides, state by state, what to keep; then :meth:`backward`.

    Ask :meth:`at` about a state when the step from it has run and another one follows, and :meth:`end` about the last.
    The state before the last step is kept besides: it takes the place of that step's tape.
    """

    def __init__(self, c: int) -> None:
        if c < 1:
            raise RecomputeError(f"reversing a loop takes at least one stored state, not {c}: raise snapshots")
        self._c = c
        self.kept: list[int] = []
        self._last = -1
        self._levels: dict[int, float] = {}

    def at(self, step: int) -> list[Action]:
        """What to do with state ``step``."""
        level: float = 0
        actions: list[Action] = []
        if len(self.kept) == self._c:
            if self._c == 1:
                return []
            early = step < (self._c + 1) * (self._c + 2) // 2 - 1
            gone = self._widest_start() if early else self._dispensable()
            if gone is None:
                if early:
                    return []
                gone = self.kept[-1]
                level = self._levels[gone] + 1
            self.kept.remove(gone)
            del self._levels[gone]
            actions.append(Drop(gone))
        self.kept.append(step)
        self._levels[step] = level if step else inf
        return [*actions, Store(step)]

    def _widest_start(self) -> int | None:
        """The first state whose loss leaves a gap that the states after it can still make up for."""
        ends = [*self.kept[2:], self.kept[-1] + 1]
        for i, (before, gone, after) in enumerate(zip(self.kept, self.kept[1:], ends, strict=False)):
            if after - before <= self._c + 1 - i:
                return gone
        return None

    def _dispensable(self) -> int | None:
        """The first state that has one of a higher level after it."""
        highest = 0.0
        best = None
        for step in reversed(self.kept[1:]):
            if self._levels[step] < highest:
                best = step
            highest = max(highest, self._levels[step])
        return best

    def end(self, n: int) -> list[Action]:
        """What to do with state ``n - 1`` once step ``n - 1`` has turned out to be the last."""
        self._last = n - 1
        return self.at(0) if n == 1 else [Store(n - 1)]

    def backward(self) -> Iterator[Action]:
        """Reverse the steps that have been run."""
        last = self._last
        yield from (Restore(last), Drop(last), Tape(last), Reverse(last))
        ends = [*self.kept[1:], last]
        if not last:
            return
        for i in range(len(self.kept) - 1, -1, -1):
            yield Restore(self.kept[i])
            yield from reverse_segment(self.kept[i], ends[i], self._c - i)
            yield Drop(self.kept[i])


def online(n: int, c: int) -> Iterator[Action]:
    """What :class:`Online` does when a loop ends after ``n`` steps: the forward run, then the reversal."""
    schedule = Online(c)
    for step in range(n):
        yield from (*(schedule.at(step) if step < n - 1 else schedule.end(n)), Advance(step, step + 1))
    if n:
        yield from schedule.backward()


def ideal_states(longest: int) -> int:
    """How many stored states make a loop of up to ``longest`` steps optimal whenever it ends."""
    return next(c for c in count(1) if (c + 1) * (c + 2) // 2 >= longest)
