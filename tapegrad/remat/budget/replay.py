"""Recomputation of evicted values: collect the missing nodes, and run each once, in program order.

What has moved to a tier is brought back from there.  Recorders are not notified of a value that is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from tapegrad.core.buffer import EVICTED, Buffer
from tapegrad.core.node import LEAF
from tapegrad.engine.realize import postponed, recompute, stored
from tapegrad.engine.region import collect
from tapegrad.remat.budget.cuts import UNPLANNED, Cuts
from tapegrad.remat.budget.recipes import Graph, Recipe
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.phase import during


class Evictor(Protocol):
    """The part of :class:`Evictable` that a replay uses."""

    def registered(self, graph: Graph, recipe: Recipe, buffer: Buffer) -> None:
        """Register a recomputed value."""

    def spare(self, recipes: Iterable[Recipe]) -> None:
        """Evict others before these, which will be read."""

    def unspare(self, graph: Graph, recipes: Iterable[Recipe]) -> None:
        """End the sparing of these."""


Values = dict[int, tuple[Buffer, Any]]
"""Buffers by node index, with the arrays that they show or read, which are not evicted while they are held here."""


def replay(
    graph: Graph, targets: list[Recipe], evictor: Evictor, cuts: Cuts | None = None, known: Values | None = None
) -> Values:
    """Return the values of ``targets``, recomputed; a long replay keeps states in ``cuts``.

    ``known``: values of the replay that needs these.  Values that were filled when the replay was planned are evicted
    last while it runs; if so, they are recomputed when they are read.
    """
    run = _Replay(graph, targets, evictor, cuts, known or {})
    evictor.spare([r for recipes in run.spared.values() for r in recipes])
    try:
        during(run.run, reruns=True, restoring=True, cuts=None)
    finally:
        evictor.unspare(graph, [r for recipes in run.spared.values() for r in recipes])
    return run.values


class _Replay:
    """One replay: ``values`` that are used later, by index; ``spared``: values, by the node that reads them last."""

    def __init__(self, graph: Graph, targets: list[Recipe], evictor: Evictor, cuts: Cuts | None, known: Values) -> None:
        self._graph, self._evictor, self._cuts, self._known = graph, evictor, cuts, known
        self._order, self._reads, self._uses = _missing(targets, known)
        self.values: Values = {}
        self.spared = _there(graph, self._order)
        self._plan = UNPLANNED
        if cuts is not None:
            there = sum(r.node.aval.nbytes for recipes in self.spared.values() for r in recipes)
            self._plan = cuts.plan(self._order, self._reads, [r.node.index for r in targets], there)

    def run(self) -> None:
        """Run the recipes in order."""
        written = {recipe.node.index: by for recipe in self._order if (by := recipe.along()) is not None}
        later = {by.node.index for by in written.values()}
        for recipe in self._order:
            index = recipe.node.index
            if index in later:
                continue
            inputs = tuple([self._input(i) for i in _sources(recipe)])
            by_product = written.get(index)
            if recipe.slot is not None:
                self._add(recipe, _fetched(self._graph, recipe, self._evictor))
            elif by_product is not None:
                for one, out in _both(recipe, by_product, inputs):
                    self._add(one, out)
            elif index in self._plan.passing:
                self._note(recipe, _computed(recipe, inputs, None))
            else:
                self._add(recipe, _computed(recipe, inputs, recipe.value()))
            del inputs
            if index in self._plan.cuts and self._cuts is not None:
                self._cuts.keep(self._graph, index, [b for b, _ in self.values.values()], self._plan.cuts[index])

    def _input(self, source: Recipe | Buffer) -> Buffer:
        if type(source) is not Recipe:
            self._graph.check(source)
            return source
        index = source.node.index
        if (value := self.values.get(index) or self._known.get(index)) is not None:
            return value[0]
        if not source.lacks_value():
            return source.value()  # type: ignore[return-value]
        return replay(self._graph, [source], self._evictor, None, {**self._known, **self.values})[index][0]

    def _add(self, recipe: Recipe, out: Buffer) -> None:
        """Let ``out`` be the value of ``recipe``."""
        self._graph.alive(recipe, out)
        self._evictor.registered(self._graph, recipe, out)
        if self._plan.passing and recipe.is_saved():  # rather evict what is read after the blocks that are kept
            self._evictor.spare((recipe,))
            self.spared.setdefault(_AT_END, []).append(recipe)
        self._note(recipe, out)

    def _note(self, recipe: Recipe, out: Buffer) -> None:
        """Hold ``out`` until its last use; release what it has read for the last time."""
        index = recipe.node.index
        if index in self._uses:
            self.values[index] = out, _arrays(out)
            _read(self._reads[index], self.values, self._uses)
        self._evictor.unspare(self._graph, self.spared.pop(index, ()))


_AT_END = -1
"""The node at which values are spared no longer that are spared until the replay ends."""


def _read(indices: Iterable[int], values: Values, uses: dict[int, int]) -> None:
    """Note that the values of ``indices`` were read once more; release those that nothing else reads."""
    for index in indices:
        uses[index] -= 1
        buffer, _ = values.pop(index, (None, None))
        if buffer is not None and uses[index]:
            values[index] = buffer, _arrays(buffer)  # it may have been evaluated by now


def _arrays(buffer: Buffer) -> Any:
    """Return the array that ``buffer`` shows, or those that it is to be computed from."""
    return collect((buffer,)).arrays if buffer.array is None else buffer.array


def _there(graph: Graph, order: list[Recipe]) -> dict[int, list[Recipe]]:
    """Return the filled candidates that the replay reads, by the index of the node that reads them last."""
    last: dict[int, tuple[int, Recipe]] = {}
    for recipe in order:
        for i in _sources(recipe):
            buffer = i.filled() if type(i) is Recipe else None
            root = None if buffer is None else graph.recipes.get(buffer.root().node.index)
            if root is not None:
                last[root.node.index] = recipe.node.index, root
    candidates: dict[int, list[Recipe]] = {}
    for at, root in last.values():
        candidates.setdefault(at, []).append(root)
    return candidates


def _sources(recipe: Recipe) -> tuple[Recipe | Buffer, ...]:
    """Return the inputs from which a value is recomputed; none if its bytes are in a tier."""
    return recipe.inputs if recipe.slot is None else ()


def _missing(targets: list[Recipe], known: Values) -> tuple[list[Recipe], dict[int, list[int]], dict[int, int]]:
    """Return the recipes to run for ``targets``, in order; which of them each reads; how often each is read.

    ``known`` values are not missing.  Each target is read once more, by the caller.
    """
    order: dict[int, Recipe] = {}
    reads: dict[int, list[int]] = {}
    uses: dict[int, int] = {r.node.index: 1 for r in targets}
    stack = list(targets)
    while stack:
        recipe = stack.pop()
        index = recipe.node.index
        if index in order:
            continue
        order[index], reads[index] = recipe, []
        for source in _sources(recipe):
            for missing in _lacking(source):
                if missing.node.index in known:
                    continue
                reads[index].append(missing.node.index)
                uses[missing.node.index] = uses.get(missing.node.index, 0) + 1
                stack.append(missing)
    return [order[i] for i in sorted(order)], reads, uses


def _lacking(source: Recipe | Buffer) -> list[Recipe]:
    """Return the recipes to run so that ``source`` has a value: itself, or those that a pending one reads."""
    if type(source) is Recipe and source.lacks_value():
        return [source]
    buffer: Any = source.value() if type(source) is Recipe else source
    if buffer.array is not None:
        return []
    if buffer.state:
        return [buffer.recipe] if buffer.state == EVICTED else []
    return [b.recipe for b in collect((buffer,)).leaves if b.array is None and b.state == EVICTED]


def _fetched(graph: Graph, recipe: Recipe, evictor: Evictor) -> Buffer:
    """Fetch a value from its tier; recompute it if the tier fails.  Raises MemoryError."""
    try:
        return recipe.slot.fetch(recipe.node, recipe.value())
    except MemoryError:
        raise
    except Exception:
        recipe.slot = None
        return replay(graph, [recipe], evictor)[recipe.node.index][0]


def _computed(recipe: Recipe, inputs: tuple[Buffer, ...], into: Buffer | None) -> Buffer:
    LEDGER.restored()
    recipe.times += 1
    if recipe.node.prim is LEAF:  # an alias
        (source,) = inputs
        array = stored(source)
        return Buffer(array, recipe.node, base=source.root()) if into is None else into.show(array, source.root())
    return recompute(recipe.node, inputs, into)


def _both(recipe: Recipe, beside: Recipe, inputs: tuple[Buffer, ...]) -> Iterator[tuple[Recipe, Buffer]]:
    """Compute a value and the by-product that its operation writes along."""
    by_product = postponed(beside.node, inputs, beside.value())
    yield recipe, _computed(recipe, (*inputs, by_product), recipe.value())
    LEDGER.restored()
    beside.times += 1
    yield beside, by_product
