"""The engine on MPI, by mpi4py: arrays on the CPU, and all that ranks tell each other.

Arrays go as bytes, so every dtype does, also those that MPI has no name for.  Messages between two ranks have tags that
count the exchanges, so several may be on their way.  A message has at most 1 GiB: some MPIs count bytes in 32 bits.
"""

from __future__ import annotations

import faulthandler
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from tapegrad.device import Device
from tapegrad.device.types import Array
from tapegrad.distributed.engine import BETWEEN_TWO, Done, Engine, Notice, Piece, Transfer, WrongSizeError
from tapegrad.distributed.watching import WATCHING, watch_all_reduce, watch_broadcast
from tapegrad.errors import DistributedError

MOST_BYTES = 2**30
"""Of one message."""
_TAGS = 2**14 - 4
_FIRST_KIND = 2**14
"""Tags of messages that are left for others, above those of exchanges; every MPI has tags up to 2**15 - 1."""

_LONGEST = 1e6
"""Seconds of a timer."""


def available() -> bool:
    """Whether mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def load() -> Any:
    """The module ``mpi4py.MPI``, whose import starts MPI.  Raises DistributedError saying what to install."""
    try:
        from mpi4py import MPI
    except ImportError as e:
        missing = "mpi4py" if getattr(e, "name", None) == "mpi4py" else "an MPI library"
        raise DistributedError(
            f"init: {missing} is not there ({e}); pip install 'tapegrad[mpi]' gives mpi4py, and the MPI library is "
            "yours: your cluster's, or pip install mpich"
        ) from None
    return MPI


def wait_for_all_ranks_to_call_init(comm: Any, timeout: float) -> MpiEngine:
    """The engine on ``comm`` (None: all processes), once all have come.

    MPI starts in all processes together, and nothing can interrupt it: after ``timeout`` seconds a timer of the
    interpreter prints where this process is, and ends it, and so its launcher ends the others.
    """
    faulthandler.dump_traceback_later(min(timeout, _LONGEST), exit=True, file=2)
    try:
        return MpiEngine(load().COMM_WORLD if comm is None else comm)
    finally:
        faulthandler.cancel_dump_traceback_later()


class _Requests:
    """MPI requests that are under way, and what they use; the first ones receive as many bytes as ``sizes`` says."""

    def __init__(self, mpi: Any, requests: list[Any], held: object = None, sizes: Sequence[int] = ()) -> None:
        self._mpi, self._requests, self._held, self._sizes = mpi, requests, held, sizes
        self._statuses = [mpi.Status() for _ in requests]

    def done(self) -> bool:
        """Whether all are complete.  Raises WrongSizeError."""
        try:
            if self._requests and not self._mpi.Request.Testall(self._requests, self._statuses):
                return False
        except self._mpi.Exception as e:
            raise WrongSizeError(f"what has come is longer than what was expected ({e})") from None
        self._requests, self._held = [], None
        for status, size in zip(self._statuses, self._sizes, strict=False):
            if status.Get_count(self._mpi.BYTE) != size:
                raise WrongSizeError(f"{status.Get_count(self._mpi.BYTE)} bytes have come instead of {size}")
        return True


class _Told(_Requests):
    """A notice on its way."""

    def __init__(self, mpi: Any, requests: list[Any], data: bytes, box: bytearray) -> None:
        super().__init__(mpi, requests, (data, box))
        self._box, self._each = box, len(data)

    def told(self) -> list[bytes]:
        """By rank."""
        return [bytes(self._box[i : i + self._each]) for i in range(0, len(self._box), self._each)]


class MpiEngine:
    """Moves arrays on the CPU by MPI.  It has communicators of its own, so nobody else's messages come between."""

    name = "mpi"

    def __init__(self, comm: Any) -> None:
        self.mpi = load()
        self.communicator, self._control = comm.Dup(), comm.Dup()
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        on_machine = comm.Split_type(self.mpi.COMM_TYPE_SHARED)
        self.local_rank = on_machine.Get_rank()
        on_machine.Free()
        self._tag = 0
        self._left: list[Any] = []
        self._from_me: list[Array] = []

    def moves(self, device: Device) -> bool:
        """Those on the CPU."""
        return device.kind == "cpu"

    def ticket(self) -> int:
        """Two tags; every rank counts the exchanges of all."""
        self._tag = self._tag % _TAGS + 2
        return self._tag

    def exchange(
        self, send: Sequence[Piece], receive: Sequence[Piece], ticket: int | None = None, second: bool = False
    ) -> Transfer:
        """All messages at once; those from and to this rank itself are copied."""
        between_two = ticket == BETWEEN_TWO
        WATCHING.now.sent(self.rank, send)
        comm, tag = self.communicator, (self.ticket() if ticket is None else ticket) + second
        arrived = self._from_me if between_two else []
        arrived += [a for rank, a in send if rank == self.rank]
        pieces = [(m, r) for r, a in receive if r != self.rank for m in self._messages(a)]
        requests = [comm.Irecv(m, r, tag) for m, r in pieces]
        requests += [comm.Isend(m, r, tag) for r, a in send if r != self.rank for m in self._messages(a)]
        for rank, array in receive:
            if rank == self.rank:
                array[...] = arrived.pop(0)
        return _Requests(self.mpi, requests, (send, receive), [m[0].nbytes for m, _ in pieces])

    def _messages(self, array: Array) -> list[Any]:
        """An array as messages; none for an empty one."""
        data = array.view("u1")
        return [[data[i : i + MOST_BYTES], self.mpi.BYTE] for i in range(0, data.size, MOST_BYTES)]

    def all_gather(
        self, send: Array, receive: Sequence[Array], ticket: int | None = None, second: bool = False
    ) -> Transfer:
        """To each rank directly: each byte goes over the wire once for each rank that wants it, no more."""
        ranks = [(self.rank + i) % self.size for i in range(self.size)]
        return self.exchange([(r, send) for r in ranks], [(r, receive[r]) for r in ranks], ticket, second)

    def follow(self, transfer: Transfer, step: Callable[[], None], array: Array) -> Transfer | None:
        """Once the bytes have arrived."""
        if not transfer.done():
            return None
        step()
        return Done()

    def queues(self, array: Array) -> bool:
        """No."""
        return False

    def broadcast(self, array: Array, root: int) -> Transfer:
        """By MPI, which forwards it along a tree."""
        watch_broadcast(self, array, root)
        return _Requests(self.mpi, [self.communicator.Ibcast(m, root) for m in self._messages(array)], array)

    def all_reduce(self, array: Array, op: str) -> Transfer:
        """By MPI.  Raises DistributedError for a dtype that MPI cannot reduce."""
        watch_all_reduce(self, array)
        ops = {"sum": self.mpi.SUM, "max": self.mpi.MAX, "min": self.mpi.MIN}
        most = MOST_BYTES // array.dtype.itemsize
        try:
            parts = [array[i : i + most] for i in range(0, array.size, most)]
            started = [self.communicator.Iallreduce(self.mpi.IN_PLACE, part, ops[op]) for part in parts]
        except (KeyError, BufferError, TypeError, self.mpi.Exception) as e:
            raise DistributedError(
                f"all_reduce: MPI cannot reduce {array.dtype} by {op} ({e}); use exact=True"
            ) from None
        return _Requests(self.mpi, started, array)

    def notice(self, data: bytes) -> Notice:
        """By one small gather."""
        box = bytearray(len(data) * self.size)
        request = self._control.Iallgather([data, self.mpi.BYTE], [box, self.mpi.BYTE])
        return _Told(self.mpi, [request], data, box)

    def post(self, rank: int, kind: int, data: bytes) -> None:
        """Kept until it has been picked up, or until the process ends."""
        self._left = [left for left in self._left if not left[0].Test()]
        self._left.append((self._control.Isend([data, self.mpi.BYTE], rank, _FIRST_KIND + kind), data))

    def pick_up(self, kind: int) -> tuple[int, bytes] | None:
        """From any rank."""
        status = self.mpi.Status()
        found = self._control.Improbe(self.mpi.ANY_SOURCE, _FIRST_KIND + kind, status)
        if found is None:
            return None
        box = bytearray(status.Get_count(self.mpi.BYTE))
        found.Recv([box, self.mpi.BYTE])
        return status.Get_source(), bytes(box)

    def split(self, color: int, key: int) -> Engine:
        """A communicator of its own."""
        part = self.communicator.Split(color, key)
        try:
            return MpiEngine(part)
        finally:
            part.Free()

    def give_up(self) -> None:
        """MPI has messages that never come, and goes on."""

    def close(self) -> None:
        """MPI ends with its process."""

    def abort(self, code: int) -> None:
        """The launcher ends all ranks."""
        self.mpi.COMM_WORLD.Abort(code)
