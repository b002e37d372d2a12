"""The engine on NCCL: arrays go from GPU to GPU; what ranks tell each other, and arrays on the CPU, go by MPI.

Each rank has a GPU of its own.  Everything goes to one stream in one order (``device/nccl.py``), which all ranks keep:
the order of their program.  A wait asks for an event, so it has a deadline as with MPI.  Reductions are those of
``ordered.py``: their bits are the CPU's.

Communication is no part of a CUDA graph: ``tg.function`` calls a function with collectives eagerly, and says so.
Nothing here has run on two GPUs yet: tests run it on a stand-in for CuPy that is as strict as NCCL is documented to be.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tapegrad.device import CPU, Device, asdevice, cuda_count, current_device, nccl, set_default_device
from tapegrad.device.types import Array
from tapegrad.distributed.engine import Alone, Engine, Piece, Transfer
from tapegrad.distributed.mpi import MpiEngine
from tapegrad.distributed.watching import WATCHING, watch_all_reduce, watch_broadcast


class _Equipment(NamedTuple):
    """What a rank tells of its GPU before all decide."""

    machine: str
    default: str
    """The GPU that its default device is; "": the CPU."""
    own: str
    """The GPU whose number is the rank's own among those of its machine; "": there is none."""
    lack: str | None


def engine_for(engine: MpiEngine, tell: Callable[[object], list[Any]]) -> Engine:
    """NCCL's engine, where the default device of all ranks is CUDA; else ``engine``.

    Ranks that share a GPU take the one with their ``local_rank``, which becomes their default device.  Warns where
    arrays on GPUs must pass through the host's memory.  ``tell``: what each rank gives for an object.
    """
    told: list[_Equipment] = tell(_equipment(engine))
    if not all(t.default for t in told):
        return engine
    if _shared([(t.machine, t.default) for t in told]):
        if not all(t.own for t in told):
            return _through_host(engine, "there are fewer GPUs than ranks, and NCCL takes one for each", "")
        set_default_device(f"cuda:{engine.local_rank}")
        if both := _shared([(t.machine, t.own) for t in told]):
            return _through_host(engine, f"ranks {both[0]} and {both[1]} have the same GPU", "")
    for rank, t in enumerate(told):
        if t.lack is not None:
            return _through_host(engine, f"{t.lack} (rank {rank})", "; pip install 'tapegrad[nccl12]' (or [nccl13])")
    return NcclEngine(engine.communicator, nccl.Queue(current_device()))


def _equipment(engine: MpiEngine) -> _Equipment:
    device, machine = current_device(), platform.node()
    if device.kind != "cuda":
        return _Equipment(machine, "", "", None)
    there = engine.local_rank < cuda_count()
    own = nccl.bus(asdevice(f"cuda:{engine.local_rank}")) if there else ""
    return _Equipment(machine, nccl.bus(device), own, nccl.lack())


def _shared(gpus: Sequence[tuple[str, str]]) -> tuple[int, int] | None:
    """Two ranks with the same GPU."""
    first: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(gpus):
        if first.setdefault(gpu, rank) != rank:
            return first[gpu], rank
    return None


def _through_host(engine: MpiEngine, why: str, cure: str) -> Engine:
    if engine.rank == 0:
        text = f"init: between ranks arrays on GPUs pass through the host's memory: {why}{cure}"
        warnings.warn(text, UserWarning, stacklevel=4)
    return engine


class NcclEngine(MpiEngine):
    """Moves arrays on one GPU by NCCL, and all else by MPI."""

    name = "nccl"

    def __init__(self, comm: Any, queue: nccl.Queue) -> None:
        super().__init__(comm)
        self._queue = queue
        ident = comm.bcast(nccl.identifier() if self.rank == 0 else None)
        self._ranks = queue.communicator(self.size, ident, self.rank)

    def moves(self, device: Device) -> bool:
        """Those on the CPU, and those on its GPU."""
        return device is self._queue.device or super().moves(device)

    def exchange(
        self, send: Sequence[Piece], receive: Sequence[Piece], ticket: int | None = None, second: bool = False
    ) -> Transfer:
        """In one group, so that no message waits for one that faces it."""
        if ticket is None:  # also for NCCL's: a rank without messages does not know by whom the others' go
            ticket = self.ticket()
        if all(_on_cpu(a) for _, a in (*send, *receive)):
            return super().exchange(send, receive, ticket, second)
        WATCHING.now.sent(self.rank, send)
        return self._ranks.exchange(send, receive)

    def follow(self, transfer: Transfer, step: Callable[[], None], array: Array) -> Transfer | None:
        """On the stream of the transfer: nobody waits."""
        if _on_cpu(array):
            return super().follow(transfer, step, array)
        return self._queue.add(step, array)

    def queues(self, array: Array) -> bool:
        """On a GPU: all ranks must ask NCCL for the same in one order, whenever they look after what is under way."""
        return not _on_cpu(array)

    def broadcast(self, array: Array, root: int) -> Transfer:
        """By NCCL."""
        if _on_cpu(array):
            return super().broadcast(array, root)
        watch_broadcast(self, array, root)
        return self._ranks.broadcast(array, root)

    def all_reduce(self, array: Array, op: str) -> Transfer:
        """By NCCL.  Raises DistributedError for a dtype that it cannot reduce."""
        if _on_cpu(array):
            return super().all_reduce(array, op)
        watch_all_reduce(self, array)
        return self._ranks.all_reduce(array, op)

    def split(self, color: int, key: int) -> Engine:
        """A communicator of its own, on the same stream."""
        part = self.communicator.Split(color, key)
        try:
            return NcclEngine(part, self._queue) if part.Get_size() > 1 else Alone()
        finally:
            part.Free()

    def give_up(self) -> None:
        """NCCL cannot go on after a rank that did not come."""
        self._queue.give_up()

    def close(self) -> None:
        """NCCL waits for all ranks there."""
        self._queue.close()

    def abort(self, code: int) -> None:
        """NCCL first: a GPU that waits for others would hold up the end of its process."""
        self._queue.give_up()
        super().abort(code)


def _on_cpu(array: Array) -> bool:
    return isinstance(array, CPU.xp.ndarray)
