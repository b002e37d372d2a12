"""The ledger: what live bytes are for, by category, primitive and source line; and the work done.

Bytes are counted by the meter (``core/storage.py``), always.  The ledger observes it while a :func:`measure` block, a
budget or a profile is open: it gives every storage its category and the source line that made it, which error messages
about memory name.  For detailed measures it keeps a trace as well (``trace.py``), from which peaks by part are folded.

Categories are facts, because the tape knows: *parameter* and *optimizer* (values of variables), *gradient* (results of
``tape.gradient``), *activation* (kept by a tape for a rule), *rematerialized* (made by the rerun of a checkpointed
function), *communication* (what collectives take for themselves), *input* (arrays and numbers given by the user),
*temporary* (made while something records or differentiates, and neither kept nor asked for), *user* (made by the user's
own operations, with nothing recording).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from tapegrad.core import locks, tracking
from tapegrad.core.buffer import Buffer
from tapegrad.core.node import ARENA, LEAF, Leaf, Node
from tapegrad.core.state import holding, thread
from tapegrad.core.storage import CHUNK, FREED, METER, Storage
from tapegrad.core.tracking import Tracker
from tapegrad.device import abstract_array
from tapegrad.device.types import Array
from tapegrad.tracing.costs import FLOPS_PER_BYTE, cost_of, moved_by, units
from tapegrad.tracing.frames import Place, by_line, forget_places, user_place
from tapegrad.tracing.journal import Journal, digest_of
from tapegrad.tracing.metrics import Measure, Replayed, Work, add_work, by
from tapegrad.tracing.phase import BY_GRADIENT, HERE, STEPS, during, set_differentiated
from tapegrad.tracing.trace import Trace, parts_of
from tapegrad.variable import everyone

T = TypeVar("T")
_ASIDE = locks.lock()
_KEPT = ("activation", "")
_BEFORE, _JOURNAL_KNOWS, _SMALL = "(before the measurement)", "(in the journal)", "(small values)"
_LARGE, _SHARE = 2**20, 256
"""Where only the message of a BudgetError will ask, lines are noted of values of so many bytes, beside which a look at
the stack costs nothing, or of such a share of the limit."""


def _drain(queue: deque[T]) -> list[T]:
    """Remove what is in ``queue``, and return it; a signal handler may do the same meanwhile."""
    items = []
    while queue:
        with suppress(IndexError):
            items.append(queue.popleft())
    return items


class Ledger(Tracker):
    """The tracker that counts: it observes the meter, and adds to the open measures."""

    counts = True

    def __init__(self) -> None:
        self._open: list[Measure] = []
        self.journal: Journal | None = None
        """Written while a program is profiled."""
        self.detailed = False
        """Whether some open measure is detailed: the trace is kept."""
        self._timeline = self._settling = False
        self._trace = Trace()
        self._work: deque[Work] = deque()
        """Work that is in no figure yet."""
        self._small: deque[tuple[Any, int, bool]] = deque()
        """The same of small elementwise nodes: what is known of each, bytes read, and whether it is restored."""
        self._allocated: dict[int, int] = {}
        """By the id of an open measure: what the meter had allocated when its figure was up to date."""

    # Measures --------------------------------------------------------------------------------------------------

    def open(self, measure: Measure) -> None:
        """Start adding to ``measure``."""
        with METER.lock:
            measure.settle = self.settle  # first: after an interrupt it tells `close` that there is something to undo
            if not self._open:
                self._settling = False
                tracking.install_ledger(self)
                METER.recount()
                METER.exchange_reservations({})  # an interrupt may have left some
                for storage in METER.storages:
                    storage.key = None  # of an older measurement, by a thread that was describing it at its end
            self._settle()
            self._allocated[id(measure)] = METER.allocated_bytes
            self._open = [*self._open, measure]
            self._choose()
            self._settle()
            live = measure.__dict__["peak_bytes"] = measure.__dict__["live_bytes"]
            if measure.detailed:
                self._trace.open(measure, live)

    def close(self, measure: Measure) -> None:
        """Stop adding to ``measure``; after the last one the ledger rests."""
        if measure.settle is None:
            return
        with METER.lock:
            self._settle()
            if measure.detailed:
                measure.live_by_category = by("category", self._trace.parts)
            self._open = [m for m in self._open if m is not measure]
            self._allocated.pop(id(measure), None)
            self._trace.close(measure)
            self._choose()
            measure.settle = None

    def _choose(self) -> None:
        """Observe as much as the open measures and the journal need; without any, forget what is known."""
        if not self._open:
            self.journal = None
        detailed = any(m.detailed for m in self._open)
        self._timeline = any(m.timeline for m in self._open)
        at_once = self._timeline or self.journal is not None
        METER.observe(self if self._open else None, detailed or at_once, at_once)
        if detailed and not self.detailed:
            self._labelled()
            self._trace.restart(METER.storages)  # of the last fold before the trace gets events
        self.detailed = detailed
        self.follows_each = self.journal is not None
        if not self._open:
            tracking.install_ledger(None)
            for storage in METER.storages:
                storage.key = None  # categories are facts of one measurement
            self._trace = Trace()
            forget_places()

    def settle(self) -> None:
        """Let the figures of all open measures be those of now."""
        with METER.lock:
            self._settle()

    def _settle(self) -> None:
        if self._settling:  # a signal handler or a finalizer asks in the middle: figures are those of the last time
            return
        try:
            self._settling = True
            live = METER.live_bytes
            peak, METER.peak_bytes = METER.peak_bytes, live
            self._add_work()
            for m in self._open:
                figures = m.__dict__
                figures["live_bytes"] = live
                figures["peak_bytes"] = max(figures["peak_bytes"], peak)
                figures["allocated_bytes"] += METER.allocated_bytes - self._allocated[id(m)]
                self._allocated[id(m)] = METER.allocated_bytes
        finally:
            self._settling = False

    def _add_work(self) -> None:
        work = _drain(self._work)
        for (site, read, restored), n in Counter(_drain(self._small)).items():
            nbytes = site.aval.nbytes
            work.append((n, (site.prim.name,) * n, n * (read + nbytes), n * FLOPS_PER_BYTE * (1 + nbytes), restored))
        for m in self._open if work else ():
            if m.detailed:
                add_work(work, m)

    def write(self, journal: Journal | None) -> None:
        """Keep ``journal`` from now on, from what is alive; None: no longer.  A measure must be open."""
        with METER.lock:
            storages = self._labelled()
            if journal is not None:
                journal.census(storages)
            self.journal = journal
            self._choose()
            self._label_variables()

    def note(self, kind: int, text: str, peak: int = 0) -> int:
        """Put a mark into the journal, if there is one, and return its seq (-1: there is none)."""
        with METER.lock:
            METER.fold()
            return -1 if self.journal is None else self.journal.mark(kind, text, peak)

    @contextmanager
    def held(self) -> Iterator[list[Storage]]:
        """The storages that are alive; in the block no other thread adds to figures, or to a journal."""
        with METER.lock:
            yield self._labelled() if self._open else []

    def by(self, part: str) -> dict[str, int]:
        """Live bytes by ``"category"``, ``"primitive"`` or ``"line"``, the largest first."""
        if not self._open:
            return {}
        with METER.lock:
            parts = parts_of(self._labelled())
        return by_line(by("location", parts)) if part == "line" else by(part, parts)

    def _labelled(self) -> list[Storage]:
        """The storages that are alive, all of them with a key."""
        storages = METER.storages
        old = [s for s in storages if s.key is None]
        for storage in old:
            self.describe_old(storage)
        if old:
            self._label_variables()
        return storages

    def describe_old(self, storage: Storage) -> None:
        """Note what is known of a storage that was allocated while nothing measured."""
        buffer = storage()
        prim = None if buffer is None else buffer.node.prim
        category = "input" if prim is LEAF else "activation" if prim is ARENA else "user"
        storage.key = category, "" if prim is None else prim.name, _BEFORE
        storage.traced, storage.number = False, -1

    def _label_variables(self) -> None:
        for variable in list(everyone.values()):
            self.label(variable._cell._content, variable.category, variable.name)
        METER.fold()

    @property
    def live_bytes(self) -> int:
        """Bytes alive now (0: nobody counts)."""
        return METER.live_bytes if self._open else 0

    @contextmanager
    def apart(self, measure: Measure) -> Iterator[None]:
        """Only ``measure`` is told of what happens in the block."""
        with METER.lock:
            self._settle()
            before, self._open = self._open, [measure]
            trace, self._trace = self._trace, Trace()
            self._allocated = {id(measure): METER.allocated_bytes}
            journal, self.journal = self.journal, None
            self.detailed = False
            self._choose()
        try:
            yield
        finally:
            with METER.lock:
                self._settle()
                others = [m for m in self._open if m is not measure]  # which other threads have opened
                self._open, self._trace = [m for m in before if m.settle is not None] + others, trace
                self._allocated = {id(m): METER.allocated_bytes for m in self._open}
                for m in others:
                    trace.resume(m, m.__dict__["peak_bytes"])
                self.detailed, self.journal = False, journal
                self._choose()
                if journal is not None:
                    journal.catch_up(self._labelled())

    def aside(self, f: Callable[..., T], *args: Any) -> T:
        """What ``f(*args)`` returns; who counts now is not told of what it does.

        Abstract arrays count meanwhile, so that a budget holds for what a captured function will do, too.
        """
        if not self._open:
            return f(*args)
        with _ASIDE, self.apart(Measure(detailed=False)):  # who comes first must leave last
            try:
                return holding(abstract_array.here, partial(f, *args), counted=True)
            finally:
                METER.forget(
                    [s for s in METER.storages if (b := s()) is not None and abstract_array.is_abstract(b.array)]
                )

    def forget(self, since: int) -> list[Buffer]:
        """The live buffers of nodes from index ``since`` on have no bytes after all."""
        late = [(s, b) for s in METER.storages if (b := s()) is not None and b.node.index >= since]
        METER.forget([storage for storage, _ in late])
        return [buffer for _, buffer in late]

    # What the meter tells --------------------------------------------------------------------------------------

    def describe(self, storage: Storage, buffer: Buffer) -> None:
        """Note what the bytes of ``buffer`` are for, and where they are made."""
        node = buffer.node
        if type(node.prim) is Leaf:
            category = "activation" if node.prim is ARENA else "temporary" if HERE.optimizing else "input"
        elif HERE.reruns:
            category = "rematerialized"
        elif hasattr(node, "required"):
            category = "activation"
        elif thread.recorders or thread.deferring is not None or HERE.optimizing:
            category = "temporary"
        else:
            category = "user"
        location: Place | None = _SMALL
        if self.journal is not None and not self.detailed:
            location = _JOURNAL_KNOWS
        elif self.detailed or storage.nbytes >= min(_LARGE, METER.limit / _SHARE):
            location = None if HERE.restoring else getattr(node, "place", None)
            location = location or HERE.location or user_place()
        storage.key = category, node.prim.name, location
        storage.traced, storage.number = False, -1

    def folded(self, events: list[Any], peak: int, end: int) -> None:
        """Follow what is alive, and what it serves as."""
        if self._timeline or self.journal is not None:
            for event in events:
                self._follow(event)
        elif self.detailed:
            self._trace.fold(events, peak, end, self._open)
        else:
            self._trace.relabel(events)

    def _follow(self, event: Any) -> None:
        """Follow one event, for a journal or a timeline."""
        storage, journal = event if type(event) is Storage else event[0], self.journal
        before = storage.category
        if self.detailed:
            self._trace.follow(event, self._open)
        else:
            self._trace.relabel([event])
        if storage is not event and journal is not None:
            category, holder = event[1]
            if storage.category != before:
                journal.changed(storage)
            if storage.category == category:
                journal.held(storage, holder)
        elif storage.state == FREED and journal is not None:
            if storage.number >= 0:
                journal.left(storage)
        elif journal is not None and (buffer := storage()) is not None:
            journal.allocated(storage, buffer.node)
        if storage is event and self._timeline:
            self._note_sample()

    def _note_sample(self) -> None:
        by_category, now = by("category", self._trace.parts), time.perf_counter()
        live = sum(by_category.values())
        kept = by_category.get("activation", 0) + by_category.get("rematerialized", 0)
        for m in self._open:
            if m.timeline:
                m.samples.append((now - m.started, live, kept))

    # What the engine tells -------------------------------------------------------------------------------------

    def applied(self, node: Node, inputs: tuple[Buffer, ...]) -> None:
        """A node was applied."""
        if HERE.differentiated and thread.recorders:
            STEPS.mark(BY_GRADIENT)
        journal = self.journal
        if journal is not None and not (HERE.optimizing and journal.before_op is None):
            with METER.lock:
                METER.fold()
                journal.applied(node, inputs)
        if self.detailed:
            if not HERE.restoring and not hasattr(node, "place"):
                node.place = HERE.location or user_place()
            if node.site is None or not node.site.small:
                cost = cost_of(node, [b.node.aval for b in node.prim.apart(inputs)[0]])
                self._did((0, (), 0, units(cost), HERE.restoring))

    def _did(self, work: Work) -> None:
        self._work.append(work)
        if len(self._work) >= CHUNK:
            with METER.lock:
                self._add_work()

    def save(self, buffers: tuple[Buffer, ...], by: str = "") -> tuple[Buffer, ...]:
        """A record of the name ``by`` keeps buffers, filled or pending."""
        if by and self.journal is not None:
            for b in buffers:
                self.require(b, by)
        elif by and self.detailed:
            for b in buffers:
                storage = getattr(b.base or b, "storage", None)
                if storage is None:
                    self.require(b)
                elif storage.key is not None and storage.category != "activation":
                    METER.log(storage, _KEPT)
        return buffers

    def place_of(self, buffer: Buffer) -> Place | None:
        """Where a buffer, filled or pending, was made (None: not known)."""
        storage = getattr(buffer, "storage", None)
        if storage is None or storage.key is None:
            return getattr(buffer.node, "place", None)
        location: Place = storage.key[2]
        return location

    def require(self, buffer: Buffer, by: str = "") -> None:
        """A tape keeps a buffer, filled or pending, ``by`` the name of its record."""
        if not self.detailed and self.journal is None:
            return
        pending = [buffer]
        while pending:
            b = pending.pop()
            if b.array is not None:
                self.label(b, "activation", f"vjp of {by}")
            elif not hasattr(b.node, "required"):
                b.node.required = True
                pending += b.inputs  # what a pending buffer is to be made from is kept for the rule's sake, too

    def label(self, buffer: Buffer, category: str, name: str = "") -> None:
        """A buffer's bytes serve as ``category``; a more telling category stays."""
        buffer = buffer.root()
        storage = getattr(buffer, "storage", None)
        if storage is not None and METER.counts(storage):
            METER.log(storage, (category, name))
        if category == "gradient" and self.journal is not None:
            if self.journal.gradients:
                METER.locked(self.journal.gradient, name, digest_of(buffer))

    def read(self, buffers: Sequence[Buffer]) -> None:
        """A kernel reads buffers."""
        if self.journal is not None:
            METER.locked(self.journal.read, buffers)

    def called(self, node: Node) -> None:
        """A node comes of a call, or is to be applied elsewhere."""
        if self.detailed:
            node.place = user_place()
        if self.journal is not None:
            METER.locked(self.journal.called, node)

    # Work, and what threads do ----------------------------------------------------------------------------------

    def ran(
        self,
        names: tuple[str, ...],
        moves: Sequence[tuple[Sequence[Array], Sequence[Array]]],
        passes: Sequence[tuple[int, int]] = (),
        scratch: int = 0,
    ) -> None:
        """Kernels ran."""
        if not self.detailed:
            return
        for nbytes in (*[sum(moved_by(*move)) for move in moves], *map(sum, passes)):
            self._did((1, names, nbytes, 0, False))
            names = ()
        if scratch:
            with METER.lock:
                for m in self._open:
                    m.scratch_bytes = max(m.scratch_bytes, scratch)

    def ran_small(self, node: Node, arrays: Sequence[Array]) -> None:
        """A small elementwise node was evaluated."""
        if self.detailed:
            site: Any = node.site
            distinct = len(arrays) == 1 or (len(arrays) == 2 and arrays[0] is not arrays[1])
            whole = distinct and arrays[0].base is None and arrays[-1].base is None
            self._small.append((site, site.read_bytes if whole else moved_by(arrays, ())[0], HERE.restoring))
            if len(self._small) >= CHUNK:
                METER.locked(self._add_work)

    def replayed(self, report: Replayed) -> None:
        """A captured program was replayed."""
        with METER.lock:
            for m in self._open if self.detailed else ():
                figures = m.__dict__
                figures["kernel_runs"] += report.kernels
                figures["bytes_moved"] += report.nbytes
                figures["nodes_run"].update(report.nodes)
                figures["restored"] += report.restored
                if sum(report.arena.values()) >= sum(figures["arena_by_category"].values()):
                    figures["arena_by_category"] = report.arena
            if self.journal is not None:
                self.journal.replayed(report, report.memory())

    def restored(self) -> None:
        """Count a recomputed value."""
        self._count("restored")

    def evicted(self) -> None:
        """Count an eviction."""
        self._count("evictions")

    def moved(self, figure: str) -> None:
        """One value went to a tier (``figure``: "offloads"), came back, or started to ("fetches", "prefetches")."""
        self._count(figure)

    def _count(self, figure: str) -> None:
        with METER.lock:
            for m in self._open:
                setattr(m, figure, getattr(m, figure) + 1)

    def rerun(self, f: Callable[..., T], *args: Any, shift: int = 0) -> T:
        """A checkpointed function, ``f(*args)``, runs again in this thread."""
        self._count("reruns")
        return during(f, *args, reruns=True, shift=shift, location=None)

    def walk(self, f: Callable[..., T], *args: Any) -> T:
        """A gradient walk, ``f(*args)``."""
        began_ns = time.perf_counter_ns()
        try:
            return during(f, *args, walking=True, source=HERE.source, node=HERE.node, location=user_place())
        finally:
            if self.journal is not None and not HERE.walking:
                thread.executor.happened(partial(METER.locked, self.journal.walked, began_ns))
            if not (HERE.walking or HERE.reruns or thread.recorders):
                set_differentiated(thread.executor.in_earnest(lambda: True, HERE.differentiated))

    def differentiating(self, index: int) -> None:
        """The walk has come to a node."""
        if self.journal is not None:
            self.journal.differentiating(index)

    def in_child(self) -> None:
        """Count anew in a forked child: another thread may have been in the middle.  The journal is the parent's."""
        self._settling = False
        if self.journal is not None:
            self.journal = None
            self._choose()
        METER.recount()
        if self.detailed:
            self._trace.restart(self._labelled())


LEDGER = Ledger()
locks.in_child(LEDGER.in_child)
