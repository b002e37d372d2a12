"""Eviction, simulated: the steps of a program in their order, within a number of bytes, with the future known.

Where room is needed, the value goes that has the least  cost^a / (bytes^b x distance^c): the cost of recomputing it,
with its neighbourhood of values that are gone, too; the distance, in steps, to where it is read next.  What is gone is
recomputed when a step reads it, with all that it needs.  No setting of a, b, c is the best for all programs (DTR,
Kirisame et al. 2021, arXiv:2006.09616, knows the past alone; the next use instead is worth much in tight budgets), so
the caller tries many.

Before any value goes, steps are done before their turn that write less than what goes with them: a rule reads three
values of the forward, say, and makes one of them, whatever the cotangent is.  This costs nothing.  If what such a step
wrote is evicted, the step waits for its turn again.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from tapegrad.capture.planner.schedule import Graph
from tapegrad.device import CPU
from tapegrad.remat.budget.eviction import Part

_XP = CPU.xp
_NEVER = 2.0**60
"""Where a value is read next that nobody reads any more."""
_DEEPEST = 40
"""Recomputed values while others are recomputed."""
_MOST_SEEN = 48
"""Values that are gone, looked through in search of neighbours."""


class Setting(NamedTuple):
    """Exponents of cost, bytes and distance; ``reach``: whether what is gone nearby counts with the cost."""

    cost: float
    size: float
    distance: float
    reach: bool


class NoRoomError(Exception):
    """The step at which nothing is left to evict, and the bytes that it needs at once."""

    def __init__(self, step: int, nbytes: int) -> None:
        super().__init__(step, nbytes)
        self.step, self.nbytes = step, nbytes


class Simulation:
    """One run; ``order`` is what it finds.

    ``keeps_bare``: whether what cannot be recomputed (an argument, the result
    of a step that is done once) stays when nobody reads it any more: something may be recomputed from it.  ``early``:
    steps that may be done before their turn.
    """

    def __init__(
        self, graph: Graph, limit: float, setting: Setting, most_cost: float, keeps_bare: bool,
        early: Collection[int] = (),
    ) -> None:  # fmt: skip
        self._graph, self._limit, self._setting = graph, limit, setting
        self._most_cost, self._cost = most_cost, 0.0
        count = len(graph.slots)
        self.order: list[int] = []
        self._now = 0
        self._used = 0
        self._resident = [False] * count
        self._made = [False] * count
        self._locks = [0] * count
        self._spared: dict[int, int] = {}
        self._depth = 0
        self._at = [0] * count
        self._next = _XP.full(count, _NEVER)
        self._base = _XP.full(count, inf)
        self._own = [graph.costs[p] if p >= 0 else 0.0 for p in graph.producers]
        self._reached = [0.0] * count
        self._bare = [p < 0 or not graph.repeatable(p) for p in graph.producers]
        self._keeps_bare = keeps_bare
        self._fixed = self._bare.copy()
        for s in graph.finals:
            self._fixed[s] = True
        self._weights = _XP.maximum(_XP.array(graph.sizes, float), 1.0) ** setting.size
        self._parts: list[Part | None] = [None] * count
        self._shares = [0.0] * count
        self._around: list[list[Part]] = [[] for _ in range(count)]
        self._early = early
        self._reserve = max((sum(graph.sizes[s] for s in graph.writes[i]) for i in early), default=0)
        self._ready: list[int] = []
        """Of ``early``, negated, a heap: those that had all that they read when something was offered."""
        self._done_early: set[int] = set()

    def run(self) -> list[int] | None:
        """The order, or None where it costs more than ``most_cost``.  Raises NoRoomError."""
        graph = self._graph
        for s, p in enumerate(graph.producers):
            if p < 0:  # an argument
                self._resident[s] = True
                self._used += graph.sizes[s]
                self._next[s] = graph.uses[s][0] if graph.uses[s] else _NEVER
        for i, reads in enumerate(graph.reads):
            self._now = i
            if i in self._done_early:
                for s in reads:
                    self._advance(s)
                continue
            self._provide(reads)
            self._do(i)
            if self._cost > self._most_cost:
                return None
        return self.order

    # Doing steps ---------------------------------------------------------------------------------------------------

    def _provide(self, slots: tuple[int, ...]) -> None:
        """Make again what is missing of ``slots``; each step once, in the program's order."""
        resident, graph = self._resident, self._graph
        missing = [s for s in slots if not resident[s]]
        if not missing:
            return
        needed: set[int] = set()
        while missing:
            p = graph.producers[missing.pop()]
            if p not in needed:
                if p < 0 or not graph.repeatable(p):
                    raise NoRoomError(self._now, self._used)
                needed.add(p)
                missing += [s for s in graph.reads[p] if not resident[s]]
        if self._depth > _DEEPEST or self._cost > self._most_cost:
            raise NoRoomError(self._now, self._used)
        steps = sorted(needed)
        for p in steps:
            self._spare(graph.reads[p])
        self._spare(slots)
        self._depth += 1
        for p in steps:
            self._provide(graph.reads[p])  # what was spared may have gone all the same
            self._do(p, again=True)
            self._unspare(graph.reads[p])
        self._provide(slots)
        self._depth -= 1
        self._unspare(slots)

    def _spare(self, slots: tuple[int, ...]) -> None:
        """Do not evict them while there are others."""
        for s in slots:
            self._spared[s] = self._spared.get(s, 0) + 1
            self._base[s] = inf

    def _unspare(self, slots: tuple[int, ...]) -> None:
        for s in slots:
            self._spared[s] -= 1
            if not self._spared[s]:
                del self._spared[s]
                self._offer(s)

    def _lock(self, s: int) -> None:
        self._locks[s] += 1
        self._base[s] = inf

    def _unlock(self, s: int) -> None:
        self._locks[s] -= 1
        self._offer(s)

    def _offer(self, s: int) -> None:
        """It may be evicted, or is wanted no more, unless somebody still reads it."""
        if not self._locks[s] and s not in self._spared and self._resident[s]:
            if self._next[s] == _NEVER:
                if not (self._keeps_bare and self._bare[s]):
                    self._forget(s)
            else:
                self._refresh(s)
                following = int(self._next[s])
                if following in self._early and following != self._now and self._is_ready(following):
                    heappush(self._ready, -following)

    def _do(self, i: int, again: bool = False) -> None:
        graph, sizes = self._graph, self._graph.sizes
        reads, writes = graph.reads[i], graph.writes[i]
        for s in reads:
            self._lock(s)
            if not again:
                self._advance(s)
        new = [s for s in writes if not self._resident[s]]
        nbytes = sum(sizes[s] for s in new) + graph.temporaries[i]
        for s in graph.replaced[i]:
            if self._spared.get(s, 0) == again and self._next[s] == _NEVER:
                nbytes -= sizes[s]
                break
        self._free_memory(i, nbytes)
        self.order.append(i)
        self._cost += graph.costs[i]
        self._used += sum(sizes[s] for s in new)
        for s in new:
            self._resident[s] = True
            if not self._made[s]:
                self._made[s] = True
                self._next[s] = graph.uses[s][0] if graph.uses[s] else _NEVER
            else:
                self._returned(s)
        for s in reads:
            self._unlock(s)
        for s in new:
            if self._next[s] != _NEVER:
                self._search(s)
            self._offer(s)

    def _advance(self, s: int) -> None:
        """The use at the present step is over: what follows?"""
        uses, at = self._graph.uses[s], self._at[s]
        while at < len(uses) and uses[at] <= self._now:
            at += 1
        self._at[s] = at
        self._next[s] = uses[at] if at < len(uses) else _NEVER

    # Room ----------------------------------------------------------------------------------------------------------

    def _free_memory(self, i: int, nbytes: int) -> None:
        while self._used + nbytes + self._reserve > self._limit:
            early = self._next_early()
            if early is None or not self._do_early(early, self._used + nbytes > self._limit):
                break
        self._evict_for(i, nbytes)

    def _evict_for(self, i: int, nbytes: int) -> None:
        """Evict values until ``nbytes`` are free."""
        distance = self._setting.distance
        while self._used + nbytes > self._limit:
            scores = self._base
            if distance:
                away = self._next - self._now
                scores = scores / (_XP.sqrt(away) if distance == 0.5 else away**distance)
            s = int(scores.argmin())
            known = self._base[s]
            if known == inf:
                self._evict(self._spared_one(i, nbytes))
                continue
            self._refresh(s)
            if self._base[s] <= known:
                self._evict(s)

    def _spared_one(self, i: int, nbytes: int) -> int:
        """The value to evict of those that were spared; it will be recomputed at once.  Raises NoRoomError."""
        there = (s for s in self._spared if self._resident[s] and not self._locks[s] and not self._fixed[s])
        least = min(there, key=lambda s: (self._own[s] / self._weights[s], s), default=None)
        if least is None:
            raise NoRoomError(i, self._used + nbytes)
        return least

    def _forget(self, s: int) -> None:
        """Nobody wants it any more."""
        self._resident[s] = False
        self._base[s] = inf
        self._used -= self._graph.sizes[s]

    def _is_ready(self, i: int) -> bool:
        """Whether all that step ``i`` of ``early`` reads is there, and will go with it where nobody else reads it."""
        return i not in self._done_early and all(
            self._resident[s] and (
                self._graph.uses[s][-1] > i
                or not (self._next[s] < i or self._locks[s] or s in self._spared or self._fixed[s])
            )
            for s in self._graph.reads[i]
        )  # fmt: skip

    def _next_early(self) -> int | None:
        """The step of ``early`` whose turn is last of those that are ready."""
        while self._ready:
            i = -self._ready[0]
            if i > self._now and self._is_ready(i):
                return i
            heappop(self._ready)
        return None

    def _do_early(self, i: int, evicts: bool) -> bool:
        """Do step ``i`` before its turn, whose room may have to be made first; False: there is none."""
        graph, sizes = self._graph, self._graph.sizes
        ending = [s for s in graph.reads[i] if graph.uses[s][-1] == i]
        nbytes = sum(sizes[s] for s in graph.writes[i]) + graph.temporaries[i]
        nbytes -= next((sizes[s] for s in graph.replaced[i] if s in ending), 0)
        if self._used + nbytes > self._limit:
            if not evicts:
                return False
            for s in graph.reads[i]:
                self._lock(s)
            self._evict_for(i, nbytes)
            for s in graph.reads[i]:
                self._unlock(s)
        self.order.append(i)
        self._cost += graph.costs[i]
        self._done_early.add(i)
        for s in ending:
            self._next[s] = _NEVER
            self._forget(s)
        for s in (s for s in graph.writes[i] if not self._resident[s]):
            self._used += sizes[s]
            self._resident[s] = self._made[s] = True
            self._next[s] = graph.uses[s][0]
            self._search(s)
            self._offer(s)
        return True

    def _evict(self, s: int) -> None:
        self._forget(s)
        maker = self._graph.producers[s]
        if maker in self._done_early and maker > self._now:  # it is done in its turn, or early once more
            self._done_early.discard(maker)
            for r in self._graph.reads[maker]:
                self._next[r] = min(self._next[r], maker)
            return
        if self._setting.reach:
            self._join(s)

    # Neighbourhoods of what is gone ----------------------------------------------------------------------------------

    def _above(self, s: int) -> tuple[float, list[int]]:
        """The cost of values that nobody wants from which ``s`` is made; and values that are wanted, next beyond."""
        graph, cost, beyond = self._graph, 0.0, []
        seen = {s}
        stack = list(graph.reads[graph.producers[s]])
        while stack and len(seen) < _MOST_SEEN:
            r = stack.pop()
            if r in seen or graph.producers[r] < 0:
                continue
            seen.add(r)
            if self._resident[r] or self._parts[r] is not None:
                beyond.append(r)
            else:
                cost += self._own[r]
                stack += graph.reads[graph.producers[r]]
        return cost, beyond

    def _below(self, s: int) -> list[int]:
        """Values that are wanted and were made from ``s``, or from such of it that nobody wants."""
        graph, beyond = self._graph, []
        seen = {s}
        stack = [s]
        while stack and len(seen) < _MOST_SEEN:
            for i in graph.uses[stack.pop()]:
                if i >= self._now:
                    break
                for w in graph.writes[i]:
                    if w in seen or not self._made[w]:
                        continue
                    seen.add(w)
                    if self._resident[w] or self._parts[w] is not None:
                        beyond.append(w)
                    else:
                        stack.append(w)
        return beyond

    def _near(self, s: int) -> list[int]:
        """Return the needed values next to ``s``; note the cost of the unneeded ones that it is computed from."""
        self._reached[s], near = self._above(s)
        return near + self._below(s)

    def _join(self, s: int) -> None:
        """A part for ``s``, which has been evicted, joined with those next to it."""
        near = self._near(s)
        self._shares[s] = self._own[s] + self._reached[s]
        mine = self._parts[s] = Part(self._shares[s])
        for other in near:
            part = self._parts[other]
            if part is not None:
                mine.join(part.all())
            elif self._resident[other] and not self._fixed[other]:
                mine.edge.add(other)
                self._around[other].append(mine)

    def _returned(self, s: int) -> None:
        """``s`` was recomputed: it leaves its part, and the values next to that cost less."""
        if (part := self._parts[s]) is None:
            return
        self._parts[s], part = None, part.all()
        part.cost = max(0.0, part.cost - self._shares[s])
        for other in list(part.edge):
            if self._resident[other]:
                self._refresh(other)
            else:
                part.edge.discard(other)

    def _search(self, s: int) -> None:
        """The parts next to ``s``, which has been made."""
        if not self._setting.reach or self._fixed[s]:
            return
        self._around[s] = []
        for other in self._near(s):
            if (part := self._parts[other]) is not None:
                part = part.all()
                part.edge.add(s)
                self._around[s].append(part)

    def _refresh(self, s: int) -> None:
        if self._locks[s] or s in self._spared or self._fixed[s]:
            return
        cost = self._own[s]
        if self._setting.reach:
            parts: dict[int, Any] = {}
            for part in self._around[s]:
                part = part.all()
                parts[id(part)] = part
            self._around[s] = list(parts.values())
            cost += self._reached[s] + sum([p.cost for p in parts.values()])
        self._base[s] = cost**self._setting.cost / self._weights[s]
