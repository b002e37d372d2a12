"""Who keeps the process within its budget: makes room, and brings back what a rule reads (see ``budget``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from threading import get_ident
from typing import Any, Protocol, TypeVar

from tapegrad.core import locks, tracking
from tapegrad.core.aval import GRAIN, ShapedArray, rounded
from tapegrad.core.buffer import Buffer
from tapegrad.core.locks import synchronized
from tapegrad.core.node import LEAF, Node
from tapegrad.core.protocols import Recorder, Recording, Retained
from tapegrad.core.state import thread
from tapegrad.core.storage import METER
from tapegrad.core.tracking import Tracker
from tapegrad.device import in_use, pressure
from tapegrad.engine.evaluate import fill
from tapegrad.errors import BudgetError
from tapegrad.memory.budget.companions import give, pushers, remember, wanted
from tapegrad.memory.budget.oom import budget_error, collected, live_set
from tapegrad.memory.budget.recipes import Graph, Kept, Recipe, Residuals, Session, asked_of
from tapegrad.memory.budget.replay import replay
from tapegrad.memory.budget.storages import Storages
from tapegrad.memory.ledger.ledger import LEDGER
from tapegrad.memory.offload.offload import Moved, keeps_memory, kept_bytes, reclaim
from tapegrad.memory.policies import RECOMPUTE, Answer, Policy

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
        self._storages = Storages()
        self._graph: Callable[[], Graph | None] = _none
        self._session: Callable[[], Session | None] = _none
        """That of the graph, if something records."""
        self._here = 0
        self._passed: list[tuple[weakref.ref[Recipe], weakref.ref[Graph]]] = []
        self._rounds = 0
        self._lock = locks.lock()
        self._watch: Callable[[Node, tuple[Buffer, ...]], None] | None = None
        self.last_resorts: weakref.WeakSet[LastResort] = weakref.WeakSet()

    called, deferred, label, require = LEDGER.called, LEDGER.deferred, LEDGER.label, LEDGER.require
    read, ran, ran_small, replayed = LEDGER.read, LEDGER.ran, LEDGER.ran_small, LEDGER.replayed
    walk, differentiating, rerun = LEDGER.walk, LEDGER.differentiating, LEDGER.rerun

    @property
    def follows_each(self) -> bool:  # type: ignore[override]
        """Whether the ledger does, or a plan."""
        return self._watch is not None or LEDGER.follows_each

    @property
    def limit(self) -> float:
        """The smallest of the budgets that are in force; infinite, if there are policies alone."""
        return METER.limit

    # Limits ----------------------------------------------------------------------------------------------------

    @synchronized
    def enter(self, limit: float, policy: Policy | None, measure: object, yields: bool = False) -> None:
        """One more budget, perhaps with a policy, until ``measure`` leaves; what is alive must fit, or be dropped."""
        try:
            if not self._budgets:  # a program drops the same values whatever ran before it
                self._rounds, self._passed = 0, []
                self._storages.begin()
            self._decide([*self._budgets, _Budget(limit, policy, get_ident(), measure, yields)])
            graph = self._present()
            if graph is not None:
                self._storages.registered_again(graph)
            self._with_room(0, ("memory_budget",))
        except BaseException:
            self.leave(measure)
            raise

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
        self._storages.policy = policies[-1] if policies else None
        tracking.install_budget(self if budgets else None)

    def _limit_pools(self) -> None:
        for device in in_use():
            device.limit(None if self.limit == inf else int(self.limit), lambda: LEDGER.live_bytes)

    def _open_room(self) -> None:
        """Let kernels take room without asking, if nothing but the ledger has to be looked at."""
        limit = min([b.limit for b in self._budgets], default=inf)
        offloads = limit == inf and self._storages.policy is not None
        METER.restrict(limit, self._asked or (tracking.current is self and (offloads or keeps_memory())))

    def in_child(self) -> None:
        """In a forked child nobody else makes room, and no other thread will ever leave a budget that it entered."""
        self._asked = False
        self._set([b for b in self._budgets if b.thread == get_ident()])
        self._storages.offloads.in_child()
        self._open_room()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """No budget is in force in the block; what is recorded there has a graph and candidates of its own.

        Who watches goes on: a plan that is in force is so in the block, too.
        """
        before, reserved = dict(self.__dict__), METER.exchange_reservations({})
        self._storages, self._graph, self._session = Storages(), _none, _none
        self._here, self._passed, self._asked, self.last_resorts = 0, [], False, weakref.WeakSet()
        self._decide([b for b in self._budgets if b.limit == inf and b.policy is None])
        try:
            yield
        finally:
            self._storages.clear()
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
            things = [t for r in read for t in (r.things if isinstance(r, Residuals) else (r,))]
            sources = [t for t in things if type(t) is Kept]
            self._storages.release(graph, nodes, sources, answer)

    @synchronized
    def graph(self) -> Session:
        """What a recording holds from its beginning to its end: recordings that overlap share it."""
        session = self._recipes().session()
        self._session = weakref.ref(session)
        return session

    def _recipes(self) -> Graph:
        """The graph of all that is kept; a new one if the last one has gone."""
        return self._present() or self._new_graph()

    @synchronized
    def _new_graph(self) -> Graph:
        found = self._present()  # another thread's, made just now
        if found is None:
            found = Graph(self.restore)
            self._graph = weakref.ref(found)
        return found

    def _present(self) -> Graph | None:
        return self._graph()

    def made(self, node: Node, inputs: tuple[Buffer, ...], out: Buffer) -> None:
        """A node was applied where something records."""
        session = self._session()
        if session is not None:
            session.graph.add(node, inputs, out)
            self._here = node.index

    def renamed(self, out: Buffer, source: Buffer) -> None:
        """The same bytes under another node: a view."""
        graph = self._present()
        if graph is not None and graph.present() is not None and source.node.index in graph.recipes:
            graph.add(out.node, (source,), out)

    def named(self, buffer: Buffer, name: str) -> None:
        """The user calls a value ``name``; if a policy then wants it kept, it is made now."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.root().node.index)
        if graph is not None and recipe is not None:
            answer = self._storages.named(graph, recipe, name)
            if answer is not RECOMPUTE:
                fill((buffer,))

    def filled(self, buffer: Buffer, inputs: tuple[Buffer, ...]) -> None:
        """A pending buffer has become a storage of its own."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.node.index)
        if graph is not None and recipe is not None:
            self._storages.filled(graph, recipe, inputs)

    def keep(self, buffers: tuple[Buffer, ...]) -> Retained:
        """A record wants ``buffers``; those with a recipe may be dropped later."""
        graph = self._graph() or self._new_graph()
        keep = self._storages.keep
        if len(buffers) == 1:  # most often
            only = keep(graph, buffers[0])
            if type(only) is not Kept:
                return buffers
            if len(thread.recorders) < 2 or not pushers():
                return only
        things = tuple([keep(graph, b) for b in buffers])
        givers = pushers() if len(thread.recorders) > 1 else []
        for thing, b in zip(things, buffers, strict=True) if givers else ():
            if type(thing) is Kept:
                remember(graph, thing, b, givers)
        return Residuals(things) if any(type(thing) is Kept for thing in things) else buffers

    def recorded(self, recording: Recording, node: Node, residuals: tuple[Buffer, ...]) -> Retained:
        """A record wants ``residuals`` for the rules of ``node``."""
        kept: Retained = residuals
        if residuals:
            if recording.graph is None:  # it began before the budget did
                recording.graph = self.graph()
            graph = self._graph()
            if graph is not None and len(residuals) == 1:  # most often
                only = self._storages.keep(graph, residuals[0])
                if type(only) is Kept:
                    kept = only if len(thread.recorders) < 2 else self.keep(residuals)
            else:
                kept = self.keep(residuals)
        if LEDGER.detailed or LEDGER.journal is not None:
            LEDGER.recorded(recording, node, residuals)
        return kept

    def told(self, recorders: tuple[Recorder, ...], listener: Recorder) -> tuple[Recorder, ...]:
        """With a listener, the graph learns how companions are made."""
        return recorders or (listener,)

    def accompanied(self, buffer: Buffer) -> None:
        """A value has got a companion; a tape may have kept it before."""
        graph = self._present()
        recipe = None if graph is None else graph.recipes.get(buffer.node.index)
        kept = None if recipe is None else recipe.keeping()
        if graph is not None and kept is not None and kept.buffer is buffer:
            remember(graph, kept, buffer, pushers())

    def reserve(self, avals: Sequence[ShapedArray], names: Sequence[str], make: Callable[..., T], *args: Any) -> T:
        """What ``make(*args)`` returns, which makes buffers of values like these.  Raises BudgetError."""
        nbytes = 0
        for a in avals:
            nbytes += -(-a.nbytes // GRAIN) * GRAIN
        before = METER.reserved
        try:
            if not METER.reserve(nbytes):
                if self.limit == inf:
                    self._offload()
                self._with_room(nbytes, names, METER.reserve_anyway, nbytes)
            return make(*args)
        finally:
            METER.release(before)

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
        while before - LEDGER.live_bytes < max(1, nbytes) and self._drop_one():
            pass
        return reclaim(nbytes) > 0 or LEDGER.live_bytes < before

    # Making room -----------------------------------------------------------------------------------------------

    @synchronized
    def _offload(self) -> None:
        self._storages.offload(self._here)

    @synchronized
    def _with_room(self, nbytes: int, names: Sequence[str], take: Callable[..., Any] = bool, *args: Any) -> None:
        """Make room, and ``take(*args)`` it before anybody else can."""
        outer, self._asked = self._asked, True
        try:
            METER.restrict(self.limit, always_asks=True)
            self._make_room(nbytes, names)
            take(*args)
        finally:
            self._asked = outer
            self._open_room()

    def _make_room(self, nbytes: int, names: Sequence[str]) -> None:
        offloads = self._storages.offloads
        while (over := self._taken() + nbytes - self.limit) > 0:
            if not (
                offloads.give_way(int(over))
                or self._drop_one()
                or reclaim(int(over))
                or self._drop_last_resort()
                or self._give_way(over)
                or collected()
            ):
                taken = self._taken()
                if taken + nbytes > self.limit:  # another thread may have freed some since
                    raise self._infeasible(nbytes, names, taken)

    def _taken(self) -> int:
        return METER.committed_bytes + kept_bytes()

    def _drop_one(self) -> bool:
        """Drop the best candidate that nobody holds; False if there is none, and nothing went while one was sought.

        What somebody holds is passed over; if there is much of it (a user may hold thousands of values, and each look
        costs time), for several rounds.
        """
        before = LEDGER.live_bytes
        return self._storages.guard.run(self._drop_best) or LEDGER.live_bytes < before

    def _drop_best(self) -> bool:
        storages, before = self._storages, LEDGER.live_bytes
        storages.register_new()
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
                if LEDGER.live_bytes < before:  # what it was made from has gone instead
                    return False
                if storages.candidates.pass_over(found[0]):
                    self._passed.append((weakref.ref(found[0]), weakref.ref(found[1])))  # it may go any time
                    looked_at += 1
            if looked_at == len(self._passed) and not storages.candidates.offer_spared():  # all of them, just now
                self._offer_again()
                return False
            looked_at = 0
            self._offer_again()

    def _drop_last_resort(self) -> bool:
        """Drop what costs least among what is dropped only before an error; False if there is nothing."""
        offers = [x for x in self.last_resorts if x.droppable]
        if not offers:
            return False
        min(offers, key=lambda x: x.price()).drop()
        return True

    def _give_way(self, nbytes: float) -> bool:
        """Raise the smallest limit by so many bytes; False if that of a block may not be."""
        lowest = [b for b in self._budgets if b.limit == self.limit]
        if not all(b.yields for b in lowest):
            return False
        self._set([replace(b, limit=b.limit + nbytes) if b in lowest else b for b in self._budgets])
        self._open_room()
        self._limit_pools()
        return True

    def _offer_again(self) -> None:
        for recipe, graph in [(r(), g()) for r, g in self._passed]:
            if recipe is not None and graph is not None:
                self._storages.candidates.refresh(recipe, graph)
        self._passed = []

    def _infeasible(self, nbytes: int, names: Sequence[str], taken: int) -> BudgetError:
        graph = self._present()
        for kept in graph.kept() if graph is not None else ():
            if kept.buffer is not None and kept.buffer.array is not None:
                LEDGER.label(kept.buffer, "activation", "a tape")
        return budget_error(nbytes, names, taken, int(self.limit))

    # Making values again ---------------------------------------------------------------------------------------

    def restore(self, kept: tuple[Kept, ...]) -> tuple[Any, ...]:
        """The buffers of kept values; what is missing is made again."""
        if len(kept) == 1 and not self._storages.offloads.any and not thread.recorders:  # most often
            (only,) = kept
            if only.buffer is not None:
                self._here = only.recipe.node.index
                return (only.buffer,)
        here, present = 0, []
        for k in kept:
            here = max(here, k.recipe.node.index)
            present.append(k.buffer)
        self._here = here
        if None not in present and not thread.recorders and not self._storages.offloads.any:
            return tuple(present)
        return tuple(map(self._restored(kept).__getitem__, map(id, kept)))

    def _restored(self, kept: tuple[Kept, ...]) -> dict[int, Buffer]:
        """By the ids of kept values; with companions, and what a tier will be asked for next."""
        found: dict[int, Any] = {id(k): k.buffer for k in kept}
        missing = [k.recipe for k in kept if found[id(k)] is None]
        givers, there = pushers(), {}
        if givers:
            sources = [c.source for k in kept for c in wanted(found[id(k)], k.companions, givers)]
            recipes = {s.node.index: s for s in sources if type(s) is Recipe}
            there = {i: b for i, r in recipes.items() if (b := r.value()) is not None}
            missing += [r for i, r in recipes.items() if i not in there and r not in missing]
        if missing:
            made = replay(kept[0].graph, missing, self._storages)
            for k in kept:
                if found[id(k)] is None:
                    found[id(k)] = made[k.recipe.node.index]
            there.update(made)
        for k in kept if givers else ():
            give(found[id(k)], k.companions, givers, there)
        if self._storages.offloads.any:
            self._prefetch(self._here)
        return found

    @synchronized
    def _prefetch(self, here: int) -> None:
        self._storages.guard.run(self._storages.offloads.prefetch, here, self._has_room)

    @synchronized
    def bring(self, moved: Moved) -> bool:
        """Start bringing a value back that was offloaded, if there is room."""
        return self._storages.offloads.bring(moved, self._has_room)

    def _has_room(self, nbytes: int) -> bool:
        """Whether a value may come back early: twice its bytes are left to what runs meanwhile."""
        return self._taken() + 3 * rounded(nbytes) <= self.limit


MANAGER = Manager()
locks.in_child(MANAGER.in_child)
METER.under_pressure = MANAGER.admit
pressure.helpers(lambda nbytes: MANAGER.relieve(nbytes), live_set)
