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


def replay(graph: Graph, targets: list[Recipe], evictor: Evictor) -> Values:
    """Return the values of ``targets``, recomputed.

    Values that were filled when the replay was planned are evicted last while it runs; if so, they are recomputed when
    they are read.
    """
    order, reads, uses = _missing(targets)
    values: Values = {}
    there = _there(graph, order)
    evictor.spare([r for recipes in there.values() for r in recipes])
    try:
        during(
            _recompute, graph, order, values, reads, uses, there, evictor,
            reruns=True, restoring=True,
        )  # fmt: skip
    finally:
        evictor.unspare(graph, [r for recipes in there.values() for r in recipes])
    return values


def _recompute(
    graph: Graph,
    order: list[Recipe],
    values: Values,
    reads: dict[int, list[int]],
    uses: dict[int, int],
    there: dict[int, list[Recipe]],
    evictor: Evictor,
) -> None:
    """Run ``order``; put values that are used later into ``values``."""
    written = {recipe.node.index: by for recipe in order if (by := recipe.along()) is not None}
    later = {by.node.index for by in written.values()}
    for recipe in order:
        if recipe.node.index in later:
            continue
        sources = _sources(recipe)
        inputs = tuple([_input(graph, i, values, evictor) for i in sources])
        beside = written.get(recipe.node.index)
        if recipe.slot is not None:
            made = [(recipe, _fetched(graph, recipe, evictor))]
        elif beside is None:
            made = [(recipe, _computed(recipe, inputs))]
        else:
            made = [*_both(recipe, beside, inputs)]
        del inputs
        while made:
            one, out = made.pop()
            graph.alive(one, out)
            evictor.registered(graph, one, out)
            if one.node.index in uses:
                values[one.node.index] = out, _arrays(out)
                _read(reads[one.node.index], values, uses)
            del out
            evictor.unspare(graph, there.pop(one.node.index, ()))


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


def _missing(targets: list[Recipe]) -> tuple[list[Recipe], dict[int, list[int]], dict[int, int]]:
    """Return the recipes to run for ``targets``, in order; which of them each reads; how often each is read.

    Each target is read once more, by the caller.
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


def _input(graph: Graph, source: Recipe | Buffer, values: Values, evictor: Evictor) -> Buffer:
    if type(source) is not Recipe:
        graph.check(source)
        return source
    index = source.node.index
    if index in values:
        return values[index][0]
    buffer = source.value()
    return buffer if buffer is not None else replay(graph, [source], evictor)[index][0]


def _fetched(graph: Graph, recipe: Recipe, evictor: Evictor) -> Buffer:
    """Fetch a value from its tier; recompute it if the tier fails.  Raises MemoryError."""
    try:
        return recipe.slot.fetch(recipe.node, recipe.value())
    except MemoryError:
        raise
    except Exception:
        recipe.slot = None
        return replay(graph, [recipe], evictor)[recipe.node.index][0]


def _computed(recipe: Recipe, inputs: tuple[Buffer, ...]) -> Buffer:
    LEDGER.restored()
    recipe.times += 1
    into = recipe.value()
    if recipe.node.prim is LEAF:  # an alias
        (source,) = inputs
        array = stored(source)
        return Buffer(array, recipe.node, base=source.root()) if into is None else into.show(array, source.root())
    return recompute(recipe.node, inputs, into)


def _both(recipe: Recipe, beside: Recipe, inputs: tuple[Buffer, ...]) -> Iterator[tuple[Recipe, Buffer]]:
    """Compute a value and the by-product that its operation writes along."""
    by_product = postponed(beside.node, inputs, beside.value())
    yield recipe, _computed(recipe, (*inputs, by_product))
    LEDGER.restored()
    beside.times += 1
    yield beside, by_product
