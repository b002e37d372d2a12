"""Making dropped values again: what is missing is collected, and each node run once, in the order of the tape.

What has moved to a tier is brought back from there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tapegrad.buffer import Buffer
from tapegrad.evaluate import again, array_of
from tapegrad.memory.ledger import LEDGER
from tapegrad.memory.recipes import Graph, Recipe
from tapegrad.node import thread
from tapegrad.transforms.jvp import Pusher

Register = Callable[[Graph, Recipe, Buffer], None]


def replay(graph: Graph, targets: list[Recipe], register: Register) -> dict[int, Buffer]:
    """The buffers of ``targets`` by node index.  ``register`` is told of each kept value that has a buffer again.

    Values that were there when the replay was planned may be dropped while it runs, to make room for it; they are made
    again when it comes to them.
    """
    whole = any(isinstance(r, Pusher) for r in thread.recorders)  # tangents come back with values, but not from tiers
    order, uses = _missing(targets, whole)
    values: dict[int, Buffer] = {}
    LEDGER.restoring(1)
    try:
        for recipe in order:
            sources = _sources(recipe, whole)
            inputs = tuple([_input(graph, i, values, register) for i in sources])
            if whole or recipe.slot is None:
                out = _made(recipe, inputs)
                recipe.times += 1
            else:
                out = recipe.slot.fetch(recipe.node)
            recipe.buffer = weakref.ref(out)
            values[recipe.node.index] = out
            kept = recipe.keeping()
            if kept is not None:
                kept.buffer = out
                register(graph, recipe, out)
            del inputs, out, kept
            for i in sources:
                index = i.node.index
                if index in uses:
                    uses[index] -= 1
                    if not uses[index]:
                        values.pop(index, None)
    finally:
        LEDGER.restoring(-1)
    return values


def _sources(recipe: Recipe, whole: bool) -> tuple[Any, ...]:
    """What a value is made from; nothing if its bytes are in a tier.  ``whole``: it has to be made in any case."""
    return recipe.inputs if whole or recipe.slot is None else ()


def _missing(targets: list[Recipe], whole: bool) -> tuple[list[Recipe], dict[int, int]]:
    """The recipes to run for ``targets``, in order, and how often each of them is read (and once by who asks)."""
    order: dict[int, Recipe] = {}
    uses: dict[int, int] = {r.node.index: 1 for r in targets}
    stack = list(targets)
    while stack:
        recipe = stack.pop()
        if recipe.node.index in order:
            continue
        order[recipe.node.index] = recipe
        for i in _sources(recipe, whole):
            if type(i) is Recipe and i.value() is None:
                uses[i.node.index] = uses.get(i.node.index, 0) + 1
                stack.append(i)
    return [order[i] for i in sorted(order)], uses


def _input(graph: Graph, source: Any, values: dict[int, Buffer], register: Register) -> Buffer:
    if type(source) is not Recipe:
        return source
    found = values.get(source.node.index) or source.value()
    if found is None:
        found = replay(graph, [source], register)[source.node.index]
    return found


def _made(recipe: Recipe, inputs: tuple[Buffer, ...]) -> Buffer:
    LEDGER.restored()
    pushers = [r for r in thread.recorders if isinstance(r, Pusher)]
    if recipe.node.prim is None:  # the same bytes under another node
        (source,) = inputs
        out = Buffer(array_of(source), recipe.node, (source.root(),))
        for p in pushers:
            p.carry(source, out)
        return out
    out = again(recipe.node, inputs)
    for p in pushers:  # a tangent lives as long as its value: it comes back with it
        p.record(recipe.node, inputs, out)
    return out
