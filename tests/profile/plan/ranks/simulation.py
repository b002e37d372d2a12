"""A small discrete-event simulation of ranks that send messages: what the closed forms are compared with.

A process is a generator.  It yields seconds to let them pass, the name of an event to wait until it has happened, or
an operation, a list of messages; it goes on when all of these have come or gone.  A message needs the sender's and the
receiver's port, which take one at a time, each way.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

Process = Iterator[object]


class Simulation:
    """``cost(source, to, nbytes)``: seconds of a message."""

    def __init__(self, cost: Callable[[int, int, float], float]) -> None:
        self.now = 0.0
        self._cost, self._count = cost, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._happened: set[object] = set()
        self._waiting: dict[object, list[Process]] = defaultdict(list)
        self._out: dict[int, deque[tuple[int, float]]] = defaultdict(deque)
        self._sending: set[int] = set()
        self._receiving: set[int] = set()

    def start(self, process: Process) -> None:
        """Let a process run from now on."""
        self._later(0.0, lambda: self._resume(process))

    def run(self) -> float:
        """Until nothing happens any more; when that is."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        assert not any(self._waiting.values()), "a deadlock"
        return self.now

    def happen(self, event: object) -> None:
        """Wake who waits for it."""
        self._happened.add(event)
        for process in self._waiting.pop(event, []):
            self.start(process)

    def send(self, source: int, to: int, nbytes: float) -> None:
        """Put a message at the end of what ``source`` has to send; event ("from", source, to) when it has come."""
        self._out[source].append((to, nbytes))
        self._move()

    def forget(self, event: object) -> None:
        """It may happen once more."""
        self._happened.discard(event)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, action))

    def _resume(self, process: Process) -> None:
        wanted = next(process, None)
        if isinstance(wanted, float):
            self._later(wanted, lambda: self._resume(process))
        elif wanted in self._happened:
            self._resume(process)
        elif wanted is not None:
            self._waiting[wanted].append(process)

    def _move(self) -> None:
        for source, messages in self._out.items():
            if not messages or source in self._sending or messages[0][0] in self._receiving:
                continue
            to, nbytes = messages.popleft()
            self._sending.add(source)
            self._receiving.add(to)
            self._later(self._cost(source, to, nbytes), lambda source=source, to=to: self._come(source, to))

    def _come(self, source: int, to: int) -> None:
        self._sending.discard(source)
        self._receiving.discard(to)
        # whoever became free at this moment is free before anybody begins
        self._later(0.0, self._move)
        self.happen(("from", source, to))


def all_to_all(sim: Simulation, rank: int, ranks: int, nbytes: float) -> Process:
    """A message to every other rank, in turn, and one from each."""
    others = [(rank + i) % ranks for i in range(1, ranks)]
    for other in others:
        sim.send(rank, other, nbytes)
    for other in others:
        yield "from", other, rank
        sim.forget(("from", other, rank))


def ordered(sim: Simulation, rank: int, ranks: int, nbytes: float) -> Process:
    """The parts of all to the rank that adds them, which sends the sum to all."""
    yield from all_to_all(sim, rank, ranks, nbytes / ranks)
    yield from all_to_all(sim, rank, ranks, nbytes / ranks)


def ring(sim: Simulation, rank: int, ranks: int, nbytes: float) -> Process:
    """Parts go round: once to be added up, once to be known to all."""
    before = (rank - 1) % ranks
    for _ in range(2 * (ranks - 1)):
        sim.send(rank, (rank + 1) % ranks, nbytes / ranks)
        yield "from", before, rank
        sim.forget(("from", before, rank))


def tree(sim: Simulation, rank: int, ranks: int, nbytes: float) -> Process:
    """Rank 0's value: who has it sends it on, at half the distance each time."""
    distance = 1
    while distance < ranks:
        if distance <= rank < 2 * distance:
            yield "from", rank - distance, rank
        elif rank < distance and rank + distance < ranks:
            sim.send(rank, rank + distance, nbytes)
            yield "from", rank, rank + distance
        distance *= 2
