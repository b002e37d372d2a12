"""Random bits: counter-based Philox4x64-10, and the state of NumPy's and Python's own generators."""

from __future__ import annotations

import ctypes
import hashlib
import random
from math import prod
from typing import Any

import numpy as np

from tapegrad.device.pool import POOL
from tapegrad.device.types import Array, DType


def philox(key: int, counter: int, words: int) -> Array:
    """``words`` 64-bit words of the Philox4x64-10 stream of ``key`` from 256-bit block number ``counter`` on.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.  NumPy's Philox is the generator.
    """
    return np.random.Philox(key=key, counter=counter).random_raw(words)


def uniform(key: int, counter: int, shape: tuple[int, ...], dtype: DType) -> Array:
    """Uniform floats in [0, 1): the top 53 bits of a word for float64, 24 bits of a half word for float32."""
    out = POOL.empty(shape, dtype)
    if dtype == np.float64:
        words = philox(key, counter, out.size)
        words >>= np.uint64(11)
        np.multiply(words.reshape(shape), 2.0**-53, out=out)
    else:
        words = philox(key, counter, (out.size + 1) // 2).view(np.uint32)[: out.size]
        words >>= np.uint32(8)
        np.multiply(words.reshape(shape), np.float32(2.0**-24), out=out, casting="unsafe", dtype=np.float32)
    return out


LANES, WORDS, FIELDS = 256, 4, 4
"""Sixteen-bit numbers come in tiles: 256 lanes (threads) beside each other, each with the 4 words of one Philox block,
each word with 4 fields.  Element ``i`` is field ``i % 4`` of word ``i / 1024 % 4`` of lane ``i / 4 % 256`` of tile
``i / 4096``, so a thread that walks a tile word by word reads and writes beside its neighbours."""


def blocks16(size: int) -> int:
    """How many Philox blocks :func:`bits16` uses up for ``size`` numbers."""
    return -(-size // (LANES * WORDS * FIELDS)) * LANES


def bits16(key: int, counter: int, shape: tuple[int, ...]) -> Array:
    """Uniform numbers of 16 bits, four to a word, in the order of ``LANES``."""
    size = prod(shape)
    words = philox(key, counter, blocks16(size) * WORDS).reshape(-1, LANES, WORDS)
    fields = np.ascontiguousarray(words.transpose(0, 2, 1)).view("<u2").reshape(-1)
    return fields[:size].reshape(shape)


def bits16_between(key: int, counter: int, start: int, stop: int) -> Array:
    """Numbers ``start`` to ``stop`` of those that :func:`bits16` gives, by the tiles in which they lie."""
    tile = LANES * WORDS * FIELDS
    first, last = start // tile, -(-stop // tile)
    return bits16(key, counter + first * LANES, ((last - first) * tile,))[start - first * tile : stop - first * tile]


HOSTS = ("NumPy's global generator (np.random)", "Python's generator (random)")
"""The generators of the host, which all threads share."""


def host_state() -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The states of the generators in ``HOSTS``."""
    return np.random.get_state(legacy=False), random.getstate()


def moved(a: tuple[object, ...], b: tuple[object, ...]) -> tuple[int, ...]:
    """Positions among ``HOSTS`` of those that are in another state in ``b`` than in ``a``."""
    return tuple(i for i in range(len(HOSTS)) if not _same(a[i], b[i]))


def _same(a: object, b: object) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(x, b[key]) for key, x in a.items())
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else bool(a == b)


def words_mark() -> Any:
    """The words of NumPy's global generator and its place in them, a hundred times cheaper than :func:`host_state`.

    It changes at every draw, except that a single normal number may have been computed with the last one.
    """
    global _words
    generator = np.random.mtrand.get_bit_generator()
    if _words[0] is not generator:
        mersenne = type(generator) is np.random.MT19937
        _words = generator, generator.ctypes.state_address if mersenne else None
    return repr(generator.state) if _words[1] is None else ctypes.string_at(_words[1], _MT19937_BYTES)


_words: tuple[Any, Any] = None, None  # the generator, and where its state lies
_MT19937_BYTES = 625 * 4  # 624 words and a position


def host_state_after(state: tuple[Any, ...], mark: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """:func:`host_state`, cheaper where NumPy's generator has not moved since ``state`` and ``mark`` were taken."""
    if words_mark() == mark and not state[0].get("has_gauss", 1):
        return state[0], random.getstate()
    return host_state()


def python_mark() -> Any:
    """The words of Python's generator and its place in them."""
    return random.getstate()[1]


def set_host_state(state: tuple[Any, ...], which: tuple[int, ...] = (0, 1)) -> tuple[Any, ...]:
    """Set the generators ``which`` to ``state``; the states of before.

    No other thread draws from NumPy's in between.
    """
    with np.random.mtrand.get_bit_generator().lock:
        before = host_state()
        if 0 in which:
            np.random.set_state(state[0])
        if 1 in which:
            random.setstate(state[1])
        return before


def digest(text: str) -> str:
    """A short name of a text."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def checksum(x: Array) -> bytes:
    """A checksum of an array's bits."""
    octets: Any = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return hashlib.blake2b(octets, digest_size=16).digest()
