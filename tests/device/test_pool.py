"""The pool of host memory."""

import signal
import threading

import numpy as np
import pytest
from programs.interrupts import by_timer

from tapegrad.device import pool as pools
from tapegrad.device.pool import HostPool

F32 = np.dtype("float32")


@pytest.fixture
def pool():
    return HostPool()


def test_a_block_comes_back_only_when_no_array_refers_to_it(pool):
    a = pool.empty((1000, 100), F32)
    view = a[10:20].T
    assert pool.lent_bytes >= a.nbytes and pool.idle_bytes == 0
    del a
    assert pool.idle_bytes == 0, "a view still reads the block"
    del view
    assert pool.lent_bytes == 0 and pool.idle_bytes > 0


def test_a_freed_block_is_lent_again(pool):
    a = pool.empty((1000, 100), F32)
    address = a.ctypes.data
    del a
    b = pool.empty((100, 1000), F32)
    assert b.ctypes.data == address and pool.idle_bytes == 0


def test_arrays_are_aligned_contiguous_and_writeable(pool):
    a = pool.empty((333, 111), np.dtype("float64"))
    a[...] = 1.5
    assert a.ctypes.data % 64 == 0 and a.flags.c_contiguous and a.flags.writeable and a.sum() == 1.5 * a.size


def test_small_requests_are_not_pooled(pool):
    pool.empty((10,), F32)
    pool.empty((0, 5), F32)
    assert pool.peak_lent_bytes == 0


def test_idle_memory_is_bounded_and_can_be_given_back(pool, monkeypatch):
    monkeypatch.setattr(pools, "IDLE", 2**20)
    for _ in range(3):
        held = [pool.empty((2**18 + i * 4096,), F32) for i in range(8)]
        del held
    assert pool.idle_bytes <= max(2**20, pool.peak_lent_bytes // 2)
    pool.free_all_blocks()
    assert pool.idle_bytes == 0


def test_blocks_may_be_freed_by_other_threads(pool):
    arrays = [pool.empty((2**16,), F32) for _ in range(50)]

    def drop():
        while arrays:
            try:
                arrays.pop()
            except IndexError:
                return
            pool.empty((2**16,), F32)

    workers = [threading.Thread(target=drop) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert pool.lent_bytes == 0


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="timers send the interrupts")
def test_no_interrupt_is_lost_while_arrays_come_and_go(pool):
    assert by_timer(lambda: pool.empty((2**16,), F32), 300) == (300, 300)
    a = pool.empty((2**16,), F32)
    assert a.nbytes <= pool.lent_bytes <= a.nbytes + 300 * 2**18, "an interrupt may leave out one block each time"
