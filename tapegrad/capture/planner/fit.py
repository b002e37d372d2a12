"""Fitting: the order of a program's steps, some of them repeated, that takes at most so many bytes at the least cost.

Orders come from two sources.  ``segments`` keeps whole states at cuts, which suits loops and chains, whatever their
rules read; ``simulate`` evicts single values with the next use known, which suits programs of unlike layers.  Each
order is polished: steps that need not be repeated, since there are bytes to keep their results, are left out
(``polish``).  Attempts differ in the source and in how many bytes they have fewer than the polishing; the best so far
say which are next.  Then the arena is planned, and where it is too large, all is done once more within fewer bytes.
Nothing depends on time or chance, so a program always gets the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

from tapegrad.capture import arena
from tapegrad.capture.planner.polish import polished
from tapegrad.capture.planner.schedule import Account, Graph, delayed, early
from tapegrad.capture.planner.segments import Segments
from tapegrad.capture.planner.simulate import NoRoomError, Setting, Simulation
from tapegrad.capture.program import Kind, Program, Step, results
from tapegrad.errors import BudgetError
from tapegrad.sizes import format_bytes

_SOURCES: tuple[int | Setting, ...] = (
    48, 24, 64,
    Setting(1, 1, 1, False), Setting(1, 0.5, 1, True), Setting(1, 1, 0.5, True), Setting(1, 2, 0.5, True),
    Setting(0.5, 1, 0.5, False), Setting(1, 0.5, 0.5, False), Setting(1, 1, 0.5, False),
)  # fmt: skip
"""Where orders come from: numbers of blocks (``segments``), and settings of simulations."""
_ROOMS = (1.0, 0.85, 0.7, 0.55, 0.4)
"""Parts of the limit that attempts have; the rest is for polishing."""
MOST_STEPS = 60_000
"""Steps simulated and polished in one search; some 15 us each."""
_PATIENCE = 16
"""Attempts without a cheaper order after which a search ends."""
_MOST_COST = 5
"""No plan costs more than so many times the plain program."""
_NEAR = 1.5
"""How many times the best cost an order may cost before it is polished."""
_BEST = 2
"""Attempts of a search whose arenas are tried, and which are repeated within fewer bytes."""
_TRIES = 6
"""Searches within fewer bytes, until the arena is small enough."""
_MARGIN = 0.005
"""How many bytes fewer than the arena's gaps ask for, as a part, more with each search."""
_MORE = 1.05
"""How many times more the repeated attempts may cost before others are made, too."""
_LEAST_STEPS = 10
"""Steps of the search for the least bytes."""


class Attempt(NamedTuple):
    """An attempt at an order: its source, of ``_SOURCES``, and the part of the limit that it has, of ``_ROOMS``."""

    source: int
    room: int

    def next(self) -> Iterator[Attempt]:
        """Those that differ in one thing."""
        source, room = self
        yield from (Attempt(source, r) for r in (room + 1, room - 1) if 0 <= r < len(_ROOMS))
        yield from (Attempt(s, room) for s in range(len(_SOURCES)))


_FIRST = [Attempt(*x) for x in ((0, 0), (0, 3), (3, 2), (5, 2), (4, 0), (0, 1), (1, 1), (4, 2), (3, 0))]
_ALL = [Attempt(*x) for x in product(range(len(_SOURCES)), range(len(_ROOMS)))]
_LEAST = [Attempt(source, 0) for source in (0, 1, 3, 7, 5, 4)]


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
        plain = Graph(program, alignment)
        self._graph = Graph(plain.rewritten(delayed(plain)), alignment)
        self._early = early(self._graph)
        self._plain_account = self._graph.account(range(len(self._graph.reads)))
        self.plain = Plan(program, arena.plan(program, alignment), 0.0)
        self._plans = [self.plain]
        self._least: Plan | None = None
        self._segments: dict[int, Segments] = {}

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
            left = MOST_STEPS
            for _ in range(_LEAST_STEPS):
                if high - low <= max(self._alignment, high // 50) or left <= 0:
                    break
                middle = (low + high) // 2
                account = None
                for x in _LEAST:
                    account, steps = self._attempted(middle, x)
                    left -= steps
                    if account is not None or left <= 0:
                        break
                if account is None:
                    low = middle
                    continue
                high = min(middle, account.peak)
                plan = self._plan(account, 0)
                self._add(plan)
                if plan.layout.nbytes < self._least.layout.nbytes:
                    self._least = plan
            self._add(self._planned(self._least.layout.nbytes))
            self._least = min(self._known(self._least.layout.nbytes), key=lambda p: p.extra)
        return self._least

    def _known(self, limit: int) -> list[Plan]:
        return [p for p in self._plans if p.layout.nbytes <= limit]

    def _add(self, plan: Plan | None) -> None:
        if plan is not None:
            self._plans.append(plan)

    def _plan(self, account: Account, limit: int) -> Plan:
        program = self._graph.rewritten(account.order)
        extra = account.cost / self._plain_account.cost - 1.0
        return Plan(program, arena.plan(program, self._alignment, enough=limit), extra)

    def _planned(self, limit: int) -> Plan | None:
        """The plan of one search, or of several within fewer bytes where the arena has gaps."""
        best: Plan | None = None
        target, attempts, cost = limit, None, inf
        for number in range(_TRIES):
            orders = self._searched(target, attempts)
            if number and (not orders or orders[0][1].cost > _MORE * cost):
                orders = self._searched(target, None)
            if not orders:
                break
            plans = []
            for _, account in orders:
                plans.append(plan := self._plan(account, limit))
                if plan.layout.nbytes <= limit:
                    best = plan if best is None else min(best, plan, key=lambda p: p.extra)
                    break
            if best is not None and best.extra <= plans[0].extra:
                break
            attempts, cost = [x for x, _ in orders], orders[0][1].cost
            target = int(target * limit / plans[0].layout.nbytes * (1.0 - _MARGIN * (number + 1))) - self._alignment
        return best

    # Searching -----------------------------------------------------------------------------------------------------

    def _searched(self, limit: int, only: Sequence[Attempt] | None) -> list[tuple[Attempt, Account]]:
        """The attempts whose orders cost least, where values take at most ``limit`` bytes; the best first."""
        if limit < self._lower_bound() or not self._plain_account.live:
            return []
        accounts: dict[Attempt, Account | None] = {}
        best: list[tuple[float, int, Attempt, Account]] = []
        left, since = MOST_STEPS, 0
        for x in self._attempts(accounts) if only is None else only:
            account, steps = self._attempted(limit, x, best[0][0] if best else inf)
            accounts[x] = account = None if account is None else polished(self._graph, account, limit)
            left -= 2 * steps
            since += 1
            if account is not None and all(account[1:] != other[1:] for *_, other in best):
                best = sorted([*best, (account.cost, account.peak, x, account)], key=lambda b: b[:2])[:_BEST]
                since = 0 if best[0][2] == x else since
            if left <= 0 or since > _PATIENCE:
                break
        return [(x, account) for _, _, x, account in best]

    def _attempts(self, accounts: dict[Attempt, Account | None]) -> Iterator[Attempt]:
        """Some; then always those next to the best; all if there is none."""
        yield from _FIRST
        looked: set[Attempt] = set()
        while near := [(a.cost, x) for x, a in accounts.items() if a is not None and x not in looked]:
            _, best = min(near, key=lambda n: n[0])
            looked.add(best)
            yield from (x for x in best.next() if x not in accounts)
        yield from (x for x in _ALL if x not in accounts)

    def _attempted(self, limit: int, x: Attempt, most_cost: float = inf) -> tuple[Account | None, int]:
        """The order of an attempt, of about ``most_cost`` at most, and the number of steps that it took."""
        self.simulations += 1
        graph, source, room = self._graph, _SOURCES[x.source], int(limit * _ROOMS[x.room])
        most_cost = min(_MOST_COST * graph.total_cost, _NEAR * most_cost)
        if isinstance(source, int):
            if source not in self._segments:
                self._segments[source] = Segments(graph, self._plain_account, source)
            account = self._segments[source].within(room)
            if account is None or account.cost > most_cost:
                return None, len(graph.reads)
            return account, len(account.order)
        order, taken = self._simulated(room, source, most_cost, keeps_bare=True)
        if order is None and graph.has_bare:
            order, more = self._simulated(room, source, most_cost, keeps_bare=False)
            taken += more
        account = None if order is None else graph.account(order)
        return None if account is None or account.peak > limit else account, taken

    def _simulated(
        self, room: int, setting: Setting, most_cost: float, keeps_bare: bool
    ) -> tuple[list[int] | None, int]:
        simulation = Simulation(self._graph, room, setting, most_cost, keeps_bare, self._early)
        try:
            order = simulation.run()
        except NoRoomError:
            order = None
        return order, max(len(simulation.order), len(self._graph.reads) // 8)

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
        step = least.program.steps[taken.at_peak] if taken.live else None
        nbytes = least.layout.nbytes
        return BudgetError(
            f"a program of {len(least.program.steps)} tasks needs {format_bytes(nbytes)} ({nbytes} bytes) at least for "
            f"what it makes{_at(step)}, and there are {format_bytes(limit)}",
            nbytes,
        )


def fit(program: Program, budget: int, alignment: int) -> Program:
    """The program, some of its steps repeated so that all that it takes is at most ``budget`` bytes.

    What it takes are its arena, and the variables and constants that it reads.  Raises BudgetError, whose
    ``needed_bytes`` is the least budget found.
    """
    bound = bound_bytes(program)
    try:
        fitted = Planner(program, alignment).fit(max(0, budget - bound)).program
    except BudgetError as e:
        needed = e.needed_bytes + bound
        raise BudgetError(f"{e}: the budget is {budget} bytes, {bound} of variables and constants; {needed} are needed",
                          needed) from None  # fmt: skip
    return replace(fitted, plain=None if fitted is program else program, limited=True)


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
