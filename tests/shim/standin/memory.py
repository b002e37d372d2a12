"""Device memory: host bytes, poisoned when handed out, from a pool that counts as CuPy's does."""

from __future__ import annotations

import sys
import threading
import types
import weakref
from typing import Any, NoReturn

import numpy as np

from . import capturing, state

UNIT = 512
lock = threading.RLock()
#: Every allocation alive, by address: (bytes asked for, the memory).
live: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
#: The host shim, once a kernel was compiled; it is told of each allocation.
shim: Any = None


class OutOfMemoryError(MemoryError):
    """No room: the size asked for, the bytes held so far, and the pool's limit (0 for none)."""

    def __init__(self, size: int, total: int, limit: int = 0):
        self._size, self._total, self._limit = size, total, limit
        extra = f", limit set to: {limit:,} bytes" if limit else ""
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes{extra}).")

    def __reduce__(self):
        return type(self), (self._size, self._total, self._limit)


def raw(pointer: int, size: int) -> np.ndarray:
    """The bytes at an address, as an array that owns nothing."""
    if not size:
        return np.empty(0, np.uint8)
    interface = {"data": (pointer, False), "shape": (size,), "typestr": "|u1", "version": 3}
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def check_range(pointer: int, size: int) -> None:
    """Raise unless these bytes lie inside one live allocation."""
    for memory in list(live.values()):
        if memory.ptr <= pointer and pointer + size <= memory.ptr + memory.size:
            return
    illegal()


def illegal() -> NoReturn:
    """Raise as for an access to memory that is not there."""
    raise state.CUDARuntimeError(700, "cudaErrorIllegalAddress: an illegal memory access was encountered")


def set_shim(module: Any) -> None:
    """Tell the host shim of all memory alive, and of all memory to come."""
    global shim
    if module is not shim:
        shim = module
        for memory in list(live.values()):
            shim.register(memory.ptr, memory.size)


class Segment:
    """A piece of a block: free, or in use."""

    def __init__(self, block: Block, offset: int, size: int):
        self.block, self.offset, self.size, self.free = block, offset, size, True

    @property
    def ptr(self) -> int:
        return self.block.ptr + self.offset


class Block:
    """What one cudaMalloc gave: bytes aligned as on a device, cut into segments."""

    def __init__(self, size: int):
        self.storage = np.empty(size + UNIT, np.uint8)
        self.size = size
        self.ptr = -(-self.storage.ctypes.data // UNIT) * UNIT
        self.segments = [Segment(self, 0, size)]

    def cut(self, segment: Segment, size: int) -> None:
        """Take the first bytes of a free segment."""
        segment.free = False
        if segment.size > size:
            rest = Segment(self, segment.offset + size, segment.size - size)
            self.segments.insert(self.segments.index(segment) + 1, rest)
            segment.size = size

    def release(self, segment: Segment) -> None:
        """Free a segment and merge it with its free neighbours."""
        segment.free = True
        merged: list[Segment] = []
        for one in self.segments:
            if merged and merged[-1].free and one.free:
                merged[-1].size += one.size
            else:
                merged.append(one)
        self.segments = merged


class BaseMemory:
    """Memory on a device: where, how much, and which device."""

    ptr, size, device_id = 0, 0, -1
    #: Of a graph's address: a reference to the memory that was there.
    lender: Any = None

    @property
    def device(self):
        from .cuda import Device

        return Device(self.device_id)

    def __int__(self) -> int:
        return self.ptr

    def _hand_out(self, block: Block | None) -> None:
        self._block = block
        if self.size:
            raw(self.ptr, self.size).fill(0xFF)
            live[self.ptr] = self
            if shim:
                shim.register(self.ptr, self.size)

    def _take_back(self) -> None:
        if self.size:
            live.pop(self.ptr, None)
            if shim:
                shim.unregister(self.ptr)


class Memory(BaseMemory):
    """Memory outside the pool, given back when the last reference goes."""

    def __init__(self, size: int):
        from .cuda import Device

        state.require_device()
        if size > Device().mem_info[0]:
            raise state.CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")
        self.size, self.device_id, self.since = size, state.thread.device, state.process.resets
        block = Block(size) if size else None
        self.ptr = block.ptr if block else 0
        self._hand_out(block)
        state.log("malloc", name="new", writes=((self.ptr, size),))

    def __del__(self, at_exit: Any = sys.is_finalizing):
        if not at_exit():
            self._take_back()
            if self._block is not None:
                self._block.segments.clear()  # they refer to the block


def outside(device: int) -> int:
    """Bytes of a device that are held outside its pool."""
    ours = (one for one in list(live.values()) if type(one) is Memory and one.since == state.process.resets)
    return sum(one.size for one in ours if one.device_id == device)


class UnownedMemory(BaseMemory):
    """Memory that another library owns; the owner is kept alive."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1):
        self.ptr, self.size, self._owner = ptr, size, owner
        self.device_id = state.thread.device if device_id < 0 else device_id


class PooledMemory(BaseMemory):
    """Memory of the pool, which gets it back when the last reference goes."""

    def __init__(self, segment: Segment, pool: Any):
        self.ptr, self.size, self.device_id = segment.ptr, segment.size, pool.device_id
        self._segment, self.pool = segment, pool
        self.identity = self.ptr
        self._hand_out(segment.block)

    def free(self) -> None:
        """Return the bytes to the arena they came from."""
        segment, self._segment = self._segment, None
        if segment is not None:
            hooks("free_preprocess", device_id=self.device_id, mem_size=self.size, mem_ptr=self.ptr, pmem_id=id(self))
            with lock:
                self._take_back()
                state.log("free", self.pool.arena_of(segment.block), writes=((self.ptr, self.size),))
                segment.block.release(segment)
            hooks("free_postprocess", device_id=self.device_id, mem_size=self.size, mem_ptr=self.ptr, pmem_id=id(self))

    def __del__(self, at_exit: Any = sys.is_finalizing):  # at exit this module's names may be None already
        if not at_exit():
            self.free()


def hooks(method: str, **fields: int) -> None:
    """Call this thread's memory hooks."""
    for hook in list(state.thread.hooks.values()):
        getattr(hook, method)(**fields)


class MemoryPointer:
    """A place inside a piece of memory."""

    def __init__(self, mem: BaseMemory, offset: int):
        self.mem, self.device_id = mem, mem.device_id
        self.ptr = mem.ptr + offset

    @property
    def device(self):
        return self.mem.device

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    __radd__ = __add__

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -offset

    def memset(self, value: int, size: int) -> None:
        """Fill bytes, in order with the null stream."""
        self.memset_async(value, size, _null())

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        """Fill bytes, in order with a stream."""
        if capturing.written(MemoryPointer.memset_async, self, value, size, stream=stream and stream.ptr):
            return
        raw(self.ptr, size).fill(value)
        state.log("memset", stream and stream.ptr, writes=((self.ptr, size),))

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        """Copy from another place on a device."""
        if capturing.written(MemoryPointer.copy_from_device_async, self, src, size, stream=stream and stream.ptr):
            return
        raw(self.ptr, size)[...] = raw(src.ptr, size)
        state.log("d2d", stream and stream.ptr, reads=((src.ptr, size),), writes=((self.ptr, size),))

    def copy_from_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        """Copy from host memory, given as an address."""
        self._copy("h2d", mem, size, stream)

    def copy_to_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        """Copy to host memory, given as an address."""
        self._copy("d2h", mem, size, stream)

    def _copy(self, kind: str, mem: Any, size: int, stream: Any, name: str = "") -> None:
        capturing.refuse(stream and stream.ptr, "a copy between host and device", RuntimeError)
        if size:
            mem = mem if isinstance(mem, int) else mem.value
            here, there = ((self.ptr, size),), ((mem, size),)
            pointer = None if stream is None else stream.ptr
            if kind == "h2d":
                raw(self.ptr, size)[...] = raw(mem, size)
                state.log(kind, pointer, name=name, writes=here, host=there)
            else:
                raw(mem, size)[...] = raw(self.ptr, size)
                state.log(kind, pointer, name=name, reads=here, host=there)

    def copy_from_device(self, src: MemoryPointer, size: int) -> None:
        self.copy_from_device_async(src, size, _null())

    def copy_from_host(self, mem: Any, size: int) -> None:
        self._copy("h2d", mem, size, _null(), "waits")

    def copy_to_host(self, mem: Any, size: int) -> None:
        self._copy("d2h", mem, size, _null(), "waits")


def _null():
    from .cuda import Stream

    return Stream.null
