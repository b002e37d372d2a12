"""NCCL: bytes from GPU to GPU, through CuPy's binding; it knows arrays and numbers of ranks, and nothing of groups.

What NCCL asks for is kept here: everything that one process asks of it goes to one stream, in one order, whatever the
communicator; messages that face each other are in one group; a GPU belongs to one rank.  That stream waits for what
was asked of the device before, and memory is held until an event after it has come: CuPy's pool keeps free blocks by
stream, so it would lend them again to the stream they came from while NCCL still uses them.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tapegrad.device.base import Device
from tapegrad.device.types import Array
from tapegrad.errors import DistributedError

Messages = Sequence[tuple[int, Array]]
"""Ranks, and contiguous arrays that go there or come from there."""

_TYPES = {
    "int8": ("INT8", 1), "uint8": ("UINT8", 1), "bool": ("UINT8", 1), "int32": ("INT32", 1), "uint32": ("UINT32", 1),
    "int64": ("INT64", 1), "uint64": ("UINT64", 1), "float16": ("FLOAT16", 1), "bfloat16": ("BFLOAT16", 1),
    "float32": ("FLOAT32", 1), "float64": ("FLOAT64", 1), "complex64": ("FLOAT32", 2), "complex128": ("FLOAT64", 2),
}  # fmt: skip
"""By dtype, what NCCL adds, and how many of them an element has; a complex sum is that of its parts."""
_FOR_ABORT = 5.0
"""Seconds: NCCL's own abort has been seen to hang."""


def lack() -> str | None:
    """Why NCCL cannot be used; None: it can."""
    try:
        with warnings.catch_warnings():  # CuPy's warning says in many lines what the next one says in one
            warnings.simplefilter("ignore", UserWarning)
            nccl = _binding()
        version = nccl.get_version() if nccl.available else 0
    except Exception as e:  # ImportError, OSError, NcclError: each means the same here
        return f"NCCL does not load: {e}"
    if not version:
        return "CuPy finds no NCCL"
    return None if version >= 21800 else f"NCCL {version} is older than 2.18"


def version() -> str:
    """NCCL's, as 2.21.5.  Raises ImportError, or what CuPy raises where NCCL does not load."""
    number = _binding().get_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _binding() -> Any:
    from cupy.cuda import nccl

    return nccl


def bus(device: Device) -> str:
    """Which GPU of its machine a device is."""
    return str(device.xp.cuda.Device(device.index).pci_bus_id)


def identifier() -> bytes:
    """What all ranks of a new communicator are told by one of them."""
    return bytes(_binding().get_unique_id())


class Work:
    """Something on the stream of communication, and what it uses."""

    def __init__(self, queue: Queue, event: Any, held: object) -> None:
        self._queue, self.event, self.held = queue, event, held

    def done(self) -> bool:
        """Whether it is done.  Raises DistributedError if NCCL has failed."""
        if self.held is None:
            return True
        self._queue.release()
        return self.held is None


class Queue:
    """All that one process asks of NCCL, in one order, on one stream beside those that compute."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.binding = _binding()
        with device.active():
            self.stream = device.xp.cuda.Stream(non_blocking=True)
        self._communicators: list[Any] = []
        self._works: deque[Work] = deque()
        self._given_up = False

    def communicator(self, size: int, ident: bytes, rank: int) -> Communicator:
        """A new one; returns once all ranks have asked for it.  Raises DistributedError."""
        with self.device.active():
            try:
                communicator = self.binding.NcclCommunicator(size, ident, rank)
            except self.binding.NcclError as e:
                raise DistributedError(f"NCCL makes no communicator of {size} ranks on {self.device}: {e}") from e
        self._communicators.append(communicator)
        return Communicator(self, communicator, rank, size)

    def add(self, step: Callable[[], object], held: object) -> Work:
        """Do ``step`` on this queue's stream, after what was asked of the device before; hold what it uses.

        Raises DistributedError.
        """
        self.require()
        cuda = self.device.xp.cuda
        with self.device.active():
            before = cuda.Event(disable_timing=True)
            before.record(cuda.get_current_stream())
            self.stream.wait_event(before)
            after = cuda.Event(disable_timing=True)
            try:
                with self.stream:
                    step()
            except self.binding.NcclError as e:
                raise DistributedError(f"NCCL: {e}") from e
            finally:  # whatever has been queued uses it
                after.record(self.stream)
                work = Work(self, after, (step, held))
                self._works.append(work)
        return work

    def release(self) -> None:
        """Let go of what works use that are done.  Raises DistributedError if NCCL has failed."""
        self.require()
        while self._works and self._works[0].event.done:
            self._works.popleft().held = None
        if self._works:
            for communicator in self._communicators:
                try:
                    communicator.check_async_error()
                except self.binding.NcclError as e:
                    raise DistributedError(f"NCCL: {e}") from e

    def require(self) -> None:
        """Raise DistributedError if it has been given up."""
        if self._given_up:
            raise DistributedError("NCCL was given up when other ranks did not come; start the program again")

    def give_up(self) -> None:
        """Abort everything, or leave it after some seconds: then the end of the process ends it."""
        self._given_up = True
        communicators, self._communicators = self._communicators, []

        def abort() -> None:
            for communicator in communicators:
                communicator.abort()

        thread = threading.Thread(target=abort, daemon=True)
        thread.start()
        thread.join(_FOR_ABORT)

    def close(self) -> None:
        """All ranks are at their ends."""
        communicators, self._communicators = self._communicators, []
        for communicator in communicators:
            communicator.destroy()


class Communicator:
    """Ranks that send each other arrays."""

    def __init__(self, queue: Queue, communicator: Any, rank: int, size: int) -> None:
        self._queue, self._communicator, self._rank, self._size = queue, communicator, rank, size
        self._connect()

    def _connect(self) -> None:
        """A byte from each to each: NCCL connects at the first message, for which the host waits without a deadline."""
        xp, others = self._queue.device.xp, [r for r in range(self._size) if r != self._rank]
        with self._queue.device.active():
            away, come = xp.zeros(self._size, "u1"), xp.empty(self._size, "u1")
        self.exchange([(r, away[r : r + 1]) for r in others], [(r, come[r : r + 1]) for r in others])

    def exchange(self, send: Messages, receive: Messages) -> Work:
        """All messages in one group, as bytes; those from and to this rank itself are copied.

        Raises DistributedError.
        """
        nccl, communicator, rank = self._queue.binding, self._communicator, self._rank
        pointer = self._queue.stream.ptr

        def step() -> None:
            own = [a for r, a in send if r == rank]
            for r, array in receive:
                if r == rank:
                    array[...] = own.pop(0)
            nccl.groupStart()
            try:
                for to, array in send:
                    if to != rank and array.nbytes:
                        communicator.send(_address(array), array.nbytes, nccl.NCCL_UINT8, to, pointer)
                for source, array in receive:
                    if source != rank and array.nbytes:
                        communicator.recv(_address(array), array.nbytes, nccl.NCCL_UINT8, source, pointer)
            finally:
                nccl.groupEnd()

        return self._queue.add(step, (send, receive))

    def broadcast(self, array: Array, root: int) -> Work:
        """The array of ``root`` into those of all.  Raises DistributedError."""
        nccl, communicator, pointer = self._queue.binding, self._communicator, self._queue.stream.ptr
        at, size = _address(array), array.nbytes
        step = lambda: size and communicator.broadcast(at, at, size, nccl.NCCL_UINT8, root, pointer)
        return self._queue.add(step, array)

    def all_reduce(self, array: Array, op: str) -> Work:
        """Reduce in place, in NCCL's order.  Raises DistributedError for a dtype that NCCL has not."""
        nccl, communicator, pointer = self._queue.binding, self._communicator, self._queue.stream.ptr
        if array.dtype.name not in _TYPES or (array.dtype.kind == "c" and op != "sum"):
            raise DistributedError(f"all_reduce: NCCL cannot reduce {array.dtype} by {op}; use exact=True")
        name, each = _TYPES[array.dtype.name]
        code, how = getattr(nccl, f"NCCL_{name}"), getattr(nccl, f"NCCL_{op.upper()}")
        at, count = _address(array), array.size * each
        step = lambda: count and communicator.allReduce(at, at, count, code, how, pointer)
        return self._queue.add(step, array)


def _address(array: Any) -> int:
    return int(array.data.ptr)
