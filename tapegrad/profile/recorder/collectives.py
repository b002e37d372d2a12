"""What this rank does with others: collectives as they are entered, begin to move bytes, and are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from tapegrad.core.storage import METER
from tapegrad.distributed.engine import Piece
from tapegrad.distributed.watching import WATCHING, Entered, Watcher
from tapegrad.memory.ledger.spool import TIMES, Spool

MOST = 100_000
"""Collectives that are noted; of later ones the bytes alone are."""


@dataclass(slots=True)
class Event:
    """One collective of this rank; times in ns, -1: not yet."""

    what: Entered
    under_way: bool
    entered: int
    begun: int = -1
    done: int = -1
    needed: int = -1
    waited: int = 0
    waits: bool = False
    arrived: bool = False
    index: int = -1
    """Its number among the events."""

    def write(self, spool: Spool) -> None:
        """Put its times on disk."""
        spool.put(TIMES, self.index, self.begun, self.done, self.needed, self.waited)


class Collectives(Watcher):
    """The collectives of this rank, in the order in which it entered them, between :meth:`start` and :meth:`stop`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.spool: Spool | None = None
        """What is written on disk meanwhile."""
        self.left_out = 0
        self.sent_bytes = 0

    def start(self) -> None:
        """Begin."""
        WATCHING.start(self)

    def stop(self) -> None:
        """End."""
        if WATCHING.now is self:
            WATCHING.stop()

    def entered(self, entered: Entered, under_way: bool) -> None:
        if len(self.events) >= MOST:
            self.left_out += 1
            return
        event = entered.noted = Event(entered, under_way, perf_counter_ns(), index=len(self.events))
        self.events.append(event)
        if self.spool is not None:
            METER.locked(_enter, self.spool, event)

    def _write(self, event: Event) -> None:
        if self.spool is not None:
            METER.locked(event.write, self.spool)

    def copy(self, spool: Spool) -> None:
        """Put all of them on disk, and write there from now on."""
        for event in self.events:
            _enter(spool, event)
            event.write(spool)
        self.spool = spool

    def begun(self, entered: Entered) -> None:
        if (event := entered.noted) is not None:
            event.begun = perf_counter_ns()
            self._write(event)

    def waits(self, entered: Entered) -> None:
        if (event := entered.noted) is not None:
            event.needed, event.waits = perf_counter_ns(), True
            self._write(event)

    def waited(self, entered: Entered) -> None:
        event: Event | None = entered.noted
        if event is None or not event.waits:
            return
        now = perf_counter_ns()
        event.waited += now - event.needed
        event.waits = False
        if not event.arrived:
            event.done = now
        self._write(event)

    def arrived(self, entered: Entered) -> None:
        event: Event | None = entered.noted
        if event is not None and not event.arrived:
            event.done, event.arrived = perf_counter_ns(), True
            self._write(event)

    def sent(self, rank: int, pieces: Sequence[Piece]) -> None:
        self.sent_bytes += sum(array.nbytes for r, array in pieces if r != rank)


def _enter(spool: Spool, event: Event) -> None:
    what = event.what
    told = [what.group, what.kind, what.detail, what.number, len(what.ranks), what.nbytes, what.line]
    spool.collective(told, event.under_way, event.entered)
