"""Philox in CUDA against NumPy's generator, bit for bit."""

import numpy as np
import pytest

from tapegrad.device import bits
from tapegrad.device.dtypes import float32, float64
from tapegrad.device.kernel import folder, options

KEYS = [(0, 0), (12345, 7), ((1 << 127) + 98765432109876543210, (1 << 64) - 3), ((1 << 128) - 1, (1 << 256) - 2)]


def _words(number, count):
    return [np.uint64(number >> 64 * i & (1 << 64) - 1) for i in range(count)]


def _run(device, name, out, key, counter, macros=()):
    function = device.compile((folder() / "random.cu").read_text(), f"tg_random_{name}", (*options(), *macros))
    per_thread = 4 if out.itemsize == 8 else 8
    blocks = max(1, -(-out.size // (256 * per_thread)))
    device.launch(function, (blocks,), (256,), (out, np.int64(out.size), *_words(key, 2), *_words(counter, 4)))
    return out


@pytest.mark.parametrize("n", [0, 1, 3, 4, 1023, 4097])
@pytest.mark.parametrize("key, counter", KEYS)
def test_words(emulated, key, counter, n):
    found = _run(emulated, "words", emulated.empty((n,), np.uint64), key, counter)
    np.testing.assert_array_equal(found, np.random.Philox(key=key, counter=counter).random_raw(n))


@pytest.mark.parametrize("dtype", [float32, float64])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 1023, 4100])
def test_uniform(emulated, dtype, n):
    key, counter = KEYS[2]
    expected = bits.uniform(key, counter, (n,), dtype)
    room = emulated.empty((n + 1,), dtype)
    for out in (room[:n], room[1:]):  # the second begins between two packs
        found = _run(emulated, "uniform", out, key, counter, (f"-DT=tg_{dtype.name}",))
        np.testing.assert_array_equal(found, expected)


def test_watched(watched):
    key, counter = KEYS[1]
    found = _run(watched, "words", watched.empty((37,), np.uint64), key, counter)
    np.testing.assert_array_equal(found, bits.philox(key, counter, 37))
    found = _run(watched, "uniform", watched.empty((37,), float32), key, counter, ("-DT=tg_float32",))
    np.testing.assert_array_equal(found, bits.uniform(key, counter, (37,), float32))


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
