"""The happens-before checker: it finds each kind of race, and finds none in the same program done right."""

from __future__ import annotations

import numpy as np
import pytest

from shim import standin
from shim.happens import host_reads, host_writes, races

N = 1024


class World:
    """A device with a compute stream and a side stream, one array of ones and pinned host memory for it."""

    def __init__(self, cupy):
        self.cupy = cupy
        self.main = cupy.cuda.Stream(non_blocking=True)
        self.side = cupy.cuda.Stream(non_blocking=True)
        self.memory = cupy.cuda.PinnedMemory(8 * N)
        self.host = np.ndarray((N,), "float32", cupy.cuda.PinnedMemoryPointer(self.memory, 0))

    def array(self):
        with self.main:
            return self.cupy.ones(N, "float32")

    def kernel(self, x):
        with self.main:
            self.cupy.add(x, 1, out=x)

    def reader(self, x):
        with self.main:
            return x + 1

    def mark(self, stream):
        event = self.cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def out(self, x, ptr=None, stream=None):
        x.data.copy_to_host_async(ptr or self.memory.ptr, x.nbytes, stream or self.side)
        return self.mark(stream or self.side)

    def into(self, x, stream=None):
        x.data.copy_from_host_async(self.memory.ptr, x.nbytes, stream or self.side)
        return self.mark(stream or self.side)


@pytest.fixture
def world():
    cupy = standin.install()
    standin.configure(stream_done=False)
    yield World(cupy)
    standin.uninstall()


def missing_wait(w, right):
    """The copy starts before the kernel has written what it copies."""
    x = w.array()
    if right:
        w.side.wait_event(w.mark(w.main))
    w.out(x)


def wait_for_an_earlier_point(w, right):
    """An event stands for what came before it was recorded, not before it was waited for."""
    x = w.array()
    event = w.mark(w.main)
    w.kernel(x)
    w.side.wait_event(w.mark(w.main) if right else event)
    w.out(x)


def array_dropped_too_early(w, right):
    """The array goes while it is copied, and the pool lends its memory to the next kernel."""
    x = w.array()
    w.side.wait_event(w.mark(w.main))
    done = w.out(x)
    if right:
        w.main.wait_event(done)
    del x
    w.array()


def array_dropped_when_seen_to_be_copied(w, right):
    """As before, but it is the host that waits."""
    x = w.array()
    w.side.wait_event(w.mark(w.main))
    done = w.out(x)
    standin.configure(stream_done=right)
    assert done.done == right
    del x
    w.array()


def written_while_it_is_copied(w, right):
    """A later kernel changes the array in place."""
    x = w.array()
    w.side.wait_event(w.mark(w.main))
    done = w.out(x)
    if right:
        w.main.wait_event(done)
    w.kernel(x)


def slab_reused_too_early(w, right):
    """Another copy out goes to pinned memory that a copy in, on another stream, still reads."""
    x, y = w.array(), w.array()
    other = w.cupy.cuda.Stream(non_blocking=True)
    w.side.wait_event(w.mark(w.main))
    other.wait_event(w.mark(w.main))
    coming = w.into(x)
    if right:
        other.wait_event(coming)
    w.out(y, stream=other)


def host_read_before_synchronize(w, right):
    """The host looks at pinned memory while it is written."""
    x = w.array()
    w.side.wait_event(w.mark(w.main))
    done = w.out(x)
    if right:
        done.synchronize()
    host_reads(w.host)


def host_write_before_synchronize(w, right):
    """The host changes pinned memory while it is read."""
    x = w.array()
    host_writes(w.host)
    w.side.wait_event(w.mark(w.main))
    w.into(x)
    if right:
        w.side.synchronize()
    host_writes(w.host)


def prefetch_without_allocate_order(w, right):
    """The memory of the new array was another's, which a kernel enqueued before still reads."""
    x = w.array()
    w.reader(x)
    del x
    with w.main:
        y = w.cupy.empty(N, "float32")
    if right:
        w.side.wait_event(w.mark(w.main))
    w.into(y)


def prefetched_and_used_at_once(w, right):
    """The compute stream uses an array that is being filled."""
    with w.main:
        y = w.cupy.empty(N, "float32")
    w.side.wait_event(w.mark(w.main))
    done = w.into(y)
    if right:
        w.main.wait_event(done)
    w.reader(y)


def prefetched_array_dropped(w, right):
    """Nobody uses the prefetched array; its memory is lent again while it is being filled."""
    with w.main:
        y = w.cupy.empty(N, "float32")
    w.side.wait_event(w.mark(w.main))
    done = w.into(y)
    if right:
        w.main.wait_event(done)
    del y
    w.array()


def unpinned_while_copied(w, right):
    """Pinned memory goes before the copy is done."""
    x = w.array()
    w.side.wait_event(w.mark(w.main))
    w.out(x)
    if right:
        w.side.synchronize()
    w.host = w.memory = None


def legacy_stream(w, right):
    """The legacy default stream waits for blocking streams, and for no others."""
    one = w.cupy.cuda.Stream(non_blocking=not right)
    with one:
        x = w.cupy.ones(N, "float32")
    w.out(x, stream=w.cupy.cuda.Stream.null)


PROGRAMS = [
    missing_wait, wait_for_an_earlier_point, array_dropped_too_early, array_dropped_when_seen_to_be_copied,
    written_while_it_is_copied, slab_reused_too_early, host_read_before_synchronize, host_write_before_synchronize,
    prefetch_without_allocate_order, prefetched_and_used_at_once, prefetched_array_dropped, unpinned_while_copied,
    legacy_stream,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_race_is_found(world, program):
    program(world, right=False)
    assert races()


@pytest.mark.parametrize("program", PROGRAMS)
def test_its_twin_has_none(world, program):
    program(world, right=True)
    assert races() == []


def test_what_is_said(world):
    array_dropped_too_early(world, right=False)
    first, *_ = races()
    assert "malloc" in first and "lends again" in first and "d2h" in first and "may not have finished reading" in first
    assert f"{world.main.ptr:#x}" in first and f"{world.side.ptr:#x}" in first


def test_two_readers_do_not_race(world):
    x = world.array()
    world.side.wait_event(world.mark(world.main))
    world.out(x)
    world.reader(x)
    assert races() == []


def test_order_goes_through_a_third_stream(world):
    x = world.array()
    third = world.cupy.cuda.Stream(non_blocking=True)
    third.wait_event(world.mark(world.main))
    world.side.wait_event(world.mark(third))
    world.out(x)
    assert races() == []


def test_a_blocking_copy_is_waited_for(world):
    x = world.array()
    with world.main:
        x.get(out=world.host)
    host_reads(world.host)
    world.into(x)
    assert races() == []


def test_parts_of_an_array_are_apart(world):
    x = world.array()
    world.side.wait_event(world.mark(world.main))
    world.out(x[: N // 2])
    world.kernel(x[N // 2 :])
    assert races() == []
    world.kernel(x[N // 2 - 1 :])
    assert len(races()) == 1


def test_a_kernel_only_reads_constants(world):
    """What the pool lends, and what a raw kernel takes as ``const``."""
    code = 'extern "C" __global__ void f(const float* x, float* y, int n) { if (threadIdx.x < n) y[0] = x[0]; }'
    x, y = world.array(), world.array()
    world.side.wait_event(world.mark(world.main))
    world.out(x)
    world.out(y, world.memory.ptr + 4 * N)
    kernel = world.cupy.RawModule(code=code).get_function("f")
    with world.main:
        kernel((1,), (1,), (x, world.reader(y), np.int32(1)))
        assert races() == []
        kernel((1,), (1,), (x, y, np.int32(1)))
    assert len(races()) == 1


def test_lending_is_no_access(world):
    """Who uses the memory need not wait for the stream it was lent to, if those who had it are done."""
    x = world.array()
    world.reader(x)
    world.main.synchronize()
    del x
    with world.main:
        y = world.cupy.empty(N, "float32")
    world.into(y)
    assert races() == []


def test_new_memory_has_no_past():
    """cudaMalloc and cudaHostAlloc may give an address that they gave before."""
    entry, place = standin.state.Entry, ((4096, 512),)
    first, second = (entry("op", stream, writes=place) for stream in (7, 8))
    assert races([first, second]) and races([first, entry("malloc", 8, writes=place)])
    assert races([first, entry("malloc", 8, "new", writes=place), second]) == []
    pin, (first, second) = entry("pin", 0, host=place), (entry("d2h", stream, host=place) for stream in (7, 8))
    assert races([pin, first, second])
    assert races([pin, first, pin, second]) == []
