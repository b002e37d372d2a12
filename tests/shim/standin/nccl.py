"""NCCL: ranks are processes of MPI, each with devices of its own; as strict as NCCL is documented to be.

Bytes move when a group ends, or at a call outside of a group, and the host waits for them: a real NCCL would only have
queued them.  So where a rank does not come within ``config.nccl_patience`` seconds, the stream is stuck from then on:
no event on it is ever done.  Calls outside of a group come one after the other, so messages that face each other stick.

All calls touch one more byte, for which no memory stands: the happens-before checker thereby finds two of them, of
whatever communicators, that streams do not order; to NCCL that is a deadlock waiting to happen.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from . import capturing, memory, state

NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
NCCL_CHAR, NCCL_INT, NCCL_HALF, NCCL_FLOAT, NCCL_DOUBLE = 0, 2, 6, 7, 8
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)

_DTYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "bfloat16"]
_REDUCE = {NCCL_SUM: np.add, NCCL_PROD: np.multiply, NCCL_MAX: np.maximum, NCCL_MIN: np.minimum}
_TEXTS = {
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)",
}
_LIBRARY = ((1, 1),)
"""The byte that all calls write."""
_MEETING = 20_000
"""Tags from here on: ranks that meet for a new communicator."""
_numbers = itertools.count(1)


class NcclError(RuntimeError):
    """NCCL returned an error; ``status`` is its number."""

    def __init__(self, status: int, why: str = ""):
        self.status = status
        super().__init__(f"{_TEXTS[status]}{why and ': ' + why}")


class NcclConfig:
    """What a communicator may be told when it is made."""

    def __init__(self, split_share: int = 0):
        self.split_share = split_share


class _Message(NamedTuple):
    """Bytes to or from a rank."""

    communicator: NcclCommunicator
    receives: bool
    address: int
    size: int
    peer: int
    stream: int


class _Thread(threading.local):
    depth = 0

    def __init__(self):
        self.messages: list[_Message] = []


_thread = _Thread()


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


def _require_library() -> None:
    if not state.config.nccl:
        raise AttributeError("module 'cupy.cuda.nccl' has no such attribute: libnccl.so.2 is not there")


def get_version() -> int:
    """The version of the library, as a number."""
    _require_library()
    return 22501


def get_build_version() -> int:
    """The version whose headers CuPy was built with."""
    return 22501


def get_unique_id() -> bytes:
    """The rank that makes it is where the others meet."""
    _require_library()
    rank = _mpi().COMM_WORLD.Get_rank()
    return f"{rank} {next(_numbers)}".encode().ljust(128, b"\0")


def groupStart() -> None:
    """Calls from now on move bytes together."""
    _thread.depth += 1


def groupEnd() -> None:
    """They move now."""
    if not _thread.depth:
        raise NcclError(5, "groupEnd without groupStart")
    _thread.depth -= 1
    if not _thread.depth:
        messages, _thread.messages = _thread.messages, []
        _move(messages)


def _move(messages: list[_Message]) -> None:
    """Move the bytes of one group; all of them at once."""
    if not messages:
        return
    for stream in {m.stream for m in messages}:
        mine = [m for m in messages if m.stream == stream]
        reads = tuple((m.address, m.size) for m in mine if not m.receives)
        writes = tuple((m.address, m.size) for m in mine if m.receives)
        state.log("nccl", stream, name="messages", reads=reads, writes=writes + _LIBRARY)
    if any(m.stream in state.stuck for m in messages):
        return
    boxes = [(m, np.empty(m.size, np.uint8)) for m in messages if m.receives]
    requests = [m.communicator._receive(box, m.peer) for m, box in boxes]
    requests += [m.communicator._send(memory.raw(m.address, m.size).copy(), m.peer) for m in messages if not m.receives]
    if _finished(requests, messages[0].communicator, messages[0].stream):
        for message, box in boxes:
            memory.raw(message.address, message.size)[...] = box


def _finished(requests: list[tuple[Any, Any]], communicator: NcclCommunicator, stream: int) -> bool:
    """Wait for messages; False: others do not come, and the stream is stuck."""
    until, test = time.monotonic() + state.config.nccl_patience, _mpi().Request.Testall
    waited = [request for request, _ in requests]
    while not test(waited):
        if time.monotonic() > until:
            communicator._left += requests
            state.stuck.add(stream)
            return False
        time.sleep(1e-5)
    return True


class NcclCommunicator:
    """A rank of a communicator, on the device that was current when it was made."""

    def __init__(self, ndev: int, commId: bytes, rank: int, config: NcclConfig | None = None):
        _require_library()
        state.require_device()
        if not isinstance(commId, bytes) or len(commId) != 128:
            raise TypeError(f"commId must be 128 bytes, not {type(commId).__name__}")
        if not 0 <= rank < ndev:
            raise NcclError(4, f"rank {rank} of {ndev}")
        self._rank, self._device, self._alive = rank, state.thread.device, True
        self._left: list[tuple[Any, Any]] = []
        mpi = _mpi()
        root, number = map(int, commId.rstrip(b"\0").split())
        self._tag, meeting = 1 + (root * 1009 + number) % (_MEETING - 1), _MEETING + number
        mine = rank, mpi.COMM_WORLD.Get_rank(), os.uname().nodename, self._device
        if mine[1] == root:
            table = sorted([mine, *(mpi.COMM_WORLD.recv(source=mpi.ANY_SOURCE, tag=meeting) for _ in range(ndev - 1))])
            for _, there, _, _ in table:
                if there != root:
                    mpi.COMM_WORLD.send(table, there, tag=meeting)
        else:
            mpi.COMM_WORLD.send(mine, root, tag=meeting)
            table = mpi.COMM_WORLD.recv(source=root, tag=meeting)
        self._world = [there for _, there, _, _ in table]
        # Each process pretends to have all devices of its machine, as ranks of one machine do.
        if len({(machine, device) for _, _, machine, device in table}) < ndev:
            raise NcclError(5, "Duplicate GPU detected")

    def _checked(self, stream: int, dtype: int, count: int, *addresses: int, peer: int = 0) -> np.dtype:
        """What NCCL checks of a call, and what CUDA does."""
        if not self._alive:
            raise NcclError(4, "the communicator was destroyed")
        if not 0 <= dtype < len(_DTYPES) or count < 0 or not 0 <= peer < len(self._world):
            raise NcclError(4, f"type {dtype}, {count} elements, rank {peer}")
        if state.thread.device != self._device or state.homes.get(stream, self._device) != self._device:
            raise NcclError(5, "the stream, or the current device, is not the communicator's")
        capturing.refuse(stream, "a call of NCCL")
        found = np.dtype(_DTYPES[dtype])
        for address in addresses:
            if count:
                memory.check_range(address, count * found.itemsize)
        return found

    def _receive(self, box: np.ndarray, peer: int) -> tuple[Any, np.ndarray]:
        mpi = _mpi()
        return mpi.COMM_WORLD.Irecv([box, mpi.BYTE], self._world[peer], self._tag), box

    def _send(self, box: np.ndarray, peer: int) -> tuple[Any, np.ndarray]:
        mpi = _mpi()  # a synchronous send: it is done when the other side has begun to receive
        return mpi.COMM_WORLD.Issend([box, mpi.BYTE], self._world[peer], self._tag), box

    def _message(self, receives: bool, address: int, count: int, datatype: int, peer: int, stream: int) -> None:
        size = count * self._checked(stream, datatype, count, address, peer=peer).itemsize
        message = _Message(self, receives, address, size, peer, stream)
        if _thread.depth:
            _thread.messages.append(message)
        else:
            _move([message])

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """To one rank, which receives."""
        self._message(False, sendbuf, count, datatype, peer, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        """From one rank, which sends."""
        self._message(True, recvbuf, count, datatype, peer, stream)

    def _collective(self, name: str, stream: int, reads: tuple, writes: tuple, give: dict, take: list) -> list | None:
        """Bytes to some ranks, and a box from each of others, at once; None: the stream is stuck."""
        if _thread.depth:
            raise NotImplementedError("the stand-in knows no collectives in groups")
        state.log("nccl", stream, name=name, reads=reads, writes=writes + _LIBRARY)
        if stream in state.stuck:
            return None
        boxes = [np.empty(size, np.uint8) for _, size in take]
        requests = [self._receive(box, peer) for box, (peer, _) in zip(boxes, take, strict=True)]
        requests += [self._send(data, peer) for peer, data in give.items()]
        return boxes if _finished(requests, self, stream) else None

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """From one rank to all."""
        size = count * self._checked(stream, datatype, count, sendbuff, recvbuff, peer=root).itemsize
        others = [r for r in range(len(self._world)) if r != self._rank]
        mine = memory.raw(sendbuff, size).copy()
        give = dict.fromkeys(others, mine) if self._rank == root else {}
        take = [] if self._rank == root else [(root, size)]
        boxes = self._collective("broadcast", stream, ((sendbuff, size),), ((recvbuff, size),), give, take)
        if boxes is not None:
            memory.raw(recvbuff, size)[...] = boxes[0] if boxes else mine

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """The same in place."""
        self.broadcast(buff, buff, count, datatype, root, stream)

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        """In an order of its own: from the last rank to the first, half types rounded at each step."""
        dtype = self._checked(stream, datatype, count, sendbuf, recvbuf)
        if op not in _REDUCE:
            raise NcclError(4, f"operation {op}")
        size = count * dtype.itemsize
        mine = memory.raw(sendbuf, size).copy()
        others = [r for r in range(len(self._world)) if r != self._rank]
        give, take = dict.fromkeys(others, mine), [(r, size) for r in others]
        boxes = self._collective("allReduce", stream, ((sendbuf, size),), ((recvbuf, size),), give, take)
        if boxes is not None:
            boxes.insert(self._rank, mine)
            total = boxes[-1].view(dtype).copy()
            for box in reversed(boxes[:-1]):
                _REDUCE[op](total, box.view(dtype), out=total)
            memory.raw(recvbuf, size)[...] = total.view(np.uint8)

    def check_async_error(self) -> None:
        """A rank that does not come is no error to NCCL."""

    def device_id(self) -> int:
        """The device it belongs to."""
        return self._device

    def rank_id(self) -> int:
        """The number of this rank."""
        return self._rank

    def size(self) -> int:
        """How many ranks there are."""
        return len(self._world)

    def abort(self) -> None:
        """What it had queued will not be done."""
        self._alive = False
        for request, _ in self._left:
            request.Cancel()
        self._left.clear()

    def destroy(self) -> None:
        """No more calls."""
        self._alive = False
