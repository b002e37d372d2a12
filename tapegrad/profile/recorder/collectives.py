"""What this rank does with others: collectives as they are entered, begin to move bytes, and are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from tapegrad.distributed.engine import Piece
from tapegrad.distributed.watching import WATCHING, Entered, Watcher

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


class Collectives(Watcher):
    """The collectives of this rank, in the order in which it entered them, between :meth:`start` and :meth:`stop`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
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
        entered.noted = Event(entered, under_way, perf_counter_ns())
        self.events.append(entered.noted)

    def begun(self, entered: Entered) -> None:
        if (event := entered.noted) is not None:
            event.begun = perf_counter_ns()

    def waits(self, entered: Entered) -> None:
        if (event := entered.noted) is not None:
            event.needed, event.waits = perf_counter_ns(), True

    def waited(self, entered: Entered) -> None:
        event: Event | None = entered.noted
        if event is None or not event.waits:
            return
        now = perf_counter_ns()
        event.waited += now - event.needed
        event.waits = False
        if not event.arrived:
            event.done = now

    def arrived(self, entered: Entered) -> None:
        event: Event | None = entered.noted
        if event is not None and not event.arrived:
            event.done, event.arrived = perf_counter_ns(), True

    def sent(self, rank: int, pieces: Sequence[Piece]) -> None:
        self.sent_bytes += sum(array.nbytes for r, array in pieces if r != rank)
