"""Who keeps the process within its budget: makes room, and brings back what a rule reads (see ``memory/budget.py``)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

from tapegrad import buffer as _buffer
from tapegrad.aval import ShapedArray
from tapegrad.buffer import Buffer
from tapegrad.device import in_use, pressure
from tapegrad.errors import BudgetError
from tapegrad.evaluate import fill
from tapegrad.memory.figures import rounded
from tapegrad.memory.ledger import LEDGER
from tapegrad.memory.offload import Moved, kept_bytes, reclaim
from tapegrad.memory.oom import budget_error, collected, live_set
from tapegrad.memory.policies import RECOMPUTE, Policy
from tapegrad.memory.promises import Promises
from tapegrad.memory.recipes import Graph, Kept, Recipe, Residuals
from tapegrad.memory.replay import replay
from tapegrad.memory.storages import Storages
from tapegrad.node import Node

_PASSED_FOR = 32
"""Where so many values have been found held, they are looked at again only after so many rounds of eviction."""


class Manager:
    """The keeper of the process: one limit, the graph of what is being recorded, and the storages of all tapes."""

    def __init__(self) -> None:
        self._limits: list[float] = []
        self._policies: list[Policy] = []
        self._storages = Storages()
        self._graph: Any = None
        self._here = 0
        self._promised = Promises()
        self._passed: list[tuple[weakref.ref[Recipe], weakref.ref[Graph]]] = []
        self._rounds = 0
        self._lock = threading.RLock()

    # Limits ----------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> float:
        """The smallest of the budgets that are in force; infinite, if there are policies alone."""
        return min(self._limits, default=inf)

    def enter(self, limit: float, policy: Policy | None = None) -> None:
        """One more budget, perhaps with a policy; what is alive already must fit, or be dropped."""
        with self._lock:
            self._limits.append(limit)
            self._decide(self._policies if policy is None else [*self._policies, policy])
            _buffer.set_keeper(self)
            self._limit_pools()
            self._promised.settle()
            self._register_again()
            try:
                self._make_room(0, ("memory_budget",))
            except BaseException:
                self.leave(limit, policy)
                raise

    def _register_again(self) -> None:
        """What was made again while no budget was in force, perhaps by kernels that nobody told of, can be dropped."""
        graph = self._present()
        with self._storages.guard:
            for kept in graph.kept() if graph is not None else ():
                if kept.buffer is not None:
                    self._storages.register(graph, kept.recipe, kept.buffer)  # type: ignore[arg-type]

    def leave(self, limit: float, policy: Policy | None = None) -> None:
        """One budget less."""
        with self._lock:
            self._limits.remove(limit)
            place = max((i for i, p in enumerate(self._policies) if p is policy), default=None)
            self._decide([p for i, p in enumerate(self._policies) if i != place])
            if not self._limits:
                _buffer.set_keeper(None)
                self._promised.clear()
            self._limit_pools()

    def _decide(self, policies: list[Policy]) -> None:
        """The last of ``policies``, the innermost, is in force."""
        self._policies = policies
        self._storages.policy = policies[-1] if policies else None

    def _limit_pools(self) -> None:
        for device in in_use():
            device.limit(None if self.limit == inf else int(self.limit))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """No budget is in force in the block; what is recorded there has a graph and candidates of its own."""
        before, keeper = dict(self.__dict__), _buffer.keeper
        self._limits, self._policies, self._storages, self._graph = [], [], Storages(), None
        self._here, self._promised, self._passed = 0, Promises(), []
        _buffer.set_keeper(None)
        try:
            yield
        finally:
            self._storages.clear()
            self.__dict__.update(before)
            _buffer.set_keeper(keeper)

    # What the engine tells -------------------------------------------------------------------------------------

    def graph(self) -> Graph:
        """The graph that recordings share; a new one if the last one has gone with its recordings."""
        with self._lock:
            found = self._present()
            if found is None:
                found = Graph(self.restore)
                self._graph = weakref.ref(found)
            return found

    def _present(self) -> Graph | None:
        return None if self._graph is None else self._graph()

    def made(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """A node was applied where something records."""
        graph = self._present()
        if graph is not None:
            graph.add(node, inputs, out)
            self._here = node.index

    def renamed(self, out: Buffer, source: Buffer) -> None:
        """The same bytes under another node: a view."""
        graph = self._present()
        if graph is not None and source.node.index in graph.recipes:
            graph.add(out.node, (source,), out)

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls a value ``name``; if a policy then wants it kept, it is made now."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.root().node.index)
        if graph is not None and recipe is not None:
            with self._storages.guard:
                answer = self._storages.named(graph, recipe, name)
            if answer is not RECOMPUTE:
                fill((buffer,))

    def filled(self, buffer: Buffer, keeps: tuple[Buffer, ...]) -> None:
        """A pending buffer has become a storage of its own."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.node.index)
        if graph is not None and recipe is not None:
            with self._storages.guard:
                self._storages.filled(graph, recipe, keeps)

    def keep(self, buffers: tuple[Buffer, ...]) -> Any:
        """A record wants ``buffers``; those with a recipe may be dropped later."""
        graph = self.graph()
        with self._storages.guard:
            things = tuple([self._storages.kept(graph, b) for b in buffers])
        return Residuals(things) if any(type(t) is Kept for t in things) else buffers

    def reserve(self, avals: Sequence[ShapedArray], names: Sequence[str]) -> None:
        """Make room for values like these.  Raises BudgetError."""
        nbytes = sum([rounded(a.nbytes) for a in avals])
        with self._lock:
            self._promised.settle()
            if self.limit == inf:
                with self._storages.guard:
                    self._storages.offload(self._here)
            self._make_room(nbytes, names)
            self._promised.give(nbytes)

    def admit(self, buffer: Buffer, count: Callable[[Buffer], None]) -> None:
        """Bytes are to be counted, before others get room; those not announced (a user's array) need some, too."""
        nbytes = rounded(buffer.node.aval.nbytes)
        with self._lock:
            if not self._promised.take(nbytes):
                self._make_room(nbytes, (buffer.node.prim.name if buffer.node.prim else "a new array",))
            count(buffer)

    def settled(self) -> None:
        """What this thread reserved for is made, or will not be."""
        with self._lock:
            self._promised.settle()

    def replaced(self, buffer: Buffer) -> None:
        """The value of the buffer's node is here now: a copy of a view."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.node.index)
        if recipe is not None:
            recipe.buffer = weakref.ref(buffer)

    def relieve(self, nbytes: int) -> bool:
        """The device itself has no room: drop about so many bytes; False if nothing could be dropped."""
        with self._lock:
            before = LEDGER.live_bytes
            while before - LEDGER.live_bytes < max(1, nbytes) and self._drop_one():
                pass
            return reclaim(nbytes) > 0 or LEDGER.live_bytes < before

    # Making room -----------------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int, names: Sequence[str]) -> None:
        offloads = self._storages.offloads
        while (over := self._taken() + nbytes - self.limit) > 0:
            if not (
                (self._storages.unused >= over and self._sweep())
                or offloads.give_way(int(over))
                or self._drop_one()
                or reclaim(int(over))
                or self._promised.forget_ended_threads()
                or self._sweep()
                or collected()
            ):
                raise self._infeasible(nbytes, names)

    def _sweep(self) -> bool:
        """Forget recipes that nobody needs, and with them what they hold; False if that has freed nothing."""
        graph, before = self._present(), LEDGER.live_bytes
        self._storages.unused = 0
        if graph is not None:
            graph.sweep()
        return LEDGER.live_bytes < before

    def _taken(self) -> int:
        return LEDGER.live_bytes + self._promised.total + kept_bytes()

    def _drop_one(self) -> bool:
        """Drop the best candidate that nobody holds; False if there is none.

        What somebody holds is passed over; if there is much of it (a user may hold thousands of values, and each look
        costs time), for several rounds.
        """
        storages = self._storages
        with storages.guard:
            self._rounds += 1
            if len(self._passed) < _PASSED_FOR or self._rounds % _PASSED_FOR == 0:
                self._offer_again()
            looked_at = 0
            while True:
                while (found := storages.candidates.best(self._here)) is not None:
                    if storages.drop(*found):
                        if found[0].slot is None:
                            LEDGER.evicted()
                        return True
                    if storages.candidates.pass_over(found[0]):
                        self._passed.append((weakref.ref(found[0]), weakref.ref(found[1])))  # it may go any time
                        looked_at += 1
                if looked_at == len(self._passed) and not storages.candidates.offer_spared():  # all of them, just now
                    self._offer_again()
                    return False
                looked_at = 0
                self._offer_again()

    def _offer_again(self) -> None:
        for recipe, graph in [(r(), g()) for r, g in self._passed]:
            if recipe is not None and graph is not None:
                self._storages.candidates.refresh(recipe, graph)
        self._passed = []

    def _infeasible(self, nbytes: int, names: Sequence[str]) -> BudgetError:
        graph = self._present()
        for kept in graph.kept() if graph is not None else ():
            if kept.buffer is not None and kept.buffer.array is not None:
                LEDGER.labelled(kept.buffer.root(), "activation", "a tape")
        return budget_error(nbytes, names, LEDGER.live_bytes + self._promised.total, int(self.limit))

    # Making values again ---------------------------------------------------------------------------------------

    def restore(self, kept: list[Kept]) -> dict[int, Buffer]:
        """The buffers of kept values, by their ids; what is missing is made again."""
        found: dict[int, Any] = {id(k): k.buffer for k in kept}
        missing = [k for k in kept if found[id(k)] is None]
        self._here = max([k.recipe.node.index for k in kept])
        if missing:
            made = replay(missing[0].graph, [k.recipe for k in missing], self._storages)
            for k in missing:
                found[id(k)] = made[k.recipe.node.index]
        if self._storages.offloads.any:
            with self._lock, self._storages.guard:
                self._storages.offloads.prefetch(self._here, self._has_room)
        return found

    def bring(self, moved: Moved) -> bool:
        """Start bringing a value back that was offloaded, if there is room."""
        with self._lock:
            return self._storages.offloads.bring(moved, self._has_room)

    def _has_room(self, nbytes: int) -> bool:
        """Whether a value may come back early: twice its bytes are left to what runs meanwhile."""
        return self._taken() + 3 * rounded(nbytes) <= self.limit


MANAGER = Manager()
pressure.helpers(lambda nbytes: MANAGER.relieve(nbytes), live_set)
