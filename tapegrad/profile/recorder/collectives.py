"""What this rank does with others: collectives as they are entered, begin to move bytes, and are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from tapegrad.core.storage import METER
from tapegrad.distributed.engine import Piece
from tapegrad.distributed.watching import WATCHING, Entered, Watcher
from tapegrad.tracing.journal import Journal

MOST = 100_000
"""Collectives that are noted; of later ones the bytes alone are."""
_TIMES = "communication", "begun_ns", "done_ns", "needed_ns", "waited_ns"


@dataclass(slots=True)
class Event:
    """One collective of this rank, whose row is ``number``; times in ns since the recording began, -1: not yet."""

    number: int
    begun: int = -1
    done: int = -1
    needed: int = -1
    waited: int = 0
    waits: bool = False
    arrived: bool = False


class Collectives(Watcher):
    """The collectives of this rank, in the order in which it entered them, between :meth:`start` and :meth:`stop`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._noted = 0
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
        if self._noted >= MOST:
            self.left_out += 1
            return
        self._noted += 1
        entered.noted = Event(METER.locked(self._add, entered, under_way))

    def _add(self, entered: Entered, under_way: bool) -> int:
        log = self._journal.log
        file, line = (-1, 0) if entered.line is None else (log.text(entered.line[0]), entered.line[1])
        return log.add(
            "communication", 0, log.text(entered.group), len(entered.ranks), entered.number, log.text(entered.kind),
            log.text(entered.detail), entered.nbytes, file, line, self._now(), -1, -1, -1, 0, int(under_way), -1,
        )  # fmt: skip

    def _now(self) -> int:
        return max(0, perf_counter_ns() - self._journal.began_ns)

    def _write(self, event: Event) -> None:
        times = event.begun, event.done, event.needed, event.waited
        METER.locked(self._journal.log.update, _TIMES, event.number, *times)

    def begun(self, entered: Entered) -> None:
        if (event := entered.noted) is not None:
            event.begun = self._now()
            self._write(event)

    def waits(self, entered: Entered) -> None:
        if (event := entered.noted) is not None:
            event.needed, event.waits = self._now(), True
            self._write(event)

    def waited(self, entered: Entered) -> None:
        event: Event | None = entered.noted
        if event is None or not event.waits:
            return
        now = self._now()
        event.waited += now - event.needed
        event.waits = False
        if not event.arrived:
            event.done = now
        self._write(event)

    def arrived(self, entered: Entered) -> None:
        event: Event | None = entered.noted
        if event is not None and not event.arrived:
            event.done, event.arrived = self._now(), True
            self._write(event)

    def sent(self, rank: int, pieces: Sequence[Piece]) -> None:
        self.sent_bytes += sum(array.nbytes for r, array in pieces if r != rank)
