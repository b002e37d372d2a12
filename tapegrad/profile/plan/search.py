"""The search for plans: the least time within a number of bytes, or the fewest bytes within a time.

With SciPy it is an integer program (``milp``), solved to the end; without, a greedy walk.  Either way the plan found is
simulated as a whole, since what calls change is additive only nearly, and plans are ordered: of two budgets, the
smaller one never gets the larger peak or the shorter step.
"""

from __future__ import annotations

from importlib.util import find_spec

from tapegrad.profile.plan.problem import Moments, Outcome, Problem

_LEVELS = 7
_TRIES = 4
_SMALL = 40
"""Up to so many candidates, every plan in the list of plans is searched for anew."""


class Search:
    """Plans for one problem.  Raises ImportError for ``solver="milp"`` without SciPy."""

    def __init__(self, problem: Problem, solver: str = "auto") -> None:
        self.problem = problem
        if solver == "auto":
            solver = "milp" if find_spec("scipy") is not None else "greedy"
        self.solver = solver
        self._moments = Moments(problem) if problem.candidates else None
        self._path = _pareto([problem.outcome(c) for walk in self._walks() for c in walk])
        self._milp = None
        if solver == "milp" and self._moments is not None:
            from tapegrad.profile.plan.milp import Milp

            self._milp = Milp(problem.candidates, self._moments)
        self.least = self._least()

    @property
    def plain(self) -> Outcome:
        """No plan at all."""
        return self.problem.outcome(())

    def within(self, nbytes: int) -> Outcome | None:
        """The shortest step whose peak is at most ``nbytes``; None if there is none."""
        if self.plain.peak_bytes <= nbytes:
            return self.plain
        walked = self._walked(nbytes)
        found = [] if walked is None else [walked]
        if self._milp is not None and nbytes >= self.least.peak_bytes:
            limit = nbytes
            for _ in range(_TRIES):
                chosen = self._milp.shortest(limit)
                if chosen is None:
                    break
                outcome = self.problem.outcome(chosen)
                if outcome.peak_bytes <= nbytes:
                    found.append(outcome)
                    break
                limit -= outcome.peak_bytes - nbytes
        return min(found, key=_shortest, default=None)

    def _walked(self, nbytes: int) -> Outcome | None:
        return min((o for o in [*self._path, self.least] if o.peak_bytes <= nbytes), key=_shortest, default=None)

    def shortest_peak(self, step_ns: int) -> Outcome:
        """The lowest peak of all plans whose step takes at most ``step_ns``."""
        found = [o for o in [self.plain, *self._path, self.least] if o.step_ns <= step_ns]
        if self._milp is not None:
            chosen = self._milp.lowest(step_ns - self.problem.step_ns)
            found += [self.problem.outcome(chosen)] if chosen is not None else []
        best = min(found, key=lambda o: (o.peak_bytes, o.step_ns), default=self.plain)
        again = self.within(best.peak_bytes)
        return best if again is None or again.step_ns > best.step_ns else again

    def pareto(self) -> list[Outcome]:
        """A handful of plans of which none is better than another in both peak and time, the highest peak first."""
        low, high = self.least.peak_bytes, self.plain.peak_bytes
        levels = [low + (high - low) * i // _LEVELS for i in range(_LEVELS + 1)]
        small = len(self.problem.candidates) <= _SMALL
        found = [o for level in levels if (o := self.within(level) if small else self._walked(level)) is not None]
        return _pareto([*found, self.plain, self.least])

    def _least(self) -> Outcome:
        found = [self._path[-1]]
        if self._milp is not None:
            chosen = self._milp.lowest(None)
            found += [self.problem.outcome(chosen)] if chosen is not None else []
        return min(found, key=lambda o: (o.peak_bytes, o.step_ns))

    def _walks(self) -> list[list[tuple[int, ...]]]:
        """Greedy walks among all calls, and among those down to and up from each depth: large calls hide small ones."""
        depths = [len(c.within) for c in self.problem.candidates]
        allowed = {tuple(i for i, depth in enumerate(depths) if depth >= d) for d in set(depths)}
        allowed |= {tuple(i for i, depth in enumerate(depths) if depth <= d) for d in set(depths)}
        return [[()], *(self._walk(some) for some in sorted(allowed))]

    def _walk(self, allowed: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Greedily, from no plan on: what saves most of the highest moment for its time, the earliest call first."""
        assert self._moments is not None
        candidates, effects = self.problem.candidates, [dict(e) for e in self._moments.effects]
        live = list(self._moments.base)
        found: list[tuple[int, ...]] = [()]
        chosen: set[int] = set()
        inside: dict[int, list[int]] = {i: [] for i in allowed}
        for j in allowed:
            for i in candidates[j].within:
                if i in inside:
                    inside[i].append(j)
        while True:
            top = max(range(len(live)), key=live.__getitem__)
            best, gain = -1, 0.0
            for i in allowed:
                effect = effects[i]
                if i in chosen or chosen.intersection(candidates[i].within):
                    continue
                replaced = [j for j in inside[i] if j in chosen]
                saved = -effect.get(top, 0) + sum(effects[j].get(top, 0) for j in replaced)
                ns = max(candidates[i].ns - sum(candidates[j].ns for j in replaced), 1)
                if saved > 0 and saved / ns > gain:
                    best, gain = i, saved / ns
            if best < 0:
                return found
            before = max(live)
            for j in [j for j in inside[best] if j in chosen]:
                chosen.discard(j)
                _apply(live, effects[j], -1)
            chosen.add(best)
            _apply(live, effects[best], 1)
            found.append(tuple(sorted(chosen)))
            if max(live) > 2 * before:  # a rerun that needs more than all that it saves
                return found


def _shortest(o: Outcome) -> tuple[int, int, int]:
    return o.step_ns, o.peak_bytes, len(o.chosen)


def _apply(live: list[int], effect: dict[int, int], sign: int) -> None:
    for moment, nbytes in effect.items():
        live[moment] += sign * nbytes


def _pareto(outcomes: list[Outcome]) -> list[Outcome]:
    """Those that no other beats, by rising time and falling peak."""
    found: list[Outcome] = []
    for o in sorted(set(outcomes), key=lambda o: (o.step_ns, o.peak_bytes, len(o.chosen), o.chosen)):
        if not found or o.peak_bytes < found[-1].peak_bytes:
            found.append(o)
    return found
