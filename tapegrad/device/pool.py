"""Host memory: freed blocks are kept and lent again, because page faults on fresh memory cost as much as the work.

A block is lent to one array.  Its owner object is the ``base`` of that array and of every view NumPy derives from
it, so a block comes back exactly when no array refers to it any more.  The finalizer of an owner is a C function: in
one written in Python a Ctrl-C would be lost.  It queues the block, and the next call of the pool takes it back.
"""

from __future__ import annotations

from collections import deque
from math import inf, prod
from typing import NamedTuple
from weakref import ref

import numpy as np

from tapegrad.core import locks
from tapegrad.core.storage import METER, Meter
from tapegrad.device.types import DType

LEAST = 128 * 1024  # smaller requests: malloc keeps its own free lists and does not map pages each time
_ALIGN = 64  # a cache line, and the widest vector register
IDLE = 256 * 2**20  # idle bytes always allowed
_PAGE = 4096


class _Block(NamedTuple):
    """Memory, and the address of its first aligned byte: to ask for that takes as long as all else."""

    memory: np.ndarray
    address: int

    @property
    def size(self) -> int:
        """Usable bytes."""
        return self.memory.nbytes - _ALIGN


class _Owner:
    """The owner of one lent block, which NumPy makes the ``base`` of an array."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (address, False)}


class _Lease(ref[_Owner]):
    """A lent block, by its owner."""

    __slots__ = ("block",)
    block: _Block


class HostPool:
    """Blocks of host memory by size (rounded to pages), lent and idle.

    Idle bytes stay below the larger of 256 MiB and half of what was ever lent at once, and, together with what is live,
    within the limit of the meter.
    """

    def __init__(self, meter: Meter = METER) -> None:
        self._meter = meter
        self._free: dict[int, list[_Block]] = {}
        self._lock = locks.lock()
        self._leases: dict[int, _Lease] = {}
        self._returned: deque[_Lease] = deque()
        """The leases whose owner has gone."""
        self._lent = self._idle = 0
        self.peak_lent_bytes = 0

    @property
    def lent_bytes(self) -> int:
        """Bytes of the blocks that arrays use."""
        self._take_back()
        return self._lent

    @property
    def idle_bytes(self) -> int:
        """Bytes of the blocks that wait to be lent again."""
        self._take_back()
        return self._idle

    def free_idle(self, nbytes: int) -> None:
        """So many bytes are to be taken from the system: give up idle blocks for them, if there is a limit."""
        self._take_back()
        with self._lock:
            self._shrink(nbytes)

    def _available(self) -> float:
        """Bytes that the limit leaves beside what is live."""
        limit = self._meter.limit
        return limit if limit == inf else limit - max(self._lent, self._meter.live_bytes)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
        """An uninitialised C-contiguous array of ``shape``."""
        if self._returned:
            self._take_back()
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LEAST or dtype.kind == "V":
            return np.empty(shape, dtype)
        size = -(-nbytes // _PAGE) * _PAGE
        with self._lock:
            blocks = self._free.get(size)
            if blocks:
                block = blocks.pop()
                self._idle -= size
                if not blocks:
                    del self._free[size]
            else:
                self._shrink(size)
                memory = np.empty(size + _ALIGN, np.uint8)
                address = memory.ctypes.data
                block = _Block(memory, address + -address % _ALIGN)
            owner = _Owner(block.address, shape, dtype)
            lease = _Lease(owner, self._returned.append)
            lease.block = block
            self._leases[id(lease)] = lease
            self._lent += size
            self.peak_lent_bytes = max(self.peak_lent_bytes, self._lent)
        return np.asarray(owner)

    def _shrink(self, nbytes: int) -> None:
        """Give up idle blocks until so many bytes more fit within the limit."""
        available = self._available() - nbytes
        while self._free and self._idle > available:
            size, blocks = next(iter(self._free.items()))
            if blocks:
                blocks.pop()
                self._idle -= size
            else:
                del self._free[size]

    def _take_back(self) -> None:
        """Keep the returned blocks while few enough bytes lie idle, and let the others go."""
        while self._returned:
            with self._lock:
                if not self._returned:  # another thread was faster
                    return
                lease = self._returned.popleft()
                if self._leases.pop(id(lease), None) is None:  # an interrupt came before it was lent
                    continue
                size = lease.block.size
                self._lent -= size
                if self._idle + size <= min(max(IDLE, self.peak_lent_bytes // 2), self._available()):
                    self._free.setdefault(size, []).append(lease.block)
                    self._idle += size

    def free_all_blocks(self) -> None:
        """Give every idle block back to the system."""
        self._take_back()
        with self._lock:
            self._free.clear()
            self._idle, self._lent = 0, sum([lease.block.size for lease in self._leases.values()])


POOL = HostPool()
