"""The last block of a launch: found whatever its memory held before, in any order of blocks, and again afterwards."""

import numpy as np
import pytest
from shim.trial import ORDERS

from tapegrad.device.kernel import options

pytestmark = pytest.mark.sampled(1 / 6)

BLOCKS, GROUPS = 9, 3
TEXT = """#include "reduce.cuh"
extern "C" __global__ void last(float* parts, tg_uint64* arrived, float* totals, int* lasts) {
    const int mine = blockIdx.x * gridDim.y + blockIdx.y;
    if (threadIdx.x == 7) parts[mine] = mine + 1.0f;
    if (!tg_is_last_block(arrived + blockIdx.x, gridDim.y)) return;
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int c = 0; c < gridDim.y; ++c) total += parts[blockIdx.x * gridDim.y + c];
        totals[blockIdx.x] = total;
        atomicAdd(lasts + blockIdx.x, 1);
    }
}"""
RUBBISH = {
    "zeros": 0, "ones": 0xFFFFFFFFFFFFFFFF, "floats": 0x3F8000003F800000, "a count of too few": 0x0000000000000009,
    "NaN": 0x7FC000007FC00000, "rubbish": 0xA5A5A5A5A5A5A5A5,
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH.keys())
def test_one_block_is_the_last(rubbish, order, watched):
    function = watched.compile(TEXT, "last", options())
    arrived = np.full(GROUPS, rubbish, np.uint64)
    for _ in range(3):  # as a CUDA graph that is launched again
        parts, totals, lasts = (np.zeros(n, t) for n, t in ((GROUPS * BLOCKS, "f4"), (GROUPS, "f4"), (GROUPS, "i4")))
        function((GROUPS, BLOCKS), (64,), (parts, arrived, totals, lasts), order=order)
        np.testing.assert_array_equal(lasts, 1)
        np.testing.assert_array_equal(totals, parts.reshape(GROUPS, BLOCKS).sum(axis=1))
        np.testing.assert_array_equal(arrived, 0)  # nothing is left that a later launch might take for its own
