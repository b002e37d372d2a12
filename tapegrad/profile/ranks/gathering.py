"""How the profiles of all ranks come to rank 0 when their programs have ended, however they have.

Messages go between rank 0 and each other rank.  At the beginning rank 0 reads the others' clocks.  At its end each of
them sends what it tells of its run; rank 0 reads its clock again, asks the one with the highest peak for the whole run,
and dismisses all once the report is written.  While all goes well nobody is in a hurry: a program may take long.  After
a failure rank 0 waits some seconds for the others, which learn of it where they wait for the rank that has failed.
"""

from __future__ import annotations

import pickle
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tapegrad.distributed import faults
from tapegrad.distributed.group import launcher, tell_of_end, timeout_of
from tapegrad.distributed.mpi import MpiEngine, available, wait_for_all_ranks_to_call_init
from tapegrad.distributed.waiting import Home
from tapegrad.errors import DistributedTimeoutError
from tapegrad.profile.ranks.clocks import PINGS, Clock, Reading, reading
from tapegrad.profile.ranks.merging import Part, first_failed, highest, how, merged
from tapegrad.tracing.run import Run

PING, PONG, PART, WANTED, WHOLE, DISMISSED = range(6)
"""Kinds of messages."""
FOR_OTHERS = 10.0
"""Seconds that ranks wait for each other after a failure."""
_FOR_ANSWERS = 5.0
_FOR_WHOLE = 60.0
_SPINS = 1000
_PAUSE = 2e-4


def several() -> Ranks | None:
    """The ranks of the job, once all have come here; None: this program runs alone."""
    if launcher() is None or not available():
        return None
    engine = wait_for_all_ranks_to_call_init(None, timeout_of(None))
    return Ranks(engine) if engine.size > 1 else None


class Ranks:
    """All ranks of a job that is profiled, as this one sees them.  Communicators are those of the profile alone."""

    def __init__(self, engine: MpiEngine) -> None:
        self._engine = engine
        self.rank, self.size = engine.rank, engine.size
        self.home = Home(engine)
        self._clocks = {0: Clock()}

    def begin(self) -> None:
        """The program begins: rank 0 reads the clocks.  Raises DistributedTimeoutError."""
        sys.stderr = faults.Labelled(sys.stderr, self.rank)
        within = timeout_of(None)
        if self.rank == 0:
            for rank in range(1, self.size):
                self._clocks[rank] = Clock(self._read(rank, within))
            return
        for _ in range(PINGS):
            self._hear(PING, within)
            self._answer()

    def _read(self, rank: int, within: float) -> Reading:
        pings = []
        for _ in range(PINGS):
            sent = time.perf_counter_ns()
            self._engine.post(rank, PING, b"")
            theirs = int(self._hear(PONG, within, rank))
            pings.append((sent, theirs, time.perf_counter_ns()))
        return reading(pings)

    def _answer(self) -> None:
        self._engine.post(0, PONG, str(time.perf_counter_ns()).encode())

    def _hear(self, kind: int, within: float, rank: int = 0) -> bytes:
        """A message of ``rank``.  Raises DistributedTimeoutError."""
        until, spins = time.monotonic() + within, 0
        while (message := self._engine.pick_up(kind)) is None or message[0] != rank:
            if time.monotonic() > until:
                raise DistributedTimeoutError(f"profile: rank {rank} has not answered within {within:g} s")
            spins += 1
            if spins > _SPINS:
                time.sleep(_PAUSE)
        return message[1]

    def tell_of_end(self, outcome: Mapping[str, object]) -> None:
        """The program has ended: ranks that wait for this one learn how, and do not wait any longer."""
        tell_of_end(f"its program has failed: {how(outcome)}" if outcome["code"] else "its program has ended")

    # At the end ------------------------------------------------------------------------------------------------

    def gathered(self, mine: Part, whole: Run) -> tuple[Run, int]:
        """On rank 0: the run of all ranks that have come, and the exit status of the job."""
        parts, until = {0: mine}, None
        while len(parts) < self.size:
            if until is None and any(p.failed for p in parts.values()):
                until = time.monotonic() + FOR_OTHERS
            if until is not None and time.monotonic() > until:
                break
            message = self._engine.pick_up(PART)
            if message is None:
                time.sleep(_PAUSE)
                continue
            parts[message[0]] = _unpacked(message[1])
            self._read_again(message[0])
        told = [parts[rank] for rank in sorted(parts)]
        failed = first_failed(told, self._clocks)
        status = 0 if failed is None else int(failed.run.meta["outcome"]["code"]) or 1
        return merged(self._main(told, whole), told, self._clocks, self.size), status

    def _read_again(self, rank: int) -> None:
        try:
            self._clocks[rank] = Clock(self._clocks[rank].first, self._read(rank, _FOR_ANSWERS))
        except DistributedTimeoutError:  # it has ended meanwhile: the first reading must do
            pass

    def _main(self, parts: list[Part], mine: Run) -> Run:
        """The whole run of the rank with the highest peak, or, where that one has gone, this one's."""
        rank = highest(parts).rank
        if rank == 0:
            return mine
        self._engine.post(rank, WANTED, b"")
        try:
            whole: Run = _unpacked(self._hear(WHOLE, _FOR_WHOLE, rank))
        except DistributedTimeoutError:
            return mine
        return whole

    def dismiss(self, status: int) -> None:
        """On rank 0: the others may end, with this status."""
        for rank in range(1, self.size):
            self._engine.post(rank, DISMISSED, str(status).encode())

    def delivered(self, mine: Part, whole: Run) -> int | None:
        """On another rank: the exit status of the job, once rank 0 has what it wants; None: rank 0 does not come."""
        self._engine.post(0, PART, _packed(mine))
        until = time.monotonic() + FOR_OTHERS if mine.failed else None
        asked: dict[int, Callable[[], None]] = {
            PING: self._answer,
            WANTED: lambda: self._engine.post(0, WHOLE, _packed(whole)),
        }
        while True:
            for kind, answer in asked.items():
                if self._engine.pick_up(kind) is not None:
                    until = None  # rank 0 is there
                    answer()
            if (message := self._engine.pick_up(DISMISSED)) is not None:
                return self._dismissed(int(message[1]))
            if until is not None and time.monotonic() > until:
                return None
            time.sleep(_PAUSE)

    def _dismissed(self, status: int) -> int:
        if status:
            time.sleep(FOR_OTHERS)  # rank 0 ends the job
        return status

    def end(self, status: int, text: str) -> NoReturn:
        """End all ranks with a status that is not 0."""
        faults.end(self.home, text, status)


def _packed(x: object) -> bytes:
    return zlib.compress(pickle.dumps(x, pickle.HIGHEST_PROTOCOL), 1)


def _unpacked(data: bytes) -> Any:
    return pickle.loads(zlib.decompress(data))
