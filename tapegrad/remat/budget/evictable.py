"""Evictable values: which values may be evicted, and how they are.

A candidate is a filled buffer that owns its bytes, that has a recipe, and that some tape's record needs: it is saved
itself, or a view of it is, or a pending value that is to be computed from it.  Where none of these is left, every value
that is alive and has a recipe becomes one: those that only the user holds.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from tapegrad.core import locks
from tapegrad.core.aval import rounded
from tapegrad.core.buffer import Buffer
from tapegrad.core.locks import synchronized
from tapegrad.core.state import thread
from tapegrad.engine.region import collect
from tapegrad.errors import OffloadError
from tapegrad.remat.budget.eviction import Candidates
from tapegrad.remat.budget.recipes import (
    EvictionCandidate,
    Graph,
    Recipe,
    SavedBuffers,
    bytes_held_for,
    in_hand,
    roots,
)
from tapegrad.remat.offload.offload import Offloads, keeps_memory, move
from tapegrad.remat.policies import RECOMPUTE, SAVE, Answer, Policy, asked
from tapegrad.tracing.costs import cost_of, transfer_of

_MOST_WALKED = 256
"""Nodes looked at to find the candidates next to one; further ones are not counted as neighbours."""
_MOST_NEW = 4096
_MOST_TRIED = 8
"""Values looked at, each time memory is asked for, that a policy without a limit offloads."""


class Evictable:
    """The values that may be evicted."""

    def __init__(self) -> None:
        self._new: deque[weakref.ref[SavedBuffers]] = deque()
        """Records whose values are not among the candidates yet: most budgets do not bind most of the time, and most
        values are freed before anything has to be evicted."""
        self._lock = locks.lock()
        self.candidates = Candidates()
        self.offloads = Offloads()
        self.policy: Policy | None = None
        """The policy in force; asked about each value once, when a tape first needs its bytes, and at each name."""
        self._ready: dict[int, tuple[weakref.ref[Recipe], weakref.ref[Graph]]] = {}
        """Values to be offloaded, by index."""

    @synchronized
    def begin(self) -> None:
        """Begin the first budget: see :meth:`Candidates.begin`."""
        self.candidates.begin()

    @synchronized
    def clear(self) -> None:
        """Forget everything."""
        self._new.clear()
        self._ready.clear()
        self.candidates.clear()

    def save(self, saved: SavedBuffers) -> None:
        """Note saved values: they become candidates when memory is needed, or now if a policy is to be asked."""
        self._new.append(weakref.ref(saved))
        if self.policy is not None or len(self._new) >= _MOST_NEW:
            self.register_new()

    @synchronized
    def register_new(self) -> None:
        """Make the values saved since the last call candidates."""
        while self._new:
            saved = self._new[0]()
            if saved is not None:
                for buffer, recipe in zip(saved.buffers, saved.recipes, strict=True):
                    if recipe is not None and (buffer.array is not None or not buffer.state):
                        self.register(saved.graph, recipe, buffer)
            del saved
            self._new.popleft()  # last: after an interrupt all this is done again

    def register(self, graph: Graph, recipe: Recipe, buffer: Buffer) -> None:
        """Make the values whose bytes ``buffer`` shows, or is to be computed from, candidates."""
        if buffer.array is not None and buffer.base is None:
            self._add(graph, recipe)
            return
        for leaf in (buffer,) if buffer.array is not None else collect((buffer,)).leaves:
            below = graph.recipes.get(leaf.root().node.index)
            if below is not None and leaf.array is not None:
                self._add(graph, below).readers.update((recipe.node.index, leaf.node.index))

    @synchronized
    def registered(self, graph: Graph, recipe: Recipe, buffer: Buffer) -> None:
        """Register a value that was recomputed, or a pending one that was evaluated."""
        if recipe.is_saved() or recipe.candidate is not None:
            self.register_new()
            self.register(graph, recipe, buffer)

    @synchronized
    def register_saved(self, graph: Graph) -> None:
        """Make saved values that were recomputed while no budget was in force candidates."""
        for recipe, buffer in graph.saved():
            self.register(graph, recipe, buffer)

    @synchronized
    def offer_unsaved(self, graph: Graph) -> None:
        """Make every value that has a recipe a candidate, saved or not."""
        graph.evicts_unsaved = True
        for buffer in graph.live:
            recipe = getattr(buffer, "recipe", None)
            if recipe is not None and recipe.filled() is buffer and hasattr(buffer.root(), "storage"):
                self.register(graph, recipe, buffer)
                if recipe.candidate is not None:
                    recipe.candidate.unsaved = True

    @synchronized
    def spare(self, recipes: Iterable[Recipe]) -> None:
        """Evict others before these, which a replay will read."""
        self.register_new()
        self.candidates.spare(recipes)

    @synchronized
    def unspare(self, graph: Graph, recipes: Iterable[Recipe]) -> None:
        """End the sparing of values that the replay has read for the last time."""
        for recipe in recipes:
            self.candidates.unspare(recipe, graph)

    def _add(self, graph: Graph, recipe: Recipe) -> EvictionCandidate:
        """Return the candidate that the value of ``recipe`` is, or becomes."""
        candidate = recipe.candidate
        if candidate is None:
            candidate = EvictionCandidate()
            candidate.answer = asked(self.policy, recipe.node, recipe.names)
            recipe.candidate = candidate
            self._settle(recipe, candidate)
        if candidate.row < 0:
            self._offer(graph, recipe, candidate)
        return candidate

    def _offer(self, graph: Graph, recipe: Recipe, candidate: EvictionCandidate) -> None:
        """Offer a filled value for eviction or offloading, unless the policy saves it."""
        index, nbytes = recipe.node.index, recipe.node.aval.nbytes
        self.candidates.returned(recipe, graph)
        self.offloads.returned(index)
        if candidate.answer in (SAVE, RECOMPUTE):
            candidate.transfer = None
        else:
            candidate.transfer = transfer_of(nbytes, recipe.slot is not None)
            self._ready[index] = weakref.ref(recipe), weakref.ref(graph)
        if candidate.answer is not SAVE and recipe.pinned is None:
            self.candidates.add(recipe, graph, rounded(nbytes))

    @synchronized
    def named(self, graph: Graph, recipe: Recipe, name: str) -> Answer:
        """Note the user's ``name`` of a value; return the policy's answer."""
        self.register_new()
        recipe.names += (name,)
        answer = asked(self.policy, recipe.node, recipe.names)
        self._answered(graph, recipe, answer)
        return answer

    @synchronized
    def keep(self, graph: Graph, recipe: Recipe) -> None:
        """Never evict the filled value of ``recipe``."""
        recipe.kept = True
        self._add(graph, recipe)
        self._answered(graph, recipe, SAVE)

    def _answered(self, graph: Graph, recipe: Recipe, answer: Answer) -> None:
        candidate = recipe.candidate
        if candidate is not None and candidate.answer != answer and not (recipe.kept and candidate.answer is SAVE):
            candidate.answer = answer
            self._withdraw(recipe)
            if recipe.filled() is not None:
                self._offer(graph, recipe, candidate)

    def _withdraw(self, recipe: Recipe) -> None:
        self.candidates.remove(recipe)
        self._ready.pop(recipe.node.index, None)

    def _settle(self, new: Recipe, candidate: EvictionCandidate) -> None:
        """Find the candidates next to a new one, and the cost of recomputing it from them."""
        seen: set[int] = set()
        stack = [new]
        while stack and len(seen) < _MOST_WALKED:
            recipe = stack.pop()
            if recipe.pinned is not None:  # kept for good, so nothing recomputes it
                continue
            candidate.cost += cost_of(recipe.node, [i.node.aval for i in recipe.inputs])
            for above in recipe.inputs:
                if type(above) is not Recipe or above.node.index in seen:
                    continue
                seen.add(above.node.index)
                if above.candidate is None:
                    stack.append(above)
                else:
                    candidate.near.append(above.node.index)
                    above.candidate.near.append(new.node.index)

    @synchronized
    def evict(self, recipe: Recipe, graph: Graph, moving: bool = False) -> bool:
        """Evict a value, and the views of it; False if its bytes are in use.

        ``moving``: raise OffloadError if it is to be moved and its tier fails; else it is evicted all the same.
        """
        candidate, buffer = recipe.candidate, recipe.filled()
        if candidate is None or recipe.pinned is not None or buffer is None or not hasattr(buffer, "storage"):
            self._withdraw(recipe)
            return False
        readers = self._readers(graph, candidate)
        if not (candidate.unsaved or recipe.is_saved() or any(r.is_saved() for r, _ in readers)):
            self._withdraw(recipe)  # unless `offer_unsaved` says otherwise
            return False
        if candidate.transfer is None and self._is_cheaper(recipe, graph):
            return False
        if not self._moved(recipe, graph, candidate, moving):
            return False
        pending = [(r, b, roots(b)) for r, b in readers if b.array is None and not b.state]
        for r, b in readers:
            if b.base is buffer:
                r.graph = graph
                b.hide(r)
        recipe.graph = graph
        copied = recipe.slot is not None and keeps_memory()  # a running copy holds the array, and counts it
        if not buffer.evict(recipe, copied or thread.executor.keeps_arrays):
            return False
        for r, b, below in pending:
            if any(root is buffer for root in below):
                self._hide(graph, r, b, tuple([root for root in below if root is not buffer]))
        candidate.readers = set()
        if recipe.slot is None:
            self.candidates.evicted(recipe, graph)
        else:
            self._withdraw(recipe)
            self.offloads.went(recipe.slot)
        return True

    def _readers(self, graph: Graph, candidate: EvictionCandidate) -> list[tuple[Recipe, Buffer]]:
        """Return the views of the bytes and the pending values that read them, and perhaps others."""
        recipes = [r for i in candidate.readers if (r := graph.recipes.get(i)) is not None]
        return [(r, b) for r in recipes if (b := r.value()) is not None]

    def _hide(self, graph: Graph, recipe: Recipe, pending: Buffer, others: tuple[Buffer, ...]) -> None:
        """Evict a pending value along with bytes that it reads; the ``others`` that it reads stay candidates."""
        recipe.graph, recipe.sources = graph, (graph.saving(others) or others,)
        pending.hide(recipe)

    def _only_tapes_refer_to(self, recipe: Recipe, graph: Graph) -> bool:
        candidate = recipe.candidate
        if candidate is None:
            return False
        return not in_hand(recipe, [r for i in candidate.readers if (r := graph.recipes.get(i)) is not None])

    @synchronized
    def release(self, graph: Graph, nodes: Sequence[int], sources: Sequence[object], answer: Answer) -> None:
        """Evict those values of ``nodes`` that only tapes refer to, the latest first, unless the policy saves them.

        ``sources`` are kept until the evicted values have been recomputed.
        """
        self.register_new()
        for index in reversed(nodes):
            recipe = graph.recipes.get(index)
            candidate = None if recipe is None else recipe.candidate
            if recipe is None or candidate is None or candidate.row < 0:
                continue
            if answer is not RECOMPUTE:
                candidate.answer = answer
                self._withdraw(recipe)
                self._offer(graph, recipe, candidate)
            if self._only_tapes_refer_to(recipe, graph) and self.evict(recipe, graph) and recipe.slot is None:
                recipe.sources = (*recipe.sources, *sources)

    def _is_cheaper(self, recipe: Recipe, graph: Graph) -> bool:
        """Keep a value for good if the buffers held only to recompute it have no fewer bytes; these are freed then."""
        nbytes = bytes_held_for(recipe)
        if nbytes < max(1, recipe.node.aval.nbytes):
            return False
        buffer = recipe.value()
        if buffer is not None:
            graph.pin(recipe, buffer)
            self._withdraw(recipe)
        return True

    def _moved(self, recipe: Recipe, graph: Graph, candidate: EvictionCandidate, moving: bool) -> bool:
        """Move the bytes to a tier if the policy says so; False if that is impossible now."""
        if candidate.transfer is not None and recipe.slot is None:
            buffer: Any = recipe.value()
            try:
                recipe.slot = move(buffer, candidate.answer)
            except OffloadError:  # a full disk, say: under a limit the value can be recomputed
                if moving:
                    raise
                candidate.transfer = None
                self._ready.pop(recipe.node.index, None)
                return True
            if recipe.slot is None:
                candidate.transfer, candidate.anew = None, not moving
                self._ready.pop(recipe.node.index, None)
                self.candidates.refresh(recipe, graph)
                return False
        return True

    @synchronized
    def offload(self, here: int) -> None:
        """Move values that the policy offloads and only tapes refer to, but no fetched one that is still to be read.

        A tape at node ``here`` reads nothing any more that was computed later.
        """
        self.register_new()
        tried = 0
        for index in list(self._ready):
            if tried == _MOST_TRIED:
                break
            weak = self._ready.pop(index)
            recipe, graph = weak[0](), weak[1]()
            if recipe is None or graph is None or recipe.filled() is None:
                continue  # it was freed
            tried += 1
            moved = (
                (recipe.slot is None or index > here)
                and self._only_tapes_refer_to(recipe, graph)
                and self.evict(recipe, graph, True)
            )
            candidate = recipe.candidate
            if not moved and candidate is not None and candidate.row >= 0 and candidate.transfer is not None:
                self._ready[index] = weak  # at the end of the queue
