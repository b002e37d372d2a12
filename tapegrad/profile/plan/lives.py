"""Lives of allocations, and how many bytes are alive when.

Times are keys that sort: ``(seq, 0, 0)`` is an event of the recorded run; a second number below or above 0 puts what a
plan adds before or after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

Key = tuple[int, int, int]
NEVER: Key = (1 << 62, 0, 0)
Profile = list[tuple[Key, int]]
"""Bytes alive from each moment on until the next."""


class Life(NamedTuple):
    """The life of an allocation of ``bytes``: from ``begin`` up to (not with) ``end``."""

    bytes: int
    begin: Key
    end: Key


def profile(lives: Iterable[Life]) -> Profile:
    """Bytes alive right after each moment at which something begins or ends; ends at a moment come first."""
    events: dict[Key, int] = {}
    for nbytes, begin, end in lives:
        events[begin] = events.get(begin, 0) + nbytes
        if end < NEVER:
            events[end] = events.get(end, 0) - nbytes
    total, result = 0, []
    for key in sorted(events):
        total += events[key]
        result.append((key, total))
    return result


def peak(lives: Iterable[Life]) -> tuple[int, Key]:
    """The most bytes alive at once, and when first."""
    best, at = 0, (-1, 0, 0)
    for key, total in profile(lives):
        if total > best:
            best, at = total, key
    return best, at


def alive_at(profile: Profile, moment: Key) -> int:
    """Bytes alive at a moment."""
    at = bisect_right(profile, moment, key=lambda pair: pair[0])
    return profile[at - 1][1] if at else 0
