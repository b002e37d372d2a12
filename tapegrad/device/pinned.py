"""Pinned host memory: slabs by size class, lent and idle, with a limit.

A device copies from and to pinned memory by itself, so a copy overlaps with kernels; but pinning is slow, and no other
program can use pinned pages.  So slabs are kept and lent again.  CuPy's own pool rounds to powers of two, which may
waste half; here less than an eighth is wasted.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tapegrad.core import locks
from tapegrad.errors import OffloadError, PageableWarning

_STEPS = 8  # classes from one power of two to the next
_LEAST = 512  # what CuPy rounds device memory to
CHUNK = 4 * 2**20  # pinned at once and cut into slabs: pinning takes as long for a page as for a megabyte


def size_class(nbytes: int, least: int) -> int:
    """``nbytes`` rounded up so that many sizes share slabs, in bytes, a multiple of ``least`` (a power of two).

    There are eight classes from one power of two to the next: less than an eighth is wasted, or less than ``least``.
    """
    step = max(least, (1 << (nbytes - 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step


class Slab:
    """``size`` bytes of host memory at address ``ptr``; ``last``: the event after the last copy that uses them."""

    __slots__ = ("chunk", "last", "ptr", "size")

    def __init__(self, chunk: _Chunk, ptr: int, size: int) -> None:
        self.chunk = chunk
        self.ptr = ptr
        self.size = size
        self.last: Any = None

    @property
    def pinned(self) -> bool:
        """Whether a device copies from and to it by itself."""
        return self.chunk.pinned


class _Chunk:
    """Memory that was allocated at once; it is freed with its last slab."""

    def __init__(self, memory: object, nbytes: int, slabs: int, pinned: bool) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.slabs = slabs
        self.pinned = pinned


class Slabs:
    """Pinned slabs, by size class.

    ``allocate`` pins a number of bytes (``cupy.cuda.PinnedMemory``); ``limit``: bytes that may be pinned (default:
    half of the machine's memory).  Beyond it, or where pinning fails, slabs are ordinary memory: right, but a copy
    then keeps the caller waiting; PageableWarning says so once.
    """

    def __init__(self, allocate: Callable[[int], object], limit: int | None = None) -> None:
        self.limit = _half_of_memory() if limit is None else limit
        self.pinned_bytes = 0
        """Bytes pinned, lent or idle."""
        self._allocate = allocate
        self._lock = locks.lock()
        self._idle: dict[int, deque[Slab]] = {}
        self._back: deque[Slab] = deque()  # given back; put in order by the next ``take``
        self._leaving: list[Slab] = []
        self._warned = False

    def take(self, nbytes: int) -> Slab:
        """A slab for ``nbytes`` (at least 1).  Its first writer waits for its ``last`` event.

        Raises OffloadError where the host has no memory left.
        """
        size = size_class(nbytes, _LEAST)
        with self._lock:
            self._sort()
            idle = self._idle.setdefault(size, deque())
            return idle.popleft() if idle else self._grow(size)

    def give(self, slab: Slab) -> None:
        """The slab is free once its ``last`` event is done.  Safe in a finaliser, which may run at any instruction."""
        self._back.append(slab)

    def trim(self) -> None:
        """Unpin every chunk of which no slab is lent."""
        with self._lock:
            self._sort()
            count: dict[_Chunk, int] = {}
            for idle in self._idle.values():
                for slab in idle:
                    count[slab.chunk] = count.get(slab.chunk, 0) + 1
            whole = {chunk for chunk, n in count.items() if n == chunk.slabs}
            for size, idle in self._idle.items():
                for slab in idle:
                    if slab.chunk in whole and slab.last is not None:
                        slab.last.synchronize()
                self._idle[size] = deque(slab for slab in idle if slab.chunk not in whole)
            self.pinned_bytes -= sum(chunk.nbytes for chunk in whole)

    def _sort(self) -> None:
        while self._back:
            slab = self._back.popleft()
            (self._idle[slab.size] if slab.pinned else self._leaving).append(slab)
        # A device that reads ordinary memory by itself (over NVLink, say) may still read it.
        self._leaving = [slab for slab in self._leaving if slab.last is not None and not slab.last.done]

    def _grow(self, size: int) -> Slab:
        count = max(1, CHUNK // size)
        if self.pinned_bytes + count * size > self.limit:
            self.trim()
        # Near the limit one slab is better than none.
        for slabs in (count, 1):
            if self.pinned_bytes + slabs * size <= self.limit:
                memory = self._pin(slabs * size)
                if memory is not None:
                    chunk = _Chunk(memory, slabs * size, slabs, pinned=True)
                    self.pinned_bytes += chunk.nbytes
                    self._idle[size] += (Slab(chunk, memory.ptr + i * size, size) for i in range(slabs))
                    return self._idle[size].popleft()
        return self._pageable(size)

    def _pin(self, nbytes: int) -> Any:
        for last in (False, True):
            try:
                return self._allocate(nbytes)
            except (MemoryError, RuntimeError):  # the runtime's error is the latter
                if not last:
                    self.trim()
        return None

    def _pageable(self, size: int) -> Slab:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"no {size} bytes of pinned host memory: {self.pinned_bytes} are pinned and the limit is {self.limit}; "
                "further copies go through ordinary memory and keep the caller waiting",
                PageableWarning,
                stacklevel=2,
            )
        try:
            memory = np.empty(size, np.uint8)
        except MemoryError as e:
            raise OffloadError(f"no {size} bytes of host memory to offload to; use tiers.Disk instead") from e
        return Slab(_Chunk(memory, size, 1, pinned=False), memory.ctypes.data, size)


def _half_of_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # not on Windows
        return 2**63
