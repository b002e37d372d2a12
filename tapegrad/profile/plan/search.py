"""The search for plans: the least time within a number of bytes, or the fewest bytes within a time.

An integer program (``milp``) finds them.  What it finds is simulated as a whole, since what calls change is additive
only nearly, and plans are ordered: of two budgets, the smaller one never gets the larger peak or the shorter step.
"""

from __future__ import annotations

from tapegrad.profile.plan.milp import Milp
from tapegrad.profile.plan.problem import Outcome, Problem

_LEVELS = 7
_TRIES = 4


class Search:
    """Plans for one problem, which has candidates."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.plain = problem.outcome(())
        """No plan at all."""
        self._found = [self.plain]
        self._milp = Milp(problem)
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
