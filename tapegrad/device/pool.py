"""Host memory: freed blocks are kept and lent again, because page faults on fresh memory cost as much as the work.

A block is lent to one array.  Its owner object is the ``base`` of that array and of every view NumPy derives from
it, so a block comes back exactly when no array refers to it any more.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from tapegrad.core import locks
from tapegrad.device.types import DType

LEAST = 128 * 1024  # smaller requests: malloc keeps its own free lists and does not map pages each time
_ALIGN = 64  # a cache line, and the widest vector register
IDLE = 256 * 2**20  # idle bytes always allowed
_PAGE = 4096


_Block = tuple[np.ndarray, int]
"""Memory, and where in it the first aligned byte lies: to ask for that takes as long as all else."""


class _Lease:
    """Owner of one lent block; gives it back when the last array on it goes."""

    __slots__ = ("__array_interface__", "block", "pool")

    def __init__(self, pool: HostPool, block: _Block, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.pool = pool
        self.block = block
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": dtype.str, "data": (block[1], False)}

    def __del__(self) -> None:
        self.pool.take_back(self.block)


class HostPool:
    """Blocks of host memory by size (rounded to pages), lent and idle.

    Idle bytes stay below the larger of 256 MiB and half of what was ever lent at once.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[_Block]] = {}
        self._lock = locks.lock()
        self.lent_bytes = 0
        self.idle_bytes = 0
        self.peak_lent_bytes = 0
        self.limit: int | None = None
        """Idle blocks are given up where they would exceed it together with what is live."""
        self.live: Callable[[], int] = lambda: self.lent_bytes

    def make_way(self, nbytes: int) -> None:
        """So many bytes are to be taken from the system: give up idle blocks for them, if there is a limit."""
        if self.limit is not None:
            with self._lock:
                self._shrink(nbytes)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
        """An uninitialised C-contiguous array of ``shape``."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LEAST or dtype.kind == "V":
            return np.empty(shape, dtype)
        size = -(-nbytes // _PAGE) * _PAGE
        with self._lock:
            blocks = self._free.get(size)
            if blocks:
                block = blocks.pop()
                self.idle_bytes -= size
                if not blocks:
                    del self._free[size]
            else:
                self._shrink(size)
                memory = np.empty(size + _ALIGN, np.uint8)
                address = memory.ctypes.data
                block = memory, address + -address % _ALIGN
            self.lent_bytes += size
            self.peak_lent_bytes = max(self.peak_lent_bytes, self.lent_bytes)
        return np.asarray(_Lease(self, block, shape, dtype))

    def _shrink(self, nbytes: int) -> None:
        """Give up idle blocks until so many bytes more fit within the limit."""
        if self.limit is None:
            return
        room = self.limit - max(self.lent_bytes, self.live()) - nbytes
        while self._free and self.idle_bytes > room:
            size, blocks = next(iter(self._free.items()))
            blocks.pop()
            self.idle_bytes -= size
            if not blocks:
                del self._free[size]

    def take_back(self, block: _Block) -> None:
        """Called by a lease: keep the block if few enough bytes lie idle, else let it go."""
        size = block[0].nbytes - _ALIGN
        with self._lock:
            self.lent_bytes -= size
            room = max(IDLE, self.peak_lent_bytes // 2)
            if self.limit is not None:
                room = min(room, self.limit - max(self.lent_bytes, self.live()))
            if self.idle_bytes + size <= room:
                self._free.setdefault(size, []).append(block)
                self.idle_bytes += size

    def free_all_blocks(self) -> None:
        """Give every idle block back to the system."""
        with self._lock:
            self._free.clear()
            self.idle_bytes = 0


POOL = HostPool()
