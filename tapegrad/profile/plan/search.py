"""The search for plans: the least time within a number of bytes, or the fewest bytes within a time.

An integer program, solved by SciPy's HiGHS, finds them: one variable for each call, and one for the peak; one row for
each chain of calls within each other (one of them at most) and for each moment that matters (what is alive then is at
most the peak).  Moments that exceed the peak of a solution become rows, and the program is solved again.

A solution is accounted as a whole, since calls that read the same value are additive only nearly, and plans are
ordered: of two budgets, the smaller one never gets the larger peak or the shorter step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tapegrad.device.types import Array
from tapegrad.profile.plan.lives import Key, alive_at
from tapegrad.profile.plan.problem import Candidate, Outcome, Problem

_SECONDS = 1.0
_GAP = 2e-3
"""How far a plan may be from the least extra time (or peak): to prove the exact least takes too long."""
_FEW = 40
"""Up to so many calls the plan is the best one."""
_UNIT = 512
"""Bytes are counted in the pool's grain, so that numbers stay well above the solver's tolerances."""
_STRETCHES = 32
"""A step is divided into so many parts, and the highest moment of each becomes a row at once."""


class _Milp:
    """The program for one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._count = n = len(problem.candidates)
        self._plain = problem.profile(())
        self._effects = [problem.effect(i) for i in range(n)]
        self._rows: dict[Key, list[float]] = {}
        self._most: list[float] = []
        """What each row is at most."""
        self._chains = [[float(j in chain) for j in range(n)] + [0.0] for chain in _chains(problem.candidates)]
        self._ns = [c.ns for c in problem.candidates]
        first = [(1 + i / n) / (4 * n) for i in range(n)]  # of equal plans that of fewer calls, and of the earlier ones
        self._time = [*(ns / 1000 + weight * 1e-3 for ns, weight in zip(self._ns, first)), 0.0]
        self._peak = [*first, 1.0]

    def shortest(self, nbytes: int) -> list[int] | None:
        """The calls that take least time so that nothing exceeds ``nbytes``, and of those plans the lowest peak."""
        chosen = self._solve(self._time, nbytes)
        if chosen is None:
            return None
        return self._solve(self._peak, nbytes, sum(self._ns[i] for i in chosen)) or chosen

    def lowest(self, ns: int | None) -> list[int] | None:
        """The calls with which the peak is lowest, taking at most ``ns``; of those plans the shortest."""
        chosen = self._solve(self._peak, None, ns)
        if chosen is None:
            return None
        return self._solve(self._time, self._problem.outcome(chosen).peak_bytes, ns) or chosen

    def _solve(self, cost: list[float], nbytes: int | None, ns: int | None = None) -> list[int] | None:
        """The calls of least ``cost`` whose peak is at most ``nbytes`` and which take at most ``ns``; None: none do."""
        limit = float("inf") if nbytes is None else nbytes / _UNIT
        while True:
            x = self._solve_rows(cost, limit, ns)
            if x is None:
                return None
            chosen = [i for i in range(self._count) if x[i] > 0.5]
            if not self._add_rows(chosen, limit if nbytes is not None else x[-1]):
                return chosen

    def _solve_rows(self, cost: list[float], limit: float, ns: int | None) -> Array | None:
        from scipy import optimize

        constraints = []
        for rows, most in (
            (list(self._rows.values()), self._most),
            (self._chains, [1.0] * len(self._chains)),
            ([[t / 1000 for t in self._ns] + [0.0]] if ns is not None else [], [(ns or 0) / 1000 + 1e-6]),
        ):
            if rows:
                constraints.append(optimize.LinearConstraint(rows, ub=most))
        with _silence():
            return optimize.milp(
                cost, constraints=constraints, integrality=[*[1] * self._count, 0],
                bounds=optimize.Bounds([0] * (self._count + 1), [*[1] * self._count, limit]),
                options={"time_limit": _SECONDS, "mip_rel_gap": 0.0 if self._count <= _FEW else _GAP},
            ).x  # fmt: skip

    def _add_rows(self, chosen: Sequence[int], limit: float) -> bool:
        """Make rows of the highest moments that exceed ``limit``; whether there were any that are no rows."""
        before, profile = len(self._rows), self._problem.profile(chosen)
        length = -(-len(profile) // _STRETCHES)
        for start in range(0, len(profile), length):
            moment, nbytes = max(profile[start : start + length], key=lambda pair: pair[1])
            if nbytes / _UNIT > limit + 1e-6 and moment not in self._rows:
                self._rows[moment] = [*(alive_at(effect, moment) / _UNIT for effect in self._effects), -1.0]
                self._most.append(-alive_at(self._plain, moment) / _UNIT)
        return len(self._rows) > before


@contextmanager
def _silence() -> Iterator[None]:
    """HiGHS sometimes prints a line, bypassing Python, though told not to: keep that out of our output."""
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


def _chains(candidates: Sequence[Candidate]) -> list[list[int]]:
    """Calls within each other, from the innermost ones out."""
    outer = {j for c in candidates for j in c.within}
    return [[i, *c.within] for i, c in enumerate(candidates) if c.within and i not in outer]


_LEVELS = 7
_TRIES = 4


class Search:
    """Plans for one problem, which has candidates."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.plain = problem.outcome(())
        """No plan at all."""
        self._found = [self.plain]
        self._milp = _Milp(problem)
        self._try(self._milp.lowest(None))
        self.least = min(self._found, key=lambda o: (o.peak_bytes, o.step_ns))

    def within(self, nbytes: int) -> Outcome | None:
        """The shortest step whose peak is at most ``nbytes``; None if there is none."""
        if self.least.peak_bytes <= nbytes < self.plain.peak_bytes:
            limit = nbytes
            for _ in range(_TRIES):
                outcome = self._try(self._milp.shortest(limit))
                if outcome is None or outcome.peak_bytes <= nbytes:
                    break
                limit -= outcome.peak_bytes - nbytes
        return min((o for o in self._found if o.peak_bytes <= nbytes), key=_shortest, default=None)

    def shortest_peak(self, step_ns: int) -> Outcome:
        """The lowest peak of all plans whose step takes at most ``step_ns``."""
        self._try(self._milp.lowest(step_ns - self.problem.step_ns))
        fits = (o for o in self._found if o.step_ns <= step_ns)
        best = min(fits, key=lambda o: (o.peak_bytes, o.step_ns), default=self.plain)
        return self.within(best.peak_bytes) or best

    def pareto(self) -> list[Outcome]:
        """A handful of plans of which none is better than another in both peak and time, the highest peak first."""
        low, high = self.least.peak_bytes, self.plain.peak_bytes
        best = self.plain
        for i in reversed(range(1, _LEVELS)):
            level = low + (high - low) * i // _LEVELS
            if best.peak_bytes > level:  # else the best plan for the level above is this one's, too
                best = self.within(level) or best
        best_of: list[Outcome] = []
        for o in sorted(self._found, key=_shortest):
            if not best_of or o.peak_bytes < best_of[-1].peak_bytes:
                best_of.append(o)
        return best_of

    def _try(self, chosen: list[int] | None) -> Outcome | None:
        """What a plan gives, to be known from here on."""
        if chosen is None:
            return None
        outcome = self.problem.outcome(chosen)
        self._found.append(outcome)
        return outcome


def _shortest(o: Outcome) -> tuple[int, int, int, tuple[int, ...]]:
    return o.step_ns, o.peak_bytes, len(o.chosen), o.chosen
