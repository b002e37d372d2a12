"""Revolve: the least number of steps to reverse a chain with so many stored states.

Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).  With ``beta(c, r) = binomial(c + r, c)`` and the
``r`` for which ``beta(c, r - 1) < l <= beta(c, r)``, reversing ``l`` steps with ``c`` states in store, the initial one
among them, takes ``t(l, c) = r l - beta(c + 1, r - 1)`` steps besides the ``l`` that are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import comb

from tapegrad.errors import RecomputeError
from tapegrad.remat.schedules.actions import RAM, Action, Advance, Drop, Restore, Reverse, Store, Tape


def beta(c: int, r: int) -> int:
    """The longest chain that ``c`` stored states reverse with no step advanced more than ``r`` times."""
    return comb(c + r, c) if r >= 0 else 0


def repetitions(l: int, c: int) -> int:  # noqa: E741  # the letter of the literature
    """The number ``r`` with ``beta(c, r - 1) < l <= beta(c, r)``."""
    r = 0
    while beta(c, r) < l:
        r += 1
    return r


def extra_steps(l: int, c: int) -> int:  # noqa: E741
    """``t(l, c)``: steps run without recording to reverse ``l`` steps with ``c`` stored states, the initial one too.

    Raises RecomputeError for ``c < 1``.
    """
    if c < 1:
        raise RecomputeError(f"reversing a chain takes at least one stored state, not {c}: raise snapshots")
    if l < 2:
        return 0
    c = min(c, l)
    r = repetitions(l, c)
    return r * l - beta(c + 1, r - 1)


def longest_split(l: int, c: int) -> int:  # noqa: E741
    """How far to advance before the next state is stored; ``l >= 2``, ``c >= 2`` with the one just stored.

    Optimal is every ``j`` with ``beta(c, r-2) <= j <= beta(c, r-1)`` and ``beta(c-1, r-1) <= l-j <= beta(c-1, r)``
    (Griewank and Walther, figure 4).  The largest of them keeps states close together, and neighbouring states of a
    two-step recurrence share an array.
    """
    r = repetitions(l, c)
    return min(beta(c, r - 1), l - max(1, beta(c - 1, r - 1)))


Split = Callable[[int, int], int]
"""A choice among the optimal splits of ``l`` steps with ``c`` stored states."""


def revolve(n: int, c: int, split: Split = longest_split) -> Iterator[Action]:
    """Yield the optimal schedule for ``n`` steps with ``c`` stored states in memory.

    Raises RecomputeError for ``c < 1``.
    """
    if n:
        extra_steps(n, c)
        yield Store(0)
        yield from reverse_segment(0, n, c, split)
        yield Drop(0)


def reverse_segment(a: int, b: int, c: int, split: Split = longest_split) -> Iterator[Action]:
    """Reverse steps ``a`` to ``b - 1``; state ``a`` is current and stored, one of the ``c`` stored states."""
    todo: list[tuple[int, int, int] | Action] = [(a, b, min(c, b - a))]
    while todo:
        item = todo.pop()
        if isinstance(item, Action):
            yield item
            continue
        first, last, c = item
        if last - first == 1:
            yield from (Tape(first), Reverse(first))
        elif c == 1:
            yield from _with_one(first, last)
        else:
            middle = first + split(last - first, c)
            yield from (Advance(first, middle), Store(middle, RAM))
            todo += [
                (first, middle, min(c, middle - first)),
                Restore(first),
                Drop(middle),
                (middle, last, min(c - 1, last - middle)),
            ]


def _with_one(first: int, last: int) -> Iterator[Action]:
    """With the stored state ``first`` alone: back to it for every step."""
    for step in range(last - 1, first - 1, -1):
        if step < last - 1:
            yield Restore(first)
        if step > first:
            yield Advance(first, step)
        yield from (Tape(step), Reverse(step))
