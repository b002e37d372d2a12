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
from tapegrad.engine.realize import realize, stored
from tapegrad.errors import BudgetError
from tapegrad.remat.budget.cuts import Cuts
from tapegrad.remat.budget.evictable import Evictable
from tapegrad.remat.budget.oom import budget_error, collected, live_set
from tapegrad.remat.budget.recipes import Graph, Recipe, SavedBuffers, Session, asked_of
from tapegrad.remat.budget.replay import replay
from tapegrad.remat.offload.offload import Moved, keeps_memory, kept_bytes, reclaim
from tapegrad.remat.policies import RECOMPUTE, Answer, Policy
from tapegrad.tracing.ledger import LEDGER
from tapegrad.tracing.phase import HERE, during

T = TypeVar("T")
_LOOK_AGAIN_AFTER = 32
"""Once this many values turned out to be in use, they are considered again only every so many rounds."""


def _none() -> None:
    return None


class LastResort(Protocol):
    """Memory that can be recomputed at a cost, and is freed only where a BudgetError would be raised otherwise."""

    @property
    def is_droppable(self) -> bool:
        """Whether it may be freed now."""

    def price(self) -> float:
        """Return the cost of recomputing it, for each byte."""

    def drop(self) -> None:
        """Free it."""


@dataclass(frozen=True, eq=False)
class _Budget:
    """A budget in force, and the thread that entered it."""

    limit: float
    policy: Policy | None
    thread: int
    measure: object
    """The block's measure, by which it is known."""
    yields: bool = False
    """Whether the limit is raised by the missing bytes instead of raising BudgetError."""


class Manager(Tracker):
    """The tracker within a budget: reports to the ledger, notes recipes in a graph, and evicts to keep the limit."""

    counts = copies_slivers = True  # an array cannot be freed while a view of it is alive

    def __init__(self) -> None:
        self._budgets: list[_Budget] = []
        self._is_freeing = False  # a thread is freeing memory: allocations of others wait for the lock
        self._evictable = Evictable()
        self._graph: Callable[[], Graph | None] = _none
        self._session: Callable[[], Session | None] = _none
        """The graph's session, while something records."""
        self._here = 0
        self._passed_over: list[tuple[weakref.ref[Recipe], weakref.ref[Graph]]] = []
        self._rounds = 0
        self._lock = locks.lock()
        self._watch: Callable[[Node, tuple[Buffer, ...]], None] | None = None
        self.last_resorts: weakref.WeakSet[LastResort] = weakref.WeakSet()

    called, label, require = LEDGER.called, LEDGER.label, LEDGER.require
    read, ran, ran_small, replayed = LEDGER.read, LEDGER.ran, LEDGER.ran_small, LEDGER.replayed
    differentiating, rerun = LEDGER.differentiating, LEDGER.rerun

    @property
    def follows_each(self) -> bool:  # type: ignore[override]
        """Whether the ledger or a plan follows each operation."""
        return self._watch is not None or LEDGER.follows_each

    # Limits ----------------------------------------------------------------------------------------------------

    @synchronized
    def enter(self, limit: float, policy: Policy | None, measure: object, yields: bool = False) -> None:
        """Put one more budget in force, perhaps with a policy, until ``measure`` leaves; evict what does not fit.

        Raises BudgetError: then, too, ``measure`` must leave.
        """
        if not self._budgets:  # a program evicts the same values whatever ran before it
            self._rounds, self._passed_over = 0, []
            self._evictable.begin()
        self._decide([*self._budgets, _Budget(limit, policy, get_ident(), measure, yields)])
        graph = self._present()
        if graph is not None:
            self._evictable.register_saved(graph)
        self._reserve_by_evicting(0, ("memory_budget",))

    @synchronized
    def leave(self, measure: object) -> None:
        """End a budget; a second call does nothing."""
        self._decide([b for b in self._budgets if b.measure is not measure])

    @synchronized
    def reduce_limit(self, measure: object, nbytes: int) -> None:
        """Lower the limit of ``measure`` by ``nbytes``; the next allocation evicts what exceeds it."""
        self._decide([replace(b, limit=max(0, b.limit - nbytes)) if b.measure is measure else b for b in self._budgets])

    def _decide(self, budgets: list[_Budget]) -> None:
        """Put ``budgets`` in force: the smallest limit, and the last policy, which is the innermost."""
        self._is_freeing = self._is_freeing and bool(budgets)  # an interrupt may have left it set
        self._set(budgets)
        self._restrict_meter()
        self._limit_pools()

    def _set(self, budgets: list[_Budget]) -> None:
        policies = [b.policy for b in budgets if b.policy is not None]
        self._budgets = budgets
        self._evictable.policy = policies[-1] if policies else None
        tracking.install_budget(self if budgets else None)

    def _limit_pools(self) -> None:
        for device in in_use():
            device.limit(None if METER.limit == inf else int(METER.limit))

    def _restrict_meter(self) -> None:
        """Let the meter admit allocations by itself, unless offloading or an eviction under way must be heeded."""
        limit = min([b.limit for b in self._budgets], default=inf)
        offloads = limit == inf and self._evictable.policy is not None
        METER.restrict(limit, self._is_freeing or (tracking.current is self and (offloads or keeps_memory())))

    def in_child(self) -> None:
        """Leave the budgets of other threads: in a forked child these threads do not exist."""
        self._is_freeing = False
        self._set([b for b in self._budgets if b.thread == get_ident()])
        self._evictable.offloads.in_child()
        self._restrict_meter()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Suspend all budgets in the block; what is recorded there has a graph and candidates of its own.

        A plan in force (:meth:`watch`) stays in force.
        """
        before, reserved = dict(self.__dict__), METER.exchange_reservations({})
        self._evictable, self._graph, self._session = Evictable(), _none, _none
        self._here, self._passed_over, self._is_freeing, self.last_resorts = 0, [], False, weakref.WeakSet()
        self._decide([b for b in self._budgets if b.limit == inf and b.policy is None])
        try:
            yield
        finally:
            self._evictable.clear()
            self.__dict__.update(before)
            tracking.install_budget(self if self._budgets else None)
            METER.exchange_reservations(reserved)
            self._restrict_meter()
            self._limit_pools()

    # Reports of the engine --------------------------------------------------------------------------------------

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """Report an application to the ledger and to the plan in force."""
        LEDGER.applied(node, inputs)
        if self._watch is not None:
            self._watch(node, inputs)

    def watch(self, f: Callable[[Node, tuple[Buffer, ...]], None] | None) -> None:
        """Call ``f`` with every node before it is applied, from now on; None: no longer."""
        self._watch = f

    def release(self, nodes: Sequence[int], read: Sequence[Retained], answer: Answer) -> None:
        """Evict those values of ``nodes`` (by index) that only tapes refer to; OFFLOAD moves them to another memory.

        ``read``: values of other nodes that these have read, kept until the evicted ones have been recomputed.
        """
        graph = self._present()
        if graph is not None:
            realize(asked_of([r for i in nodes if (r := graph.recipes.get(i)) is not None]))
            sources = [r for r in read if isinstance(r, SavedBuffers)]
            self._evictable.release(graph, nodes, sources, answer)

    def graph(self) -> Session:
        """Return the session, which a recording holds from beginning to end; recordings that overlap share it."""
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
        """Refill the user's values that an earlier session left evicted, while there is memory for them.

        They stay filled, so later recordings need not keep what they are computed from.
        """
        for buffer in graph.survivors():
            if METER.limit != inf and self._fits(buffer.node.aval.nbytes):
                stored(buffer)
        graph.survivors()

    def walk(self, f: Callable[..., T], *args: Any) -> T:
        """Return ``f(*args)``, a backward pass; values that it reads may be evicted anew until it ends."""
        session, cuts = self._begun(), Cuts(self._evictable, self._free_bytes, self.last_resorts)
        try:
            return during(LEDGER.walk, f, *args, cuts=cuts)
        finally:
            cuts.passed(-1)
            del session

    def _recipes(self) -> Graph:
        """Return the graph of recipes: the present one, or a new one."""
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
        """Note the recipe of a node, if a session is open."""
        session = self._session()
        if session is not None:
            session.graph.add(node, inputs, out)
            self._here = node.index

    def named(self, buffer: Buffer, name: str) -> None:
        """Note the user's ``name`` of a value; if the policy then saves it, evaluate it now."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.root().node.index)
        if graph is not None and recipe is not None:
            answer = self._evictable.named(graph, recipe, name)
            if answer is not RECOMPUTE:
                realize((buffer,))

    def filled(self, buffer: Buffer) -> None:
        """Note that a buffer has bytes, or replaces its node's buffer: a copy of a view."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.node.index)
        if graph is not None and recipe is not None:
            if (own := recipe.value()) is buffer:
                self._evictable.registered(graph, recipe, buffer)
            elif own is None or own.array is not None:  # else a replay computes the value in passing
                graph.alive(recipe, buffer)

    def save(self, buffers: tuple[Buffer, ...], by: str = "") -> Retained:
        """Return :class:`SavedBuffers` of ``buffers`` that may be evicted later; themselves if none can be."""
        if LEDGER.detailed or LEDGER.journal is not None:
            LEDGER.save(buffers, by)
        graph = self._graph() or self._new_graph()
        saved = graph.saving(buffers, self._here)
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
            self._reserve_by_evicting(nbytes, names, METER.reserve_anyway, nbytes)

    def admit(self, nbytes: int, buffer: Buffer, count: Callable[[], None]) -> None:
        """Free memory for ``nbytes`` that ``buffer`` owns, a small value or an array, and ``count`` them."""
        name = "a new array" if buffer.node.prim is LEAF else buffer.node.prim.name
        self._reserve_by_evicting(max(0, nbytes - METER.reserved), (name,), count)

    def replaced(self, buffer: Buffer) -> None:
        """The value of the buffer's node is here now: a copy of a view."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.node.index)
        if graph is not None and recipe is not None:
            graph.alive(recipe, buffer)

    @synchronized
    def free_device_memory(self, nbytes: int) -> bool:
        """Evict about ``nbytes``, since the device itself is out of memory; False if nothing could be freed."""
        before = LEDGER.live_bytes
        while before - LEDGER.live_bytes < max(1, nbytes) and (self._evict_one() or self._evict_unsaved()):
            pass
        return reclaim(nbytes) > 0 or LEDGER.live_bytes < before

    # Freeing memory --------------------------------------------------------------------------------------------

    @synchronized
    def _offload(self) -> None:
        self._evictable.offload(self._here)

    @synchronized
    def _reserve_by_evicting(
        self, nbytes: int, names: Sequence[str], take: Callable[..., Any] = bool, *args: Any
    ) -> None:
        """Free ``nbytes`` and call ``take(*args)``, which counts them, before another thread can take them."""
        outer, self._is_freeing = self._is_freeing, True
        try:
            METER.restrict(METER.limit, always_asks=True)
            self._free_memory(nbytes, names)
            take(*args)
        finally:
            self._is_freeing = outer
            self._restrict_meter()

    def _free_memory(self, nbytes: int, names: Sequence[str]) -> None:
        offloads = self._evictable.offloads
        while (over := self._taken() + nbytes - METER.limit) > 0:
            if not (
                offloads.free_memory(int(over))
                or self._evict_one()
                or reclaim(int(over))
                or self._drop_last_resort()
                or self._evict_unsaved()
                or self._raise_limit(over)
                or collected()
            ):
                taken = self._taken()
                if taken + nbytes > METER.limit:  # another thread may have freed some since
                    raise self._infeasible(nbytes, names, taken)

    def _taken(self) -> int:
        return METER.committed_bytes + kept_bytes()

    def _evict_one(self) -> bool:
        """Evict the best candidate; False if there is none, and nothing was freed meanwhile.

        Values in use are passed over; if they are many, for several rounds, since each attempt costs time.
        """
        before = LEDGER.live_bytes
        return self._evict_best() or LEDGER.live_bytes < before

    def _evict_best(self) -> bool:
        evictable, before = self._evictable, LEDGER.live_bytes
        evictable.register_new()
        self._rounds += 1
        if len(self._passed_over) < _LOOK_AGAIN_AFTER or self._rounds % _LOOK_AGAIN_AFTER == 0:
            self._offer_again()
        looked_at = 0
        while True:
            while (best := evictable.candidates.best(self._here)) is not None:
                if evictable.evict(*best):
                    if best[0].slot is None:
                        LEDGER.evicted()
                    return True
                if LEDGER.live_bytes < before:  # what it was computed from was freed instead
                    return False
                if evictable.candidates.pass_over(best[0]):
                    self._passed_over.append((weakref.ref(best[0]), weakref.ref(best[1])))  # its use may end any time
                    looked_at += 1
            if looked_at == len(self._passed_over) and not evictable.candidates.offer_spared():  # all of them, just now
                self._offer_again()
                return False
            looked_at = 0
            self._offer_again()

    def _evict_unsaved(self) -> bool:
        """Evict a value that only the program refers to; False if there is none."""
        graph = self._present()
        if graph is None:
            return False
        self._evictable.offer_unsaved(graph)
        return self._evict_one()

    def _drop_last_resort(self) -> bool:
        """Free the cheapest last resort; False if there is none."""
        offers = [x for x in self.last_resorts if x.is_droppable]
        if not offers:
            return False
        min(offers, key=lambda x: x.price()).drop()
        return True

    def _raise_limit(self, nbytes: float) -> bool:
        """Raise the smallest limit by ``nbytes``; False if its block does not allow that."""
        lowest = [b for b in self._budgets if b.limit == METER.limit]
        if not all(b.yields for b in lowest):
            return False
        self._set([replace(b, limit=b.limit + nbytes) if b in lowest else b for b in self._budgets])
        self._restrict_meter()
        self._limit_pools()
        return True

    def _offer_again(self) -> None:
        for recipe, graph in [(r(), g()) for r, g in self._passed_over]:
            if recipe is not None and graph is not None:
                self._evictable.candidates.refresh(recipe, graph)
        self._passed_over = []

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
            replay(graph, list(recipes.values()), self._evictable, HERE.cuts)

    def read_saved(self, saved: SavedBuffers) -> None:
        """Fill the evicted buffers of ``saved``, which a rule reads."""
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
        if (cuts := HERE.cuts) is not None:
            cuts.passed(saved.at)
        if evicted:
            self.restore(graph, evicted)
        if self._evictable.offloads.any:
            self._prefetch(here)

    @synchronized
    def _prefetch(self, here: int) -> None:
        self._evictable.offloads.prefetch(here, self._fits)

    @synchronized
    def bring(self, moved: Moved) -> bool:
        """Start fetching an offloaded value, if its bytes fit."""
        return self._evictable.offloads.bring(moved, self._fits)

    def _free_bytes(self) -> float:
        """Return the bytes that are free, or taken by values that may be evicted."""
        self._evictable.register_new()
        return METER.limit - self._taken() + self._evictable.candidates.nbytes()

    def _fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` may be fetched early: twice as much is left to what runs meanwhile."""
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
oom_retry.helpers(lambda nbytes: MANAGER.free_device_memory(nbytes), live_set)
