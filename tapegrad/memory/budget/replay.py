"""Making dropped values again: what is missing is collected, and each node run once, in the order of the tape.

What has moved to a tier is brought back from there.  Nobody is told of a value made again: of its companions, see
``companions.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from tapegrad.core.buffer import Buffer
from tapegrad.core.node import LEAF
from tapegrad.engine.evaluate import again, array_of, postponed
from tapegrad.memory.budget.recipes import Graph, Recipe
from tapegrad.memory.ledger.ledger import LEDGER
from tapegrad.memory.ledger.phase import during


class Keeping(Protocol):
    """Who drops values, as far as a replay has to do with it."""

    def registered(self, graph: Graph, recipe: Recipe, buffer: Buffer) -> None:
        """A kept value has a buffer again."""

    def spare(self, recipes: Iterable[Recipe]) -> None:
        """These will be read; others shall be dropped first."""

    def unspare(self, graph: Graph, recipes: Iterable[Recipe]) -> None:
        """These have been read for the last time."""


def replay(graph: Graph, targets: list[Recipe], keeping: Keeping) -> dict[int, Buffer]:
    """The buffers of ``targets`` by node index.

    Values that were there when the replay was planned are dropped last while it runs, and then made again when it comes
    to them.
    """
    order, uses = _missing(targets)
    values: dict[int, Buffer] = {}
    there = _there(graph, order)
    keeping.spare([r for recipes in there.values() for r in recipes])
    try:
        during(
            _make_again, graph, order, values, uses, there, keeping,
            reruns=True, restoring=True,
        )  # fmt: skip
    finally:
        keeping.unspare(graph, [r for recipes in there.values() for r in recipes])
    return values


def _make_again(
    graph: Graph,
    order: list[Recipe],
    values: dict[int, Buffer],
    uses: dict[int, int],
    there: dict[int, list[Recipe]],
    keeping: Keeping,
) -> None:
    """Run ``order``, and put into ``values`` what is used later."""
    written = {recipe.node.index: by for recipe in order if (by := recipe.along()) is not None}
    later = {by.node.index for by in written.values()}
    for recipe in order:
        if recipe.node.index in later:
            continue
        sources = _sources(recipe)
        inputs = tuple([_input(graph, i, values, keeping) for i in sources])
        beside = written.get(recipe.node.index)
        if recipe.slot is not None:
            made = [(recipe, _fetched(graph, recipe, keeping))]
        elif beside is None:
            made = [(recipe, _made(recipe, inputs))]
        else:
            made = [*_both(recipe, beside, inputs)]
        del inputs
        while made:
            one, out = made.pop()
            graph.alive(one, out)
            kept = one.keeping()
            if kept is not None:
                kept.fill(out)
                keeping.registered(graph, one, out)
            if one.node.index in uses:
                values[one.node.index] = out
                _read(sources if one is recipe else _sources(one), values, uses)
            del out, kept
            keeping.unspare(graph, there.pop(one.node.index, ()))


def _read(sources: Iterable[Recipe | Buffer], values: dict[int, Buffer], uses: dict[int, int]) -> None:
    """A value has been made of its sources; those that nothing else reads go."""
    for i in sources:
        index = i.node.index
        if index in uses:
            uses[index] -= 1
            if not uses[index]:
                values.pop(index, None)


def _there(graph: Graph, order: list[Recipe]) -> dict[int, list[Recipe]]:
    """The storages that are there and that the replay reads, by the index of the node that reads them last."""
    last: dict[int, tuple[int, Recipe]] = {}
    for recipe in order:
        for i in _sources(recipe):
            buffer = i.value() if type(i) is Recipe else None
            storage = None if buffer is None else graph.recipes.get(buffer.root().node.index)
            if storage is not None:
                last[storage.node.index] = recipe.node.index, storage
    storages: dict[int, list[Recipe]] = {}
    for at, storage in last.values():
        storages.setdefault(at, []).append(storage)
    return storages


def _sources(recipe: Recipe) -> tuple[Recipe | Buffer, ...]:
    """What a value is made from; nothing if its bytes are in a tier."""
    return recipe.inputs if recipe.slot is None else ()


def _missing(targets: list[Recipe]) -> tuple[list[Recipe], dict[int, int]]:
    """The recipes to run for ``targets``, in order, and how often each of them is read (and once by who asks)."""
    order: dict[int, Recipe] = {}
    uses: dict[int, int] = {r.node.index: 1 for r in targets}
    stack = list(targets)
    while stack:
        recipe = stack.pop()
        if recipe.node.index in order:
            continue
        order[recipe.node.index] = recipe
        for i in _sources(recipe):
            if type(i) is Recipe and i.value() is None:
                uses[i.node.index] = uses.get(i.node.index, 0) + 1
                stack.append(i)
    return [order[i] for i in sorted(order)], uses


def _input(graph: Graph, source: Recipe | Buffer, values: dict[int, Buffer], keeping: Keeping) -> Buffer:
    if type(source) is not Recipe:
        graph.check(source)
        return source
    buffer = values.get(source.node.index) or source.value()
    if buffer is None:
        buffer = replay(graph, [source], keeping)[source.node.index]
    return buffer


def _fetched(graph: Graph, recipe: Recipe, keeping: Keeping) -> Buffer:
    """A value whose bytes are in a tier; where the tier fails, it is made again.  Raises MemoryErrors as they come."""
    try:
        return recipe.slot.fetch(recipe.node)
    except MemoryError:
        raise
    except Exception:
        recipe.slot = None
        return replay(graph, [recipe], keeping)[recipe.node.index]


def _made(recipe: Recipe, inputs: tuple[Buffer, ...]) -> Buffer:
    LEDGER.restored()
    recipe.times += 1
    if recipe.node.prim is LEAF:  # the same bytes under another node
        (source,) = inputs
        return Buffer(array_of(source), recipe.node, base=source.root())
    return again(recipe.node, inputs)


def _both(recipe: Recipe, beside: Recipe, inputs: tuple[Buffer, ...]) -> Iterator[tuple[Recipe, Buffer]]:
    """A value, and the by-product that its operation writes along."""
    by_product = postponed(beside.node, inputs)
    yield recipe, _made(recipe, (*inputs, by_product))
    LEDGER.restored()
    beside.times += 1
    yield beside, by_product
