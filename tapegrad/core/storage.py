"""Storages: allocations that count themselves, and the meter that adds them up.

Every buffer that gets bytes of its own gets a :class:`Storage`, in every thread and on every device, whether or not
anything measures; :data:`METER` is the one place where live bytes, their limit and reservations are kept.

A storage is logged twice: when it is allocated, and by its weak reference's callback when its buffer has gone.  The
callback is ``deque.append``, a function in C: a finalizer written in Python would lose a Ctrl-C that comes while it
runs.  Sums are folded from the log when they are read, when the log is long, when a limit seems to be reached, or at
each event for an observer that needs the time.

An interrupt between two lines here may leave the sums off by one value.  They are right again when the next outermost
block begins and recounts the storages that are alive (:meth:`Meter.recount`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import ref

from tapegrad.core import locks

if TYPE_CHECKING:
    from tapegrad.core.buffer import Buffer

T = TypeVar("T")
CHUNK = 4096
"""Events after which the log is folded, so that it stays small."""
NEW, COUNTED, LIVE, FREED = range(4)
"""States of a storage: its allocation is logged and not in the sums yet; a recount has put it there, and its allocation
may still be in the log, or be lost by an interrupt; it is in the sums; it was freed, or was never logged."""


class Storage(ref["Buffer"]):
    """The bytes of one buffer: a weak reference to it, which counts until it is freed.

    The attributes after ``state`` are an observer's; those from ``number`` on, a journal's.
    """

    __slots__ = ("holder", "key", "nbytes", "next", "number", "read", "state", "traced")
    nbytes: int
    state: int
    key: Any
    """Category, primitive and source location (None: it was allocated while nothing observed)."""
    traced: bool
    """Whether its bytes are in the trace."""
    number: int
    """In the journal (-1: it is not there)."""
    holder: str
    """Name of the record, or of the variable, that keeps it."""
    read: int
    """The last event of the forward pass that read it (-1: none)."""
    next: int
    """The first event of the backward pass after that."""

    @property
    def category(self) -> str:
        """What the bytes serve as."""
        category: str = self.key[0]
        return category

    @property
    def primitive(self) -> str:
        """The name of the primitive that made them."""
        name: str = self.key[1]
        return name


class Observer(Protocol):
    """Receives allocations and frees, where sums do not suffice."""

    def describe(self, storage: Storage, buffer: Buffer) -> None:
        """``storage`` is about to be logged; ``buffer`` owns it."""

    def describe_old(self, storage: Storage) -> None:
        """``storage`` was allocated while nothing observed."""

    def folded(self, events: list[Any], peak: int, end: int) -> None:
        """These ``events`` were added to the sums, in order; the meter's lock is held.

        An event is a storage, which was allocated or, if it is ``FREED``, may be so now; or a pair of a storage and
        what was logged of it.  ``peak``: the most live bytes on the way, after the first ``end`` of them.
        """


class Meter:
    """Live, reserved and peak bytes of the process, and their limit.

    ``limit``: live and reserved bytes must not exceed it.  ``peak_bytes``: the most live bytes since it was last set;
    ``allocated_bytes``: all that were ever allocated; both as of the last fold.
    """

    def __init__(self) -> None:
        self.lock = locks.lock()
        self.peak_bytes = self.allocated_bytes = 0
        self.limit = inf
        self.under_pressure: Callable[[int, Buffer, Callable[[], None]], None] = lambda nbytes, buffer, count: count()
        """Called with bytes, the buffer that needs them and a function that counts them, where the limit is reached."""
        self.uncounted: dict[type, Callable[[], bool]] = {}
        """Types of arrays that may own no memory, and whether one that is made now does not."""
        self._always_asks = self._limited = self._at_once = self._collects = self._folding = False
        self._observer: Observer | None = None
        self._live = 0
        self._committed = 0
        """Live and reserved bytes at most: those that were freed since the last fold count."""
        self._registry: dict[int, Storage] = {}
        self._log: deque[Any] = deque()
        self._append = self._log.append
        self._reserved: dict[int, int] = {}

    # Allocations -----------------------------------------------------------------------------------------------

    def allocate(self, buffer: Buffer) -> None:
        """Count the bytes of ``buffer``, which it owns from now on.  Raises BudgetError if they exceed the limit."""
        if (uncounted := self.uncounted.get(type(buffer.array))) is not None and uncounted():
            return
        storage = Storage(buffer, self._append)
        storage.nbytes, storage.state, storage.key = buffer.node.aval.footprint, FREED, None
        buffer.storage = storage
        if self._observer is not None:
            self._observer.describe(storage, buffer)
        if self._limited:
            self._admit(storage, buffer)
        elif self._at_once:
            self.locked(self._commit, storage)
        else:
            self._log_allocation(storage)
            if self._limited or len(self._log) >= CHUNK:  # another thread may have set a limit meanwhile
                self.fold()

    def _admit(self, storage: Storage, buffer: Buffer) -> None:
        """Log ``storage`` if it is within the limit, or as soon as memory has been freed for it."""
        with self.lock:
            if self._fits(storage.nbytes - self.reserved):
                self._commit(storage)
                return
        self.under_pressure(storage.nbytes, buffer, lambda: self.locked(self._commit, storage))

    def _fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more are within the limit."""
        if self._always_asks:
            return False
        if self._committed + nbytes > self.limit:
            self._fold()
        return self._committed + nbytes <= self.limit

    def _log_allocation(self, storage: Storage) -> None:
        self._registry[id(storage)] = storage
        storage.state = NEW
        self._append(storage)

    def _commit(self, storage: Storage) -> None:
        self._log_allocation(storage)
        self._committed += storage.nbytes
        if self._reserved:
            self._reserve(-min(storage.nbytes, self.reserved))
        if self._at_once or len(self._log) >= CHUNK:  # by this thread, whose state the observer looks at
            self._fold()

    def free(self, storage: Storage) -> None:
        """The bytes of ``storage`` are free, though its buffer stays."""
        self._append(storage)

    def locked(self, f: Callable[..., T], *args: Any) -> T:
        """Return what ``f(*args)`` returns; no other thread counts meanwhile."""
        with self.lock:
            return f(*args)

    def log(self, storage: Storage, event: Any) -> None:
        """Let the observer know of ``event`` in its turn."""
        with self.lock:
            self._append((storage, event))
            if self._at_once or len(self._log) >= CHUNK:
                self._fold()

    # Sums ------------------------------------------------------------------------------------------------------

    def fold(self) -> None:
        """Add what has been logged to the sums."""
        if self._log:
            with self.lock:
                self._fold()

    def _fold(self) -> None:
        if self._folding:  # a signal handler or a finalizer asks in the middle
            return
        try:
            self._folding = True
            events, peak, end = self._added()
            self._committed = self._live + self.reserved_bytes
            self.peak_bytes = max(self.peak_bytes, peak)
            if events and self._observer is not None:
                self._observer.folded(events, peak, end)
        finally:
            self._folding = False

    def _added(self) -> tuple[list[Any], int, int]:
        """Add what is logged to the sums; what the observer is to know of it (see :meth:`Observer.folded`)."""
        log, events, end = self._log, list[Any](), 0
        live = peak = self._live
        while log:
            event = log.popleft()
            if type(event) is not Storage:
                events.append(event)
                continue
            state = getattr(event, "state", FREED)  # it has none if an interrupt came while it was made
            if state == NEW:
                event.state = LIVE
                if event.key is None and self._observer is not None:
                    self._observer.describe_old(event)  # another thread began to observe meanwhile
                self.allocated_bytes += event.nbytes
                live += event.nbytes
            elif state == COUNTED and event() is not None:  # then this is its allocation
                event.state = LIVE
                continue
            elif state != FREED:
                event.state = FREED
                self._registry.pop(id(event), None)
                live -= event.nbytes
            else:  # it was forgotten, or never logged
                continue
            if self._collects:
                events.append(event)
            if live > peak:
                peak, end = live, len(events)
        self._live = live
        return events, peak, end

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        self.fold()
        return self._live

    @property
    def committed_bytes(self) -> int:
        """Live and reserved bytes, at one moment."""
        with self.lock:
            self._fold()
            return self._committed

    @property
    def storages(self) -> list[Storage]:
        """The storages that are alive, as of this fold: other threads may log more."""
        with self.lock:
            self._fold()
            return [s for s in self._registry.copy().values() if s.state in (COUNTED, LIVE)]

    def recount(self) -> None:
        """Set live bytes to the sum over the storages that are alive: an interrupt may have left them off.

        It may also have come between the count of a buffer's bytes and their use: then the buffer has no array.
        """
        with self.lock:
            self._folding = False
            self._fold()
            for storage in self._registry.copy().values():
                buffer = storage()
                if buffer is None or buffer.array is None or buffer.storage is not storage:
                    storage.state = FREED
                    self._registry.pop(id(storage), None)
                elif storage.state == NEW:
                    storage.state = COUNTED
            self._live = sum([s.nbytes for s in self._registry.copy().values() if s.state in (COUNTED, LIVE)])
            self._committed = self._live + self.reserved_bytes

    def counts(self, storage: Storage) -> bool:
        """Whether ``storage`` is part of the live bytes."""
        return id(storage) in self._registry

    def forget(self, storages: Iterable[Storage]) -> None:
        """Stop counting ``storages``, whose buffers own no memory after all."""
        with self.lock:
            self._fold()
            storages = list(storages)
            for storage in storages:
                if storage.state == COUNTED:  # else its end would be taken for the allocation that may be in the log
                    storage.state = LIVE
                self._append(storage)
            self._fold()
            for storage in storages:
                storage.key = None

    # Observer and limit ----------------------------------------------------------------------------------------

    def observe(self, observer: Observer | None, storages: bool = False, at_once: bool = False) -> None:
        """Notify ``observer`` from now on; ``storages``: of allocations and frees, too; ``at_once``: as they happen."""
        with self.lock:
            self._fold()
            self._observer, self._collects, self._at_once = observer, storages, at_once

    def restrict(self, limit: float, always_asks: bool = False) -> None:
        """Keep within ``limit`` from now on; ``always_asks``: every allocation asks ``under_pressure``."""
        with self.lock:
            self._fold()
            self.limit, self._always_asks = limit, always_asks
            self._limited = always_asks or limit != inf

    # Reservations ----------------------------------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        """Bytes reserved for this thread and not allocated yet."""
        return self._reserved.get(get_ident(), 0) if self._reserved else 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for all threads."""
        return sum(self._reserved.values()) if self._reserved else 0

    def reserve(self, nbytes: int) -> bool:
        """Reserve ``nbytes`` for this thread if they are within the limit; whether they are."""
        with self.lock:
            if not self._fits(nbytes):
                return False
            self._reserve(nbytes)
            return True

    def reserve_anyway(self, nbytes: int) -> None:
        """Reserve ``nbytes`` for this thread, for which the caller has freed memory."""
        with self.lock:
            self._reserve(nbytes)

    def release(self, reserved: int) -> None:
        """Leave at most ``reserved`` bytes reserved for this thread."""
        if self.reserved > reserved:
            with self.lock:
                self._reserve(reserved - self.reserved)

    def _reserve(self, nbytes: int) -> None:
        me = get_ident()
        self._committed += nbytes
        self._reserved[me] = self._reserved.get(me, 0) + nbytes
        if not self._reserved[me]:
            del self._reserved[me]

    def exchange_reservations(self, reserved: dict[int, int]) -> dict[int, int]:
        """Replace the reservations, by thread, and return those before."""
        with self.lock:
            self._fold()
            before, self._reserved = self._reserved, reserved
            self._committed = self._live + self.reserved_bytes
        return before

    def in_child(self) -> None:
        """In a forked child only the forking thread has reservations."""
        me = get_ident()
        self._reserved = {thread: n for thread, n in self._reserved.items() if thread == me}


METER = Meter()
locks.in_child(METER.in_child)
