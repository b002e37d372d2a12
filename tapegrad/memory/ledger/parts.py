"""The events of a journal, step by step; and which steps' are dropped when there are too many."""

from __future__ import annotations

from collections.abc import Callable, Iterable

FIRST_STEPS = 3
LAST_STEPS = 2

# An allocation: seq, ns, bytes, category, op, phase, place, call, number of the aval, and of the row that it repeats.
# Nothing in it is tracked by the garbage collector, which therefore does not slow down as rows become many.
Row = tuple[int, int, int, str, str, int, int, int, int, int]
# Its end: seq, ns, holder, last reading in the forward pass, first one in the backward pass.
End = tuple[int, int, str, int, int]


class Part:
    """The events of one step, or of the time between two, or what is left of several."""

    def __init__(self, first_call: int = 0) -> None:
        self.rows: dict[int, Row] = {}
        self.ends: dict[int, End] = {}
        self.changes: list[tuple[int, int, str]] = []  # seq, allocation, category
        self.ops: list[tuple[int, int, str, int, int, int]] = []  # seq, ns, name, phase, call, place
        self.calls = range(first_call, first_call)
        self.peak = 0
        self.whole = True
        """False: events of it were dropped."""

    def add(self, later: Part) -> None:
        """What is left of this and of the next one, as one."""
        self.rows.update(later.rows)
        self.ends.update(later.ends)
        self.changes += later.changes

    def reduce(self) -> None:
        """Leave what later or earlier parts need: values that came into this one or outlive it."""
        inside = self.rows.keys() & self.ends.keys()
        for number in inside:
            del self.rows[number], self.ends[number]
        self.changes = [c for c in self.changes if c[1] not in inside]
        self.ops = []
        self.whole = False

    def __len__(self) -> int:
        return len(self.rows) + len(self.ends) + len(self.changes) + len(self.ops)


class Parts:
    """All of them; no more than about ``keep`` events, if the first and last steps and the highest one have fewer.

    ``forget`` is told of the calls of steps that are dropped.  Adjacent dropped steps become one, so that each step
    costs the same, however many there were.
    """

    def __init__(self, keep: int, forget: Callable[[Iterable[int]], None]) -> None:
        self.now = self._best = Part()
        self.all = [self.now]
        self.events = self.dropped = 0
        self._size = 0  # events in the parts that are over
        self._keep = keep
        self._forget = forget

    def close(self, peak: int, calls: int) -> None:
        """The part that is open ends; its peak was ``peak``, and so many calls have begun since the start."""
        part = self.now
        part.peak, part.calls = peak, range(part.calls.start, calls)
        if peak > self._best.peak:
            self._best = part
        self.events += len(part)
        self._size += len(part)
        self.now = Part(calls)
        self.all.append(self.now)
        while self._size > self._keep and self._drop_one():
            pass

    def row(self, number: int) -> Row | None:
        """A row of the last few parts."""
        return next((part.rows[number] for part in self.all[-1:-4:-1] if number in part.rows), None)

    def _drop_one(self) -> bool:
        for at in range(FIRST_STEPS, len(self.all) - LAST_STEPS):  # those dropped before are one part, or a few
            if self.all[at].whole and self.all[at] is not self._best:
                self._drop(at)
                return True
        return False

    def _drop(self, at: int) -> None:
        """Drop the events of a part, but for what others need; dropped parts beside it become one with it."""
        parts = self.all
        self._forget(parts[at].calls)
        before = len(parts[at])
        for beside in (at + 1, at - 1):
            if not parts[beside].whole:
                first = min(at, beside)
                before += len(parts[beside])
                parts[first].add(parts.pop(first + 1))
                at = first
        parts[at].reduce()
        self.dropped += before - len(parts[at])
        self._size -= before - len(parts[at])
