"""Rotor: the fastest way to reverse a chain of unequal stages within so many bytes.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory", arXiv:1911.13214 (2019).  ``C(s, t, m)`` is the least time to run and reverse
stages ``s`` to ``t`` where the input of ``s`` is kept by others and ``m`` bytes are free, the least of two ways:

* *tape s now*: ``forward_s + C(s + 1, t, m - taped_s) + backward_s``;
* *keep the input of r*: ``forward_s + .. + forward_(r-1) + C(r, t, m - out_(r-1)) + C(s, r - 1, m)``.

The gradient that a part is handed, and the one it makes of its input, are charged wherever they exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, inf

from tapegrad.device import CPU
from tapegrad.errors import RecomputeError
from tapegrad.remat.schedules.actions import Action, Advance, Drop, Restore, Reverse, Store, Tape

_XP = CPU.xp


@dataclass(frozen=True)
class Stage:
    """One stage of a chain: bytes, and costs in any unit."""

    name: str
    forward: float
    """Cost of running it."""
    backward: float
    """Cost of its gradient."""
    out: int
    """Bytes of its output."""
    taped: int
    """Bytes of all that its tape keeps, the output included."""
    forward_overhead: int = 0
    """Bytes it takes while it runs, besides its input, output and tape."""
    backward_overhead: int = 0
    """Bytes its gradient takes, besides its tape and the gradients of its output and input."""


class Rotor:
    """The plan for ``stages`` within ``budget`` bytes, which the chain's input, of ``given`` bytes, is not part of.

    ``fixed``: bytes of the budget that are taken throughout, by the gradients of the stages' variables.
    Bytes are counted in at most ``slots`` units (default 500, fewer for more than 50 stages), or exactly if they have a
    large common divisor; sizes are rounded up, so the budget is never exceeded.  Takes time as the cube of the number
    of stages.

    Raises RecomputeError where no plan exists: it names the stage that needs the most, and the least budget.
    """

    def __init__(
        self, stages: Sequence[Stage], budget: int, given: int = 0, fixed: int = 0, slots: int | None = None
    ) -> None:
        if not stages:
            raise RecomputeError("a chain without stages has no plan")
        self.stages, self.budget = tuple(stages), budget
        slots = slots or min(500, max(100, 500 * 2500 // len(stages) ** 2))
        need, worst = least_bytes(self.stages, given)
        unit = gcd(*(x for s in stages for x in (s.out, s.taped, s.forward_overhead, s.backward_overhead)), given) or 1
        free = max(0, budget - fixed)
        unit = unit if free // unit <= slots else -(-free // slots)
        memory = free // unit
        self._table = _Table(self.stages, given, unit, memory if free >= need else -1)
        self.units = range(self._table.least() if free >= need else memory + 1, memory + 1)
        """All smaller budgets for which a plan exists, in the units in which bytes are counted."""
        self.cost = self._table.cost(0, len(stages) - 1, memory) if self.units else inf
        """Cost of the plan."""
        self.plain_cost = sum(s.forward + s.backward for s in stages)
        """Cost of the chain without a plan."""
        if self.cost == inf:
            finer = f"; in units of {unit} bytes, more" if free >= need else ""
            raise RecomputeError(
                f"a budget of {budget} bytes is too small for a chain of {len(stages)} stages: stage {worst} "
                f"({stages[worst].name}) has a tape of {stages[worst].taped} bytes, and the least budget is "
                f"{need + fixed} bytes{finer}"
            )

    def actions(self, units: int | None = None) -> Iterator[Action]:
        """Yield the schedule of the plan, or of the plan for another budget of ``self.units``."""
        table, memory = self._table, self.units[-1] if units is None else units
        todo: list[tuple[int, int, int, bool] | Action] = [(0, len(self.stages) - 1, memory, False)]
        while todo:
            item = todo.pop()
            if isinstance(item, Action):
                yield item
                continue
            s, t, m, stored = item
            cut = table.choice(s, t, m)
            if cut == s:
                if stored:
                    yield Drop(s)
                yield Tape(s)
                todo.append(Reverse(s))
                if s < t:
                    todo.append((s + 1, t, m - table.taped[s], False))
            else:
                if not stored:
                    yield Store(s)
                yield Advance(s, cut)
                todo += [(s, cut - 1, m, True), Restore(s), (cut, t, m - table.out[cut], False)]


def least_bytes(stages: Sequence[Stage], given: int = 0) -> tuple[int, int]:
    """The least budget for which a plan exists, and the stage that needs it."""
    table = _Table(stages, given, 1)
    best: dict[tuple[int, int], tuple[int, int]] = {}
    for length in range(len(stages)):
        for s in range(len(stages) - length):
            t = s + length
            least = (table.tape_need(s, t), s)
            if length:
                rest = best[s + 1, t]
                least = max(least, (table.taped[s] + rest[0], rest[1]))
                run = 0
                for cut in range(s + 1, t + 1):
                    run = max(run, table.run_need(s, cut - 1))
                    late, early = best[cut, t], best[s, cut - 1]
                    least = min(
                        least, max((run + table.out[t + 1], cut - 1), (table.out[cut] + late[0], late[1]), early)
                    )
            best[s, t] = least
    return best[0, len(stages) - 1]


class _Table:
    """Least costs for all parts of a chain and all amounts of memory up to ``most``; bytes in units.

    ``out[i]``: the input of stage ``i``.  ``costs[s, t]`` holds ``C(s, t, m)`` for 0 to ``most`` units, ``late[s, t]``
    the same with the input of ``s`` to keep, too.
    """

    def __init__(self, stages: Sequence[Stage], given: int, unit: int, most: int = -1) -> None:
        def units(nbytes: int) -> int:
            return -(-nbytes // unit)

        self.out = [units(given), *(units(s.out) for s in stages)]
        self.taped = [units(s.taped) for s in stages]
        self._more = [(units(s.forward_overhead), units(s.backward_overhead)) for s in stages]
        self._time = [s.forward + s.backward for s in stages]
        self._sums = list(accumulate((s.forward for s in stages), initial=0.0))
        count = len(stages) if most >= 0 else 0
        self._costs = _XP.full((count, count, most + 1), inf)
        self._late = self._costs.copy()
        for length in range(count):
            for s in range(count - length):
                self._fill(s, s + length)

    def tape_need(self, s: int, t: int) -> int:
        """Units to tape stage ``s`` now, and later to reverse it."""
        forward, backward = self._more[s]
        return self.taped[s] + max(self.out[t + 1] + forward, self.out[s + 1] + self.out[s] + backward)

    def run_need(self, s: int, k: int) -> int:
        """Units to run stage ``k`` after others from ``s`` on, nothing kept."""
        return (self.out[k] if k > s else 0) + self.out[k + 1] + self._more[k][0]

    def least(self) -> int:
        """The first amount of memory for which the whole chain has a plan; one more than ``most`` if there is none."""
        return int(_XP.isinf(self._costs[0, -1]).sum())

    def cost(self, s: int, t: int, m: int) -> float:
        """``C(s, t, m)``."""
        return float(self._costs[s, t, m]) if m >= 0 else inf

    def choice(self, s: int, t: int, m: int) -> int:
        """``s``: tape it now; otherwise the stage whose input to keep."""
        best = self.cost(s, t, m)
        if m >= self.tape_need(s, t) and best == self._taped_now(s, t, m):
            return s
        for cut in range(s + 1, t + 1):  # the first: to run up to a later stage takes no fewer units
            late, early = self.cost(cut, t, m - self.out[cut]), self.cost(s, cut - 1, m)
            if best == late + early + (self._sums[cut] - self._sums[s]):
                return cut
        raise AssertionError("a cost comes from one of the two ways")

    def _taped_now(self, s: int, t: int, m: int) -> float:
        return (self.cost(s + 1, t, m - self.taped[s]) if s < t else 0.0) + self._time[s]

    def _fill(self, s: int, t: int) -> None:
        best = self._costs[s, t]
        size, out = len(best), self.out
        need, taped = min(self.tape_need(s, t), size), self.taped[s]
        best[need:] = self._time[s]
        if s < t:
            best[need:] += self._costs[s + 1, t, need - taped : size - taped]
            cuts = range(s + 1, t + 1)
            run = [max(out[t + 1] + self.run_need(s, cut - 1), out[cut]) for cut in cuts]
            both = self._late[s + 1 : t + 1, t] + self._costs[s, s:t]
            both += _XP.array([self._sums[cut] - self._sums[s] for cut in cuts])[:, None]
            for row, least in zip(both, accumulate(run, max), strict=True):
                row[:least] = inf
            _XP.minimum(best, both.min(axis=0), out=best)
        self._late[s, t, out[s] :] = best[: max(0, size - out[s])]
