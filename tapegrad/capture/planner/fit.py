"""Fitting: a program that takes at most so many bytes, since it makes values again in place of keeping them.

Orders with repeated steps come from simulated eviction (``eviction``), and each is polished: what need not be made
again, since there is room to keep it, is kept (``polish``).  Attempts differ in the setting; in how much less room the
simulation has than the polishing; and in cuts: chains whose links hang together by several values (the state of an
LSTM) would be cut at places that do not match, so simulations are also run that keep all that crosses some cuts of the
program's first part, up to its peak.  The best attempts so far say which are next.  Then the arena is planned, and
where it is too large, all is done again within fewer bytes.  Nothing depends on time or chance, so plans can be
repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from tapegrad.capture import arena
from tapegrad.capture.planner.polish import polished
from tapegrad.capture.planner.schedule import Account, Graph, delayed, early
from tapegrad.capture.planner.simulate import NoRoomError, Setting, Simulation
from tapegrad.capture.program import Kind, Program, Step, results
from tapegrad.device import CPU
from tapegrad.errors import BudgetError
from tapegrad.sizes import format_bytes

_XP = CPU.xp
_SETTINGS = (
    Setting(1, 1, 1, False), Setting(1, 0.5, 1, True), Setting(1, 1, 0.5, True), Setting(1, 2, 0.5, True),
    Setting(0.5, 1, 0.5, False), Setting(1, 0.5, 0.5, False), Setting(1, 1, 0.5, False),
)  # fmt: skip
_CUTS = (0, 2, 4, 6, 8, 12, 16, 24)
"""In how many pieces the part before the peak is cut."""
_ROOMS = (1.0, 0.85, 0.7, 0.55, 0.4)
"""Parts of the limit that simulations have; the rest is for polishing."""
MOST_STEPS = 100_000
"""Steps simulated and polished in one search; some 15 us each."""
_PATIENCE = 16
"""Attempts without a cheaper order after which a search ends."""
_MOST_COST = 5
"""No plan costs more than so many times the plain program."""
_BEST = 2
"""Attempts of a search that are repeated within fewer bytes."""
_TRIES = 6
"""Searches within fewer bytes, until the arena is small enough."""
_MARGIN = 0.005
"""How many bytes fewer than the arena's gaps ask for, as a part, more with each search."""
_LEAST_STEPS = 10
"""Steps of the search for the least bytes."""


class Attempt(NamedTuple):
    """Which setting, number of cuts and part of the room."""

    setting: int
    cuts: int
    room: int

    def next(self) -> Iterator[Attempt]:
        """Those that differ in one thing."""
        setting, cuts, room = self
        yield from (Attempt(setting, cuts, r) for r in (room + 1, room - 1) if 0 <= r < len(_ROOMS))
        yield from (Attempt(setting, c, room) for c in (cuts + 1, cuts - 1) if 0 <= c < len(_CUTS))
        yield from (Attempt(s, cuts, room) for s in range(len(_SETTINGS)))


_FIRST = [Attempt(2, 0, 2), *(Attempt(*x[::-1]) for x in product((0, 2), (4, 0, 2), (0, 1)))]
_ALL = [Attempt(*x) for x in product(range(len(_SETTINGS)), range(len(_CUTS)), range(len(_ROOMS)))]
_LEAST = [Attempt(setting, cuts, 0) for setting in (0, 4, 2, 1) for cuts in (4, 0, 7)]


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
        self._cut: dict[int, set[int]] = {}

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
                account = next((a for x in _LEAST if (a := self._attempted(middle, x)[0])), None)
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
        target = limit
        attempts: Sequence[Attempt] | None = None
        for number in range(_TRIES):
            found = self._searched(target, attempts)
            if not found and number:
                found = self._searched(target, None)
            if not found:
                return None
            attempts = [x for x, _ in found]
            plan = self._plan(found[0][1], limit)
            if plan.layout.nbytes <= limit:
                return plan
            target = int(target * limit / plan.layout.nbytes * (1.0 - _MARGIN * (number + 1))) - self._alignment
        return None

    # Searching -----------------------------------------------------------------------------------------------------

    def _searched(self, limit: int, only: Sequence[Attempt] | None) -> list[tuple[Attempt, Account]]:
        """The attempts whose orders cost least, where values take at most ``limit`` bytes; the best first."""
        if limit < self._lower_bound():
            return []
        found: dict[Attempt, Account | None] = {}
        best: list[tuple[float, int, Attempt, Account]] = []
        left, since = MOST_STEPS, 0
        for x in self._attempts(found) if only is None else only:
            account, steps = self._attempted(limit, x)
            found[x] = account
            left -= steps
            since += 1
            if account is not None and all(account[1:] != other[1:] for *_, other in best):
                best = sorted([*best, (account.cost, account.peak, x, account)])[:_BEST]
                since = 0 if best[0][2] == x else since
            if left <= 0 or since > _PATIENCE:
                break
        return [(x, account) for _, _, x, account in best]

    def _attempts(self, found: dict[Attempt, Account | None]) -> Iterator[Attempt]:
        """Some; then always those next to the best; all if there is none."""
        yield from _FIRST
        looked: set[Attempt] = set()
        while near := min(((a.cost, x) for x, a in found.items() if a is not None and x not in looked), default=None):
            looked.add(near[1])
            yield from (x for x in near[1].next() if x not in found)
        yield from (x for x in _ALL if x not in found)

    def _attempted(self, limit: int, x: Attempt) -> tuple[Account | None, int]:
        """What an attempt finds, and the number of steps that it took."""
        self.simulations += 1
        order, taken = self._simulated(limit, x, keeps_bare=True)
        if order is None and self._graph.has_bare:
            order, more = self._simulated(limit, x, keeps_bare=False)
            taken += more
        account = None if order is None else self._graph.account(order)
        if account is None or account.peak > limit:
            return None, taken
        return polished(self._graph, account, limit), 2 * taken

    def _simulated(self, limit: int, x: Attempt, keeps_bare: bool) -> tuple[list[int] | None, int]:
        graph, cuts = self._graph, self._crossing(_CUTS[x.cuts])
        most_cost = _MOST_COST * graph.total_cost
        simulation = Simulation(
            graph, limit * _ROOMS[x.room], _SETTINGS[x.setting], most_cost, cuts, keeps_bare, self._early
        )
        try:
            order = simulation.run()
        except NoRoomError:
            order = None
        return order, max(len(simulation.order), len(graph.reads) // 8)

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
    for s, p in enumerate(graph.producers if cuts else ()):
        if p >= 0:
            for at, following in zip(cuts, [*cuts[1:], end], strict=True):
                if p <= at and any(at < u <= following for u in graph.uses[s]):
                    kept.add(s)
                    break
    return kept
