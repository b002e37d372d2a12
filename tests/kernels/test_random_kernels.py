"""Philox in CUDA against NumPy's generator, bit for bit."""

import numpy as np
import pytest

from tapegrad.device.dtypes import float32, float64, uint16
from tapegrad.device.kernel import options
from tapegrad.device.numerics import bits

pytestmark = pytest.mark.sampled(1 / 6)

KEYS = [(0, 0), (12345, 7), ((1 << 127) + 98765432109876543210, (1 << 64) - 3), ((1 << 128) - 1, (1 << 256) - 2)]


def _words(number, count):
    return [np.uint64(number >> 64 * i & (1 << 64) - 1) for i in range(count)]


_WORDS = """
#include "philox.cuh"
extern "C" __global__ void words(unsigned long long* out, int n, unsigned long long key0, unsigned long long key1,
                                 unsigned long long c0, unsigned long long c1, unsigned long long c2,
                                 unsigned long long c3) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tg_philox_at(key0, key1, c0, c1, c2, c3, i / 4).at[i % 4];
}
"""

_DRAWN = """
#include "scalar.cuh"
#include "drawn.cuh"
extern "C" __global__ void drawn(T* out, int n, tg_uint64 lo, tg_uint64 hi, tg_uint64 at) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    if (i + PACK > n) return;
    const KIND<T, PACK> found(lo, hi, at, i);
    for (int j = 0; j < PACK; ++j) out[i + j] = found.at(j);
}
"""


@pytest.mark.parametrize("n", [0, 1, 3, 4, 1023, 4097])
@pytest.mark.parametrize("key, counter", KEYS)
def test_words(emulated, key, counter, n):
    found = emulated.empty((n,), np.uint64)
    function = emulated.compile(_WORDS, "words", options())
    if n:
        emulated.launch(function, (-(-n // 256),), (256,), (found, np.int32(n), *_words(key, 2), *_words(counter, 4)))
    np.testing.assert_array_equal(found, np.random.Philox(key=key, counter=counter).random_raw(n))


@pytest.mark.parametrize("name, dtype", [("uniform", float32), ("uniform", float64), ("bits16", uint16)])
@pytest.mark.parametrize("pack", [1, 2, 4, 8, 16])
def test_packs_of_any_length_draw_the_same(emulated, watched, name, dtype, pack):
    key, counter, n = KEYS[2][0], 77, 8192
    expected = bits.bits16(key, counter, (n,)) if name == "bits16" else bits.uniform(key, counter, (n,), dtype)
    macros = (f"-DT=tg_{dtype.name}", f"-DPACK={pack}", f"-DKIND=tg_{name}")
    for device, count in ((emulated, n), (watched, 64)):
        found = device.empty((count,), dtype)
        function = device.compile(_DRAWN, "drawn", (*options(), *macros))
        blocks = -(-count // (64 * pack))
        device.launch(function, (blocks,), (64,), (found, np.int32(count), *_words(key, 2), np.uint64(counter)))
        np.testing.assert_array_equal(found, expected[:count])


_FIELDS = """
#include "philox.cuh"
extern "C" __global__ void fields(unsigned short* half, unsigned int* word, unsigned long long key) {
    const tg_philox_block block = tg_philox_at(key, 0, 0, 0, 0, 0, threadIdx.x);
    for (int i = 0; i < 16; ++i) half[threadIdx.x * 16 + i] = tg_field16(block, i);
    for (int i = 0; i < 8; ++i) word[threadIdx.x * 8 + i] = tg_field32(block, i);
}
"""


def test_fields(emulated):
    half, word = np.empty(96, np.uint16), np.empty(48, np.uint32)
    emulated.launch(emulated.compile(_FIELDS, "fields", options()), (1,), (6,), (half, word, np.uint64(5)))
    words = bits.philox(5, 0, 24)
    np.testing.assert_array_equal(half, words.view(np.uint16))
    np.testing.assert_array_equal(word, words.view(np.uint32))
