"""Recipes: how to make again a value whose buffer was dropped, and what of it a tape keeps.

Under a budget the nodes that a tape may want again are noted in a :class:`Graph`: each :class:`Recipe` names its
inputs' recipes, and the buffers of inputs that have none (variables, data).  A recipe refers to its value weakly, so
values are freed at their last use as ever.  What a tape's record keeps is a :class:`Kept`: the one strong reference of
the tape's to a buffer, which may be dropped, because the recipe remains.  **Eviction is nothing but that.**

Who owns what: recordings own the graph, the graph its recipes, a recipe those it is made from, a kept value its recipe.
A filled buffer knows nothing of all this; when the last recording lets go of the graph, histories are gone.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

from tapegrad.buffer import Buffer
from tapegrad.node import Node, leaf


class Storage:
    """What is known of a value whose bytes tapes want.

    ``holders``: the nodes (by index) whose kept values hold these bytes.  ``near``: the storages next to it, with none
    in between.  ``cost``: of making it from those.  ``part``: while it is dropped, the set of dropped ones it belongs
    to.  ``place``: while it is there, its row among the candidates for eviction.  ``spared``: how many
    replays under way will read it.  ``answer``: what the policy in force says of it.  ``transfer``: if that is to
    offload it, the cost of moving it away and back.
    """

    __slots__ = ("answer", "cost", "holders", "near", "part", "place", "spared", "transfer")

    def __init__(self) -> None:
        self.holders: set[int] = set()
        self.near: list[int] = []
        self.cost = 0.0
        self.part: Any = None
        self.place = -1
        self.spared = 0
        self.answer: Any = None
        self.transfer: float | None = None


class Recipe:
    """How the value of ``node`` comes from ``inputs`` (recipes, or buffers of what has none).

    ``buffer``: a weak reference to its present buffer.  ``kept``: one to what tapes keep of it.  ``roots``: of a kept
    view or pending value, the storages it holds (by index).  ``times``: how often it was made again.  ``names``: what
    the user calls it.  ``slot``: its bytes in a tier, once they have been moved there.  ``pinned``: its buffer,
    if it has been decided to keep that in place of what it was made from.
    """

    __slots__ = (
        "__weakref__", "buffer", "inputs", "kept", "names", "node", "pinned", "roots", "slot", "storage", "times",
    )  # fmt: skip

    def __init__(self, node: Node, inputs: tuple[Any, ...], out: Buffer) -> None:
        self.node = node
        self.inputs = inputs
        self.buffer: Any = weakref.ref(out)
        self.kept: Any = None
        self.storage: Storage | None = None
        self.roots: tuple[int, ...] = ()
        self.times = 0
        self.names: tuple[str, ...] = ()
        self.slot: Any = None
        self.pinned: Buffer | None = None

    def value(self) -> Buffer | None:
        """The buffer, if there is one."""
        return self.buffer()

    def pin(self, buffer: Buffer) -> None:
        """Keep the value, and forget what it was made from."""
        self.pinned, self.inputs = buffer, ()

    def keeping(self) -> Kept | None:
        """What tapes keep of it, if any does."""
        return None if self.kept is None else self.kept()


class Kept:
    """What the records of tapes keep of one value: its buffer, until that is dropped."""

    __slots__ = ("__weakref__", "_gone", "buffer", "graph", "recipe")

    def __init__(self, recipe: Recipe, graph: Graph, gone: Callable[[Recipe, Graph], None]) -> None:
        self.recipe = recipe
        self.graph = graph
        self.buffer: Buffer | None = None
        self._gone = gone

    def __del__(self) -> None:
        if self.recipe.keeping() is self:  # a weak reference finds what is being deleted until it is
            self.recipe.kept = None
        self._gone(self.recipe, self.graph)


class Residuals:
    """What a record holds: kept values, and buffers that cannot be made again."""

    __slots__ = ("things",)

    def __init__(self, things: tuple[Any, ...]) -> None:
        self.things = things

    def restored(self) -> tuple[Buffer, ...]:
        """The buffers, made again if need be."""
        return restored(self.things)


def restored(things: tuple[Any, ...]) -> tuple[Buffer, ...]:
    """The buffers of kept values; buffers are themselves."""
    kept = [k for k in things if type(k) is Kept]
    found = kept[0].graph.restore(kept) if kept else {}
    return tuple([found[id(k)] if type(k) is Kept else k for k in things])


class Graph:
    """The recipes of one recording, or of several that overlap, by node index."""

    def __init__(self, restore: Callable[[list[Kept]], dict[int, Buffer]]) -> None:
        self.recipes: dict[int, Recipe] = {}
        self.restore = restore
        self._sweep_at = 4096
        self._lock = threading.RLock()

    def add(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> Recipe:
        """Note how ``out`` was made."""
        with self._lock:  # recordings of several threads share a graph
            if len(self.recipes) >= self._sweep_at:
                self.sweep()
            recipes = self.recipes
            found = Recipe(node, tuple([recipes.get(b.node.index) or b for b in inputs]), out)
            recipes[node.index] = found
        return found

    def kept(self) -> Iterator[Kept]:
        """All kept values."""
        for recipe in list(self.recipes.values()):
            kept = recipe.keeping()
            if kept is not None:
                yield kept

    def held(self, node: Node, mine: bool) -> bool:
        """Whether somebody may still ask for the node's value; ``mine``: a rule of the asking recording wants it.

        Who has it: a handle, a pending value, another recording's rule (which may hand it out again).  True of values
        without a recipe.
        """
        recipe = self.recipes.get(node.index)
        if recipe is None:
            return True
        kept, buffer = recipe.keeping(), recipe.value()
        known = int(kept is not None and kept.buffer is buffer)
        things = {0: kept, 1: buffer}
        del kept, buffer
        found = _references(things)
        return (things[0] is not None and found[0] - _OWN > mine) or (things[1] is not None and found[1] - _OWN > known)

    def sweep(self) -> None:
        """Forget recipes of values that nobody can ask for any more; done when their number has doubled, too."""
        with self._lock:
            needed: dict[int, Recipe] = {}
            stack = [r for r in self.recipes.values() if r.keeping() is not None or _has_value(r)]
            while stack:
                recipe = stack.pop()
                if recipe.node.index not in needed:
                    needed[recipe.node.index] = recipe
                    stack += [i for i in recipe.inputs if type(i) is Recipe]
            self.recipes = needed
            self._sweep_at = max(4096, 2 * len(needed))


def _has_value(recipe: Recipe) -> bool:
    """Whether somebody else holds its value."""
    return recipe.pinned is None and recipe.value() is not None


def bytes_held_for(recipe: Recipe) -> int:
    """Bytes of the buffers (data, nothing that can be made again) that are alive only so that it can be made again."""
    known: Counter[int] = Counter()
    leaves: dict[int, Buffer] = {}
    seen: set[int] = set()
    stack = [recipe]
    i: Any = None
    while stack and len(seen) < _MOST_WALKED:
        for i in stack.pop().inputs:
            if type(i) is not Recipe:
                known[id(i)] += 1
                leaves[id(i)] = i
            elif i.storage is None and i.node.index not in seen:
                seen.add(i.node.index)
                stack.append(i)
    del i
    found = _references(leaves)
    ours = [leaves[key] for key, n in found.items() if n - _OWN <= known[key]]
    return sum(b.node.aval.nbytes for b in ours if b.array is not None and not b.keeps)


_MOST_WALKED = 64


def roots(buffer: Buffer) -> list[Buffer]:
    """The filled buffers whose bytes ``buffer`` holds: its own, a view's base, or what a pending one is made from."""
    if buffer.array is not None:
        return [buffer.root()]
    found: dict[int, Buffer] = {}
    seen: set[int] = set()
    stack = [buffer]
    while stack:
        for b in stack.pop().keeps:
            if b.array is not None:
                root = b.root()
                found[id(root)] = root
            elif id(b) not in seen:
                seen.add(id(b))
                stack.append(b)
    return list(found.values())


def _references(things: dict[int, Any]) -> dict[int, int]:
    """How often each thing is referred to; what only ``things`` refers to, so often as ``_OWN`` says."""
    return {key: sys.getrefcount(thing) for key, thing in things.items()}


def _own() -> int:
    aval: Any = None
    return _references({0: Buffer(None, leaf(aval))})[0]


_OWN = _own()  # counted, not known: interpreters differ in what they count


def releasable(recipe: Recipe, holders: Iterable[Kept]) -> list[Kept] | None:
    """The kept values to drop so that the bytes of ``recipe``'s value go; None if somebody else holds them, too.

    Somebody else: a handle of the user's, an operation under way, a pending value that is held.  It is found by
    counting references: those from kept values, and from views and pending buffers that only these hold, are known.
    """
    target = recipe.node.index
    holding = [k for k in holders if k.buffer is not None]
    if not holding:
        return None
    known: Counter[int] = Counter()
    buffers: dict[int, Buffer] = {}
    stack = [k.buffer for k in holding]
    while stack:
        b: Any = stack.pop()
        known[id(b)] += 1
        if id(b) not in buffers:
            buffers[id(b)] = b
            stack += b.keeps
    del b
    reaching: set[int] = set()
    for key, index, below in sorted(
        ((key, b.node.index, tuple(map(id, b.keeps))) for key, b in buffers.items()), key=itemgetter(1)
    ):
        if index == target or any(k in reaching for k in below):
            reaching.add(key)
    found = _references(buffers)
    if any(found[key] - _OWN > known[key] for key in reaching):
        return None
    return [k for k in holding if id(k.buffer) in reaching]
