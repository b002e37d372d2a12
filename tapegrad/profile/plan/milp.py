"""The choice of calls as an integer program, solved by SciPy's HiGHS.

One variable for each call; one row for each moment (what is alive then must fit) and for each chain of calls within
each other (one of them at most).  Moments that can never be the highest are left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tapegrad.profile.plan.problem import Candidate, Moments

_SECONDS = 2.0
_GAP = 2e-3
"""Of the extra time (or the peak): how far from the best a plan may be; to the last bit takes too long to prove."""
_UNIT = 512
"""Bytes are counted in the pool's grain, so that numbers stay well above the solver's tolerances."""


class Milp:
    """The program for one problem.  Raises ImportError without SciPy."""

    def __init__(self, candidates: Sequence[Candidate], moments: Moments) -> None:
        from scipy import optimize, sparse

        self._optimize, self._sparse = optimize, sparse
        self._count = n = len(candidates)
        self._base, rows = _binding(moments)
        self._nested = _chains(candidates)
        self._ns = [c.ns for c in candidates]
        # equal calls: the earlier one; and fewer of them
        self._time = [ns / 1000 + (1 + i / n) * 1e-4 for i, ns in enumerate(self._ns)]
        self._bytes_rows = self._matrix([[(j, b / _UNIT) for j, b in row] for row in rows], n)
        self._nested_rows = self._matrix([[(j, 1.0) for j in chain] for chain in self._nested], n)

    def shortest(self, nbytes: int) -> list[int] | None:
        """The calls that take least time so that nothing exceeds ``nbytes``, and of those plans the lowest peak."""
        found = self._solve(nbytes=nbytes)
        if found is None:
            return None
        ns = sum(self._ns[i] for i in found)
        return self.lowest(ns) or found

    def lowest(self, ns: int | None) -> list[int] | None:
        """The calls with which the peak is lowest, taking at most ``ns``; of those plans the shortest."""
        found = self._solve(ns=ns)
        if found is None:
            return None
        return self._solve(nbytes=self._peak(found), ns=ns) or found

    def _peak(self, chosen: Sequence[int]) -> int:
        x = [1.0 if i in set(chosen) else 0.0 for i in range(self._count)]
        return max(round(b + d) for b, d in zip(self._base, (self._bytes_rows @ x).tolist())) * _UNIT

    def _solve(self, nbytes: int | None = None, ns: int | None = None) -> list[int] | None:
        """Least time if ``nbytes`` is given, else the lowest peak, which is one more variable then."""
        make, free = self._optimize.LinearConstraint, nbytes is None
        more = 1 if free else 0
        limit = [(0 if free else nbytes / _UNIT) - b for b in self._base]  # type: ignore[operator]
        memory = self._bytes_rows
        nested = self._nested_rows
        if free:
            memory = self._sparse.hstack([memory, self._matrix([[(0, -1.0)]] * len(self._base), 1)])
            nested = self._sparse.hstack([nested, self._matrix([[]] * len(self._nested), 1)])
        constraints = [make(memory, ub=limit)]
        if self._nested:
            constraints.append(make(nested, ub=[1.0] * len(self._nested)))
        if ns is not None:
            constraints.append(make([[*(t / 1000 for t in self._ns), *[0.0] * more]], ub=[ns / 1000 + 1e-6]))
        cost = [*(t * 1e-9 for t in self._time), 1.0] if free else self._time
        with _silence():
            found: Any = self._optimize.milp(
                cost, constraints=constraints, integrality=[*[1] * self._count, *[0] * more],
                bounds=self._optimize.Bounds([0] * (self._count + more), [*[1] * self._count, *[float("inf")] * more]),
                options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
            )  # fmt: skip
        return None if found.x is None else [i for i in range(self._count) if found.x[i] > 0.5]

    def _matrix(self, rows: list[list[tuple[int, float]]], width: int) -> Any:
        data = [v for row in rows for _, v in row]
        columns = [j for row in rows for j, _ in row]
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row))
        return self._sparse.csr_array((data, columns, starts), shape=(len(rows), width))


@contextmanager
def _silence() -> Iterator[None]:
    """HiGHS prints a line here and there, past Python, though it is told not to: not among what we print."""
    sys.stdout.flush()
    try:
        kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # no such stream
        yield
        return
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _binding(moments: Moments) -> tuple[list[float], list[list[tuple[int, int]]]]:
    """Bytes and effects of the moments that can be the highest, each kind of moment once."""
    by_moment: list[list[tuple[int, int]]] = [[] for _ in moments.base]
    for i, effect in enumerate(moments.effects):
        for moment, nbytes in effect:
            by_moment[moment].append((i, nbytes))
    highest: dict[tuple[tuple[int, int], ...], int] = {}
    for base, row in zip(moments.base, by_moment):
        key = tuple(row)
        highest[key] = max(base, highest.get(key, 0))
    # what is alive whatever is chosen; a moment that never reaches it does not bind
    sure = max(base + sum(min(b, 0) for _, b in row) for row, base in highest.items())
    kept = [(base, list(row)) for row, base in highest.items() if base + sum(max(b, 0) for _, b in row) >= sure]
    return [base / _UNIT for base, _ in kept], [row for _, row in kept]


def _chains(candidates: Sequence[Candidate]) -> list[list[int]]:
    """Calls within each other, from the innermost ones out."""
    outer = {j for c in candidates for j in c.within}
    return [[i, *c.within] for i, c in enumerate(candidates) if c.within and i not in outer]
