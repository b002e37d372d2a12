"""Storages: the values whose bytes tapes want, and which of them can be dropped.

A storage is a filled buffer that owns its bytes and that some kept value holds: its own, a view's, or that of a pending
value which is to be made from it.  Its bytes go when all these are dropped.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from tapegrad.core.aval import rounded
from tapegrad.core.buffer import Buffer
from tapegrad.errors import OffloadError
from tapegrad.memory.budget.eviction import Candidates
from tapegrad.memory.budget.guard import Guard, guarded
from tapegrad.memory.budget.recipes import NEVER, Graph, Kept, Recipe, Storage, Watch, bytes_held_for, releasable, roots
from tapegrad.memory.ledger.costs import cost_of, transfer_of
from tapegrad.memory.offload.offload import Offloads, move
from tapegrad.memory.policies import RECOMPUTE, SAVE, Answer, Policy, asked

_new = Kept.__new__
_MOST_WALKED = 256
"""Nodes looked at to find the storages next to one; further ones are not counted as neighbours."""
_MOST_NEW = 4096
_MOST_TRIED = 8
"""Values looked at, each time room is asked for, that a policy without a limit offloads."""


class Storages:
    """What tapes keep, and the candidates for eviction among it."""

    def __init__(self) -> None:
        self._new: deque[weakref.ref[Kept]] = deque()
        """Kept values that are not among the candidates yet: most budgets do not bind most of the time, and most values
        go before anything has to be dropped."""
        self.guard = Guard(self._forget)
        """Its queue: kept values that no record refers to any more."""
        self.candidates = Candidates()
        self.offloads = Offloads()
        self.policy: Policy | None = None
        """The one in force; of each value it is asked once, when tapes come to want its bytes, and at each name."""
        self._ready: dict[int, tuple[Recipe, Graph]] = {}  # what is to be offloaded, by index

    @guarded
    def begin(self) -> None:
        """A budget begins: see :meth:`Candidates.begin`."""
        self.candidates.begin()

    @guarded
    def clear(self) -> None:
        """Forget everything."""
        self.guard.forget()
        self._new.clear()
        self._ready.clear()
        self.candidates.clear()

    def kept(self, graph: Graph, buffer: Buffer) -> Kept | Buffer:
        """What a record is to hold of ``buffer``: itself if it cannot be made again."""
        recipe = graph.recipes.get(buffer.node.index)
        if recipe is None:
            return buffer
        kept = recipe.keeping()
        if kept is None:
            kept = Kept(recipe, graph, buffer)
            recipe.kept = weakref.ref(kept)
        elif kept.buffer is not None:
            return kept
        else:
            kept.fill(buffer)
        if recipe.storage is not None:
            self._watch(graph, recipe)
        if self.policy is not None:
            self.register(graph, recipe, buffer)
        else:
            self._new.append(weakref.ref(kept))
            if len(self._new) >= _MOST_NEW:
                self.register_new()
        return kept

    def register_new(self) -> None:
        """What tapes have come to keep since the last call is offered for eviction; called inside the guard."""
        while self._new:
            kept = self._new[0]()
            if kept is not None and kept.buffer is not None:
                self.register(kept.graph, kept.recipe, kept.buffer)
            del kept
            self._new.popleft()  # only now: an interrupt may come at any time, and all this can be done twice

    def register(self, graph: Graph, recipe: Recipe, buffer: Buffer) -> None:
        """A kept value has a buffer: it holds the bytes of these storages."""
        if buffer.array is not None and buffer.base is None:
            self._hold(graph, recipe, recipe)
            return
        for root in roots(buffer):
            below = graph.recipes.get(root.node.index)
            if below is not None:
                self._hold(graph, below, recipe)

    @guarded
    def registered(self, graph: Graph, recipe: Recipe, buffer: Buffer) -> None:
        """A replay has made a kept value again."""
        self.register_new()
        self.register(graph, recipe, buffer)

    @guarded
    def registered_again(self, graph: Graph) -> None:
        """What was made again while no budget was in force, perhaps by kernels that nobody told of, can be dropped."""
        for kept in graph.kept():
            if kept.buffer is not None:
                self.register(graph, kept.recipe, kept.buffer)

    def keep(self, graph: Graph, buffer: Buffer) -> Kept | Buffer:
        """What a record is to hold of ``buffer``, as :meth:`kept` says; most often without the guard."""
        try:
            recipe = buffer.recipe  # most often of this session, or none
            session = recipe.session
        except AttributeError:
            session = -1
        if session != graph.number:
            recipe = None if session == NEVER else graph.recipes.get(buffer.node.index)
            if recipe is None:
                return buffer
        known = recipe.kept
        if (known is None or known() is None) and recipe.storage is None and self.policy is None:
            kept = _new(Kept)  # without the call of `__init__`: this is on the way of every operation
            kept.recipe = recipe
            kept.graph = graph
            kept.buffer = buffer
            own = weakref.ref(kept)
            if recipe.kept is known:  # no other thread runs until the next statement has
                recipe.kept = own
                self._new.append(own)
                if len(self._new) >= _MOST_NEW:
                    self.guard.run(self.register_new)
                return kept
        there = recipe.keeping()
        return self.guard.run(self.kept, graph, buffer) if there is None or there.buffer is None else there

    @guarded
    def spare(self, recipes: Iterable[Recipe]) -> None:
        """A replay will read these; others shall be dropped first."""
        self.register_new()
        self.candidates.spare(recipes)

    @guarded
    def unspare(self, graph: Graph, recipes: Iterable[Recipe]) -> None:
        """The replay has read these for the last time."""
        for recipe in recipes:
            self.candidates.unspare(recipe, graph)

    @guarded
    def filled(self, graph: Graph, recipe: Recipe, inputs: tuple[Buffer, ...]) -> None:
        """A pending value has got bytes of its own: who kept it, or what is to be made from it, holds these now."""
        self.register_new()
        index = recipe.node.index
        holders = {index} if recipe.keeping() is not None else set()
        for b in inputs:
            for root in roots(b):
                below = graph.recipes.get(root.node.index)
                if below is not None and below.storage is not None:
                    # what was made before cannot hold it; what was made later may, or may not: `releasable` sees
                    holders.update(i for i in below.storage.holders if i > index)
        for i in holders:
            holder = graph.recipes.get(i)
            if holder is not None:  # its kept value may be on its way out
                self._hold(graph, recipe, holder)

    def _hold(self, graph: Graph, recipe: Recipe, holder: Recipe) -> None:
        """The kept value of ``holder`` holds the bytes of ``recipe``'s value."""
        storage = recipe.storage
        if storage is None:
            answer = asked(self.policy, recipe.node, recipe.names)
            storage = recipe.storage = Storage()
            storage.answer = answer
            self._settle(graph, recipe, storage)
        storage.holders.add(holder.node.index)
        self._watch(graph, holder)
        if recipe is not holder and recipe.node.index not in holder.roots:
            holder.roots = (*holder.roots, recipe.node.index)
        if storage.row < 0:
            self._offer(graph, recipe, storage)

    def _offer(self, graph: Graph, recipe: Recipe, storage: Storage) -> None:
        """A storage is resident; it may be dropped, or moved, unless the policy saves it."""
        index, nbytes = recipe.node.index, recipe.node.aval.nbytes
        self.candidates.returned(recipe, graph)
        self.offloads.returned(index)
        if storage.answer in (SAVE, RECOMPUTE):
            storage.transfer = None
        else:
            storage.transfer = transfer_of(nbytes, recipe.slot is not None)
            self._ready[index] = (recipe, graph)
        if storage.answer is not SAVE and recipe.pinned is None:
            self.candidates.add(recipe, graph, rounded(nbytes))

    @guarded
    def named(self, graph: Graph, recipe: Recipe, name: str) -> Answer:
        """The user calls a value, which is there, ``name``; what the policy says now."""
        self.register_new()
        recipe.names += (name,)
        answer = asked(self.policy, recipe.node, recipe.names)
        storage = recipe.storage
        if storage is not None and storage.answer != answer:
            storage.answer = answer
            self._withdraw(recipe)
            if storage.holders:
                self._offer(graph, recipe, storage)
        return answer

    def _withdraw(self, recipe: Recipe) -> None:
        self.candidates.remove(recipe)
        self._ready.pop(recipe.node.index, None)

    def _settle(self, graph: Graph, new: Recipe, storage: Storage) -> None:
        """Find the storages next to a new one, and what it costs to make it from them."""
        seen: set[int] = set()
        stack = [new]
        while stack and len(seen) < _MOST_WALKED:
            recipe = stack.pop()
            if recipe.pinned is not None:  # kept for good: nothing makes it again, and what made it is forgotten
                continue
            storage.cost += cost_of(recipe.node, [i.node.aval for i in recipe.inputs])
            for above in recipe.inputs:
                if type(above) is not Recipe or above.node.index in seen:
                    continue
                seen.add(above.node.index)
                if above.storage is None:
                    stack.append(above)
                else:
                    storage.near.append(above.node.index)
                    above.storage.near.append(new.node.index)

    def drop(self, recipe: Recipe, graph: Graph, moving: bool = False) -> bool:
        """Drop a storage; False if somebody holds it besides tapes.

        ``moving``: where it is to be moved and its tier fails, raise OffloadError; else it is dropped all the same.
        """
        storage = recipe.storage
        if storage is None or recipe.pinned is not None or recipe.value() is None:
            self._withdraw(recipe)
            return False
        holders = []
        for index in storage.holders:
            other = graph.recipes.get(index)
            kept = None if other is None else other.keeping()
            if kept is not None:
                holders.append(kept)
        drop = releasable(recipe, holders)
        if drop and storage.transfer is None and self._is_cheaper(recipe, graph):
            return False
        if not drop or not self._moved(recipe, graph, storage, moving):
            return False
        for kept in drop:
            self._let_go(graph, recipe, kept)
        if recipe.value() is not None:  # another thread has taken hold of it meanwhile
            return False
        if recipe.slot is None:
            self.candidates.evicted(recipe, graph)
        else:
            self._withdraw(recipe)
            self.offloads.went(recipe.slot)
        return True

    @guarded
    def release(self, graph: Graph, nodes: Sequence[int], sources: Sequence[Kept], answer: Answer) -> None:
        """Drop what the nodes have made and only tapes want, the latest first, unless the policy in force saves it.

        ``sources`` stay until what is dropped has been made again.
        """
        self.register_new()
        for index in reversed(nodes):
            recipe = graph.recipes.get(index)
            storage = None if recipe is None else recipe.storage
            if recipe is None or storage is None or storage.row < 0:
                continue
            if answer is not RECOMPUTE:
                storage.answer = answer
                self._withdraw(recipe)
                self._offer(graph, recipe, storage)
            if self.drop(recipe, graph) and recipe.slot is None:
                for holder in storage.holders:
                    other = graph.recipes.get(holder)
                    kept = None if other is None else other.keeping()
                    if kept is not None and kept.buffer is None:
                        kept.sources += tuple(sources)

    def _let_go(self, graph: Graph, recipe: Recipe, kept: Kept) -> None:
        """Drop what ``kept`` holds for the sake of ``recipe``'s bytes.

        A pending value holds other storages, too.  They stay, each to be dropped for itself, until the value is made
        again: it will be made from them.
        """
        buffer: Any = kept.buffer
        if buffer.array is None:
            others = [b for b in roots(buffer) if b.node is not recipe.node]
            kept.sources = tuple([k for b in others if type(k := self.kept(graph, b)) is Kept])
        kept.buffer = None

    def _is_cheaper(self, recipe: Recipe, graph: Graph) -> bool:
        """Keep a value for good if what is held only for making it again has no fewer bytes; then that can go."""
        nbytes = bytes_held_for(recipe)
        if nbytes < max(1, recipe.node.aval.nbytes):
            return False
        buffer = recipe.value()
        if buffer is not None:
            graph.pin(recipe, buffer)
            self._withdraw(recipe)
        return True

    def _moved(self, recipe: Recipe, graph: Graph, storage: Storage, moving: bool) -> bool:
        """Move the bytes to a tier if the policy says so; False if they cannot be: then they can be made again."""
        if storage.transfer is not None and recipe.slot is None:
            buffer: Any = recipe.value()
            try:
                recipe.slot = move(buffer, storage.answer)
            except OffloadError:  # a full disk, say: under a limit the value can be made again
                if moving:
                    raise
                storage.transfer = None
                self._ready.pop(recipe.node.index, None)
                return True
            if recipe.slot is None:
                storage.transfer, storage.anew = None, not moving
                self._ready.pop(recipe.node.index, None)
                self.candidates.refresh(recipe, graph)
                return False
        return True

    @guarded
    def offload(self, here: int) -> None:
        """Move what a policy offloads, and only tapes have; not what has come back and is still to be read.

        A tape at node ``here`` reads nothing any more that was made later.
        """
        self.register_new()
        for index in list(islice(self._ready, _MOST_TRIED)):
            recipe, graph = self._ready.pop(index)
            moved = (recipe.slot is None or index > here) and self.drop(recipe, graph, moving=True)
            storage = recipe.storage
            if not moved and storage is not None and storage.row >= 0 and storage.transfer is not None:
                self._ready[index] = (recipe, graph)  # the last in the line

    # Kept values that go ---------------------------------------------------------------------------------------

    def _watch(self, graph: Graph, recipe: Recipe) -> None:
        """See to it that somebody tells when no record refers to what is kept of a value."""
        kept = recipe.keeping()
        if kept is not None and type(recipe.kept) is not Watch:
            watch = Watch(kept, self._gone)
            watch.graph, watch.index = weakref.ref(graph), recipe.node.index
            recipe.kept = watch

    def _gone(self, watch: Watch) -> None:
        """No record refers to a kept value any more (told by the interpreter, at any time, under any lock)."""
        graph = watch.graph()
        recipe = None if graph is None else graph.recipes.get(watch.index)  # it is there until the kept value has gone
        if graph is not None and recipe is not None:
            self.guard.tell((recipe, graph))

    def _forget(self, gone: tuple[Recipe, Graph]) -> None:
        recipe, graph = gone
        if recipe.keeping() is None:
            index = recipe.node.index
            for root in (index, *recipe.roots):
                below = graph.recipes.get(root)
                if below is not None and below.storage is not None:
                    below.storage.holders.discard(index)
                    if not below.storage.holders:
                        self._withdraw(below)
                        self.offloads.returned(root)
                        below.slot = None
            recipe.roots = ()
