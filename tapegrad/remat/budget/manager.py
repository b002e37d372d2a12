"""The manager of budgets: frees memory, and recomputes evicted values that are read (see ``budget``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from threading import get_ident
from typing import Any, Protocol, TypeVar

from tapegrad.core import locks, tracking
from tapegrad.core.aval import ShapedArray, rounded
from tapegrad.core.buffer import EVICTED, Buffer
from tapegrad.core.locks import synchronized
from tapegrad.core.node import LEAF, Node
from tapegrad.core.protocols import Retained
from tapegrad.core.storage import METER
from tapegrad.core.tracking import Tracker
from tapegrad.device import in_use, oom_retry
from tapegrad.engine.realize import fill, stored
from tapegrad.errors import BudgetError
from tapegrad.remat.budget.evictable import Evictable
from tapegrad.remat.budget.oom import budget_error, collected, live_set
from tapegrad.remat.budget.recipes import Graph, Recipe, SavedBuffers, Session, asked_of
from tapegrad.remat.budget.replay import replay
from tapegrad.remat.offload.offload import Moved, keeps_memory, kept_bytes, reclaim
from tapegrad.remat.policies import RECOMPUTE, Answer, Policy
from tapegrad.tracing.ledger import LEDGER

T = TypeVar("T")
_PASSED_FOR = 32
"""Where so many values have been found held, they are looked at again only after so many rounds of eviction."""


def _none() -> None:
    return None


class LastResort(Protocol):
    """Something that can be made again at a price, and is dropped only where there would be an error otherwise."""

    @property
    def droppable(self) -> bool:
        """Whether it may be dropped now."""

    def price(self) -> float:
        """What it costs to make it again, for each byte."""

    def drop(self) -> None:
        """Drop it."""


@dataclass(frozen=True, eq=False)
class _Budget:
    """One that is in force, and the thread that has entered it."""

    limit: float
    policy: Policy | None
    thread: int
    measure: object
    """Stands for the block."""
    yields: bool = False
    """Whether the limit gives way, by what lacks, where there would be an error."""


class Manager(Tracker):
    """The tracker within a budget: the ledger's, and one limit, the graph of all that is recorded, all storages."""

    counts = copies_slivers = True  # an array cannot be dropped while a piece of it is held

    def __init__(self) -> None:
        self._budgets: list[_Budget] = []
        self._asked = False  # somebody is making room: who needs some waits
        self._evictable = Evictable()
        self._graph: Callable[[], Graph | None] = _none
        self._session: Callable[[], Session | None] = _none
        """That of the graph, if something records."""
        self._here = 0
        self._passed: list[tuple[weakref.ref[Recipe], weakref.ref[Graph]]] = []
        self._rounds = 0
        self._lock = locks.lock()
        self._watch: Callable[[Node, tuple[Buffer, ...]], None] | None = None
        self.last_resorts: weakref.WeakSet[LastResort] = weakref.WeakSet()

    called, label, require = LEDGER.called, LEDGER.label, LEDGER.require
    read, ran, ran_small, replayed = LEDGER.read, LEDGER.ran, LEDGER.ran_small, LEDGER.replayed
    differentiating, rerun = LEDGER.differentiating, LEDGER.rerun

    @property
    def follows_each(self) -> bool:  # type: ignore[override]
        """Whether the ledger does, or a plan."""
        return self._watch is not None or LEDGER.follows_each

    # Limits ----------------------------------------------------------------------------------------------------

    @synchronized
    def enter(self, limit: float, policy: Policy | None, measure: object, yields: bool = False) -> None:
        """Put one more budget in force, perhaps with a policy, until ``measure`` leaves; evict what does not fit.

        Raises BudgetError: then, too, ``measure`` must leave.
        """
        if not self._budgets:  # a program drops the same values whatever ran before it
            self._rounds, self._passed = 0, []
            self._evictable.begin()
        self._decide([*self._budgets, _Budget(limit, policy, get_ident(), measure, yields)])
        graph = self._present()
        if graph is not None:
            self._evictable.registered_again(graph)
        self._with_room(0, ("memory_budget",))

    @synchronized
    def leave(self, measure: object) -> None:
        """One budget less; a second call does nothing."""
        self._decide([b for b in self._budgets if b.measure is not measure])

    @synchronized
    def lessen(self, measure: object, nbytes: int) -> None:
        """The limit of ``measure`` is so many bytes less; who needs room next makes it."""
        self._decide([replace(b, limit=max(0, b.limit - nbytes)) if b.measure is measure else b for b in self._budgets])

    def _decide(self, budgets: list[_Budget]) -> None:
        """The smallest limit and the last policy, the innermost, are in force."""
        self._asked = self._asked and bool(budgets)  # an interrupt may have left it set
        self._set(budgets)
        self._open_room()
        self._limit_pools()

    def _set(self, budgets: list[_Budget]) -> None:
        policies = [b.policy for b in budgets if b.policy is not None]
        self._budgets = budgets
        self._evictable.policy = policies[-1] if policies else None
        tracking.install_budget(self if budgets else None)

    def _limit_pools(self) -> None:
        for device in in_use():
            device.limit(None if METER.limit == inf else int(METER.limit))

    def _open_room(self) -> None:
        """Let kernels take room without asking, if nothing but the ledger has to be looked at."""
        limit = self._least()
        offloads = limit == inf and self._evictable.policy is not None
        METER.restrict(limit, self._asked or (tracking.current is self and (offloads or keeps_memory())))

    def _least(self) -> float:
        """The smallest limit of the budgets in force; infinite, if there are policies alone."""
        return min([b.limit for b in self._budgets], default=inf)

    def in_child(self) -> None:
        """In a forked child nobody else makes room, and no other thread will ever leave a budget that it entered."""
        self._asked = False
        self._set([b for b in self._budgets if b.thread == get_ident()])
        self._evictable.offloads.in_child()
        self._open_room()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """No budget is in force in the block; what is recorded there has a graph and candidates of its own.

        Who watches goes on: a plan that is in force is so in the block, too.
        """
        before, reserved = dict(self.__dict__), METER.exchange_reservations({})
        self._evictable, self._graph, self._session = Evictable(), _none, _none
        self._here, self._passed, self._asked, self.last_resorts = 0, [], False, weakref.WeakSet()
        self._decide([b for b in self._budgets if b.limit == inf and b.policy is None])
        try:
            yield
        finally:
            self._evictable.clear()
            self.__dict__.update(before)
            tracking.install_budget(self if self._budgets else None)
            METER.exchange_reservations(reserved)
            self._open_room()
            self._limit_pools()

    # What the engine tells -------------------------------------------------------------------------------------

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """``node`` is applied to ``inputs``."""
        LEDGER.applied(node, inputs)
        if self._watch is not None:
            self._watch(node, inputs)

    def watch(self, f: Callable[[Node, tuple[Buffer, ...]], None] | None) -> None:
        """Tell ``f`` of every node before it is applied, from now on; None: nobody."""
        self._watch = f

    def release(self, nodes: Sequence[int], read: Sequence[Retained], answer: Answer) -> None:
        """Of the values of ``nodes`` (by index), drop what only tapes want; OFFLOAD moves it to another memory.

        What the nodes have ``read`` of others stays until dropped values have been made again.
        """
        graph = self._present()
        if graph is not None:
            fill(asked_of([r for i in nodes if (r := graph.recipes.get(i)) is not None]))
            sources = [r for r in read if isinstance(r, SavedBuffers)]
            self._evictable.release(graph, nodes, sources, answer)

    def graph(self) -> Session:
        """What a recording holds from its beginning to its end: recordings that overlap share it."""
        graph = self._recipes()
        if graph.present() is None:
            self._return(graph)
        return self._begun()

    @synchronized
    def _begun(self) -> Session:
        session = self._recipes().session()
        self._session = weakref.ref(session)
        return session

    def _return(self, graph: Graph) -> None:
        """Fill values of the user's that an earlier session left evicted, while there is memory for them.

        They stay then: so the recordings to come need not keep what they are computed from.
        """
        for buffer in graph.survivors():
            if METER.limit != inf and self._has_room(buffer.node.aval.nbytes):
                stored(buffer)
        graph.survivors()

    def walk(self, f: Callable[..., T], *args: Any) -> T:
        """Return ``f(*args)``, a backward pass; values that it reads may be evicted anew until it ends."""
        session = self._begun()
        try:
            return LEDGER.walk(f, *args)
        finally:
            del session

    def _recipes(self) -> Graph:
        """The graph of all that is kept; a new one if the last one has gone."""
        return self._present() or self._new_graph()

    @synchronized
    def _new_graph(self) -> Graph:
        graph = self._present()  # another thread's, made just now
        if graph is None:
            graph = Graph(self.restore, self.read_saved)
            self._graph = weakref.ref(graph)
        return graph

    def _present(self) -> Graph | None:
        return self._graph()

    def made(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """A node was applied where something records."""
        session = self._session()
        if session is not None:
            session.graph.add(node, inputs, out)
            self._here = node.index

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls a value ``name``; if a policy then wants it kept, it is made now."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.root().node.index)
        if graph is not None and recipe is not None:
            answer = self._evictable.named(graph, recipe, name)
            if answer is not RECOMPUTE:
                fill((buffer,))

    def filled(self, buffer: Buffer) -> None:
        """A buffer has got its bytes, or takes the place of its node's: a copy of a view."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.node.index)
        if graph is not None and recipe is not None:
            if recipe.value() is buffer:
                self._evictable.registered(graph, recipe, buffer)
            else:
                graph.alive(recipe, buffer)

    def save(self, buffers: tuple[Buffer, ...], by: str = "") -> Retained:
        """Return what is to be held of ``buffers``; those that have recipes may be evicted later."""
        if LEDGER.detailed or LEDGER.journal is not None:
            LEDGER.save(buffers, by)
        graph = self._graph() or self._new_graph()
        saved = graph.saving(buffers)
        if saved is None:
            return buffers
        self._evictable.save(saved)
        return saved

    def keep(self, buffer: Buffer) -> None:
        """Never evict the value of ``buffer``, from now on."""
        if self._budgets or buffer.state:
            stored(buffer)
        root, graph = buffer.root(), self._present()
        recipe = None if graph is None else graph.recipes.get(root.node.index)
        if graph is not None and recipe is not None:
            self._evictable.keep(graph, recipe)

    def reserved(self, avals: Sequence[ShapedArray], names: Sequence[str]) -> _Reserved:
        """Reserve bytes for a block that allocates values like ``avals``; see :meth:`Tracker.reserved`."""
        return _Reserved(self, avals, names)

    def reserve(self, nbytes: int, names: Sequence[str]) -> None:
        """Reserve bytes for this thread; free memory for them.  Raises BudgetError."""
        if not METER.reserve(nbytes):
            if METER.limit == inf:
                self._offload()
            self._with_room(nbytes, names, METER.reserve_anyway, nbytes)

    def admit(self, nbytes: int, buffer: Buffer, count: Callable[[], None]) -> None:
        """Free memory for ``nbytes`` that ``buffer`` owns, a small value or an array, and ``count`` them."""
        name = "a new array" if buffer.node.prim is LEAF else buffer.node.prim.name
        self._with_room(max(0, nbytes - METER.reserved), (name,), count)

    def replaced(self, buffer: Buffer) -> None:
        """The value of the buffer's node is here now: a copy of a view."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.node.index)
        if graph is not None and recipe is not None:
            graph.alive(recipe, buffer)

    @synchronized
    def relieve(self, nbytes: int) -> bool:
        """The device itself has no room: drop about so many bytes; False if nothing could be dropped."""
        before = LEDGER.live_bytes
        while before - LEDGER.live_bytes < max(1, nbytes) and (self._drop_one() or self._drop_unsaved()):
            pass
        return reclaim(nbytes) > 0 or LEDGER.live_bytes < before

    # Making room -----------------------------------------------------------------------------------------------

    @synchronized
    def _offload(self) -> None:
        self._evictable.offload(self._here)

    @synchronized
    def _with_room(self, nbytes: int, names: Sequence[str], take: Callable[..., Any] = bool, *args: Any) -> None:
        """Make room, and ``take(*args)`` it before anybody else can."""
        outer, self._asked = self._asked, True
        try:
            METER.restrict(METER.limit, always_asks=True)
            self._make_room(nbytes, names)
            take(*args)
        finally:
            self._asked = outer
            self._open_room()

    def _make_room(self, nbytes: int, names: Sequence[str]) -> None:
        offloads = self._evictable.offloads
        while (over := self._taken() + nbytes - METER.limit) > 0:
            if not (
                offloads.give_way(int(over))
                or self._drop_one()
                or reclaim(int(over))
                or self._drop_last_resort()
                or self._drop_unsaved()
                or self._give_way(over)
                or collected()
            ):
                taken = self._taken()
                if taken + nbytes > METER.limit:  # another thread may have freed some since
                    raise self._infeasible(nbytes, names, taken)

    def _taken(self) -> int:
        return METER.committed_bytes + kept_bytes()

    def _drop_one(self) -> bool:
        """Drop the best candidate that nobody holds; False if there is none, and nothing went while one was sought.

        What somebody holds is passed over; if there is much of it (a user may hold thousands of values, and each look
        costs time), for several rounds.
        """
        before = LEDGER.live_bytes
        return self._drop_best() or LEDGER.live_bytes < before

    def _drop_best(self) -> bool:
        evictable, before = self._evictable, LEDGER.live_bytes
        evictable.register_new()
        self._rounds += 1
        if len(self._passed) < _PASSED_FOR or self._rounds % _PASSED_FOR == 0:
            self._offer_again()
        looked_at = 0
        while True:
            while (best := evictable.candidates.best(self._here)) is not None:
                if evictable.evict(*best):
                    if best[0].slot is None:
                        LEDGER.evicted()
                    return True
                if LEDGER.live_bytes < before:  # what it was made from has gone instead
                    return False
                if evictable.candidates.pass_over(best[0]):
                    self._passed.append((weakref.ref(best[0]), weakref.ref(best[1])))  # it may go any time
                    looked_at += 1
            if looked_at == len(self._passed) and not evictable.candidates.offer_spared():  # all of them, just now
                self._offer_again()
                return False
            looked_at = 0
            self._offer_again()

    def _drop_unsaved(self) -> bool:
        """Drop a value that no tape saves, but the program holds; False if there is none."""
        graph = self._present()
        if graph is None:
            return False
        self._evictable.offer_all(graph)
        return self._drop_one()

    def _drop_last_resort(self) -> bool:
        """Drop what costs least among what is dropped only before an error; False if there is nothing."""
        offers = [x for x in self.last_resorts if x.droppable]
        if not offers:
            return False
        min(offers, key=lambda x: x.price()).drop()
        return True

    def _give_way(self, nbytes: float) -> bool:
        """Raise the smallest limit by so many bytes; False if that of a block may not be."""
        lowest = [b for b in self._budgets if b.limit == METER.limit]
        if not all(b.yields for b in lowest):
            return False
        self._set([replace(b, limit=b.limit + nbytes) if b in lowest else b for b in self._budgets])
        self._open_room()
        self._limit_pools()
        return True

    def _offer_again(self) -> None:
        for recipe, graph in [(r(), g()) for r, g in self._passed]:
            if recipe is not None and graph is not None:
                self._evictable.candidates.refresh(recipe, graph)
        self._passed = []

    def _infeasible(self, nbytes: int, names: Sequence[str], taken: int) -> BudgetError:
        graph = self._present()
        for _, buffer in graph.saved() if graph is not None else ():
            LEDGER.label(buffer, "activation", "a tape")
        return budget_error(nbytes, names, taken, int(METER.limit))

    # Recomputing values ----------------------------------------------------------------------------------------

    def restore(self, graph: Graph, buffers: Sequence[Buffer]) -> None:
        """Fill ``buffers``, which are evicted."""
        recipes = {b.node.index: b.recipe for b in buffers if b.array is None}
        if recipes:
            replay(graph, list(recipes.values()), self._evictable)

    def read_saved(self, saved: SavedBuffers) -> None:
        """A rule reads ``saved``: fill what is evicted."""
        graph, here, evicted, arrays = saved.graph, 0, [], []
        records = graph.present() is not None
        for b, recipe in zip(saved.buffers, saved.recipes, strict=True):
            array = b.array
            if recipe is not None:
                here = max(here, recipe.node.index)
                if array is None and b.state == EVICTED:
                    evicted.append(b)
                elif records and getattr(b, "recipe", None) is None:
                    graph.may_evict(recipe, b)
            arrays.append(array)  # it stays while others are recomputed
        self._here = here
        if evicted:
            self.restore(graph, evicted)
        if self._evictable.offloads.any:
            self._prefetch(here)

    @synchronized
    def _prefetch(self, here: int) -> None:
        self._evictable.offloads.prefetch(here, self._has_room)

    @synchronized
    def bring(self, moved: Moved) -> bool:
        """Start bringing a value back that was offloaded, if there is room."""
        return self._evictable.offloads.bring(moved, self._has_room)

    def _has_room(self, nbytes: int) -> bool:
        """Whether a value may come back early: twice its bytes are left to what runs meanwhile."""
        return self._taken() + 3 * rounded(nbytes) <= METER.limit


class _Reserved:
    """A block with bytes reserved for the values that it allocates."""

    __slots__ = ("_avals", "_before", "_manager", "_names")

    def __init__(self, manager: Manager, avals: Sequence[ShapedArray], names: Sequence[str]) -> None:
        self._manager, self._avals, self._names = manager, avals, names

    def __enter__(self) -> None:
        self._before = METER.reserved
        self._manager.reserve(sum([rounded(a.nbytes) for a in self._avals]), self._names)

    def __exit__(self, *exc: object) -> None:
        METER.release(self._before)


MANAGER = Manager()
locks.in_child(MANAGER.in_child)
METER.under_pressure = MANAGER.admit
oom_retry.helpers(lambda nbytes: MANAGER.relieve(nbytes), live_set)
