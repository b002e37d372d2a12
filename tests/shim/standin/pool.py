"""Pools: CuPy's own arithmetic of rounding, arenas, limits and hooks, over host bytes."""

from __future__ import annotations

import gc
from typing import Any

from . import state
from .memory import UNIT, Block, Memory, MemoryPointer, OutOfMemoryError, PooledMemory, Segment, hooks, lock


class SingleDevicePool:
    """The blocks of one device, an arena a stream."""

    def __init__(self, device_id: int):
        self.device_id, self.limit = device_id, 0
        self.arenas: dict[int, list[Block]] = {}

    def arena_of(self, block: Block) -> int:
        """The stream whose arena holds a block."""
        return next((stream for stream, blocks in self.arenas.items() if block in blocks), 0)

    def blocks(self) -> list[Block]:
        return [block for blocks in self.arenas.values() for block in blocks]

    def total(self) -> int:
        return sum(block.size for block in self.blocks())

    def free_segments(self, stream: int | None = None) -> list[Segment]:
        blocks = self.blocks() if stream is None else self.arenas.get(stream, [])
        return [segment for block in blocks for segment in block.segments if segment.free]

    def free_all(self, stream: int | None = None) -> None:
        """Give blocks that are free as a whole back to the device."""
        for key in list(self.arenas) if stream is None else [stream]:
            blocks = self.arenas.get(key, [])
            self.arenas[key] = [b for b in blocks if len(b.segments) > 1 or not b.segments[0].free]

    def malloc(self, asked: int) -> MemoryPointer:
        """A pointer to that many bytes, rounded up."""
        state.require_device(self.device_id)
        size = -(-asked // UNIT) * UNIT
        if not size:
            return MemoryPointer(Memory(0), 0)
        hooks("malloc_preprocess", device_id=self.device_id, size=asked, mem_size=size)
        pointer = identity = 0
        try:
            with lock:
                segment, name = self._find(size)
                segment.block.cut(segment, size)
                memory = PooledMemory(segment, self)
                state.log("malloc", name=name, writes=((memory.ptr, size),))
            pointer, identity = memory.ptr, id(memory)
        finally:
            hooks("malloc_postprocess", device_id=self.device_id, size=asked, mem_size=size, mem_ptr=pointer,
                  pmem_id=identity)  # fmt: skip
        return MemoryPointer(memory, 0)

    def _find(self, size: int) -> tuple[Segment, str]:
        """A free segment, and "new" if it is all that cudaMalloc gave for it."""
        state.allocations.count += 1
        if state.allocations.count == state.config.allocation_fails_at:
            raise OutOfMemoryError(size, self.total(), self.limit)
        stream = state.stream_pointer()
        fitting = [segment for segment in self.free_segments(stream) if segment.size >= size]
        if fitting:
            return min(fitting, key=lambda segment: segment.size), ""
        limit = self.limit or state.config.memory - state.workspaces.get(self.device_id, 0)
        for remedy in (self.free_all, gc.collect, self.free_all):
            if self.total() + size > limit:
                remedy()
        if self.total() + size > limit:
            raise OutOfMemoryError(size, self.total(), self.limit)
        hooks("alloc_preprocess", device_id=self.device_id, mem_size=size)
        block = Block(size)
        self.arenas.setdefault(stream, []).append(block)
        hooks("alloc_postprocess", device_id=self.device_id, mem_size=size, mem_ptr=block.ptr)
        return block.segments[0], "new"


class MemoryPool:
    """A pool for each device; every question is about the current one."""

    def __init__(self, allocator: Any = None):
        self._pools: dict[int, SingleDevicePool] = {}

    @property
    def _pool(self) -> SingleDevicePool:
        state.require_device()
        return self._pools.setdefault(state.thread.device, SingleDevicePool(state.thread.device))

    def malloc(self, size: int) -> MemoryPointer:
        return self._pool.malloc(size)

    def free_all_blocks(self, stream: Any = None) -> None:
        self._pool.free_all(None if stream is None else stream.ptr)

    def n_free_blocks(self) -> int:
        return len(self._pool.free_segments())

    def total_bytes(self) -> int:
        return self._pool.total()

    def free_bytes(self) -> int:
        return sum(segment.size for segment in self._pool.free_segments())

    def used_bytes(self) -> int:
        return self.total_bytes() - self.free_bytes()

    def get_limit(self) -> int:
        return self._pool.limit

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        if size is not None and fraction is not None:
            raise ValueError("size and fraction cannot be specified at one time")
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError(f"memory limit fraction out of range: {fraction}")
        if size is not None and size < 0:
            raise ValueError(f"memory limit size out of range: {size}")
        self._pool.limit = int(fraction * state.config.memory) if fraction is not None else size or 0


class MemoryHook:
    """What is called around each allocation of this thread while the hook is entered."""

    name = "MemoryHook"

    def __enter__(self):
        if self.name in state.thread.hooks:
            raise KeyError(f"memory hook {self.name} already exists")
        state.thread.hooks[self.name] = self
        return self

    def __exit__(self, *error):
        del state.thread.hooks[self.name]

    def alloc_preprocess(self, **fields):
        pass

    alloc_postprocess = malloc_preprocess = malloc_postprocess = alloc_preprocess
    free_preprocess = free_postprocess = alloc_preprocess


default = MemoryPool()
_allocator: list[Any] = [default.malloc]


def set_allocator(allocator: Any = None) -> None:
    """Let a function give all device memory from now on; None, cudaMalloc itself."""
    _allocator[0] = allocator or (lambda size: MemoryPointer(Memory(size), 0))


def get_allocator() -> Any:
    """The function that gives device memory."""
    return state.thread.allocators[-1] if state.thread.allocators else _allocator[0]


class using_allocator:
    """Let a function give device memory to this thread inside the block."""

    def __init__(self, allocator: Any = None):
        self.allocator = allocator or (lambda size: MemoryPointer(Memory(size), 0))

    def __enter__(self):
        state.thread.allocators.append(self.allocator)

    def __exit__(self, *error):
        state.thread.allocators.pop()


def alloc(size: int) -> MemoryPointer:
    """Device memory of that many bytes."""
    state.require_device()
    return get_allocator()(size)
