"""Clocks of ranks: each counts from a moment of its own machine, and two machines' drift apart by some us a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PINGS = 10
Ping = tuple[int, int, int]
"""In ns: when rank 0 sent it and when it had the answer, by its own clock; between these two what the other's said."""


@dataclass(frozen=True)
class Reading:
    """By how much a clock was ahead of rank 0's when it said ``at``; both in ns."""

    at: int
    ahead: int


def reading(pings: Sequence[Ping]) -> Reading:
    """From the ping that took least: its answer was made about halfway, and cannot have been far from there."""
    sent, theirs, back = min(pings, key=lambda ping: ping[2] - ping[0])
    return Reading(theirs, theirs - (sent + back) // 2)


@dataclass(frozen=True)
class Clock:
    """A rank's clock; ``last``: a later reading, if there is one: in between it drifts evenly."""

    first: Reading = Reading(0, 0)
    last: Reading | None = None

    def by_rank_0(self, ns: int) -> int:
        """What rank 0's clock says when this one says ``ns``."""
        first, last = self.first, self.last
        if last is None or last.at == first.at:
            return ns - first.ahead
        return ns - first.ahead - (last.ahead - first.ahead) * (ns - first.at) // (last.at - first.at)
