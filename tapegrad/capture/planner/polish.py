"""Polishing: an order that does fewer steps again, where what they make can be kept within the limit.

What goes first saves the most cost by the byte that is kept for it.  A step that is not done again saves more than its
own cost: what was recomputed for it alone is not done again either, and its bytes are free.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from tapegrad.capture.planner.schedule import Account, Graph
from tapegrad.device import CPU

_XP = CPU.xp
_NOTHING = -(1 << 60)
"""Bytes alive where a step was."""

Value = tuple[int, int]
"""What is held: the position at which it was made (-1: an argument), and its slot."""
Stretch = tuple[int, int, int]
"""Positions from the first to before the last, and the bytes that are held there."""


def polished(graph: Graph, account: Account, limit: int) -> Account:
    """``account``, or that of an order that costs less and takes at most ``limit`` bytes, too."""
    while True:
        order = _Shorter(graph, account, limit).order()
        shorter = graph.account(order)
        if shorter.peak > limit or shorter.cost >= account.cost:
            return account
        account = shorter


class _Leaving(NamedTuple):
    """What leaving out a step does: the cost saved, and by the byte; who makes its values instead; and what changes."""

    saved: float
    by_byte: float
    maker: int
    gone: list[int]
    held: list[Stretch]
    freed: list[Stretch]
    readers: dict[Value, list[int]]


class _Shorter:
    """One pass over the steps of an order that are done again."""

    def __init__(self, graph: Graph, account: Account, limit: int) -> None:
        self._graph, self._steps, self._limit = graph, account.order, limit
        count = len(self._steps)
        self._live = _XP.array([*account.live, 0])
        self._gone = [False] * count
        self._before = [-1] * count
        self._sources: list[list[Value]] = []
        self._readers: dict[Value, list[int]] = {}
        made: dict[int, int] = {}
        done: dict[int, int] = {}
        for at, i in enumerate(self._steps):
            self._sources.append([(made.get(s, -1), s) for s in graph.reads[i]])
            for value in self._sources[at]:
                self._readers.setdefault(value, []).append(at)
            self._before[at] = done.get(i, -1)
            done[i] = at
            made.update(dict.fromkeys(graph.writes[i], at))
        for s in graph.finals:
            self._readers.setdefault((made.get(s, -1), s), []).append(count)

    def order(self) -> list[int]:
        """The steps that are left, best savings first left out."""
        heap = [(-self._leaving(at).by_byte, at) for at, before in enumerate(self._before) if before >= 0]
        heapify(heap)
        while heap:
            _, at = heappop(heap)
            if self._gone[at]:
                continue
            leaving = self._leaving(at)
            if heap and -leaving.by_byte > heap[0][0]:  # it saves less than when it was put there
                heappush(heap, (-leaving.by_byte, at))
            elif self._fits(leaving):
                self._leave(at, leaving)
        return [i for i, gone in zip(self._steps, self._gone, strict=True) if not gone]

    def _leaving(self, at: int) -> _Leaving:
        maker = self._before[at]
        while self._gone[maker]:
            maker = self._before[maker]
        held = [x for s in self._written(at) for x in self._longer(maker, at, s)]
        gone, saved = [at], 0.0
        readers: dict[Value, list[int]] = {}
        for x in gone:  # it grows
            saved += self._graph.costs[self._steps[x]]
            for value in self._sources[x]:
                left = readers[value] = [r for r in readers.get(value, self._readers[value]) if r != x]
                source = value[0]
                if not left and source not in (-1, maker) and self._is_idle(source, readers):
                    gone.append(source)
        freed = []
        for value, left in readers.items():
            source, s = value
            begin, end = (left[-1] if left else source) + 1, self._readers[value][-1]
            if begin < end:
                freed.append((begin, end, self._graph.sizes[s]))
        return _Leaving(saved, saved / max(1, sum(n for _, _, n in held)), maker, gone, held, freed, readers)

    def _written(self, at: int) -> list[int]:
        """The slots that it writes and somebody reads."""
        return [s for s in self._graph.writes[self._steps[at]] if self._readers.get((at, s))]

    def _longer(self, maker: int, at: int, s: int) -> list[Stretch]:
        """Where ``s`` is held so that who read it as made at ``at`` can read it as made before."""
        readers = self._readers.get((maker, s))
        begin = maker + 1
        if readers:
            begin = readers[-1] + (s not in self._graph.replaced[self._steps[readers[-1]]])
        return [(begin, at, self._graph.sizes[s])] if begin < at else []

    def _is_idle(self, at: int, readers: dict[Value, list[int]]) -> bool:
        """Whether nobody reads what it writes, where ``readers`` of some values have changed."""
        step = self._steps[at]
        values = [(at, s) for s in self._graph.writes[step]]
        return not self._graph.program.steps[step].effect and not any(
            readers.get(v, self._readers.get(v)) for v in values
        )

    def _fits(self, leaving: _Leaving) -> bool:
        if not leaving.held:
            return True
        first, last = min(x[0] for x in leaving.held), max(x[1] for x in leaving.held)
        live = self._live[first:last].copy()
        for begin, end, nbytes in leaving.freed:
            live[max(begin - first, 0) : max(end - first, 0)] -= nbytes
        for begin, end, nbytes in leaving.held:
            live[begin - first : end - first] += nbytes
        live[[x - first for x in leaving.gone if first <= x < last]] = _NOTHING
        return bool(live.max() <= self._limit)

    def _leave(self, at: int, leaving: _Leaving) -> None:
        for begin, end, nbytes in leaving.freed:
            self._live[begin:end] -= nbytes
        for begin, end, nbytes in leaving.held:
            self._live[begin:end] += nbytes
        for x in leaving.gone:
            self._gone[x] = True
            self._live[x] = _NOTHING
        self._readers.update(leaving.readers)
        for s in self._written(at):
            moved = self._readers.pop((at, s))
            self._readers[leaving.maker, s] = sorted([*self._readers.get((leaving.maker, s), ()), *moved])
            for r in moved:
                if r < len(self._steps):
                    self._sources[r] = [(leaving.maker if v == (at, s) else v[0], v[1]) for v in self._sources[r]]
