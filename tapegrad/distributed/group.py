"""Groups of ranks, and how a program becomes one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from tapegrad.distributed import faults
from tapegrad.distributed.engine import Alone, Engine, Transfer
from tapegrad.distributed.matching import Line
from tapegrad.distributed.mpi import MpiEngine, wait_for_all_ranks_to_call_init
from tapegrad.distributed.nccl import engine_for
from tapegrad.distributed.waiting import Home, wait
from tapegrad.distributed.watching import WATCHING, Entered
from tapegrad.errors import DistributedError

T = TypeVar("T", bound=Transfer)
Check = Literal["each", "step"] | None
_TIMEOUT = 300.0
_LAUNCHERS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")
"""Variables that ``mpiexec`` (of MPICH, Intel MPI, Open MPI) and ``srun`` set for each process."""


class Group:
    """Processes that communicate: ``size`` of them, of which this one has the number ``rank``.

    ``local_rank``: its number among those on its machine.  All ranks of a group call its collectives in the same order,
    from one thread each.
    """

    def __init__(
        self,
        engine: Engine,
        home: Home,
        ranks: Sequence[int],
        timeout: float,
        check: Check,
        parent: Group | None = None,
        name: str = "world",
    ) -> None:
        self.engine, self.parent, self.name = engine, parent, name
        self.ranks = tuple(ranks)
        """The numbers of its members in the whole job."""
        self.rank, self.size, self.local_rank = engine.rank, engine.size, engine.local_rank
        self.line = Line(engine, home, self.ranks, timeout, check, name)
        self._sending: list[tuple[Transfer, object]] = []
        self._messages: dict[tuple[int, int, bool], int] = {}
        self.under_way: list[Any] = []
        """Sums under way (see ``collectives/under_way.py``)."""
        self.told_before: dict[Any, list[Any]] = {}
        """What the ranks told each other, for dry runs, in which they do not."""
        self._home, self._check, self._parts = home, check, 0

    def __repr__(self) -> str:
        return f"<group {self.name}: rank {self.rank} of {self.size}, {self.engine.name}>"

    def together(self, kind: str, detail: str, nbytes: int, start: Callable[[], T]) -> T:
        """Enter a collective, start its transfer, and wait for it.

        Raises DistributedError on every rank if one does something else, has left, or does not come in time.
        """
        entered = self.line.enter(kind, detail, nbytes)
        WATCHING.now.begun(entered)
        transfer = start()
        wait(transfer, entered, self._home, self.line.timeout)
        return transfer

    def wait(self, transfer: Transfer, entered: Entered) -> None:
        """Wait for a transfer that was started for ``entered``.  Raises DistributedError."""
        wait(transfer, entered, self._home, self.line.timeout)

    def sent(self, transfer: Transfer, held: object = None) -> None:
        """Keep what is sent to one rank, and ``held``, until it has gone; the one that sends does not wait."""
        self._sending = [(t, h) for t, h in self._sending if not t.done()]
        self._sending.append((transfer, held))

    def key_of(self, source: int, to: int, receiving: bool) -> tuple[int, int, int, int]:
        """What both sides call the next message from ``source`` to ``to``."""
        side = source, to, receiving
        number = self._messages[side] = self._messages.get(side, 0) + 1
        return self.ranks[source], self.ranks[to], number, 0

    def exchange_objects(self, x: object) -> list[Any]:
        """What each rank gives for ``x``, by rank: anything that can be pickled.  Raises DistributedError."""
        return self.line.told(x, self.line.enter("exchange_objects", "an object", 0))

    def barrier(self) -> None:
        """Wait until all ranks are here.  Raises DistributedError."""
        self.line.told(None, self.line.enter("barrier", "no data", 0))

    def agree(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank.  Raises DistributedError."""
        return any(self.exchange_objects(bool(flag)))

    def split(self, color: int, key: int = 0) -> Group:
        """The group of the ranks that give the same color, ordered by their keys, then by rank.

        Raises DistributedError.
        """
        for name, number in (("color", color), ("key", key)):
            if not hasattr(number, "__index__") or number < 0:
                raise DistributedError(f"split: {name} is an int of at least 0, not {number!r}")
        self._parts += 1
        told = self.line.told((color, key), self.line.enter("split", "a group", 0))
        order = sorted((k, r) for r, (c, k) in enumerate(told) if c == color)
        ranks = [self.ranks[r] for _, r in order]
        engine = self.engine.split(color, key)
        name = f"{self.name}/{self._parts}:{color}"
        return Group(engine, self._home, ranks, self.line.timeout, self._check, self, name)


_world: Group | None = None


def init(comm: Any = None, *, timeout: float | None = None, check: Check = "each") -> Group:
    """Become a rank of the job that ``mpiexec`` has started, or of an mpi4py communicator ``comm``; the group of all.

    Without ``mpiexec`` and ``comm`` the program is the only rank, and needs nothing installed.  ``timeout``: seconds
    that a rank waits for another (None: the environment's TAPEGRAD_TIMEOUT, or 300).  ``check="each"``: before each
    collective the ranks compare what they are about to do; ``"step"``: what they have done, before each gradient and
    wherever they tell each other something; None: never.

    From now on an exception that nobody catches ends the whole job, with its traceback.

    Raises DistributedError if MPI is missing, or if this was called before with another communicator.
    """
    global _world
    if _world is not None:
        if comm is not None or (timeout, check) != (None, "each"):
            raise DistributedError("init: called before; call it once, at the beginning of the program")
        return _world
    if check not in ("each", "step", None):
        raise DistributedError(f'init: check is "each", "step" or None, not {check!r}')
    seconds = timeout_of(timeout)
    if comm is None and launcher() is None:
        engine: Engine = Alone()
    else:
        engine = wait_for_all_ranks_to_call_init(comm, seconds)
    home = Home(engine)
    if engine.size > 1:
        faults.install(home)
    ranks = range(engine.size)
    if isinstance(engine, MpiEngine) and engine.size > 1:
        first = Group(engine, home, ranks, seconds, check, name="init")
        engine = home.engine = engine_for(engine, first.exchange_objects)
    _world = Group(engine, home, ranks, seconds, check)
    return _world


def timeout_of(seconds: float | None) -> float:
    """What the program says, the environment, or the default."""
    return float(os.environ.get("TAPEGRAD_TIMEOUT", _TIMEOUT)) if seconds is None else float(seconds)


def launcher() -> str | None:
    """The variable of the environment by which a launcher of several processes has given itself away."""
    return next((name for name in _LAUNCHERS if name in os.environ), None)


def world() -> Group:
    """The group of all ranks; of this process alone where no launcher has started it.

    Raises DistributedError if ``mpiexec`` has started it and ``init`` was not called.
    """
    if _world is not None:
        return _world
    if (name := launcher()) is not None:
        raise DistributedError(
            f"this program was started as one of several ({name} is set): call tg.distributed.init() at its beginning"
        )
    return init()


def tell_of_end(how: str) -> None:
    """Tell the other ranks how this one's program has ended, before its process does; those that wait for it fail."""
    if _world is not None:
        _world._home.tell_of_end(how)


def barrier(group: Group | None = None) -> None:
    """Wait until all ranks are here.  Raises DistributedError."""
    of(group).barrier()


def of(group: Group | None) -> Group:
    """``group``, or that of all ranks."""
    return world() if group is None else group
