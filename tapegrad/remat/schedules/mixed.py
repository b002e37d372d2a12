"""Mixed: a unit of memory holds either a state to restart from or the tape of one step, both of one size.

Maddison, "Step-based checkpointing with high-level algorithmic differentiation", J. Comput. Sci. 82 (2024).  With ``s``
units and the state at hand, reversing ``n`` steps takes ``m(n, s)`` steps, recorded ones included::

    m(n, s) = n                                   if n <= s + 1 (all tapes fit; the last needs no unit)
    m(n, 1) = n (n + 1) / 2 - 1
    m(n, s) = min(1 + m(n - 1, s - 1),            keep the tape of the first step
                  min over 2 <= i < n of i + m(i, s) + m(n - i, s - 1))   keep the state, advance i steps
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from operator import add

from tapegrad.errors import RecomputeError
from tapegrad.remat.schedules.actions import Action, Advance, Drop, Restore, Reverse, Store, Tape


def total_steps(n: int, s: int) -> int:
    """``m(n, s)``: runs of a step, recorded ones included, to reverse ``n`` steps with ``s`` units.

    Raises RecomputeError for ``s < 1`` where ``n > 1``.
    """
    _check(n, s)
    return n if n <= s + 1 else _table(n, s)[s][n]


def mixed(n: int, s: int) -> Iterator[Action]:
    """The optimal schedule for ``n`` steps with ``s`` units.  Raises RecomputeError for ``s < 1`` where ``n > 1``."""
    _check(n, s)
    rows = [] if n <= s + 1 else _table(n, s)
    todo: list[tuple[int, int, int] | Action] = [(0, n, s)]
    while todo:
        item = todo.pop()
        if isinstance(item, Action):
            yield item
            continue
        first, last, s = item
        if last - first <= s + 1:
            yield from map(Tape, range(first, last))
            yield from map(Reverse, range(last - 1, first - 1, -1))
            continue
        middle = first + _first_part(rows, last - first, s)
        if middle == first + 1:
            yield Tape(first)
            todo += [Reverse(first), (middle, last, s - 1)]
        else:
            yield from (Store(first), Advance(first, middle))
            todo += [(first, middle, s), Drop(first), Restore(first), (middle, last, s - 1)]


def _check(n: int, s: int) -> None:
    if s < 1 and n > 1:
        raise RecomputeError(f"reversing {n} steps takes at least one unit of memory, not {s}: raise snapshots")


def _first_part(rows: list[list[int]], n: int, s: int) -> int:
    """How many steps to advance over from a stored state; 1: keep the tape of the first step instead."""
    if s == 1:
        return n - 1
    here, below = rows[s], rows[s - 1]
    if here[n] == 1 + below[n - 1]:
        return 1
    return next(i for i in range(2, n) if here[n] == i + here[i] + below[n - i])


@functools.lru_cache(maxsize=8)
def _table(n: int, s: int) -> list[list[int]]:
    """``m[units][steps]``; the inner minimum runs over whole slices, so the square of ``n`` costs little."""
    rows: list[list[int]] = [[], [k if k <= 2 else k * (k + 1) // 2 - 1 for k in range(n + 1)]]
    for units in range(2, s + 1):
        below = rows[-1]
        backwards = below[::-1]  # backwards[n - k] is below[k]
        here, shifted = [0], [0]  # shifted[i] is i + here[i]
        for k in range(1, n + 1):
            if k <= units + 1:
                here.append(k)
            else:
                best = min(map(add, shifted[2:k], backwards[n - k + 2 : n]))
                here.append(min(1 + below[k - 1], best))
            shifted.append(k + here[k])
        rows.append(here)
    return rows
