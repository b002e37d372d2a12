"""Slabs of pinned host memory: classes, reuse, the limit, and what serves beyond it."""

from __future__ import annotations

import gc
import warnings
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapegrad.device import pinned
from tapegrad.device.pinned import Slabs, size_class
from tapegrad.errors import OffloadError, PageableWarning

MB = 1 << 20


class Memory:
    """What ``cupy.cuda.PinnedMemory`` is: an address that is given back with the object."""

    live = 0
    room = 1 << 40

    def __init__(self, size: int) -> None:
        self.size = 0
        if Memory.live + size > Memory.room:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.bytes = np.empty(size, np.uint8)
        self.ptr, self.size = self.bytes.ctypes.data, size
        Memory.live += size

    def __del__(self) -> None:
        Memory.live -= self.size


class Copy:
    """The event of a last copy."""

    waited = done = False

    def synchronize(self) -> None:
        self.waited = True


@pytest.fixture
def slabs():
    Memory.live, Memory.room = 0, 1 << 40
    return Slabs(Memory, 64 * MB)


@given(st.integers(1, 1 << 45), st.sampled_from([512, 4096, 65536]))
def test_classes_waste_little(nbytes, least):
    size = size_class(nbytes, least)
    assert size >= nbytes and size % least == 0
    assert size - nbytes < max(least, nbytes / 8)
    assert size_class(size, least) == size, "a class serves itself"


def test_there_are_few_classes():
    sizes = {size_class(n, 512) for n in range(1 << 16, (1 << 17) + 1)}
    assert len(sizes) == 9 and max(sizes) == 1 << 17 and min(sizes) == 1 << 16


def test_slabs_do_not_overlap(slabs):
    lent = [slabs.take(n) for n in (1, 512, 513, 100_000, 100_000, 5 * MB, 3)]
    places = sorted((slab.ptr, slab.ptr + slab.size) for slab in lent)
    assert all(one[1] <= two[0] for one, two in zip(places, places[1:], strict=False))
    assert slabs.pinned_bytes == Memory.live and all(slab.pinned for slab in lent)


def test_a_slab_is_lent_again(slabs):
    one = slabs.take(5 * MB)
    slabs.give(one)
    assert slabs.take(5 * MB - 100).ptr == one.ptr
    assert slabs.take(5 * MB).ptr != one.ptr


def test_the_slab_whose_copy_is_oldest_comes_first(slabs):
    lent = [slabs.take(5 * MB) for _ in range(3)]
    for slab in lent:
        slabs.give(slab)
    assert [slabs.take(5 * MB) for _ in range(3)] == lent


def test_small_slabs_are_pinned_together():
    pins = []
    slabs = Slabs(lambda n: pins.append(n) or Memory(n), 64 * MB)
    lent = [slabs.take(1000) for _ in range(1000)]
    assert len(pins) == 1 and pins[0] <= 4 * MB and len({slab.ptr for slab in lent}) == 1000


def test_idle_memory_makes_room_below_the_limit(slabs):
    one = slabs.take(40 * MB)
    one.last = Copy()
    slabs.give(one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = slabs.take(50 * MB)
    assert other.pinned and one.last.waited, "a copy may not lose its memory"
    del one
    gc.collect()
    assert slabs.pinned_bytes == Memory.live == other.size


def test_a_chunk_stays_while_one_slab_of_it_is_lent(slabs):
    one, two = slabs.take(MB), slabs.take(MB)
    slabs.give(one)
    slabs.trim()
    assert slabs.pinned_bytes == Memory.live == 4 * MB
    assert slabs.take(MB).pinned
    slabs.give(two)
    slabs.give(one)
    del one, two
    slabs.trim()
    gc.collect()
    assert slabs.pinned_bytes == Memory.live == 0


def test_near_the_limit_one_slab_is_better_than_none():
    slabs = Slabs(Memory, 2 * MB)
    assert slabs.take(MB).pinned and slabs.take(MB).pinned
    with pytest.warns(PageableWarning):
        assert not slabs.take(MB).pinned


def test_beyond_the_limit_ordinary_memory_serves(slabs):
    held = slabs.take(60 * MB)
    with pytest.warns(PageableWarning, match=f"no {8 * MB} bytes of pinned host memory: {60 * MB} are pinned and the "):
        slab = slabs.take(8 * MB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = slabs.take(8 * MB)
    assert not slab.pinned and not again.pinned and slab.ptr != again.ptr
    slabs.give(slab)
    slabs.give(held)
    del held
    assert slabs.take(8 * MB).pinned, "ordinary memory is not kept"


def test_ordinary_memory_stays_until_its_copy_is_done(slabs):
    slabs.limit = 0
    with pytest.warns(PageableWarning):
        slab = slabs.take(MB)
    slab.last = copy = Copy()
    memory = weakref.ref(slab.chunk)
    slabs.give(slab)
    del slab
    slabs.take(MB)
    assert memory() is not None
    copy.done = True
    slabs.take(MB)
    assert memory() is None


def test_where_pinning_fails(slabs):
    idle = slabs.take(10 * MB)
    slabs.give(idle)
    del idle
    Memory.room = 12 * MB
    held = slabs.take(11 * MB)
    assert held.pinned, "what lies idle is unpinned before giving up"
    with pytest.warns(PageableWarning):
        assert not slabs.take(11 * MB).pinned
    assert slabs.pinned_bytes == Memory.live == held.size


def test_no_memory_at_all(monkeypatch):
    slabs = Slabs(Memory, 0)

    def none(*args):
        raise MemoryError

    monkeypatch.setattr(pinned.np, "empty", none)
    with pytest.warns(PageableWarning), pytest.raises(OffloadError, match=r"no \d+ bytes of host memory to offload to"):
        slabs.take(1 << 20)


def test_the_default_limit_is_half_of_the_memory(monkeypatch):
    monkeypatch.setattr(pinned.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.get, raising=False)
    assert Slabs(Memory).limit == 2_048_000
    monkeypatch.delattr(pinned.os, "sysconf")
    assert Slabs(Memory).limit > 1 << 40
