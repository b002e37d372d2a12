"""Fitting: a program that takes at most so many bytes, since it makes values again in place of keeping them.

Orders with repeated steps come from simulated eviction (``eviction``) with many settings; those that are good are
polished: what need not be made again, since there is room to keep it, is kept.  Then the arena is planned, and where it
is too large, all is done again within fewer bytes.  Nothing depends on time or chance, so plans can be repeated.

Chains whose links hang together by several values (the state of an LSTM) would be cut at places that do not match; so
simulations are also run that keep all that crosses some cuts of the program's first part, up to its peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from tapegrad.device import CPU
from tapegrad.errors import BudgetError
from tapegrad.memory.sizes import format_bytes
from tapegrad.program import arena
from tapegrad.program.eviction import NoRoomError, Setting, Simulation
from tapegrad.program.orders import Account, Graph
from tapegrad.program.program import Kind, Program, Step, results

_XP = CPU.xp
_SETTINGS = (
    Setting(1, 1, 0.5, True), Setting(1, 1, 1, False), Setting(1, 0.5, 1, True), Setting(0.5, 1, 0.5, True),
    Setting(1, 2, 0.5, True), Setting(0.5, 1, 0.5, False), Setting(1, 1, 1, True), Setting(1, 0.5, 0.5, True),
)  # fmt: skip
_CUTS = (8, 0, 16, 4, 12, 24, 2, 6)
"""In how many pieces the part before the peak is cut; the first is tried with all settings."""
_MOST_STEPS = 50_000
"""Steps simulated in one search; some 50 us each."""
_POLISHED = 4
"""Orders polished, the cheapest."""
_MOST_COST = 5
"""No plan costs more than so many times the plain program."""
_TRIES = 8
"""Searches within fewer bytes, until the arena is small enough."""
_LEAST_STEPS = 10
"""Steps of the search for the least bytes."""


Attempt = tuple[Setting, int]
"""A setting, and in how many pieces the part before the peak is cut."""


_LEAST_ATTEMPTS = [(setting, cuts) for setting in _SETTINGS[:2] + _SETTINGS[4:6] for cuts in (8, 0, 24)]


class Plan(NamedTuple):
    """A fitted program with its layout, and what its repeated steps cost over the plain program, as a ratio."""

    program: Program
    layout: arena.Layout
    extra: float


class Planner:
    """Fits one program within different limits; ``simulations`` counts what that has taken."""

    def __init__(self, program: Program, alignment: int) -> None:
        self.simulations = 0
        self._alignment = alignment
        self._graph = Graph(program, alignment)
        self._plain_account = self._graph.account(range(len(program.steps)))
        self.plain = Plan(program, arena.plan(program, alignment), 0.0)
        self._plans = [self.plain]
        self._least: Plan | None = None
        self._cut: dict[int, set[int]] = {}
        self._winners: list[Attempt] = []

    def fit(self, limit: int) -> Plan:
        """The cheapest plan found whose arena takes at most ``limit`` bytes.  Raises BudgetError."""
        if self.plain.layout.nbytes > limit:
            self._add(self._planned(limit))
            if not self._known(limit):
                least = self.least()
                if least.layout.nbytes > limit:
                    raise self._infeasible(limit, least)
        return min(self._known(limit), key=lambda p: (p.extra, p.layout.nbytes))

    def pareto(self, count: int = 10) -> list[tuple[int, float]]:
        """(arena bytes, extra cost ratio) of plans from the least bytes to the plain program; none is worse in both."""
        least, most = self.least().layout.nbytes, self.plain.layout.nbytes
        for i in range(1, count - 1):
            self._add(self._planned(least + (most - least) * i // (count - 1)))
        found: list[tuple[int, float]] = []
        for p in sorted(self._plans, key=lambda p: (p.layout.nbytes, p.extra)):
            if not found or p.extra < found[-1][1]:
                found.append((p.layout.nbytes, p.extra))
        return found

    def least(self) -> Plan:
        """The plan that takes the least bytes."""
        if self._least is None:
            low, high = self._lower_bound(), self._plain_account.peak
            self._least = self.plain
            for _ in range(_LEAST_STEPS):
                if high - low <= max(self._alignment, high // 50):
                    break
                middle = (low + high) // 2
                account = self._searched(middle, _LEAST_ATTEMPTS)
                if account is None:
                    low = middle
                    continue
                high = min(middle, account.peak)
                plan = self._plan(account)
                self._add(plan)
                if plan.layout.nbytes < self._least.layout.nbytes:
                    self._least = plan
        return self._least

    def _known(self, limit: int) -> list[Plan]:
        return [p for p in self._plans if p.layout.nbytes <= limit]

    def _add(self, plan: Plan | None) -> None:
        if plan is not None:
            self._plans.append(plan)

    def _plan(self, account: Account) -> Plan:
        program = self._graph.rewritten(account.order)
        extra = account.cost / self._plain_account.cost - 1.0
        return Plan(program, arena.plan(program, self._alignment), extra)

    def _planned(self, limit: int) -> Plan | None:
        """The plan of one search, or of several within fewer bytes where the arena has gaps."""
        target = limit
        for number in range(_TRIES):
            account = self._searched(target, self._winners if number else None)
            if account is None:
                return None
            plan = self._plan(account)
            if plan.layout.nbytes <= limit:
                return plan
            target = min(target * limit // plan.layout.nbytes, target - self._alignment)
        return None

    # Searching -----------------------------------------------------------------------------------------------------

    def _searched(self, limit: int, attempts: Sequence[Attempt] | None = None) -> Account | None:
        """The cheapest order found whose values take at most ``limit`` bytes."""
        if limit < self._lower_bound():
            return None
        found: list[tuple[float, int, Account, Attempt]] = []
        best = _MOST_COST * self._graph.total_cost
        scores: dict[Setting, float] = {}
        left = _MOST_STEPS
        for setting, cuts in self._attempts(scores) if attempts is None else attempts:
            if left <= 0:
                break
            account, simulated = self._simulated(limit, setting, cuts, 1.2 * best)
            left -= simulated
            if account is None:
                continue
            scores[setting] = min(account.cost, scores.get(setting, account.cost))
            if all(account.order != other.order for _, _, other, _ in found):
                found.append((account.cost, len(found), account, (setting, cuts)))
            best = min(best, account.cost)
        chosen = sorted(found)[:_POLISHED]
        self._winners = [attempt for _, _, _, attempt in chosen]
        polished = [polish(self._graph, account, limit) for _, _, account, _ in chosen]
        return min(polished, key=lambda account: (account.cost, account.peak), default=None)

    def _attempts(self, scores: dict[Setting, float]) -> Iterator[Attempt]:
        """All settings with some cuts, then the best of them with others."""
        first, *others = _CUTS
        yield from ((setting, first) for setting in _SETTINGS)
        if scores:
            best = sorted(_SETTINGS, key=lambda s: scores.get(s, inf))
            yield from ((setting, cuts) for setting in best[:2] for cuts in others)
            yield from ((setting, cuts) for setting in best[2:] for cuts in others)
        else:
            yield from ((setting, cuts) for cuts in others for setting in _SETTINGS)

    def _simulated(self, limit: int, setting: Setting, cuts: int, most_cost: float) -> tuple[Account | None, int]:
        """What one simulation has found, and the number of steps that it took."""
        self.simulations += 1
        simulation = Simulation(self._graph, limit, setting, most_cost, self._crossing(cuts))
        try:
            order = simulation.run()
        except NoRoomError:
            order = None
        account = None if order is None else self._graph.account(order)
        taken = max(len(simulation.order), len(self._graph.reads) // 8)
        return (account if account is None or account.peak <= limit else None), taken

    def _crossing(self, pieces: int) -> set[int]:
        """The slots that the next piece reads of what was made before it, for pieces of about the same cost."""
        if pieces not in self._cut:
            self._cut[pieces] = _crossing(self._graph, self._plain_account, pieces)
        return self._cut[pieces]

    # Limits --------------------------------------------------------------------------------------------------------

    def _lower_bound(self) -> int:
        """Bytes that no order can do without: of one step, or of all that is given out."""
        graph = self._graph
        most = sum(graph.sizes[s] for s in graph.finals)
        for i, (reads, writes) in enumerate(zip(graph.reads, graph.writes, strict=True)):
            nbytes = sum(graph.sizes[s] for s in {*reads, *writes}) + graph.temporaries[i]
            if graph.replaced[i]:
                nbytes -= graph.sizes[graph.replaced[i][0]]
            most = max(most, nbytes)
        return most

    def _infeasible(self, limit: int, least: Plan) -> BudgetError:
        account = Graph(least.program, self._alignment)
        taken = account.account(range(len(least.program.steps)))
        step = least.program.steps[taken.live.index(taken.peak)] if taken.live else None
        nbytes = least.layout.nbytes
        return BudgetError(
            f"a program of {len(least.program.steps)} works needs {format_bytes(nbytes)} ({nbytes} bytes) at least for "
            f"what it makes{_at(step)}, and there are {format_bytes(limit)}",
            nbytes,
        )


def fit(program: Program, budget: int, alignment: int) -> Program:
    """The program, some of its steps repeated so that all that it takes is at most ``budget`` bytes; itself if it is.

    What it takes are its arena, and the variables and constants that it reads.  Raises BudgetError, whose
    ``needed_bytes`` is the least budget found.
    """
    bound = bound_bytes(program)
    try:
        return Planner(program, alignment).fit(max(0, budget - bound)).program
    except BudgetError as e:
        needed = e.needed_bytes + bound
        raise BudgetError(f"{e}: the budget is {budget} bytes, {bound} of variables and constants; {needed} are needed",
                          needed) from None  # fmt: skip


def bound_bytes(program: Program) -> int:
    """Bytes of the variables and constants that a program reads."""
    views = (*(v for step in program.steps for v in step.reads), *results(program))
    slots = {id(v.slot): v.slot for v in views if v.slot.kind in (Kind.VARIABLE, Kind.CONSTANT)}
    return sum(slot.nbytes for slot in slots.values())


def _at(step: Step | None) -> str:
    if step is None:
        return ""
    line = "" if step.place is None else f" ({step.place[0]}:{step.place[1]})"
    return f", most of it at {', '.join(step.names)}{line}"


def _crossing(graph: Graph, plain: Account, pieces: int) -> set[int]:
    if pieces < 2 or not plain.live:
        return set()
    end = plain.order[plain.live.index(plain.peak)]
    crossing = _XP.zeros(len(graph.reads) + 1)
    for s, p in enumerate(graph.producers):
        before = [u for u in graph.uses[s] if u <= end]
        if p >= 0 and before:
            crossing[p] += graph.sizes[s]
            crossing[before[-1]] -= graph.sizes[s]
    crossing = _XP.cumsum(crossing)
    done = _XP.cumsum(graph.costs)
    cuts: list[int] = []
    for j in range(1, pieces):
        low, high = (int(_XP.searchsorted(done, done[end] * (j + d) / pieces)) for d in (-0.4, 0.4))
        high = min(max(high, low + 1), end)
        if low < end:
            at = low + int(crossing[low:high].argmin())
            if not cuts or at > cuts[-1]:
                cuts.append(at)
    kept: set[int] = set()
    for s, p in enumerate(graph.producers):
        if p >= 0:
            for at, following in zip(cuts, [*cuts[1:], end], strict=True):
                if p <= at and any(at < u <= following for u in graph.uses[s]):
                    kept.add(s)
                    break
    return kept


# Polishing -----------------------------------------------------------------------------------------------------------


def polish(graph: Graph, account: Account, limit: int) -> Account:
    """An order that repeats fewer steps, where what they make can be kept within ``limit`` bytes."""
    while True:
        live = _XP.array(account.live)
        dropped: set[int] = set()
        for _, q, kept in sorted(_repeats(graph, account.order), reverse=True):
            if all(live[d:q].max() + nbytes <= limit for d, nbytes in kept):
                more = _XP.zeros(len(live), live.dtype)
                for d, nbytes in kept:
                    more[d:q] += nbytes
                if (live + more).max() <= limit:
                    live += more
                    dropped.add(q)
        if not dropped:
            return account
        shorter = graph.account([i for q, i in enumerate(account.order) if q not in dropped])
        if shorter.peak > limit or shorter.cost >= account.cost:
            return account
        account = shorter


def _repeats(graph: Graph, order: Sequence[int]) -> list[tuple[float, int, list[tuple[int, int]]]]:
    """Steps done again: what that costs by the byte, where, and from where on how much would have to be kept."""
    wanted = _wanted(graph, order)
    last: dict[int, int] = {}
    done: set[int] = set()
    found = []
    for q, i in enumerate(order):
        if i in done:
            kept = [(last[s], graph.sizes[s]) for s in wanted[q]]
            found.append((graph.costs[i] / max(1, sum(n for _, n in kept)), q, kept))
        done.add(i)
        for s in (*graph.reads[i], *graph.writes[i]):
            last[s] = q
    return found


def _wanted(graph: Graph, order: Sequence[int]) -> list[list[int]]:
    """Of each step of the order, which slots that it writes are read before they are written again."""
    wanted = set(graph.finals)
    found: list[list[int]] = []
    for i in reversed(order):
        found.append([s for s in graph.writes[i] if s in wanted])
        wanted.difference_update(graph.writes[i])
        wanted.update(graph.reads[i])
    return found[::-1]
