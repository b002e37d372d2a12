"""The record of wrong values: a warp joins its own before it reaches over the bus, and the extremes of all are told."""

import numpy as np
import pytest
from shim.host import register, unregister
from shim.trial import ORDERS

from tapegrad.device.checks import RECORD, Checks
from tapegrad.device.kernel import options

COUNTING = """#include "reduce.cuh"
#define TG_COUNTED (atomicAdd(reinterpret_cast<unsigned long long*>(at + 1), 1ULL))
#define atomicCAS(...) (TG_COUNTED, atomicCAS(__VA_ARGS__))
#define atomicMin(...) (TG_COUNTED, atomicMin(__VA_ARGS__))
#define atomicMax(...) (TG_COUNTED, atomicMax(__VA_ARGS__))
#include "check.cu"
"""
"""The kernel, counting its accesses to the record behind it."""
GRID, THREADS = 3, 64


@pytest.mark.parametrize("order", ORDERS)
def test_a_warp_tells_all_of_its_wrong_values_together(order, watched):
    memory = np.zeros(RECORD.itemsize + 8, np.uint8)
    record, count = memory[:-8].view(RECORD), memory[-8:].view(np.uint64)
    register(memory.ctypes.data, memory.nbytes)
    checks = Checks(memory[:-8])
    within = watched.compile(COUNTING, "tg_within", options())
    x = np.random.default_rng(0).permutation(np.arange(-700, 700)).astype(np.int64)

    def told(low: int, high: int) -> tuple[int, int, int]:
        checks.clear()
        count[:] = 0
        within((GRID,), (THREADS,), (x, checks.argument(3, low, high), np.int64(x.size)), order=order)
        ticket, kind, *bounds, least, most = record[0].item()
        assert not ticket or [kind, *bounds] == [3, low, high]
        return least, most, int(count[0])

    assert told(-700, 699)[2] == 0
    assert told(0, 9) == (-700, 699, 3 * GRID * THREADS // 32)
    assert told(-699, 699) == (-700, -700, 3)
    unregister(memory.ctypes.data)
