"""Which value to evict: h_DTR (Kirisame et al. 2021, arXiv:2006.09616), for a tape whose future is known.

The candidate with the least ``(cost + cost of its evicted neighbourhood) / (bytes * sqrt(distance))`` goes first.

*Neighbourhood*: the evicted values that would have to be recomputed for it, or for which it would have to be.  It is
kept as sets of adjacent evicted values, with union-find: evicting a value joins sets, recomputing it subtracts its cost
(the paper's h_DTR-eq).

*Distance*: the paper divides by staleness, the time since the last use, since it knows nothing of the future.  A tape
does: the backward pass reads values in reverse program order, so the distance from the present position of the pass (or
the recording) to the value's own tells when it is needed.  The square root was found by simulation of
chains of 100 to 1024 layers in 1.5 to 50% of their memory, where it stays within 1.02 of the optimum (an exponent of 1:
1.11; the paper's rule: 1.27).

The choice is one pass over three columns of numbers, and exact: nothing is sampled.  Before it, numerators that
recomputed values have lowered are updated.  Those that evictions have raised are not: they are lower bounds, and the
least is updated before it is chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from weakref import ref

from tapegrad.device import asdevice
from tapegrad.remat.budget.recipes import EvictionCandidate, Graph, Recipe

_FIRST = 256
_MOST_NEAR = 16
"""Neighbours looked at, the latest: a value may be read by thousands of others."""


class Part:
    """A set of evicted values that touch each other (union-find).

    ``cost``: of recomputing all of them; ``edge``: the resident values next to them (by index).
    """

    __slots__ = ("_into", "cost", "edge")

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.edge: set[int] = set()
        self._into: Part | None = None

    def all(self) -> Part:
        """The set that this one has become part of."""
        part = self
        while part._into is not None:
            if part._into._into is not None:
                part._into = part._into._into
            part = part._into
        return part

    def join(self, other: Part) -> None:
        """Make ``other`` part of this set."""
        if other is not self:
            if len(other.edge) > len(self.edge):
                self.edge, other.edge = other.edge, self.edge
            self.edge |= other.edge
            self.cost += other.cost
            other.edge, other._into = set(), self


Row = tuple[ref[Recipe], ref[Graph]]


def _of(recipe: Recipe) -> EvictionCandidate:
    assert recipe.candidate is not None  # only candidates come here
    return recipe.candidate


class Candidates:
    """The filled values that may be evicted, as columns of numbers.

    A row refers to its recipe weakly, and is free when that is gone, or names another row: an interrupt between two
    statements may leave such a row, and may lose a free one until all are forgotten; it never lends one twice.
    """

    def __init__(self) -> None:
        self._xp = asdevice("cpu").xp
        self._empty()

    def _empty(self) -> None:
        self._rows: list[Row | None] = []
        self._free: list[int] = []
        self._numerators, self._sizes, self._places = (self._xp.zeros(0) for _ in range(3))
        self._lowered: dict[Part, ref[Graph]] = {}
        """Sets that values have left since the last choice."""

    def add(self, recipe: Recipe, graph: Graph, nbytes: int) -> None:
        """Add a filled value."""
        if not self._free:
            self._clear_gone()
        if not self._free:
            count = max(_FIRST, len(self._rows))
            self._numerators, self._sizes, self._places = (
                self._xp.concatenate([column, self._xp.full(count, fill)])
                for column, fill in ((self._numerators, self._xp.inf), (self._sizes, 1.0), (self._places, 0.0))
            )
            self._rows += [None] * count
            self._free = list(range(len(self._rows) - 1, len(self._rows) - 1 - count, -1))
        row = self._free.pop()
        self._sizes[row] = max(nbytes, 1)
        self._places[row] = recipe.node.index
        self._rows[row] = (ref(recipe), ref(graph))
        _of(recipe).row, _of(recipe).spared = row, 0
        self.refresh(recipe, graph)

    def begin(self) -> None:
        """Begin a budget: if there is no candidate, number rows anew, since they decide between equal scores."""
        if not any(True for _ in self._all()):
            self.clear()

    def clear(self) -> None:
        """Remove all."""
        for recipe, _ in self._all():
            _of(recipe).row = -1
        self._empty()

    def _all(self) -> Iterator[tuple[Recipe, Graph]]:
        for row in self._rows:
            there = row and self._there(row)
            if there:
                yield there

    def _there(self, row: Row) -> tuple[Recipe, Graph] | None:
        recipe, graph = row[0](), row[1]()
        return None if recipe is None or graph is None else (recipe, graph)

    def _clear_gone(self) -> None:
        """Free the rows of values that are dead."""
        for number, row in enumerate(self._rows):
            if row is None:
                continue
            there = self._there(row)
            if there is None or _of(there[0]).row != number:  # an interrupt left it
                self._release(number)
            elif there[0].value() is None:
                self.remove(there[0])

    def nbytes(self) -> int:
        """Return the bytes of all values that may be evicted now."""
        self._refresh_lowered()
        return int(self._sizes[self._numerators < self._xp.inf].sum())

    def _release(self, row: int) -> None:
        self._rows[row] = None
        self._numerators[row] = self._xp.inf
        self._free.append(row)

    def remove(self, recipe: Recipe) -> None:
        """Remove a value that is evicted, or may not be any more."""
        candidate = recipe.candidate
        if candidate is not None and candidate.row >= 0:
            row, candidate.row = candidate.row, -1
            self._release(row)

    def best(self, here: int) -> tuple[Recipe, Graph] | None:
        """Return the value to evict first where the tape is at node ``here``."""
        self._refresh_lowered()
        while self._rows:
            scores = self._numerators / (self._sizes * self._xp.sqrt(self._xp.maximum(here - self._places, 1)))
            number = int(scores.argmin())
            row, numerator = self._rows[number], self._numerators[number]
            if numerator == self._xp.inf or row is None:
                return None
            there = self._there(row)
            if there is None or there[0].value() is None or _of(there[0]).row != number:
                self._clear_gone()
                continue
            self.refresh(*there)
            if self._numerators[number] <= numerator:
                return there
        return None

    def pass_over(self, recipe: Recipe) -> bool:
        """Do not offer a value in use until :meth:`refresh`; False if it is no candidate, or was offered anew."""
        candidate = _of(recipe)
        if candidate.row < 0 or candidate.anew:
            candidate.anew = False
            return False
        self._numerators[candidate.row] = self._xp.inf
        return True

    def spare(self, recipes: Iterable[Recipe]) -> None:
        """Do not offer these while there are others: a running replay will read them."""
        for recipe in recipes:
            candidate = recipe.candidate
            if candidate is not None and candidate.row >= 0:
                candidate.spared += 1
                self._numerators[candidate.row] = self._xp.inf

    def unspare(self, recipe: Recipe, graph: Graph) -> None:
        """Offer it again: the replay has read it for the last time."""
        candidate = recipe.candidate
        if candidate is not None and candidate.spared:
            candidate.spared -= 1
            self.refresh(recipe, graph)

    def offer_spared(self) -> bool:
        """Offer spared values, too; False if there are none."""
        offered = False
        for recipe, graph in self._all():
            if _of(recipe).spared:
                _of(recipe).spared = 0
                self.refresh(recipe, graph)
                offered = True
        return offered

    def refresh(self, recipe: Recipe, graph: Graph) -> None:
        """Update its score."""
        candidate = _of(recipe)
        if candidate.spared or candidate.row < 0:
            return
        if candidate.transfer is not None:
            self._numerators[candidate.row] = candidate.transfer
        else:
            parts = self._around(candidate, graph)
            for part in parts:
                part.edge.add(recipe.node.index)
            self._numerators[candidate.row] = candidate.cost + sum([part.cost for part in parts])

    # Evicted neighbourhoods ------------------------------------------------------------------------------------

    def _near(self, candidate: EvictionCandidate, graph: Graph) -> list[tuple[int, EvictionCandidate]]:
        near = [(index, graph.recipes.get(index)) for index in candidate.near[-_MOST_NEAR:]]
        return [(index, _of(other)) for index, other in near if other is not None]

    def _around(self, candidate: EvictionCandidate, graph: Graph) -> Collection[Part]:
        """Return the sets next to a value, each once."""
        return dict.fromkeys([near.part.all() for _, near in self._near(candidate, graph) if near.part is not None])

    def evicted(self, recipe: Recipe, graph: Graph) -> None:
        """Note that the value was evicted: it joins the sets next to it."""
        self.remove(recipe)
        candidate = _of(recipe)
        part = candidate.part = Part(candidate.cost)
        part.edge.update(index for index, near in self._near(candidate, graph) if near.row >= 0)
        for other in self._around(candidate, graph):
            part.join(other)

    def returned(self, recipe: Recipe, graph: Graph) -> None:
        """Note that the value was recomputed: it leaves its set."""
        candidate = _of(recipe)
        if candidate.part is not None:
            part, candidate.part = candidate.part.all(), None
            part.cost = max(0.0, part.cost - candidate.cost)
            self._lowered[part] = ref(graph)

    def _refresh_lowered(self) -> None:
        """Update the scores of values next to sets that others have left: they cost less to recompute."""
        lowered, self._lowered = self._lowered, {}
        parts = {part.all(): graph for part, weak in lowered.items() if (graph := weak()) is not None}
        for part, graph in parts.items():
            for index in list(part.edge):
                other = graph.recipes.get(index)
                if other is None or _of(other).row < 0:
                    part.edge.discard(index)
                else:
                    self.refresh(other, graph)
