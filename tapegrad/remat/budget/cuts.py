"""Cuts: whole states that a long replay keeps, so that the next replays of a backward pass begin there.

What the next step of a loop reads, but no rule, is freed at its last use.  So a replay may have to begin at the first
step, and without cuts each one would.  A replay knows everything that it is going to run: that sequence is divided into
blocks where few bytes cross, and Rotor says which crossing states to keep with the bytes that are free, and which
blocks to keep the saved values of; those of the others are not kept, since their blocks run again.  A cut stays, whole,
until the backward pass has passed it.  The next replay begins at the latest cut, and plans what is left in turn.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from tapegrad.core.buffer import Buffer
from tapegrad.core.node import LEAF
from tapegrad.errors import RecomputeError
from tapegrad.remat.budget.recipes import Graph, Recipe
from tapegrad.remat.schedules.actions import Reverse, Store, Tape
from tapegrad.remat.schedules.blocks import blocks, crossing_bytes
from tapegrad.remat.schedules.rotor import Rotor, Stage
from tapegrad.tracing.costs import cost_of

if TYPE_CHECKING:
    from tapegrad.remat.budget.evictable import Evictable

_NODES = 16
"""Nodes of a block at least."""
_BLOCKS = 32
_UNITS = 128
"""Units in which Rotor counts bytes."""
_FEW_MORE = 1.25
"""Where saved values take at most so many times the bytes that there are, single evictions cost little."""
_MOST_RUNS = 4
"""Runs of all nodes that a plan may need: within fewer bytes single values, chosen as needed, cost less."""
_WORKING = 8
"""Values, as large as the largest, that the backward pass itself needs.  6 to 12 do: see ``tests/remat/budget``."""


class ReplayPlan(NamedTuple):
    """Nodes (by index) after which a replay keeps the state, and saved nodes whose values it does not keep.

    ``cuts``: with the cost of recomputing that state from the one before.
    """

    cuts: Mapping[int, float] = {}
    passing: frozenset[int] = frozenset()


UNPLANNED = ReplayPlan()


class Cut:
    """A state that a replay keeps: ``buffers``, computed up to node ``index``, that later nodes read.

    ``cuts``: all of the backward pass; the next replay begins at the last of them.
    """

    def __init__(self, index: int, graph: Graph, buffers: Sequence[Buffer], cost: float, cuts: Sequence[Cut]) -> None:
        self.index, self.graph = index, graph
        self.recipes = [r for b in buffers if (r := graph.recipes.get(b.node.index)) is not None]
        self._buffers, self._cost, self._cuts = buffers, cost, cuts

    @property
    def is_droppable(self) -> bool:
        """Whether the state is still kept."""
        return bool(self._buffers)

    def price(self) -> float:
        """Return the cost of recomputing it, for each byte; more than all others' if the next replay begins here."""
        if self._cuts[-1] is self:
            return inf
        return self._cost / max(1, sum(b.node.aval.nbytes for b in self._buffers))

    def drop(self) -> None:
        """Keep the state no longer."""
        self._buffers = ()


class Cuts:
    """The cuts of one backward pass, in the order of their nodes.

    ``free``: how many bytes states and saved values may take; ``last_resorts``: what a budget drops before it fails.
    """

    def __init__(self, evictable: Evictable, free: Callable[[], float], last_resorts: WeakSet[Any]) -> None:
        self._evictable, self._free, self._last_resorts = evictable, free, last_resorts
        self._cuts: list[Cut] = []

    def plan(
        self, order: Sequence[Recipe], reads: Mapping[int, Sequence[int]], targets: Iterable[int], there: int
    ) -> ReplayPlan:
        """Plan a replay that runs ``order`` for the values of nodes ``targets``.

        ``reads``: which of its nodes each node reads; ``there``: bytes that it reads of values that may be evicted.
        """
        if len(order) < 4 * _NODES:
            return UNPLANNED
        largest = max(r.node.aval.nbytes for r in order)
        return plan(order, reads, targets, self._free() - there - _WORKING * largest)

    def keep(self, graph: Graph, index: int, buffers: Sequence[Buffer], cost: float) -> None:
        """Keep the state after node ``index``: ``buffers``."""
        cut = Cut(index, graph, buffers, cost, self._cuts)
        self._evictable.spare(cut.recipes)
        self._last_resorts.add(cut)
        insort(self._cuts, cut, key=lambda c: c.index)

    def passed(self, here: int) -> None:
        """Drop the cuts behind node ``here``, which the backward pass has reached."""
        while self._cuts and self._cuts[-1].index > here:
            cut = self._cuts.pop()
            cut.drop()
            self._evictable.unspare(cut.graph, cut.recipes)


def plan(
    order: Sequence[Recipe], reads: Mapping[int, Sequence[int]], targets: Iterable[int], nbytes: float
) -> ReplayPlan:
    """Plan a replay where states and saved values may take ``nbytes``; where they fit, there is nothing to plan.

    ``targets``: the nodes for whose values it is run.
    """
    position = {r.node.index: i for i, r in enumerate(order)}
    sources = [[position[index] for index in reads[r.node.index]] for r in order]
    is_view = [r.node.prim.view or r.node.prim is LEAF for r in order]
    is_saved = [r.is_saved() for r in order]
    last = list(range(len(order)))
    for index in targets:
        last[position[index]] = len(order) - 1
    for i in reversed(range(len(order))):
        for source in sources[i]:
            if is_view[i]:  # it keeps the bytes that it shows
                last[source] = max(last[source], last[i])
                is_saved[source] |= is_saved[i]
            last[source] = max(last[source], i)
    sizes = [0 if view else r.node.aval.nbytes for r, view in zip(order, is_view, strict=True)]
    saved = [n if s else 0 for n, s in zip(sizes, is_saved, strict=True)]
    if nbytes == inf or sum(saved) <= _FEW_MORE * nbytes:
        return UNPLANNED
    count = len(order)
    crossing = crossing_bytes(zip(range(count), last, sizes, strict=True), count)
    unsaved = crossing_bytes(((i, last[i], sizes[i] - saved[i]) for i in range(count)), count)
    costs = [cost_of(r.node, [i.node.aval for i in r.inputs]) for r in order]
    parts = blocks(crossing, saved, costs, min(_BLOCKS, len(order) // _NODES))
    ends = [part.stop - 1 for part in parts[:-1]]
    if 2 * sum(4 * unsaved[i] >= 3 * crossing[i] > 0 for i in ends) <= len(ends):
        return UNPLANNED  # most states are saved: to evict single values is close to the optimum there
    stages = [
        Stage(f"nodes {b}", sum(costs[b.start : b.stop]), 0.0, crossing[b.stop - 1], sum(saved[b.start : b.stop]))
        for b in parts
    ]
    try:
        rotor = Rotor(stages, int(nbytes), slots=_UNITS)
    except RecomputeError:
        return UNPLANNED
    if rotor.cost > _MOST_RUNS * rotor.plain_cost:
        return UNPLANNED
    stored, taped = list[int](), set[int]()
    for action in rotor.actions():
        match action:
            case Store(block) if block:
                stored.append(block)
            case Tape(block):
                taped.add(block)
            case Reverse():
                break
    passing = set[int]()
    for block, part in enumerate(parts):
        for i in part if block not in taped else ():
            shown = is_view[i] and passing.issuperset(sources[i])
            if shown or (is_saved[i] and not is_view[i] and last[i] < part.stop):
                passing.add(i)
    since = [0, *stored]
    cuts = {
        order[parts[b].start - 1].node.index: sum(s.forward for s in stages[a:b])
        for a, b in zip(since, stored, strict=False)
    }
    return ReplayPlan(cuts, frozenset(order[i].node.index for i in passing))
